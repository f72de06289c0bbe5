"""Sample, forward_backward, optim_step, save: many adapters over one base, for a loop of your own. `examples/loop.py` shows it.

with Verbs("small") as verbs:
    verbs.add_adapter("a", rank=16)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self, TypeVar

from anyio.from_thread import start_blocking_portal

from motet.algorithms.algorithm import StepBatch
from motet.algorithms.client import ClientLoss, batch_of
from motet.chat.template import Chat, stop_token_ids
from motet.config import OF_CLIENT, AdapterConfig, EngineConfig, HostConfig, JobConfig, RolloutConfig, budgets
from motet.config.jobfile import check_fields
from motet.config.service import Largest
from motet.core import seeds
from motet.core.batch import Loss, LossStats, Optimizer, OptimStats, Sample, Segment, Trained
from motet.core.errors import AdapterError
from motet.core.types import Chunk, FloatArray, GenerateRequest, Group, Problem, Rollout, SamplingParams
from motet.data.shared import Sources
from motet.environments.episode import extended
from motet.hosts.host import opened_host
from motet.hosts.launch import auto_kernels, own_switches
from motet.runtime import rundir
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.directory_checks import Given
from motet.runtime.session import FinishedStep, Session

Result = TypeVar("Result")
_LONGEST = 1024
_SHAPE = AdapterConfig()
_STEPS = 10**6
_NEVER = 10**7
"""Steps in a row without a finite gradient after which a session gives up; here the loop decides."""


@dataclass
class _Adapter:
    """A session, and the gradients since its last step."""

    session: Session
    commits: bool
    stats: LossStats = field(default_factory=LossStats)
    samples: int = 0
    tokens: int = 0

    async def open(self) -> None:
        """Take a slot, and publish the version that the session resumes from."""
        self.session.services.scheduler.join(self.session.job.name, 1.0)
        try:
            await self.session.open()
            await self.session.publish()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Give the slot back."""
        session, opened = self.session, self.session.versions.latest >= 0
        try:
            if self.commits and opened and not session.work.moved:
                await session.commit(closed=True)
        finally:
            await session.close()
            session.services.scheduler.leave(session.job.name)
            if not self.commits:
                await asyncio.to_thread(session.job.directory.delete)

    async def forward_backward(self, segments: tuple[Segment, ...]) -> Trained:
        """Add a gradient."""
        parts = await self.session.work.forward_backward(segments)
        trained = Trained(
            sum((one.stats for one in parts), LossStats()), tuple(each for one in parts for each in one.logprobs)
        )
        self.stats += trained.stats
        self.samples += len(trained.logprobs)
        self.tokens += sum(one.work for one in segments)
        return trained

    async def finish(self, optim: OptimStats | None) -> None:
        """Record the next version, commit it, and let it be sampled from."""
        step = FinishedStep.unsampled(self.session.done.step, self.stats, self.samples, optim, self.tokens, seconds={})
        self.stats, self.samples, self.tokens = LossStats(), 0, 0
        await self.session.finish(step, None, commit=self.commits)
        await self.session.publish()


