"""A race while it runs: it waits until all candidates have committed a rung, decides, and lets the best go on.

all candidates at the rung → rows of their evaluations → decide → <run>/<name>.race.json → drop, go on
A decision is a function of what candidates committed, so it is the same after `kill -9` and in any company.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from motet.config import Config
from motet.config.candidates import RacePlan
from motet.config.race import RaceConfig
from motet.core.checksums import replace_file
from motet.core.errors import ConfigError, RunError
from motet.core.types import JobState
from motet.runtime.checkpoint import Committed, JobDirectory, dump_line
from motet.runtime.job import Job
from motet.runtime.progress import JobProgress
from motet.runtime.race_rule import CONFIRMS, RaceStanding, confirming, decide, deciding, paired, ranked
from motet.tasks.plain_json import as_json

ENDING = ".race.json"
LEAST_ROWS = 12
"""Held-out rows that a race needs."""


@dataclass(frozen=True)
class Rung:
    """A decision."""

    version: int
    """Whose evaluations were compared."""
    step: int
    """Steps that each candidate had done."""
    keep: int
    """The most that could go on: fewer than planned where the budget is short."""
    standings: tuple[RaceStanding, ...]
    """The best mean first."""


@dataclass(frozen=True)
class RaceOutcome:
    """What became of a race."""

    finalist: str | None
    """The best of the candidates that trained to the end; None where none did."""
    version: int | None = None
    """Its best version by the rows that decide."""
    start: float | None = None
    """Reward of version 0 on the rows that confirm."""
    end: float | None = None
    """Reward of `version` on the same rows."""
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    """Interval of the gain, over the same rows."""
    as_good: tuple[str, ...] = ()
    """Candidates at the last decision that were not shown worse."""
    tokens: int = 0
    """Sampled and trained by all candidates."""
    finalist_tokens: int = 0
    """Of these, those of the finalist: what one run would have cost."""

    @property
    def winner(self) -> str | None:
        """The finalist, if it is shown better than the start."""
        return self.finalist if self.low is not None and self.low > 0 else None


@dataclass(frozen=True)
class RaceRecord:
    """What a race wrote down."""

    name: str
    values: Mapping[str, Mapping[str, Any]]
    """By candidate: the settings that differ, by field."""
    plan: tuple[tuple[int, int], ...]
    """(version, candidates that go on) of each decision."""
    level: float
    """Of the intervals of all decisions together (`race.level`)."""
    rungs: tuple[Rung, ...] = ()
    """Decisions so far."""
    outcome: RaceOutcome | None = None
    """None until the last candidate has ended."""

    @classmethod
    def read(cls, path: Path) -> RaceRecord:
        """Read what `write` wrote.

        Raises:
            RunError: it is damaged.
        """
        try:
            tree = json.loads(path.read_text())
            rungs = tuple(
                Rung(
                    one["version"],
                    one["step"],
                    one["keep"],
                    tuple(RaceStanding(**standing) for standing in one["standings"]),
                )
                for one in tree["rungs"]
            )
            end = tree["outcome"]
            outcome = None if end is None else RaceOutcome(**{**end, "as_good": tuple(end["as_good"])})
            plan, level = tuple((a, b) for a, b in tree["plan"]), float(tree.get("level", RaceConfig().level))
            return cls(tree["name"], tree["values"], plan, level, rungs, outcome)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise RunError(f"{path} is damaged ({error}); put it back, or use another run directory") from error

    def write(self, path: Path) -> None:
        """Replace the file by this."""
        replace_file(path, dump_line(asdict(self)))

    def dropped(self) -> dict[str, str]:
        """Why each candidate was dropped, by its name."""
        return {one.name: reason(rung, one) for rung in self.rungs for one in rung.standings if not one.stays}


DROPPED = ("dropped by the race", "out of the race")
"""How the message of a dropped candidate begins."""


def _plain(value: Any) -> Any:
    """A setting as the record's file has it."""
    return value.model_dump(mode="json") if isinstance(value, Config) else as_json(value)


def reason(rung: Rung, standing: RaceStanding) -> str:
    """Why a candidate was dropped."""
    if standing.verdict == "failed":
        return f"out of the race after step {rung.step}: it failed or was ended"
    proof = "worse than the leader" if standing.verdict == "worse" else "not among the best, though not shown worse"
    return f"dropped by the race after step {rung.step}: {proof}, {interval(standing.difference, standing.low, standing.high)}"


