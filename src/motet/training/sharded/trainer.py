"""A `Trainer` over several processes, with the same masters, moments and logprobs as a single process.

This side holds no weights and no process group. It assigns the work, and the ranks
(`motet.training.sharded.rank_trainer`) exchange gathered weights, gradients and versions. A dead rank therefore
appears as a closed pipe, never as a call that hangs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from motet.algorithms.algorithm import Algorithm
from motet.algorithms.client import ClientLoss
from motet.algorithms.critic import ValueLoss
from motet.algorithms.registry import ALGORITHMS
from motet.config import AdapterConfig
from motet.core.batch import Batch, Optimizer, OptimStats, Segment, Trained
from motet.core.errors import AdapterError
from motet.core.types import FloatArray
from motet.training.sharded import messages as m
from motet.training.sharded.group import RankGroup


class ShardedTrainer:
    """A `Trainer` over the ranks of a group."""

    def __init__(self, group: RankGroup, *, slots: int) -> None:
        self.slots = slots
        self._group = group
        self._owners: dict[str, int] = {}

    def add_adapter(self, name: str, shape: AdapterConfig, seed: int, *, head: bool = False) -> None:
        """Take a slot for a new adapter (B = 0), with zero moments and step count 0; `head` adds a value head."""
        if name in self._owners:
            raise AdapterError(f"adapter {name!r} exists already")
        if len(self._owners) >= self.slots:
            raise AdapterError(f"all {self.slots} adapter slots are taken; raise engine.slots or wait for a job to end")
        rank = owner(self._owners.values(), self._group.n_ranks)
        self._group.ask_all(m.AddAdapter(name, shape.model_dump(mode="json"), seed, rank, head))
        self._owners[name] = rank

    def remove_adapter(self, name: str) -> None:
        """Release the slot."""
        self._owner(name)
        self._group.ask_all(m.RemoveAdapter(name))
        del self._owners[name]

    def forward_backward(self, batch: Batch) -> tuple[Trained, ...]:
        """Add the gradient of each segment to its adapter; sums and logprobs of each."""
        parts, route = self._parts(batch, learns=True)
        ran = self._run({rank: m.Train(own, route, batch.n_tokens) for rank, own in parts.items()})
        return tuple(Trained(result.stats, result.logprobs) for result in ran if result.stats is not None)

    def forward(self, batch: Batch, *, base: bool = False) -> tuple[tuple[FloatArray, ...], ...]:
        """Logprobs [T] per sample per segment, no gradient; `base=True` disables the adapters (the KL reference)."""
        parts, route = self._parts(batch, base=base)
        return tuple(
            result.logprobs for result in self._run({rank: m.Forward(own, route, base) for rank, own in parts.items()})
        )

    def optim_step(self, name: str, optimizer: Optimizer) -> OptimStats:
        """Clip, step and clear the gradient of one adapter; the next version can then be published."""
        rank = self._owner(name)  # before any rank is asked
        answer = self._group.ask_all(m.RankStep.of(name, optimizer))[rank]
        assert isinstance(answer, m.Stepped)
        return answer.stats

    def save_adapter(self, name: str, directory: Path, *, optimizer: bool, gradient: bool = True) -> None:
        """Write PEFT files to an existing directory; `optimizer` adds its state. Waits for the owner's turn."""
        self._group.ask({self._owner(name): m.SaveAdapter(name, str(directory.absolute()), optimizer, gradient)})

    def load_adapter(self, name: str, directory: Path, *, optimizer: bool) -> None:
        """Read what `save_adapter` wrote, or any plain PEFT LoRA directory (`optimizer=False`)."""
        self._owner(name)
        self._group.ask_all(m.ReadAdapter(name, str(directory.absolute()), optimizer))

    def _owner(self, name: str) -> int:
        if name not in self._owners:
            raise AdapterError(
                f"there is no adapter {name!r} in the trainer; there are: {', '.join(self._owners) or 'none'}"
            )
        return self._owners[name]

    def _parts(
        self, batch: Batch, *, learns: bool = False, base: bool = False
    ) -> tuple[dict[int, tuple[m.RankSegment, ...]], tuple[m.Place, ...]]:
        """Each rank's segments, in batch order; the place of each segment."""
        owners = [0 if base else self._owner(segment.adapter) for segment in batch.segments]
        ranks = scatter([segment.n_tokens for segment in batch.segments], owners, self._group.n_ranks)
        parts: dict[int, list[m.RankSegment]] = {rank: [] for rank in range(self._group.n_ranks)}
        for place, (segment, rank) in enumerate(zip(batch.segments, ranks, strict=True)):
            parts[rank].append(m.RankSegment(place, replace(segment, loss=None), _loss(segment) if learns else None))
        route = tuple(
            (segment.adapter, rank, len(segment.samples) if learns and segment.by_sample else 0)
            for segment, rank in zip(batch.segments, ranks, strict=True)
        )
        return {rank: tuple(own) for rank, own in parts.items()}, route

    def _run(self, messages: dict[int, m.Train] | dict[int, m.Forward]) -> list[m.SegmentResult]:
        """Results of a pass from all ranks, in batch order."""
        answers = self._group.ask({**messages})
        results = [row for answer in answers.values() if isinstance(answer, m.RankResult) for row in answer.results]
        return sorted(results, key=lambda result: result.place)


def _loss(segment: Segment) -> m.RankLoss:
    """A loss in a form that a rank can rebuild; algorithms are found by name."""
    loss = segment.loss
    if loss is None:
        raise ValueError(f"a segment of {segment.adapter!r} has no loss; a gradient needs one")
    if isinstance(loss, ValueLoss):
        return m.RankLoss(value=loss)
    if isinstance(loss, ClientLoss):
        return m.RankLoss(client=loss)
    if not isinstance(loss, Algorithm) or not (loss.type in ALGORITHMS or ":" in loss.type):
        raise AdapterError(
            f"the loss of {segment.adapter!r}, a {type(loss).__name__}, cannot be sent to other processes; put its class "
            "into a file and name it as `file.py:Class` in algorithm.type, or set engine.ranks and engine.shard to 1"
        )
    return m.RankLoss(loss.model_dump(mode="json"))


def scatter(lengths: Sequence[int], owners: Sequence[int], n_ranks: int) -> tuple[int, ...]:
    """Assign a rank to each segment of a batch: longest first, to the rank with the fewest tokens so far.

    The assignment affects the duration of a pass, never its bits.

    Args:
        lengths: tokens of each segment.
        owners: the rank that owns each segment's adapter; preferred in a tie, because it need not send a gradient.
        n_ranks: number of ranks.
    """
    loads, ranks = [0] * n_ranks, [0] * len(lengths)
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        rank = min(range(n_ranks), key=lambda rank: (loads[rank], rank != owners[place], rank))
        ranks[place] = rank
        loads[rank] += lengths[place]
    return tuple(ranks)


def owner(owned: Iterable[int], n_ranks: int) -> int:
    """The rank for a new adapter: the one that owns the fewest."""
    counts = [0] * n_ranks
    for rank in owned:
        counts[rank] += 1
    return counts.index(min(counts))
