"""A frozen base sharded over ranks with torch's FSDP2: each rank stores a part of every weight and gathers it for use.

Experts are not gathered: each rank keeps some of them whole (`motet.model.expert_ranks`). Weights are frozen, so ranks
only gather and never reduce, and a gathered weight has the bits of the original. Every rank must run the same forward
and backward passes; otherwise the other ranks wait for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Set
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from motet.model.expert_ranks import ExpertRanks
from motet.model.experts import share_experts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


class Shards:
    """The ranks that share a base, including this process."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """`mesh` has one dimension: the ranks."""
        self._mesh = mesh
        self._place = torch.device(mesh.device_type)
        self.experts = ExpertRanks(mesh.get_group(), self._place)
        self._model: FSDPModule | None = None
        self._layers: list[FSDPModule] = []

    def settle(self, model: nn.Module, decoder: nn.Module, fuse: Callable[[nn.Module], None]) -> bool:
        """Shard every weight but experts', layer by layer, so that at most one layer is complete at a time.

        Returns whether ranks keep experts whole.

        Args:
            model: as loaded; weights mapped from files are read into memory layer by layer.
            decoder: the part of the model with the layers.
            fuse: fuses the linear layers of a module that read the same input.
        """
        keep_experts = False
        for layer in layers_of(decoder):
            fuse(layer)
            own = share_experts(layer, self.experts, self._place)
            keep_experts = keep_experts or bool(own)
            self._layers.append(self._shard(layer, own))
        fuse(decoder)
        self._model = self._shard(model)  # weights outside the layers: embeddings, the last norm and the head
        return keep_experts

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather the weights outside the layers: the head is used outside the model's forward pass."""
        with contextlib.nullcontext() if self._model is None else _gathered(self._model):
            yield

    def layer_gathered(self, inside: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Gather a layer while a module inside it is used on its own; all ranks must call this together."""
        modules = ((layer, cast("nn.Module", layer)) for layer in self._layers)
        return _gathered(next(layer for layer, module in modules if inside in set(module.modules())))

    def _shard(self, module: nn.Module, own: Set[nn.Parameter] = frozenset()) -> FSDPModule:
        from torch.distributed.fsdp import FSDPModule, fully_shard  # slow to import

        numbers = {parameter for parameter in module.parameters() if parameter.dim() == 0}  # cannot be sharded
        sharded: Any = fully_shard(module, mesh=self._mesh, reshard_after_forward=True, ignored_params=numbers | own)
        assert isinstance(sharded, FSDPModule)
        return sharded


@contextlib.contextmanager
def _gathered(module: FSDPModule) -> Iterator[None]:
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def layers_of(decoder: nn.Module) -> list[nn.Module]:
    """The decoder's layers: the list of modules that holds the most weights."""
    lists = [modules for modules in decoder.modules() if isinstance(modules, nn.ModuleList)]
    layers: nn.Module = max(lists, key=lambda modules: sum(weight.numel() for weight in modules.parameters()))
    return list(layers.children())


def own_bytes(model: nn.Module) -> int:
    """Bytes of weights on this rank."""
    parts = (getattr(parameter, "_local_tensor", parameter) for parameter in model.parameters())
    return sum(part.numel() * part.element_size() for part in parts if isinstance(part, torch.Tensor))
