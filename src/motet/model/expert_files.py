"""Adapters on experts in files: combined, as in PEFT since transformers 5, or per expert, as before and in vLLM.

Combined files hold all experts of a product, with gate and up as one: `experts.base_layer.lora_A` for the inner wrapper
and `experts.lora_A` for the outer one. Files per expert have `experts.0.gate_proj.lora_A` and so on, or `w1`, `w3` and
`w2`. Legend: E experts, R rank, K inputs, N outputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from motet.core.errors import AdapterError
from motet.core.model_info import EXPERTS, matches_experts

GATE_UP, DOWN = "gate_up_proj", "down_proj"
_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_APART = re.compile(rf"(.+\.{EXPERTS})\.([0-9]{{1,6}})\.(\w+)\.lora_([AB])\.weight")
_BLOCK, _MLP = ".block_sparse_moe.", ".mlp."
"""Name of the module around experts in checkpoints with `w1`, and its current name in transformers."""


@dataclass(frozen=True)
class _Pair:
    """Adapter of one product of all experts."""

    a_ERK: Tensor
    b_ENR: Tensor

    def widened(self, rank: int) -> _Pair:
        """Raise the rank with rows and columns of zeros, which stay zero in training."""
        more = rank - self.a_ERK.shape[1]
        a_ERK = torch.nn.functional.pad(self.a_ERK, (0, 0, 0, more))
        return _Pair(a_ERK, torch.nn.functional.pad(self.b_ENR, (0, more)))

    @classmethod
    def stacked(cls, gate: _Pair, up: _Pair) -> _Pair:
        """Gate and up as one product, with twice the rank unless both have the same A."""
        if torch.equal(gate.a_ERK, up.a_ERK):
            return cls(gate.a_ERK, torch.cat([gate.b_ENR, up.b_ENR], 1))
        below, above = torch.zeros_like(gate.b_ENR), torch.zeros_like(up.b_ENR)
        b_ENR = torch.cat([torch.cat([gate.b_ENR, below], 2), torch.cat([above, up.b_ENR], 2)], 1)
        return cls(torch.cat([gate.a_ERK, up.a_ERK], 1), b_ENR)


@dataclass(frozen=True)
class Together:
    """A file with separate experts, converted to the combined form."""

    tensors: dict[str, Tensor]
    times: int
    """Factor on the file's rank."""
    modules: tuple[str, ...]
    """Paths of the adapted layers."""
    parameters: tuple[str, ...]
    """Paths of the adapted expert products."""


def together(tensors: Mapping[str, Tensor], rank: int, prefix: str) -> Together | None:
    """Combine separate experts; None if there are none. Tensor names begin with the prefix.

    Raises:
        AdapterError: an expert or one of its products is missing or has another shape.
    """
    apart_by_module: dict[str, dict[str, dict[str, dict[int, Tensor]]]] = {}
    others = {}
    for name, tensor in tensors.items():
        match = _APART.fullmatch(name)
        if match is None:
            others[name] = tensor
            continue
        module, number, product, side = match.groups()
        apart_by_module.setdefault(module, {}).setdefault(product, {}).setdefault(side, {})[int(number)] = tensor
    if not apart_by_module:
        return None
    pairs = {
        module.replace(_BLOCK, _MLP): _products(module, products, rank) for module, products in apart_by_module.items()
    }
    times = max(pair.a_ERK.shape[1] for products in pairs.values() for pair in products.values()) // rank
    modules = sorted({name.removeprefix(prefix).rpartition(".lora_")[0] for name in others})
    if times > 1:
        others = {name: _widened(name, tensor, rank) for name, tensor in others.items()}
    for module, products in pairs.items():
        for depth, name in enumerate(sorted(products)):  # PEFT wraps gate and up first
            pair, wrapper = products[name].widened(times * rank), module + ".base_layer" * depth
            others[f"{wrapper}.lora_A.weight"] = pair.a_ERK.flatten(0, 1)
            others[f"{wrapper}.lora_B.weight"] = pair.b_ENR.permute(1, 2, 0).flatten(1)
    parameters = (f"{module}.{name}".removeprefix(prefix) for module, products in pairs.items() for name in products)
    return Together(others, times, tuple(modules), tuple(sorted(parameters)))


def _widened(name: str, tensor: Tensor, more: int) -> Tensor:
    """Pad a layer's tensor: A gets rows, B columns."""
    return torch.nn.functional.pad(tensor, (0, 0, 0, more) if ".lora_A." in name else (0, more))


