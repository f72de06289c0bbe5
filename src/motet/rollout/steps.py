"""Decode steps: every running sequence gets its next token, or several if drafts were right."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from motet.core.stops import Decode
from motet.core.tenant_turns import Payer
from motet.model.device_steps import DrawnTokens
from motet.rollout.block_allocator import BlockAllocator
from motet.rollout.drafts import Drafts
from motet.rollout.executor import Executor, NewTokens
from motet.rollout.sequences import SampledSequence


@dataclass(frozen=True)
class Landed:
    """What steps have given."""

    touched: Sequence[SampledSequence] = ()
    """Sequences with new tokens that may have ended, or are streamed."""
    parts: Sequence[tuple[Payer, int]] = ()
    """Rows that counted, by payer; payers may repeat."""


class Steps(Protocol):
    """Runs the decode steps of one decoder."""

    def step(self, running: Sequence[SampledSequence], drafts: Drafts | None, spare: int) -> Landed:
        """Run a step for these sequences, with at most `spare` rows of `drafts`; returns what has come since the last."""
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

    def __init__(self, executor: Executor, blocks: BlockAllocator, text: Decode) -> None:
        self._executor, self._blocks, self._text = executor, blocks, text

    def step(self, running: Sequence[SampledSequence], drafts: Drafts | None, spare: int) -> Landed:
        """Decode a token for each sequence, plus accepted drafts."""
        guesses: list[list[int]] = [[] for _ in running]
        begun = time.thread_time()  # CPU time, independent of other processes
        if drafts is not None:
            guesses = drafts.of(running, spare)
        for item, guess in zip(running, guesses, strict=True):
            if guess:
                del guess[self._blocks.reach(item, len(guess)) :]
        inputs = [_next_tokens(item, guess) for item, guess in zip(running, guesses, strict=True)]
        accepted = 0
        if running:
            accepted = sample(self._executor, running, self._executor.logits(inputs), self._text, guesses)
        for item, guess in zip(running, guesses, strict=True):
            if guess:
                self._blocks.trim(item, item.length)
        if drafts is not None and running:
            drafts.checked(len(running), sum(map(len, guesses)), accepted, time.thread_time() - begun)
        parts = [(item.prompt.payer, 1 + len(guess)) for item, guess in zip(running, guesses, strict=True)]
        return Landed(running, parts)

    in_flight = False

    def again(self) -> None:
        """Returns None: each step is scheduled."""

    def land(self) -> Landed:
        """Nothing is in flight."""
        return Landed()

    def drop(self) -> None:
        """Nothing is in flight."""


def sample(
    executor: Executor,
    sequences: Sequence[SampledSequence],
    raw_NV: Tensor,
    text: Decode,
    drafts: Sequence[Sequence[int]] = (),
) -> int:
    """Draw each sequence's next tokens and check whether it ends.

    `raw_NV` has, for each sequence in turn, a row for its next token and one for the token after each draft, which
    counts if all drafts up to there are right. Returns the number of accepted drafts.
    """
    drafts = drafts or [()] * len(sequences)
    rows = [(item, offset) for item, draft in zip(sequences, drafts, strict=True) for offset in range(len(draft) + 1)]
    drawn = _in_python(executor.draw(rows, raw_NV)) if rows else []
    row = accepted = 0
    for sequence, draft in zip(sequences, drafts, strict=True):
        for offset, (token, logprob, good) in enumerate(drawn[row : row + len(draft) + 1]):
            sequence.append(token, logprob, good, text)
            if sequence.finish is not None or offset == len(draft) or token != draft[offset]:
                break
            accepted += 1
        row += len(draft) + 1
    return accepted


def _in_python(drawn: DrawnTokens) -> list[tuple[int, float, bool]]:
    return list(zip(drawn.tokens_N.tolist(), drawn.logprobs_N.tolist(), drawn.usable_N.tolist(), strict=True))


def _next_tokens(item: SampledSequence, draft: Sequence[int]) -> NewTokens:
    ids = [item.tokens[-1], *draft]
    return NewTokens(item.prompt.weights, ids, item.length - 1, item.blocks, item.slot, len(ids))
