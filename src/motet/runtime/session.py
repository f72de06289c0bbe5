"""One job's adapter, or those of its team, during training: slots, versions and commits. Its driver decides the next call.

open → forward_backward* → optim_step → finish (record, commit) → publish → … → close. A version is published only after its
commit, if it has one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from motet.chat.clock import date_told
from motet.config import AdapterConfig
from motet.config.job import SEED_BITS
from motet.core import seeds
from motet.core.batch import LossStats, OptimStats
from motet.core.device import used_by
from motet.core.errors import JobFailed
from motet.core.plain_json import as_json
from motet.protocols import Trainer
from motet.runtime.checkpoint import Committed, kept_of
from motet.runtime.directory_checks import RULES
from motet.runtime.held_out import best_after, first_trained, lines_of, unchanged, untrained
from motet.runtime.identity import learned_before
from motet.runtime.job import Job, Services
from motet.runtime.metrics import timing_record, trained_record
from motet.runtime.progress import JobStepped
from motet.runtime.publish_check import Probe, probe_ids
from motet.runtime.shielded import uninterrupted
from motet.runtime.step_work import StepWork
from motet.runtime.stopping import Stopping
from motet.runtime.versions import Versions, adapter_name

Result = TypeVar("Result")


@dataclass(frozen=True)
class Evaluated:
    """The evaluation of one version."""

    version: int
    record: Mapping[str, Any]
    """The `eval` part of a metrics line."""
    score: float
    """The figure that decides the best version; higher is better."""
    tie: float = 0.0
    """Decides between equal scores; higher is better."""
    tokens: int = 0
    """Tokens sampled for it."""


@dataclass(frozen=True)
class FinishedStep:
    """A driver's description of a trained step."""

    record: Mapping[str, Any]
    """The line of metrics.jsonl, without the evaluation."""
    seconds: Mapping[str, float]
    """Keyed by activity."""
    optim: OptimStats | None
    """None if nothing was trainable."""
    tokens_sampled: int = 0
    tokens_trained: int = 0
    position: int = 0
    pending: Iterable[int] = ()
    """Progress through the problems, where steps do not take fixed windows (`Committed`)."""
    rollouts: Iterable[Mapping[str, Any]] | None = field(default=None, repr=False)
    """Lines of the rollout log."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """Why rollouts have no reward (`errors_of`)."""
    reward_range: Sequence[float] | None = None
    """Of its answers (`range_of`)."""

    @classmethod
    def unsampled(
        cls,
        step: int,
        stats: LossStats,
        samples: int,
        optim: OptimStats | None,
        tokens: int,
        figures: Mapping[str, float] | None = None,
        **more: Any,
    ) -> FinishedStep:
        """A step on a number of samples that the job did not sample, with other `figures`; `more` are other fields."""
        record = {"step": step, "version": step, "samples": samples, **trained_record(stats, optim), **(figures or {})}
        return cls(record, optim=optim, tokens_trained=tokens, **more)


class Slot:
    """An adapter's place in the trainer. A cancellation cannot leave it half taken."""

    def __init__(self, session: Session, name: str) -> None:
        self._session, self._name, self._taken = session, name, False

    async def take(self, shape: AdapterConfig, seed: int, *, head: bool = False) -> None:
        """Add a new adapter to the trainer."""
        await uninterrupted(self._take(shape, seed, head))

    async def _take(self, shape: AdapterConfig, seed: int, head: bool) -> None:
        await self._session.on_device(lambda trainer: trainer.add_adapter(self._name, shape, seed, head=head))
        self._taken = True

    async def give_back(self) -> None:
        """Remove the adapter, if it was added."""
        if self._taken:
            self._taken = False
            await uninterrupted(self._session.on_device(lambda trainer: trainer.remove_adapter(self._name)))


@dataclass(frozen=True)
class Member:
    """An adapter that a session trains: of a team one for each role, otherwise the only one."""

    role: str
    """Empty without a team."""
    name: str
    """What the trainer calls it."""
    shape: AdapterConfig
    seed: int
    probe: Probe
    slot: Slot

    def place(self, directory: Path) -> Path:
        """Its files in the directory of a commit or version."""
        return directory / self.role


class Beside(Protocol):
    """An adapter that is trained beside the job's own, and is part of its commits."""

    def save(self, directory: Path) -> None:
        """Write it into a commit's directory."""

    def load(self, trainer: Trainer, directory: Path) -> None:
        """Read what `save` wrote."""


