"""The base of a run as a judge, for rewards that name no address."""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from motet.core import seeds
from motet.core.model_info import ModelInfo
from motet.core.rules import TODAY, Rules
from motet.core.types import Chunk, FinishReason, GenerateRequest, Message, Problem, SamplingParams, TurnParts
from motet.protocols import RolloutEngine
from motet.runtime.scheduler import FairScheduler
from motet.tasks.chat import Chat, stop_token_ids
from motet.tasks.graders.template import UnfilledError
from motet.tasks.judge_answers import Said
from motet.tasks.judge_http import TEMPLATE


class BaseJudge:
    """Answers questions from the base without an adapter; the tokens are charged to the job that asks."""

    def __init__(self, info: ModelInfo, engine: RolloutEngine, scheduler: FairScheduler, kv_tokens: int = 0) -> None:
        """`kv_tokens` is the size of the KV cache, or 0 if the engine has its own."""
        self._engine, self._scheduler = engine, scheduler
        self._room = min(info.max_positions, kv_tokens or info.max_positions)
        self._chat = Chat.plain(info.tokenizer)
        self._stops = stop_token_ids(info.tokenizer, info.eos_token_ids)
        self._numbers = itertools.count()
        self.rules: dict[str, Rules] = {}
        """Those of jobs, by name: the base sees the time that a job's own prompts have."""

    async def __call__(self, job: str, body: Mapping[str, Any]) -> Said:
        """The answer to a request in the form of OpenAI's chat completions.

        Raises:
            UnfilledError: the question is too long.
            EngineError: the engine cannot answer.
        """
        messages = tuple(Message(one["role"], one["content"]) for one in body["messages"])
        chat = replace(self._chat, template_kwargs=body.get(TEMPLATE, {}), rules=self.rules.get(job, TODAY))
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
        said = "".join(chunk.text for chunk in chunks)
        if chat.rules.reads_parts:  # the verdict is in what it says, not in its thought
            ids, cut_off = np.concatenate([chunk.token_ids for chunk in chunks]), chunks[-1].finish_reason
            parts = chat.parts(prompt_ids, ids, cut_off=cut_off is FinishReason.LENGTH)
            said = said if parts == TurnParts(speech=parts.speech) else parts.speech
        return Said(said, len(prompt_ids), written)
