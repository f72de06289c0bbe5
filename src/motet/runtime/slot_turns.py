"""How long jobs keep their slots, and when they start.

Tenants take turns if slots are scarce. A job that only waits loses its slot, and one whose step lasts, its step.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from motet.core import seeds
from motet.core.device import BusyTime
from motet.runtime.slots import FREE, Claim, Rule

TURN_SECONDS = 60.0
"""Lead that a tenant may have over another with the same share.

A turn moves a slot from a tenant that is behind by this much to one that is ahead, so it lasts at least twice this
long.
"""
LOOK_SECONDS = 6.0
"""Seconds between checks whether a turn is over."""
STEP_SECONDS = 60.0
"""Seconds that a step may go on after its job must give the slot away."""
MAX_IDLE = 120.0
"""Seconds that a job keeps its slot while it waits for scores without using the device."""
MOST_REST = 10.0
"""Longest wait of a tenant after a start, in seconds."""
_LOOKS = 0.5
"""Seconds between checks whether a start that waits was given up."""


class SlotTurns:
    """Counts the slots that tenants hold over time.

    A new tenant starts level with the tenant that has had the least, or up to one round later. That delay differs by
    host, so that it does not wait on all hosts at once. No tenant falls more than two turns behind the leader: waiting
    longer earns no credit.
    """

    def __init__(self, host: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """`host` is the host's name if there are several."""
        self.had: dict[str, float] = {}
        """Slot turns per share, of tenants that have a slot or want one."""
        self._host, self._clock = host, clock
        self._holding: tuple[Claim, ...] = ()
        self._since = clock()
        self._wanted = False

    @property
    def due(self) -> bool:
        """Whether a turn may be over."""
        return self._wanted and len(self.had) > 1 and self._clock() - self._since >= LOOK_SECONDS

    def update(self, running: Sequence[Claim], queued: Sequence[Claim], slots: int, rules: Mapping[str, Rule]) -> None:
        """Count the time since the last call; arguments as of `admitted`."""
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
                had[tenant] if tenant in had else least + late * seeds.key(0, f"turn/{self._host}/{tenant}") / 2**64,
                most - 2 / rules.get(tenant, FREE).share,
            )
            for tenant in there
        }
        self._wanted = bool(queued)

    def hold(self, running: Sequence[Claim]) -> None:
        """Set the jobs that hold slots from the last `update` on."""
        self._holding = tuple(running)


class SlotTimeouts:
    """Decides when a job that only waits loses its slot.

    The limit doubles with each preemption without progress in between, so that slow jobs still progress.
    """

    def __init__(self, seconds: float = MAX_IDLE, clock: Callable[[], float] = time.monotonic) -> None:
        """`seconds` is the first limit."""
        self._seconds, self._clock = seconds, clock
        self._since: dict[str, float] = {}
        self._preemptions: dict[str, tuple[int, int]] = {}
        """The progress at a job's last preemption, and the number of preemptions there."""

    def expired(self, job: str, step: int, *, waits: bool) -> bool:
        """Whether a job that has done `step` steps has waited too long; call it repeatedly."""
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
        """Remove a job that has ended."""
        self._since.pop(job, None)
        self._preemptions.pop(job, None)

    def _times(self, job: str, step: int) -> int:
        at, times = self._preemptions.get(job, (step, 0))
        return times if at == step else 0


@dataclass
class _Turn:
    """A running job's step, or its stay in its slot since it took it."""

    step: int
    device_seconds: float
    """Of the job until then."""
    begun: float
    must_go: float | None = None
    """Since when the job must leave; None while it may stay."""


