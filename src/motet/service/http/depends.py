"""What a route can depend on: one part of the service each, and whoever asks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from motet.apart import Apart
from motet.cluster.hosts import Hosts
from motet.service.adapters.adapters import Adapters
from motet.service.bases import Bases
from motet.service.database.store import Store
from motet.service.database.tables import StoredJob
from motet.service.database.tenants import Principal
from motet.service.errors import Refusal, existing
from motet.service.events import EventBus, EventLog
from motet.service.http.auth import Access, CheckThreads, ReadThreads
from motet.service.http.sign_in import SignIns
from motet.service.jobs.erasure import Erasure
from motet.service.jobs.fine_tuning import FineTunings
from motet.service.jobs.recorder import EventRecorder
from motet.service.jobs.submissions import Submissions
from motet.service.request_log import RequestMetrics
from motet.service.rewards.grading import Grading
from motet.service.settings import Settings
from motet.service.storage import Storage
from motet.service.tenants.ledger import Ledger
from motet.service.tenants.quotas import Quotas
from motet.service.workers.agents import AgentWorkers
from motet.service.workers.rewards import RewardWorkers

Part = TypeVar("Part")


class Parts:
    """The parts of a service, each by its type; it lies in `app.state.parts`."""

    def __init__(self, *parts: object) -> None:
        self._parts: dict[type, Any] = {type(part): part for part in parts}

    def __getitem__(self, kind: type[Part]) -> Part:
        part: Part = self._parts[kind]
        return part


def part(kind: type) -> Any:
    """The part of a service of this type."""

    def of_app(request: Request) -> object:
        return request.app.state.parts[kind]

    return Depends(of_app)


AccessDep = Annotated[Access, part(Access)]
AdaptersDep = Annotated[Adapters, part(Adapters)]
ApartDep = Annotated[Apart, part(Apart)]
AgentWorkersDep = Annotated[AgentWorkers, part(AgentWorkers)]
BasesDep = Annotated[Bases, part(Bases)]
BusDep = Annotated[EventBus, part(EventBus)]
CheckThreadsDep = Annotated[CheckThreads, part(CheckThreads)]
EngineDep = Annotated[Hosts, part(Hosts)]
ErasureDep = Annotated[Erasure, part(Erasure)]
EventLogDep = Annotated[EventLog, part(EventLog)]
FineTuningsDep = Annotated[FineTunings, part(FineTunings)]
GradingDep = Annotated[Grading, part(Grading)]
LedgerDep = Annotated[Ledger, part(Ledger)]
QuotasDep = Annotated[Quotas, part(Quotas)]
ReadThreadsDep = Annotated[ReadThreads, part(ReadThreads)]
RecorderDep = Annotated[EventRecorder, part(EventRecorder)]
RequestMetricsDep = Annotated[RequestMetrics, part(RequestMetrics)]
SettingsDep = Annotated[Settings, part(Settings)]
SignInsDep = Annotated[SignIns, part(SignIns)]
StorageDep = Annotated[Storage, part(Storage)]
StoreDep = Annotated[Store, part(Store)]
SubmissionsDep = Annotated[Submissions, part(Submissions)]
WorkersDep = Annotated[RewardWorkers, part(RewardWorkers)]


Result = TypeVar("Result")


async def while_there(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Do a piece of work as long as the client waits for it; the body of its request has been read."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Refusal(408, "the client left")  # nobody reads it
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _principal(request: Request, access: AccessDep) -> Principal:
    return access.principal(request)


Asker = Annotated[Principal, Depends(_principal)]
"""Whose key the request brings."""


def admin_only(who: Asker) -> Principal:
    """The asker, who has to be an admin."""
    if not who.admin:
        raise Refusal(403, "this needs an admin's key")
    return who


Admin = Annotated[Principal, Depends(admin_only)]


def _named_job(job: str, who: Asker, store: StoreDep) -> StoredJob:
    return existing(store.job(who, job), f"there is no job {job!r}")


NamedJob = Annotated[StoredJob, Depends(_named_job)]
"""The job that a path names, among the asker's."""