def _products(module: str, products: Mapping[str, Mapping[str, Mapping[int, Tensor]]], rank: int) -> dict[str, _Pair]:
    """Adapters of single experts, stacked over the experts of a module; gate and up, if present, as one."""
    names = next((names for names in _NAMES if set(products) <= set(names)), None)
    if names is None or (names[0] in products) != (names[1] in products):
        known = " or ".join(", ".join(names) for names in _NAMES)
        raise AdapterError(f"{module} has adapters on {', '.join(sorted(products))}; supported are {known}")
    pairs = {}
    for name, sides in products.items():
        numbers = range(1 + max(number for side in sides.values() for number in side))
        try:
            a_ERK, b_ENR = (torch.stack([sides[side][number] for number in numbers]) for side in "AB")
        except (KeyError, RuntimeError) as error:
            raise AdapterError(f"the experts of {module} do not all have an adapter of one shape on {name}") from error
        if (a_ERK.dim(), b_ENR.dim()) != (3, 3) or (a_ERK.shape[1], b_ENR.shape[2]) != (rank, rank):
            raise AdapterError(f"the experts of {module} have adapters on {name} whose rank is not {rank}")
        pairs[name] = _Pair(a_ERK, b_ENR)
    gate, up, down = (pairs.get(name) for name in names)
    joined = {} if down is None else {DOWN: down}
    return joined if gate is None or up is None else {**joined, GATE_UP: _Pair.stacked(gate, up)}


def apart(tensors: Mapping[str, Tensor], rank: int, targets: Sequence[str], names: Sequence[str]) -> dict[str, Tensor]:
    """Split combined tensors by expert; `names` are those of gate, up and down. Products without an adapter get zeros.

    `targets` determines the product of a module that has only one pair of matrices.
    """
    others, wrapped = {}, dict[str, dict[int, dict[str, Tensor]]]()
    for name, tensor in tensors.items():
        module, _, side = name.removesuffix(".weight").rpartition(".lora_")
        inside, *wrappers = module.split(".base_layer")
        if inside.endswith(f".{EXPERTS}"):
            wrapped.setdefault(inside, {}).setdefault(len(wrappers), {})[side] = tensor
        else:
            others[name] = tensor
    for module, pairs in wrapped.items():
        gate_up = any(matches_experts(f"{module}.{GATE_UP}", target) for target in targets)
        kinds = {1: GATE_UP, 0: DOWN} if len(pairs) > 1 else {0: GATE_UP if gate_up else DOWN}
        by_product = {kinds[depth]: _by_expert(pair, rank) for depth, pair in pairs.items()}
        place = module.replace(_MLP, _BLOCK) if names[0] == "w1" else module
        for product, pair in zip(names, _gate_up_down(by_product), strict=True):
            for number, (a_RK, b_NR) in enumerate(zip(pair.a_ERK, pair.b_ENR, strict=True)):
                others[f"{place}.{number}.{product}.lora_A.weight"] = a_RK.clone(memory_format=torch.contiguous_format)
                others[f"{place}.{number}.{product}.lora_B.weight"] = b_NR.clone(memory_format=torch.contiguous_format)
    return others


def _by_expert(pair: Mapping[str, Tensor], rank: int) -> _Pair:
    a, b = pair["A"], pair["B"]
    return _Pair(a.unflatten(0, (-1, rank)), b.unflatten(1, (rank, -1)).permute(2, 0, 1))


def _gate_up_down(by_product: Mapping[str, _Pair]) -> tuple[_Pair, _Pair, _Pair]:
    some = next(iter(by_product.values()))
    n_experts, rank = some.a_ERK.shape[:2]
    if DOWN in by_product:
        n_inside, n_outside = by_product[DOWN].a_ERK.shape[2], by_product[DOWN].b_ENR.shape[1]
    else:
        n_inside, n_outside = by_product[GATE_UP].b_ENR.shape[1] // 2, by_product[GATE_UP].a_ERK.shape[2]
    zeros = some.a_ERK.new_zeros
    down = by_product.get(DOWN) or _Pair(zeros(n_experts, rank, n_inside), zeros(n_experts, n_outside, rank))
    both = by_product.get(GATE_UP) or _Pair(zeros(n_experts, rank, n_outside), zeros(n_experts, 2 * n_inside, rank))
    gate_ENR, up_ENR = both.b_ENR.chunk(2, 1)
    return _Pair(both.a_ERK, gate_ENR), _Pair(both.a_ERK, up_ENR), down


def names_apart(model_type: str) -> tuple[str, str, str] | None:
    """Names of gate, up and down if an architecture's checkpoints have separate experts; otherwise None."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    patterns = [
        pattern for rule in get_checkpoint_conversion_mapping(model_type) or () for pattern in rule.source_patterns
    ]
    kept = (pattern.removesuffix(".weight").rpartition(".*.")[2] for pattern in patterns if f"{EXPERTS}.*." in pattern)
    known = set(kept)
    return next((names for names in _NAMES if known.issuperset(names)), None)
