"""The life of one job between taking a slot and giving it back: sample, learn, commit, publish, step by step.

The sample side runs ahead as far as `max_off_policy_steps` lets it; the learn side takes steps in order. A step is:
advantages → micro-batches → forward_backward → optim_step → commit → publish. Nothing is published before it is committed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from motet.errors import JobFailed, ScorerAway
from motet.runtime.checkpoint import Committed
from motet.runtime.job import Job, Services
from motet.runtime.learning import JobLearning
from motet.runtime.metrics import evaluation_record, rollout_records, step_record, timing_record
from motet.runtime.probe import Probe
from motet.runtime.sampling import JobSampler, SampledStep, Supply
from motet.runtime.scheduler import weight_of
from motet.runtime.step_batch import check_failures
from motet.runtime.versions import Versions
from motet.types import JobState


class JobLoop:
    """Runs one job until it ends, is paused or cancelled."""

    def __init__(self, job: Job, services: Services, committed: Committed | None) -> None:
        self._job = job
        self._services = services
        self._done = committed or Committed()
        self._resumed = committed is not None
        job.starts += 1  # a version trained again after a pause or a failure is another one, as it is after a crash
        engine_name = f"{job.name}.{services.engine_suffix}.{job.starts}"
        self._versions = Versions(job.name, engine_name, services.engine, services.sync, services.keep_versions)
        supply = Supply(self._done.position, set(self._done.pending))
        self.sampler = JobSampler(job, services, self._versions, supply)
        self._learning = JobLearning(job, services)
        self._probe = Probe(job.name, job.chat.prompt_ids(job.data.train[0]), services.probe_tolerance)
        self._steps: dict[int, asyncio.Task[SampledStep]] = {}
        self._evaluation: asyncio.Task[SampledStep] | None = None
        self._pause = False
        self._resident = False
        self._publish_seconds = 0.0
        self._moved = False
        """Whether the trainer is ahead of what was done."""

    def pause(self) -> None:
        """Stop after the step under way; at once where it waits for somebody to score, and nobody is there."""
        self._pause = True
        self._services.rewards.rest(self._job.name, True)

    def go_on(self) -> None:
        """Do not stop after all."""
        self._pause = False
        self._services.rewards.rest(self._job.name, False)

    async def run(self) -> JobState:
        """Train until done or paused; cancellation and failure leave by exception. The slot is free afterwards."""
        job, services = self._job, self._services
        services.scheduler.join(job.name, weight_of(job.config.priority), job.tenant)
        try:
            await self._start()
            while self._done.step < job.config.steps:
                job.progress.spent = self._spent()
                if self._pause or job.progress.spent:
                    await self._commit(self._done)
                    return JobState.PAUSED
                await self._step(self._done.step)
            await self._finish()
            return JobState.SUCCEEDED
        except (ScorerAway, ExceptionGroup) as error:
            if not _only_away(error):
                raise
            if not self._moved:
                await self._commit(self._done)
            return JobState.PAUSED if self._pause else JobState.QUEUED
        finally:
            await self._leave()

    def _spent(self) -> bool:
        """Whether the job may not begin another step because its budget is used up."""
        budget, done = self._job.config.budget, self._done
        return budget is not None and done.tokens >= budget and done.step < self._job.config.steps

    # --- start and end -----------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        """Take a slot, restore what was committed, and make the versions that may be asked for servable."""
        job, services, start = self._job, self._services, self._done.step
        config, state = job.config, job.directory.path / "state"
        await services.rewards.register(
            job.name, config.rewards, job.data.scorer, log=job.directory.path / "rewards.log"
        )
        await services.on_device(job.name, lambda: services.trainer.add_adapter(config.name, config.adapter, job.seed))
        self._resident = True
        if self._resumed:
            await services.on_device(
                job.name, lambda: services.trainer.load_adapter(config.name, state / str(start), optimizer=True)
            )
            for reason in self._done.inexact:
                job.note_inexact(reason)
            if self._done.threads != services.threads:
                job.note_inexact(
                    f"torch threads changed from {self._done.threads} to {services.threads} at step {start}"
                )
            for version in range(self._oldest_needed(), start):
                await self._versions.restore(version, state / str(version))
        else:
            if config.adapter.init is not None:
                source = job.init_directory()
                await services.on_device(
                    job.name, lambda: services.trainer.load_adapter(config.name, source, optimizer=False)
                )
            await self._commit(replace(self._done, threads=services.threads))
        job.progress.step = job.progress.first_step = start
        job.progress.started = time.monotonic()
        await self._publish()

    def _oldest_needed(self) -> int:
        """The oldest version that a step not yet trained samples from."""
        return max(0, self._done.step - self._job.config.algorithm.max_off_policy_steps)

    async def _publish(self) -> None:
        """Publish the version just committed, probe it, and let sampling have it."""
        job, services, version = self._job, self._services, self._done.step
        started = time.monotonic()
        await self._versions.publish(version)
        trained = await services.device.run(lambda: self._probe.trained(services.trainer), light=True)
        await self._probe.check(services.engine, self._versions.ref(version), trained)
        self._publish_seconds = time.monotonic() - started
        await self._versions.announce(version, self._oldest_needed())
        if self._spent():
            return
        if job.evaluates(version) and self._done.evaluated < version:
            self._evaluation = asyncio.create_task(self.sampler.evaluation(version))
        last = min(job.config.steps, version + job.config.algorithm.max_off_policy_steps + 1)
        for step in range(version, last):
            if step not in self._steps and not self._pause:
                self._steps[step] = asyncio.create_task(self.sampler.step(step))

    async def _finish(self) -> None:
        """Evaluate the last version and record it in a last line of the metrics."""
        evaluation, tokens = await self._evaluated()
        if evaluation is not None:
            version, directory = self._done.step, self._job.directory
            record = {"step": version, "version": version, "eval": evaluation}
            directory.append(directory.metrics, record)
            seconds = {"sample": 0.0, "reward": 0.0, "train": 0.0, "publish": self._publish_seconds}
            directory.append(directory.timings, timing_record(version, seconds, tokens, 0, self._services.device.busy))
            self._job.tell("step", {**record, "tokens_sampled": tokens, "tokens_trained": 0})
            done = replace(self._done, tokens_sampled=self._done.tokens_sampled + tokens)
            self._done = _with_evaluation(done, version, evaluation)
        await self._commit(self._done)

    async def _leave(self) -> None:
        """Give everything back, whatever happened."""
        services, name = self._services, self._job.name
        tasks = [*self._steps.values(), *([self._evaluation] if self._evaluation else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        services.scheduler.leave(name)
        await services.rewards.unregister(name)
        await self._versions.drop_all()
        if self._resident:
            await services.on_device(name, lambda: services.trainer.remove_adapter(name))

    # --- one step ----------------------------------------------------------------------------------------------------

    async def _step(self, step: int) -> None:
        job, services = self._job, self._services
        if step not in self._steps:
            self._steps[step] = asyncio.create_task(self.sampler.step(step))
        sampled = await self._steps.pop(step)
        check_failures(sampled.groups, job.config.algorithm.max_failed_fraction)
        job.progress.phase = "training"
        started = time.monotonic()
        self._moved = True
        learned = await self._learning.step(sampled)
        trained_seconds = time.monotonic() - started
        evaluation, evaluated = await self._evaluated()
        record = step_record(sampled, learned)
        if evaluation is not None:
            record["eval"] = evaluation
        counts = {"tokens_sampled": sampled.tokens + evaluated, "tokens_trained": learned.tokens}
        told, supply = (counts["tokens_sampled"], counts["tokens_trained"]), self.sampler.supply
        supply.pending.difference_update(sampled.positions)
        skipped = self._done.skipped_in_row + 1 if learned.optim is not None and learned.optim.skipped else 0
        done = replace(
            _with_evaluation(self._done, step, evaluation),
            step=step + 1,
            skipped_in_row=skipped,
            tokens_sampled=self._done.tokens_sampled + counts["tokens_sampled"],
            tokens_trained=self._done.tokens_trained + counts["tokens_trained"],
            position=supply.position,
            pending=tuple(sorted(supply.pending)),
            threads=services.threads,
            inexact=tuple(job.inexact),
        )
        seconds = {
            "sample": sampled.seconds,
            "reward": sampled.reward_seconds,
            "train": trained_seconds,
            "publish": self._publish_seconds,
        }
        await self._record(sampled, record, timing_record(step, seconds, *told, services.device.busy))
        if skipped >= job.config.optimizer.max_skipped:
            raise JobFailed(
                f"the gradient was not finite in {skipped} steps in a row (optimizer.max_skipped); lower optimizer.lr, or look "
                "at the rewards and the data of the last rollouts"
            )
        self._done, self._moved = done, False
        if self._commits(step + 1):
            await self._commit(done)
        job.progress.step = step + 1
        job.progress.tokens += learned.tokens
        job.progress.stepped(record)
        job.tell("step", {**record, **counts, "seconds": seconds})
        await self._publish()

    def _commits(self, version: int) -> bool:
        """Whether a version goes to disk: also where it may turn out the best, and where a resumed job samples from it."""
        config = self._job.config
        wanted = version % config.checkpoint.every == 0 or version == config.steps or self._pause
        return wanted or self._job.evaluates(version) or config.algorithm.max_off_policy_steps > 0

    async def _evaluated(self) -> tuple[dict[str, Any] | None, int]:
        """The evaluation of the version that the step under way started from, once it is there: its record and its tokens."""
        if self._evaluation is None:
            return None, 0
        self._job.progress.phase = "evaluating"
        evaluation = await self._evaluation
        self._evaluation = None
        check_failures(evaluation.groups, self._job.config.algorithm.max_failed_fraction)
        lines = rollout_records(evaluation, "eval", self._job.chat.token_texts)
        await asyncio.to_thread(self._job.directory.write_rollouts, f"eval-{evaluation.version}", lines)
        record = evaluation_record(evaluation)
        self._job.progress.evaluated(evaluation.version, record)
        return record, evaluation.tokens

    # --- disk --------------------------------------------------------------------------------------------------------

    async def _record(self, sampled: SampledStep, record: dict[str, Any], timing: dict[str, Any]) -> None:
        directory = self._job.directory

        def write() -> None:
            lines = rollout_records(sampled, "train", self._job.chat.token_texts)
            directory.write_rollouts(str(sampled.step), lines)
            directory.append(directory.metrics, record)
            directory.append(directory.timings, timing)

        await asyncio.to_thread(write)

    async def _commit(self, done: Committed) -> None:
        job, services = self._job, self._services
        job.progress.phase = "saving"
        keep = max(job.config.checkpoint.keep, job.config.algorithm.max_off_policy_steps + 1)

        def write() -> Committed:
            written = job.directory.commit(
                done, lambda path: services.trainer.save_adapter(job.name, path, optimizer=True)
            )
            job.directory.prune(keep, job.config.checkpoint.rollouts_mb * 2**20)
            return written

        self._done = await asyncio.to_thread(write)


def _with_evaluation(done: Committed, version: int, evaluation: Mapping[str, Any] | None) -> Committed:
    """Remember that a version was evaluated, and whether it is the best so far."""
    if evaluation is None:
        return done
    reward = float(evaluation["reward"])
    if math.isfinite(reward) and (done.best_reward is None or reward > done.best_reward):
        done = replace(done, best_reward=reward, best_version=version)
    return replace(done, evaluated=version)


def _only_away(error: Exception) -> bool:
    """Whether nothing is wrong but that nobody scores."""
    rest = error.split(ScorerAway)[1] if isinstance(error, ExceptionGroup) else None
    return rest is None
