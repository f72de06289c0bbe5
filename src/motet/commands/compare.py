"""`motet compare`: which of some runs, jobs or settings is better; `motet diff`: where two jobs differ.

Both compare held-out answers to the same problems, by `observe.report.comparison`.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

import motet
from motet.commands.answers import check_place, say, table
from motet.core.checksums import replace_file
from motet.core.errors import ConfigError, RunError
from motet.core.plain_json import as_json
from motet.observe.report.comparison import (
    Difference,
    EvaluatedJob,
    Side,
    by_problem,
    compare,
    evaluated,
    evaluated_at,
    mean_curves,
    read_evaluated,
    side_of_job,
    side_of_run,
    sides_of_run,
)
from motet.observe.report.read import JobRecord, Line, RunRecord, number, read_job, read_lines, read_run
from motet.observe.report.svg import draw_curves
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.held_out import REWARD
from motet.runtime.receipts import fields_apart, materials_of, read_receipt
from motet.runtime.settings import Mean

_MOST_TASKS = 6
"""Most tasks with their own column."""
MOST_ROLLOUTS = 1000
"""Most rollouts of an evaluation that a service returns."""
_MOST = 60
"""Most characters of a setting in a table."""
_SHOWN = 12
"""Characters of a digest in a table."""
_TOLD_OTHERWISE = ("job", "contents", "code", "computed_before")


def compare_places(places: Sequence[str], svg: Path | None, url: str | None, key: str | None) -> None:
    """Print how the sides compare; `svg` is a file for their mean curves.

    Raises:
        RunError: they cannot be compared.
    """
    check_place("--svg", svg)
    alone = len(places) == 1
    if alone and not Path(places[0]).is_dir():
        raise ConfigError(f"{places[0]} is not the directory of a run: name one, or two or more jobs")
    sides = sides_of_run(_evaluated(read_run(Path(places[0])))) if alone else _sides(places, url, key)
    if len(sides) < 2:
        raise RunError(f"{places[0]} has one setting only; name another run or job to compare it with")
    differences = compare(sides, best_first=alone)
    say(_means(sides))
    print_differences(differences)
    if svg is not None:
        replace_file(svg, draw_curves([mean_curves(side) for side in sides], "settings").encode("utf-8", "replace"))
        say(f"curves: {svg}")


def _evaluated(run: RunRecord) -> RunRecord:
    """A run without the jobs that ended before their first evaluation, if others have one."""
    jobs = tuple(job for job in run.jobs if job.evaluations.xs)
    if not jobs:
        return run
    for job in run.jobs:
        if job not in jobs:
            say(f"{job.name} ({job.state}) is left out: it has no held-out evaluation")
    return replace(run, jobs=jobs)


def _sides(places: Sequence[str], url: str | None, key: str | None) -> list[Side]:
    runs = [place for place in places if Path(place).is_dir() and not (Path(place) / "metrics.jsonl").is_file()]
    if runs and len(runs) < len(places):
        raise ConfigError(f"{runs[0]} is a run, and not all others are: compare runs with runs, or jobs with jobs")
    names = short_names(places)
    if runs:
        return [replace(side_of_run(Path(place)), name=name) for name, place in zip(names, places, strict=True)]
    return [side_of_job(name, _job(place, url, key)) for name, place in zip(names, places, strict=True)]


def short_names(places: Sequence[str]) -> list[str]:
    """Shorten paths to as many last parts as needed to tell them apart."""
    parts = [Path(place).parts for place in places]
    n = 1
    while n < max(map(len, parts)) and len({path[-n:] for path in parts}) < len(parts):
        n += 1
    return [str(Path(*path[-n:])) for path in parts]


def _job(place: str, url: str | None, key: str | None) -> EvaluatedJob:
    """A job's directory, or a job of a service."""
    if Path(place).is_dir():
        return read_evaluated(Path(place))
    with motet.Client(url, key) as client:
        job, lines = client.job(place), client.steps(place)
        record = JobRecord(
            name=job.name, state=job.state, message=job.message, inexact=(), config_text="", config={"job": job.spec},
            base=job.base or "", planned=job.steps, steps=tuple(lines), timings=(), pairs=(), pair_versions=None,
            versions=(),
        )  # fmt: skip
        sampled = any(REWARD in line.get("eval", {}) for line in lines)
        newest = int(record.evaluations.xs[-1]) if sampled else 0
        rollouts = client.rollouts(place, newest, limit=MOST_ROLLOUTS, purpose="eval").data if sampled else []
        return evaluated(record, rollouts)


def _means(sides: Sequence[Side]) -> str | Table:
    """The held-out figure of each side, best first; by task if there are several."""
    tasks = list(dict.fromkeys(key[0] for side in sides for key in side.jobs))
    shown: list[str | None] = [*(tasks if 1 < len(tasks) <= _MOST_TASKS else []), None]
    rows = []
    for side in sorted(sides, key=lambda side: -side.mean()):
        figures = (side.mean(task) for task in shown)
        rows.append([_measured(side), *("" if math.isnan(x) else f"{x:.3f}" for x in figures), str(len(side.jobs))])
    headings = ["held-out", *(f">{task.replace(',', ';') if task is not None else 'mean'}" for task in shown), ">jobs"]
    return table(rows, ",".join(headings), empty="", folds=("held-out",))


