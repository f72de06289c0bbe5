"""Linear recurrences with a gate, token by token: of Gated DeltaNet (Yang et al. 2024) and of Mamba2 (Dao and Gu 2024).

    S_t = a_t S_(t-1) + k_t δ_tᵀ        δ_t = β_t (v_t − a_t S_(t-1)ᵀ k_t), or v_t without the delta rule
    o_t = S_tᵀ q_t = a_t S_(t-1)ᵀ q_t + (q_t · k_t) δ_t

Every token takes one step of one shape, in a prompt, in a packed batch and in decoding alike. So a sequence may be cut
anywhere, and its bits do not depend on company. What reads S is one product of four rows, k and q and two of zeros: products of
fewer rows have other bits in other company.

The backward pass keeps S every KEPT steps and takes the steps between again.

Legend: R rows of a wave in the order of its steps, N stretches of a step, S stretches of the wave, H heads, K key width, V
value width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.model.arithmetic import ROWS
from motet.model.mixers.stretches import Stretches, Wave

KEPT = 32
"""Steps between states that the backward pass begins again from."""


@dataclass(frozen=True)
class RecurrentRows:
    """What the recurrence takes of each packed row, in fp32."""

    query_THK: Tensor
    key_THK: Tensor
    value_THV: Tensor
    decay_TH: Tensor
    """a, between 0 and 1."""
    beta_TH: Tensor | None
    """How much of a value replaces what was there; None without the delta rule."""


def recur(rows: RecurrentRows, stretches: Stretches, layer: int) -> Tensor:
    """What each row reads: [T, H, V]; rows of padding are zeros where there is a cache."""
    key_THK, value_THV = rows.key_THK, rows.value_THV
    shape = (*key_THK.shape[1:], value_THV.shape[-1])
    reads_TH4K = F.pad(torch.stack([key_THK, rows.query_THK], dim=-2), (0, 0, 0, ROWS - 2))
    inputs = [reads_TH4K, value_THV, rows.decay_TH, (rows.query_THK * key_THK).sum(-1)]
    if rows.beta_TH is not None:
        inputs.append(rows.beta_TH)
    outputs: list[Tensor] = []
    ends: list[Tensor] = []
    for wave in stretches.waves:
        begin_SHKV = _begin(wave, ends, stretches, layer, shape, value_THV)
        output_RHV, end_SHKV = _backend(stretches)(
            wave.counts, begin_SHKV, *(one.index_select(0, wave.rows_R) for one in inputs)
        )
        outputs.append(output_RHV)
        ends.append(end_SHKV)
        if stretches.states is not None:
            stretches.states.write(layer, "recurrent", stretches.slots_S, end_SHKV)
    rows_T = torch.cat([wave.rows_R for wave in stretches.waves])
    return torch.zeros_like(value_THV).index_copy(0, rows_T, torch.cat(outputs))


def _backend(stretches: Stretches) -> Callable[..., tuple[Tensor, Tensor]]:
    """Of a wave: torch's products, or kernels."""
    if not stretches.kernels:
        return _Recurrence.apply
    from motet.model.mixers.triton_recurrence import (
        recur_by_kernels,  # there is no Triton on most machines without a GPU
    )

    return recur_by_kernels


def _begin(
    wave: Wave, ends: Sequence[Tensor], stretches: Stretches, layer: int, shape: tuple[int, ...], like: Tensor
) -> Tensor:
    if stretches.states is not None:
        return stretches.states.read(layer, "recurrent", stretches.slots_S, shape)
    if wave.before_S is None:
        return like.new_zeros(len(wave.ends_S), *shape)
    return torch.cat(list(ends)).index_select(0, wave.before_S)


class _Recurrence(torch.autograd.Function):
    """Rows of a wave [R, ...] and the states before it [S, H, K, V] → what is read [R, H, V], and the states after it."""

    @staticmethod
    def forward(ctx: Any, counts: tuple[int, ...], begin_SHKV: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        state, states, outputs, ends = begin_SHKV, [], [], []
        for part, rows in _parts(counts):
            state, ended = state[: part[0]], state[part[0] :]
            ends.append(ended)
            states.append(state)
            output, state = _steps(part, state, [one[rows] for one in inputs])
            outputs.append(output)
        ctx.counts = counts
        ctx.save_for_backward(*inputs, *states)
        return torch.cat(outputs), torch.cat([state, *reversed(ends)])

    @staticmethod
    def backward(ctx: Any, grad_RHV: Tensor, grad_end_SHKV: Tensor) -> tuple[Tensor | None, ...]:
        parts = list(_parts(ctx.counts))
        saved = ctx.saved_tensors
        inputs, states = saved[: -len(parts)], saved[-len(parts) :]
        grad_state, grads = grad_end_SHKV[:0], []
        for (part, rows), state in zip(reversed(parts), reversed(states), strict=True):
            grad_state = torch.cat([grad_state, grad_end_SHKV[len(grad_state) : part[0]]])
            with torch.enable_grad():
                leaves = [one.detach().requires_grad_() for one in (state, *(one[rows] for one in inputs))]
                results = _steps(part, leaves[0], leaves[1:])
            grad_state, *own = torch.autograd.grad(results, leaves, (grad_RHV[rows], grad_state))
            grads.append(own)
        return (None, grad_state, *(torch.cat(own[::-1]) for own in zip(*grads, strict=True)))


def _parts(counts: tuple[int, ...]) -> list[tuple[tuple[int, ...], slice]]:
    """KEPT steps at a time, and their rows."""
    ends = list(accumulate(counts, initial=0))
    return [
        (counts[step : step + KEPT], slice(ends[step], ends[min(step + KEPT, len(counts))]))
        for step in range(0, len(counts), KEPT)
    ]


def _steps(counts: tuple[int, ...], state_NHKV: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Some steps of a wave: what is read [rows of these steps, H, V], and the states after the last of each stretch."""
    outputs, ended = [], []
    for count, rows in zip(counts, zip(*(one.split(list(counts)) for one in inputs), strict=True), strict=True):
        if count < len(state_NHKV):
            ended.append(state_NHKV[count:])
            state_NHKV = state_NHKV[:count]
        output, state_NHKV = _step(state_NHKV, *rows)
        outputs.append(output)
    return torch.cat(outputs), torch.cat([state_NHKV, *reversed(ended)])


def _step(
    state_NHKV: Tensor,
    reads_NH4K: Tensor,
    value_NHV: Tensor,
    decay_NH: Tensor,
    match_NH: Tensor,
    beta_NH: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One token of each stretch; `match` is q · k."""
    decay_NH1 = decay_NH[..., None]
    read_NH4V = torch.matmul(reads_NH4K, state_NHKV)
    delta_NHV = value_NHV
    if beta_NH is not None:
        delta_NHV = beta_NH[..., None] * (value_NHV - decay_NH1 * read_NH4V[:, :, 0])
    output_NHV = decay_NH1 * read_NH4V[:, :, 1] + match_NH[..., None] * delta_NHV
    added_NHKV = reads_NH4K[:, :, 0, :, None] * delta_NHV[:, :, None]
    return output_NHV, decay_NH1[..., None] * state_NHKV + added_NHKV
