# mypy: disable-error-code="no-untyped-def"
"""What a decode step reads of its rows' records, and writes to them. `motet.model.device_steps` has the columns.

The rows of a step are the first `count` entries of an order; those beyond are padding, which has no record.

Legend: C changes of a program, N rows, L entries of a block table.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

from motet.kernels.cuda.kernels.compiling import kernel, part
from motet.model import device_steps as columns

TOKEN, POSITION, DRAWN, KEY = (
    tl.constexpr(each) for each in (columns.TOKEN, columns.POSITION, columns.DRAWN, columns.KEY)
)
TEMPERATURE, TOP_K, TOP_P, MIN_P, BLOCKS = (
    tl.constexpr(each) for each in (columns.TEMPERATURE, columns.TOP_K, columns.TOP_P, columns.MIN_P, columns.BLOCKS)
)


@kernel()
def write_changes(numbers, changes, n_changes, CHANGES: tl.constexpr):
    """Set numbers by changes [C, 2] of an index and a value; no index is there twice."""
    at_C = tl.program_id(0) * CHANGES + tl.arange(0, CHANGES)
    live_C = at_C < n_changes
    index_C = tl.load(changes + 2 * at_C, mask=live_C, other=0)
    tl.store(numbers + index_C, tl.load(changes + 2 * at_C + 1, mask=live_C, other=0), mask=live_C)


@part
def _number(record, column, live, other):
    """A float64 of a record, rounded to fp32."""
    bits = tl.load(record + column, mask=live, other=0)
    return tl.where(live, bits.to(tl.float64, bitcast=True).to(tl.float32), other)


@kernel()
def read_rows(
    numbers, count, order_at, width, token, position, drawn, key, temperature, top_k, top_p, min_p, tables,
    n_entries, scrap, KV_BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """One row's record, as the kernels of a step read it; only as many blocks of its table as it has reached.

    Padding is token 0 at position 0 of the scrap block.
    """
    row = tl.program_id(0)
    live = row < tl.load(count)
    record = numbers + tl.load(numbers + order_at + row, mask=live, other=0) * width
    own_position = tl.load(record + POSITION, mask=live, other=0).to(tl.int32)
    tl.store(token + row, tl.load(record + TOKEN, mask=live, other=0))
    tl.store(position + row, own_position)
    tl.store(drawn + row, tl.load(record + DRAWN, mask=live, other=0))
    tl.store(key + row, tl.load(record + KEY, mask=live, other=0))
    tl.store(temperature + row, _number(record, TEMPERATURE, live, 1.0))
    tl.store(top_k + row, tl.load(record + TOP_K, mask=live, other=0).to(tl.int32))
    tl.store(top_p + row, _number(record, TOP_P, live, 1.0))
    tl.store(min_p + row, _number(record, MIN_P, live, 0.0))
    last = own_position // KV_BLOCK
    for start in range(0, last + 1, ENTRIES):
        entry_L = start + tl.arange(0, ENTRIES)
        reached_L = (entry_L <= last) & (entry_L < n_entries)
        block_L = tl.load(record + BLOCKS + entry_L, mask=reached_L, other=0)
        block_L = tl.where(live, block_L, scrap).to(tl.int32)
        tl.store(tables + row.to(tl.int64) * n_entries + entry_L, block_L, mask=reached_L)


@kernel()
def write_rows(numbers, count, order_at, width, token, ROWS: tl.constexpr):
    """Make drawn tokens the rows' tokens, and count positions and drawn tokens up by one."""
    row_N = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live_N = row_N < tl.load(count)
    record_N = numbers + tl.load(numbers + order_at + row_N, mask=live_N, other=0) * width
    tl.store(record_N + TOKEN, tl.load(token + row_N, mask=live_N, other=0), mask=live_N)
    tl.store(record_N + POSITION, tl.load(record_N + POSITION, mask=live_N, other=0) + 1, mask=live_N)
    tl.store(record_N + DRAWN, tl.load(record_N + DRAWN, mask=live_N, other=0) + 1, mask=live_N)
