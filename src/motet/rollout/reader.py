"""What the model does for the decoder: read tokens through the KV cache, and draw the next ones.

Legend: T packed rows, N sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from motet import seeds
from motet.model.distribution import draw
from motet.model.kv_cache import KVCache
from motet.model.layout import Span
from motet.model.lora import AdapterWeights
from motet.model.lora_model import LoraModel
from motet.model.recording import Recorder
from motet.model.routing import AdapterStacks
from motet.rollout.sequences import Sequence


@dataclass(frozen=True)
class Read:
    """Tokens of one sequence or prompt to run through the model."""

    weights: AdapterWeights | None
    token_ids: Seq[int]
    start: int
    blocks: Seq[int]


class Reader:
    """The base, its KV cache and the adapters of the batch at hand."""

    def __init__(self, base: LoraModel, cache: KVCache) -> None:
        self.base = base
        self.cache = cache
        self.stacks = AdapterStacks()
        self._recorder = Recorder(base, cache)

    def logits(self, reads: Seq[Read]) -> Tensor:
        """What the head gives [len(reads), V] for the last token of each read (see `LoraModel.raw_logits`).

        It may be overwritten by the next call.
        """
        if self.base.arithmetic.graphs and all(len(read.token_ids) == 1 for read in reads):
            spans = [Span(read.start, 1, read.blocks) for read in reads]
            found = self._recorder.logits(
                [read.token_ids[0] for read in reads], spans, [read.weights for read in reads]
            )
            if found is not None:
                return found
        return self._logits(reads)

    def _logits(self, reads: Seq[Read]) -> Tensor:
        base, device = self.base, self.base.device
        order = sorted(range(len(reads)), key=lambda place: _by_layout(reads[place].weights))
        spans: list[Span] = []
        tokens: list[int] = []
        positions: list[int] = []
        runs: list[tuple[AdapterWeights | None, int, int]] = []
        last = [0] * len(reads)
        row = 0
        for place in order:
            read = reads[place]
            length = len(read.token_ids)
            spans.append(Span(read.start, length, read.blocks))
            tokens.extend(read.token_ids)
            positions.extend(range(read.start, read.start + length))
            if runs and runs[-1][0] is read.weights:
                runs[-1] = (read.weights, runs[-1][1], runs[-1][2] + length)
            else:
                runs.append((read.weights, row, length))
            row += length
            last[place] = row - 1
        tokens_T = base.pad(torch.tensor(tokens, device=device))
        positions_T = base.pad(torch.tensor(positions, device=device))
        with base.routed(self.stacks.routing(runs, device, arithmetic=base.arithmetic)):
            hidden_TD = base.hidden(tokens_T, positions_T, base.cached_layout(spans, self.cache))
        return base.raw_logits(base.pad(hidden_TD[torch.tensor(last, device=device)]))[: len(reads)]

    def sample(self, sequences: Seq[Sequence], raw_NV: Tensor) -> None:
        """Draw each sequence's next token from its row and let it decide whether it ends."""
        at_a_time = self.base.arithmetic.logit_rows
        for start in range(0, len(sequences), at_a_time):
            rows = slice(start, min(start + at_a_time, len(sequences)))
            self._sample(sequences[rows], self.base.finish_logits(self.base.pad(raw_NV[rows])))

    def _sample(self, sequences: Seq[Sequence], logits_NV: Tensor) -> None:
        keys = np.array([item.key for item in sequences], np.uint64)
        places = np.array([len(item.tokens) for item in sequences], np.uint64)
        uniforms_N = torch.from_numpy(seeds.uniforms(keys, places)).to(logits_NV.device)
        params = [item.prompt.request.sampling for item in sequences]
        params.extend([params[-1]] * (len(logits_NV) - len(params)))
        tokens, logprobs, usable = draw(logits_NV, params, self.base.pad(uniforms_N))
        drawn = zip(sequences, tokens.tolist(), logprobs.tolist(), usable.tolist(), strict=False)
        for sequence, token, logprob, good in drawn:
            sequence.append(token, logprob, good, self.text)

    def text(self, tokens: list[int]) -> str:
        """Text of completion tokens, without special tokens."""
        return self.base.info.tokenizer.decode(tokens, skip_special_tokens=True)


def _by_layout(weights: AdapterWeights | None) -> tuple[int, int]:
    """Rows of one adapter lie together, and so do adapters that can share products."""
    return (0, 0) if weights is None else (id(weights.layout), id(weights))
