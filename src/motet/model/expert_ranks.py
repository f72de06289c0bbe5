"""Expert parallelism: each rank of a base in shards keeps some of the experts, and rows travel to the rank of their expert.

A rank computes its experts for the rows of all ranks, in the order and the shapes of one process. The backward pass
sends gradients of rows the other way, and gradients of adapters on experts to the rank with their segment.

Legend: P pairs of a row and an expert that a rank sends, Q pairs that it computes, D model width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, distributed

from motet.model.lora import AdapterWeights, ExpertRun, LoraMatrices
from motet.model.unit_sums import UnitSums, add_part


@dataclass(frozen=True)
class ExpertPairs:
    """Pairs of a row and an expert that it chose."""

    rows_PD: Tensor
    expert_P: Tensor
    run_P: Tensor
    """Index among `runs`; one past the last for rows without an adapter on experts."""
    runs: Sequence[ExpertRun]


_NO_RUN = -1
"""Stands for no run between ranks: a rank whose segments cannot be laid out has fewer runs than the others expect."""
_MOST_RUNS = 1 << 32
Compute = Callable[[ExpertPairs], Tensor]
"""Computes the outputs [P, D] of pairs."""


class ExpertRanks:
    """The ranks that share the experts of a base."""

    def __init__(self, group: Any, place: torch.device) -> None:
        """`group` is their process group, `place` the kind of device."""
        self._group, self._place = group, place
        self.members: list[int] = distributed.get_process_group_ranks(group)
        """Their numbers among all ranks."""
        self._adapters: Sequence[Sequence[AdapterWeights]] | None = None

    def own(self, n_experts: int) -> slice:
        """The experts that this rank keeps."""
        first = min(distributed.get_rank(self._group) * self._each(n_experts), n_experts)
        return slice(first, min(first + self._each(n_experts), n_experts))

    def agreed(self, verdict: bool) -> bool:
        """Whether all ranks say yes; all ranks call this together. Ranks that disagree would part and wait for ever."""
        votes = torch.tensor([int(verdict)], device=self._place)
        distributed.all_reduce(votes, distributed.ReduceOp.MIN, group=self._group)
        return bool(votes)

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the ranks."""
        return distributed.get_rank(self._group) == 0

    @contextlib.contextmanager
    def running(self, adapters: Sequence[Sequence[AdapterWeights]]) -> Iterator[None]:
        """Context for a pass in which each rank has other runs: their adapters, by rank. Without it, all have the same."""
        self._adapters = adapters
        try:
            yield
        finally:
            self._adapters = None

    def compute(self, pairs: ExpertPairs, n_experts: int, paths: Sequence[str], compute: Compute) -> Tensor:
        """The outputs [P, D] of this rank's pairs; all ranks call this together.

        Args:
            pairs: of this rank.
            n_experts: number of experts on all ranks.
            paths: paths of the experts' projections.
            compute: computes pairs with this rank's experts.
        """
        owner_P = pairs.expert_P // self._each(n_experts)
        order_P = owner_P.argsort(stable=True)
        run_P = torch.where(pairs.run_P < len(pairs.runs), pairs.run_P, _NO_RUN)
        keys_P2 = torch.stack([pairs.expert_P, run_P], dim=1).index_select(0, order_P)
        trip = _Trip(self._group, torch.bincount(owner_P, minlength=len(self.members)), keys_P2)
        own = self.own(n_experts)
        gradients = _Gradients(self._visitors(pairs.runs, own), pairs.runs, paths, own.start, trip)
        # requires a gradient, so that all ranks run the exchanges of the backward pass
        anchor = torch.zeros((), device=order_P.device, requires_grad=torch.is_grad_enabled())
        rows_QD = _Go.apply(pairs.rows_PD.index_select(0, order_P), anchor, trip, gradients)  # type: ignore[no-untyped-call]
        here = ExpertPairs(rows_QD, trip.keys_Q2[:, 0], gradients.run_Q, gradients.visitors)
        said_QD = compute(here) if len(rows_QD) else rows_QD
        said_PD: Tensor = _Return.apply(said_QD, trip)  # type: ignore[no-untyped-call]
        return said_PD.index_select(0, order_P.argsort())

    def _each(self, n_experts: int) -> int:
        """Experts per rank; the last ranks may have fewer."""
        return -(-n_experts // len(self.members))

    def _visitors(self, runs: Sequence[ExpertRun], experts: slice) -> list[list[ExpertRun]]:
        """The runs of each rank, with gradients of these experts, which are collected here."""
        alike = [[run.weights for run in runs]] * len(self.members)
        adapters = alike if self._adapters is None else self._adapters
        return [[ExpertRun(0, 0, weights, _Sums(weights, experts)) for weights in own] for own in adapters]


class _Trip:
    """Exchanges the pairs of one layer."""

    def __init__(self, group: Any, n_sent: Tensor, keys_P2: Tensor) -> None:
        """`n_sent` are the numbers of pairs for each rank; keys are the expert and the run of each pair."""
        self._group = group
        n_received = torch.empty_like(n_sent)
        distributed.all_to_all_single(n_received, n_sent, group=group)
        self.n_sent: list[int] = n_sent.tolist()
        self.n_received: list[int] = n_received.tolist()
        self.keys_P2, self.keys_Q2 = keys_P2, self.go(keys_P2)

    def go(self, rows: Tensor) -> Tensor:
        """[P, ...] → [Q, ...]."""
        return self.exchange(rows, self.n_sent, self.n_received)

    def back(self, rows: Tensor) -> Tensor:
        """[Q, ...] → [P, ...]."""
        return self.exchange(rows, self.n_received, self.n_sent)

    def exchange(self, rows: Tensor, n_out: list[int], n_in: list[int]) -> Tensor:
        """Send the first `n_out[0]` rows to the first rank, and so on; receive rows in the same way."""
        sent = rows.contiguous()
        received = sent.new_empty(sum(n_in), *sent.shape[1:])
        distributed.all_to_all_single(_bytes(received), _bytes(sent), n_in, n_out, group=self._group)
        return received


def _bytes(rows: Tensor) -> Tensor:
    """[N, ...] → [N, bytes], the same memory: not every backend exchanges every type."""
    return rows.view(len(rows), *(rows.shape[1:] or (1,))).view(torch.uint8)


class _Sums(dict[str, LoraMatrices]):
    """Gradients of an adapter on some experts, by path; zeros are made when a path is first read."""

    def __init__(self, weights: AdapterWeights, experts: slice) -> None:
        super().__init__()
        self._weights, self._experts = weights, experts

    def __missing__(self, path: str) -> LoraMatrices:
        like = self._weights.matrices[path]
        bs = tuple((place, torch.zeros_like(b[self._experts])) for place, b in like.bs)
        self[path] = made = LoraMatrices(torch.zeros_like(like.a[self._experts]), bs)
        return made


class _Gradients:
    """The gradients of adapters on one layer's experts, which are computed on the ranks of the experts."""

    def __init__(
        self,
        by_rank: Sequence[Sequence[ExpertRun]],
        runs: Sequence[ExpertRun],
        paths: Sequence[str],
        first: int,
        trip: _Trip,
    ) -> None:
        """`by_rank` are the runs of each rank, `runs` those of this one; `first` is its first expert."""
        self._by_rank, self._runs, self._paths, self._first, self._trip = by_rank, runs, paths, first, trip
        self.visitors = [run for own in by_rank for run in own]
        """The runs of all ranks, one rank after another."""
        firsts = list(accumulate((len(own) for own in by_rank), initial=0))
        parts = [
            torch.where(keys[:, 1] == _NO_RUN, firsts[-1], keys[:, 1] + first)
            for keys, first in zip(trip.keys_Q2.split(trip.n_received), firsts, strict=False)
        ]
        self.run_Q = torch.cat(parts)
        """Each received pair's index among the visitors."""

    def send_home(self) -> None:
        """Send the gradients that were computed here, add those of this rank's runs, and free the memory."""
        if not self.visitors:  # on any rank
            return
        none = self.visitors[0].weights.flat.new_empty(0)
        received_keys = self._trip.keys_Q2.split(self._trip.n_received)
        computed = [
            torch.cat([none, *(part.flatten() for part, *_ in self._parts(own, _adapted(keys), self._first))])
            for own, keys in zip(self._by_rank, received_keys, strict=True)
        ]
        for run in self.visitors:
            assert run.gradients is not None
            run.gradients.clear()
        wanted = [self._parts(self._runs, _adapted(keys), 0) for keys in self._trip.keys_P2.split(self._trip.n_sent)]
        n_in = [sum(part.numel() for part, *_ in parts) for parts in wanted]
        received = self._trip.exchange(torch.cat(computed), [len(part) for part in computed], n_in)
        places = [place for parts in wanted for place in parts]
        parts = received.split([sums.numel() for sums, *_ in places])
        for (sums, factor, units), part in zip(places, parts, strict=True):
            add_part(sums, part.view(sums.shape), factor, units)

    def _parts(
        self, runs: Sequence[ExpertRun], keys: Sequence[tuple[int, int]], first: int
    ) -> list[tuple[Tensor, float, UnitSums | None]]:
        """Gradients of A and B for each expert and run, with the factors and sums of what is added to them.

        Those of a run begin with expert `first`.
        """
        parts = list[tuple[Tensor, float, UnitSums | None]]()
        for expert, index in keys:
            run = runs[index]
            assert run.gradients is not None
            whole = run.sums is not None
            assert run.scaling == 1.0 or whole, "ranks scale the gradients of a segment when they are complete"
            for path in self._paths:
                if path in run.weights.matrices:
                    sums = run.gradients[path]
                    parts.append((sums.a[expert - first], run.scaling, run.sums))
                    parts.append((sums.bs[0][1][expert - first], 1.0, run.sums))
        return parts


def _adapted(keys_N2: Tensor) -> list[tuple[int, int]]:
    """The different experts and runs of pairs with an adapter, in one order on all ranks."""
    expert_N, run_N = keys_N2[keys_N2[:, 1] != _NO_RUN].unbind(1)
    return [divmod(key, _MOST_RUNS) for key in (expert_N * _MOST_RUNS + run_N).unique().tolist()]


class _Go(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_PD: Tensor, anchor: Tensor, trip: _Trip, gradients: _Gradients) -> Tensor:
        ctx.trip, ctx.gradients = trip, gradients
        return trip.go(rows_PD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.gradients.send_home()
        return ctx.trip.back(grads[0]), None, None, None


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, said_QD: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return trip.back(said_QD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.go(grads[0]), None
