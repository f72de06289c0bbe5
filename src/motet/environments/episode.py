"""Turns a problem into rollouts: chooses prompts, replies and rewards.

An environment sees neither engine nor adapter, only two functions: `Generate` samples completions, `ScoreRollouts`
scores them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from motet.chat.template import Chat, Tools
from motet.chat.template_variables import tools_shown
from motet.core.errors import ContextFull, EngineError
from motet.core.types import (
    LARGEST_REWARD,
    Branch,
    Chunk,
    FinishReason,
    IntArray,
    Message,
    Problem,
    Rollout,
    SamplingParams,
    Turn,
    TurnParts,
)
from motet.rewards.reward_answers import ScoreOutcome


class Generate(Protocol):
    """Draws completions."""

    def __call__(
        self, prompt_ids: IntArray, indices: tuple[int, ...], turn: int, sampling: SamplingParams | None = None, /
    ) -> Awaitable[list[Chunk]]:
        """Complete a prompt once per index, in order, with the job's sampling or `sampling`. Index and turn seed the draw."""
        ...


ScoreRollouts = Callable[[Sequence[Rollout]], Awaitable[list[ScoreOutcome]]]
"""One result for each rollout, in order."""


Release = Callable[[int], Awaitable[None]]


async def _nothing_kept(_: int) -> None:
    """Default `Release`: nothing to free."""


@dataclass(frozen=True)
class GroupContext:
    """Input of an environment for one group of rollouts."""

    problem: Problem
    chat: Chat
    group_size: int
    generate: Generate
    score: ScoreRollouts
    seed: int = 0
    """Random seed of the group, for the environment."""
    judged: bool = True
    """Whether the job has rewards."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """The job's sampling settings."""
    release: Release = _nothing_kept
    """Called with the index of each rollout that has no further turn."""
    team: Mapping[str, Generate] = field(default_factory=dict)
    """In a team: the `Generate` of each role's adapter; `generate` is then not used."""


Environment = Callable[[GroupContext], Awaitable[tuple[Rollout, ...]]]
"""The rollouts of one group, in the order of their indices."""


class OwnEnvironment:
    """A job's own environment."""

    clock_limited = False
    """Whether a time limit, or a kill from outside, has changed a result."""

    @property
    def waits(self) -> bool:
        """Whether it offers episodes and no worker has taken one."""
        return False

    @property
    def offers(self) -> bool:
        """Whether it offers episodes that have not ended, taken or not."""
        return False

    async def close(self) -> None:
        """End its processes."""

    async def run_group(self, context: GroupContext) -> tuple[Rollout, ...]:
        """Run one group of rollouts."""
        raise NotImplementedError


RETRY_MESSAGE = "That is not right. Please answer again."
_NO_TOKENS = Branch(np.zeros(0, np.int32), np.zeros(0, np.bool_), np.zeros(0, np.float32), np.zeros(0, np.int32))
TOO_LARGE = f"a reward, or the sum of its rewards, is larger than {LARGEST_REWARD:g}: give smaller rewards"
SECOND_TRY = 0.5
"""Factor on a correct second answer, so that a correct first answer stays better."""


async def single_turn(context: GroupContext) -> tuple[Rollout, ...]:
    """One answer per rollout, in one call to `generate`, so that the prompt is prefilled once."""
    return tuple(await _rewarded(await _first_turn(context), context.score))


async def retry(context: GroupContext) -> tuple[Rollout, ...]:
    """Two turns: after an answer with a reward below 1, the model is told so and may answer once more.

    The reward is that of the last turn, times `SECOND_TRY` for a second one; `reward_parts["first_try"]` keeps the
    first. A first answer cut off at `max_tokens` gets no second turn, and keeps its reward where the context has no room
    for one.
    """
    rollouts = await _rewarded(await _first_turn(context), context.score)
    rollouts = [
        rollout if rollout.error else replace(rollout, reward_parts=_first_try(rollout, rollout.reward))
        for rollout in rollouts
    ]
    again = [rollout for rollout in rollouts if not rollout.error and not rollout.truncated and rollout.reward < 1]
    second = []
    for rollout in await asyncio.gather(*(_second_turn(rollout, context) for rollout in again)):
        if rollout.truncated and len(rollout.turns) == 1:
            rollouts[rollout.index] = rollout
        else:
            second.append(rollout)
    for rollout in await _rewarded(second, context.score, SECOND_TRY):
        parts = rollout.reward_parts if rollout.error else _first_try(rollout, rollouts[rollout.index].reward)
        rollouts[rollout.index] = replace(rollout, reward_parts=parts)
    return tuple(rollouts)


