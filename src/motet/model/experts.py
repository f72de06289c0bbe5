"""Products of experts. On a CPU, a row's bits do not depend on how many other rows choose its expert.

Each expert multiplies its rows, padded so that the product is a GEMM. A row's expert outputs are added in fp32, in
order of expert number. The model's routers are unchanged.

Legend: T rows, E experts, J experts chosen per row, P = T · J pairs of row and expert, M padded rows of all experts,
D model width, K inputs, N outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.model.arithmetic import ROWS, least_rows
from motet.model.expert_lora import ExpertProjection, ExpertShare, project, room, runs_of_rows
from motet.model.expert_ranks import ExpertPairs, ExpertRanks
from motet.model.lora import AdapterWeights, ExpertRun, LoraContext, NoAdapters

NAME = "motet"
"""Name in transformers' `ExpertsInterface`."""


class NarrowLinear(nn.Module):
    """A frozen layer with fewer outputs than `ROWS`, padded because a product with a vector is not a GEMM."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features = linear.out_features
        more = ROWS - linear.out_features
        self.register_buffer("weight", F.pad(linear.weight.detach(), (0, 0, 0, more)), persistent=False)
        bias: Tensor | None = linear.bias
        self.register_buffer("bias", None if bias is None else F.pad(bias.detach(), (0, more)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [..., K] → [..., N]."""
        return F.linear(x, self.weight, self.bias)[..., : self.out_features]


NEED_OWN_SAMPLING = "with adapters on experts Motet samples itself (rollout.engine: embedded)"
"""Why a base supports no adapters on experts if inference servers sample."""


def has_experts(model: nn.Module) -> bool:
    """Whether the model is a mixture of experts."""
    return any("experts" in path for path, _ in model.named_parameters())


@dataclass(frozen=True)
class ExpertsAt:
    """Facts about a module of experts."""

    path: str
    context: LoraContext
    """The context with its adapters."""
    n_experts: int
    first: int = 0
    """Number of the first expert whose weights are here."""
    ranks: ExpertRanks | None = None
    """The ranks with the other experts; None if all are here."""


def compute_experts_one_by_one(model: Any) -> None:
    """Make transformers multiply experts one by one: its grouped product requires widths that are multiples of 8."""
    if model.device.type == "cpu" and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")


def compute_experts(model: Any, context: LoraContext) -> None:
    """Use this module for a model's experts, if its class allows that, and pad the gates of shared experts."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and name == "shared_expert_gate" and child.out_features < ROWS:
                setattr(parent, name, NarrowLinear(child))
    ALL_EXPERTS_FUNCTIONS.register(NAME, motet_experts)
    if model._can_set_experts_implementation():
        model.set_experts_implementation(NAME)
    for path, module in model.named_modules():
        if _is_computed_here(module):
            module.at = ExpertsAt(path, context, module.down_proj.shape[0])


def share_experts(layer: nn.Module, ranks: ExpertRanks, place: torch.device) -> set[nn.Parameter]:
    """Keep this rank's experts of a layer, on that device; returns their weights. Packed experts stay as they are."""
    kept = set()
    for module in layer.modules():
        at: Any = getattr(module, "at", None)
        if not isinstance(at, ExpertsAt) or not isinstance(module.down_proj, Tensor):
            continue
        own = ranks.own(at.n_experts)
        for name in (_up(module), "down_proj"):
            weights = nn.Parameter(getattr(module, name)[own].detach().clone().to(place), requires_grad=False)
            setattr(module, name, weights)
            kept.add(weights)
        module.at = replace(at, first=own.start, ranks=ranks)  # type: ignore[assignment]
    return kept


