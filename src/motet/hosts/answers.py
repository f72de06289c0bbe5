"""Answers for users: completions of the base and of stored versions, and examined adapters."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from motet.chat.template import Chat, stop_token_ids
from motet.chat.turn_formats.detect import CALL_STYLES
from motet.chat.turn_formats.token_text import token_bytes
from motet.chat.turn_formats.turn_grammar import turn_grammar
from motet.chat.turn_stream import SpokenTurn
from motet.config import DataConfig
from motet.core import seeds
from motet.core.device import used_by
from motet.core.errors import OF_SERVERS, AdapterError, BaseModelError, ContextFull, EngineError, MotetError
from motet.core.stops import met
from motet.core.token_ids import TokenIds
from motet.core.types import AdapterRef, Chunk, FinishReason, GenerateRequest, IntArray, Message
from motet.hosts import messages as m
from motet.hosts.loaded_versions import LoadedVersions
from motet.process.thread_turns import ThreadTurns
from motet.runtime.device_usage import COMPLETIONS
from motet.runtime.generation import together
from motet.runtime.job import Services

if TYPE_CHECKING:
    from motet.config import AdapterConfig
    from motet.model.lora_model import LoraModel
    from motet.training.sharded.base import ShardedBase

_NO_FORM = (
    "the form in which this base writes thoughts and tool calls is not known: chats with tools ask it for "
    '<tool_call>{"name": …, "arguments": {…}}</tool_call>'
)
_CHATS = 16
"""Ways to use the template that are kept."""
_CHARGED = 64
"""Sampled tokens of a completion that are charged together, because they are sent together; a stream sends each."""
Send = Callable[[m.FromHost], object]
"""Sends one message."""


class Answers:
    """Answers questions."""

    def __init__(self, base: LoraModel | ShardedBase, shared: Services, room: int, send: Send) -> None:
        """`room`: most tokens of a prompt with its answer."""
        self._base, self._send = base, send
        self._engine, self._scheduler = shared.engine, shared.scheduler
        self._versions = LoadedVersions(shared.engine, f"stored.{shared.engine_suffix}")
        info = base.info
        self._chat_in = functools.lru_cache(_CHATS)(self._make_chat)
        self._stops = stop_token_ids(info.tokenizer, info.eos_token_ids)
        self._open: dict[int, asyncio.Task[None]] = {}
        self._sampling: dict[int, set[str]] = {}
        """The engine's requests of each question that is being sampled, by its key."""
        self._asking: Counter[str] = Counter()
        """Answers that wait or are given, by account."""
        self._examining = ThreadTurns(1, sys.maxsize, "motet-examining")  # each is half a gigabyte or so
        self._room = room
        self._letters = max(map(len, info.tokenizer.get_vocab()))
        """Characters of the longest token."""
        self._numbers = 0

    def ready(self, notes: Sequence[str], tokens_per_second: float, device: str) -> m.HostReady:
        """What this host says of itself when it can answer."""
        form = self._chat_in("{}").form
        positions, name = self._base.info.max_positions, form.name if form.known else ""
        note = "" if form.known else _NO_FORM
        told = [*notes, note] if note else [*notes]
        return m.HostReady(
            told, tokens_per_second, device, positions=positions, room=self._room, tool_format=name, base_note=note
        )

    def hold(self, key: int, task: asyncio.Task[None]) -> None:
        """Keep the task of an answer, so that `abandon` can cancel it."""
        self._open[key] = task

    async def abandon(self, key: int) -> None:
        """End an answer that nobody waits for; tokens that are sampled already are sent, because they are charged."""
        if names := self._sampling.get(key):
            del self._sampling[key]
            await asyncio.gather(*map(self._engine.abort, names))
            return
        if task := self._open.pop(key, None):
            task.cancel()
        self._send(m.Answered(key))

    def abandon_all(self) -> None:
        """Cancel all answers after the service has gone."""
        for task in self._open.values():
            task.cancel()
        self._open.clear()

    async def answer(self, question: m.Complete) -> None:
        """Complete a prompt or a conversation, from the base or from a stored version."""
        key = question.key
        try:
            prompt_ids = await asyncio.to_thread(
                _prompt_ids, self._chat(question), self._base.info.vocabulary, question, self._room, self._letters
            )
            async with self._version(question) as ref:
                await self._complete(question, prompt_ids, ref)
            self._send(m.Answered(key))
        except Exception as error:  # reported to the requester
            self._send(m.QuestionRefused(key, reason(error), _is_theirs(error), getattr(error, "code", "")))
        finally:
            self._open.pop(key, None)

    async def _complete(self, question: m.Complete, prompt_ids: IntArray, ref: AdapterRef | None) -> None:
        key, given = question.key, question.stop_token_ids
        self._numbers += 1
        if given and (token := self._base.info.vocabulary.unknown(given)) is not None:
            raise EngineError(f"stop has the token id {token}; {self._base.info.vocabulary.bounds}")
        sampling = replace(question.sampling, stop_token_ids=self._stops if given is None else tuple(given))
        if sampling.grammar and question.prompt is None:
            grammar = turn_grammar(self._chat(question), sampling, prompt_ids, question.tools)
            sampling = replace(sampling, grammar=grammar)
        if question.within_room:
            sampling = replace(sampling, max_tokens=max(1, min(sampling.max_tokens, self._room - len(prompt_ids))))
        if len(prompt_ids) + sampling.max_tokens > self._room:  # the engine would see it too, but not before it scores
            raise ContextFull(len(prompt_ids), sampling.max_tokens, self._room)
        request = GenerateRequest(
            f"answer/{self._numbers}",
            f"{COMPLETIONS}{question.tenant}",
            prompt_ids,
            ref,
            sampling,
            tuple(seeds.key(question.seed, "chat", index) for index in range(question.n)),
            stream=question.stream or sampling.max_tokens > _CHARGED,
            chunk_tokens=1 if question.stream else _CHARGED,
            keep_aborted=True,  # an answer that is abandoned is charged
            interactive=True,
        )
        self._send(m.PromptRead(key, len(prompt_ids), prompt_ids.tolist() if question.prompt_ids else []))
        self._sampling[key] = set()
        try:
            await together(self._piece(question, request, part) for part in self._scheduler.pieces(question.n))
        finally:
            self._sampling.pop(key, None)

    async def _piece(self, question: m.Complete, whole: GenerateRequest, part: slice) -> None:
        """Sample a part of a question's completions, unless it was abandoned before its turn came."""
        first, request = part.start == 0, replace(whole, id=f"{whole.id}/{part.start}", seeds=whole.seeds[part])
        async with self._turn(request.job, question.tenant, len(request.seeds)):
            if (names := self._sampling.get(question.key)) is None:
                return
            tenant, share = self._scheduler.payer(request.job)
            request = replace(request, tenant=tenant, share=share)
            passes = 1 + (question.prompt_logprobs + bool(question.prompt_top) if first else 0)
            self._scheduler.spend(request.job, passes * len(request.prompt_ids))
            if first and question.prompt_logprobs:
                with used_by(request.job, tenant, share):
                    self._send(await self._scored(question, request.prompt_ids, request.adapter))
            names.add(request.id)
            await self._sample(question, request, part.start)

    async def _sample(self, question: m.Complete, request: GenerateRequest, first: int) -> None:
        """`first` is the index of the request's first completion."""
        sampled, stopped, stop = defaultdict[int, list[int]](list), "", request.sampling.stop
        turns, chat = dict[int, SpokenTurn](), self._chat(question)
        async for chunk in _joined(self._engine.generate(request), request.chunk_tokens):
            self._scheduler.spend(request.job, len(chunk.token_ids))
            ids = chunk.token_ids.tolist()
            texts = [token_bytes(chat.tokenizer, token) for token in ids] if question.logprobs else []
            if stop:
                sampled[chunk.index] += ids
                ended = chunk.finish_reason is FinishReason.STOP
                stopped = met(chat.completion_text(sampled[chunk.index]), stop) if ended else ""
            said = None
            if question.prompt is None:
                if chunk.index not in turns:
                    turns[chunk.index] = SpokenTurn(chat, request.prompt_ids, question.tools, stop)
                said = await turns[chunk.index].read(chunk)
            self._send(m.Tokens(question.key, replace(chunk, index=first + chunk.index), texts, stopped, said))

    def _chat(self, question: m.Complete) -> Chat:
        """How the question's version talks to the model."""
        return self._chat_in(json.dumps(question.template, sort_keys=True))

    def _make_chat(self, template: str) -> Chat:
        tokenizer: Any = self._base.info.tokenizer
        config = DataConfig(**{"source": "toy:add", **json.loads(template)})
        if not tokenizer.chat_template:
            config = config.model_copy(update={"chat_template": False})
        return Chat.of(tokenizer, config)

    async def _scored(self, question: m.Complete, prompt_ids: IntArray, ref: AdapterRef | None) -> m.PromptScored:
        logprobs = await self._engine.score(prompt_ids, ref)
        if not question.prompt_top:
            return m.PromptScored(question.key, logprobs)
        return m.PromptScored(
            question.key, logprobs, *await self._engine.top_logprobs(prompt_ids, ref, question.prompt_top)
        )

    @contextlib.asynccontextmanager
    async def _turn(self, account: str, tenant: str, rows: int) -> AsyncIterator[None]:
        """Wait for the share of a tenant's completions, which are one more job of it while there are any."""
        if not self._asking[account]:
            self._scheduler.join(account, 1.0, tenant)
        self._asking[account] += 1
        try:
            async with self._scheduler.permit(account, rows, at_once=True):
                yield
        finally:
            self._asking[account] -= 1
            if not self._asking[account]:
                self._scheduler.leave(account)

    @contextlib.asynccontextmanager
    async def _version(self, question: m.Complete) -> AsyncIterator[AdapterRef | None]:
        """Hold the version that is asked, while it is in use; None is the base."""
        if question.adapter is None:
            yield None
            return
        async with self._versions.hold(question.tenant, Path(question.adapter)) as ref:
            yield ref

    async def examine(self, question: m.ExamineAdapter) -> None:
        """Examine an adapter; sends its shape, or why it does not fit the base."""
        key = question.key
        try:
            work = functools.partial(_examined, self._base, Path(question.directory))
            adapter = await self._examining.run(question.tenant, work)
            shape = adapter.model_dump(mode="json", exclude={"init"})
            self._send(m.AdapterExamined(key, shape["rank"], shape["alpha"], shape["target_modules"]))
            self._send(m.Answered(key))
        except AdapterError as error:
            self._send(m.Unfit(key, str(error)))
            self._send(m.Answered(key))
        except Exception as error:  # reported to the requester
            self._send(m.QuestionRefused(key, reason(error)))
        finally:
            self._open.pop(key, None)