def _measured(side: Side) -> str:
    """The side's name; of a single job also the version whose figure it is, and the best one if that is another."""
    if len(side.jobs) != 1:
        return side.name
    (job,) = side.jobs.values()
    best = job.record.best
    also = f"; best: v{best[0]}, {best[1]:.3f}" if best and best[0] != job.version and not math.isnan(best[1]) else ""
    return f"{side.name} (v{job.version}{also})"


def print_differences(differences: Sequence[Difference], *, pairs: bool = True) -> None:
    """Print the differences of each side from the first; with `pairs`, the number of job pairs has a column."""
    if not differences:
        return
    say(f"against {differences[0].first}:")
    headings = f"side,{'>pairs of jobs,' * pairs}>problems,>difference,verdict"
    rows = [
        [
            found.second,
            *([str(found.jobs)] if pairs else []),
            str(found.problems or ""),
            _signed(found.more),
            found.verdict,
        ]
        for found in differences
    ]
    say(table(rows, headings, empty="", folds=("side",)))
    kinds = {"pairs of jobs" if found.jobs > 1 else "problems" for found in differences}
    over = "pairs of jobs" + (", or over problems where there is one pair" if len(kinds) > 1 else "")
    over = over if "pairs of jobs" in kinds else "problems"
    together = f", for all {len(differences)} differences together" if len(differences) > 1 else ""
    say(f"[…]: 95 % interval by Student's t over {over}{together}")
    for line in (f"{found.second}: {note}" for found in differences for note in found.notes):
        say(line)


def _signed(more: Mean) -> str:
    """A difference with its interval."""
    low, high = more.mean - more.half, more.mean + more.half
    return f"{more.mean:+.3f}{'' if math.isnan(more.half) else f' [{low:+.3f}, {high:+.3f}]'}"


# --- motet diff -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """A job up to a version."""

    name: str
    record: JobRecord
    directory: JobDirectory
    version: int
    """The newest version that counts."""

    @classmethod
    def of(cls, place: str, name: str) -> Compared:
        """`RUN/JOB` or `RUN/JOB@12`.

        Raises:
            ConfigError, RunError: there is no such job, or it has not reached that version.
        """
        path, _, version = place.rpartition("@") if not Path(place).exists() else (place, "", "")
        if not path or not (version.isdecimal() or version in ("", "best", "latest")):
            raise ConfigError(f"{place!r} names no job: write RUN/JOB, RUN/JOB@12, RUN/JOB@best or RUN/JOB@latest")
        if not (Path(path) / "job.yaml").is_file():
            jobs = [str(file.parent) for file in sorted(Path(path).glob("*/job.yaml"))][:8]
            raise ConfigError(f"{path} is no job's directory: write {' or '.join(jobs) if jobs else 'RUN/JOB'}")
        record, directory = read_job(Path(path)), JobDirectory(Path(path))
        done = directory.newest()
        newest = max([done.step if done else 0, *map(int, record.evaluations.xs)])
        named = int(directory.version_named(version).name[1:]) if version else newest
        if named > newest:
            raise RunError(f"{path} has done {newest} steps: there is no version {named}")
        return cls(name, record, directory, named)

    @property
    def evaluated(self) -> list[int]:
        """The job's versions with a held-out figure."""
        return [int(x) for x in self.record.evaluations.xs if x <= self.version]

    def settings(self) -> dict[str, Any]:
        """The fields of job.yaml, except those that receipts cover."""
        job = {name: value for name, value in self.record.job.items() if name != "name"}
        return job | {name: value for name, value in self.record.config.items() if name not in _TOLD_OTHERWISE}

    def materials(self) -> Mapping[str, str] | None:
        """Digests of base, data and code, by the receipt of the newest version that has one."""
        for version in range(self.version, -1, -1):
            with contextlib.suppress(RunError):
                return materials_of(read_receipt(self.directory.receipts / f"v{version}.json"))
        return None

    def sums(self) -> dict[int, Any]:
        """sha256 of the rollouts of each step."""
        named = ((str(line.get("file")).removesuffix(".jsonl"), line) for line in read_lines(self.directory.checksums))
        return {int(name): line.get("sha256") for name, line in named if name.isdecimal() and int(name) < self.version}


