"""A frozen base over several ranks, by torch's own FSDP2: each rank keeps a part of every weight and gathers a layer to use it.

Weights are frozen, so there is nothing to reduce: gathers are all that ranks exchange here, and a gathered weight has the
bits of the whole one. Every rank has to make the same passes, backward passes too, or the others wait for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


class Shards:
    """The ranks that a base lies over, this process being one of them."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """`mesh` has one dimension: the ranks."""
        self._mesh = mesh
        self._model: FSDPModule | None = None
        self._layers: list[FSDPModule] = []

    def settle(self, model: nn.Module, decoder: nn.Module, fuse: Callable[[nn.Module], None]) -> None:
        """Keep this rank's part of every weight, one layer after another, so that no more than a layer is whole at a time.

        Args:
            model: as it was loaded; what it has of files is not read into memory of its own before its turn comes.
            decoder: the part of it that has the layers.
            fuse: makes one product of the linear layers inside a module that read the same input.
        """
        for layer in _layers(decoder):
            fuse(layer)
            self._layers.append(self._shard(layer))
        fuse(decoder)
        self._model = self._shard(model)  # what lies outside the layers: embeddings, the last norm and the head

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, what lies outside the layers is whole: the head is used outside the model's own forward pass."""
        with contextlib.nullcontext() if self._model is None else _gathered(self._model):
            yield

    def layer_gathered(self, inside: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Have a layer whole while a module inside it is used by itself; all ranks at once."""
        modules = ((layer, cast("nn.Module", layer)) for layer in self._layers)
        return _gathered(next(layer for layer, module in modules if inside in set(module.modules())))

    def _shard(self, module: nn.Module) -> FSDPModule:
        from torch.distributed.fsdp import FSDPModule, fully_shard  # takes a while to import

        numbers = {parameter for parameter in module.parameters() if parameter.dim() == 0}  # cannot be cut
        sharded: Any = fully_shard(module, mesh=self._mesh, reshard_after_forward=True, ignored_params=numbers)
        assert isinstance(sharded, FSDPModule)
        return sharded


@contextlib.contextmanager
def _gathered(module: FSDPModule) -> Iterator[None]:
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def _layers(decoder: nn.Module) -> list[nn.Module]:
    """The decoder's layers: of the lists of modules that it has, the one that holds the most weights."""
    lists = [modules for modules in decoder.modules() if isinstance(modules, nn.ModuleList)]
    layers: nn.Module = max(lists, key=lambda modules: sum(weight.numel() for weight in modules.parameters()))
    return list(layers.children())


def own_bytes(model: nn.Module) -> int:
    """Bytes of weights that lie on this rank."""
    parts = (getattr(parameter, "_local_tensor", parameter) for parameter in model.parameters())
    return sum(part.numel() * part.element_size() for part in parts if isinstance(part, torch.Tensor))
