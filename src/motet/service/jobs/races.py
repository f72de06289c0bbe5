"""Races of tenants' jobs: decides as soon as all candidates of one have committed a rung."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from motet.cluster.hosts import Hosts
from motet.config import JobConfig
from motet.config.candidates import RacePlan, plan
from motet.core.errors import RunError
from motet.core.types import JobState, Wanted
from motet.runtime.checkpoint import Committed, JobDirectory
from motet.runtime.progress import JobProgress
from motet.runtime.race import Race
from motet.runtime.race_record import ENDING, RaceRecord
from motet.service.database.races import RaceRows
from motet.service.database.store import AWAY, Store
from motet.service.database.tables import StoredJob, StoredRace
from motet.service.events import WAITING_JOBS, EventBus, within
from motet.service.jobs.initial_adapter import continue_start
from motet.service.jobs.recorder import EventRecorder
from motet.service.storage import Storage

_log = logging.getLogger(__name__)
_LOOK_SECONDS, _QUIET_SECONDS = 1.0, 30.0
"""Between looks at the candidates, with a race and without one."""


@dataclass
class _Candidate:
    """A candidate as `Race` uses it; changes go to the database."""

    row: StoredJob
    config: JobConfig
    directory: JobDirectory
    progress: JobProgress
    store: Store
    record_state: Callable[[str, JobState, str], None]

    @property
    def name(self) -> str:
        """Its owner's name for the job."""
        return self.row.name

    @property
    def until(self) -> int | None:
        """Steps after which it waits for a decision; None if it trains to the end."""
        return self.row.until

    @until.setter
    def until(self, step: int | None) -> None:
        if step != self.row.until:
            self.row.until = step
            self.store.change_job(self.row.id, until=step)

    @property
    def arrived(self) -> bool:
        """Whether it waits for a decision, with its commit."""
        until = self.row.until
        return until is not None and self.row.step >= until and (self.directory.newest() or Committed()).step >= until

    @property
    def state(self) -> JobState:
        """The current state. Without a host, one that has arrived is queued, whatever its host reported last."""
        state = JobState(self.row.state)
        return JobState.QUEUED if state is JobState.RUNNING and self.arrived else state

    def move(self, state: JobState, message: str = "") -> None:
        """Change the state and record it."""
        self.row.state = state.value
        self.record_state(self.row.id, state, message)


