"""The base of a run as a judge, for rewards that name no address."""

from __future__ import annotations

import asyncio
import itertools
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from motet.chat.template import Chat, stop_token_ids
from motet.core import seeds
from motet.core.model_info import ModelInfo
from motet.core.types import Chunk, FinishReason, GenerateRequest, IntArray, Message, Problem, SamplingParams
from motet.protocols import RolloutEngine
from motet.rewards.graders.template import UnfilledError
from motet.rewards.judge_answers import Said
from motet.rewards.judge_http import TEMPLATE
from motet.runtime.scheduler import FairScheduler

_MOST_CHATS = 64


class BaseJudge:
    """Answers questions from the base without an adapter; the tokens are charged to the job that asks."""

    def __init__(self, info: ModelInfo, engine: RolloutEngine, scheduler: FairScheduler, kv_tokens: int = 0) -> None:
        """`kv_tokens` is the size of the KV cache, or 0 if the engine has its own."""
        self._engine, self._scheduler = engine, scheduler
        self._room = min(info.max_positions, kv_tokens or info.max_positions)
        self._chat = Chat.plain(info.tokenizer)
        self._stops = stop_token_ids(info.tokenizer, info.eos_token_ids)
        self._chats: dict[tuple[str, str], Chat] = {}
        self._numbers = itertools.count()
        self.clocks: dict[str, str] = {}
        """Those of jobs, by name: the base sees the time that a job's own prompts have."""

    async def __call__(self, job: str, body: Mapping[str, Any]) -> Said:
        """The answer to a request in the form of OpenAI's chat completions.

        Raises:
            UnfilledError: the question is too long.
            EngineError: the engine cannot answer.
        """
        asked = ((message["role"], message["content"]) for message in body["messages"])
        messages = tuple(Message(role, text, letters=len(text)) for role, text in asked)  # answers are in any of them
        chat = self._chat_of(body.get(TEMPLATE, {}), self.clocks.get(job, ""))
        most = int(body["max_tokens"])
        prompt_ids = await asyncio.to_thread(chat.prompt_ids, Problem(0, messages, ""))
        if len(prompt_ids) + most > self._room:
            raise UnfilledError(
                "item",
                f"the question to the base has {len(prompt_ids)} tokens, and its answer up to {most}; together they exceed "
                f"{self._room}, the room of the base or of its KV cache: shorten args.input, lower "
                "args.sampling_params.max_completion_tokens, or raise engine.kv_tokens",
                of_item=True,
            )
        seed = _seed_of(messages) if body.get("seed") is None else int(body["seed"])
        tenant, share = self._scheduler.payer(job)
        request = GenerateRequest(
            f"{job}/judge/{next(self._numbers)}",
            job,
            prompt_ids,
            None,
            SamplingParams(
                temperature=float(body["temperature"]),
                top_p=float(body.get("top_p") or 1.0),
                max_tokens=most,
                stop_token_ids=self._stops,
            ),
            (seeds.key(seed, "judge"),),
            tenant=tenant,
            share=share,
        )
        chunks: list[Chunk] = [chunk async for chunk in self._engine.generate(request)]
        written = sum(len(chunk.token_ids) for chunk in chunks)
        self._scheduler.spend(job, len(prompt_ids) + written)
        self._scheduler.read[job] += len(prompt_ids) + written
        said = await asyncio.to_thread(_spoken, chat, prompt_ids, chunks)
        return Said(said, len(prompt_ids), written)

    def _chat_of(self, template_kwargs: Mapping[str, Any], clock: str) -> Chat:
        """The chat of questions of one kind; it knows its template's form already if it was asked before."""
        key = json.dumps(template_kwargs, sort_keys=True), clock
        if key not in self._chats:
            if len(self._chats) >= _MOST_CHATS:
                del self._chats[next(iter(self._chats))]
            self._chats[key] = replace(self._chat, template_kwargs=template_kwargs, clock=clock)
        return self._chats[key]


def _seed_of(messages: Sequence[Message]) -> int:
    """The seed of a question that gives none; it is written so that older jobs keep theirs."""
    texts = (
        f"Message(role={message.role!r}, content={message.content!r}, tool_calls=(), name='', learned=True),"
        for message in messages
    )
    whole = " ".join(texts)
    return zlib.crc32(f"({whole if len(messages) == 1 else whole[:-1]})".encode())


def _spoken(chat: Chat, prompt_ids: IntArray, chunks: Sequence[Chunk]) -> str:
    """What an answer says: its verdict is not in its thought."""
    if chat.form.plain:
        return "".join(chunk.text for chunk in chunks)
    ids, cut_off = np.concatenate([chunk.token_ids for chunk in chunks]), chunks[-1].finish_reason
    return chat.parts(prompt_ids, ids, cut_off=cut_off is FinishReason.LENGTH).speech
