"""A race while it runs: it waits until all candidates have committed a rung, decides, and lets the best go on.

all candidates at the rung → rows of their evaluations → decide → <run>/<name>.race.json → drop, go on
A decision is a function of what candidates committed, so it is the same after `kill -9` and in any company.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Generic, Protocol, TypeVar

from motet.config import DataConfig, JobConfig
from motet.config.candidates import RaceCopy, RacePlan, copied
from motet.core.errors import ConfigError, RunError
from motet.core.types import JobState
from motet.runtime.checkpoint import FORKED, Committed, JobDirectory
from motet.runtime.fork import fork
from motet.runtime.job import Job
from motet.runtime.progress import JobProgress
from motet.runtime.race_record import DROPPED, ENDING, RaceOutcome, RaceRecord, Rung, why_out
from motet.runtime.race_rule import CONFIRMS, RaceStanding, confirming, decide, deciding, mean_of, paired, ranked

LEAST_ROWS = 12
"""Held-out rows that a race needs."""


class Candidate(Protocol):
    """What a race needs of a job: one of this process, or one that hosts train."""

    config: JobConfig
    directory: JobDirectory
    progress: JobProgress
    until: int | None
    """Steps after which it waits for a decision; None where it trains to the end."""

    @property
    def name(self) -> str:
        """Name of the job."""

    @property
    def state(self) -> JobState:
        """The current state."""

    @property
    def arrived(self) -> bool:
        """Whether it waits for a decision."""

    def move(self, state: JobState, message: str = "") -> None:
        """Change the state and record it."""


AnyCandidate = TypeVar("AnyCandidate", bound=Candidate)


class Race(Generic[AnyCandidate]):
    """Decides which candidates of one job go on."""

    def __init__(
        self,
        plan: RacePlan,
        jobs: Mapping[str, AnyCandidate],
        run: Path,
        join: Callable[[JobConfig], AnyCandidate],
        named: Callable[[str], str] = str,
    ) -> None:
        """Take up what an earlier process decided.

        Args:
            plan: the race.
            jobs: its candidates, by name.
            run: where it writes its decisions.
            join: makes a candidate of the job of a copy, whose directory is there.
            named: the name of a candidate's directory, by its own.

        Raises:
            RunError: the race was begun otherwise, or its candidates say otherwise than its record.
        """
        self.plan, self.path = plan, run / f"{plan.name}{ENDING}"
        self._jobs, self._join, self._named = {one.name: jobs[one.name] for one in plan.candidates}, join, named
        fresh = RaceRecord.of(plan)
        self.record = RaceRecord.read(self.path) if self.path.exists() else fresh
        if replace(self.record, rungs=(), outcome=None) != fresh:
            raise RunError(
                f"{self.path} is of a race with other candidates, rungs, level or exploit; use another run directory, or "
                "change the race back"
            )
        if not self.path.exists() and any(map(_was_dropped, self._jobs.values())):
            raise RunError(
                f"{self.path} is gone, and candidates were dropped by it: put it back, or use another run directory"
            )
        for number, rung in enumerate(self.record.rungs):
            self._compare(number, rung)
            self._take(rung.copies)
        self._obey()

    def ready(self, running: Container[str]) -> bool:
        """Whether every candidate has committed the rung and left its slot, or has ended."""
        return self.record.outcome is None and all(self._arrived(job, running) for job in self._live())

    def decide(self, running: Container[str]) -> list[AnyCandidate]:
        """Decide, where the race is ready; note the outcome at the end. Returns the candidates that begin now."""
        if self.record.outcome is not None and not all(job.state.final for job in self._live()):
            self._write(outcome=None)  # a candidate that failed trains again
        if not self.ready(running):
            return []
        number = len(self.record.rungs)
        if number == len(self.plan.rungs) or not any(_takes_part(job) for job in self._live()):
            self._write(outcome=self._outcome())
            return []
        rung = self._decided(number)
        for copy in rung.copies:
            self._fork(copy)
        self._write(rungs=(*self.record.rungs, rung))
        begun = self._take(rung.copies)
        self._obey()
        return begun

    # --- copies -------------------------------------------------------------------------------------------------------

    def _take(self, copies: Iterable[RaceCopy]) -> list[AnyCandidate]:
        """Make candidates of copies whose directories are there."""
        begun = []
        for copy in copies:
            self._jobs[copy.name] = self._join(copied(self._jobs[copy.of].config, copy))
            begun.append(self._jobs[copy.name])
        return begun

    def _fork(self, copy: RaceCopy) -> None:
        """Make the directory of a copy, unless a process did that was killed before it wrote down the decision.

        Raises:
            RunError: the directory is of another job.
        """
        there, config = self._jobs[copy.of].directory, copied(self._jobs[copy.of].config, copy)
        new = there.path.with_name(self._named(copy.name))
        if (new / FORKED).exists():
            draft = new.with_name(f".tmp-{new.name}")
            shutil.rmtree(draft, ignore_errors=True)
            new.rename(draft)
        settings = config.model_dump(mode="json", include={"optimizer"}) | {"name": new.name}
        fork(there, copy.step, new, config.algorithm.lag, settings)

    # --- who is in it ------------------------------------------------------------------------------------------------

    def _live(self) -> list[Candidate]:
        dropped = self.record.dropped()
        return [job for name, job in self._jobs.items() if name not in dropped]

    def _arrived(self, job: Candidate, running: Container[str]) -> bool:
        if job.name in running:
            return False
        return job.arrived if job.state is JobState.QUEUED else job.state.final

    def _obey(self) -> None:
        """End those that were dropped, and let the others train to the next rung."""
        stop = self.plan.stop(len(self.record.rungs))
        dropped = self.record.dropped()
        for name, job in self._jobs.items():
            if name not in dropped:
                job.until = stop
            elif not job.state.final:
                job.move(JobState.CANCELLED, dropped[name])
            elif job.state is JobState.CANCELLED:
                job.progress.message = dropped[name]

    # --- decisions ---------------------------------------------------------------------------------------------------

    def _decided(self, number: int) -> Rung:
        version, keep = self.plan.rungs[number]
        live = self._live()
        held_out = {job.name: rows_in(job.directory, version) for job in live if _takes_part(job)}
        check_rows(self.plan, min(map(len, held_out.values())))
        rows = {name: deciding(one) for name, one in held_out.items()}
        step = self.plan.stop(number) or 0
        keep = min(keep, self._affordable(number, rows))
        standings, copies = self._standings(number, keep, rows)
        failed = (RaceStanding(job.name, "failed") for job in live if job.name not in rows)
        paid = [replace(copy, tokens=self._jobs[copy.of].directory.committed(step).tokens) for copy in copies]
        return Rung(version, step, keep, (*standings, *failed), tuple(paid))

    def _standings(
        self, number: int, keep: int, rows: Mapping[str, Sequence[float]]
    ) -> tuple[tuple[RaceStanding, ...], list[RaceCopy]]:
        """A decision: the standings, and the copies that get the other places."""
        standings = decide(rows, self.plan.own_places(keep), self.plan.settings.level, len(self.plan.rungs))
        best, known = [one.name for one in standings if one.stays], len(self.plan.candidates)
        first = known + sum(len(rung.copies) for rung in self.record.rungs[:number])
        return standings, self.plan.copies(best, keep, number, first)

    def _affordable(self, number: int, rows: Mapping[str, Sequence[float]]) -> int:
        """How many candidates the budget lets go on: at the tokens that their steps took so far."""
        budget = self.plan.settings.budget
        if budget is None:
            return len(rows)
        done, stop = self.plan.stop(number) or 1, self.plan.stop(number + 1) or self.plan.steps
        tokens = {name: tokens_of(job, done) for name, job in self._jobs.items()}
        left, order = budget - self._own(tokens.values()), ranked(rows)

        def cost(places: int) -> float:
            best = order[: self.plan.own_places(places)]
            names = [*best, *(copy.of for copy in self.plan.copies(best, places, number, 0))]
            return sum(tokens[name] / done * (stop - done) for name in names)

        return next((places for places in range(len(rows), 1, -1) if cost(places) <= left), 1)

    def _own(self, tokens: Iterable[int]) -> int:
        """All tokens once, of those of each candidate: before a copy began, they are of the candidate that it continues."""
        return sum(tokens) - sum(copy.tokens for copy in self.record.copies)

    def _compare(self, number: int, rung: Rung) -> None:
        """Decide again from the same evaluations, where all of them are still there.

        Raises:
            RunError: the record says otherwise.
        """
        jobs = [self._jobs[one.name] for one in rung.standings if one.verdict != "failed"]
        if not all(rung.version in job.directory.sampled(evals=True) for job in jobs):
            return
        rows = {job.name: deciding(rows_in(job.directory, rung.version)) for job in jobs}
        again, copies = self._standings(number, rung.keep, rows)
        if again != rung.standings[: len(again)] or copies != [replace(copy, tokens=0) for copy in rung.copies]:
            raise RunError(
                f"{self.path}: decision {number + 1} is not what the evaluations of its candidates give; put the file back, or "
                "use another run directory"
            )

    def _outcome(self) -> RaceOutcome:
        tokens = self._own(map(tokens_of, self._jobs.values()))
        ended = [job for job in self._live() if job.state is JobState.SUCCEEDED]
        if not ended:
            return RaceOutcome(None, tokens=tokens)
        found = {job.name: self._version(job) for job in ended}
        name = ranked({name: deciding(rows) for name, (_, rows) in found.items()})[0]
        job, (version, rows) = self._jobs[name], found[name]
        start, end = confirming(rows_in(job.directory, 0)), confirming(rows)
        gain = paired(end, start, self.plan.settings.level)
        low, high = (None, None) if gain is None or gain.n < 2 else (gain.mean - gain.half, gain.mean + gain.half)
        last = self.record.rungs[-1].standings if self.record.rungs else ()
        as_good = tuple(
            one.name for one in last if one.verdict in ("leads", "goes on", "dropped") and one.name != job.name
        )
        figures = (_finite(mean_of(start)), _finite(mean_of(end)), None if gain is None else gain.mean, low, high)
        return RaceOutcome(job.name, version, *figures, as_good, tokens, tokens_of(job))

    def _version(self, job: Candidate) -> tuple[int, list[float]]:
        """The last version, unless the best one is shown better: the highest of several means is high by chance."""
        done = job.directory.newest() or Committed()
        last = rows_in(job.directory, done.step)
        if done.best_version and done.best_version in job.directory.sampled(evals=True):
            best = rows_in(job.directory, done.best_version)
            gain = paired(deciding(best), deciding(last), self.plan.settings.level)
            if gain is not None and gain.mean - gain.half > 0:
                return done.best_version, best
        return done.step, last

    def _write(self, **fields: Any) -> None:
        record = replace(self.record, **fields)
        record.write(self.path)
        self.record = record


def let_decide(races: Iterable[Race[AnyCandidate]], running: Container[str]) -> list[AnyCandidate]:
    """Let each race decide whose candidates have all arrived; `running` are the jobs that have a slot.

    Returns the candidates that begin.
    """
    return [job for race in races for job in race.decide(running)]


def refused(races: Iterable[Race[Job]], job: Job) -> bool:
    """Whether a race dropped a job that is to be resumed; the job's message then says what to do."""
    out = why_out((race.record for race in races), job.directory)
    if out is not None:
        job.note(f"not resumed: {out}")
    return out is not None