class Verbs:
    """Many adapters over one base, in this process. What comes next is up to you; calls block."""

    def __init__(
        self,
        base: str = "small",
        *,
        engine: EngineConfig | dict[str, Any] | None = None,
        rollout: RolloutConfig | dict[str, Any] | None = None,
        longest: int = _LONGEST,
        directory: str | Path | None = None,
        accept_changes: bool = False,
    ) -> None:
        """Load and prove a base.

        Args:
            base: `small`, a hub id, a directory or a .gguf file.
            engine: the device and its budgets.
            rollout: servers that sample, as in a job file; by default this process does.
            longest: tokens of the longest prompt with its answer.
            directory: a run directory, in which each step is committed; the same loop resumes there. Without one,
                nothing is kept.
            accept_changes: resume adapters there that were added with other settings.

        Raises:
            BaseModelError: the base cannot be used; the message says why.
            ConfigError: a setting cannot work.
            RunError: the directory cannot be used, or another process uses it.
        """
        tree = {"base": base, "engine": engine or ({} if rollout else {"samplers": 0}), "rollout": rollout or {}}
        config = check_fields(HostConfig, tree, "motet.Verbs")
        self._commits, self._starts = directory is not None, Counter[str]()
        self._accept_changes = accept_changes
        self._adapters: dict[str, _Adapter] = {}
        self._asked = 0
        with own_switches(), ExitStack() as opening:
            place = Path(directory or opening.enter_context(TemporaryDirectory(prefix="motet-verbs-")))
            runs = opening.enter_context(rundir.opened(place))
            begun = (JobDirectory(path) for path in sorted(place.iterdir()) if path.is_dir())
            largest = Largest(_SHAPE.rank, 0), budgets.Need(longest, 0)
            self._host = opening.enter_context(opened_host(config, runs, auto_kernels(config.engine, begun), largest))
            tokenizer = self._host.info.tokenizer
            self._chat = Chat.plain(tokenizer)
            self._stops = stop_token_ids(tokenizer, self._host.info.eos_token_ids)
            self._portal = opening.enter_context(start_blocking_portal())
            opening.enter_context(self._portal.wrap_async_context_manager(self._host.open()))
            opening.callback(self._call, self._close)
            self._open = opening.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let the device go."""
        self._open.close()

    def add_adapter(self, name: str, *, rank: int = _SHAPE.rank, alpha: float = _SHAPE.alpha, seed: int = 0) -> int:
        """Take a slot and create an adapter, which is the base until its first step.

        If the directory has commits of this adapter, it resumes from the newest.

        Returns:
            Steps it has done.

        Raises:
            AdapterError: the name is taken, or no slot is free (`EngineConfig.slots`).
            RunError: the directory has another adapter of this name, or is damaged.
        """
        if name in self._adapters:
            raise AdapterError(f"adapter {name!r} exists already")
        tree = {
            "name": name,
            "algorithm": "client",
            "data": {"source": OF_CLIENT},
            "adapter": {"rank": rank, "alpha": alpha},
            "optimizer": {"max_skipped": _NEVER},
            "steps": _STEPS,
            "seed": seed,
        }
        return self._call(lambda: self._add(check_fields(JobConfig, tree, f"adapter {name}")))

    def remove_adapter(self, name: str) -> None:
        """Give its slot back. What was committed stays."""
        adapter = self._adapter(name)
        del self._adapters[name]
        self._call(adapter.close)

    def sample(
        self,
        problems: Mapping[str, Sequence[Problem]],
        n: int = 1,
        *,
        seed: int = 0,
        max_tokens: int = 256,
        temperature: float = 1.0,
    ) -> dict[str, list[Group]]:
        """N answers to each problem, from each adapter's own; all are decoded together. Their rewards are for you to fill in.

        Random numbers depend on `seed`, the problem's id and the answer's index alone.
        """
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, stop_token_ids=self._stops)
        return self._call(lambda: self._sample(problems, n, seed, params))

    def forward_backward(
        self,
        batches: Mapping[str, StepBatch | Sequence[Sample]],
        loss: Loss | str,
        temperature: float = 1.0,
        *,
        loss_fn_config: Mapping[str, float] | None = None,
    ) -> dict[str, Trained]:
        """Add the gradient of each adapter's samples, in one packed pass; sums, and the logprobs of each sample.

        An adapter without samples is left out. Of samples without an algorithm's denominator losses are summed.

        Args:
            batches: of each adapter what an algorithm made (`Algorithm.batch`), or samples made by hand (`algorithms.datum`).
            loss: an algorithm, or the name of one of the Tinker protocol's losses.
            temperature: of the logprobs.
            loss_fn_config: settings of a loss by name.

        Raises:
            ConfigError: there is no such loss or setting, and what there is.
        """
        chosen = ClientLoss.of(loss, loss_fn_config) if isinstance(loss, str) else loss
        return self._call(lambda: self._forward_backward(self._segments(batches, chosen, temperature)))

    def forward(
        self, batches: Mapping[str, StepBatch | Sequence[Sample]], temperature: float = 1.0, *, base: bool = False
    ) -> dict[str, tuple[FloatArray, ...]]:
        """Logprobs of each sample, no gradient; `base=True` leaves the adapters out."""
        return self._call(lambda: self._forward(self._segments(batches, None, temperature), base=base))

    def optim_step(self, name: str, optimizer: Optimizer) -> OptimStats:
        """Clip, step, clear the gradient, and commit in a directory. What is sampled next comes from the new version."""
        return self._call(lambda: self._step(self._adapter(name), optimizer))

    def save_adapter(self, name: str, directory: str | Path, *, optimizer: bool = False) -> None:
        """Write a PEFT directory; with the optimizer's state, `load_adapter` goes on where it was."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._host.workshop.trainer.save_adapter(name, Path(directory), optimizer=optimizer)

    def load_adapter(self, name: str, directory: str | Path, *, optimizer: bool = False) -> None:
        """Read what `save_adapter` wrote, or any plain PEFT LoRA directory, into an adapter of that shape, as a new version."""
        self._call(lambda: self._load(self._adapter(name), Path(directory), optimizer=optimizer))

    # --- in the event loop -----------------------------------------------------------------------------------------------

    async def _add(self, config: JobConfig) -> int:
        host, name = self._host, config.name
        given = Given(config, host.directory.job(name))
        job = await asyncio.to_thread(host.add, given, Sources(), accept_changes=self._accept_changes)
        if not self._commits:
            job.directory.materials = None  # receipts of what nobody keeps
        job.starts = self._starts[name]
        adapter = _Adapter(Session(job, host.services, await asyncio.to_thread(job.directory.restore)), self._commits)
        self._starts[name] = job.starts
        await adapter.open()
        self._adapters[name] = adapter
        return adapter.session.done.step

    async def _close(self) -> None:
        for name in list(self._adapters):
            await self._adapters.pop(name).close()

    async def _forward_backward(self, segments: Mapping[str, tuple[Segment, ...]]) -> dict[str, Trained]:
        adapters = {name: self._adapter(name) for name in segments}
        passes = (adapters[name].forward_backward(parts) for name, parts in segments.items())
        return dict(zip(segments, await asyncio.gather(*passes), strict=True))  # packed together

    async def _forward(
        self, segments: Mapping[str, tuple[Segment, ...]], *, base: bool
    ) -> dict[str, tuple[FloatArray, ...]]:
        sessions = {name: self._adapter(name).session for name in segments}
        passes = (sessions[name].work.forward(parts, base=base) for name, parts in segments.items())
        return dict(zip(segments, map(tuple, await asyncio.gather(*passes)), strict=True))

    async def _step(self, adapter: _Adapter, optimizer: Optimizer) -> OptimStats:
        stats = await adapter.session.work.optim_step(optimizer)
        await adapter.finish(stats)
        return stats

    async def _load(self, adapter: _Adapter, directory: Path, *, optimizer: bool) -> None:
        name = adapter.session.job.name
        await adapter.session.on_device(lambda trainer: trainer.load_adapter(name, directory, optimizer=optimizer))
        await adapter.finish(None)

    async def _sample(
        self, problems: Mapping[str, Sequence[Problem]], n: int, seed: int, params: SamplingParams
    ) -> dict[str, list[Group]]:
        asked = [(name, problem) for name, given in problems.items() for problem in given]
        groups = await asyncio.gather(*(self._group(name, problem, n, seed, params) for name, problem in asked))
        grouped: dict[str, list[Group]] = {name: [] for name in problems}
        for (name, _), group in zip(asked, groups, strict=True):
            grouped[name].append(group)
        return grouped

    async def _group(self, name: str, problem: Problem, n: int, seed: int, params: SamplingParams) -> Group:
        session = self._adapter(name).session
        prompt, versions = replace(self._chat, clock=session.job.chat.clock).prompt_ids(problem), session.versions
        version = versions.latest
        self._asked += 1
        chunks: dict[int, Chunk] = {}
        with versions.hold(version) as ref:
            request = GenerateRequest(
                id=f"{name}/{self._asked}",
                job=name,
                prompt_ids=prompt,
                adapter=ref,
                sampling=params,
                seeds=tuple(seeds.key(seed, "train", problem.id, index) for index in range(n)),
            )
            async for chunk in self._host.workshop.engine.generate(request):
                chunks[chunk.index] = chunk
        rollouts = (
            extended(Rollout(problem, index, (), ()), prompt, chunk, said=self._chat.turn(prompt, chunk))
            for index, chunk in sorted(chunks.items())
        )
        return Group(problem, seed, version, tuple(rollouts))

    def _segments(
        self, batches: Mapping[str, StepBatch | Sequence[Sample]], loss: Loss | None, temperature: float
    ) -> dict[str, tuple[Segment, ...]]:
        """The micro-batches of each adapter that has something to train."""
        whole = {
            name: batch if isinstance(batch, StepBatch) else batch_of(batch, by_sample=loss is not None)
            for name, batch in batches.items()
        }
        budget = self._host.services.micro_batch_tokens
        return {name: batch.segments(name, loss, temperature, budget) for name, batch in whole.items() if batch.samples}

    def _adapter(self, name: str) -> _Adapter:
        if name not in self._adapters:
            raise AdapterError(f"there is no adapter {name!r}")
        return self._adapters[name]

    def _call(self, call: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        with own_switches():
            result: Result = self._portal.call(call)
        return result
