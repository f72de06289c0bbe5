"""One packed pass over a base: segments of several adapters, laid out in rows, forward and backward.

Each segment has its own rows, padding, head products and reductions, as if it were alone. So its gradient does not
depend on other segments. Legend: T packed rows, N trainable tokens of a segment, D model width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from motet.algorithms.losses import TokenSums, at_targets, loss_and_sums, read_stats
from motet.core.batch import Batch, LossInputs, Segment, Trained
from motet.core.types import FloatArray, IntArray
from motet.model.accelerator import send
from motet.model.attention import Prefix
from motet.model.lora import AdapterWeights, LoraMatrices
from motet.model.lora_model import LoraModel
from motet.model.recompute import recomputing
from motet.model.routing import TrainerRouting, TrainSegment
from motet.model.unit_sums import UnitSums
from motet.protocols import Pieces, Result
from motet.training.head import Targets, head_logprobs
from motet.training.layer_inputs import LayerInputs


@dataclass(frozen=True)
class Learning:
    """The adapter of a segment, and the destination of its gradient."""

    weights: AdapterWeights
    gradients: dict[str, LoraMatrices] | None
    """Gradients are added to these; None with `sums`."""
    unscaled: bool = False
    """Whether the caller applies the adapter's scale when it sums the parts (see `TrainSegment.unscaled`)."""
    head: Tensor | None = None
    """Weights and bias [D + 1] of a value head, if the segment trains values."""
    head_gradient: Tensor | None = None
    """The head's gradient is added to it; None with `sums`."""
    sums: UnitSums | None = None
    """Units are added to these."""

    def parts(self, span: tuple[int, int], units: Sequence[tuple[int, int]] | None) -> list[TrainSegment]:
        """The rows of a segment; with `sums`, each unit by itself, or all if the kernels tell units apart."""
        if self.sums is None or units is None:
            return [TrainSegment(*span, self.weights, self.gradients, self.unscaled, self.sums)]
        self.sums.n_units += len(units)
        views = self.weights.layout.matrices(self.sums.flat)
        return [TrainSegment(*unit, self.weights, views, sums=self.sums) for unit in units]

    def heads(self, n_samples: int) -> Tensor | None:
        """Copies [U, D + 1] of the value head whose gradients are added one by one: with `sums` one for each sample."""
        if self.head is None:
            return None
        return self.head.expand(1 if self.sums is None else n_samples, -1).clone().requires_grad_()

    def add_heads(self, gradients_UD: Tensor) -> None:
        """Add the gradients of `heads`."""
        for gradient in gradients_UD:
            if self.sums is not None:
                self.sums.add_unit(self.sums.flat[self.weights.layout.size :], gradient)
            elif self.head_gradient is not None:
                self.head_gradient.add_(gradient)


