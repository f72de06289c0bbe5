"""The memory of a training pass by this room's kernels, in bytes a row. What forecasts say of it, they read here.

`motet.cuda.forward.KeptLayer` is what is kept. A test adds up what passes keep.
"""

from __future__ import annotations

from collections.abc import Sequence

from motet.cuda.decoder_shape import DecoderShape, pieces_of


def kept_bytes(shape: DecoderShape, widths: Sequence[int], *, recompute: bool) -> int:
    """Bytes of a row that a pass keeps in all layers until its backward pass.

    Args:
        shape: the decoder.
        widths: columns of A in each product of a layer, the most of any adapter; empty without adapters.
        recompute: keep the inputs of layers alone.
    """
    layer = shape.itemsize * shape.width
    if not recompute:
        layer += shape.itemsize * (shape.width * (1 + shape.norms_of_added) + _products(shape))
        layer += _products_with_a(shape, widths)
    return shape.layers * layer + shape.itemsize * shape.width


def passing_bytes(shape: DecoderShape, widths: Sequence[int], *, recompute: bool) -> int:
    """Bytes of a row in the layer under way, beside what is kept: what is computed again, and the gradients."""
    again = 4 * shape.width + shape.inner
    if recompute:
        again += shape.width * (1 + shape.norms_of_added) + _products(shape)
    slopes = shape.products[0][0] + 2 * shape.of_heads + shape.products[2][0] + shape.inner + 4 * shape.width
    with_a = _products_with_a(shape, widths) + shape.itemsize * sum(2 * width for width in widths)
    return shape.itemsize * (again + slopes) + 2 * 4 * shape.of_keys + with_a


def _products(shape: DecoderShape) -> int:
    """Numbers of a row that a layer's products and attention give and no norm or gate does."""
    qkv, _ = shape.products[0]
    both, _ = shape.products[2]
    return qkv + 2 * shape.of_heads + shape.of_keys + both


def _products_with_a(shape: DecoderShape, widths: Sequence[int]) -> int:
    """Bytes of A x in a layer, fp32 in pieces of K."""
    return sum(4 * pieces_of(k) * width for (_, k), width in zip(shape.products, widths, strict=False))
