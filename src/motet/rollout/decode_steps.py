"""Decode steps, in which every running sequence gets its next token, and what they ask of the model.

Legend: N sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from motet.core.stops import Decode
from motet.core.tenant_turns import Payer
from motet.model.device_steps import DeviceSteps, DrawnTokens
from motet.model.lora import AdapterWeights
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


class Executor(Protocol):
    """Computes logits and draws tokens, one call after the other."""

    def logits(self, inputs: Sequence[NewTokens]) -> Tensor:
        """Raw logits [N, V] for the last token of each input; the next call may overwrite them."""
        ...

    def draw(self, sequences: Sequence[SampledSequence], raw_NV: Tensor) -> DrawnTokens:
        """Draw the next token of each sequence, from its row of logits."""
        ...


@runtime_checkable
class AheadExecutor(Executor, DeviceSteps, Protocol):
    """An executor whose steps go from tokens to tokens on the device, so that the next may begin before they are read."""


@dataclass(frozen=True)
class Landed:
    """What steps have given."""

    touched: Sequence[SampledSequence] = ()
    """Sequences with new tokens that may have ended, or are streamed."""
    parts: Sequence[tuple[Payer, int]] = ()
    """Rows that counted, by payer; payers may repeat."""


class Steps(Protocol):
    """Runs the decode steps of one decoder."""

    def step(self, running: Sequence[SampledSequence]) -> Landed:
        """Run a step for these sequences; returns what has come since the last."""
        ...

    @property
    def in_flight(self) -> bool:
        """Whether a step was launched whose tokens have not come."""
        ...

    def again(self) -> Landed | None:
        """Run a step for the same rows as the last; None if it cannot, because they need more than a free block each."""
        ...

    def land(self) -> Landed:
        """Wait for all steps in flight, and forget rows that have ended."""
        ...

    def drop(self) -> None:
        """After a device error: wait for what is in flight, whatever becomes of it, and forget all rows."""
        ...


class SynchronousSteps:
    """`Steps` that wait for their tokens."""

    def __init__(self, executor: Executor, text: Decode) -> None:
        self._executor, self._text = executor, text

    def step(self, running: Sequence[SampledSequence]) -> Landed:
        """Decode a token for each sequence."""
        if running:
            sample(self._executor, running, self._executor.logits(list(map(_next_token, running))), self._text)
        return Landed(running, [(item.prompt.payer, 1) for item in running])

    in_flight = False

    def again(self) -> None:
        """Returns None: each step is scheduled."""

    def land(self) -> Landed:
        """Nothing is in flight."""
        return Landed()

    def drop(self) -> None:
        """Nothing is in flight."""


def sample(executor: Executor, sequences: Sequence[SampledSequence], raw_NV: Tensor, text: Decode) -> None:
    """Draw each sequence's next token, from its row of `raw_NV`, and check whether it ends."""
    if not sequences:
        return
    drawn = executor.draw(sequences, raw_NV)
    columns = drawn.tokens_N.tolist(), drawn.logprobs_N.tolist(), drawn.usable_N.tolist()
    for sequence, token, logprob, good in zip(sequences, *columns, strict=True):
        sequence.append(token, logprob, good, text)


def _next_token(item: SampledSequence) -> NewTokens:
    return NewTokens(item.prompt.weights, [item.tokens[-1]], item.length - 1, item.blocks, item.slot)