def diff(places: tuple[str, str], *, rollouts: bool, step: int | None, limit: int, report: Path | None) -> None:
    """Print where two jobs differ, and write it as JSON if asked."""
    check_place("--json", report)
    first, second = (Compared.of(*pair) for pair in zip(places, short_names(places), strict=True))
    settings, known = list(fields_apart(first.settings(), second.settings())), [first.materials(), second.materials()]
    materials = [] if None in known else list(fields_apart(known[0], known[1]))
    headings = f"{first.name.replace(',', ';')},{second.name.replace(',', ';')}"
    say(table([[name, *map(_cut, pair)] for name, *pair in settings], f"setting,{headings}", empty="settings: equal"))
    none = "unknown without receipts of both jobs" if None in known else "equal"
    shown = [[name, *(str(digest or "none")[:_SHOWN] for digest in pair)] for name, *pair in materials]
    say(table(shown, f"material,{headings}", empty=f"base, data and code: {none}"))
    sums, others = first.sums(), second.sums()
    parted = min((step for step in sums.keys() & others.keys() if sums[step] != others[step]), default=None)
    if parted is not None:
        say(f"recorded rollouts differ from step {parted} on")
    facts: dict[str, Any] = {
        "jobs": [{"name": x.name, "path": str(x.directory.path), "version": x.version} for x in (first, second)],
        "settings": [dict(zip(("setting", "first", "second"), row, strict=True)) for row in settings],
        "materials": [dict(zip(("material", "first", "second"), row, strict=True)) for row in materials],
        "rollouts_differ_from": parted,
        "held_out": _print_curves(first, second, headings),
    }
    if rollouts:
        facts["rollouts"] = _side_by_side(first, second, step, limit)
    if report is not None:
        replace_file(report, json.dumps(as_json(facts), indent=1, ensure_ascii=False).encode(errors="replace"))


def _cut(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"


def _print_curves(first: Compared, second: Compared, headings: str) -> list[dict[str, Any]]:
    """Print held-out figures at the versions that both jobs evaluated, and at each job's newest if those differ."""
    pairs = [(version, version) for version in first.evaluated if version in second.evaluated]
    if first.evaluated and second.evaluated:
        newest = (first.evaluated[-1], second.evaluated[-1])
        pairs += [newest] * (newest not in pairs)
    rows, facts, last = [], [], None
    for at, to in pairs:
        jobs = [
            evaluated_at(side.directory.path, side.record, version) for side, version in ((first, at), (second, to))
        ]
        both = not jobs[0].problems or not jobs[1].problems or jobs[0].problems.keys() & jobs[1].problems.keys()
        sides = [side_of_job(side.name, job) for side, job in zip((first, second), jobs, strict=True)]
        last = compare(sides, best_first=False)[0] if both else None
        told = (_signed(last.more), last.verdict) if last else ("", "other problems")
        rows.append([f"v{at}" if at == to else f"v{at}, v{to}", *(f"{job.figure:.3f}" for job in jobs), *told])
        figures = {"versions": [at, to], "first": jobs[0].figure, "second": jobs[1].figure}
        facts.append(figures | ({"difference": asdict(last.more)} if last else {}))
    say(table(rows, f"version,>{headings.replace(',', ',>')},>difference,verdict", empty="held-out: none"))
    if last is not None:
        say("\n".join(["[…]: 95 % interval by Student's t over problems, for each version by itself", *last.notes]))
    return facts


def _side_by_side(first: Compared, second: Compared, step: int | None, limit: int) -> list[dict[str, Any]]:
    """Print the answers of both jobs to the same problems, largest difference of reward first.

    The answers are from the newest evaluation of both, or from the training of a step.

    Raises:
        RunError: they have none in common.
    """
    common = [version for version in first.evaluated if version in second.evaluated]
    if step is None and not common:
        raise RunError("the jobs were not evaluated at the same version: name a step with --step")
    file = f"rollouts/{f'eval-{common[-1]}' if step is None else step}.jsonl"
    answers, others = (by_problem(read_lines(side.directory.path / file)) for side in (first, second))
    same = [problem for problem in answers if problem in others]
    if not same:
        raise RunError(f"no problem has answers of both jobs in {file}")
    same.sort(key=lambda problem: -abs(_mean(others[problem]) - _mean(answers[problem])))
    say(f"answers of {file}, {min(limit, len(same))} of {len(same)} problems, the largest differences first")
    found = []
    for problem in same[:limit]:
        asked = {name: answers[problem][0].get(name) for name in ("prompt", "answer")}
        say(f"\n{asked['prompt']}\n  reference: {asked['answer']}")
        pair, shown = (answers[problem], others[problem]), ("completion", "reward", "error")
        kept = [[{name: line.get(name) for name in shown} for line in lines] for lines in pair]
        for side, lines in zip((first, second), pair, strict=True):
            for line in lines:
                outcome = line.get("error") or f"{number(line.get('reward')) or 0:.3g}"
                say(f"  {side.name}  {outcome:>6}  {line.get('completion')!r}")
        found.append({**asked, "answers": kept})
    return found


def _mean(lines: Sequence[Line]) -> float:
    rewards = [number(line.get("reward")) or 0.0 for line in lines]
    return sum(rewards) / len(rewards)
