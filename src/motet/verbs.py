"""Sample, forward_backward, optim_step, save: many adapters over one base, for a loop of your own. `examples/loop.py` shows it.

with Verbs("small") as verbs:
    verbs.add_adapter("a", rank=16)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from anyio.from_thread import start_blocking_portal

from motet import budgets, seeds
from motet.algorithms.algorithm import StepBatch
from motet.algorithms.client import ClientLoss
from motet.batch import AdamW, Batch, Loss, OptimStats, Sample, Segment, Trained
from motet.config import AdapterConfig, EngineConfig
from motet.launch import build, load
from motet.runtime.probe import Probe, probe_ids
from motet.runtime.versions import Versions
from motet.tasks.chat import Chat, stop_token_ids
from motet.tasks.episode import extended
from motet.types import Chunk, FloatArray, GenerateRequest, Group, Problem, Rollout, SamplingParams

Result = TypeVar("Result")
_LONGEST = 1024
_SHAPE = AdapterConfig()


@dataclass
class _Adapter:
    versions: Versions
    probe: Probe
    published: int = 0
    """Versions so far, with any that the probe refused: no number comes back."""


class Verbs:
    """Many adapters over one base, on this machine. What comes next is up to you; calls block."""

    def __init__(self, base: str = "small", *, engine: EngineConfig | None = None, longest: int = _LONGEST) -> None:
        """Load and prove a base.

        Args:
            base: `small`, a hub id, a directory or a .gguf file.
            engine: the device and its budgets.
            longest: tokens of the longest prompt with its answer.

        Raises:
            BaseModelError: the base cannot be used, and why.
        """
        config = engine or EngineConfig(samplers=0)
        model = load(base, config)
        self._info = model.info
        self._workshop = build(model, config, [budgets.Need(longest, 0)])
        self._chat = Chat.plain(self._info.tokenizer)
        self._stops = stop_token_ids(self._info.tokenizer, self._info.eos_token_ids)
        self._probe_ids = probe_ids(self._chat)
        self._adapters: dict[str, _Adapter] = {}
        self._added = self._asked = 0
        self._open = ExitStack()
        self._portal = self._open.enter_context(start_blocking_portal())
        self._open.callback(self._workshop.close)

    def __enter__(self) -> Self:
        """Nothing more to do."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let the device go."""
        self._open.close()

    def add_adapter(self, name: str, *, rank: int = _SHAPE.rank, alpha: float = _SHAPE.alpha, seed: int = 0) -> None:
        """A fresh adapter, which is the base until its first step.

        Raises:
            AdapterError: the name is taken, or no slot is free (`EngineConfig.slots`).
        """
        shape = AdapterConfig(rank=rank, alpha=alpha)
        self._on_device(lambda: self._workshop.trainer.add_adapter(name, shape, seed))
        self._added += 1  # a name that comes back is another adapter
        workshop = self._workshop
        versions = Versions(name, f"{name}.{self._added}", workshop.engine, workshop.sync)
        self._adapters[name] = _Adapter(versions, Probe(name, self._probe_ids, workshop.probe_tolerance))
        self._publish(name)

    def remove_adapter(self, name: str) -> None:
        """Give its slot back."""
        self._on_device(lambda: self._workshop.trainer.remove_adapter(name))
        self._call(self._adapters.pop(name).versions.drop_all)

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
        segments = self._segments(batches, chosen, temperature)
        if not segments:
            return {}
        trained = self._on_device(lambda: self._workshop.trainer.forward_backward(Batch(segments)))
        return {segment.adapter: one for segment, one in zip(segments, trained, strict=True)}

    def forward(
        self, batches: Mapping[str, StepBatch | Sequence[Sample]], temperature: float = 1.0, *, base: bool = False
    ) -> dict[str, tuple[FloatArray, ...]]:
        """Logprobs of each sample, no gradient; `base=True` leaves the adapters out."""
        segments = self._segments(batches, None, temperature)
        if not segments:
            return {}
        logprobs = self._on_device(lambda: self._workshop.trainer.forward(Batch(segments), base=base))
        return {segment.adapter: one for segment, one in zip(segments, logprobs, strict=True)}

    def optim_step(self, name: str, adamw: AdamW) -> OptimStats:
        """Clip, step and clear the gradient; what is sampled next comes from the new version."""
        stats = self._on_device(lambda: self._workshop.trainer.optim_step(name, adamw))
        self._publish(name)
        return stats

    def save_adapter(self, name: str, directory: str | Path, *, optimizer: bool = False) -> None:
        """Write a PEFT directory; with the optimizer's state, `load_adapter` goes on where it was."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._workshop.trainer.save_adapter(name, Path(directory), optimizer=optimizer)

    def load_adapter(self, name: str, directory: str | Path, *, optimizer: bool = False) -> None:
        """Read what `save_adapter` wrote, or any plain PEFT LoRA directory, into an adapter of that shape."""
        self._on_device(lambda: self._workshop.trainer.load_adapter(name, Path(directory), optimizer=optimizer))
        self._publish(name)

    # --- inside --------------------------------------------------------------------------------------------------------

    def _publish(self, name: str) -> None:
        self._call(lambda: self._publish_probed(self._adapters[name]))

    async def _publish_probed(self, adapter: _Adapter) -> None:
        """As a session does; a commit is the caller's `save_adapter`."""
        version, versions, workshop = adapter.published, adapter.versions, self._workshop
        adapter.published += 1
        await versions.publish(version)
        trained = await workshop.device.run(lambda: adapter.probe.trained(workshop.trainer), light=True)
        await adapter.probe.check(workshop.engine, versions.ref(version), trained)
        await versions.announce(version, version)

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
        prompt, versions = self._chat.prompt_ids(problem), self._adapters[name].versions
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
            async for chunk in self._workshop.engine.generate(request):
                chunks[chunk.index] = chunk
        rollouts = (extended(Rollout(problem, index, (), ()), prompt, chunks[index]) for index in range(n))
        return Group(problem, seed, version, tuple(rollouts))

    @staticmethod
    def _segments(
        batches: Mapping[str, StepBatch | Sequence[Sample]], loss: Loss | None, temperature: float
    ) -> tuple[Segment, ...]:
        """One for each adapter that has something to train."""
        whole = {
            name: batch if isinstance(batch, StepBatch) else StepBatch(tuple(batch), 1.0)
            for name, batch in batches.items()
        }
        return tuple(
            Segment(name, batch.samples, loss, batch.denominator, temperature, batch.share_prefixes)
            for name, batch in whole.items()
            if batch.samples
        )

    def _on_device(self, call: Callable[[], Result]) -> Result:
        return self._workshop.device.submit(call).result()

    def _call(self, call: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        result: Result = self._portal.call(call)
        return result