class PackedPass:
    """A batch laid out for one pass; computed by `train` or `score`."""

    def __init__(
        self, base: LoraModel, batch: Batch, *, share: bool, recompute: bool = False, inputs: Path | None = None
    ) -> None:
        """A batch without segments is a pass of padding.

        Args:
            base: the base of the adapters.
            batch: the batch to lay out.
            share: run the shared prefix of neighbouring samples (`Segment.shared`) once; no effect on logprobs.
            recompute: whether `train` keeps the inputs of layers alone; no effect on bits.
            inputs: a directory to which it then moves these inputs.
        """
        self._base, self._batch, self._recompute = base, batch, recompute
        self._inputs = LayerInputs(inputs)
        self.in_step = False
        """Whether `train` or `score` has run every gather that other ranks wait for."""
        self._plan = _Plan.of(batch, base, share=share)
        self._rows = [
            _TrainableRows.of(segment, places, base.device)
            for segment, places in zip(batch.segments, self._plan.places, strict=True)
        ]

    def train(self, adapters: Sequence[Learning]) -> Pieces[tuple[Trained, ...]]:
        """Add the gradient of each segment to its adapter's; sums and logprobs of each."""
        base, spans = self._base, self._plan.spans
        segments = [
            part
            for span, units, adapter in zip(spans, self._plan.units, adapters, strict=True)
            for part in adapter.parts(span, units if base.kernels is None or not base.kernels.whole_sums else None)
        ]
        each = zip(adapters, self._batch.segments, strict=True)
        heads = [adapter.heads(len(segment.samples)) for adapter, segment in each]
        routing = TrainerRouting(segments, base.device, base.products, backward=True)
        with base.routed(routing), torch.enable_grad(), self._inputs.kept():
            with self._inputs.moved(len(self._plan.token_ids_T)), recomputing(base, self._recompute):
                hidden_TD = self._hidden()
            try:
                found = yield from self._between(self._logprobs(hidden_TD, heads), routing)
                losses = [
                    self._segment_loss(segment, rows, *outputs)
                    for segment, rows, outputs in zip(self._batch.segments, self._rows, found, strict=True)
                ]
            except Exception:
                with recomputing(base, self._recompute):
                    self._keep_step(hidden_TD)
                raise
            with _one_order(base.device), recomputing(base, self._recompute):
                if losses:
                    torch.autograd.backward([loss for loss, _, _ in losses])
                    self.in_step = True
                else:
                    self._keep_step(hidden_TD)
        for adapter, head in zip(adapters, heads, strict=True):  # in the order of the segments, whatever the batches
            if head is not None and head.grad is not None:
                adapter.add_heads(head.grad)
        stats = read_stats([sums for _, sums, _ in losses])  # waits for the whole pass
        return tuple(map(Trained, stats, self._read([logprobs_N for _, _, logprobs_N in losses])))

    def score(
        self, adapters: Sequence[AdapterWeights] | None, heads: Sequence[Tensor | None] = ()
    ) -> Pieces[tuple[tuple[FloatArray, ...], ...]]:
        """Logprobs [T] per sample per segment, or values with a head, no gradient; without `adapters` of the base alone."""
        base, spans = self._base, self._plan.spans
        segments = [
            TrainSegment(start, stop, weights, None)
            for (start, stop), weights in zip(spans if adapters is not None else [], adapters or [], strict=True)
        ]
        routing = TrainerRouting(segments, base.device, base.products, backward=False)
        with base.routed(routing), torch.no_grad():
            hidden_TD = self._hidden()
            self.in_step = True
            each = [None if head is None else head[None] for head in heads or [None] * len(spans)]
            found = yield from self._between(self._logprobs(hidden_TD, each), routing)
        return tuple(self._read([outputs_N for outputs_N, _ in found]))

    def _read(self, values: Sequence[Tensor]) -> Iterator[tuple[FloatArray, ...]]:
        """Values [N] of each segment, copied from their device in one transfer, as one array [T] per sample."""
        if values:
            each = torch.cat(list(values)).float().cpu().split([len(values_N) for values_N in values])
            for segment, rows, values_N in zip(self._batch.segments, self._rows, each, strict=True):
                yield rows.scatter(values_N.numpy(), segment)

    def _between(self, pieces: Pieces[Result], routing: TrainerRouting) -> Pieces[Result]:
        """Restore the base's normal state while this pass is paused."""
        while True:
            try:
                done = next(pieces)
            except StopIteration as end:
                result: Result = end.value
                return result
            with self._base.aside(routing), torch.no_grad():
                yield done

    def _hidden(self) -> Tensor:
        plan = self._plan
        attention = self._base.attention.packed(plan.lengths, plan.prefixes)
        return self._base.hidden(plan.token_ids_T, plan.positions_T, attention)

    def _keep_step(self, hidden_TD: Tensor) -> None:
        """With a sharded base, run the gathers of a backward pass without a gradient, as other ranks expect."""
        if self._base.shards is not None:
            (hidden_TD.float().sum() * 0).backward()
            self.in_step = True

    def _logprobs(self, hidden_TD: Tensor, heads: Sequence[Tensor | None]) -> Pieces[list[tuple[Tensor, Tensor]]]:
        """Logprobs and entropies [N] of each segment, or values and zeros if it has value heads [U, D + 1]."""
        each = list(zip(self._batch.segments, self._plan.spans, self._rows, heads, strict=True))
        policies = [
            Targets(rows.row_N + start, rows.target_N, segment.temperature)
            for segment, (start, _), rows, head in each
            if head is None
        ]
        found = iter((yield from head_logprobs(self._base, hidden_TD, policies)))
        outputs = []
        for segment, (start, stop), rows, head in each:
            values_N = None if head is None else _values(hidden_TD[start:stop], rows, segment, head, self._base)
            outputs.append(next(found) if values_N is None else (values_N, torch.zeros_like(values_N)))
        return outputs

    def _segment_loss(
        self, segment: Segment, rows: _TrainableRows, logprobs_N: Tensor, entropy_N: Tensor
    ) -> tuple[Tensor, TokenSums, Tensor]:
        if segment.loss is None:
            raise ValueError(f"a segment of {segment.adapter!r} has no loss; a gradient needs one")
        inputs = LossInputs(
            logprobs_N=logprobs_N,
            entropy_N=entropy_N,
            sampler_logprobs_N=rows.gather(segment, "logprobs"),
            advantages_N=rows.gather(segment, "advantages"),
            weights_N=rows.gather(segment, "weights"),
            sample_N=rows.sample_N,
            n_samples=len(segment.samples),
            reference_logprobs_N=rows.gather_optional(segment, "reference_logprobs"),
            proximal_logprobs_N=rows.gather_optional(segment, "proximal_logprobs"),
            ratio_mask_N=rows.gather_optional(segment, "ratio_mask"),
            functions=self._base.math,
            by_sample=segment.by_sample,
        )
        with _one_order(self._base.device):
            return *loss_and_sums(segment.loss, segment.denominator, inputs), logprobs_N.detach()


