"""Gated linear recurrences, token by token: Gated DeltaNet (Yang et al. 2024) and Mamba2 (Dao and Gu 2024).

    S_t = a_t S_(t-1) + k_t δ_tᵀ        δ_t = β_t (v_t − a_t S_(t-1)ᵀ k_t), or v_t without the delta rule
    o_t = S_tᵀ q_t = a_t S_(t-1)ᵀ q_t + (q_t · k_t) δ_t

Every token is one step of the same shape in prompts, packed batches and decoding. So a sequence may be cut anywhere,
and its bits do not depend on other sequences. S is read by a product with four rows (k, q and two rows of zeros): the
bits of products with fewer rows depend on the other sequences.

The backward pass processes the steps in reverse; it has S saved every KEPT steps, and recomputes the states in between.

Legend: R rows of a wave in the order of its steps, N stretches of a step, S stretches of the wave, H heads, K key width, V
value width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.model.arithmetic import ROWS
from motet.model.mixers.stretches import KEPT, Stretches, Wave


@dataclass(frozen=True)
class RecurrentRows:
    """Inputs of the recurrence for each packed row, in fp32."""

    query_THK: Tensor
    key_THK: Tensor
    value_THV: Tensor
    log_decay_TH: Tensor
    """Log of a, at most 0."""
    beta_TH: Tensor | None
    """Share of the old value that the new value replaces; None without the delta rule."""


def recur(rows: RecurrentRows, stretches: Stretches, layer: int) -> Tensor:
    """Output of each row: [T, H, V]; padding rows are zeros with a cache."""
    value_THV = rows.value_THV
    shape = (*rows.key_THK.shape[1:], value_THV.shape[-1])
    through, inputs = _backend(rows, stretches)
    outputs: list[Tensor] = []
    ends: list[Tensor] = []
    for wave in stretches.waves:
        begin_SHKV = _begin(wave, ends, stretches, layer, shape, value_THV)
        output_RHV, end_SHKV = through(wave, begin_SHKV, *(tensor.index_select(0, wave.rows_R) for tensor in inputs))
        outputs.append(output_RHV)
        ends.append(end_SHKV)
        if stretches.states is not None:
            stretches.states.write(layer, "recurrent", stretches.slots_S, end_SHKV)
    rows_T = torch.cat([wave.rows_R for wave in stretches.waves])
    return torch.zeros_like(value_THV).index_copy(0, rows_T, torch.cat(outputs))


def _backend(rows: RecurrentRows, stretches: Stretches) -> tuple[Callable[..., tuple[Tensor, Tensor]], list[Tensor]]:
    """The function for a wave (torch or kernels), and its inputs."""
    query_THK, key_THK, value_THV = rows.query_THK, rows.key_THK, rows.value_THV
    betas = [] if rows.beta_TH is None else [rows.beta_TH]
    reads_TH4K = F.pad(torch.stack([key_THK, query_THK], dim=-2), (0, 0, 0, ROWS - 2))
    inputs = [reads_TH4K, value_THV, rows.log_decay_TH.exp(), (query_THK * key_THK).sum(-1), *betas]
    if not stretches.kernels:
        return _Recurrence.apply, inputs
    # most machines without a GPU have no Triton
    from motet.model.mixers.triton_recurrence import recur_by_kernels

    return recur_by_kernels, inputs


def _begin(
    wave: Wave, ends: Sequence[Tensor], stretches: Stretches, layer: int, shape: tuple[int, ...], like: Tensor
) -> Tensor:
    if stretches.states is not None:
        return stretches.states.read(layer, "recurrent", stretches.slots_S, shape)
    if wave.before_S is None:
        return like.new_zeros(len(wave.ends_S), *shape)
    return torch.cat(list(ends)).index_select(0, wave.before_S)


class _Recurrence(torch.autograd.Function):
    """Rows of a wave [R, ...] and the states before it [S, H, K, V] → output [R, H, V], and the states after it."""

    @staticmethod
    def forward(ctx: Any, wave: Wave, begin_SHKV: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        counts = wave.counts
        state, outputs, kept = begin_SHKV.clone(), [], []
        keep = any(ctx.needs_input_grad)
        steps = zip(counts, zip(*(tensor.split(list(counts)) for tensor in inputs), strict=True), strict=True)
        for step, (count, rows) in enumerate(steps):
            if keep and step % KEPT == 0:
                kept.append(state[:count].clone())
            outputs.append(_step(state[:count], *rows))
        ctx.counts = counts
        ctx.save_for_backward(*inputs, *kept)
        return torch.cat(outputs), state

    @staticmethod
    def backward(ctx: Any, grad_RHV: Tensor, grad_end_SHKV: Tensor) -> tuple[Tensor | None, ...]:
        counts: tuple[int, ...] = ctx.counts
        parts = range(0, len(counts), KEPT)
        saved = ctx.saved_tensors
        inputs, kept = saved[: -len(parts)], saved[-len(parts) :]
        rows = list(zip(*(tensor.split(list(counts)) for tensor in (grad_RHV, *inputs)), strict=True))
        grad_state, grads = grad_end_SHKV.clone(), []
        for first, state in zip(reversed(parts), reversed(kept), strict=True):
            steps, before = rows[first : first + KEPT], []
            for _, *own in steps:
                state = state[: len(own[0])]
                before.append(state.clone())
                _step(state, *own)
            for (slope, *own), state in zip(reversed(steps), reversed(before), strict=True):
                grads.append(_step_back(slope, grad_state[: len(slope)], state, *own))
        return (None, grad_state, *(torch.cat(own[::-1]) for own in zip(*grads, strict=True)))


def _delta(value_NHV: Tensor, decay_NH1: Tensor, held_NHV: Tensor, beta_NH: Tensor | None) -> Tensor:
    """The amount added to the value stored under a key, [N, H, V]."""
    return value_NHV if beta_NH is None else beta_NH[..., None] * (value_NHV - decay_NH1 * held_NHV)


def _step(
    state_NHKV: Tensor,
    reads_NH4K: Tensor,
    value_NHV: Tensor,
    decay_NH: Tensor,
    match_NH: Tensor,
    beta_NH: Tensor | None = None,
) -> Tensor:
    """One token of each stretch: its output [N, H, V]; updates the states in place. `match` is q · k."""
    decay_NH1 = decay_NH[..., None]
    held_NHV, read_NHV = torch.matmul(reads_NH4K, state_NHKV)[:, :, :2].unbind(2)
    delta_NHV = _delta(value_NHV, decay_NH1, held_NHV, beta_NH)
    state_NHKV.mul_(decay_NH1[..., None]).add_(reads_NH4K[:, :, 0, :, None] * delta_NHV[:, :, None])
    return decay_NH1 * read_NHV + match_NH[..., None] * delta_NHV


def _step_back(
    slope_NHV: Tensor,
    grad_NHKV: Tensor,
    state_NHKV: Tensor,
    reads_NH4K: Tensor,
    value_NHV: Tensor,
    decay_NH: Tensor,
    match_NH: Tensor,
    beta_NH: Tensor | None = None,
) -> list[Tensor]:
    """Gradients of a step's inputs; the gradient of the states is updated in place, from after the step to before it."""
    decay_NH1 = decay_NH[..., None]
    held_NHV, read_NHV = torch.matmul(reads_NH4K, state_NHKV)[:, :, :2].unbind(2)
    delta_NHV = _delta(value_NHV, decay_NH1, held_NHV, beta_NH)
    slope_delta_NHV = match_NH[..., None] * slope_NHV + torch.matmul(reads_NH4K, grad_NHKV)[:, :, 0]
    slope_decay_NH = (grad_NHKV * state_NHKV).sum((-2, -1)) + (slope_NHV * read_NHV).sum(-1)
    slope_match_NH = (slope_NHV * delta_NHV).sum(-1)
    slope_read_NHV, slope_held_NHV, gates = decay_NH1 * slope_NHV, torch.zeros_like(slope_NHV), []
    if beta_NH is not None:
        gates.append((slope_delta_NHV * (value_NHV - decay_NH1 * held_NHV)).sum(-1))
        slope_decay_NH -= beta_NH * (slope_delta_NHV * held_NHV).sum(-1)
        slope_delta_NHV = beta_NH[..., None] * slope_delta_NHV
        slope_held_NHV = -decay_NH1 * slope_delta_NHV
    slopes_NH4V = F.pad(torch.stack([slope_held_NHV, slope_read_NHV], dim=-2), (0, 0, 0, ROWS - 2))
    slope_reads_NH4K = torch.matmul(slopes_NH4V, state_NHKV.mT)
    wide_NH4V = F.pad(delta_NHV[:, :, None], (0, 0, 0, ROWS - 1))
    slope_reads_NH4K += torch.matmul(wide_NH4V, grad_NHKV.mT)
    grad_NHKV.mul_(decay_NH1[..., None]).add_(torch.matmul(reads_NH4K.mT, slopes_NH4V))
    return [slope_reads_NH4K, slope_delta_NHV, slope_decay_NH, slope_match_NH, *gates]
