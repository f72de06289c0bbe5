"""`motet eval`: the base and versions of adapters on the same problems, with the same random numbers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from motet.algorithms.rows import RowAlgorithm
from motet.commands.answers import INTERRUPTED, check_place, say, say_untrained, table
from motet.commands.candidates import known_jobs
from motet.commands.compare import print_differences
from motet.config import JobConfig, RunConfig
from motet.config.jobfile import check_fields, load_jobs
from motet.core.checksums import replace_file
from motet.core.errors import ConfigError, RunError
from motet.core.plain_json import as_json
from motet.core.suggestions import close_matches
from motet.core.types import AdapterRef, Group
from motet.data.sources import has_splits
from motet.hosts.checks import check_run
from motet.hosts.host import Host, opened_host
from motet.hosts.launch import auto_kernels
from motet.hosts.preparing import prepare_all
from motet.model.find import find_adapter
from motet.observe.report.comparison import Difference
from motet.observe.trackers import write_parquet
from motet.runtime.checkpoint import JobDirectory, dump_line
from motet.runtime.interrupt import Interrupt
from motet.runtime.job import Job, Services
from motet.runtime.metrics import errors_of, group_metrics, rollout_records
from motet.runtime.rundir import RunDirectory
from motet.runtime.sampling import JobSampler
from motet.runtime.settings import Mean
from motet.runtime.step_records import SampledStep
from motet.runtime.versions import Versions

_FORMATS = (".jsonl", ".parquet")
_OF_ROWS = (
    "prompt answer template system chat_template chat_template_kwargs tool_format thoughts max_prompt_tokens".split()
)
"""The `data` fields that a job keeps when other rows are evaluated."""


@dataclass(frozen=True)
class Asked:
    """Settings of an evaluation besides the models."""

    task: str | None = None
    """The job whose problems, rewards and environment count; by default the first that is named."""
    data: str | None = None
    """A source of problems to use instead of the held-out rows."""
    rewards: Sequence[str] = ()
    """Rewards to use instead of the job's."""
    rows: int | None = None
    samples: int = 1
    greedy: bool = False
    seed: int = 0
    base: bool = True
    """Whether the base is evaluated too."""
    solved: float = 1.0
    """The lowest reward of an answer that passes."""


@dataclass
class Model:
    """The base, or a version of an adapter, and its answers so far."""

    name: str
    path: Path | None
    """The PEFT directory; None is the base."""
    groups: list[Group] = field(default_factory=list)
    """The group of each finished row, in order."""

    @property
    def rewards(self) -> dict[int, float]:
        """Mean reward of each row, by its position; rows without a scored answer are left out."""
        return {
            place: fmean(rollout.reward for rollout in group.scored)
            for place, group in enumerate(self.groups)
            if group.scored
        }

    def passed(self, solved: float) -> Mean:
        """Share of rows in which at least one answer has at least this reward."""
        return Mean.of([float(any(one.reward >= solved for one in group.scored)) for group in self.groups])

    def summary(self, asked: Asked) -> dict[str, Any]:
        """The figures of a model."""
        rewards, figures = list(self.rewards.values()), group_metrics(self.groups)
        return {
            "model": self.name,
            "path": None if self.path is None else str(self.path),
            "reward": asdict(Mean.of(rewards)) if rewards else None,
            f"pass@{asked.samples}": asdict(self.passed(asked.solved)),
            **{name: figures[name] for name in ("length", "truncated", "rollouts", "failed")},
            "errors": errors_of(self.groups),
        }


class _Places(Versions):
    """Adapters by their position in the list; the base has none."""

    def __init__(self, job: str, shared: Services, models: Sequence[Model]) -> None:
        super().__init__(job, f"{job}.{shared.engine_suffix}.eval", shared.engine, shared.sync)
        self._models = models

    @contextlib.contextmanager
    def hold(self, version: int, role: str = "") -> Iterator[AdapterRef | None]:
        """Keep an adapter while sampling from it."""
        if self._models[version].path is None:
            yield None
            return
        with super().hold(version, role) as ref:
            yield ref


