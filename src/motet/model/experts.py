"""Experts on a CPU, so that a row has the same bits however many others choose its expert.

Each expert multiplies its rows by themselves, padded so that the product is a GEMM's; what a row's experts say is added in
fp32, in the order of their numbers. Routers stay the model's own.

Legend: T rows, E experts, J experts that a row chooses, P = T · J pairs of both, D model width, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.model.arithmetic import ROWS, least_rows, round_up

NAME = "motet"
"""Under which the function is registered with transformers' `ExpertsInterface`."""


class NarrowLinear(nn.Module):
    """A frozen layer of fewer outputs than `ROWS` (the gate of a shared expert): the product with a vector is no GEMM."""

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


def has_experts(model: nn.Module) -> bool:
    """Whether rows choose among experts."""
    return any("experts" in path for path, _ in model.named_parameters())


def compute_experts(model: Any) -> None:
    """Have a model's experts, and the gates of those that all rows share, computed here where its class lets one."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and name == "shared_expert_gate" and child.out_features < ROWS:
                setattr(parent, name, NarrowLinear(child))
    ALL_EXPERTS_FUNCTIONS.register(NAME, motet_experts)
    if model._can_set_experts_implementation():
        model.set_experts_implementation(NAME)


def are_computed_here(model: nn.Module) -> bool:
    """Whether all of a model's experts are."""
    experts = [module for path, module in model.named_modules() if path.rsplit(".", 1)[-1] == "experts"]
    return all(
        hasattr(each, "_apply_gate") and getattr(each.config, "_experts_implementation", None) == NAME
        for each in experts
    )


def motet_experts(experts: Any, hidden_TD: Tensor, top_TJ: Tensor, share_TJ: Tensor) -> Tensor:
    """What transformers calls in every layer of experts → [T, D]."""
    by_number = top_TJ.argsort(dim=-1)
    chosen_P, share_TJ = top_TJ.gather(1, by_number).flatten(), share_TJ.gather(1, by_number)
    by_expert_P = chosen_P.argsort(stable=True)
    rows_PD = hidden_TD[:, None].expand(-1, top_TJ.shape[1], -1).flatten(0, 1).index_select(0, by_expert_P)
    counts = chosen_P.bincount(minlength=experts.num_experts).tolist()
    parts = [_expert(experts, number, own) for number, own in enumerate(rows_PD.split(counts)) if len(own)]
    said_TJD = torch.cat(parts).index_select(0, by_expert_P.argsort()).unflatten(0, top_TJ.shape).float()
    weighted_TJD: Tensor = said_TJD * share_TJ[..., None].float()
    total_TD = weighted_TJD[:, 0]
    for place in range(1, top_TJ.shape[1]):
        total_TD = total_TD + weighted_TJD[:, place]
    return total_TD.to(hidden_TD.dtype)


def _expert(experts: Any, number: int, rows_ND: Tensor) -> Tensor:
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    weights = getattr(experts, up)[number], experts.down_proj[number]
    least = max(least_rows(weight.shape[-1], weight.shape[-2], weight.dtype) for weight in weights)
    padded = F.pad(rows_ND, (0, 0, 0, max(least, round_up(len(rows_ND), ROWS)) - len(rows_ND)))
    inner = _product(experts, number, padded, up)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    outer = _product(experts, number, inner, "down_proj")
    said: Tensor = experts.post_expert_norm(outer) if experts.has_post_expert_norm else outer
    return said[: len(rows_ND)]


def _product(experts: Any, number: int, rows_TK: Tensor, name: str) -> Tensor:
    weight = getattr(experts, name)[number]
    bias = getattr(experts, f"{name}_bias")[number] if experts.has_bias else None
    return F.linear(rows_TK, weight.t() if experts.is_transposed else weight, bias)
