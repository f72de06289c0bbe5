"""Completions of the engine, as they come in and put together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from motet.rollout import wire
from motet.service.engine.client import EngineClient
from motet.types import FinishReason

REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "stop"}


@dataclass
class Completed:
    """One answer as it comes in."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    """The text of each token, where it was asked for."""
    logprobs: list[float] = field(default_factory=list)
    reason: str = "stop"


@dataclass(frozen=True)
class Answered:
    """All answers to one prompt, in the order of their indices."""

    choices: list[Completed]
    prompt_tokens: int
    tokens: int
    """Sampled, of all answers together."""


@dataclass(frozen=True)
class Piece:
    """Some tokens of one answer."""

    index: int
    text: str
    tokens: list[str]
    logprobs: list[float]
    n_tokens: int
    reason: str | None
    """Why the answer ends, with its last piece."""


async def begin(engine: EngineClient, question: Mapping[str, Any]) -> tuple[int, AsyncIterator[dict[str, Any]]]:
    """Ask the engine: the prompt's tokens, and what comes after. A refusal comes here, before the first byte of a stream.

    Raises:
        EngineError, ConfigError: it cannot be answered, now or ever, and why.
    """
    answer = engine.answer(**question)
    first = await anext(answer)
    return int(first["prompt_tokens"]), answer


async def pieces(answer: AsyncIterator[dict[str, Any]]) -> AsyncIterator[Piece]:
    """Answers as their tokens come in."""
    async for message in answer:
        if "chunk" in message:
            chunk = wire.chunk_in(message["chunk"])
            reason = None if chunk.finish_reason is None else REASONS.get(chunk.finish_reason, "stop")
            logprobs = [float(one) for one in message["chunk"]["logprobs"]]
            yield Piece(chunk.index, chunk.text, message["texts"], logprobs, len(chunk.token_ids), reason)


async def whole(engine: EngineClient, question: Mapping[str, Any]) -> Answered:
    """Ask the engine and wait for all of it.

    Raises:
        EngineError, ConfigError: it cannot be answered, now or ever, and why.
    """
    prompt_tokens, answer = await begin(engine, question)
    choices: dict[int, Completed] = {}
    tokens = 0
    async for piece in pieces(answer):
        choice = choices.setdefault(piece.index, Completed())
        choice.text += piece.text
        choice.tokens += piece.tokens
        choice.logprobs += piece.logprobs
        choice.reason = piece.reason or choice.reason
        tokens += piece.n_tokens
    return Answered([choices[index] for index in sorted(choices)], prompt_tokens, tokens)


def usage(prompt: int, completion: int) -> dict[str, int]:
    """Counts of tokens, in the shape of the `openai` package."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