def evaluate(
    path: Path,
    names: Sequence[str],
    asked: Asked,
    overrides: Sequence[str],
    *,
    report: Path | None,
    out: Path | None,
    trust_remote_code: bool,
) -> int:
    """Evaluate and print; returns 0, 1 if no answer of a model got a reward, or 130 after Ctrl-C."""
    if out is not None and (out.suffix not in _FORMATS or out.exists()):
        raise ConfigError(f"--out {out}: give a new file that ends with {' or '.join(_FORMATS)}")
    if out is not None and out.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise ConfigError("--out: .parquet needs pyarrow, which is not installed: pip install pyarrow, or write .jsonl")
    check_place("--out", out)
    check_place("--json", report)
    if asked.greedy and asked.samples > 1:
        raise ConfigError("--greedy gives the same answer each time: leave out --samples")
    config = load_jobs(path, overrides, trust_remote_code=trust_remote_code)
    models = [*([Model("base", None)] if asked.base else []), *find_models(config, names)]
    task = task_of(config, names, asked)
    with TemporaryDirectory(prefix="motet-eval-") as scratch, contextlib.ExitStack() as stack:
        directory = RunDirectory(Path(scratch))
        stack.callback(directory.close)
        engine = config.engine.model_copy(update={"slots": 1})
        alone = config.model_copy(update={"run": scratch, "jobs": [task], "observers": [], "engine": engine})
        begun = {
            name: JobDirectory(Path(config.run) / name) for name in (task.name, *(job.name for job in config.jobs))
        }
        checked = check_run(alone, original=begun[task.name])  # the prompts that the job has
        say(f"loading {config.base} …", aside=True)
        jobs = functools.partial(prepare_all, checked, None)
        host = stack.enter_context(opened_host(alone, directory, auto_kernels(config.engine, begun.values()), jobs))
        (job,) = host.jobs
        rows = (job.data.holdout if asked.data is None else job.data.train)[: asked.rows]
        if not rows:
            raise ConfigError(f"job {job.name} has no held-out rows: give others with --data")
        job.data = replace(job.data, holdout=rows)
        evaluation = _Evaluation(job, models, asked, None if out is None or out.suffix == ".parquet" else out)
        evaluation.run(host)
    done = len(models[-1].groups)
    if done == 0:
        raise RunError("stopped before a row was done")
    differences = _differences(models)
    _print(models, differences, asked, f"{done} of {len(rows)} rows of {asked.data or task.data.source}")
    if out is not None and out.suffix == ".parquet":
        write_parquet(out, [line for model in models for line in _lines(job, model, model.groups)])
    if report is not None:
        facts = {**asdict(asked), "base": config.base, "task": task.name, "rows": done, "of": len(rows)}
        figures = {"models": [model.summary(asked) for model in models], "differences": list(map(asdict, differences))}
        text = json.dumps(as_json({**facts, **figures}), indent=1, ensure_ascii=False)
        replace_file(report, text.encode(errors="replace"))
    if done < len(rows):
        return INTERRUPTED
    return 0 if all(model.rewards for model in models) else 1


def find_models(config: RunConfig, names: Sequence[str]) -> list[Model]:
    """Versions of the jobs of a file, and PEFT directories.

    Raises:
        ConfigError: a name is none of these.
        RunError: the version is not kept.
        AdapterError: a directory holds no adapter.
    """
    written, models = [job.name for job in config.jobs], list[Model]()
    jobs = list(known_jobs(config.jobs, Path(config.run)))
    for name in dict.fromkeys(names):
        job, at, version = name.partition("@")
        if job in jobs:
            if at and version not in ("best", "latest") and not version.isdecimal():
                raise ConfigError(f"{name!r} names no version: write {job}@best, {job}@latest or {job}@12")
            directory = JobDirectory(Path(config.run) / job)
            found = directory.version_named(version or "best")
            if not (kept := directory.versions()):
                raise RunError(
                    f"{config.run} has no version of {job}: train it, or name the directory of its run with --set run=DIRECTORY"
                )
            if not found.is_dir():
                raise RunError(f"{name}: {found} is not there; kept versions: {', '.join(map(str, kept))}")
            say_untrained(found)
            models.append(Model(name if version.isdecimal() else f"{name} ({found.name})", found))
        elif Path(name).exists():
            find_adapter(Path(name))
            say_untrained(Path(name))
            models.append(Model(name, Path(name)))
        else:
            near = close_matches(job, jobs)
            meant = f"; did you mean {near[0]}?" if near else f" ({', '.join(written[:8])})"
            raise ConfigError(f"{name!r} is no job of the file and no directory{meant}")
    return models


def task_of(config: RunConfig, names: Sequence[str], asked: Asked) -> JobConfig:
    """The job whose problems count, with the requested settings instead of its own."""
    jobs, written = known_jobs(config.jobs, Path(config.run)), [job.name for job in config.jobs]
    named = [name.partition("@")[0] for name in names if name.partition("@")[0] in jobs]
    name = asked.task or next(iter(named or (written if len(written) == 1 else ())), None)
    if name not in jobs:
        wrong = "must name" if asked.task is None else f"{asked.task!r} is no job of the file; name"
        raise ConfigError(f"--task {wrong} the job whose problems and rewards to use, one of {', '.join(written[:8])}")
    job = jobs[name]
    if job.team:
        raise ConfigError(
            f"job {name} is a team, which `motet eval` does not play; its training evaluates it (eval.every)"
        )
    tree = job.model_dump(exclude={"algorithm", "stop_when"})
    if asked.data is None and job.data.rows is not None:
        tree["data"]["source"] = job.data.rows
    tree["adapter"]["init"] = None
    tree["eval"] |= {"n": asked.samples, "common_random_numbers": True}
    if asked.greedy:
        tree["eval"]["temperature"] = 0.0
    if asked.data is not None:
        kept = {name: value for name, value in tree["data"].items() if name in _OF_ROWS}
        if has_splits(asked.data):
            kept |= {"split": job.data.eval_split or job.data.split, "subset": job.data.subset}
        tree["data"] = {**kept, "source": asked.data, "holdout": 0, "size": asked.rows}
    if asked.rewards:
        tree["rewards"] = list(asked.rewards)
    elif isinstance(job.algorithm, RowAlgorithm):
        raise ConfigError(f"job {name} learns rows and has no reward: give one with --reward, and problems with --data")
    return check_fields(JobConfig, tree, f"job {name}")


