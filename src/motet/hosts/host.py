"""A base with everything that its jobs share, and these jobs: a host takes commands, and its jobs tell their events.

A run of one machine has its host in this process, as `Verbs`, `motet check` and `motet eval` do; those of a service, and
of a run on several hosts, are at the end of channels (`motet.hosts.process`).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from motet.config import HostConfig, budgets
from motet.config.service import Largest
from motet.core.model_info import ModelInfo
from motet.data.shared import ReadData, Sources
from motet.hosts.checks import check_files
from motet.hosts.launch import assemble, open_base
from motet.hosts.preparing import identity, prepare
from motet.hosts.workshop import Workshop
from motet.kernels.cpu.choice import Choice, kernels_of
from motet.rewards.judge_http import of_a_run
from motet.rewards.reward_pool import RewardPool
from motet.runtime.base_judge import BaseJudge
from motet.runtime.directory_checks import Given, open_job
from motet.runtime.job import Agents, Job, Services
from motet.runtime.learner import Learner
from motet.runtime.pipeline import Pipeline
from motet.runtime.progress import JobProgress
from motet.runtime.receipts import Materials
from motet.runtime.rundir import RunDirectory
from motet.runtime.scheduler import FairScheduler

if TYPE_CHECKING:
    from motet.model.lora_model import LoraModel
    from motet.training.sharded.base import ShardedBase

Prepared = list[tuple[Job, budgets.Need]]
"""Jobs, and what each needs."""
MakePipeline = Callable[[Sequence[Job], Services, int], Pipeline]
"""From jobs, services and slots."""


class Host:
    """One base, its engine and trainer, and the jobs on it with their services."""

    def __init__(
        self,
        base: LoraModel | ShardedBase,
        config: HostConfig,
        directory: RunDirectory,
        prepared: Prepared,
        workshop: Workshop,
        rewards: RewardPool | None,
        agents: Agents | None,
        pipeline: MakePipeline,
    ) -> None:
        """As `opened_host` has it."""
        self.base, self.info, self.config, self.directory, self.workshop = base, base.info, config, directory, workshop
        self.jobs, self.needs = [job for job, _ in prepared], [need for _, need in prepared]
        engine = config.engine
        scheduler = FairScheduler(workshop.engine.capacity * 3 // 2)
        self._judge = BaseJudge(base.info, workshop.engine, scheduler, workshop.kv_tokens)
        if rewards is None:
            rewards = RewardPool(engine.reward_processes, of_a_run(directory.path, self._judge))
        self.services = Services(
            engine=workshop.engine,
            trainer=workshop.trainer,
            sync=workshop.sync,
            device=workshop.device,
            scheduler=scheduler,
            learner=Learner(workshop.trainer, workshop.device, engine.train_tokens, scheduler, workshop.training),
            rewards=rewards,
            micro_batch_tokens=engine.micro_batch_tokens,
            probe_tolerance=workshop.probe_tolerance,
            engine_suffix=f"{directory.run_id}.{directory.attempt}",
            threads=budgets.threads_of(engine) if kernels_of(base.info.processor) == "torch" else 0,
            positions=base.info.max_positions,
            longest=None if workshop.samples is None else workshop.samples.longest,
            vocabulary=base.info.vocabulary,
            functions=base.math,
            exact_logs=config.rollout.engine != "embedded",
            agents=agents,
        )
        self.pipeline = pipeline(self.jobs, self.services, engine.slots)
        self.stop, self.loads, self.notes = self.pipeline.stop, workshop.loads, workshop.notes

    def add(
        self,
        given: Given,
        sources: Sources,
        read: MutableMapping[str, ReadData] | None = None,
        step_tokens: int | None = None,
        *,
        accept_changes: bool = False,
        accept_damage: bool = False,
    ) -> Job:
        """Check and prepare a job that comes now, and open its directory. Arguments as of `prepare` and `take`.

        Raises:
            MotetError: as those; what a job that has begun names was checked then.
            RunError: without `accept_changes`, it began under other rules.
        """
        if given.newest is None:
            check_files([given], sources)
        elif not accept_changes:
            given.check_rules()
        job, need = prepare(given, self.info, sources, read, step_tokens=step_tokens)
        self.take(job, given.known, [need], accept_changes=accept_changes, accept_damage=accept_damage)
        return job

    def take(
        self,
        job: Job,
        known: Mapping[str, Any],
        needs: Sequence[budgets.Need] = (),
        *,
        accept_changes: bool = False,
        accept_damage: bool = False,
    ) -> None:
        """Open the directory of a prepared job.

        Args:
            job: the job.
            known: what `identity.of_config` says of it.
            needs: what it needs, if it was not there when this host was made.
            accept_changes: resume it with other settings than it began with.
            accept_damage: resume it from a commit before a damaged one.

        Raises:
            ConfigError: its longest sample cannot be trained.
            RunError: the directory belongs to a different job or is damaged; the message says what to do.
        """
        self.workshop.check(needs)
        described = identity(job, self.info, self.config, known)
        job.directory.materials = Materials(described, self.info.name, job.data)
        changes = open_job(job.directory, described, accept_changes=accept_changes, accept_damage=accept_damage)
        self._judge.clocks[job.name] = job.chat.clock
        for reason in filter(None, (self.info.inexact, *changes, *self.workshop.inexact)):
            job.note_inexact(reason)

    def progress(self) -> list[JobProgress]:
        """The progress of each job that was there at first."""
        return [job.progress for job in self.jobs]

    async def run(self) -> None:
        """Run its jobs until all have ended or, after `stop`, saved. Raises as `open`."""
        async with self.open():
            await self.pipeline.run()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Context in which jobs run. Raises MotetError if no server can be used, or the device is lost."""
        try:
            async with self.workshop.open():
                yield
        finally:
            await self.services.rewards.close()


@contextlib.contextmanager
def opened_host(
    config: HostConfig,
    directory: RunDirectory,
    own: Choice | None,
    jobs: Callable[[ModelInfo], Prepared] | tuple[Largest, budgets.Need],
    *,
    base: LoraModel | ShardedBase | None = None,
    alone: bool = True,
    rewards: RewardPool | None = None,
    agents: Agents | None = None,
    pipeline: MakePipeline = Pipeline,
) -> Iterator[Host]:
    """Load a base, and build the engine and the trainer on it; all of it ends with the block.

    Args:
        config: of the host.
        directory: where jobs are.
        own: the kernels that `auto` selects; None: the fastest here.
        jobs: prepares them for a base; or the largest that may come, and what one needs.
        base: loaded already; it stays open.
        alone: no other host uses the memory; then it is checked that adapters in all slots fit.
        rewards: by default, they may call any HTTP address.
        agents: for environments whose agents run elsewhere.
        pipeline: by default, one that ends with its jobs.

    Raises:
        BaseModelError: the base cannot be used; the message says why.
        ConfigError: the settings of servers cannot work, or not even one adapter or the longest sample fits.
    """
    with contextlib.ExitStack() as stack:
        if base is None:
            base = open_base(config, directory, stack, own)
        prepared, (largest, *needs) = ([], jobs) if isinstance(jobs, tuple) else (jobs(base.info), (None,))
        wanted, needs = largest or [job.config for job, _ in prepared], [*needs, *(need for _, need in prepared)]
        workshop = assemble(base, config, needs, directory, wanted, alone=alone)
        stack.callback(workshop.close)
        yield Host(base, config, directory, prepared, workshop, rewards, agents, pipeline)