def interval(mean: float | None, low: float | None, high: float | None) -> str:
    """A difference with its interval."""
    if mean is None:
        return "no row in common"
    return f"{mean:+.3f}" if low is None or high is None else f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"


def why_out(known: Iterable[RaceRecord], job: JobDirectory) -> str | None:
    """Why a race does not take a job back, and what to do instead; None of a job that no race dropped."""
    name = job.path.name
    why = next((dropped[name] for dropped in (one.dropped() for one in known) if name in dropped), None)
    if why is None:
        return None
    steps = job.steps()
    further = f"motet fork JOBS.yaml {name}@{steps[-1]} NEW_RUN" if steps else "write it as a job in another file"
    return f"{why}. It cannot join again; to train it further, begin a new job: {further}"


def records(run: Path) -> list[RaceRecord]:
    """What the races of a run wrote down; those that cannot be read are left out."""
    known = []
    for path in sorted(run.glob(f"*{ENDING}")):
        try:
            known.append(RaceRecord.read(path))
        except RunError:
            continue
    return known


class Candidate(Protocol):
    """What a race needs of a job: one of this process, or one that hosts train."""

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


class Race:
    """Decides which candidates of one job go on."""

    def __init__(self, plan: RacePlan, jobs: Mapping[str, Candidate], run: Path) -> None:
        """Take up what an earlier process decided.

        Raises:
            RunError: the race was begun otherwise, or its candidates say otherwise than its record.
        """
        self.plan, self.path = plan, run / f"{plan.name}{ENDING}"
        self._jobs = {one.name: jobs[one.name] for one in plan.candidates}
        values = {name: {path: _plain(value) for path, value in given.items()} for name, given in plan.values.items()}
        fresh = RaceRecord(plan.name, values, plan.rungs, plan.settings.level)
        self.record = RaceRecord.read(self.path) if self.path.exists() else fresh
        if replace(self.record, rungs=(), outcome=None) != fresh:
            raise RunError(
                f"{self.path} is of a race with other candidates, rungs or level; use another run directory, or change the "
                "race back"
            )
        if not self.path.exists() and any(map(_was_dropped, self._jobs.values())):
            raise RunError(
                f"{self.path} is gone, and candidates were dropped by it: put it back, or use another run directory"
            )
        for number, rung in enumerate(self.record.rungs):
            self._compare(number, rung)
        self._obey()

    def ready(self, running: Container[str]) -> bool:
        """Whether every candidate has committed the rung and left its slot, or has ended."""
        return self.record.outcome is None and all(self._arrived(job, running) for job in self._live())

    def decide(self, running: Container[str]) -> None:
        """Decide, where the race is ready; note the outcome at the end."""
        if not self.ready(running):
            return
        number = len(self.record.rungs)
        if number == len(self.plan.rungs) or not any(_takes_part(job) for job in self._live()):
            self._write(outcome=self._outcome())
            return
        self._write(rungs=(*self.record.rungs, self._decided(number)))
        self._obey()

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
            job.until = stop
            if name in dropped and not job.state.final:
                job.move(JobState.CANCELLED, dropped[name])
            elif name in dropped and job.state is JobState.CANCELLED:
                job.progress.message = dropped[name]

    # --- decisions ---------------------------------------------------------------------------------------------------

    def _decided(self, number: int) -> Rung:
        version, keep = self.plan.rungs[number]
        live = self._live()
        rows = {job.name: deciding(rows_in(job.directory, version)) for job in live if _takes_part(job)}
        step = self.plan.stop(number) or 0
        keep = min(keep, self._affordable(number, rows))
        standings = decide(rows, keep, self.plan.settings.level, len(self.plan.rungs))
        failed = (RaceStanding(job.name, "failed") for job in live if job.name not in rows)
        return Rung(version, step, keep, (*standings, *failed))

    def _affordable(self, number: int, rows: Mapping[str, Sequence[float]]) -> int:
        """How many candidates the budget lets go on: at the tokens that their steps took so far."""
        budget = self.plan.settings.budget
        if budget is None:
            return len(rows)
        done, stop = self.plan.stop(number) or 1, self.plan.stop(number + 1) or self.plan.steps
        left, count = float(budget - sum(map(tokens_of, self._jobs.values()))), 0
        for name in ranked(rows):
            left -= tokens_of(self._jobs[name]) / done * (stop - done)
            if left < 0:
                break
            count += 1
        return max(count, 1)

    def _compare(self, number: int, rung: Rung) -> None:
        """Decide again from the same evaluations, where all of them are still there.

        Raises:
            RunError: the record says otherwise.
        """
        jobs = [self._jobs[one.name] for one in rung.standings if one.verdict != "failed"]
        if not all(rung.version in job.directory.sampled(evals=True) for job in jobs):
            return
        rows = {job.name: deciding(rows_in(job.directory, rung.version)) for job in jobs}
        again = decide(rows, rung.keep, self.plan.settings.level, len(self.plan.rungs))
        if again != rung.standings[: len(again)]:
            raise RunError(
                f"{self.path}: decision {number + 1} is not what the evaluations of its candidates give; put the file back, or "
                "use another run directory"
            )

    def _outcome(self) -> RaceOutcome:
        tokens = sum(map(tokens_of, self._jobs.values()))
        ended = [job for job in self._live() if job.state is JobState.SUCCEEDED]
        if not ended:
            return RaceOutcome(None, tokens=tokens)
        known = {
            (job.name, version): rows_in(job.directory, version) for job in ended for version in self._versions(job)
        }
        order = sorted(known, key=lambda one: (-_mean(deciding(known[one])), one))
        name, version = order[0]
        job = self._jobs[name]
        start, end = confirming(rows_in(job.directory, 0)), confirming(known[name, version])
        gain = paired(end, start, self.plan.settings.level)
        low, high = (None, None) if gain is None or gain.n < 2 else (gain.mean - gain.half, gain.mean + gain.half)
        last = self.record.rungs[-1].standings if self.record.rungs else ()
        as_good = tuple(one.name for one in last if one.verdict in ("goes on", "dropped") and one.name != job.name)
        figures = (_finite(_mean(start)), _finite(_mean(end)), None if gain is None else gain.mean, low, high)
        return RaceOutcome(job.name, version, *figures, as_good, tokens, tokens_of(job))

    @staticmethod
    def _versions(job: Candidate) -> list[int]:
        """Versions that are kept and were evaluated."""
        kept = set(job.directory.versions())
        return [version for version in job.directory.sampled(evals=True) if version in kept and version > 0]

    def _write(self, **fields: Any) -> None:
        record = replace(self.record, **fields)
        record.write(self.path)
        self.record = record


