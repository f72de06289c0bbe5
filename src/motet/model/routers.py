"""Record and replay router outputs: if rounding changed the chosen experts, results could not be compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_NAMES = ("gate", "router")


class Routers:
    """The routers of a mixture of experts, in a stock model and in the same model after wrapping."""

    def __init__(self, model: nn.Module) -> None:
        """Find the routers; a model without experts has none."""
        self._modules = [
            module
            for parent in model.modules()
            for name, module in parent.named_children()
            if name in _NAMES and hasattr(parent, "experts")
        ]
        self._outputs: dict[nn.Module, list[tuple[Tensor, ...]]] = {}

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the routers' outputs for each sequence, in order."""

        def record(module: nn.Module, inputs: object, output: Any) -> None:
            self._outputs.setdefault(module, []).append(output if isinstance(output, tuple) else (output,))

        with self._hooked(record):
            yield

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Replay the recorded outputs for the packed sequences; padding rows repeat the last row."""

        def replay(module: nn.Module, inputs: object, output: Any) -> Any:
            parts = output if isinstance(output, tuple) else (output,)
            replayed = tuple(map(_packed, zip(*self._outputs[module], strict=True), parts))
            return replayed if isinstance(output, tuple) else replayed[0]

        with self._hooked(replay):
            yield

    @contextlib.contextmanager
    def _hooked(self, hook: Callable[..., Any]) -> Iterator[None]:
        handles = [module.register_forward_hook(hook) for module in self._modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _packed(recorded: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Recorded rows [T, …] or [1, T, …] of all sequences in the shape of `output`; `output` if they do not fit."""
    rows = torch.cat([part.reshape(-1, part.shape[-1]) for part in recorded])
    more = output.numel() // output.shape[-1] - len(rows)
    if rows.shape[-1] != output.shape[-1] or more < 0:
        return output
    return torch.cat([rows, rows[-1:].expand(more, -1)]).view(output.shape)
