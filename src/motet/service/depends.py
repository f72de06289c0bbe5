"""Dependencies of routes: the service and the requester.

One that is not async costs a thread, so only those that ask the database are not.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Query, Request
from starlette.concurrency import run_in_threadpool

from motet.process import cpu_time
from motet.service.composition import Service
from motet.service.database.tables import StoredJob
from motet.service.database.tenants import Principal
from motet.service.errors import Refusal, existing
from motet.service.http.opened import opened_by
from motet.service.http.rights import check_change

Result = TypeVar("Result")


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(_service)]
After = Annotated[str | None, Query(pattern=r"^\d{1,15}$", description="`next` of the previous page.")]


async def while_there(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Run work while the client is connected; call it after reading the request's body."""
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


async def read(service: Service, who: Principal, work: Callable[[], Result]) -> Result:
    """Charge a tenant, which must have some left today, for work in the threads for reads: its CPU time, and its processes'."""

    def charged() -> Result:
        service.quotas.check_day(who.tenant_id, device=False, cpu=True)
        with cpu_time.counted(functools.partial(service.ledger.count_cpu, who.tenant_id)):
            return work()

    return await service.read_threads.run(who.tenant_id, charged)


async def worked(writing: asyncio.Task[Any]) -> bool:
    """Whether a write in a thread succeeded in the end; a started thread cannot be cancelled."""
    await asyncio.wait([writing])
    return not writing.cancelled() and writing.exception() is None


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def principal(request: Request, service: ServiceDep) -> Principal:
    """The principal of the request's key; see `Access.principal`."""
    if service.access.looked_up(request):
        return service.access.principal(request)
    return await run_in_threadpool(service.access.principal, request)


Asker = Annotated[Principal, Depends(principal)]
"""The principal of the request's key."""


async def _key_ender(request: Request, who: Asker) -> Principal:
    opened_by(request, "")
    return who


KeyEnder = Annotated[Principal, Depends(_key_ender)]
"""`Asker` of a request that may end its own key; it is answered all the same."""


def check_admin(who: Principal) -> Principal:
    """Return an admin. Raises Refusal for others."""
    if not who.admin:
        raise Refusal(403, "this needs an admin's key")
    return who


async def _admin(who: Asker) -> Principal:
    return check_admin(who)


Admin = Annotated[Principal, Depends(_admin)]


def _named_job(job: str, who: Asker, service: ServiceDep) -> StoredJob:
    return existing(service.store.job(who, job), f"there is no job {job!r}")


NamedJob = Annotated[StoredJob, Depends(_named_job)]
"""The job named in the path, among those of the requester."""


async def _own_job(who: Asker, job: NamedJob) -> StoredJob:
    check_change(who, job, f"job {job.name!r}")
    return job


OwnJob = Annotated[StoredJob, Depends(_own_job)]
"""`NamedJob` of a request that changes it."""
