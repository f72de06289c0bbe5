"""One rank of several: its base or a part of it, the adapters that it owns, and copies of the others.

Each segment's gradient is computed whole on one rank, as if it were alone, and kept unscaled. The adapter's owner adds
the gradients in batch order, as a trainer on one device does; an all-reduce would add in another order and give other
bits. What is added as whole numbers is sent as these, which have no order. Every method except `save` is called on all
ranks at once.

Legend: T packed rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, distributed

from motet.config import AdapterConfig
from motet.core.batch import Batch, Optimizer, OptimStats, Trained
from motet.core.errors import MotetError
from motet.core.types import FloatArray
from motet.model.lora import AdapterLayout, AdapterWeights, LoraMatrices, initial_weights
from motet.model.lora_model import LoraModel
from motet.model.unit_sums import UnitSums
from motet.training.head import whole
from motet.training.packed_pass import Learning, PackedPass
from motet.training.sharded.messages import Place
from motet.training.torch_trainer import TorchTrainer, adds_whole


class InStep(Exception):
    """A call failed on every rank, and all are ready for the next; `__cause__` is None if another rank raised the error."""


@dataclass(frozen=True)
class _Gradient:
    """Gradient of one segment, unscaled, in the dtype of its products: the base's, or fp32 with Motet's kernels."""

    flat: Tensor
    matrices: dict[str, LoraMatrices]
    head: Tensor | None
    """Gradient of the value head, in fp32; None with `sums`."""
    sums: UnitSums | None = None
    """If it is added as whole numbers: the gradient of matrices and value head, scaled; `flat` is theirs."""

    @classmethod
    def zeros(cls, layout: AdapterLayout, base: LoraModel, *, head: bool, by_sample: bool) -> _Gradient:
        if adds_whole(base, by_sample=by_sample):
            sums = UnitSums.empty(layout.size + (_head_size(base) if head else 0), base.device)
            return cls(sums.flat, {}, None, sums)
        dtype = base.dtype if base.kernels is None else torch.float32
        flat = torch.zeros(layout.size, dtype=dtype, device=base.device)
        return cls(flat, layout.matrices(flat), _empty_head(base) if head else None)


class RankTrainer:
    """The part of a `Trainer` that runs on one rank."""

    def __init__(self, base: LoraModel, owned: TorchTrainer) -> None:
        """The process group must exist; a sharded base spans all of its ranks, or groups of them.

        `owned` trains the adapters that this rank owns.
        """
        self.base = base
        self.rank = distributed.get_rank()
        self._owned = owned
        self._owners: dict[str, int] = {}
        self._copies: dict[str, AdapterWeights] = {}
        """Copies of adapters that other ranks own."""
        self._heads: dict[str, Tensor] = {}
        """Their value heads."""

    def add_adapter(self, name: str, shape: AdapterConfig, seed: int, owner: int, *, head: bool = False) -> None:
        """Create a new adapter; every rank draws the same numbers.

        Raises:
            InStep: a target module does not exist.
        """
        try:
            if owner == self.rank:
                self._owned.add_adapter(name, shape, seed, head=head)
            else:
                layout, scaling = self.base.adapter_layout(shape.target_modules, shape.rank), shape.scale
                two = self.base.math is not None
                masters = initial_weights(layout, seed, in_two_steps=two).to(self.base.device)
                self._copies[name] = AdapterWeights.from_masters(layout, scaling, masters, self.base.dtype)
                if head:
                    self._heads[name] = _empty_head(self.base)
        except MotetError as error:  # raised on every rank
            raise InStep from error
        self._owners[name] = owner

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter."""
        if self._owners.pop(name) == self.rank:
            self._owned.remove_adapter(name)
        else:
            del self._copies[name]
            self._heads.pop(name, None)

    def train(self, batch: Batch, places: Sequence[int], route: Sequence[Place], n_tokens: int) -> tuple[Trained, ...]:
        """Run this rank's segments, and add the gradients of the adapters that it owns.

        Args:
            batch: this rank's segments; may be empty.
            places: their indices in the whole batch.
            route: of every segment of the whole batch.
            n_tokens: of the whole batch, so that all ranks compute layers again or none does.

        Raises:
            InStep: a segment failed on some rank; nothing was added on any.
        """
        packed, fault = self._packed(batch, n_tokens)
        learning, gradients = [], {}
        for place, segment in zip(places, () if fault else batch.segments, strict=not fault):
            weights, flat = self._weights(segment.adapter), self._head(segment.adapter)
            own = _Gradient.zeros(weights.layout, self.base, head=flat is not None, by_sample=segment.by_sample)
            gradients[place] = own
            learning.append(Learning(weights, own.matrices, own.sums is None, flat, own.head, own.sums))
        trained: tuple[Trained, ...] = ()
        try:
            if learning or self.base.shards is not None:
                with self._beside(route):
                    trained = whole(packed.train(learning))
        except Exception as error:
            if self.base.shards is not None and not packed.in_step:
                raise
            fault = error
        self._agree(fault)
        for place, (name, rank, n_units) in enumerate(route):
            self._add(name, rank, gradients.get(place), by_sample=n_units > 0)
        return trained

    def score(self, batch: Batch, route: Sequence[Place], *, base: bool) -> tuple[tuple[FloatArray, ...], ...]:
        """Logprobs of this rank's segments; `route` as for `train`.

        Raises:
            InStep: a segment failed on some rank.
        """
        packed, fault = self._packed(batch, 0)
        segments = () if fault is not None else batch.segments
        logprobs: tuple[tuple[FloatArray, ...], ...] = ()
        if segments or self.base.shards is not None:
            weights = None if base else [self._weights(segment.adapter) for segment in segments]
            heads = [] if base else [self._head(segment.adapter) for segment in segments]
            try:
                with self._beside(() if base else route):
                    logprobs = whole(packed.score(weights, heads))
            except Exception as error:
                if self.base.shards is not None and not packed.in_step:
                    raise
                fault = error
        self._agree(fault)
        return logprobs

    def step(self, name: str, optimizer: Optimizer) -> OptimStats | None:
        """Update an adapter; returns its owner's statistics."""
        stats = self._owned.optim_step(name, optimizer) if self._owners[name] == self.rank else None
        self._hand_out(name)
        return stats

    def save(self, name: str, directory: Path, *, optimizer: bool, gradient: bool = True) -> None:
        """Write an adapter that this rank owns."""
        self._owned.save_adapter(name, directory, optimizer=optimizer, gradient=gradient)

    def read(self, name: str, directory: Path, *, optimizer: bool) -> None:
        """Read an adapter.

        Raises:
            InStep: its owner cannot.
        """
        fault: Exception | None = None
        if self._owners[name] == self.rank:
            try:
                self._owned.load_adapter(name, directory, optimizer=optimizer)
            except Exception as error:  # reported to the caller, as on one device
                fault = error
        self._agree(fault)
        self._hand_out(name)

    def _beside(self, route: Sequence[Place]) -> contextlib.AbstractContextManager[None]:
        """Context for a pass: the adapters on experts that each rank of this copy of the base has in it."""
        if self.base.shards is None:
            return contextlib.nullcontext()
        experts = self.base.shards.experts
        routed = [(self._weights(name), rank) for name, rank, n_units in route for _ in range(max(n_units, 1))]
        return experts.running(
            [[lora for lora, rank in routed if rank == member and lora.layout.experts] for member in experts.members]
        )

    def _weights(self, name: str) -> AdapterWeights:
        return self._owned.weights(name) if self._owners[name] == self.rank else self._copies[name]

    def _head(self, name: str) -> Tensor | None:
        return self._owned.values(name) if self._owners[name] == self.rank else self._heads.get(name)

    def _packed(self, batch: Batch, n_tokens: int) -> tuple[PackedPass, Exception | None]:
        """This rank's pass; if its segments cannot be laid out, a pass of padding and the error."""
        try:
            for segment in batch.segments:
                ids = np.concatenate([sample.token_ids for sample in segment.samples])
                if (token := self.base.info.vocabulary.unknown(ids)) is not None:
                    raise ValueError(f"{segment.adapter!r} has token {token}; {self.base.info.vocabulary.bounds}")
            return self._owned.packed(batch, n_tokens), None
        except Exception as error:  # a tenant's samples must not stop the ranks
            return self._owned.packed(Batch(()), n_tokens), error

    def _agree(self, fault: Exception | None) -> None:
        """Continue if no rank has an error.

        Raises:
            InStep: a rank has one.
        """
        faults = torch.tensor([int(fault is not None)], device=self.base.device)
        distributed.all_reduce(faults)
        if int(faults):
            raise InStep from fault

    def _add(self, name: str, rank: int, gradient: _Gradient | None, *, by_sample: bool) -> None:
        """Send a segment's gradient from the rank that computed it to the owner, who adds it."""
        owner = self._owners[name]
        if self.rank not in (owner, rank):
            return
        if gradient is None:
            head = self._head(name) is not None
            gradient = _Gradient.zeros(self._weights(name).layout, self.base, head=head, by_sample=by_sample)
        if rank != owner:
            carry: Callable[..., object] = distributed.send if self.rank == rank else distributed.recv
            bounds = None if gradient.sums is None else gradient.sums.bounds.to(self.base.device)
            for part in (gradient.flat, gradient.head, bounds):
                if part is not None:
                    carry(part.view(torch.uint8), owner if self.rank == rank else rank)
            if gradient.sums is not None and bounds is not None:
                gradient.sums.bounds = bounds
        if self.rank == owner:
            self._owned.add_gradient(name, gradient.sums or gradient.matrices, gradient.head)

    def _hand_out(self, name: str) -> None:
        """Broadcast the owner's copy to all ranks."""
        weights, owner = self._weights(name), self._owners[name]
        flat = weights.flat[: weights.layout.size]  # the owner's head follows it, in another dtype
        if owner != self.rank:
            flat = torch.empty_like(flat)
        distributed.broadcast(flat.view(torch.uint8), owner)
        if owner != self.rank:
            self._copies[name] = AdapterWeights(weights.layout, weights.scaling, flat)
        if (head := self._head(name)) is not None:
            distributed.broadcast(head.view(torch.uint8), owner)


def _empty_head(base: LoraModel) -> Tensor:
    return torch.zeros(_head_size(base), device=base.device)


def _head_size(base: LoraModel) -> int:
    """Its weights and its bias."""
    return base.info.hidden_size + 1
