"""How long jobs keep their slots: tenants who cannot all have one at a time take turns, and a job that only waits loses its."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from motet import seeds
from motet.runtime.slots import FREE, Claim, Rule

TURN_SECONDS = 60.0
"""By how much a tenant may get ahead of one that is entitled to as much: a turn goes from one behind to one ahead, and takes
two of these at least."""
LOOK_SECONDS = 6.0
"""How often it is worth to look whether a turn is over."""
MAX_IDLE = 120.0
"""Seconds that a job keeps its slot while it waits for scores and asks nothing of the device."""


class SlotTurns:
    """Counts the slots that tenants hold over time.

    A tenant that comes starts level with the one that has had least, or a part of a round later: another part on each host, so
    that it does not wait on all of them at once. Nobody is more than two turns behind whoever has had most: waiting, for
    whatever reason, is no credit beyond that.
    """

    def __init__(self, host: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """`host` is its name where there are several."""
        self.had: dict[str, float] = {}
        """Turns of a slot by tenant, per share, of those that have a slot or want one."""
        self._host, self._clock = host, clock
        self._holding: tuple[Claim, ...] = ()
        self._since = clock()
        self._wanted = False

    @property
    def due(self) -> bool:
        """Whether a look may show that a turn is over."""
        return self._wanted and len(self.had) > 1 and self._clock() - self._since >= LOOK_SECONDS

    def look(self, running: Sequence[Claim], queued: Sequence[Claim], slots: int, rules: Mapping[str, Rule]) -> None:
        """Count the time since the last look.

        Args:
            running: jobs that have one of the slots.
            queued: jobs that want one.
            slots: how many there are.
            rules: of tenants; those that are not named are free.
        """
        now, had = self._clock(), self.had
        turns, self._since = (now - self._since) / TURN_SECONDS, now
        for claim in self._holding:
            had[claim.tenant] += turns * claim.slots / rules.get(claim.tenant, FREE).share
        there = {claim.tenant for claim in (*running, *queued)}
        before = [had[tenant] for tenant in there if tenant in had]
        least = min(before, default=0.0)
        most = max(before, default=0.0)
        late = len(there) / max(1, slots) if self._host else 0.0
        self.had = {
            tenant: max(
                had[tenant] if tenant in had else least + late * self._part_of_round(tenant),
                most - 2 / rules.get(tenant, FREE).share,
            )
            for tenant in there
        }
        self._wanted = bool(queued)

    def hold(self, running: Sequence[Claim]) -> None:
        """Say who has a slot from the last look on."""
        self._holding = tuple(running)

    def _part_of_round(self, tenant: str) -> float:
        """How late a tenant is on this host, from 0 to 1."""
        return seeds.key(0, f"turn/{self._host}/{tenant}") / 2**64


class IdleSlotTimeouts:
    """When a job that only waits loses its slot.

    The time doubles each time that it is preempted without a step since the last time, so that slow rewards get on too.
    """

    def __init__(self, seconds: float = MAX_IDLE, clock: Callable[[], float] = time.monotonic) -> None:
        """`seconds` is how long a job may wait the first time."""
        self._seconds, self._clock = seconds, clock
        self._since: dict[str, float] = {}
        self._preemptions: dict[str, tuple[int, int]] = {}
        """The step at which a job was preempted last, and how often at that step."""

    def expired(self, job: str, step: int, *, waits: bool) -> bool:
        """Whether a job has waited for too long; asked again and again.

        Args:
            job: its name.
            step: steps that it has done.
            waits: whether it waits now.
        """
        if not waits:
            self._since.pop(job, None)
            return False
        waited = self._clock() - self._since.setdefault(job, self._clock())
        return waited >= self._seconds * 2.0 ** self._times(job, step)

    def preempted(self, job: str, step: int) -> None:
        """Count that a job lost its slot after `step` steps."""
        self._since.pop(job, None)
        self._preemptions[job] = step, self._times(job, step) + 1

    def forget(self, job: str) -> None:
        """Drop what is known of a job that has ended."""
        self._since.pop(job, None)
        self._preemptions.pop(job, None)

    def _times(self, job: str, step: int) -> int:
        at, times = self._preemptions.get(job, (step, 0))
        return times if at == step else 0