def adaptable_experts(model: nn.Module) -> dict[str, tuple[int, int, int]]:
    """Numbers of experts, inputs and outputs of each adaptable projection, by the path of its parameter."""
    shapes = {}
    for path, module in model.named_modules():
        if isinstance(getattr(module, "at", None), ExpertsAt):
            for name in (_up(module), "down_proj"):
                n_experts, *sizes = getattr(module, name).shape
                n_in, n_out = sizes if module.is_transposed else reversed(sizes)
                shapes[f"{path}.{name}"] = (n_experts, n_in, n_out)
    return shapes


def are_computed_here(model: nn.Module) -> bool:
    """Whether this module computes all experts of a model."""
    experts = [module for path, module in model.named_modules() if path.rsplit(".", 1)[-1] == "experts"]
    return all(map(_is_computed_here, experts))


@torch.no_grad()
def rows_agree(
    model: nn.Module,
    n_rows: int,
    weights: AdapterWeights | None,
    gathered: Callable[[nn.Module], contextlib.AbstractContextManager[None]] | None = None,
) -> bool:
    """Whether 1 to 5 rows that choose an expert have the same bits as among `n_rows` rows that choose it.

    `gathered` is the context for using a module of experts of a base in shards on its own.
    """
    tried = set[tuple[int, torch.Size, torch.Size]]()
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        at: Any = getattr(module, "at", None)
        if not isinstance(at, ExpertsAt):
            continue
        experts: Any = module
        up, down = getattr(experts, _up(experts)), experts.down_proj
        if (shapes := (at.n_experts, up.shape[1:], down.shape[1:])) in tried:  # the same on all ranks
            continue
        tried.add(shapes)
        width = up.shape[1] if experts.is_transposed else up.shape[2]
        rows_TD = torch.randn(n_rows, width, generator=generator).to(up.dtype)
        with contextlib.nullcontext() if gathered is None else gathered(module):
            if at.ranks is not None and not at.ranks.is_first:
                rows_TD = rows_TD[:0]  # the expert gets the rows of all ranks
            whole, *few = (_on_one_expert(experts, rows_TD[:n], weights) for n in (n_rows, 1, 2, 3, 4, 5))
            agree = all(torch.equal(output, whole[: len(output)]) for output in few)
            agree = agree if at.ranks is None else at.ranks.agreed(agree)
        if not agree:
            return False
    return True


def _on_one_expert(experts: Any, rows_TD: Tensor, weights: AdapterWeights | None) -> Tensor:
    """Outputs [T, D] of the last expert for all rows."""
    context, chosen = experts.at.context, torch.full((len(rows_TD), 1), experts.at.n_experts - 1)
    routing, context.routing = context.routing, NoAdapters()
    try:
        if weights is not None:
            context.routing.expert_runs = (ExpertRun(0, len(rows_TD), weights),)
        said: Tensor = experts(rows_TD, chosen, rows_TD.new_ones(len(rows_TD), 1))
        return said
    finally:
        context.routing = routing


def _is_computed_here(module: Any) -> bool:
    return hasattr(module, "_apply_gate") and getattr(module.config, "_experts_implementation", None) == NAME


def _up(experts: Any) -> str:
    return "gate_up_proj" if experts.has_gate else "up_proj"


@dataclass(frozen=True)
class _ExpertRows:
    """The rows that chose one expert."""

    number: int
    n_rows: int
    """Including padding."""
    shares: tuple[ExpertShare, ...]


def motet_experts(experts: Any, hidden_TD: Tensor, top_TJ: Tensor, share_TJ: Tensor) -> Tensor:
    """Called by transformers in every layer of experts; returns [T, D]."""
    at: ExpertsAt = experts.at
    by_number = top_TJ.argsort(dim=-1)
    chosen_TJ, share_TJ = top_TJ.gather(1, by_number), share_TJ.gather(1, by_number)
    runs = at.context.routing.expert_runs
    pairs = ExpertPairs(
        hidden_TD[:, None].expand(-1, top_TJ.shape[1], -1).flatten(0, 1),
        chosen_TJ.flatten(),
        runs_of_rows(runs, len(hidden_TD)).to(top_TJ.device).repeat_interleave(top_TJ.shape[1]),
        runs,
    )
    if at.ranks is None:
        said_PD = _said(experts, pairs)
    else:
        paths = [f"{at.path}.{name}" for name in (_up(experts), "down_proj")]
        said_PD = at.ranks.compute(pairs, at.n_experts, paths, partial(_said, experts))
    weighted_TJD: Tensor = said_PD.unflatten(0, top_TJ.shape).float() * share_TJ[..., None].float()
    total_TD = weighted_TJD[:, 0]
    for place in range(1, top_TJ.shape[1]):
        total_TD = total_TD + weighted_TJD[:, place]
    return total_TD.to(hidden_TD.dtype)


