"""`motet check`: load everything, show prompts, sample and score a few rollouts, estimate signal, memory and time."""

from __future__ import annotations

import contextlib
import functools
import math
import resource
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from motet.algorithms.policy_gradient import to_sample
from motet.algorithms.rows import RowAlgorithm
from motet.commands.answers import print_table
from motet.commands.as_template import compared, tokens_shown
from motet.commands.forecast import (
    FirstSteps,
    Forecast,
    Seconds,
    forecast,
    never_said,
    signal_of,
    thought_of,
    warnings_of,
)
from motet.commands.run import print_rates
from motet.config import EngineConfig, JobConfig, PricesConfig, RunConfig
from motet.core.batch import Batch, Segment
from motet.core.errors import ConfigError, RunError, for_scripts
from motet.core.types import Group
from motet.data.rows import row_of
from motet.hosts.checks import Checked, check_run
from motet.hosts.host import Host, opened_host
from motet.hosts.launch import auto_kernels, own_switches
from motet.hosts.preparing import notes_of, prepare_all
from motet.hosts.running import config_of
from motet.observe.text import duration_text, plain_console
from motet.observe.trackers import load as load_observer
from motet.rewards import reference_check
from motet.rewards.reward_elsewhere import weights_of
from motet.runtime.answer_signs import Earned
from motet.runtime.held_out import LOG_LIKELIHOOD
from motet.runtime.interrupt import Interrupt
from motet.runtime.job import Job, Services
from motet.runtime.metrics import group_metrics
from motet.runtime.rundir import RunDirectory
from motet.runtime.sampling import JobSampler
from motet.runtime.step_records import SampledStep
from motet.runtime.versions import Versions

if TYPE_CHECKING:
    from motet.model.lora_model import LoraModel
    from motet.training.sharded.base import ShardedBase

PROBLEMS = 4
"""Problems sampled per job."""


@for_scripts
def check(
    jobs: Sequence[JobConfig | dict[str, Any]],
    *,
    base: str = "small",
    engine: EngineConfig | dict[str, Any] | None = None,
    rollouts: int = 16,
    ask: bool = False,
) -> bool:
    """Show the first prompts of jobs, sample and score a few rollouts, and train nothing: `motet check` from Python.

    Accepts the same jobs as `motet.run`. With `ask`, judges and remote rewards are asked about
    reference answers too. Returns whether each job has an answer that got a reward.

    Raises:
        ConfigError: a field is wrong.
        MotetError: nothing could start.
    """
    return check_config(config_of(jobs, base, engine, "motet.check"), rollouts, ask=ask)


