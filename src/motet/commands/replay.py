"""`motet replay` and `motet fork`: derive versions again, and begin new jobs at old steps."""

from __future__ import annotations

import fcntl
import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from motet import __version__
from motet.algorithms.rows import RowAlgorithm
from motet.commands.answers import INTERRUPTED, say, say_untrained
from motet.commands.candidates import known_jobs
from motet.config import JobConfig, RolloutConfig, RunConfig, StopConfig
from motet.config.chain import chains
from motet.config.jobfile import jobs_of, load_jobs
from motet.core.checksums import replace_file
from motet.core.errors import ConfigError, RunError
from motet.core.suggestions import close_matches
from motet.core.types import ADAPTER_CONFIG, JobState
from motet.hosts.running import run_config
from motet.hosts.starts import engine_of_host
from motet.rewards.judge_answers import FILE, JudgeAnswers
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.directory_checks import RULES
from motet.runtime.fork import fork
from motet.runtime.progress import JobProgress
from motet.runtime.receipts import (
    builder_of,
    changed_materials,
    differences,
    fields_apart,
    materials_of,
    outputs_of,
    read_receipt,
    receipt_numbers,
    rules_of,
)
from motet.runtime.rollout_logs import rollout_sums

_MOST = 200
"""Characters of a value that are shown."""
_OF_FORK = b"# Written by `motet fork`, which adds the next job of this run here.\n"
"""First line of a forked job's file."""


@dataclass(frozen=True)
class Range:
    """Steps of a job to derive again: the versions first + 1 … last."""

    job: str
    first: int | None
    last: int | None

    @classmethod
    def of(cls, text: str) -> Range:
        """Read `JOB`, `JOB@8` or `JOB@4..8`.

        Raises:
            ConfigError: it is something else.
        """
        job, at, steps = text.partition("@")
        first, dots, last = steps.partition("..")
        numbers = (first, last) if dots else (last, first)
        if not job or bool(at) != bool(steps) or not all(one.isdecimal() or not one for one in numbers):
            raise ConfigError(f"{text!r} names no steps: write JOB, JOB@8 or JOB@4..8")
        begin, end = (int(one) if one else None for one in numbers)
        if end is not None and end <= (begin or 0):
            raise ConfigError(
                f"{text!r} names no step: the second number must be the larger one, and the first version is 1"
            )
        return cls(job, begin, end)


class _Reached(Exception):
    """The last step that was asked for is done."""


def replay(path: Path, text: str, overrides: Sequence[str], into: Path | None, *, trust_remote_code: bool) -> int:
    """Derive versions again and compare; returns 0 where all bytes are equal, 130 after Ctrl-C, 1 otherwise."""
    wanted, config = Range.of(text), load_jobs(path, overrides, trust_remote_code=trust_remote_code)
    job = _job_of(config, wanted.job)
    if config.rollout.engine != "embedded" and not isinstance(job.algorithm, RowAlgorithm):
        raise ConfigError(
            f"servers ({config.rollout.engine}) sampled the rollouts of {job.name}, and they cannot be sampled again: replay "
            "jobs whose rollouts Motet samples, and check this one with `motet verify`"
        )
    original = JobDirectory(Path(config.run) / job.name)
    first, last = _bounds(wanted, original)
    _check_rules(original, (first + 1, last))
    if last > job.steps:
        raise ConfigError(
            f"version {last} of {job.name} cannot be trained again: the job file has {job.steps} steps; give the same --set "
            "options as in the first run"
        )
    if into is not None and into.exists() and any(into.iterdir()):
        raise RunError(f"{into} is not empty: give another directory with --run")
    with tempfile.TemporaryDirectory(prefix="motet-replay-") as folder:
        run = into or Path(folder)
        again = JobDirectory(run / job.name)
        if first:
            run.mkdir(exist_ok=True)
            fork(original, first, again.path, job.algorithm.lag)
        else:  # what judges said is a fact of the run, as its data is
            JudgeAnswers(original.path / FILE).copy(again.path / FILE)
        versions = f"version {last}" if last == first + 1 else f"versions {first + 1} to {last}"
        say(f"deriving {versions} of {job.name} again …")
        # commits change no bit, and with one a step every receipt of the original has its version here
        each = job.checkpoint.model_copy(update={"every": 1})
        whole = job.model_copy(update={"checkpoint": each, "stop_when": StopConfig(), "budget": None})
        engine = engine_of_host(config.engine, 0)  # the job was on one of them
        # rows are not sampled, so no server is asked
        alone = {"run": str(run), "engine": engine, "rollout": RolloutConfig(), "jobs": [whole], "observers": []}
        seconds = _train(config.model_copy(update=alone), last, original)
        if seconds is None:
            say(f"stopped before version {last}, so nothing was compared")
            return INTERRUPTED
        parted = list(partings(original, again, first, last))
        facts = (list(_other_facts(original, again, version)) for version in range(first + 1, last + 1))
        for line in next(filter(None, facts), []):  # before a fork or an accepted change, there may be others
            say(f"  {line}")
        if parted:
            say("\n".join(parted))
            return 1
    say(f"{job.name}, {versions}: the same bytes, and the same rollouts ({seconds:.0f} s)")
    return 0


