"""Adapters of several ranks in one batch, and backends that watch what is multiplied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from motet.model.arithmetic import Arithmetic
from motet.model.lora import AdapterWeights
from motet.model.lora_model import LoraModel
from motet.model.lora_products import LoraProducts, products_backend
from tests.support import tiny_models as tiny


def mixed(base: LoraModel) -> list[AdapterWeights]:
    """Adapters that share a layout, and adapters of other ranks, alphas and targets."""
    leaf = sorted({path.rsplit(".", 1)[-1] for path in base.linears})
    return [
        tiny.adapter(base, rank=8, alpha=16, seed=1),
        tiny.adapter(base, rank=8, alpha=3, seed=2),
        tiny.adapter(base, rank=3, alpha=32, seed=3),
        tiny.adapter(base, rank=16, alpha=8, targets=leaf[:1], seed=4),
    ]


def company(base: LoraModel) -> tiny.Packed:
    """Sequences of several lengths for each adapter, and of the base in between."""
    one, two, three, four = mixed(base)
    lengths = {0: (70, 9), 1: (1,), 2: (37,), 3: (5, 48), 4: (23,)}
    owners = [one, None, two, three, four]
    return [(owners[place], tiny.tokens(n, seed=place)) for place, group in lengths.items() for n in group]


DTYPES = ("float32", "bfloat16")
NAMES = ("llama", "opt", "phi3")
TILE = 16
EXACT = Arithmetic(rows=TILE, tile=TILE, products="grouped")
FAST = Arithmetic(rows=TILE, products="grouped")


@contextmanager
def exact(name: str, dtype: str = "bfloat16", arithmetic: Arithmetic = EXACT) -> Iterator[LoraModel]:
    """A shared base that computes as an exact GPU does, for a while."""
    base = tiny.base(name, dtype)
    base.compute_with(arithmetic)
    try:
        yield base
    finally:
        base.compute_with(Arithmetic())


class Seen(TorchDispatchMode):
    """Every operation, with the shapes of the tensors it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func._schema.name, [tuple(each.shape) for each in args if isinstance(each, Tensor)]))
        return func(*args, **kwargs or {})

    def products(self) -> list[tuple[int, ...]]:
        """Shapes of the rows that were multiplied with a matrix."""
        rows = {"aten::mm": 0, "aten::addmm": 1, "aten::addmm_": 1}
        return [shapes[rows[name]] for name, shapes in self.calls if name in rows]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def products(base: LoraModel, arithmetic: Arithmetic) -> LoraProducts:
    return products_backend(arithmetic, base.device, base.dtype)