class _Evaluation:
    """Samples rows in blocks, all models of a block at a time, so that the finished rows can be compared at any moment."""

    def __init__(self, job: Job, models: Sequence[Model], asked: Asked, log: Path | None) -> None:
        self._job, self._models, self._asked, self._log = job, models, asked, log
        self._stopped = asyncio.Event()

    def run(self, host: Host) -> None:
        """Sample until all rows are done, or Ctrl-C."""
        interrupt = Interrupt(lambda line: say(line, aside=True))

        async def main() -> None:
            with interrupt.heard(self._stopped.set, list):
                async with host.open():
                    await self._sample(host.services)

        interrupt.run(main)

    async def _sample(self, shared: Services) -> None:
        from rich.progress import Progress

        from motet.observe.text import plain_console

        job, versions = self._job, _Places(self._job.name, shared, self._models)
        sampler, rows = JobSampler(job, shared, versions), len(job.data.holdout)
        block = max(1, 2 * shared.engine.capacity // (len(self._models) * self._asked.samples))
        shared.scheduler.join(job.name, 1.0)
        job.directory.path.mkdir(parents=True)
        try:
            for place, model in enumerate(self._models):
                if model.path is not None:
                    await versions.restore(place, model.path)
            await sampler.open()
            with Progress(console=plain_console(stderr=True), transient=True) as progress:
                bar = progress.add_task("rows", total=rows)
                for first in range(0, rows, block):
                    if self._stopped.is_set():
                        break
                    await self._block(sampler, slice(first, first + block))
                    progress.update(bar, completed=min(first + block, rows))
        finally:
            await sampler.close()
            await versions.drop_all()

    async def _block(self, sampler: JobSampler, part: slice) -> None:
        """Sample some rows with every model, and keep the groups."""
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(sampler.evaluation(place, part, self._asked.seed))
                for place in range(len(self._models))
            ]
        for model, done in zip(self._models, running, strict=True):
            model.groups += done.result().groups
            if self._log is not None:
                with self._log.open("ab") as file:
                    file.writelines(dump_line(line) for line in _lines(self._job, model, done.result().groups))


def _lines(job: Job, model: Model, groups: Sequence[Group]) -> Iterator[Mapping[str, Any]]:
    sampled = SampledStep(0, 0, list(groups), 0.0, 0.0, 0)
    for line in rollout_records(sampled, "eval", job.chat.token_texts):
        yield {
            "model": model.name,
            **{name: value for name, value in line.items() if name not in ("version", "purpose")},
        }


# --- figures -------------------------------------------------------------------------------------------------------


def _differences(models: Sequence[Model]) -> list[Difference]:
    """The difference of each model from the first, row by row; the intervals hold together at 95 % (Bonferroni)."""
    first, *others = models
    before, found = first.rewards, list[Difference]()
    for model in others:
        rewards = model.rewards
        same = [place for place in before if place in rewards]
        if not same:
            continue
        more = Mean.of([rewards[place] - before[place] for place in same], 1 - 0.05 / len(others))
        left = len(model.groups) - len(same)
        notes = (f"{left} row{'' if left == 1 else 's'} without a reward on both sides left out",) * bool(left)
        found.append(Difference(first.name, model.name, 1, len(same), more, notes))
    return found


def _print(models: Sequence[Model], differences: Sequence[Difference], asked: Asked, of: str) -> None:
    several = asked.samples > 1
    how = "greedy" if asked.greedy else f"{asked.samples} answer{'s' * several} each, seed {asked.seed}, drawn anew"
    say(f"{of}, {how}")
    rows = []
    for model in models:
        figures, rewards = model.summary(asked), list(model.rewards.values())
        passed = [_interval(model.passed(asked.solved))] if several else []
        shown = [f"{figures['length']:.0f}", f"{figures['truncated']:.0%}"] if rewards else ["", ""]
        reward = _interval(Mean.of(rewards)) if rewards else "none"
        rows.append([model.name, reward, *passed, *shown, str(figures["failed"] or "")])
    headings = f"model,>reward,{f'>pass@{asked.samples},' if several else ''}>tokens,>truncated,>failed"
    say(table(rows, headings, empty="", folds=("model",)))
    print_differences(differences, pairs=False)
    for model in models:
        for error, count in errors_of(model.groups).items():
            say(f"{model.name}: {count} answer{'' if count == 1 else 's'} got no reward: {error}")


def _interval(mean: Mean) -> str:
    within = "" if math.isnan(mean.half) else f" [{mean.mean - mean.half:.3f}, {mean.mean + mean.half:.3f}]"
    return f"{mean.mean:.3f}{within}"