def _said(experts: Any, pairs: ExpertPairs) -> Tensor:
    """Outputs [P, D] of pairs whose experts are all here."""
    laid_out, place_P = _lay_out(experts, pairs)
    n_rows, device = sum(each.n_rows for each in laid_out), place_P.device
    source_M = torch.full((n_rows,), len(place_P), device=device)
    source_M.index_copy_(0, place_P, torch.arange(len(place_P), device=device))
    rows_MD = F.pad(pairs.rows_PD, (0, 0, 0, 1)).index_select(0, source_M)
    parts = [
        _expert(experts, each, pairs.runs, own)
        for each, own in zip(laid_out, rows_MD.split([each.n_rows for each in laid_out]), strict=True)
    ]
    return torch.cat(parts).index_select(0, place_P)


def _lay_out(experts: Any, pairs: ExpertPairs) -> tuple[list[_ExpertRows], Tensor]:
    """Assign each pair its padded row [P], ordered by expert, then run."""
    runs, dtype = pairs.runs, pairs.rows_PD.dtype
    n_runs = len(runs) + 1
    key_P = pairs.expert_P * n_runs + pairs.run_P
    weights = getattr(experts, _up(experts)), experts.down_proj
    least = max(least_rows(each.shape[-1], each.shape[-2], dtype) for each in weights)
    sorted_P, order_P = key_P.sort(stable=True)
    keys, counts = torch.unique_consecutive(sorted_P, return_counts=True)
    laid_out, starts, start = [], [], 0
    for number, own in groupby(zip(keys.tolist(), counts.tolist(), strict=True), lambda pair: pair[0] // n_runs):
        shares, last = [], 0
        for key, count in own:
            starts.append(start + last)
            shares.append(ExpertShare(key % n_runs, last, last := last + room(runs, key % n_runs, count, dtype)))
        laid_out.append(_ExpertRows(number, max(last, least), tuple(shares)))
        start += laid_out[-1].n_rows
    shift = torch.tensor(starts, device=key_P.device) - counts.cumsum(0) + counts
    row_P = torch.arange(len(key_P), device=key_P.device) + shift.repeat_interleave(counts)
    return laid_out, torch.empty_like(row_P).index_copy_(0, order_P, row_P)


def _expert(experts: Any, own: _ExpertRows, runs: Sequence[ExpertRun], rows_MD: Tensor) -> Tensor:
    inner = _product(experts, own, runs, rows_MD, _up(experts))
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    outer = _product(experts, own, runs, inner, "down_proj")
    normed = getattr(experts, "has_post_expert_norm", False)  # transformers before 5.19 has no such experts
    said: Tensor = experts.post_expert_norm(outer) if normed else outer
    return said


def _product(experts: Any, own: _ExpertRows, runs: Sequence[ExpertRun], rows_MK: Tensor, name: str) -> Tensor:
    at: ExpertsAt = experts.at
    bias = getattr(experts, f"{name}_bias")[own.number] if experts.has_bias else None
    projection = ExpertProjection(
        f"{at.path}.{name}",
        own.number,
        getattr(experts, name),
        bias,
        experts.is_transposed,
        at.context.arithmetic,
        at.first,
    )
    return project(runs, projection, rows_MK, own.shares)