@contextlib.contextmanager
def _one_order(device: torch.device) -> Iterator[None]:
    """On a GPU, use deterministic algorithms, so that values are added to a row in a fixed order."""
    if device.type != "cuda":
        yield
        return
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


_Stretches = tuple[tuple[int, int], ...]
"""Where a sample's tokens are in its segment's rows: first row and length of each stretch; the last is its own."""


def _beginning(place: _Stretches, length: int) -> _Stretches:
    """The stretches of a sample's first `length` tokens."""
    stretches = []
    for row, own in place:
        if length > 0:
            stretches.append((row, min(own, length)))
        length -= own
    return tuple(stretches)


def _rows(place: _Stretches) -> NDArray[np.int64]:
    """The row of each token."""
    return np.concatenate([np.arange(row, row + length) for row, length in place])


@dataclass(frozen=True)
class _Plan:
    """A batch laid out in packed rows; each segment, or each of its units, is padded to a multiple of `arithmetic.rows`."""

    token_ids_T: Tensor
    positions_T: Tensor
    lengths: list[int]
    prefixes: list[Prefix | None]
    spans: list[tuple[int, int]]
    units: list[list[tuple[int, int]]]
    """Rows of each unit by segment: of its samples, or of all of them."""
    places: list[list[_Stretches]]
    """Positions by segment and sample."""

    @classmethod
    def of(cls, batch: Batch, base: LoraModel, *, share: bool) -> _Plan:
        token_ids: list[IntArray] = []
        positions: list[IntArray] = []
        prefixes: list[Prefix | None] = []
        spans: list[tuple[int, int]] = []
        units: list[list[tuple[int, int]]] = []
        places: list[list[_Stretches]] = []
        start = 0
        for segment in batch.segments:
            own: list[_Stretches] = []
            ends = [0]
            row = 0
            shared = segment.shared if share else (0,) * len(segment.samples)
            for index, (sample, n_shared) in enumerate(zip(segment.samples, shared, strict=True)):
                before = _beginning(own[-1], n_shared) if n_shared else ()
                own.append((*before, (row, sample.n_tokens - n_shared)))
                token_ids.append(sample.token_ids[n_shared:])
                positions.append(np.arange(n_shared, sample.n_tokens, dtype=np.int32))
                among_all = tuple((start + first, length) for first, length in before)
                prefixes.append(Prefix(*among_all[-1], among_all[:-1]) if among_all else None)
                row += sample.n_tokens - n_shared
                if not segment.by_sample and index < len(segment.samples) - 1:
                    continue
                pad = -row % base.arithmetic.rows
                if pad:
                    token_ids.append(np.zeros(pad, np.int32))
                    positions.append(np.arange(pad, dtype=np.int32))
                    prefixes.append(None)
                row += pad
                ends.append(row)
            places.append(own)
            spans.append((start, start + row))
            units.append([(start + first, start + end) for first, end in itertools.pairwise(ends)])
            start += row
        if not spans:
            token_ids.append(np.zeros(base.arithmetic.rows, np.int32))
            positions.append(np.arange(base.arithmetic.rows, dtype=np.int32))
            prefixes.append(None)
        flat = [np.concatenate(each).astype(np.int64) for each in (token_ids, positions)]
        token_ids_T, positions_T = send(base.device, *flat)
        return cls(
            token_ids_T,
            positions_T,
            [len(tokens) for tokens in token_ids],
            prefixes,
            spans,
            units,
            places,
        )