def _bounds(wanted: Range, original: JobDirectory) -> tuple[int, int]:
    """The versions before and at the end of the steps to derive again.

    Raises:
        MotetError: the run does not have what it takes.
    """
    if (newest := original.newest()) is None:
        raise RunError(f"{original.path} has no commit: nothing was trained there yet")
    last = newest.step if wanted.last is None else wanted.last
    if not 0 < last <= newest.step:
        raise ConfigError(f"{wanted.job} has done {newest.step} steps: there is no version {last} to train again")
    if not (original.receipts / f"v{last}.json").is_file():
        known = receipt_numbers(original.receipts)
        raise RunError(
            f"version {last} of {wanted.job} has no receipt to compare with; it has those of versions "
            f"{', '.join(map(str, known)) or 'none: an earlier Motet trained it'}"
        )
    nearest = max((step for step in original.steps() if step < last), default=0)
    first = nearest if wanted.first is None and wanted.last is not None else wanted.first or 0
    if first >= last:
        raise ConfigError(f"{wanted.job}@{first}..{last} has no step: {wanted.job} has done {newest.step}")
    if first and first not in original.steps():
        raise RunError(
            f"{original.path} keeps no commit of step {first} to begin at; begin at 0, or at one of "
            f"{', '.join(map(str, original.steps()))}"
        )
    return first, last


def _check_rules(original: JobDirectory, versions: Iterable[int]) -> None:
    """Refuse versions that were trained by other rules, which nobody can train again here. Raises RunError."""
    for number in versions:
        if (path := original.receipts / f"v{number}.json").is_file():
            receipt = read_receipt(path)
            if (rules := rules_of(receipt)) != RULES:
                raise RunError(
                    f"version {number} of {original.path.name} was trained by Motet {builder_of(receipt)} with rules {rules}, "
                    f"and this is Motet {__version__} with rules {RULES}: train it again with that Motet"
                )


def _job_of(config: RunConfig, name: str) -> JobConfig:
    jobs = known_jobs(config.jobs, Path(config.run))
    if name not in jobs:
        near = close_matches(name, list(jobs), 1)
        raise ConfigError(f"there is no job {name!r}{f'; did you mean {near[0]!r}?' if near else ''}")
    if start := chains(config.jobs).get(name):
        raise ConfigError(
            f"job {name} begins with the adapter of {start.job}: set its adapter.init to the directory of that version"
        )
    return jobs[name]


def _train(config: RunConfig, last: int, original: JobDirectory) -> float | None:
    """Run one job up to a step; gives the seconds, None after Ctrl-C."""

    def observe(progress: Sequence[JobProgress]) -> None:
        if progress[0].step >= last:
            raise _Reached

    began = time.monotonic()
    try:
        result = run_config(config, observe=observe, notify=say, original=original)
        done = next(iter(result.jobs.values()))
        if done.state is JobState.PAUSED:
            return None
        if done.state is not JobState.SUCCEEDED:
            raise RunError(f"the job {done.state.value}: {done.message}")
    except _Reached:
        pass
    return time.monotonic() - began


def _other_facts(original: JobDirectory, again: JobDirectory, version: int) -> Iterator[str]:
    """What a version is made of that is not the same here."""
    paths = [job.receipts / f"v{version}.json" for job in (original, again)]
    if not all(path.is_file() for path in paths):
        return
    old, new = map(read_receipt, paths)
    yield from changed_materials(materials_of(old), materials_of(new))
    for part in ("externalParameters", "internalParameters"):
        pair = (one["predicate"]["buildDefinition"][part] for one in (old, new))
        yield from (line for line in differences(*pair) if not line.startswith(("inexact:", "computed_before")))
    yield from differences(*(one["predicate"]["runDetails"]["builder"]["version"] for one in (old, new)))


def partings(original: JobDirectory, again: JobDirectory, first: int, last: int) -> Iterator[str]:
    """Where two trainings of a job part first, in words; nothing where they do not."""
    (old, lines), (new, lines_again) = map(_recorded, (original, again))
    here, there = _configs(original, again)
    for step in range(first, last):
        name = f"{step}.jsonl"
        if name in old and old[name] != new.get(name):
            yield f"the runs first differ in step {step}, in its rollouts: {_first_row(original, again, step)}"
            return
        if (changed := _first_difference(lines.get(step, {}), lines_again.get(step, {}))) is not None:
            yield f"the runs first differ in step {step}, in metrics.jsonl: {changed}"
            return
        receipts = [job.receipts / f"v{step + 1}.json" for job in (original, again)]
        if receipts[0].is_file():
            before, now = (outputs_of(read_receipt(path)) for path in receipts)
            if now.get(ADAPTER_CONFIG) == here:
                now[ADAPTER_CONFIG] = there
            for file in (file for file in before if before[file] != now.get(file)):
                yield f"the runs first differ in step {step}: {file} of version {step + 1} has another sha256"
                return


