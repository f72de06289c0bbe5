"""Routes for races: list, show, and steer all candidates of one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Depends, Query

from motet.core.errors import RunError, StoreError
from motet.core.types import JobState, Wanted, Word
from motet.runtime.bracket import bracket_rows, order, verdict
from motet.service.composition import Service
from motet.service.database.tables import StoredRace
from motet.service.database.tenants import Principal
from motet.service.depends import After, Asker, ServiceDep
from motet.service.errors import existing
from motet.service.routing import TenantRoute
from motet.service.schemas import Bracket, Race, Races

router = APIRouter(prefix="/v1", tags=["jobs"], route_class=TenantRoute)


def _shown(who: Principal, service: Service, race: StoredRace) -> Race:
    store, failure = service.store, race.failure
    try:
        read = service.races.record(race)
    except RunError as error:
        record, failure = {}, failure or service.storage.without_places(str(error))
        bracket = Bracket(headings=[], rows=[], names=[], verdict=failure)
    else:
        record, (headings, rows) = asdict(read), bracket_rows(read)
        bracket = Bracket(headings=headings, rows=rows, names=order(read), verdict=failure or verdict(read))
    return Race(
        id=race.id, name=race.name, tenant=store.tenants.name_of(race.tenant_id) if who.admin else None,
        created=race.created, ended=race.ended, failure=failure, jobs=service.races.rows.names(race.id),
        record=record, bracket=bracket,
    )  # fmt: skip


def _named_race(race: str, who: Asker, service: ServiceDep) -> StoredRace:
    return existing(service.races.rows.find(who, race), f"there is no race {race!r}")


NamedRace = Annotated[StoredRace, Depends(_named_race)]


@router.get("/races")
def list_races(
    who: Asker,
    service: ServiceDep,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Races:
    """List races, newest first."""
    page, more = service.races.rows.page(who, before=None if after is None else int(after), limit=limit)
    next_page = str(page[-1].number) if more else None
    return Races(data=[_shown(who, service, race) for race in page], next=next_page)


@router.get("/races/{race}")
def show_race(who: Asker, service: ServiceDep, race: NamedRace) -> Race:
    """Get a race by id or name: its candidates, decisions and outcome."""
    return _shown(who, service, race)


@router.post("/races/{race}/{word}", status_code=202)
def steer_race(who: Asker, service: ServiceDep, race: NamedRace, word: Word) -> Race:
    """Pause, resume or cancel all candidates of a race that have not ended; none is resumed if a limit forbids it."""
    jobs, wanted = service.races.rows.candidates(race.id), Wanted.of(word)
    paused = next((job for job in jobs if job.state == JobState.PAUSED.value), None)
    if wanted is Wanted.RUN and paused is not None:
        service.enforcer.check_resume(paused)  # before others are resumed; the limits are the tenant's
    for job in jobs:
        if not JobState(job.state).final:
            try:
                service.submissions.steer(job, wanted)
            except StoreError:  # it has just ended
                continue
    service.store.audit(who, word, race.id)
    return _shown(who, service, race)