ENVIRONMENTS: Mapping[str, Environment] = {"single": single_turn, "retry": retry}
"""The values of a job's `environment.name`, besides `file.py:Class`."""


async def _first_turn(context: GroupContext) -> list[Rollout]:
    chat, problem, indices = context.chat, context.problem, tuple(range(context.group_size))
    prompt, tools = await asyncio.to_thread(chat.prompt_ids, problem), tools_shown(problem.metadata)
    messages = chat.with_tools(problem.messages, tools)
    opening = () if messages == problem.messages else messages
    chunks = await whole(context.generate(prompt, indices, 0), context.group_size)
    rollouts = []
    for index, chunk in enumerate(chunks):
        said = await heard(context, prompt, chunk, tools)
        rollouts.append(extended(Rollout(problem, index, (), (), opening=opening), prompt, chunk, said=said))
    return rollouts


async def _second_turn(rollout: Rollout, context: GroupContext) -> Rollout:
    (branch,) = rollout.branches
    rollout = answered(rollout, (Message("user", RETRY_MESSAGE),))
    tools = tools_shown(context.problem.metadata)
    read, anew = _next(context.chat, rollout, branch.token_ids[branch.loss_mask], tools)
    prompt = read if anew else np.concatenate([branch.token_ids, read])
    try:
        (chunk,) = await whole(context.generate(prompt, (rollout.index,), 1), 1)
    except ContextFull:
        return rollout.cut_short
    except EngineError as error:
        return replace(rollout, error=str(error))
    return extended(rollout, read, chunk, anew=anew, said=await heard(context, prompt, chunk, tools))


async def whole(generating: Awaitable[list[Chunk]], n: int) -> list[Chunk]:
    """Wait for `n` whole completions. Raises ValueError otherwise."""
    chunks = await generating
    if len(chunks) != n or any(chunk.finish_reason is None for chunk in chunks):
        raise ValueError(f"generate must return {n} whole completions, got {len(chunks)}")
    return chunks


async def heard(context: GroupContext, prompt_ids: IntArray, chunk: Chunk, tools: Tools = ()) -> tuple[str, TurnParts]:
    """The text of a turn and its parts, read in a thread: turns may be long, and other jobs share the event loop."""
    return await asyncio.to_thread(context.chat.turn, prompt_ids, chunk, tools, context.sampling.stop)


def answered(rollout: Rollout, replies: tuple[Message, ...], reward: float | None = None) -> Rollout:
    """The rollout with replies to its last turn."""
    *before, last = rollout.turns
    return replace(rollout, turns=(*before, replace(last, replies=replies, reward=reward)))


def extended(
    rollout: Rollout,
    read: IntArray,
    chunk: Chunk,
    *,
    anew: bool = False,
    after: int | None = None,
    said: tuple[str, TurnParts] | None = None,
    trained: bool = True,
) -> Rollout:
    """The rollout with tokens read and a sampled turn; `anew` begins a branch with the tokens read.

    `said` is its text and parts; without, all of its text is speech. The branch continues from the turn `after`, if any. An
    untrained turn counts as read tokens.
    """
    begun = rollout.branches
    if anew or not begun:
        begun = (*begun, replace(_NO_TOKENS, turn=len(rollout.turns), after=after))
    *before, last = begun
    reason = chunk.finish_reason or FinishReason.ERROR
    nothing, own = np.zeros(len(read), np.float32), np.full(len(chunk.token_ids), trained)
    branch = Branch(
        token_ids=np.concatenate([last.token_ids, read, chunk.token_ids]).astype(np.int32),
        loss_mask=np.concatenate([last.loss_mask, np.zeros(len(read), np.bool_), own]),
        logprobs=np.concatenate([last.logprobs, nothing, np.where(own, chunk.logprobs, 0)]).astype(np.float32),
        versions=np.concatenate([last.versions, np.full(len(read), -1), np.where(own, chunk.versions, -1)]).astype(
            np.int32
        ),
        turn=last.turn,
        after=last.after,
    )
    error = rollout.error
    if reason is FinishReason.ERROR:
        error = chunk.error or "sampling failed"
    elif reason is FinishReason.ABORT:
        error = "aborted before the answer was complete"
    text, parts = said or (chunk.text, TurnParts(speech=chunk.text))
    turns = (*rollout.turns, Turn(text, reason, parts, trained=trained))
    return replace(rollout, branches=(*before, branch), turns=turns, error=error)