def _configs(original: JobDirectory, again: JobDirectory) -> tuple[str, str]:
    """sha256 of the adapter's config here, and of the same with the place where the original run had its base."""
    then, now = ((job.path / "state" / str(job.steps()[-1]) / ADAPTER_CONFIG).read_bytes() for job in (original, again))
    here, there = (json.dumps(json.loads(one)["base_model_name_or_path"]).encode() for one in (now, then))
    return sha256(now).hexdigest(), sha256(now.replace(here, there)).hexdigest()


def _recorded(job: JobDirectory) -> tuple[Mapping[str, str], Mapping[int, Mapping[str, Any]]]:
    """sha256 of each file of rollouts, and the metrics of each step; evaluations, which a pause adds, are left out."""
    done = job.newest()
    assert done is not None
    lines = ({name: value for name, value in line.items() if name != "eval"} for line in job.read_metrics(done))
    return rollout_sums(job.checksums, done.checksums_bytes), {int(line["step"]): line for line in lines}


def _first_row(original: JobDirectory, again: JobDirectory, step: int) -> str:
    if step not in original.sampled():
        return f"{original.path / 'rollouts' / f'{step}.jsonl'} was deleted, so the row is unknown"
    rows = zip_longest(original.each_rollout(step), again.each_rollout(step))
    for number, (old, new) in enumerate(rows):
        if (changed := _first_difference(old or {}, new or {})) is not None:
            return f"row {number}, {changed}"
    return "the file was edited, its rows are the same"


def _first_difference(old: Any, new: Any, field: str = "") -> str | None:
    if old == new:
        return None
    if isinstance(old, dict) and isinstance(new, dict):
        names = [*old, *(name for name in new if name not in old)]
        parts = ((old.get(name), new.get(name), f"{field}.{name}" if field else name) for name in names)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        parts = ((*pair, f"{field}[{place}]") for place, pair in enumerate(zip(old, new, strict=True)))
    else:
        shown = [json.dumps(one, ensure_ascii=False)[:_MOST] for one in (old, new)]
        return f"field {field}: was {shown[0]}, is {shown[1]}"
    return next((found for part in parts if (found := _first_difference(*part)) is not None), None)


def fork_job(path: Path, text: str, run: Path, name: str | None, overrides: Sequence[str]) -> None:
    """Begin a new job at a commit of another, with its job file beside it."""
    there = [one for one in overrides if one.startswith("run=")]  # of the old job: the new one's is given
    named, _, version = text.partition("@")
    chosen = version in ("best", "latest")
    wanted, config = Range.of(named if chosen else text), load_jobs(path, there)
    if not chosen and (wanted.last is None or wanted.first is not None):
        raise ConfigError(f"{text!r} must name one step, such as {wanted.job}@8 or {wanted.job}@best")
    own = _job_of(config, wanted.job)
    original = JobDirectory(Path(config.run) / own.name)
    step = int(
        (original.version_named(version) if chosen else original.version(wanted.last or 0)).name.removeprefix("v")
    )
    tree = _tree(config.model_copy(update={"run": str(run), "jobs": [own]}))
    (fields,) = tree["jobs"]
    same = {"name": name or own.name, "seed": own.effective_seed}  # a name counts only by its seed
    fields |= same
    new = jobs_of(tree, str(path), [one for one in overrides if one not in there])
    (job,) = new.jobs
    file = run / "jobs.yaml"
    run.mkdir(parents=True, exist_ok=True)
    with (run / ".lock.forks").open("a") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # another fork would replace the file that this one reads
        content = _job_file(_with_others(new, file))
        fork(original, step, run / job.name, job.algorithm.lag, same)
        replace_file(file, content)
        file.chmod(0o600)  # a reward's arguments may be secret
    say_untrained(original.version(step))
    say(f"{job.name} begins at step {step} of {original.path}; train it: motet run {file}")


def _with_others(new: RunConfig, file: Path) -> RunConfig:
    """A new job with those that were forked into the same run before.

    Raises:
        ConfigError: the file there has something that would get lost.
    """
    if not file.exists():
        return new
    there = file.read_bytes()
    known = load_jobs(file) if there.startswith(_OF_FORK) else None
    if known is None or _job_file(known) != there:
        raise ConfigError(
            f"{file} was not written by `motet fork`, or somebody edited it: fork into another run directory, or move the file"
        )
    before, now = (one.model_dump(exclude_unset=True, exclude={"run", "jobs"}) for one in (known, new))
    if apart := [field for field, _, _ in fields_apart(before, now)]:
        raise ConfigError(f"{file} has a different {', '.join(apart)}: fork into another run directory")
    names = {job.name for job in new.jobs}
    return new.model_copy(update={"jobs": [*(job for job in known.jobs if job.name not in names), *new.jobs]})


def _job_file(config: RunConfig) -> bytes:
    return _OF_FORK + yaml.safe_dump(_tree(config), sort_keys=False, allow_unicode=True).encode()


def _tree(config: RunConfig) -> dict[str, Any]:
    """A job file's values, with the rows that stand in it."""
    tree = config.model_dump(mode="json", exclude_unset=True)
    for fields, job in zip(tree["jobs"], config.jobs, strict=True):
        if job.data.rows is not None:
            fields["data"]["source"] = job.data.rows
    return tree
