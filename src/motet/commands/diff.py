"""`motet diff`: where two jobs differ, in settings, materials, curves and answers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from motet.commands.answers import check_place, say, table
from motet.commands.compare import short_names, signed
from motet.core.checksums import replace_file
from motet.core.errors import ConfigError, RunError
from motet.report.comparison import Difference, by_problem, compare, evaluated, side_of_job
from motet.report.read import JobRecord, Line, number, read_job, read_lines
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.receipts import fields_apart, materials_of, read_receipt
from motet.tasks.plain_json import as_json

_MOST = 60
"""Most characters of a setting in a table."""
_SHOWN = 12
"""Characters of a digest in a table."""
_TOLD_OTHERWISE = ("job", "contents", "code", "computed_before")


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

    def receipt(self) -> Mapping[str, Any] | None:
        """The receipt of the newest version that has one."""
        for version in range(self.version, -1, -1):
            with contextlib.suppress(RunError):
                return read_receipt(self.directory.receipts / f"v{version}.json")
        return None

    def sums(self) -> dict[int, Any]:
        """sha256 of the rollouts of each step."""
        named = ((str(line.get("file")).removesuffix(".jsonl"), line) for line in read_lines(self.directory.checksums))
        return {int(name): line.get("sha256") for name, line in named if name.isdecimal() and int(name) < self.version}

    def answers(self, file: str) -> dict[str, list[Line]]:
        """Recorded rollouts by problem."""
        return by_problem(read_lines(self.directory.path / "rollouts" / f"{file}.jsonl"))


def diff(places: tuple[str, str], *, rollouts: bool, step: int | None, limit: int, report: Path | None) -> None:
    """Print where two jobs differ, and write it as JSON if asked."""
    check_place("--json", report)
    first, second = (Compared.of(*pair) for pair in zip(places, short_names(places), strict=True))
    settings, receipts = list(_settings(first, second)), [side.receipt() for side in (first, second)]
    known = [materials_of(receipt) for receipt in receipts if receipt is not None]
    materials = list(_changed(*known)) if len(known) == 2 else []
    headings = f"{first.name.replace(',', ';')},{second.name.replace(',', ';')}"
    say(table([[name, *map(_cut, pair)] for name, *pair in settings], f"setting,{headings}", empty="settings: equal"))
    none = (
        "base, data and code: equal"
        if len(known) == 2
        else "base, data and code: unknown without receipts of both jobs"
    )
    shown = [[name, *(str(one or "none")[:_SHOWN] for one in pair)] for name, *pair in materials]
    say(table(shown, f"material,{headings}", empty=none))
    sums, others = first.sums(), second.sums()
    parted = min((step for step in sums.keys() & others.keys() if sums[step] != others[step]), default=None)
    if parted is not None:
        say(f"recorded rollouts differ from step {parted} on")
    curves = list(_curves(first, second))
    rows = [
        [
            _versions(at, to),
            f"{a:.3f}",
            f"{b:.3f}",
            *((signed(one.more), one.verdict) if one else ("", "other problems")),
        ]
        for at, to, a, b, one in curves
    ]
    say(table(rows, f"version,>{headings.replace(',', ',>')},>difference,verdict", empty="held-out: none"))
    if curves and (last := curves[-1][-1]) is not None:
        say("\n".join(["[…]: 95 % interval by Student's t over problems, for each version by itself", *last.notes]))
    jobs = [{"name": one.name, "path": str(one.directory.path), "version": one.version} for one in (first, second)]
    facts: dict[str, Any] = {
        "jobs": jobs,
        "settings": [dict(zip(("setting", "first", "second"), row, strict=True)) for row in settings],
        "materials": [dict(zip(("material", "first", "second"), row, strict=True)) for row in materials],
        "rollouts_differ_from": parted,
        "held_out": [
            {"versions": [at, to], "first": a, "second": b, **({"difference": asdict(one.more)} if one else {})}
            for at, to, a, b, one in curves
        ],
    }
    if rollouts:
        facts["rollouts"] = _side_by_side(first, second, step, limit)
    if report is not None:
        replace_file(report, json.dumps(as_json(facts), indent=1, ensure_ascii=False).encode(errors="replace"))


def _settings(first: Compared, second: Compared) -> Iterator[tuple[str, Any, Any]]:
    """Each field of job.yaml that differs, except those that receipts cover."""
    trees = []
    for side in (first, second):
        job = {name: value for name, value in side.record.job.items() if name != "name"}
        others = {name: value for name, value in side.record.config.items() if name not in _TOLD_OTHERWISE}
        trees.append({**job, **others})
    yield from fields_apart(trees[0], trees[1])


def _cut(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"


def _changed(known: Mapping[str, str], others: Mapping[str, str]) -> Iterator[tuple[str, str | None, str | None]]:
    """Each digest of base, data and code that differs."""
    for name in dict.fromkeys([*known, *others]):
        if known.get(name) != others.get(name):
            yield name, known.get(name), others.get(name)


def _curves(first: Compared, second: Compared) -> Iterator[tuple[int, int, float, float, Difference | None]]:
    """Held-out figures at the versions that both jobs evaluated, and at each job's newest if those differ."""
    pairs = [(version, version) for version in first.evaluated if version in second.evaluated]
    if first.evaluated and second.evaluated:
        newest = (first.evaluated[-1], second.evaluated[-1])
        pairs += [newest] * (newest not in pairs)
    for at, to in pairs:
        jobs = [
            evaluated(side.record, read_lines(side.directory.path / "rollouts" / f"eval-{version}.jsonl"), version)
            for side, version in ((first, at), (second, to))
        ]
        sides = [side_of_job(side.name, job) for side, job in zip((first, second), jobs, strict=True)]
        both = not jobs[0].problems or not jobs[1].problems or jobs[0].problems.keys() & jobs[1].problems.keys()
        one = compare(sides, best_first=False)[0] if both else None
        yield at, to, jobs[0].figure, jobs[1].figure, one


