"""The memory that decoding by this room's kernels keeps between steps, beside weights, keys and adapters, in bytes.

A test adds up what the tensors have. An allocator rounds each up, and libraries keep workspaces of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from motet.cuda.adapters import PARTS, TILE
from motet.cuda.attention import PIECE, SLOTS
from motet.cuda.decoder_shape import DecoderShape, pieces_of
from motet.cuda.kernels.weights import BLOCK as IDS
from motet.model.device_steps import BLOCKS, GROUPS

_OF_A_ROW = 65
"""Bytes of a row in a graph's inputs and results, beside its blocks of keys."""

_UNUSED = 16 * (8 + 4)
"""Of arguments that a pass does not read."""


@dataclass(frozen=True)
class RestMemory:
    """Bytes by what they are for."""

    workspace: int
    """Pieces of attention that are not merged yet."""
    angles: int
    """Cosines and sines of every position."""
    tables: int
    """States and adapters of rows (`StepMemory`)."""
    masks: int
    """What grammars allow."""
    graphs: int
    """What each graph has for itself."""
    values: int
    """What a step computes, logits among it; graphs share it."""

    @property
    def total(self) -> int:
        """Of all."""
        return sum(astuple(self))


def rest_memory(
    shape: DecoderShape,
    heads: int,
    rotated: int,
    positions: int,
    block_size: int,
    rows: int,
    widths: Sequence[int],
    graphs: int = 1,
) -> RestMemory:
    """Memory of a decoder whose layers rotate alike and attend without windows; without norms before products it is less.

    Args:
        shape: the decoder.
        heads: query heads.
        rotated: numbers of a head that are rotated.
        positions: most tokens of a row.
        block_size: tokens of a block of keys.
        rows: most rows of a step, as `ROWS_OF_DECODING` has them, also twice.
        widths: columns of A in each product of a layer, the most of any adapter; empty without adapters.
        graphs: recorded graphs, each as large as the largest.
    """
    most_blocks, held = -(-positions // block_size), 2 * rows
    entries = shape.layers * held * sum(3 + 2 * parts for parts in PARTS)
    words = -(-(2 + held * (1 + TILE)) // 2)
    records = held * (BLOCKS + most_blocks) + GROUPS * held
    vocabulary = shape.head[0]
    pieces = -(-most_blocks * block_size // PIECE)
    slots = 0 if pieces == 1 else min(rows * pieces, SLOTS)
    lists = 4 * 8 * (rows + slots) + 4 + 4 * 2 * rows * (slots > 0)
    with_a = max((pieces_of(k) * width for (_, k), width in zip(shape.products, widths, strict=False)), default=0)
    (qkv, _), _, (both, _), _ = shape.products
    streams = 5 if shape.norms_of_added else 4
    of_layer = shape.itemsize * (streams * shape.width + qkv + 2 * shape.of_heads + both + shape.inner)
    of_head = shape.itemsize * (shape.width + vocabulary) + (4 + 8) * -(-vocabulary // IDS)
    return RestMemory(
        workspace=4 * SLOTS * (shape.of_heads + 2 * heads),
        angles=4 * positions * rotated,
        tables=8 * (records + GROUPS * words + entries),
        masks=4 * held * -(-vocabulary // 32),
        graphs=graphs * (rows * (_OF_A_ROW + 4 * most_blocks + 4 * with_a) + lists),
        values=max(rows * of_layer + _UNUSED, rows * of_head),
    )