class Races:
    """Lets the races of all tenants decide, and knows what they decided."""

    def __init__(self, store: Store, storage: Storage, bus: EventBus, recorder: EventRecorder, hosts: Hosts) -> None:
        self._store, self._storage, self._bus, self._recorder, self._hosts = store, storage, bus, recorder, hosts
        self.rows = RaceRows(store)
        self._obeyed = set[str]()
        """Races of which this process knows that their candidates have heard the last decision."""
        self._told: dict[str, str] = {}
        """What keeps a race from deciding for now, by its id."""

    async def watch(self) -> None:
        """Decide whenever a race is ready, until the service stops."""
        while not self._bus.closed:
            changed = self._bus.next(WAITING_JOBS)
            try:
                seconds = _LOOK_SECONDS if await asyncio.to_thread(self.decide) else _QUIET_SECONDS
            except Exception:  # the database may be back at the next look
                _log.exception("the races could not be looked at")
                seconds = _LOOK_SECONDS
            await within(changed, seconds)

    def decide(self) -> bool:
        """Let each race decide that is ready; returns whether one is open."""
        races = self.rows.open()
        for race_id, standings in races.items():
            arrived = all(JobState(one.state).final or (one.waits and not self._hosts.has(one.id)) for one in standings)
            if arrived or race_id not in self._obeyed:
                try:
                    self._obeyed.discard(race_id)
                    self._decide(race_id)
                    self._obeyed.add(race_id)
                    self._told.pop(race_id, None)
                except Exception as error:  # the boundary of a tenant; a full disk, say, is mended by a later look
                    if self._told.get(race_id) != str(error):
                        self._told[race_id] = str(error)
                        _log.warning("race %s could not decide now: %s", race_id, error)
        self._obeyed &= races.keys()
        return bool(races)

    def _decide(self, race_id: str) -> None:
        stored = self.rows.get(race_id)
        if stored is None:
            return
        jobs = {row.name: self._candidate(row) for row in self.rows.candidates(stored.id)}
        running = {job.name for job in jobs.values() if self._hosts.has(job.row.id)}
        try:
            place = self.path(stored.id, stored.name).parent
            place.mkdir(parents=True, exist_ok=True)
            planned = _plan(stored)
            if any(job.until != planned.stop(0) for job in jobs.values()):
                self._check_there(stored)
            join = functools.partial(self._copy, stored, planned, jobs)
            race = Race(planned, jobs, place, join, functools.partial(_id_of, stored))
            race.decide(running)
        except Exception as error:
            if isinstance(error, (OSError, *AWAY)) and not isinstance(error, FileNotFoundError):
                raise  # it may pass
            self._fail(stored, jobs.values(), error)
            return
        if race.record.outcome is not None:
            self.rows.end(stored.id)
        self._hosts.look()

    def _check_there(self, race: StoredRace) -> None:
        """Raise `RunError` if decisions are gone: to decide again would let candidates in that they dropped."""
        path = self.path(race.id, race.name)
        if not path.exists():
            raise RunError(f"its decisions, {path}, are gone; restore them from a backup")

    def _fail(self, race: StoredRace, jobs: Iterable[_Candidate], error: Exception) -> None:
        """End a race that can never decide, and its candidates."""
        why = self._storage.without_places(f"the race cannot decide: {error}")
        for job in jobs:
            if not job.state.final:
                job.move(JobState.FAILED, why)
        self.rows.end(race.id, why)

    def _candidate(self, row: StoredJob) -> _Candidate:
        config, progress = JobConfig.model_validate(row.spec), JobProgress(row.name, row.steps)
        directory = self._storage.job(row.id)
        return _Candidate(row, config, directory, progress, self._store, self._recorder.record_state)

    def _copy(self, race: StoredRace, planned: RacePlan, jobs: dict[str, _Candidate], config: JobConfig) -> _Candidate:
        """The candidate of a decided copy; its job is made once. Raises `StoreError` if its name is taken."""
        if config.name not in jobs:
            record = self.record(race)
            (copy,) = (one for one in record.copies if one.name == config.name)
            original = jobs[copy.of].row
            row = StoredJob(
                id=_id_of(race, copy.name), tenant_id=race.tenant_id, name=copy.name, race=race.id, base=original.base,
                spec=config.model_dump(mode="json"), state=JobState.QUEUED.value, wanted=Wanted.RUN.value,
                step=copy.step, steps=original.steps, reward=original.reward, held_out=original.held_out,
                starts_from=original.starts_from, until=planned.stop(len(record.rungs)),
            )  # fmt: skip
            continue_start(self._storage.run, original.id, row.id)
            self.rows.continue_job(row, original)
            self._recorder.record_state(row.id, JobState.QUEUED, "")
            jobs[copy.name] = self._candidate(row)
        return jobs[config.name]

    # --- what was decided ---------------------------------------------------------------------------------------------

    def path(self, race_id: str, name: str) -> Path:
        """The file with a race's decisions."""
        return self._storage.races / race_id / f"{name}{ENDING}"

    def record(self, race: StoredRace) -> RaceRecord:
        """The decisions of a race so far. Raises `RunError` if their file is damaged or gone."""
        if race.ended is not None and not race.failure:
            self._check_there(race)
        path = self.path(race.id, race.name)
        return RaceRecord.read(path) if path.exists() else RaceRecord.of(_plan(race))

    def open(self, race_id: str) -> bool:
        """Whether a race has not ended."""
        race = self.rows.get(race_id)
        return race is not None and race.ended is None

    def why_out(self, job: StoredJob) -> str | None:
        """Why a race does not take a failed job back; None if it does, or if the job is of no race."""
        race = None if job.race is None else self.rows.get(job.race)
        if race is None:
            return None
        if race.ended is not None:
            return "of a race that has ended"
        try:
            return self.record(race).dropped().get(job.name)
        except RunError:
            return "of a race whose decisions cannot be read"

    def forget(self, race_id: str) -> bool:
        """Delete a race whose jobs have all been deleted; returns whether it was."""
        if self.rows.names(race_id):
            return False
        shutil.rmtree(self._storage.races / race_id, ignore_errors=True)
        self.rows.delete(race_id)
        return True


def _id_of(race: StoredRace, copy: str) -> str:
    """The id of a copy: the same after a crash."""
    return f"job-{hashlib.sha256(f'{race.id}/{copy}'.encode()).hexdigest()[:16]}"


def _plan(race: StoredRace) -> RacePlan:
    config = JobConfig.model_validate(race.spec)
    assert config.race is not None
    return plan(config, config.race)