async def _joined(chunks: AsyncIterator[Chunk], n_tokens: int) -> AsyncIterator[Chunk]:
    """Join chunks until they have the next multiple of so many tokens, or end a completion."""
    held, known, sent = defaultdict[int, list[Chunk]](list), Counter[int](), Counter[int]()
    async for chunk in chunks:
        index = chunk.index
        parts = held[index]
        parts.append(chunk)
        known[index] += len(chunk.token_ids)
        if chunk.finish_reason is None and known[index] // n_tokens == sent[index] // n_tokens:
            continue
        sent[index] = known[index]
        del held[index]
        yield (
            chunk
            if len(parts) == 1
            else replace(
                chunk,
                token_ids=np.concatenate([part.token_ids for part in parts]),
                logprobs=np.concatenate([part.logprobs for part in parts]),
                versions=np.concatenate([part.versions for part in parts]),
                text="".join(part.text for part in parts),
            )
        )


def _examined(base: LoraModel | ShardedBase, directory: Path) -> AdapterConfig:
    from motet.model.peft_io import examine
    from motet.training.sharded.base import ShardedBase

    return base.examine(directory) if isinstance(base, ShardedBase) else examine(base, directory)


def reason(error: Exception) -> str:
    """Message of an error, for a person."""
    if isinstance(error, MotetError | OSError):
        return str(error)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}; this is a fault of Motet, please report it"