class StepTurns:
    """Decides whose step is dropped, and who may stay longer because its step was dropped before.

    A step that was dropped gets twice the device seconds at its job's next turn, and so on until it ends. One job at a time
    has such a longer turn, those that waited longest first, and another gives way meanwhile.
    """

    def __init__(
        self,
        busy: BusyTime,
        slots: int,
        seconds: float = STEP_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`busy` has the device seconds of jobs; a step may go on for `seconds` after its job must leave."""
        self._busy, self._slots, self._seconds, self._clock = busy, slots, seconds, clock
        self._turns: dict[str, _Turn] = {}
        self.granted: dict[str, float] = {}
        """Device seconds that a job whose step was dropped may use for it; those that have waited longest come first."""
        self.longer = ""
        """The job that has a longer turn now; empty if none has."""

    def look(self, running: Mapping[str, int], gives: Container[str] = ()) -> None:
        """Take in how many steps each running job has done; those in `gives` give their slot to another tenant."""
        self._turns = {job: turn for job, turn in self._turns.items() if job in running}
        for job, step in running.items():
            turn = self._turns.get(job)
            if turn is None or turn.step != step:
                self._busy.watch(job)
                self._turns[job] = _Turn(step, self._busy.of(job), self._clock())
            if turn is not None and turn.step < step:
                self.granted.pop(job, None)
        able = [
            job
            for job, seconds in self.granted.items()
            if job in running and job not in gives and self._spent(job) < seconds
        ]
        if self.longer not in able:
            self.longer = able[0] if able else ""

    def over(self, job: str, *, must_go: bool) -> bool:
        """Whether a running job must leave within its step; call it repeatedly, after `look`."""
        turn, now = self._turns[job], self._clock()
        turn.must_go = (now if turn.must_go is None else turn.must_go) if must_go else None
        return turn.must_go is not None and now - turn.must_go >= self._seconds

    def dropped(self, job: str) -> None:
        """Grant twice the device seconds to a job whose step is dropped."""
        spent, before = self._spent(job), self.granted.get(job, 0.0)
        if spent >= before:
            self.granted.pop(job, None)  # it had its turn, and others wait longer
        self.granted[job] = max(before, 2 * spent, 2 * self._seconds)

    def forget(self, job: str) -> None:
        """Remove a job that has ended."""
        self.granted.pop(job, None)
        self._busy.forget(job)

    def _spent(self, job: str) -> float:
        """Device seconds of a job in its step; at least an even share of the time, because servers sample elsewhere."""
        turn = self._turns[job]
        return max(self._busy.of(job) - turn.device_seconds, (self._clock() - turn.begun) / self._slots)


class StartTurns:
    """Prepares and opens one job of each tenant at a time, because neither is device time. Use it in one event loop.

    While other tenants' jobs run, a tenant's next start waits as long as its share of the time allows. Starts are `free`
    for jobs that had a slot when their host ended: nobody asked for them, so their tenants do not rest. They only wait for
    each other. Jobs of a run, which have no tenant, are opened at once.
    """

    def __init__(
        self,
        others: Callable[[str], float],
        later: Callable[[float, Callable[[], None]], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`others` returns the shares of other tenants with running jobs, divided by the tenant's own."""
        self._others, self._later, self._clock = others, later, clock
        self._locks: WeakValueDictionary[tuple[str, str, bool], asyncio.Lock] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def turn(
        self, what: str, tenant: str, gives_up: Callable[[], bool] = lambda: False, *, free: bool = False
    ) -> AsyncIterator[list[float] | None]:
        """Wait for the turn to `prepare` or `open` a job, and hold it during the block, and while the tenant rests.

        Yields None after `gives_up` returned True. The block may add its seconds to the list, if it waited for others.
        """
        lock = asyncio.Lock()
        if tenant or what != "open":
            lock = self._locks.setdefault((what, tenant, free), lock)
        turn, seconds, begun = asyncio.ensure_future(lock.acquire()), list[float](), None
        try:
            while not turn.done() and not gives_up():
                await asyncio.wait({turn}, timeout=_LOOKS)
            if not turn.done() or gives_up():
                yield None
                return
            begun = self._clock()
            yield seconds
        finally:
            if not turn.cancel() and not turn.cancelled():
                worked = 0.0 if free or begun is None else sum(seconds) if seconds else self._clock() - begun
                if rest := min(MOST_REST, worked * self._others(tenant)):
                    (self._later or asyncio.get_running_loop().call_later)(rest, lock.release)
                else:
                    lock.release()