def let_decide(races: Iterable[Race], running: Container[str]) -> None:
    """Let each race decide whose candidates have all arrived; `running` are the jobs that have a slot."""
    for race in races:
        race.decide(running)


def refused(races: Iterable[Race], job: Job) -> bool:
    """Whether a race dropped a job that is to be resumed; the job's message then says what to do."""
    out = why_out((race.record for race in races), job.directory)
    if out is not None:
        job.note(f"not resumed: {out}")
    return out is not None


def known_of(races: Iterable[Race]) -> dict[str, RaceRecord]:
    """What races wrote down, by the name of the job that races."""
    return {race.plan.name: race.record for race in races}


def check_rows(plan: RacePlan, held_out: int) -> None:
    """Refuse a race with too few held-out rows.

    Raises:
        ConfigError: how many there are.
    """
    if held_out < LEAST_ROWS:
        raise ConfigError(
            f"job {plan.name}: race: {held_out} held-out rows are too few to compare candidates, at least {LEAST_ROWS} are "
            f"needed, and one in {CONFIRMS} of them only confirms the winner; raise data.holdout"
        )


def rows_in(directory: JobDirectory, version: int) -> list[float]:
    """The mean reward of each held-out row at a version, in the order of the data; NaN where no completion has one."""
    rewards = dict[Any, list[float]]()
    for line in directory.each_rollout(version, evals=True):
        scores = rewards.setdefault(line["problem"], [])
        if not line["error"]:
            scores.append(float(line["reward"]))
    return [fmean(scores) if scores else math.nan for scores in rewards.values()]


def tokens_of(job: Candidate) -> int:
    """Sampled and trained by a job, as it committed them."""
    return (job.directory.newest() or Committed()).tokens


def _was_dropped(job: Candidate) -> bool:
    """Whether an earlier process wrote down that a race dropped it."""
    return str(job.directory.read_status().get("message", "")).startswith(DROPPED)


def _takes_part(job: Candidate) -> bool:
    return job.state is JobState.QUEUED


def _mean(rows: Sequence[float]) -> float:
    known = [value for value in rows if math.isfinite(value)]
    return fmean(known) if known else -math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