def _is_theirs(error: Exception) -> bool:
    """Whether the same question could never be answered: too long, a conversation that the template refuses."""
    return isinstance(error, EngineError | BaseModelError) and not isinstance(error, OF_SERVERS)


def _prompt_ids(chat: Chat, vocabulary: TokenIds, question: m.Complete, room: int, letters: int) -> IntArray:
    """Of a conversation through the chat template, or of a prompt (text or token ids) as it is.

    A token has at most so many `letters`.

    Raises:
        EngineError: no token, or a token id that is not of this vocabulary.
        ContextFull: a text that is too long for `room` tokens, whatever its tokens are.
    """
    prompt = question.prompt
    if prompt is None:
        as_json = CALL_STYLES["hermes"]
        said = (
            text for one in question.messages for text in (one.thought, one.content, as_json.written(one.tool_calls))
        )
        texts = [*said, *map(json.dumps, question.tools)]
    else:
        texts = [prompt] if isinstance(prompt, str) else []
    if (size := sum(map(len, texts))) > room * letters:
        raise ContextFull(-(-size // letters), 1, room, f"it has {size} characters: shorten it")
    if prompt is None:
        return chat.prompt_of(chat.opening(question.messages, question.tools), question.tools)
    if not prompt:
        raise EngineError("the prompt has no tokens; give it one at least")
    if isinstance(prompt, str):
        raw = Message("user", prompt, special=len(prompt))  # one's own prompt, often rendered already
        return Chat(chat.tokenizer, chat_template=False).prompt_of((raw,))
    if (token := vocabulary.unknown(prompt)) is not None:
        raise EngineError(f"the prompt has the token id {token}; {vocabulary.bounds}")
    return np.asarray(prompt, np.int32)
