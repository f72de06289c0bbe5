"""Keeps tenants within their limits while the service runs, and what they use in the ledger."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from motet.config import JobConfig
from motet.config.service import LimitsConfig
from motet.errors import LimitError, StoreError
from motet.runtime.slots import Rule
from motet.service.database.store import AWAY, Store
from motet.service.database.tables import StoredJob
from motet.service.tenants.ledger import Ledger
from motet.service.tenants.limits import ASK, Limits, spent
from motet.types import JobState

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0


class Steward:
    """Tells the engine what holds for each tenant when that changes: a limit is set, tokens are spent, a day begins."""

    def __init__(
        self,
        store: Store,
        defaults: LimitsConfig,
        slots: int,
        stored_by_jobs: Callable[[list[str]], int],
        send: Callable[..., None],
    ) -> None:
        """Nothing is told yet; `send` passes a message to the engine, the others are those of `Limits`."""
        self.ledger = Ledger(store)
        self.limits = Limits(store, self.ledger, defaults, slots, stored_by_jobs)
        self._send = send
        self._told: dict[str, Rule] = {}
        self._counted: dict[str, tuple[int, int]] = {}
        """Tokens of completions that are not in the ledger yet: {tenant id: (read, sampled)}."""
        self._counting = threading.Lock()
        self._submitting = threading.Lock()
        self._storing: dict[str, threading.Lock] = {}

    # --- jobs -------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def admitting(self, tenant_id: str, config: JobConfig) -> Iterator[None]:
        """While a job is put into the queue: one at a time, or two that come together would both take the last place.

        Raises:
            LimitError: which limit keeps it out.
        """
        with self._submitting:
            self.limits.admit(tenant_id, config)
            yield

    @contextlib.contextmanager
    def storing(self, tenant_id: str, size: int) -> Iterator[None]:
        """While so many bytes are written down as a tenant's: one upload of it at a time, as in `admitting`.

        Raises:
            LimitError: there is no room for them.
        """
        with self._storing.setdefault(tenant_id, threading.Lock()):
            self.limits.room(tenant_id, size)
            yield

    def may_resume(self, job: StoredJob) -> None:
        """Let a paused or failed job go on.

        Raises:
            LimitError: a limit keeps it where it is.
            StoreError: its budget is spent.
        """
        if reason := self.rule(job.tenant_id).hold:
            raise LimitError(f"job {job.name!r} stays paused: {reason}", 429)
        budget = job.spec.get("budget")
        if budget is not None and (used := self.ledger.tokens_of(job.id)) >= budget:
            raise StoreError(
                f"job {job.name!r} has used {used} of its budget of {budget} tokens; give it a larger one: motet resume "
                f"{job.name} --budget {2 * budget}"
            )
        if job.state == JobState.FAILED:
            self.limits.may_wait(job.tenant_id)

    def rule(self, tenant_id: str) -> Rule:
        """What holds for a tenant's jobs now."""
        return _rule(self.limits.of(tenant_id), self.ledger.tokens_today().get(tenant_id, 0))

    def of_job(self, job: StoredJob) -> dict[str, Any]:
        """Whose a job is and what holds for it, as the engine is told with the job."""
        rule = self._told[job.tenant_id] = self.rule(job.tenant_id)
        return {"tenant": job.tenant_id, "rule": asdict(rule)}

    # --- usage ------------------------------------------------------------------------------------------------------------

    def hear(self, told: Mapping[str, Any]) -> None:
        """Keep a window of device time that the engine tells."""
        self.ledger.window(told["engine"], int(told["window"]), told["microseconds"])

    def count(self, tenant_id: str, prompt: int, sampled: int) -> None:
        """Remember tokens of completions; they are written down within a second."""
        with self._counting:
            before = self._counted.get(tenant_id, (0, 0))
            self._counted[tenant_id] = (before[0] + prompt, before[1] + sampled)

    def flush(self) -> None:
        """Write down what was counted."""
        with self._counting:
            counted, self._counted = self._counted, {}
        if not counted:
            return
        try:
            self.ledger.completions(counted)
        except AWAY:
            for tenant_id, counts in counted.items():
                self.count(tenant_id, *counts)  # a database that is away for a while comes back
            raise

    # --- from second to second --------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Look after everything until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await asyncio.to_thread(self.look)
            except Exception:  # whatever it is, the next look may succeed, and without any no job would ever go on
                _log.exception("limits were not looked after")

    def look(self) -> None:
        """Write down usage, and tell the engine of rules that are not what they were."""
        self.flush()
        used = self.ledger.tokens_today()
        for tenant_id, limits in self.limits.all().items():
            rule = _rule(limits, used.get(tenant_id, 0))
            if rule != self._told.get(tenant_id, Rule()):
                self._told[tenant_id] = rule
                self._send(do="rule", tenant=tenant_id, rule=asdict(rule))


def _rule(limits: LimitsConfig, tokens: int) -> Rule:
    most = limits.tokens_per_day
    hold = ""
    if most is not None and tokens >= most:
        hold = f"{spent(most)}; it goes on by itself at 00:00 UTC, or when {ASK} --tokens-per-day"
    return Rule(limits.running_jobs, hold, limits.share, limits.highest_priority or 0)
