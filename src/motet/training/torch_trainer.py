"""The trainer on one device: packed batches of several adapters over the base that also samples.

Every segment of a batch keeps to itself: its rows, its padding, its head products and its reductions are what they would be if
it were alone, so its gradient is too.

Legend: T packed rows, N trainable tokens of a segment, D model width, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from motet.algorithms.losses import LossInputs, loss_and_stats
from motet.batch import AdamW, Batch, LossStats, OptimStats, Sample, Segment, Trained, shared_prompts
from motet.config import AdapterConfig
from motet.errors import AdapterError, BaseModelError
from motet.model.attention import Prefix
from motet.model.distribution import Distribution
from motet.model.lora import AdapterWeights, initial_weights
from motet.model.lora_model import LoraModel
from motet.model.peft_io import flatten, read_adapter, write_adapter
from motet.model.routing import TrainerRouting, TrainSegment
from motet.training.arena import AdapterArena
from motet.types import FloatArray, IntArray

HEAD_ROWS = 256
"""Rows of logits that are in memory at a time."""


class TorchTrainer:
    """A `Trainer` on one CPU or GPU."""

    def __init__(self, base: LoraModel, *, slots: int, recompute: bool = False, share_prompts: bool = True) -> None:
        """`share_prompts` runs the prompt of neighbouring samples once; logprobs have the same bits either way.

        Raises:
            BaseModelError: the base cannot recompute.
        """
        self.base = base
        self._share_prompts = share_prompts
        self.slots = slots
        self._arenas: dict[str, AdapterArena] = {}
        self._shapes: dict[str, AdapterConfig] = {}
        if recompute:
            _recompute(base)

    def add_adapter(self, name: str, shape: AdapterConfig, seed: int) -> None:
        """Take a slot and fill it with a fresh adapter (B = 0), zero moments, step count 0.

        Raises:
            AdapterError: the name is taken, no slot is free, or a target module does not exist.
        """
        if name in self._arenas:
            raise AdapterError(f"adapter {name!r} is there already")
        if len(self._arenas) >= self.slots:
            raise AdapterError(f"all {self.slots} adapter slots are taken; raise engine.slots or wait for a job to end")
        layout = self.base.adapter_layout(shape.target_modules, shape.rank)
        masters = initial_weights(layout, seed).to(self.base.device)
        self._arenas[name] = AdapterArena(layout, shape.alpha / shape.rank, masters, self.base.dtype)
        self._shapes[name] = shape

    def remove_adapter(self, name: str) -> None:
        """Give the slot back."""
        self._arena(name)
        del self._arenas[name], self._shapes[name]

    def weights(self, name: str) -> AdapterWeights:
        """The version in use, as tensors; never written again once made."""
        return self._arena(name).weights

    def forward_backward(self, batch: Batch) -> tuple[Trained, ...]:
        """Add the gradient of each segment to its adapter; sums and logprobs of each."""
        plan = _Plan.of(batch, self.base, share=self._share_prompts)
        segments = [
            TrainSegment(start, stop, arena.weights, arena.gradient_matrices)
            for (start, stop), arena in zip(plan.spans, self._batch_arenas(batch), strict=True)
        ]
        routing = TrainerRouting(segments, self.base.device, self.base.products, backward=True)
        losses, found = [], []
        with self.base.routed(routing), torch.enable_grad():
            hidden_TD = self._hidden(plan)
            for segment, (start, stop), places in zip(batch.segments, plan.spans, plan.places, strict=True):
                rows = _TrainableRows.of(segment, places, self.base.device)
                loss, stats, logprobs_N = self._segment_loss(segment, hidden_TD[start:stop], rows)
                losses.append(loss)
                found.append((rows, stats, logprobs_N))
            with _one_order(self.base.device):
                torch.autograd.backward(losses)
        for segment in batch.segments:
            self._arena(segment.adapter).pending = True
        if self.base.device.type == "cuda":  # or whoever waits next would be charged for it
            torch.cuda.synchronize(self.base.device)
        return tuple(
            Trained(stats, rows.scatter(logprobs_N, segment))
            for segment, (rows, stats, logprobs_N) in zip(batch.segments, found, strict=True)
        )

    @torch.no_grad()
    def forward(self, batch: Batch, *, base: bool = False) -> tuple[tuple[FloatArray, ...], ...]:
        """Logprobs [T] per sample per segment, no gradient; `base=True` leaves the adapters out (the KL reference)."""
        plan = _Plan.of(batch, self.base, share=self._share_prompts)
        segments = (
            []
            if base
            else [
                TrainSegment(start, stop, arena.weights, None)
                for (start, stop), arena in zip(plan.spans, self._batch_arenas(batch), strict=True)
            ]
        )
        routing = TrainerRouting(segments, self.base.device, self.base.products, backward=False)
        found = []
        with self.base.routed(routing):
            hidden_TD = self._hidden(plan)
            for segment, (start, stop), places in zip(batch.segments, plan.spans, plan.places, strict=True):
                rows = _TrainableRows.of(segment, places, self.base.device)
                logprobs_N, _ = _head(self.base, hidden_TD[start:stop], rows, segment.temperature)
                found.append(rows.scatter(logprobs_N, segment))
        return tuple(found)

    def optim_step(self, name: str, adamw: AdamW) -> OptimStats:
        """Clip, step and clear the gradient of one adapter; the next version is ready to publish."""
        return self._arena(name).step(adamw)

    def save_adapter(self, name: str, directory: Path, *, optimizer: bool) -> None:
        """Write PEFT files, and the optimizer's state where asked; the directory exists. May run beside the device."""
        arena, shape = self._arena(name), self._shapes[name]
        with _no_openmp_team():
            write_adapter(directory, self.base, arena.layout, shape.alpha, shape.target_modules, arena.masters)
            if optimizer:
                arena.save_optimizer(directory)

    def load_adapter(self, name: str, directory: Path, *, optimizer: bool) -> None:
        """Read what `save_adapter` wrote, or any plain PEFT LoRA directory (`optimizer=False`)."""
        arena, shape = self._arena(name), self._shapes[name]
        peft = read_adapter(directory)
        if peft.alpha != shape.alpha:
            raise AdapterError(
                f"{directory} has alpha {peft.alpha:g}, the job asks for {shape.alpha:g}; set adapter.alpha to {peft.alpha:g}"
            )
        arena.set_masters(flatten(peft, self.base, arena.layout, directory).to(self.base.device))
        if optimizer:
            arena.load_optimizer(directory)

    def _arena(self, name: str) -> AdapterArena:
        arena = self._arenas.get(name)
        if arena is None:
            raise AdapterError(
                f"there is no adapter {name!r} in the trainer; there are: {', '.join(self._arenas) or 'none'}"
            )
        return arena

    def _batch_arenas(self, batch: Batch) -> list[AdapterArena]:
        return [self._arena(segment.adapter) for segment in batch.segments]

    def _hidden(self, plan: _Plan) -> Tensor:
        return self.base.hidden(
            plan.token_ids_T, plan.positions_T, self.base.attention.packed(plan.lengths, plan.prefixes)
        )

    def _segment_loss(
        self, segment: Segment, hidden_TD: Tensor, rows: _TrainableRows
    ) -> tuple[Tensor, LossStats, Tensor]:
        if segment.loss is None:
            raise ValueError(f"a segment of {segment.adapter!r} has no loss; a gradient needs one")
        logprobs_N, entropy_N = _head(self.base, hidden_TD, rows, segment.temperature)
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
        )
        with _one_order(self.base.device):
            return *loss_and_stats(segment.loss, segment.denominator, inputs), logprobs_N.detach()


