"""A run of the real pipeline on the fakes: no torch, and no processes unless a test asks for the real reward pool.

run = run_jobs(tmp_path, [job("a"), job("b")])
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from motet.chat.template import Chat
from motet.config import JobConfig, RewardConfig
from motet.config.jobfile import merge
from motet.core.device import Device
from motet.core.token_ids import TokenIds
from motet.core.types import JobState, Message, Problem
from motet.data.dataset import Dataset
from motet.data.problems import Problems
from motet.data.reasoning import ScorerSpec
from motet.rewards.reward_answers import NO_CONTEXT, AnswerContext, ScoreOutcome
from motet.rewards.reward_pool import RewardPool
from motet.runtime.directory_checks import open_job
from motet.runtime.job import Agents, Job, Services
from motet.runtime.learner import Learner
from motet.runtime.pipeline import Pipeline
from motet.runtime.progress import JobProgress
from motet.runtime.rundir import RunDirectory
from motet.runtime.scheduler import FairScheduler
from motet.runtime.slots import Rule
from tests.support.fake_base import END, VOCABULARY, FakeTokenizer
from tests.support.fake_engine import FakeEngine, FakeSync
from tests.support.fake_trainer import FakeTrainer
from tests.support.waiting import PATIENCE

LINE = {
    "reward": 0.3,
    "reward_std": 0.4,
    "no_signal": 0.2,
    "distinct": 0.8,
    "rollouts": 64,
    "groups": 8,
    "entropy": 1.0,
}
"""Metrics of a step of a job that learns well."""


def vowels(problem: Problem, completion: str) -> float:
    """The default reward: the share of vowels and a little for length; it differs nearly always."""
    return sum(letter in "aeiou" for letter in completion) / (1 + len(completion)) + 0.001 * len(completion)


def job(name: str, **fields: Any) -> JobConfig:
    """A small job; tables given are merged into these."""
    tree = {
        "name": name,
        "data": "in memory",
        "reward": vowels,
        "adapter": {"rank": 4, "alpha": 8.0},
        "sampling": {"max_tokens": 6},
        "algorithm": {"group_size": 4, "groups_per_step": 3},
        "optimizer": {"lr": 0.05},
        "steps": 4,
        "eval": {"every": 2},
        "seed": sum(map(ord, name)),
    }
    return JobConfig.model_validate(merge(tree, fields))


def problems(n: int, first: int = 0) -> tuple[Problem, ...]:
    """Problems whose answer is a letter."""
    return tuple(
        Problem(first + i, (Message("user", f"letter {first + i}? "),), chr(97 + (first + i) % 26)) for i in range(n)
    )


class InlineRewards(RewardPool):
    """Calls reward functions in this process, after a suspension: the pool without its processes."""

    def __init__(self) -> None:
        super().__init__()
        self._rewards: dict[str, Sequence[RewardConfig]] = {}

    async def register(
        self,
        job: str,
        rewards: Sequence[RewardConfig],
        scorer: ScorerSpec | None = None,
        log: Path | None = None,
        columns: Sequence[str] | None = None,
        payer: str = "",
        tenant: str = "",
    ) -> None:
        await asyncio.sleep(0)
        self._rewards[job] = rewards

    async def unregister(self, job: str) -> None:
        await asyncio.sleep(0)
        self._rewards.pop(job, None)

    async def score(
        self, job: str, problem: Problem, completions: Sequence[str], context: AnswerContext = NO_CONTEXT
    ) -> list[ScoreOutcome]:
        scored = []
        for completion in completions:
            await asyncio.sleep(0)
            try:
                parts = {reward.name: float(reward.function(problem, completion)) for reward in self._rewards[job]}
                reward = sum(one.weight * parts[one.name] for one in self._rewards[job])
                scored.append(ScoreOutcome(reward, parts))
            except ValueError as error:
                scored.append(ScoreOutcome(float("nan"), {}, f"raised {error}"))
        return scored


@dataclass
class FakeRun:
    """Everything of one run, for tests that look inside."""

    pipeline: Pipeline
    jobs: Mapping[str, Job]
    services: Services
    engine: FakeEngine
    trainer: FakeTrainer

    def state(self, name: str) -> JobState:
        return self.jobs[name].state


@dataclass
class Setting:
    """What differs between runs without being allowed to matter, and the faulty parts that tests plant."""

    slots: int = 8
    capacity: int = 12
    jitter: int | None = 0
    train_tokens: int = 256
    micro_batch_tokens: int = 64
    tolerance: float = 0.0
    threads: int = 1
    holdout: int = 4
    problems: type[Problems] = Problems
    engine: Callable[..., FakeEngine] = FakeEngine
    sync: Callable[..., FakeSync] = FakeSync
    trainer: Callable[..., FakeTrainer] = FakeTrainer
    learner: Callable[..., Learner] = Learner
    rewards: Callable[[], RewardPool] = InlineRewards
    agents: Agents | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    tenants: Mapping[str, str] = field(default_factory=dict)
    """Of jobs, by name."""
    rules: Mapping[str, Rule] = field(default_factory=dict)
    """Of tenants."""
    max_idle: float | None = None
    """Seconds after which jobs that only wait for scores lose their slots; the pipeline then stays when its jobs have ended."""
    step_seconds: float = 60.0
    """Seconds that a step may go on after its job must give its slot away."""
    ordered: Callable[[list[JobConfig]], Sequence[JobConfig]] = list
    """In which order the pipeline gets the jobs."""
    late: frozenset[str] = frozenset()
    """Jobs that the pipeline does not get at first."""


Script = Callable[[FakeRun], Awaitable[None]]
"""What happens while a run goes on."""


def make_job(config: JobConfig, directory: RunDirectory, setting: Setting) -> Job:
    """A job over problems in memory, its directory opened."""
    rate = config.optimizer.lr
    assert not isinstance(rate, str)
    made = Job(
        config=config,
        data=Dataset(
            setting.problems.of(problems(20)),
            setting.problems.of(problems(setting.holdout, first=100)),
            None,
            shuffle=config.data.shuffle,
        ),
        chat=Chat(FakeTokenizer(), chat_template=False),
        directory=directory.job(config.name),
        base_rate=rate,
        stop_token_ids=(END,),
        progress=JobProgress.of(config),
        tenant=setting.tenants.get(config.name, ""),
    )
    open_job(
        made.directory, {"job": config.model_dump(mode="json", exclude={"budget", "stop_when"}), **setting.identity}
    )
    return made


async def _run(
    directory: RunDirectory, configs: Sequence[JobConfig], setting: Setting, script: Script | None
) -> FakeRun:
    device = Device()
    engine = setting.engine(capacity=setting.capacity, jitter=setting.jitter)
    trainer = setting.trainer(slots=setting.slots)
    scheduler = FairScheduler(engine.capacity)
    services = Services(
        engine=engine,
        trainer=trainer,
        sync=setting.sync(engine, trainer.weights),
        device=device,
        scheduler=scheduler,
        learner=setting.learner(trainer, device, setting.train_tokens, scheduler),
        rewards=setting.rewards(),
        micro_batch_tokens=setting.micro_batch_tokens,
        probe_tolerance=setting.tolerance,
        engine_suffix=f"{directory.run_id}.{directory.attempt}",
        threads=setting.threads,
        positions=4096,
        vocabulary=TokenIds(VOCABULARY),
        agents=setting.agents,
    )
    made = [make_job(config, directory, setting) for config in setting.ordered(list(configs))]
    jobs = {one.name: one for one in made}
    taken = [one for one in jobs.values() if one.name not in setting.late]
    stays = setting.max_idle is not None
    idle, step = setting.max_idle or 0.0, setting.step_seconds
    pipeline = Pipeline(taken, services, setting.slots, stays=stays, max_idle=idle, step_seconds=step)
    for tenant, rule in setting.rules.items():
        pipeline.rule(tenant, rule)
    run = FakeRun(pipeline, jobs, services, engine, trainer)
    acting = asyncio.create_task(_act(run, script))
    try:
        async with asyncio.timeout(PATIENCE):
            await run.pipeline.run()
            await acting
    finally:
        acting.cancel()
        await asyncio.gather(acting, return_exceptions=True)
        await services.rewards.close()
        device.close()
    return run


async def _act(run: FakeRun, script: Script | None) -> None:
    try:
        if script is not None:
            await script(run)
    except BaseException:  # the test has failed: do not wait for jobs that it meant to end
        run.pipeline.stop()
        raise


def run_jobs(
    path: Path, configs: Sequence[JobConfig], setting: Setting | None = None, script: Script | None = None
) -> FakeRun:
    """Run jobs to their end in a run directory; a second call on the same path goes on."""
    directory = RunDirectory(path)
    try:
        return asyncio.run(_run(directory, configs, setting or Setting(), script))
    finally:
        directory.close()


def metrics(path: Path, name: str) -> bytes:
    """A job's metrics.jsonl."""
    return (path / name / "metrics.jsonl").read_bytes()


def records(path: Path, name: str) -> list[dict[str, Any]]:
    """The lines of a job's metrics.jsonl, read."""
    return [json.loads(line) for line in metrics(path, name).splitlines()]


def weights(path: Path, name: str, version: int) -> bytes:
    """The bytes of one version."""
    return (path / name / "versions" / f"v{version}" / "adapter_model.safetensors").read_bytes()
