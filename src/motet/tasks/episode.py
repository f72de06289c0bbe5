"""How one problem becomes rollouts: which prompts are generated from, what the environment answers, what is rewarded.

An environment sees neither engine nor adapter, only two functions: `Generate` draws completions, `Score` judges them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from motet.errors import EngineError
from motet.tasks.chat import Chat
from motet.tasks.reward_pool import Scored
from motet.types import Chunk, FinishReason, IntArray, Message, Problem, Rollout, Turn

Generate = Callable[[IntArray, tuple[int, ...], int], Awaitable[list[Chunk]]]
"""(prompt_ids, sample_indices, turn) → one whole completion per index, in order. Index and turn seed the draw."""
Score = Callable[[Problem, list[str]], Awaitable[list[Scored]]]
"""(problem, completions) → one result per completion, in order."""
Environment = Callable[[Problem, Chat, int, Generate, Score], Awaitable[tuple[Rollout, ...]]]
"""(problem, chat, group_size, generate, score) → the rollouts of one group, in the order of their indices."""

RETRY_MESSAGE = "That is not right. Please answer again."
SECOND_TRY = 0.5
"""What a right answer at the second try is worth, so that being right at once stays the better policy."""


async def single_turn(
    problem: Problem, chat: Chat, group_size: int, generate: Generate, score: Score
) -> tuple[Rollout, ...]:
    """One answer each; one call to `generate`, so that the prompt is prefilled once."""
    rollouts = await _first_turn(problem, chat, group_size, generate)
    return tuple(await _rewarded(rollouts, score, {rollout.index: 1.0 for rollout in rollouts}))


async def retry(problem: Problem, chat: Chat, group_size: int, generate: Generate, score: Score) -> tuple[Rollout, ...]:
    """Two turns: an answer that is not fully right (reward below 1) is told so and may be given once more.

    The reward is that of the last turn, times `SECOND_TRY` where that is the second; `reward_parts["first_try"]` keeps
    the first turn's. A first answer that was cut off at `max_tokens` has not ended its turn: it gets no second.
    """
    rollouts = await _first_turn(problem, chat, group_size, generate)
    rollouts = await _rewarded(rollouts, score, {rollout.index: 1.0 for rollout in rollouts})
    rollouts = [
        rollout if rollout.error else replace(rollout, reward_parts=_first_try(rollout, rollout.reward))
        for rollout in rollouts
    ]
    again = [rollout for rollout in rollouts if not rollout.error and not rollout.truncated and rollout.reward < 1]
    second = await asyncio.gather(*(_second_turn(rollout, chat, generate) for rollout in again))
    judged = await _rewarded(second, score, {rollout.index: SECOND_TRY for rollout in second})
    for before, rollout in zip(again, judged, strict=True):
        parts = rollout.reward_parts if rollout.error else _first_try(rollout, before.reward)
        rollouts[rollout.index] = replace(rollout, reward_parts=parts)
    return tuple(rollouts)


@dataclass(frozen=True)
class EnvironmentSpec:
    """An environment, and what an engine has to make room for."""

    run: Environment
    max_turns: int
    """Completions of up to `max_tokens` in one rollout."""


ENVIRONMENTS: Mapping[str, EnvironmentSpec] = {
    "single": EnvironmentSpec(single_turn, 1),
    "retry": EnvironmentSpec(retry, 2),
}
"""The values of a job's `environment`."""


async def _first_turn(problem: Problem, chat: Chat, group_size: int, generate: Generate) -> list[Rollout]:
    prompt = chat.prompt_ids(problem)
    chunks = await generate(prompt, tuple(range(group_size)), 0)
    _check(chunks, tuple(range(group_size)))
    empty = np.zeros(0, np.int32)
    begun = [
        Rollout(problem, index, empty, empty.astype(np.bool_), empty.astype(np.float32), empty, turns=())
        for index in range(group_size)
    ]
    return [_extended(rollout, prompt, chunk) for rollout, chunk in zip(begun, chunks, strict=True)]


async def _second_turn(rollout: Rollout, chat: Chat, generate: Generate) -> Rollout:
    sampled = rollout.token_ids[rollout.loss_mask]
    previous: tuple[Message, ...] = ()
    read = chat.follow_up_ids(rollout.problem, previous, sampled, RETRY_MESSAGE)
    try:
        chunks = await generate(np.concatenate([rollout.token_ids, read]), (rollout.index,), 1)
    except EngineError as error:  # two turns may be too long for this rollout and not for the others
        return replace(rollout, error=str(error))
    _check(chunks, (rollout.index,))
    return _extended(rollout, read, chunks[0])


def _check(chunks: Sequence[Chunk], indices: tuple[int, ...]) -> None:
    if len(chunks) != len(indices) or any(chunk.finish_reason is None for chunk in chunks):
        raise ValueError(f"generate must return {len(indices)} whole completions, got {len(chunks)}")


def _extended(rollout: Rollout, read: IntArray, chunk: Chunk) -> Rollout:
    """The rollout after the model read some tokens and sampled a turn."""
    reason = chunk.finish_reason or FinishReason.ERROR
    nothing, n = np.zeros(len(read), np.float32), len(chunk.token_ids)
    mask = np.concatenate([rollout.loss_mask, np.zeros(len(read), np.bool_), np.ones(n, np.bool_)])
    error = rollout.error
    if reason is FinishReason.ERROR:
        error = chunk.error or "sampling failed"
    elif reason is FinishReason.ABORT:
        error = "aborted before the answer was complete"
    return replace(
        rollout,
        token_ids=np.concatenate([rollout.token_ids, read, chunk.token_ids]).astype(np.int32),
        loss_mask=mask,
        logprobs=np.concatenate([rollout.logprobs, nothing, chunk.logprobs]).astype(np.float32),
        versions=np.concatenate([rollout.versions, np.full(len(read), -1), chunk.versions]).astype(np.int32),
        turns=(*rollout.turns, Turn(chunk.text, reason)),
        error=error,
    )


async def _rewarded(rollouts: Sequence[Rollout], score: Score, worth: Mapping[int, float]) -> list[Rollout]:
    """Rollouts with the reward of their last turn; those that failed before are passed on as they are."""
    whole = [rollout for rollout in rollouts if not rollout.error]
    results = await score(whole[0].problem, [rollout.completion for rollout in whole]) if whole else []
    by_index = {rollout.index: scored for rollout, scored in zip(whole, results, strict=True)}
    done = []
    for rollout in rollouts:
        if (scored := by_index.get(rollout.index)) is not None:
            reward = scored.reward * worth[rollout.index]
            rollout = replace(rollout, reward=reward, reward_parts=scored.parts, error=scored.error)
        elif rollout.error:  # a second turn that failed must not keep the first turn's reward
            rollout = replace(rollout, reward=float("nan"), reward_parts={})
        done.append(rollout)
    return done


def _first_try(rollout: Rollout, reward: float) -> Mapping[str, float]:
    return {**rollout.reward_parts, "first_try": reward}
