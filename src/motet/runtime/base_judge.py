"""The base of a run as a judge, for rewards that name no address."""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections.abc import Mapping
from typing import Any

from motet import seeds
from motet.model_info import ModelInfo
from motet.protocols import RolloutEngine
from motet.runtime.scheduler import FairScheduler
from motet.tasks.chat import Chat, stop_token_ids
from motet.tasks.judge_answers import Said
from motet.types import Chunk, GenerateRequest, Message, Problem, SamplingParams


class BaseJudge:
    """Answers questions from the base without an adapter; the tokens are charged to the job that asks."""

    def __init__(self, info: ModelInfo, engine: RolloutEngine, scheduler: FairScheduler) -> None:
        self._engine, self._scheduler = engine, scheduler
        self._chat = Chat.plain(info.tokenizer)
        self._stops = stop_token_ids(info.tokenizer, info.eos_token_ids)
        self._numbers = itertools.count()

    async def __call__(self, job: str, body: Mapping[str, Any]) -> Said:
        """The answer to a request in the form of OpenAI's chat completions.

        Raises:
            EngineError: the question is too long.
        """
        messages = tuple(Message(one["role"], one["content"]) for one in body["messages"])
        prompt_ids = await asyncio.to_thread(self._chat.prompt_ids, Problem(0, messages, ""))
        seed = zlib.crc32(repr(messages).encode()) if body.get("seed") is None else int(body["seed"])
        tenant, share = self._scheduler.payer(job)
        request = GenerateRequest(
            f"{job}/judge/{next(self._numbers)}",
            job,
            prompt_ids,
            None,
            SamplingParams(
                temperature=float(body["temperature"]),
                top_p=float(body.get("top_p") or 1.0),
                max_tokens=int(body["max_tokens"]),
                stop_token_ids=self._stops,
            ),
            (seeds.key(seed, "judge"),),
            tenant=tenant,
            share=share,
        )
        chunks: list[Chunk] = [chunk async for chunk in self._engine.generate(request)]
        written = sum(len(chunk.token_ids) for chunk in chunks)
        self._scheduler.spend(job, len(prompt_ids) + written)
        return Said("".join(chunk.text for chunk in chunks), len(prompt_ids), written)
