"""Imports transformers, and makes its models, without torch's compiler, its distributed tensors and sympy.

To import those takes more than a second: docs/benchmarks.md has the figures. transformers uses them for a few decorators
and type checks, and torch for tensors of the meta device. Motet does not compile models and gives transformers no
distributed tensors. Only processes of Motet do this: afterwards, transformers there knows no FSDP and no parallelism, and
marks nothing for the compiler.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_DYNAMO = "torch._dynamo"
_VMAP = f"{_DYNAMO}._trace_wrapped_higher_order_op"
_SLOW = {_DYNAMO, "torch.distributed.tensor", "transformers.modeling_utils"}
_STRUCTURE = "transformers.utils.import_utils"
_DECORATORS = ("disable", "allow_in_graph", "assume_constant_result")
"""They only matter to code that is compiled."""


_log = logging.getLogger(__name__)
_ALLOWED = threading.Event()


def allow() -> None:
    """Say that nobody but Motet uses transformers in this process."""
    _ALLOWED.set()


def import_transformers() -> None:
    """Import transformers' models. Does nothing if they, or what is to be left out, are imported already."""
    if not _ALLOWED.is_set() or not _SLOW.isdisjoint(sys.modules):
        return
    before = {*sys.modules}
    try:
        _import()
    except Exception as error:  # in other versions things have other places: import all of it
        _log.debug("transformers is imported whole: %r", error)
        _ALLOWED.clear()
        for name in {*sys.modules} - before:
            if name.partition(".")[0] == "transformers":
                del sys.modules[name]


def _import() -> None:
    import torch

    with _replaced(functools, lru_cache=_lru_cache):
        utils = [importlib.import_module(name) for name in ("transformers.utils", _STRUCTURE)]
    with contextlib.ExitStack() as stack:
        for place in utils:
            stack.enter_context(_replaced(place, is_torch_distributed_available=lambda: False))
        own = {name: _decorator(getattr(torch.compiler, name)) for name in _DECORATORS}
        stack.enter_context(_replaced(torch.compiler, **own))
        stack.enter_context(_without_dynamo(torch))
        importlib.import_module("transformers.modeling_utils")
        importlib.import_module("transformers.masking_utils")
    # torch looks here for the function that its compiler leaves alone, before it asks its compiler for one
    added = torch.optim.Optimizer.add_param_group.__wrapped__  # type: ignore[attr-defined]
    added.__dynamo_disable = added


@contextlib.contextmanager
def made_on_cpu() -> Iterator[None]:
    """Let `from_pretrained` make models on the CPU, without initial values, in place of the meta device."""
    if not _ALLOWED.is_set():
        yield
        return
    from torch import device
    from transformers import PreTrainedModel, initialization

    own = PreTrainedModel.__dict__["get_init_context"]

    def contexts(cls: Any, *args: Any, **more: Any) -> list[Any]:
        some = own.__get__(None, cls)(*args, **more)
        return [*(context for context in some if not isinstance(context, device)), initialization.no_init_weights()]

    with _replaced(PreTrainedModel, get_init_context=classmethod(contexts)):
        yield


@contextlib.contextmanager
def _replaced(place: Any, **values: Any) -> Iterator[None]:
    """Give a module or class other attributes."""
    own = {name: vars(place)[name] for name in values}
    for name, value in values.items():
        setattr(place, name, value)
    try:
        yield
    finally:
        for name, value in own.items():
            setattr(place, name, value)


def _same(function: Any = None, **_: Any) -> Any:
    """A decorator that does nothing."""
    return _same if function is None else function


def _decorator(own: Any) -> Any:
    """`_same` for transformers, torch's own for all others."""

    def choose(*args: Any, **more: Any) -> Any:
        asks = sys._getframe(1).f_globals.get("__name__", "")
        return (_same if asks.startswith("transformers.") else own)(*args, **more)

    return choose


def _lru_cache(maxsize: Any = 128, typed: bool = False, own: Any = functools.lru_cache) -> Any:
    """Without a limit where transformers reads its files, twice in this order: there are more than 128 directories."""
    asks = sys._getframe(1).f_globals.get("__name__")
    return functools.cache(maxsize) if asks == _STRUCTURE and callable(maxsize) else own(maxsize, typed)


class _Dynamo(ModuleType):
    """Stands for `torch._dynamo` until more of it is used than decorators."""

    disable = allow_in_graph = assume_constant_result = staticmethod(_same)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(_DYNAMO), name)


@contextlib.contextmanager
def _without_dynamo(torch: Any) -> Iterator[None]:
    dynamo, vmap = _Dynamo(_DYNAMO), ModuleType(_VMAP)
    vars(vmap)["TransformGetItemToIndex"] = lambda: importlib.import_module(_VMAP).TransformGetItemToIndex()
    torch._dynamo, sys.modules[_VMAP] = dynamo, vmap
    try:
        yield
    finally:
        if torch._dynamo is dynamo:
            del torch._dynamo  # torch imports it when it is used
        if sys.modules.get(_VMAP) is vmap:
            del sys.modules[_VMAP]
