"""Completions of the engine, as they come in and put together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from motet.cluster.client import EngineClient
from motet.cluster.messages import Answer, Complete, PromptRead, Tokens
from motet.errors import ConfigError
from motet.types import Chunk, FinishReason


def finish_reason(chunk: Chunk) -> str | None:
    """Why a completion ends, in the words of the `openai` package."""
    if chunk.finish_reason is None:
        return None
    return "length" if chunk.finish_reason is FinishReason.LENGTH else "stop"


@dataclass
class Completion:
    """One completion as it comes in."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    """The text of each token, where it was asked for."""
    logprobs: list[float] = field(default_factory=list)
    reason: str = "stop"


@dataclass(frozen=True)
class Completions:
    """All completions of one prompt, in the order of their indices."""

    choices: list[Completion]
    prompt_tokens: int
    tokens: int
    """Sampled, of all of them together."""


async def stream(engine: EngineClient, question: Complete) -> tuple[int, AsyncIterator[Tokens]]:
    """Ask the engine: the prompt's tokens, and what comes after. A refusal comes here, before the first byte of a stream.

    Raises:
        EngineError, ConfigError: it cannot be answered, now or ever, and why.
    """
    answers = engine.ask(question)
    first = await anext(answers)
    assert isinstance(first, PromptRead)
    return first.tokens, _tokens(answers, kept_to_grammar=bool(question.sampling.grammar))


async def _tokens(answers: AsyncIterator[Answer], *, kept_to_grammar: bool) -> AsyncIterator[Tokens]:
    async for answer in answers:
        if isinstance(answer, Tokens):
            if kept_to_grammar and answer.chunk.finish_reason is FinishReason.ERROR:
                raise ConfigError(answer.chunk.error)
            yield answer


async def whole(engine: EngineClient, question: Complete) -> Completions:
    """Ask the engine and wait for all of it; raises as `stream` does."""
    prompt_tokens, answers = await stream(engine, question)
    choices: dict[int, Completion] = {}
    n_tokens = 0
    async for tokens in answers:
        chunk = tokens.chunk
        choice = choices.setdefault(chunk.index, Completion())
        choice.text += chunk.text
        choice.tokens += tokens.texts
        choice.logprobs += chunk.logprobs.tolist()
        choice.reason = finish_reason(chunk) or choice.reason
        n_tokens += len(chunk.token_ids)
    return Completions([choices[index] for index in sorted(choices)], prompt_tokens, n_tokens)


async def all_whole(engine: EngineClient, questions: Sequence[Complete]) -> list[Completions]:
    """Ask the engine several questions at once, as `whole` does; when one cannot be answered, the others are abandoned."""
    try:
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(whole(engine, question)) for question in questions]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [one.result() for one in asked]
