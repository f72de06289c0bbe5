"""Quotas over time: the engine is sent the rule of a tenant when it changes, as limits are set, tokens spent and days begin."""

from __future__ import annotations

import asyncio
import logging

from motet.cluster.client import EngineClient
from motet.cluster.messages import SetRule
from motet.config.service import LimitsConfig
from motet.errors import LimitError, StoreError
from motet.runtime.slots import Rule
from motet.service.database.tables import StoredJob
from motet.service.tenants.ledger import Ledger
from motet.service.tenants.quotas import ASK, Quotas, spent
from motet.types import JobState

_log = logging.getLogger(__name__)
_SECONDS = 1.0


class QuotaEnforcer:
    """Keeps running jobs within the quotas of their tenants."""

    def __init__(self, quotas: Quotas, ledger: Ledger, engine: EngineClient) -> None:
        self._quotas, self._ledger, self._engine = quotas, ledger, engine
        self._sent: dict[str, Rule | None] = {}
        """What all hosts were sent last; None where one of them has heard something else since."""

    def rule(self, tenant_id: str) -> Rule:
        """What holds for a tenant's jobs now."""
        return _rule(self._quotas.of(tenant_id), self._ledger.tokens_today().get(tenant_id, 0))

    def rule_with_job(self, job: StoredJob) -> Rule:
        """What holds for a job, for the message that takes it to the engine."""
        rule = self.rule(job.tenant_id)
        if rule != self._sent.get(job.tenant_id, Rule()):
            self._sent[job.tenant_id] = None
        return rule

    def check_resume(self, job: StoredJob) -> None:
        """Let a paused or failed job go on.

        Raises:
            LimitError: a limit keeps it where it is.
            StoreError: its budget is spent.
        """
        if reason := self.rule(job.tenant_id).hold:
            raise LimitError(f"job {job.name!r} stays paused: {reason}", 429)
        budget = job.spec.get("budget")
        if budget is not None and (used := self._ledger.tokens_of(job.id)) >= budget:
            raise StoreError(
                f"job {job.name!r} has used {used} of its budget of {budget} tokens; give it a larger one: motet resume "
                f"{job.name} --budget {2 * budget}"
            )
        if job.state == JobState.FAILED:
            self._quotas.check_queue(job.tenant_id)

    async def watch(self) -> None:
        """Enforce until cancelled."""
        while True:
            await asyncio.sleep(_SECONDS)
            try:
                await asyncio.to_thread(self.enforce)
            except Exception:  # whatever it is, the next time may succeed, and without any no job would ever go on
                _log.exception("quotas could not be enforced")

    def enforce(self) -> None:
        """Write down usage, and send the engine the rules that are not what they were."""
        self._ledger.flush()
        used = self._ledger.tokens_today()
        for tenant_id, limits in self._quotas.all().items():
            rule = _rule(limits, used.get(tenant_id, 0))
            if rule != self._sent.get(tenant_id, Rule()):
                self._sent[tenant_id] = rule
                self._engine.send(SetRule(tenant_id, rule))


def _rule(limits: LimitsConfig, tokens: int) -> Rule:
    most = limits.tokens_per_day
    hold = ""
    if most is not None and tokens >= most:
        hold = f"{spent(most)}; it goes on by itself at 00:00 UTC, or when {ASK} --tokens-per-day"
    return Rule(limits.running_jobs, hold, limits.share, limits.highest_priority or 0)
