"""Runs the model for the decoder: computes logits through the KV cache and draws the next tokens.

Legend: T packed rows, N sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from motet.core import seeds
from motet.model.accelerator import send
from motet.model.attention import Span
from motet.model.cuda_graph import CudaGraphRunner
from motet.model.device_steps import DeviceStep, DeviceSteps, DrawnTokens, Flight, StepLayout
from motet.model.distribution import draw
from motet.model.kv_cache import KVCache
from motet.model.lora import AdapterWeights
from motet.model.lora_model import LoraModel
from motet.model.routing import AdapterStacks
from motet.rollout.decode_steps import NewTokens
from motet.rollout.sequences import SampledSequence


class ModelRunner:
    """The base, its KV cache and the adapters of the current batch."""

    def __init__(self, base: LoraModel, cache: KVCache) -> None:
        self.base = base
        self.cache = cache
        self.stacks = AdapterStacks(base.products)
        self._graphs = CudaGraphRunner(base, cache)

    def logits(self, inputs: Sequence[NewTokens]) -> Tensor:
        """Raw logits [N, V] for the last token of each input (see `LoraModel.raw_logits`).

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
        last = [0] * len(inputs)
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
            last[index] = row - 1
        tokens_T, positions_T, rows_N = send(device, *(np.array(each, np.int64) for each in (tokens, positions, last)))
        tokens_T, positions_T = base.pad(tokens_T), base.pad(positions_T)
        with base.routed(self.stacks.routing(runs, device)):
            hidden_TD = base.hidden(tokens_T, positions_T, base.attention.cached(spans, self.cache))
        return base.raw_logits(base.pad(hidden_TD[rows_N]))[: len(last)]

    def draw(self, sequences: Sequence[SampledSequence], raw_NV: Tensor) -> DrawnTokens:
        """Draw the next token of each sequence, from its row of logits."""
        at_a_time = self.base.arithmetic.logit_rows
        parts = [
            self._draw(sequences[start : start + at_a_time], raw_NV[start : start + at_a_time])
            for start in range(0, len(sequences), at_a_time)
        ]
        return DrawnTokens(*(torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)))

    def _draw(self, sequences: Sequence[SampledSequence], raw_NV: Tensor) -> list[Tensor]:
        logits_NV = self.base.finish_logits(self.base.pad(raw_NV[: len(sequences)]))
        keys = np.array([item.key for item in sequences], np.uint64)
        positions = np.array([len(item.tokens) for item in sequences], np.uint64)
        (uniforms_N,) = send(logits_NV.device, seeds.uniforms(keys, positions))
        params = [item.prompt.request.sampling for item in sequences]
        logits_NV = _kept_to_grammars(logits_NV, sequences)
        params.extend([params[-1]] * (len(logits_NV) - len(params)))
        drawn_of = draw if self.base.math is None else self.base.math.draw
        return [found_N[: len(sequences)] for found_N in drawn_of(logits_NV, params, self.base.pad(uniforms_N))]

    def text(self, tokens: list[int]) -> str:
        """Decode completion tokens, without special tokens."""
        return self.base.info.tokenizer.decode(tokens, skip_special_tokens=True)


class AheadRunner(ModelRunner):
    """An `AheadExecutor`: the kernels of its base go from tokens to tokens."""

    def __init__(self, base: LoraModel, cache: KVCache, steps: DeviceSteps) -> None:
        super().__init__(base, cache)
        self._steps = steps

    def hold(self, layout: StepLayout) -> None:
        """See `DeviceSteps`."""
        self._steps.hold(layout)

    def launch(self, step: DeviceStep) -> Flight:
        """See `DeviceSteps`."""
        return self._steps.launch(step)


def runner_for(base: LoraModel, cache: KVCache) -> ModelRunner:
    """The runner of a base, which runs ahead if its kernels can."""
    steps = None if base.kernels is None else base.kernels.steps(cache)
    return ModelRunner(base, cache) if steps is None else AheadRunner(base, cache, steps)


def _kept_to_grammars(logits_NV: Tensor, sequences: Sequence[SampledSequence]) -> Tensor:
    """Set the logits of tokens that a row's grammar forbids to −∞; returns a copy if any row has a grammar."""
    bound = [(row, item.grammar.allowed()) for row, item in enumerate(sequences) if item.grammar is not None]
    if not bound:
        return logits_NV
    logits_NV = logits_NV.clone()
    for row, allowed in bound:
        (forbidden_V,) = send(logits_NV.device, ~allowed)
        logits_NV[row, forbidden_V] = -torch.inf
    return logits_NV


def _by_layout(weights: AdapterWeights | None) -> tuple[int, int]:
    """Sort key that groups rows by adapter, and adapters that can share products."""
    return (0, 0) if weights is None else (id(weights.layout), id(weights))
