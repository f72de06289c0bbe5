"""Layers that mix positions without attention: short convolutions, Gated DeltaNet, Mamba2.

The model's code is that of transformers, except for the mixer functions that transformers lets kernel packages replace
(`functions`). A pass records which row continues which state (`passes`, `stretches`), and `StateCache` stores states
while sequences are sampled.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from motet.core.errors import BaseModelError
from motet.model.attention import INSTEAD
from motet.model.mixers.functions import MixerFunctions
from motet.model.mixers.stretches import StatefulBackend, StatefulPass

__all__ = ["StatefulBackend", "StatefulPass", "in_plain_torch", "replace_mixers"]

_KNOWN = frozenset(MixerFunctions(0, "").by_name)


def replace_mixers(decoder: nn.Module) -> frozenset[int]:
    """Make every mixer call Motet's functions; returns the indices of layers with a mixer.

    Raises:
        BaseModelError: a mixer calls a replaceable function that Motet does not implement.
    """
    layers = []
    for module, calls in list(_mixers(decoder)):
        strange = sorted(calls.keys() - _KNOWN)
        name = type(module).__name__
        if strange:
            raise BaseModelError(f"{name} calls {', '.join(strange)}, which Motet does not support; {INSTEAD}")
        layers.append(int(getattr(module, "layer_idx", -1)))
        _call_instead(module, MixerFunctions(layers[-1], name).by_name)
    return frozenset(layers)


@contextlib.contextmanager
def in_plain_torch(model: nn.Module) -> Iterator[None]:
    """Make mixers call transformers' torch functions even if kernel packages are installed."""
    mixers = list(_mixers(model))
    for module, calls in mixers:
        _call_instead(module, {name: inspect.unwrap(function) for name, function in calls.items()})
    try:
        yield
    finally:
        for module, _ in mixers:
            del module.forward


def _mixers(model: nn.Module) -> Iterator[tuple[nn.Module, Mapping[str, Callable[..., Any]]]]:
    """Modules whose forward pass calls functions that kernel packages may replace, with those functions."""
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        if not isinstance(forward, FunctionType):
            continue
        called = {name: forward.__globals__[name] for name in forward.__code__.co_names if name in forward.__globals__}
        replaceable = {name: value for name, value in called.items() if name in _KNOWN or _for_kernels(value)}
        if replaceable.keys() & _KNOWN:
            yield module, replaceable


def _for_kernels(value: Any) -> bool:
    """Whether transformers lets packages replace this function; such functions are wrapped at their definition."""
    return (
        isinstance(value, FunctionType)
        and value.__module__.startswith("transformers.models.")
        and hasattr(value, "__wrapped__")
    )


def _call_instead(module: nn.Module, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Make one module's forward pass use these functions for their names; other modules are unchanged."""
    forward = inspect.unwrap(type(module).forward)
    own = FunctionType(
        forward.__code__, forward.__globals__ | functions, forward.__name__, forward.__defaults__, forward.__closure__
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(own, module)
