"""The limit on the tokens of a step, of a tenant on a base."""

from __future__ import annotations

from collections.abc import Callable

from motet.cluster.hosts import Hosts, longest_sequence, usual_step
from motet.config import JobConfig
from motet.config.service import LimitsConfig
from motet.config.step_tokens import tokens_of_step


class StepLimits:
    """Limits the steps of jobs, so that nobody waits long for their slots."""

    def __init__(self, limits: Callable[[str], LimitsConfig], hosts: Hosts) -> None:
        """`limits` gives those of a tenant, by its id."""
        self._limits, self._hosts = limits, hosts

    def most(self, tenant_id: str, base: str) -> int | None:
        """The most tokens of a step of a tenant's job on a base; None if there is no limit, or none is known yet."""
        given = self._limits(tenant_id).step_tokens
        return usual_step(self._hosts, base) or None if given == "auto" else given

    def check(self, tenant_id: str, config: JobConfig, base: str) -> None:
        """Check the tokens of a job's steps, as far as they are known before its data is read. Raises LimitError."""
        if (most := self.most(tenant_id, base)) is not None:
            tokens_of_step(config, context=longest_sequence(self._hosts, base)).check(most)