def _recompute(base: LoraModel) -> None:
    """Have layers keep their inputs alone; only they are in training mode, for what is inside may add noise there."""
    model = base.model
    if not model.supports_gradient_checkpointing:
        raise BaseModelError(f"{base.info.name} cannot compute its layers again; set engine.recompute to false")
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        module.training = getattr(module, "gradient_checkpointing", False)


@contextlib.contextmanager
def _one_order(device: torch.device) -> Iterator[None]:
    """On a GPU what is added to one row from several is added in one order, not in that of the atomic additions."""
    if device.type != "cuda":
        yield
        return
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _no_openmp_team() -> Iterator[None]:
    """One torch thread in the thread that this runs in.

    A thread takes over, at its first operation, the number that any thread has set last: that of the device, while it trains.
    OpenMP would keep a second team for it, and where there are more threads than cores every team waits by sleeping.
    """
    before = torch.get_num_threads()  # the number is taken over here, not inside
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class _Place:
    """Where a sample's tokens lie among its segment's rows: a prompt that others may share, and rows of its own after it."""

    prompt_row: int
    prompt: int
    own_row: int

    def rows(self, tokens_N: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Rows of some of its tokens."""
        return np.where(
            tokens_N < self.prompt, self.prompt_row + tokens_N, self.own_row + tokens_N - self.prompt
        ).astype(np.int64)


@dataclass(frozen=True)
class _Plan:
    """A batch laid out in packed rows; each segment ends with padding of its own, up to a multiple of `arithmetic.rows`."""

    token_ids_T: Tensor
    positions_T: Tensor
    lengths: list[int]
    prefixes: list[Prefix | None]
    spans: list[tuple[int, int]]
    places: list[list[_Place]]
    """Of each segment's samples."""

    @classmethod
    def of(cls, batch: Batch, base: LoraModel, *, share: bool) -> _Plan:
        token_ids: list[IntArray] = []
        positions: list[IntArray] = []
        prefixes: list[Prefix | None] = []
        spans: list[tuple[int, int]] = []
        places: list[list[_Place]] = []
        start = 0
        for segment in batch.segments:
            own: list[_Place] = []
            row = 0
            shared = shared_prompts(segment.samples) if share else (0,) * len(segment.samples)
            for sample, prompt in zip(segment.samples, shared, strict=True):
                prompt_row = own[-1].prompt_row if prompt else row
                own.append(_Place(prompt_row, prompt, row))
                token_ids.append(sample.token_ids[prompt:])
                positions.append(np.arange(prompt, sample.n_tokens, dtype=np.int32))
                prefixes.append(Prefix(start + prompt_row, prompt) if prompt else None)
                row += sample.n_tokens - prompt
            pad = -row % base.arithmetic.rows
            if pad:
                token_ids.append(np.zeros(pad, np.int32))
                positions.append(np.arange(pad, dtype=np.int32))
                prefixes.append(None)
            places.append(own)
            spans.append((start, start + row + pad))
            start += row + pad
        return cls(
            torch.from_numpy(np.concatenate(token_ids).astype(np.int64)).to(base.device),
            torch.from_numpy(np.concatenate(positions).astype(np.int64)).to(base.device),
            [len(tokens) for tokens in token_ids],
            prefixes,
            spans,
            places,
        )


@dataclass(frozen=True)
class _TrainableRows:
    """Where a segment's trainable tokens are predicted: the row of the token before each of them."""

    row_N: Tensor
    target_N: Tensor
    sample_N: Tensor

    @classmethod
    def of(cls, segment: Segment, placed: list[_Place], device: torch.device) -> _TrainableRows:
        rows, targets, owners = [], [], []
        for index, (sample, place) in enumerate(zip(segment.samples, placed, strict=True)):
            tokens = np.flatnonzero(sample.loss_mask)
            assert not sample.loss_mask[0], "the first token of a sequence is not predicted by any other"
            wanted = sample.token_ids if sample.targets is None else sample.targets
            rows.append(place.rows(tokens - 1).repeat(sample.n_targets))
            targets.append(wanted[tokens].reshape(-1))
            owners.append(np.full(len(targets[-1]), index))
        return cls(
            *(torch.from_numpy(np.concatenate(part).astype(np.int64)).to(device) for part in (rows, targets, owners))
        )

    def gather(self, segment: Segment, name: str) -> Tensor:
        """A field of all samples at the trainable places, once for each target there, fp32; 1 where a sample has none."""
        values = [_at_targets(sample, getattr(sample, name)) for sample in segment.samples]
        return torch.from_numpy(np.concatenate(values).astype(np.float32)).to(self.row_N.device)

    def gather_optional(self, segment: Segment, name: str) -> Tensor | None:
        """The same for a field that is there for all samples of a segment, or for none."""
        return None if getattr(segment.samples[0], name) is None else self.gather(segment, name)

    def scatter(self, values_N: Tensor, segment: Segment) -> tuple[FloatArray, ...]:
        """Back to one array [T], or [T, K] where there are K targets, per sample; 0 where nothing is trained."""
        flat, found, start = values_N.float().cpu().numpy(), [], 0
        for sample in segment.samples:
            like = sample.token_ids if sample.targets is None else sample.targets
            whole = np.zeros(like.shape, np.float32)
            stop = start + sample.n_trainable * sample.n_targets
            whole[sample.loss_mask] = flat[start:stop].reshape(-1, *like.shape[1:])
            found.append(whole)
            start = stop
        return tuple(found)


def _at_targets(sample: Sample, values: FloatArray | None) -> FloatArray:
    """A field [T] or [T, K] at each target of the trainable places."""
    if values is None:
        return np.ones(sample.n_trainable * sample.n_targets, np.float32)
    chosen = values[sample.loss_mask]
    return chosen.reshape(-1) if chosen.ndim == 2 else chosen.repeat(sample.n_targets)


def _head(base: LoraModel, hidden_TD: Tensor, rows: _TrainableRows, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies [N] of the trainable tokens; the frozen head never gets a gradient."""
    n_tokens = len(rows.row_N)
    hidden_ND = hidden_TD.index_select(0, base.pad(rows.row_N))
    target_N = base.pad(rows.target_N)
    logprobs_N, entropy_N = _HeadLogprobs.apply(hidden_ND, target_N, temperature, base)  # type: ignore[no-untyped-call]
    return logprobs_N[:n_tokens], entropy_N[:n_tokens]


class _HeadLogprobs(torch.autograd.Function):
    """Logprobs of targets from hidden states, a chunk of rows at a time, so that [N, V] is never held for all rows.

    A logprob's gradient with respect to its own hidden state does not depend on what comes after, so it is made while the
    probabilities are at hand; the backward pass only scales it.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, target_N: Tensor, temperature: float, base: LoraModel
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, slopes = [], [], []
        for hidden, targets in zip(hidden_ND.split(HEAD_ROWS), target_N.split(HEAD_ROWS), strict=True):
            raw_NV = base.raw_logits(hidden)
            at_a_time = base.arithmetic.logit_rows
            for raw, target in zip(raw_NV.split(at_a_time), targets.split(at_a_time), strict=True):
                found = Distribution.of(base.finish_logits(raw), [temperature])
                logprobs.append(found.logprobs(target))
                entropies.append(found.entropy())
                if ctx.needs_input_grad[0]:
                    raw.copy_(base.logits_slope(raw, found.slope(target, temperature)))
            if ctx.needs_input_grad[0]:
                slopes.append(base.through_head(raw_NV))
        entropy_N = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy_N)
        ctx.save_for_backward(*slopes)
        return torch.cat(logprobs), entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        slope_ND = torch.cat(ctx.saved_tensors)
        return (slope_ND.float() * grad_N[:, None]).to(slope_ND.dtype), None, None, None
