"""A model of the time of a training pass by Motet's CUDA kernels: forward, loss, gradients and optimizer step, for a card.

Products are those of `bench.gpu.step_time`. Launches between them take a fixed time each, and a multiple of the time that
their bytes take. These multiples were fitted to a prototype on an H200 whose attention's gradient was a library's; no pass of
these kernels was measured, so this is a prediction.

Legend: K inputs, N outputs of a product.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.gpu.step_time import LAUNCH, SMALL_LAUNCH, TimedShape, product_time

_GATES, _NORMS, _ADAPTERS, _LOSS = 1.7, 1.2, 1.4, 1.6
"""How many times as long as copying their bytes the launches take: gates; norms and rotation; what reads or writes adapters'
parts; the loss."""
_HEADS, _SCORED = 2.2, 0.22
"""How many times as long as copying its states attention takes, and the part of the products' rate that it reaches beside."""
_LAUNCHES, _AGAIN = 35, 7
"""Of a layer, forward and backward; and those that compute its products again."""
_UNIT_ROWS = 512
"""Rows whose units are added before they are written."""
_STEP_BYTES = 48
"""Of a weight that AdamW and the sum of its gradient read and write."""


@dataclass(frozen=True)
class PassTime:
    """Seconds of a training pass on the card, without the host's, by what takes them."""

    products: float
    """Of layers, with frozen weights."""
    head: float
    """With the loss and its gradient."""
    attention: float
    others: float
    """Norms, rotation and gates."""
    adapters: float
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of all."""
        return self.products + self.head + self.attention + self.others + self.adapters + self.optimizer


def pass_time(
    shape: TimedShape,
    rows: int,
    keys: float,
    trained: int,
    adapters: int,
    read: float,
    computed: float,
    *,
    recompute: bool = False,
    block: int = 256,
) -> PassTime:
    """Seconds of a training pass.

    Args:
        shape: the decoder.
        rows: tokens of all sequences.
        keys: tokens that a row attends to, on average.
        trained: rows that pass the head.
        adapters: adapters whose optimizer steps at the end; with 0, gradients of one are added and no optimizer steps.
        read: bytes a second of a copy on the card, read and written together.
        computed: operations a second of a large bfloat16 product.
        recompute: whether products of layers are computed again.
        block: rows that pass the head at a time.
    """
    copied = shape.layers * rows * shape.itemsize / read
    """Seconds of copying one number of each row in each layer."""
    (qkv, width), (_, of_heads), _, (_, inner) = shape.products
    inputs, outputs = (sum(each[which] for each in shape.products) for which in (1, 0))
    times = 3 if recompute else 2
    products = times * shape.layers * sum(product_time(n, k, rows, read, computed) for n, k in shape.products)
    states = _HEADS * copied * (2 * of_heads + shape.of_keys)
    scores = 4 * shape.layers * rows * keys * of_heads / (_SCORED * computed)
    forwards = times - 1
    gates = _GATES * copied * (3 * (forwards + (not recompute)) * inner + 6 * inner)
    norms = _NORMS * copied * (6 * 4 * width + (forwards + 1) * 2 * qkv)
    small = shape.layers * (_LAUNCHES + _AGAIN * recompute) * SMALL_LAUNCH
    shrinking = forwards * inputs + outputs + inputs + outputs
    adding = forwards * 4 * width + 2 * (2 * width + of_heads)
    weights = shape.adapter_bytes / shape.itemsize
    units = 2 * 8 * weights * max(1, adapters, rows / _UNIT_ROWS) / read
    return PassTime(
        products,
        _head(shape, trained, block, read, computed),
        (forwards + 2) * states + (forwards + 4) * scores + (forwards + 2) * shape.layers * LAUNCH,
        gates + norms + small,
        _ADAPTERS * copied * (shrinking + adding) + units,
        _STEP_BYTES * adapters * weights / read,
    )


def _head(shape: TimedShape, trained: int, block: int, read: float, computed: float) -> float:
    """Seconds of the head's product and its gradient, whose logits are read twice and written once between them."""
    vocabulary, width = shape.head
    each = 2 * product_time(vocabulary, width, block, read, computed)
    return trained / block * each + _LOSS * 3 * trained * vocabulary * shape.itemsize / read