def known_of(races: Iterable[Race[Any]]) -> dict[str, RaceRecord]:
    """What races wrote down, by the name of the job that races."""
    return {race.plan.name: race.record for race in races}


def check_rows(plan: RacePlan, held_out: int) -> None:
    """Refuse a race with too few held-out rows.

    Raises:
        ConfigError: how many there are.
    """
    if why := too_few(plan.candidates[0].data, held_out):
        raise ConfigError(f"job {plan.name}: {why}")


def too_few(data: DataConfig, held_out: int) -> str:
    """Why so few held-out rows cannot be compared; empty if they can."""
    if held_out >= LEAST_ROWS:
        return ""
    longer = "" if data.max_prompt_tokens is None else " or data.max_prompt_tokens"
    return (
        f"race: {held_out} held-out rows are too few to compare candidates, at least {LEAST_ROWS} are needed, and one in "
        f"{CONFIRMS} of them only confirms the winner; raise data.holdout{longer}"
    )


def check_prepared(plans: Iterable[RacePlan], jobs: Iterable[Job]) -> None:
    """Refuse a race with too few held-out rows, now that those with long prompts are left out.

    Raises:
        ConfigError: how many there are.
    """
    held_out = {job.name: len(job.data.holdout) for job in jobs}
    for plan in plans:
        check_rows(plan, min(held_out[one.name] for one in plan.candidates))


def rows_in(directory: JobDirectory, version: int) -> list[float]:
    """The mean reward of each held-out row at a version, in the order of the data; NaN where no completion has one."""
    rewards = dict[Any, list[float]]()
    for line in directory.each_rollout(version, evals=True):
        scores = rewards.setdefault(line["problem"], [])
        if not line["error"]:
            scores.append(float(line["reward"]))
    return [fmean(scores) if scores else math.nan for scores in rewards.values()]


def tokens_of(job: Candidate, stop: int | None = None) -> int:
    """Sampled and trained by a job up to its commit after `stop` steps; without it, up to its newest one."""
    if stop is not None and stop in job.directory.steps():
        return job.directory.committed(stop).tokens
    return (job.directory.newest() or Committed()).tokens


def _was_dropped(job: Candidate) -> bool:
    """Whether an earlier process wrote down that a race dropped it."""
    return str(job.directory.read_status().get("message", "")).startswith(DROPPED)


def _takes_part(job: Candidate) -> bool:
    return job.state is JobState.QUEUED


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
