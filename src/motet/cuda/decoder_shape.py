"""The sizes of a decoder, from which the memory of its passes follows."""

from __future__ import annotations

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
