"""How much memory tensors hold at most, counted operation by operation: the same number on every machine."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Counts the storage of tensors that are made while it is entered; what an operation uses inside is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.most: int = 0
        self._now = 0
        self._held: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        output = func(*args, **kwargs or {})
        for each in tree_leaves(output):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                if storage._cdata not in before and storage._cdata not in self._held:
                    self._hold(storage)
        return output

    def _hold(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()

        def release(_: Any) -> None:
            del self._held[key]
            self._now -= size

        self._held[key] = weakref.ref(storage, release)
        self._now += size
        self.most = max(self.most, self._now)
