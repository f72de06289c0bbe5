"""Runs the model for the decoder: computes logits through the KV cache and draws the next tokens.

Legend: T packed rows, N sampled rows, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from motet.core import seeds
from motet.model.attention import Span
from motet.model.cuda_graph import CudaGraphRunner
from motet.model.distribution import draw
from motet.model.kv_cache import KVCache
from motet.model.lora import AdapterWeights
from motet.model.lora_model import LoraModel
from motet.model.routing import AdapterStacks
from motet.model.state_cache import StateCache
from motet.rollout.sequences import SampledSequence


@dataclass(frozen=True)
class NewTokens:
    """Tokens of one sequence or prompt that are not in the cache yet."""

    weights: AdapterWeights | None
    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    slot: int = StateCache.no_slot
    n_logits: int = 1
    """Number of its last tokens to return logits for."""


class ModelRunner:
    """The base, its KV cache and the adapters of the current batch."""

    def __init__(self, base: LoraModel, cache: KVCache) -> None:
        self.base = base
        self.cache = cache
        self.stacks = AdapterStacks(base.products)
        self._graphs = CudaGraphRunner(base, cache)

    def logits(self, inputs: Sequence[NewTokens]) -> Tensor:
        """Raw logits [N, V] for the last tokens of each input (see `LoraModel.raw_logits`).

        The next call may overwrite the result.
        """
        if self.base.arithmetic.graphs and all(len(new.token_ids) == 1 for new in inputs):
            spans = [Span(new.start, 1, new.blocks, new.slot) for new in inputs]
            replayed = self._graphs.logits([new.token_ids[0] for new in inputs], spans, [new.weights for new in inputs])
            if replayed is not None:
                return replayed
        return self._logits(inputs)

    def _logits(self, inputs: Sequence[NewTokens]) -> Tensor:
        base, device = self.base, self.base.device
        spans: list[Span] = []
        tokens: list[int] = []
        positions: list[int] = []
        runs: list[tuple[AdapterWeights | None, int, int]] = []
        last: list[range] = [range(0)] * len(inputs)
        row = 0
        for index in sorted(range(len(inputs)), key=lambda index: _by_layout(inputs[index].weights)):
            new = inputs[index]
            length = len(new.token_ids)
            spans.append(Span(new.start, length, new.blocks, new.slot))
            tokens.extend(new.token_ids)
            positions.extend(range(new.start, new.start + length))
            if runs and runs[-1][0] is new.weights:
                runs[-1] = (new.weights, runs[-1][1], runs[-1][2] + length)
            else:
                runs.append((new.weights, row, length))
            row += length
            last[index] = range(row - new.n_logits, row)
        tokens_T = base.pad(torch.tensor(tokens, device=device))
        positions_T = base.pad(torch.tensor(positions, device=device))
        with base.routed(self.stacks.routing(runs, device)):
            hidden_TD = base.hidden(tokens_T, positions_T, base.attention.cached(spans, self.cache))
        rows = torch.tensor(list(itertools.chain.from_iterable(last)), device=device)
        return base.raw_logits(base.pad(hidden_TD[rows]))[: len(rows)]

    def sample(self, sequences: Sequence[SampledSequence], raw_NV: Tensor, drafts: Sequence[Sequence[int]] = ()) -> int:
        """Draw each sequence's next tokens and check whether it ends.

        `raw_NV` has, for each sequence in turn, a row for its next token and one for the token after each draft, which
        counts if all drafts up to there are right. Returns the number of accepted drafts.
        """
        drafts = drafts or [()] * len(sequences)
        at_a_time = self.base.arithmetic.logit_rows
        rows = [
            (item, offset) for item, draft in zip(sequences, drafts, strict=True) for offset in range(len(draft) + 1)
        ]
        drawn: list[tuple[int, float, bool]] = []
        for start in range(0, len(rows), at_a_time):
            part = rows[start : start + at_a_time]
            drawn += self._draw(part, self.base.finish_logits(self.base.pad(raw_NV[start : start + len(part)])))
        row = accepted = 0
        for sequence, draft in zip(sequences, drafts, strict=True):
            for offset, (token, logprob, good) in enumerate(drawn[row : row + len(draft) + 1]):
                sequence.append(token, logprob, good, self.text)
                if sequence.finish is not None or offset == len(draft) or token != draft[offset]:
                    break
                accepted += 1
            row += len(draft) + 1
        return accepted

    def _draw(self, rows: Sequence[tuple[SampledSequence, int]], logits_NV: Tensor) -> list[tuple[int, float, bool]]:
        keys = np.array([item.key for item, _ in rows], np.uint64)
        positions = np.array([len(item.tokens) + offset for item, offset in rows], np.uint64)
        uniforms_N = torch.from_numpy(seeds.uniforms(keys, positions)).to(logits_NV.device)
        params = [item.prompt.request.sampling for item, _ in rows]
        logits_NV = _kept_to_grammars(logits_NV, [item for item, _ in rows])
        params.extend([params[-1]] * (len(logits_NV) - len(params)))
        drawn_of = draw if self.base.math is None else self.base.math.draw
        tokens, logprobs, usable = drawn_of(logits_NV, params, self.base.pad(uniforms_N))
        drawn = zip(tokens.tolist(), logprobs.tolist(), usable.tolist(), strict=True)
        return list(itertools.islice(drawn, len(rows)))

    def text(self, tokens: list[int]) -> str:
        """Decode completion tokens, without special tokens."""
        return self.base.info.tokenizer.decode(tokens, skip_special_tokens=True)


def _kept_to_grammars(logits_NV: Tensor, sequences: Sequence[SampledSequence]) -> Tensor:
    """Set the logits of tokens that a row's grammar forbids to −∞; returns a copy if any row has a grammar."""
    bound = [(row, item.grammar.allowed()) for row, item in enumerate(sequences) if item.grammar is not None]
    if not bound:
        return logits_NV
    logits_NV = logits_NV.clone()
    for row, allowed in bound:
        logits_NV[row, torch.from_numpy(~allowed).to(logits_NV.device)] = -torch.inf
    return logits_NV


def _by_layout(weights: AdapterWeights | None) -> tuple[int, int]:
    """Sort key that groups rows by adapter, and adapters that can share products."""
    return (0, 0) if weights is None else (id(weights.layout), id(weights))
