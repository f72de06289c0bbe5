"""Answers of the engine as pieces; chats with a base or a stored version."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence

from msgspec.structs import replace

from motet.chat.completer import AnswerPiece, Conversation, Reply, whole
from motet.chat.spoken import SpokenPart
from motet.cluster.hosts import Hosts
from motet.cluster.messages import Answer, Complete, PromptRead, Tokens
from motet.core.errors import ConfigError
from motet.core.types import FinishReason

_CHAT_TOKENS = 512


async def ask(hosts: Hosts, question: Complete, name: str = "") -> tuple[PromptRead, AsyncIterator[AnswerPiece]]:
    """Returns the engine's reading of the prompt, and the answer's pieces, whose ids begin with `name`.

    Raises:
        EngineError, ConfigError: it cannot answer. The iterator raises them too.
    """
    answers = hosts.ask(question)
    first = await anext(answers)
    assert isinstance(first, PromptRead)
    return first, _pieces(answers, question, name)


async def _pieces(answers: AsyncIterator[Answer], question: Complete, name: str) -> AsyncIterator[AnswerPiece]:
    async for answer in answers:
        if not isinstance(answer, Tokens):
            continue
        chunk = answer.chunk
        reason = chunk.finish_reason
        if reason is FinishReason.ERROR:
            raise ConfigError(chunk.error)
        said = answer.said or SpokenPart([("text", chunk.text)])
        yield AnswerPiece(
            chunk.index,
            f"{name}_{chunk.index}",
            said.blocks,
            said.calls,
            None if reason is None else "length" if reason is FinishReason.LENGTH else "stop",
            chunk.token_ids.tolist(),
            chunk.logprobs.tolist(),
            answer.token_bytes,
            answer.stopped,
            said.thought_tokens,
            said.unread,
            said.recalled,
        )


async def all_whole(hosts: Hosts, questions: Sequence[Complete]) -> list[tuple[int, list[AnswerPiece]]]:
    """Prompt tokens and whole answers of questions that are asked at once; if one fails, all do. Raises as `ask`."""

    async def one(question: Complete) -> tuple[int, list[AnswerPiece]]:
        read, pieces = await ask(hosts, question)
        return read.tokens, await whole(pieces)

    try:
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(one(question)) for question in questions]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [one.result() for one in asked]


class StoredVersion:
    """A base or a stored version of an adapter, for one request."""

    def __init__(self, hosts: Hosts, question: Complete, model: str, name: str) -> None:
        """`question` has everything but the conversation; `model` and `name` (the answer's id) appear in the response."""
        self._hosts, self._question, self._model, self._name = hosts, question, model, name

    async def reply(self, asked: Conversation) -> Reply:
        """Start the answer; refusals are raised here, before the first piece."""
        limits = asked.limits
        sampling = dataclasses.replace(
            self._question.sampling,
            max_tokens=limits.max_tokens or _CHAT_TOKENS,
            stop=limits.stop,
            grammar=limits.grammar,
        )
        question = replace(
            self._question,
            messages=list(asked.messages),
            tools=[dict(tool) for tool in asked.tools],
            n=asked.n,
            stream=asked.stream,
            logprobs=asked.logprobs,
            prompt_ids=asked.token_ids,
            within_room=True,
            sampling=sampling,
        )
        read, pieces = await ask(self._hosts, question, self._name)
        return Reply(self._name, self._model, read.tokens, pieces, read.token_ids)
