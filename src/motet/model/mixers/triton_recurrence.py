"""The recurrence of `recurrence` with Triton kernels: one launch for all stretches of a wave, of any lengths.

With TRITON_INTERPRET=1 in the environment when this module is imported, the kernels run on a CPU, slowly.

Legend: R rows of a wave in the order of its steps, S stretches, H heads, K key width, V value width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton  # type: ignore[import-untyped, unused-ignore]
from torch import Tensor

from motet.model.accelerator import device_of
from motet.model.mixers import triton_kernels
from motet.model.mixers.stretches import KEPT, Wave

TILE = 32
"""Columns of a state that one program computes."""


def recur_by_kernels(wave: Wave, begin_SHKV: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a wave [R, ...] and the states before it [S, H, K, V] → output [R, H, V], and the states after it."""
    output_RHV, end_SHKV = _Recurrence.apply(wave, begin_SHKV, *inputs)  # type: ignore[no-untyped-call]
    return output_RHV, end_SHKV


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        wave: Wave,
        begin_SHKV: Tensor,
        reads_RH4K: Tensor,
        value_RHV: Tensor,
        decay_RH: Tensor,
        match_RH: Tensor,
        beta_RH: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        rows = [reads_RH4K, value_RHV, decay_RH, match_RH, *([] if beta_RH is None else [beta_RH])]
        begin_SHKV, *rows = (tensor.contiguous() for tensor in (begin_SHKV, *rows))
        keep = any(ctx.needs_input_grad)
        n_kept = sum(wave.counts[::KEPT]) if keep else 1
        kept = begin_SHKV.new_empty(n_kept, *begin_SHKV.shape[1:])
        output_RHV, end_SHKV = torch.empty_like(rows[1]), torch.empty_like(begin_SHKV)
        with device_of(begin_SHKV):
            triton_kernels.forward[_grid(begin_SHKV)](
                *rows[:4], rows[-1], begin_SHKV, output_RHV, end_SHKV, kept, *wave.tables, begin_SHKV.shape[1], int(keep), KEPT,
                **_options(begin_SHKV, delta=beta_RH is not None),
            )  # fmt: skip
        ctx.save_for_backward(*rows, kept, *wave.tables)
        return output_RHV, end_SHKV

    @staticmethod
    def backward(ctx: Any, grad_RHV: Tensor, grad_end_SHKV: Tensor) -> tuple[Tensor | None, ...]:
        *rows, kept, starts, kept_starts, lengths_S = ctx.saved_tensors
        (n_rows, n_heads), n_keys = rows[2].shape, rows[0].shape[-1]
        grid = _grid(grad_end_SHKV)
        between = kept.new_empty(len(grad_end_SHKV) * KEPT, *kept.shape[1:])
        grad_reads = kept.new_empty(grid[2], n_rows, n_heads, 2, n_keys)
        grad_gates = kept.new_empty(grid[2], n_rows, n_heads, 3)
        grad_value_RHV, grad_begin_SHKV = torch.empty_like(rows[1]), torch.empty_like(grad_end_SHKV)
        with device_of(kept):
            triton_kernels.backward[grid](
                *rows[:4], rows[-1], kept, grad_RHV.contiguous(), grad_end_SHKV.contiguous(), between, grad_reads,
                grad_value_RHV, grad_gates, grad_begin_SHKV, starts, kept_starts, lengths_S, n_heads, n_rows, KEPT,
                **_options(kept, delta=len(rows) == 5),
            )  # fmt: skip
        decay_RH, match_RH, *beta = _added(grad_gates).unbind(-1)
        reads_RH4K = F.pad(_added(grad_reads), (0, 0, 0, 2))
        return None, grad_begin_SHKV, reads_RH4K, grad_value_RHV, decay_RH, match_RH, *beta[: len(rows) - 4]


def _added(parts: Tensor) -> Tensor:
    """Sum over tiles, in order."""
    total, *others = parts.unbind(0)
    for part in others:
        total = total + part
    return total


def _grid(state_SHKV: Tensor) -> tuple[int, int, int]:
    return len(state_SHKV), state_SHKV.shape[1], triton.cdiv(state_SHKV.shape[-1], TILE)


def _options(state_SHKV: Tensor, *, delta: bool) -> dict[str, Any]:
    """Compile-time options, which depend only on the model's shape."""
    n_keys, n_values = state_SHKV.shape[-2:]
    lanes = max(16, triton.next_power_of_2(n_keys))
    return {
        "KEYS": n_keys,
        "VALUES": n_values,
        "LANES": lanes,
        "TILE": TILE,
        "DELTA": delta,
        "num_warps": 4,
        "enable_fp_fusion": False,
    }