async def read_next(chat: Chat, rollout: Rollout, chunk: Chunk, tools: Tools = ()) -> tuple[IntArray, bool]:
    """The tokens that the model reads after replies to `chunk`, its last turn, and whether they begin a branch.

    Tokenised in a thread: replies may be long, and other jobs share the event loop. Raises BaseModelError if the template
    refuses the conversation.
    """
    return await asyncio.to_thread(_next, chat, rollout, chunk.token_ids, tools)


def _next(chat: Chat, rollout: Rollout, sampled: IntArray, tools: Tools = ()) -> tuple[IntArray, bool]:
    messages = rollout.transcript
    replies = rollout.turns[-1].replies
    ids = chat.follow_up_ids(messages[: len(messages) - len(replies)], sampled, replies, tools)
    return (chat.prompt_of(messages, tools), True) if ids is None else (ids, False)


async def judged(rollouts: list[Rollout], context: GroupContext) -> tuple[Rollout, ...]:
    """Rollouts with the job's own rewards for the last turn added to their parts, and the sums."""
    left = [rollout for rollout in rollouts if context.judged and not rollout.error]
    for rollout, result in zip(left, await context.score(left) if left else [], strict=True):
        rollouts[rollout.index] = _judged(rollout, result)
    return tuple(_bounded(_totalled(rollout)) for rollout in rollouts)


def _bounded(rollout: Rollout) -> Rollout:
    """The rollout, failed if a reward of it is too large."""
    given = [
        reward
        for own in (rollout, *rollout.roles.values())
        for reward in (own.reward, *(turn.reward or 0.0 for turn in own.turns))
    ]
    if rollout.error or not any(abs(reward) > LARGEST_REWARD for reward in given):
        return rollout
    return replace(rollout, reward=float("nan"), reward_parts={}, error=TOO_LARGE)


def _judged(rollout: Rollout, result: ScoreOutcome) -> Rollout:
    """The rollout, and each role's conversation in it, with the job's own rewards added."""
    parts = {**rollout.reward_parts, **result.parts}
    total = sum(rollout.reward_parts.values()) + result.reward
    roles = {role: _judged(own, result) for role, own in rollout.roles.items()}
    judged = _scored(rollout, result, total)
    return replace(judged, reward_parts=parts, roles=roles)


def _totalled(rollout: Rollout) -> Rollout:
    """Set the reward to the sum of the parts, if no reward of the job applies."""
    if rollout.error or rollout.reward == rollout.reward:  # not nan
        return rollout
    if not rollout.reward_parts:
        error = "nothing rewards it: give the environment get_reward(), have step return one, or give the job a reward"
        return replace(rollout, error=error)
    roles = {role: _totalled(own) for role, own in rollout.roles.items()}
    return replace(rollout, reward=float(sum(rollout.reward_parts.values())), roles=roles)


async def _rewarded(rollouts: Sequence[Rollout], score: ScoreRollouts, worth: float = 1.0) -> list[Rollout]:
    """Rollouts with the reward of their last turn, times `worth`; failed ones have none."""
    sound = [rollout for rollout in rollouts if not rollout.error]
    results = await score(sound) if sound else []
    by_index = {rollout.index: scored for rollout, scored in zip(sound, results, strict=True)}
    done = []
    for rollout in rollouts:
        if rollout.error:  # a second turn that failed must not keep the first turn's reward
            done.append(replace(rollout, reward=float("nan"), reward_parts={}))
        else:
            result = by_index[rollout.index]
            done.append(_scored(rollout, result, result.reward * worth))
    return done


def _scored(rollout: Rollout, result: ScoreOutcome, reward: float) -> Rollout:
    """The rollout with what its rewards gave and logged."""
    return replace(
        rollout,
        reward=reward,
        reward_parts=result.parts,
        error=result.error,
        metrics=result.metrics,
        extra=result.extra,
    )


def _first_try(rollout: Rollout, reward: float) -> Mapping[str, float]:
    return {**rollout.reward_parts, "first_try": reward}