def _versions(at: int, to: int) -> str:
    return f"v{at}" if at == to else f"v{at}, v{to}"


def _side_by_side(first: Compared, second: Compared, step: int | None, limit: int) -> list[dict[str, Any]]:
    """Print the answers of both jobs to the same problems, largest difference of reward first.

    The answers are from the newest evaluation of both, or from the training of a step.

    Raises:
        RunError: they have none in common.
    """
    common = [version for version in first.evaluated if version in second.evaluated]
    if step is None and not common:
        raise RunError("the jobs were not evaluated at the same version: name a step with --step")
    file = f"eval-{common[-1]}" if step is None else str(step)
    answers, others = first.answers(file), second.answers(file)
    same = [problem for problem in answers if problem in others]
    if not same:
        raise RunError(f"no problem has answers of both jobs in rollouts/{file}.jsonl")
    same.sort(key=lambda problem: -abs(_mean(others[problem]) - _mean(answers[problem])))
    say(
        f"answers of rollouts/{file}.jsonl, {min(limit, len(same))} of {len(same)} problems, the largest differences first"
    )
    found = []
    for problem in same[:limit]:
        one = answers[problem][0]
        say(f"\n{one.get('prompt')}\n  reference: {one.get('answer')}")
        pair = (answers[problem], others[problem])
        kept = [
            [{name: line.get(name) for name in ("completion", "reward", "error")} for line in some] for some in pair
        ]
        for side, lines in zip((first, second), pair, strict=True):
            for line in lines:
                outcome = line.get("error") or f"{number(line.get('reward')) or 0:.3g}"
                say(f"  {side.name}  {outcome:>6}  {line.get('completion')!r}")
        found.append({"prompt": one.get("prompt"), "answer": one.get("answer"), "answers": kept})
    return found


def _mean(lines: Sequence[Line]) -> float:
    rewards = [number(line.get("reward")) or 0.0 for line in lines]
    return sum(rewards) / len(rewards)