def check_config(config: RunConfig, rollouts: int, *, ask: bool = False) -> bool:
    """Check jobs as `motet run` would use them; train nothing and write nothing to the run directory.

    Returns whether each job has an answer that got a reward, and can be resumed if it has begun.
    """
    console, failing = plain_console(), list[str]()
    if team := next((job.name for job in config.jobs if job.team), None):
        raise ConfigError(
            f"job {team}: `motet check` samples no team; train one step instead: motet run FILE --set steps=1 --run DIRECTORY"
        )
    for one in config.observers:
        load_observer(one)
    with TemporaryDirectory(prefix="motet-check-") as scratch, contextlib.ExitStack() as stack:
        directory = stack.enter_context(contextlib.closing(RunDirectory(Path(scratch))))
        checked = check_run(config, accept_changes=True)
        refused = _print_changes(console, checked)
        console.print(f"loading {config.base} …")
        alone = config.model_copy(update={"engine": config.engine.model_copy(update={"samplers": 0})})
        stack.enter_context(own_switches())
        jobs = functools.partial(prepare_all, checked, directory)
        own = auto_kernels(config.engine, (given.directory for given in checked.jobs))
        host = stack.enter_context(opened_host(alone, directory, own, jobs))
        for note in [*host.workshop.notes, *notes_of(host.jobs)]:
            console.print(f"note: {note}", soft_wrap=True)
        here: Any = getattr(host.base, "here", host.base)  # None if ranks alone load the base
        head: Any = getattr(here, "head", None)
        for job in () if head is None else host.jobs:
            if unsaid := never_said(job.chat, job.data.train, head.twins):
                console.print(f"job {job.name}: {unsaid}", style="red", highlight=False, soft_wrap=True)
        print_rates(console, host.jobs)
        steps = {given.config.name: FirstSteps.read(given.directory) for given in checked.jobs}
        begun = {name: found for name, found in steps.items() if found is not None and name not in refused}
        Interrupt().run(lambda: _check_all(console, host.jobs, host, rollouts, failing, config.prices, begun, ask))
        console.print(_longest(host.base, config.engine, max(need.tokens for need in host.needs)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    share = config.engine.host_kv_memory_fraction
    beside = f" and {share:.0%} of free host memory for preempted sequences" if share else ""
    kv_tokens = host.workshop.kv_tokens
    held = f"KV cache: {kv_tokens:,} tokens{beside} · " if kv_tokens else ""
    console.print(f"{held}peak memory so far: {peak:.1f} GiB · nothing was trained")
    return not failing and not refused


def _print_changes(console: Console, checked: Checked) -> set[str]:
    """Print and return the jobs that `motet run` would refuse to resume."""
    refused = set[str]()
    for given in checked.jobs:
        try:
            given.check(accept_changes=False)
        except RunError as error:
            refused.add(given.config.name)
            console.print(f"motet run refuses this: {error}", style="red", soft_wrap=True)
    return refused


def _longest(base: LoraModel | ShardedBase, engine: EngineConfig, needed: int) -> str:
    """The longest sequence that can be trained in the memory that is free now; jobs allow one of `needed` tokens."""
    from motet.model.accelerator import free_memory
    from motet.model.lora_model import LoraModel
    from motet.training.memory import longest_sample, pass_memory

    if not isinstance(base, LoraModel):
        return "longest sequence that can be trained: not estimated for several ranks"
    free, most = free_memory(base.device), base.info.max_positions
    fits = {"": longest_sample(base, engine.kept_tokens, free), "recompute": longest_sample(base, 0, free)}
    if base.kernels is None:  # own kernels do not know it
        fits["offload"] = pass_memory(base, recompute=True, offload=True).longest(free)
    fits = {option: min(most, longest) for option, longest in fits.items()}
    now = "offload" if engine.offload else ""
    others = "".join(
        f", with engine.{option} {longer:,}"
        for option, longer in fits.items()
        if fits[now] < longer and fits[now] < most
    )
    too_long = f"; one of {needed:,}, which these jobs allow, would not fit" if needed > fits[now] else ""
    return (
        f"longest sequence that can be trained: about {fits[now]:,} tokens{others} (the base allows "
        f"{most:,}; {free / 2**30:.1f} GiB of memory are free){too_long}"
    )


async def _check_all(
    console: Console,
    jobs: Sequence[Job],
    host: Host,
    rollouts: int,
    failing: list[str],
    prices: PricesConfig,
    begun: Mapping[str, FirstSteps],
    ask: bool,
) -> None:
    """`failing` gets the jobs in which no answer got a reward; `begun` has the jobs that the run directory has steps of."""
    failures: list[str] = []
    forecasts: list[tuple[str, Forecast]] = []
    table = Table(
        "job", "train / held out", "reward", "groups with signal", "answer length", "truncated", "a step", "all steps"
    )
    async with host.open():
        shared = host.services
        for job in jobs:
            if isinstance(algorithm := job.config.algorithm, RowAlgorithm):
                table.add_row(*await _check_rows(console, job, shared))
                _say_tokens(console, job, algorithm.kind, [])
                continue
            sampled, took = await _check_job(console, job, shared, rollouts)
            _say_tokens(console, job, None, sampled.groups)
            spend, held_out = shared.rewards.spend(job.name), len(job.data.holdout)
            whole = took.whole(job.config, held_out)
            table.add_row(*_row(job, took.step, whole, _figures(sampled.groups)))
            forecasts.append((job.name, forecast(job.config, sampled.groups, took, spend, held_out)))
            failures += [
                f"job {job.name}: {warning}"
                for warning in warnings_of(job.config, job.chat, job.data.train, sampled.groups)
            ]
            own, data = job.config, job.data
            found = await reference_check.check(shared.rewards, job.name, own.rewards, data, own.data.answer, ask)
            failures += [f"job {job.name}: {line}" for line in found]
            reasons = [rollout.error for group in sampled.groups for rollout in group.rollouts]
            failed = Counter(reason for reason in reasons if reason)
            failing += [job.name] * (failed.total() == len(reasons))
            if warning := thought_of(job.config, sampled.groups) or signal_of(job.config, sampled.groups):
                failures.append(f"job {job.name}, from {len(reasons)} answers: {warning}")
            if warning := _never(job, sampled.groups):
                failures.append(f"job {job.name}: {warning}")
            if failed:
                (commonest, _), *_ = failed.most_common(1)
                failures.append(
                    f"job {job.name}: {failed.total()} of {len(reasons)} answers got no reward: {commonest}"
                )
    print_table(console, table)
    for line in failures:
        console.print(line, style="red", highlight=False, soft_wrap=True)
    for name, foreseen in forecasts:
        console.print(f"job {name}: {foreseen.text(prices)}", highlight=False, soft_wrap=True)
        if name in begun:
            console.print(f"job {name}: {foreseen.against(begun[name])}", highlight=False, soft_wrap=True)
    console.print("times are for each job alone, from a few rollouts; jobs that run together fill each other's gaps")


def _say_tokens(console: Console, job: Job, kind: str | None, groups: Sequence[Group]) -> None:
    for line in compared(job.chat, job.data.train, kind, groups):
        console.print(line, highlight=False, soft_wrap=True)


def _never(job: Job, groups: Sequence[Group]) -> str:
    earned = Earned()
    for rollout in (scored for group in groups for scored in group.scored):
        earned.see({"reward_parts": rollout.reward_parts})
    return earned.never(weights_of(job.config.rewards), PROBLEMS, "answers")


def _parts(parts: Mapping[str, float]) -> str:
    """What each part of a reward is, where it has several."""
    return f" ({', '.join(f'{name} {value:.3g}' for name, value in parts.items())})" if len(parts) > 1 else ""


def _row(job: Job, step: float, whole: float, figures: tuple[str, str, str, str]) -> tuple[str, ...]:
    """Cells of the table: seconds of a step and of the whole job, and the figures from the reward to the truncated share."""
    rows = f"{len(job.data.train)} / {len(job.data.holdout)}"
    return job.name, rows, *figures, f"≈ {step:.1f} s", f"≈ {duration_text(whole)}"


def _figures(groups: Sequence[Group]) -> tuple[str, str, str, str]:
    figures, signal = group_metrics(groups), f"{sum(group.has_signal for group in groups)} of {len(groups)}"
    if math.isnan(figures["length"]):
        return "none", signal, "", ""
    reward = "none" if math.isnan(figures["reward"]) else f"{figures['reward']:.3g}{_parts(figures['reward_parts'])}"
    return reward, signal, f"{figures['length']:.0f} tokens", f"{figures['truncated']:.0%}"


async def _check_job(console: Console, job: Job, shared: Services, rollouts: int) -> tuple[SampledStep, Seconds]:
    config = job.config
    few = job.config.rl.model_copy(update={"group_size": rollouts, "groups_per_step": PROBLEMS, "oversampling": 1.0})
    job.config = config.model_copy(update={"algorithm": few})
    shared.scheduler.join(job.name, 1.0)
    await _add(job, shared)
    versions = Versions(job.name, f"{job.name}.{shared.engine_suffix}.check", shared.engine, shared.sync)
    await versions.publish(0)
    await versions.announce(0, 0)
    sampler = JobSampler(job, shared, versions)
    job.directory.path.mkdir(parents=True)
    await sampler.open()
    try:
        sampled = await sampler.step(0)
        load = shared.rewards.load(job.name)
    finally:
        await sampler.close()
    job.config = config
    _show(console, job, sampled.groups[0])
    train_seconds = await _train_seconds(job, shared, sampled)
    await versions.drop_all()
    await shared.on_device(job.name, lambda: shared.trainer.remove_adapter(job.name))
    shared.scheduler.leave(job.name)
    asked = PROBLEMS * rollouts
    groups, held_out = config.rl.groups_per_step * config.rl.oversampling, len(job.data.holdout)
    wanted, sampling = groups * config.rl.group_size, sampled.seconds - job.progress.training.scored_alone

    def seconds(answers: float) -> float:
        """Additional rows take no more time until the engine is full."""
        return sampling * max(1.0, answers / max(asked, shared.engine.capacity))

    def scoring(problems: float, n: int) -> float:
        """Calls run at once up to a number, and then one after the other."""
        each, together = load.each / asked * problems * n, load.together / PROBLEMS * problems
        least = max(load.each / asked, load.together / PROBLEMS) if problems else 0.0
        return max(least, (each + together) / load.at_once)

    return sampled, Seconds(
        seconds(wanted),
        train_seconds * wanted / asked,
        seconds(held_out * config.eval.n),
        scoring(groups, config.rl.group_size),
        scoring(held_out, config.eval.n),
    )


async def _add(job: Job, shared: Services) -> None:
    """The adapter at the start of the job."""
    adapter, trainer = job.config.adapter, shared.trainer
    await shared.on_device(job.name, lambda: trainer.add_adapter(job.name, adapter, job.seed))
    if adapter.init is not None and job.before is None:  # the adapter of an earlier job in the file does not exist yet
        await shared.on_device(job.name, lambda: trainer.load_adapter(job.name, job.init_directory(), optimizer=False))


async def _check_rows(console: Console, job: Job, shared: Services) -> tuple[str, ...]:
    """A row of the table for a job that learns rows, from the likelihood of a few answers; also shows the first row."""
    algorithm = job.config.algorithm
    assert isinstance(algorithm, RowAlgorithm)
    n = algorithm.rows_per_step
    rows = job.data.window(0, min(PROBLEMS, n), job.seed, n)
    read = [row_of(row, algorithm.kind, job.chat, job.config.data.source) for row in rows]
    batch = algorithm.batch(read, shared.positions or None)
    _title(console, job)
    first = batch.samples[0]
    console.print(tokens_shown(job.chat, first.token_ids, first.loss_mask), highlight=False, soft_wrap=True)
    if (n := len(batch.samples)) > len(rows) and algorithm.kind == "answer":
        what = f"the first {len(rows)} rows are {n} examples, {batch.tokens} tokens"
        console.print(f"{what}: the template rewrites earlier turns", highlight=False, soft_wrap=True)
    await _add(job, shared)
    started = time.perf_counter()
    parts = [Batch((one,)) for one in batch.segments(job.name, None, 1.0, shared.micro_batch_tokens)]
    scored = await shared.on_device(job.name, lambda: [shared.trainer.forward(part) for part in parts])
    seconds = 3 * (time.perf_counter() - started) * algorithm.rows_per_step / len(rows)
    await shared.on_device(job.name, lambda: shared.trainer.remove_adapter(job.name))
    tokens = sum(sample.n_trainable for sample in batch.samples)
    likelihood = sum(float(some.sum()) for ((*logprobs,),) in scored for some in logprobs) / tokens
    figures = (f"{LOG_LIKELIHOOD} {likelihood:.3g}", "", f"{tokens / len(rows):.0f} tokens", "")
    return _row(job, seconds, seconds * job.config.steps, figures)


def _title(console: Console, job: Job) -> None:
    console.rule(job.name)
    if job.data.columns:
        console.print(f"columns: {job.data.columns}", highlight=False, soft_wrap=True)
    console.print(f"turns: {job.chat.form.told}", highlight=False, soft_wrap=True)


def _show(console: Console, job: Job, group: Group) -> None:
    """Show the first problem of the first step: what the model reads, token by token, and the answers."""

    def show(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    _title(console, job)
    read = next((one.prompt_ids for one in group.rollouts if one.branches), job.chat.prompt_ids(group.problem))
    show(tokens_shown(job.chat, read))
    others = {one.prompt_ids.tobytes() for one in group.rollouts if one.branches} - {read.tobytes()}
    differ = f"; {len(others)} other prompts in this group" if others else ""
    show(f"{len(read)} tokens are read before the first answer{differ}")
    show(f"reference answer: {group.problem.answer!r}")
    for rollout in group.rollouts:
        outcome = rollout.error or f"{rollout.reward:.3g}{_parts(rollout.reward_parts)}"
        if not any(turn.replies for turn in rollout.turns):
            show(f"  {outcome:>6}  {rollout.completion!r}")
            continue
        n = len(rollout.turns)
        show(f"  {outcome:>6}  a conversation of {n} turn{'' if n == 1 else 's'}")
        for turn in rollout.turns:
            worth = "" if turn.reward is None else f"  (reward {turn.reward:.3g})"
            show(f"          {'assistant':>9}  {turn.text!r}{worth}")
            for reply in turn.replies:
                show(f"          {reply.role:>9}  {reply.content!r}")


async def _train_seconds(job: Job, shared: Services, sampled: SampledStep) -> float:
    """The time of a forward pass over the rollouts, times three for the backward pass, which is not run."""
    samples = tuple(
        to_sample(branch, 0.0)
        for group in sampled.groups
        for rollout in group.rollouts
        for branch in rollout.branches
        if branch.sampled
    )
    if not samples:
        return 0.0
    started = time.perf_counter()
    share = getattr(job.config.algorithm, "share_prefixes", False)
    batch = Batch((Segment(job.name, samples, share_prefixes=share),))
    await shared.on_device(job.name, lambda: shared.trainer.forward(batch))
    return 3 * (time.perf_counter() - started)