@dataclass(frozen=True)
class _TrainableRows:
    """Rows that predict a segment's trainable tokens: the row of the token before each."""

    row_N: Tensor
    target_N: Tensor
    sample_N: Tensor

    @classmethod
    def of(cls, segment: Segment, placed: list[_Stretches], device: torch.device) -> _TrainableRows:
        rows, targets, owners = [], [], []
        for index, (sample, place) in enumerate(zip(segment.samples, placed, strict=True)):
            tokens = np.flatnonzero(sample.loss_mask)
            assert not sample.loss_mask[0], "the first token of a sequence is not predicted by any other"
            wanted = sample.token_ids if sample.targets is None else sample.targets
            rows.append(_rows(place)[tokens - 1].repeat(sample.n_targets))
            targets.append(wanted[tokens].reshape(-1))
            owners.append(np.full(len(targets[-1]), index))
        return cls(*send(device, *(np.concatenate(part).astype(np.int64) for part in (rows, targets, owners))))

    def gather(self, segment: Segment, name: str) -> Tensor:
        """A field of all samples at the trainable positions, once per target, fp32; 1 for samples without it."""
        values = [at_targets(sample, getattr(sample, name)) for sample in segment.samples]
        return send(self.row_N.device, np.concatenate(values).astype(np.float32))[0]

    def gather_optional(self, segment: Segment, name: str) -> Tensor | None:
        """`gather`; None if no sample of the segment has the field."""
        missing = all(getattr(sample, name) is None for sample in segment.samples)
        return None if missing else self.gather(segment, name)

    def scatter(self, values_N: FloatArray, segment: Segment) -> tuple[FloatArray, ...]:
        """Convert to one array [T] per sample, or [T, K] with K targets; 0 at positions that are not trained."""
        arrays, start = [], 0
        for sample in segment.samples:
            like = sample.token_ids if sample.targets is None else sample.targets
            whole = np.zeros(like.shape, np.float32)
            stop = start + sample.n_trainable * sample.n_targets
            whole[sample.loss_mask] = values_N[start:stop].reshape(-1, *like.shape[1:])
            arrays.append(whole)
            start = stop
        return tuple(arrays)


def _values(hidden_TD: Tensor, rows: _TrainableRows, segment: Segment, heads_UD: Tensor, base: LoraModel) -> Tensor:
    """Values [N] of the states before each trainable token, in fp32: by one head, or by one for each sample."""
    hidden_ND = hidden_TD.index_select(0, rows.row_N).float()
    lengths = [sample.n_trainable * sample.n_targets for sample in segment.samples]
    if len(heads_UD) < len(lengths):
        lengths = [sum(lengths)]
    parts = zip(hidden_ND.split(lengths), heads_UD.unbind(), strict=True)
    return torch.cat([_values_by(hidden, head, base) for hidden, head in parts])


def _values_by(hidden_ND: Tensor, head: Tensor, base: LoraModel) -> Tensor:
    if base.math is not None:
        return base.math.values(hidden_ND, head)
    return (hidden_ND * head[:-1]).sum(-1) + head[-1]
