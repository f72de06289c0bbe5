"""Answers of the engine as pieces; chats with a base or a stored version."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from msgspec.structs import replace

from motet.chat.completer import AnswerPiece, Conversation, Reply, whole
from motet.chat.turn_stream import SpokenPart
from motet.core.errors import ConfigError, LimitError
from motet.core.types import FinishReason
from motet.hosts.charged import Charged
from motet.hosts.hosts import Hosts
from motet.hosts.messages import Answer, Complete, PromptRead, Tokens
from motet.service.database.tables import until_tomorrow

_CHAT_TOKENS = 512
_SOON = 30
"""Seconds after which open requests may have ended."""


class Asks:
    """Asks hosts; what an open answer may still sample counts against its tenant's day."""

    def __init__(self, hosts: Hosts, left: Callable[[str], float]) -> None:
        """`left` gives the tokens that a tenant may still have charged today."""
        self._hosts, self._left = hosts, left
        self._open = Counter[str]()

    @contextlib.contextmanager
    def open(self, tenant: str, n: int) -> Iterator[None]:
        """Count tokens that an answer may still sample, until it ends."""
        self._open[tenant] += n
        try:
            yield
        finally:
            self._open[tenant] -= n

    async def __call__(self, question: Complete, charged: Charged | None = None, *, cut: bool) -> AsyncIterator[Answer]:
        """Yield the answers; with `cut`, a completion ends where the day does. Raises as `Hosts.ask`, and LimitError."""
        tenant, n = question.tenant, question.n * question.sampling.max_tokens
        of_day = await asyncio.to_thread(self._left, tenant)
        left = of_day - self._open[tenant]
        if n > left >= question.n and cut:
            sampling = dataclasses.replace(question.sampling, max_tokens=int(left) // question.n)
            question, n = replace(question, sampling=sampling), sampling.max_tokens * question.n
        if n > left:
            until, seconds = ("these end", _SOON) if n <= of_day else ("00:00 UTC", until_tomorrow())
            raise LimitError(
                f"tokens_per_day: this request may sample {n} tokens, and {max(0, int(left))} are left today besides "
                f"{self._open[tenant]} that open requests may sample; lower max_tokens or n, wait until {until}, or an admin "
                "raises it with motet tenants limit --tokens-per-day",
                429,
                seconds,
            )
        with self.open(tenant, n):
            async for answer in self._hosts.ask(question, charged):
                yield answer


async def ask(
    asks: Asks, question: Complete, name: str = "", *, cut: bool = False
) -> tuple[PromptRead, AsyncIterator[AnswerPiece]]:
    """Returns the engine's reading of the prompt, and the answer's pieces, whose ids begin with `name`.

    With `cut`, a completion ends where the tokens of the day do.

    Raises:
        EngineError, ConfigError: it cannot answer. The iterator raises them too.
        LimitError: the tenant has not so many tokens left.
    """
    answers = asks(question, cut=cut)
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


async def all_whole(
    asks: Asks, questions: Sequence[Complete], *, cut: bool = False
) -> list[tuple[int, list[AnswerPiece]]]:
    """Prompt tokens and whole answers of questions that are asked at once; if one fails, all do. Raises as `ask`."""

    async def one(question: Complete) -> tuple[int, list[AnswerPiece]]:
        read, pieces = await ask(asks, question, cut=cut)
        return read.tokens, await whole(pieces)

    try:
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(one(question)) for question in questions]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [one.result() for one in asked]


class StoredVersion:
    """A base or a stored version of an adapter, for one request."""

    def __init__(self, asks: Asks, question: Complete, model: str, name: str) -> None:
        """`question` has everything but the conversation; `model` and `name` (the answer's id) appear in the response."""
        self._asks, self._question, self._model, self._name = asks, question, model, name

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
        read, pieces = await ask(self._asks, question, self._name, cut=limits.max_tokens is None)
        return Reply(self._name, self._model, read.tokens, pieces, read.token_ids)
