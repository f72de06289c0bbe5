"""Which experts a model chose: the rounding of a router's logits may send a row elsewhere, and then nothing can be compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_NAMES = ("gate", "router")


class Routers:
    """The routers of a mixture of experts, in a stock model and in the same model once it is wrapped."""

    def __init__(self, model: nn.Module) -> None:
        """Nothing is recorded yet; a model without experts has no routers."""
        self._modules = [
            module
            for parent in model.modules()
            for name, module in parent.named_children()
            if name in _NAMES and hasattr(parent, "experts")
        ]
        self._said: dict[nn.Module, list[tuple[Tensor, ...]]] = {}

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Remember what they say of each sequence, one after another."""

        def hear(module: nn.Module, given: object, said: Any) -> None:
            self._said.setdefault(module, []).append(said if isinstance(said, tuple) else (said,))

        with self._hooked(hear):
            yield

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Have them say the same of the sequences packed together; rows beyond them get what the last has."""

        def say(module: nn.Module, given: tuple[Tensor, ...], said: Any) -> Any:
            parts = said if isinstance(said, tuple) else (said,)
            found = tuple(map(_packed, zip(*self._said[module], strict=True), parts))
            return found if isinstance(said, tuple) else found[0]

        with self._hooked(say):
            yield

    @contextlib.contextmanager
    def _hooked(self, hook: Callable[..., Any]) -> Iterator[None]:
        handles = [module.register_forward_hook(hook) for module in self._modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _packed(recorded: tuple[Tensor, ...], said: Tensor) -> Tensor:
    """Recorded rows [T, …] or [1, T, …] of each sequence as the rows of `said`; `said` where it holds something else."""
    rows = torch.cat([part.reshape(-1, part.shape[-1]) for part in recorded])
    more = said.numel() // said.shape[-1] - len(rows)
    if rows.shape[-1] != said.shape[-1] or more < 0:
        return said
    return torch.cat([rows, rows[-1:].expand(more, -1)]).view(said.shape)
