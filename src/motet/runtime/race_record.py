"""What a race writes down: its decisions, the candidates that they made, and its outcome."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from motet.config import Config, JobConfig
from motet.config.candidates import RaceCopy, RacePlan, candidates_of, copied
from motet.config.race import RaceConfig
from motet.core.checksums import replace_file
from motet.core.errors import RunError
from motet.runtime.checkpoint import JobDirectory, dump_line
from motet.runtime.race_rule import RaceStanding
from motet.tasks.plain_json import as_json

ENDING = ".race.json"


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
    copies: tuple[RaceCopy, ...] = ()
    """Candidates that began here."""


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
    """By candidate that began with the race: the settings that differ, by field."""
    plan: tuple[tuple[int, int], ...]
    """(version, candidates that go on) of each decision."""
    rungs: tuple[Rung, ...]
    """Decisions so far."""
    outcome: RaceOutcome | None
    """None until the last candidate has ended."""
    level: float = RaceConfig().level
    """Of the intervals of all decisions together (`race.level`)."""
    exploit: tuple[float, ...] = ()
    """Factors on the learning rate of copies (`race.exploit`)."""

    @classmethod
    def of(cls, plan: RacePlan) -> RaceRecord:
        """The record of a race that has not decided."""
        values = {name: {path: _plain(value) for path, value in given.items()} for name, given in plan.values.items()}
        return cls(plan.name, values, plan.rungs, (), None, plan.settings.level, tuple(plan.settings.exploit))

    @classmethod
    def read(cls, path: Path) -> RaceRecord:
        """Read what `write` wrote.

        Raises:
            RunError: it is damaged.
        """
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise RunError(f"{path} is damaged ({error}); put it back, or use another run directory") from error

    def write(self, path: Path) -> None:
        """Replace the file by this."""
        replace_file(path, dump_line(asdict(self)))

    @property
    def copies(self) -> tuple[RaceCopy, ...]:
        """Candidates that began at a decision, in order."""
        return tuple(copy for rung in self.rungs for copy in rung.copies)

    def settings(self, name: str) -> Mapping[str, Any]:
        """The settings with which a candidate began; a copy has those of the candidate that it continues."""
        parents = {copy.name: copy.of for copy in self.copies}
        while name in parents:
            name = parents[name]
        return self.values[name]

    def dropped(self) -> dict[str, str]:
        """Why each candidate was dropped, by its name."""
        return {one.name: reason(rung, one) for rung in self.rungs for one in rung.standings if not one.stays}


def _plain(value: Any) -> Any:
    """A setting as the record's file has it."""
    return value.model_dump(mode="json") if isinstance(value, Config) else as_json(value)


DROPPED = ("dropped by the race", "out of the race")
"""How the message of a dropped candidate begins."""


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


def known_jobs(jobs: Sequence[JobConfig], run: Path) -> dict[str, JobConfig]:
    """By name, the jobs of a file, the candidates of their races, and the copies that a run made of these."""
    known = {job.name: job for job in candidates_of(jobs)}
    for record in records(run):
        for copy in record.copies:
            if copy.of in known:
                known[copy.name] = copied(known[copy.of], copy)
    return known
