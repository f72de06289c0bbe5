"""Passes whose layers keep their inputs alone, and compute the rest again in the backward pass, with the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from motet.model.lora_model import LoraModel


def recomputes(base: LoraModel) -> bool:
    """Whether a base can do so."""
    return bool(base.model.supports_gradient_checkpointing)


def prepare(base: LoraModel) -> None:
    """Make `recomputing` possible."""
    model, kwargs = base.model, {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)


@contextlib.contextmanager
def recomputing(base: LoraModel, wanted: bool) -> Iterator[None]:
    """Context of a forward pass, and another of its backward pass: if wanted, layers compute again what they did not keep.

    Only the layers enter training mode, because their modules may add noise there.
    """
    layers = [part for part in base.model.modules() if getattr(part, "gradient_checkpointing", False)] if wanted else []
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
