"""The sizes of a decoder, and the memory of its training passes by this room's kernels, in bytes a row.

What forecasts say of it, they read here. `motet.kernels.cuda.forward.KeptLayer` is what is kept; a test
adds it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DecoderShape:
    """A decoder whose layers are alike, in bfloat16 if nothing else is said."""

    layers: int
    products: tuple[tuple[int, int], ...]
    """Outputs and inputs of the fused products of a layer: queries, keys and values; output; gate and up; down."""
    key_bytes: int
    """Bytes of a token's keys and values in all layers."""
    itemsize: int = 2
    """Bytes of a number."""
    norms_of_added: int = 0
    """Norms of what a layer adds to the residual stream: two in families with four norms."""

    @property
    def width(self) -> int:
        """Of the residual stream."""
        return self.products[0][1]

    @property
    def of_heads(self) -> int:
        """Numbers in all query heads of a row."""
        return self.products[1][1]

    @property
    def inner(self) -> int:
        """Inputs of the MLP's last product."""
        return self.products[3][1]

    @property
    def of_keys(self) -> int:
        """Numbers in all keys and values of a row in one layer."""
        return self.key_bytes // self.layers // self.itemsize


def piece_of(n_inputs: int) -> int:
    """Inputs in each piece of a product with A; a function of K alone."""
    if n_inputs > 8192:
        return 1024
    return 512 if n_inputs >= 2048 else 256 if n_inputs >= 256 else 32


def pieces_of(n_inputs: int) -> int:
    """Number of pieces of K."""
    return -(-n_inputs // piece_of(n_inputs))


def widths_of_rank(rank: int) -> tuple[int, ...]:
    """Columns of A in each product of a layer, for adapters of this rank on all linear layers."""
    return tuple(-(-parts * rank // 16) * 16 for parts in (3, 1, 2, 1))


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