class Session:
    """The slots of a job's adapters, their versions and their commits."""

    def __init__(self, job: Job, services: Services, committed: Committed | None) -> None:
        self.job, self.services = job, services
        self.done = replace(committed or Committed(rules=RULES), clock=job.chat.clock)
        self.work = StepWork(job, services)
        self._resumed = committed is not None
        self._trained = self._resumed and first_trained(lines_of(job.directory.metrics)) is not None
        """Whether the adapter differs from the one that the job began with."""
        when = job.config.stop_when
        self.stopping = Stopping(when, job.directory.read_metrics(self.done) if when.rules else ())
        self.beside: list[Beside] = []
        """Further adapters in a commit's directory."""
        # a version trained again after a pause or failure gets another engine-side name, as after a crash
        job.starts += 1
        engine_name = f"{job.name}.{services.engine_suffix}.{job.starts}"
        roles = tuple(job.config.adapters)
        self.versions = Versions(job.name, engine_name, services.engine, services.sync, roles)
        self.members = tuple(map(self._member, roles))
        self._publish_seconds = 0.0

    def _member(self, role: str) -> Member:
        job = self.job
        name = adapter_name(job.name, role)
        probe = Probe(name, probe_ids(job.chat, job.data.train), self.services.probe_tolerance)
        seed = seeds.key(job.seed, f"role {role}") % (1 << SEED_BITS) if role else job.seed
        return Member(role, name, job.config.adapters[role], seed, probe, Slot(self, name))

    @property
    def oldest_needed(self) -> int:
        """The oldest version that an untrained step samples from."""
        return max(0, self.done.step - self.job.config.algorithm.lag)

    async def open(self) -> None:
        """Take slots, restore the committed state, and load the versions that may be sampled from."""
        job, services, start = self.job, self.services, self.done.step
        adapter, state = job.config.adapter, job.directory.path / "state"
        for member in self.members:
            await member.slot.take(member.shape, member.seed)
        if self._resumed:
            await self._load(state / str(start), optimizer=True)
            for reason in self.done.inexact:
                job.note_inexact(reason)
            if start and self.done.rules != RULES:
                job.note_inexact(f"the rules changed from {self.done.rules} to {RULES} at step {start}")
            self.done = replace(self.done, rules=RULES)
            if services.threads and self.done.threads != services.threads:
                job.note_inexact(
                    f"torch threads changed from {self.done.threads} to {services.threads} at step {start}"
                )
            if self.done.steps not in (0, job.config.steps) and services.rewards.reads_state(job.name):
                job.note_inexact(f"a reward reads trainer_state, and the job had {self.done.steps} steps when it began")
            for version in range(self.oldest_needed, start):
                await self.versions.restore(version, state / str(version))
        else:
            if adapter.init is not None:
                await self._load(start_from := job.init_directory(), optimizer=False)
                if why := await asyncio.to_thread(untrained, start_from):
                    job.note(f"starts from an untrained adapter: {why}")
                if job.before is None and (
                    why := await asyncio.to_thread(learned_before, job.directory.path, start_from)
                ):
                    job.note(why)
            if job.notes:
                job.note("; ".join(job.notes))
            self.done = replace(self.done, threads=services.threads, best_by=job.best_by, steps=job.config.steps)
            await self.commit()
        job.open_work.trained = 0  # of a step that begins again
        job.progress.begin(start)
        if job.chat.clock:
            job.note(date_told(job.chat.clock))

    async def close(self) -> None:
        """Unload all versions and release the slots, also after an error."""
        self.job.open_work.report()
        async with contextlib.AsyncExitStack() as slots:
            for member in self.members:
                slots.push_async_callback(member.slot.give_back)
            await self.versions.drop_all()

    async def _load(self, directory: Path, *, optimizer: bool) -> None:
        """Load all adapters from a commit, or from a PEFT directory."""

        def load(trainer: Trainer) -> None:
            for member in self.members:
                trainer.load_adapter(member.name, member.place(directory), optimizer=optimizer)
            for beside in self.beside if optimizer else ():
                beside.load(trainer, directory)

        await self.on_device(load)

    async def on_device(self, call: Callable[[Trainer], Result]) -> Result:
        """Run a trainer call on the device; its time is charged to the job."""
        return await self.services.on_device(self.job.name, lambda: call(self.services.trainer))

    async def undo(self) -> None:
        """Drop the gradient by loading the last step's adapter and optimizer, which must be committed."""
        await self._load(self.job.directory.path / "state" / str(self.done.step), optimizer=True)
        self.work.finished()

    # --- records, commits, versions ----------------------------------------------------------------------------------

    async def finish(self, step: FinishedStep, evaluated: Evaluated | None, *, commit: bool) -> None:
        """Record a trained step as the next version; with `commit`, also commit it. A step that is recorded is not dropped.

        Raises:
            JobFailed: too many steps in a row had a gradient that was not finite.
        """
        await uninterrupted(self._finish(step, evaluated, commit=commit))

    async def _finish(self, step: FinishedStep, evaluated: Evaluated | None, *, commit: bool) -> None:
        job, done = self.job, self.done
        skipped = done.skipped_in_row + 1 if step.optim is not None and step.optim.skipped else 0
        record = {**step.record, **({} if evaluated is None else {"eval": evaluated.record})}
        tokens = {
            "tokens_sampled": step.tokens_sampled + (0 if evaluated is None else evaluated.tokens),
            "tokens_trained": step.tokens_trained,
        }
        if job.open_work.sampled > tokens["tokens_sampled"]:  # some are of a dropped step: the rest may not hide them
            job.open_work.report()
        seconds = {**step.seconds, "publish": self._publish_seconds}
        norm = None if step.optim is None else step.optim.adapter_norm
        known = {"errors": dict(step.errors) or None, "adapter_norm": norm, "reward_range": step.reward_range}
        beside = {name: value for name, value in known.items() if value is not None}
        await asyncio.to_thread(self._write, record, seconds, tokens, step.rollouts, beside)
        if skipped >= job.config.optimizer.max_skipped:
            raise JobFailed(
                f"the gradient was not finite in {skipped} steps in a row (optimizer.max_skipped); lower optimizer.lr, or look "
                "at the rewards and the data of the last rollouts"
            )
        self.done = replace(
            self._with_evaluation(done, evaluated),
            step=done.step + 1,
            skipped_in_row=skipped,
            tokens_sampled=done.tokens_sampled + tokens["tokens_sampled"],
            tokens_trained=done.tokens_trained + tokens["tokens_trained"],
            position=step.position,
            pending=tuple(sorted(step.pending)),
            threads=self.services.threads,
            inexact=tuple(job.progress.inexact),
        )
        self._trained = self._trained or not unchanged(record)
        self.stopping.see(record)
        if commit:
            await self.commit()
        self.work.finished()
        job.progress.step = self.done.step
        job.progress.tokens += step.tokens_trained
        line = {**record, **beside}
        job.progress.stepped(line)
        best = self.done.best_version == record["step"]
        job.open_work.finished(tokens["tokens_sampled"])
        told = as_json({**line, **tokens, "seconds": seconds})
        job.observer(JobStepped(job.name, told, best, self.done.best_by))

    async def end(self, evaluated: Evaluated | None, seconds: Mapping[str, float]) -> None:
        """Record the evaluation of the last version in a final metrics line, and commit."""
        if evaluated is not None:
            record = {"step": evaluated.version, "version": evaluated.version, "eval": evaluated.record}
            tokens = {"tokens_sampled": evaluated.tokens, "tokens_trained": 0}
            await asyncio.to_thread(self._write, record, {**seconds, "publish": self._publish_seconds}, tokens)
            done = replace(self.done, tokens_sampled=self.done.tokens_sampled + evaluated.tokens)
            self.done = self._with_evaluation(done, evaluated)
            best = self.done.best_version == evaluated.version
            self.job.open_work.finished(evaluated.tokens)
            told = as_json({**record, **tokens})
            self.job.observer(JobStepped(self.job.name, told, best, self.done.best_by))
        await self.commit(closed=True)

    async def commit(self, *, closed: bool = False) -> None:
        """Commit the current step; `closed` if nothing follows before the job is opened again."""
        job, done = self.job, self.done
        job.progress.phase = "saving"
        lag, known = job.config.algorithm.lag, job.directory.steps()
        keep = max(job.config.checkpoint.keep, lag + 1)
        grows = len(kept_of(sorted({*known, done.step}), done.best_version, keep, lag)) > len(known)

        def save(path: Path) -> None:
            for member in self.members:
                member.place(path).mkdir(exist_ok=True)
                self.services.trainer.save_adapter(member.name, member.place(path), optimizer=True, gradient=False)
            for beside in self.beside:
                beside.save(path)
            if grows:  # otherwise an older commit is deleted
                self.services.room.take(job.tenant, path)

        def write() -> Committed:
            written = job.directory.commit(done, save)
            job.directory.prune(keep, job.config.checkpoint.rollouts_mb * 2**20, lag, closed=closed)
            return written

        self.done = await asyncio.to_thread(write)

    async def publish(self) -> None:
        """Load the newest version into the engine, probe it, and announce it for sampling."""
        services, version = self.services, self.done.step
        started = time.monotonic()
        await self.versions.publish(version)
        with used_by(self.job.name, *services.scheduler.payer(self.job.name)):
            for part in self.members:
                trained = await services.device.run(functools.partial(part.probe.trained, services.trainer), light=True)
                await part.probe.check(services.engine, self.versions.ref(version, part.role), trained)
        self._publish_seconds = time.monotonic() - started
        await self.versions.announce(version, self.oldest_needed)

    def _with_evaluation(self, done: Committed, evaluated: Evaluated | None) -> Committed:
        """Record that a version was evaluated, and whether it is the best so far."""
        if evaluated is None:
            return done
        done = best_after(done, evaluated.version, evaluated.score, evaluated.tie, trained=self._trained)
        self.job.progress.choose(done.best_version, done.best_by)
        return replace(done, evaluated=evaluated.version)

    def _write(
        self,
        record: Mapping[str, Any],
        seconds: Mapping[str, float],
        tokens: Mapping[str, int],
        rollouts: Iterable[Mapping[str, Any]] | None = None,
        beside: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        directory, step = self.job.directory, int(record["step"])
        if rollouts is not None:
            directory.write_rollouts(str(step), rollouts)
        directory.append(directory.metrics, record)
        judge = self.services.rewards.spend(self.job.name)
        timing = timing_record(step, seconds, **tokens, busy=self.services.device.busy, judge=judge, beside=beside)
        directory.append(directory.timings, timing)
