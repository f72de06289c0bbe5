"""A model of the time of a decoding step by Motet's CUDA kernels: from launches, bytes and operations, for a card.

Each launch takes a fixed time, and then as long as its bytes or its operations take, whichever is longer, with a part of the
shorter that does not overlap. A product also takes as long as one program takes to go through K. The numbers below were
fitted to a prototype of these kernels on an H200; no step of these kernels was measured, so this is a prediction.

Legend: K inputs, N outputs of a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from motet.kernels.cuda.decoder_shape import DecoderShape

LAUNCH, SMALL_LAUNCH = 3.3e-6, 1.5e-6
"""Seconds of a product or attention beside its work, and of other launches."""
_PER_INPUT = 1.2e-9
"""Seconds that a program takes for one of K inputs, in order."""
_NOT_OVERLAPPED = 0.2
"""Part of the shorter of reading and computing that comes on top of the longer."""
_KEYS = 2.2
"""How many times as long as copying them attention takes to read keys and values."""
_ADAPTED, _ADAPTERS = 18e-6, 2.3
"""Seconds that adapters add to a layer, and how many times as long as copying them it takes to read them."""
_DRAW = 5e-6
"""Seconds of embedding and draw, beside reading the logits twice."""


@dataclass(frozen=True, kw_only=True)
class TimedShape(DecoderShape):
    """A decoder with all that a step reads."""

    head: tuple[int, int]
    """Outputs and inputs of the head."""
    adapter_bytes: int = 0
    """Bytes of one adapter."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by what takes them."""

    products: float
    attention: float
    others: float
    """Norms, rotation, gates, embedding and draw."""
    adapters: float

    @property
    def total(self) -> float:
        """Seconds of the step on the card, without the host's."""
        return self.products + self.attention + self.others + self.adapters


def step_time(shape: TimedShape, rows: int, keys: float, adapters: int, read: float, computed: float) -> StepTime:
    """Seconds of a step.

    Args:
        shape: the decoder.
        rows: sequences, one token of each.
        keys: tokens of a sequence whose keys are read, on average.
        adapters: adapters of these rows; 0 for the base alone.
        read: bytes a second of a copy on the card, read and written together.
        computed: operations a second of a large bfloat16 product.
    """

    def product(n: int, k: int) -> float:
        return product_time(n, k, rows, read, computed)

    attention = shape.layers * LAUNCH + _KEYS * rows * keys * shape.key_bytes / read
    return StepTime(
        shape.layers * sum(product(*each) for each in shape.products) + product(*shape.head),
        attention,
        shape.layers * _others(shape.products, rows, read) + _DRAW + 2 * 2 * rows * shape.head[0] / read,
        (shape.layers * _ADAPTED + _ADAPTERS * adapters * shape.adapter_bytes / read) if adapters else 0.0,
    )


def product_time(n: int, k: int, rows: int, read: float, computed: float) -> float:
    """Seconds of a product with a frozen weight of n outputs and k inputs, or of the gradient of its input."""
    reading, computing = 2 * (n * k + rows * (n + k)) / read, 2 * rows * n * k / computed
    working = max(reading, computing) + _NOT_OVERLAPPED * min(reading, computing)
    return LAUNCH + max(working, k * _PER_INPUT)


def _others(products: Sequence[tuple[int, int]], rows: int, read: float) -> float:
    """Seconds of the launches of a layer that multiply nothing: two norms, rotation and gate."""
    (qkv, width), _, (both, _), _ = products
    return 4 * SMALL_LAUNCH + 2 * rows * (2 * 4 * width + 2 * qkv + 1.5 * both) / read
