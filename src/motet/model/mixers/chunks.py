"""The recurrences of `recurrence` in chunks of tokens, for fast arithmetic: bits may depend on where a chunk begins.

For a chunk with the initial state S, where G_t is the sum of log decays up to t (Yang et al. 2024, in the WY form):

    (I + L) Δ = β (V − e^G K S)                L_tj = β_t e^(G_t − G_j) k_t · k_j for j < t; without the delta rule Δ = V
    o_t = e^(G_t) Sᵀ q_t + Σ_(j≤t) e^(G_t − G_j) (q_t · k_j) δ_j
    S' = e^(G_C) S + Σ_j e^(G_C − G_j) k_j δ_jᵀ

All terms without S are computed for all chunks at once. The backward pass recomputes everything from the saved inputs.

Legend: R rows of a wave in the order of its steps, S stretches of the wave, N chunks, C rows of a chunk, H heads, K key width,
V value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from motet.model.mixers.stretches import Wave

CHUNK = 64


def recur_in_chunks(wave: Wave, begin_SHKV: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor]:
    """The output of each row [R, H, V], and the states after the wave.

    `rows` are queries, keys, values, log decays and, with the delta rule, betas.
    """
    read_RHV, end_SHKV = _Chunks.apply(wave, begin_SHKV, *rows)  # type: ignore[no-untyped-call]
    return read_RHV, end_SHKV


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wave: Wave, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.wave = wave
        ctx.save_for_backward(*inputs)
        return _through(wave, *inputs)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            leaves = [one.detach().requires_grad_() for one in ctx.saved_tensors]
            return None, *torch.autograd.grad(_through(ctx.wave, *leaves), leaves, slopes)


def _through(
    wave: Wave,
    state_SHKV: Tensor,
    query_RHK: Tensor,
    key_RHK: Tensor,
    value_RHV: Tensor,
    log_decay_RH: Tensor,
    beta_RH: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    places_NC, n_chunks = _chunks(wave)
    query, key, value, log_decay = (_gather(one, places_NC) for one in (query_RHK, key_RHK, value_RHV, log_decay_RH))
    sum_NHC = log_decay.double().cumsum(-1)  # in fp32, differences of small decays would be lost beside a large one
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=sum_NHC.device).triu(1)
    decay_NHCC = (sum_NHC[..., None] - sum_NHC[..., None, :]).masked_fill(later, -torch.inf).float().exp()
    passed_NHC1 = sum_NHC.float().exp()[..., None]
    held, delta = key * passed_NHC1, value
    if beta_RH is not None:
        beta = _gather(beta_RH, places_NC)[..., None]
        mixed_NHCC = (beta * (key @ key.mT) * decay_NHCC).tril(-1)
        both = torch.cat([beta * held, beta * value], dim=-1)
        held, delta = torch.linalg.solve_triangular(mixed_NHCC, both, upper=False, unitriangular=True).split(
            [key.shape[-1], value.shape[-1]], dim=-1
        )
    reads, scores_NHCC = query * passed_NHC1, (query @ key.mT) * decay_NHCC
    last_NH11 = sum_NHC[..., -1:, None]
    writes, fades = key * (last_NH11 - sum_NHC[..., None]).float().exp(), last_NH11.float().exp()
    outputs, ended = [], []
    for count, *parts in zip(
        n_chunks, *(one.split(n_chunks) for one in (held, delta, reads, scores_NHCC, writes, fades)), strict=True
    ):
        held_i, delta_i, reads_i, scores_i, writes_i, fades_i = parts
        ended.append(state_SHKV[count:])
        state_SHKV = state_SHKV[:count]
        if beta_RH is not None:
            delta_i = delta_i - held_i @ state_SHKV
        outputs.append(reads_i @ state_SHKV + scores_i @ delta_i)
        state_SHKV = fades_i * state_SHKV + writes_i.mT @ delta_i
    rows_R = torch.empty(len(query_RHK), dtype=torch.long, device=places_NC.device)
    flat = places_NC.flatten()
    within = flat < len(rows_R)
    rows_R[flat[within]] = torch.arange(len(flat), device=flat.device)[within]
    read_RHV = torch.cat(outputs).transpose(1, 2).flatten(0, 1).index_select(0, rows_R)
    return read_RHV, torch.cat([state_SHKV, *reversed(ended)])


def _chunks(wave: Wave) -> tuple[Tensor, list[int]]:
    """Rows [N, C] of all first chunks, then of all second chunks, …; unused places hold the number of rows.

    Also returns the number of stretches with at least 1, 2, … chunks.
    """
    counts = torch.tensor(wave.counts)
    n_rows, n_steps = int(counts.sum()), -(-len(counts) // CHUNK) * CHUNK
    counts_T = torch.nn.functional.pad(counts, (0, n_steps - len(counts)))
    stretches = torch.arange(int(counts[0]))
    places_TS = torch.where(stretches < counts_T[:, None], (counts_T.cumsum(0) - counts_T)[:, None] + stretches, n_rows)
    n_chunks = list(wave.counts[::CHUNK])
    places = [part[:, :count].T for part, count in zip(places_TS.split(CHUNK), n_chunks, strict=True)]
    return torch.cat(places).to(wave.rows_R.device), n_chunks


def _gather(rows: Tensor, places_NC: Tensor) -> Tensor:
    """Rows [R, H, ...] by chunk [N, H, C, ...], with zeros at unused places."""
    padded = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
    chunks_NCH = padded.index_select(0, places_NC.flatten()).view(*places_NC.shape, *rows.shape[1:])
    return chunks_NCH.transpose(1, 2)
