"""What both kinds of completions take, and how they answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from fastapi import Depends
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from motet.cluster.client import EngineClient
from motet.cluster.messages import Complete, Tokens
from motet.errors import ConfigError, EngineError
from motet.service.adapters.adapters import Answerer, NoModelError
from motet.service.answers import finish_reason, stream
from motet.service.database.tenants import Principal
from motet.service.errors import Refusal
from motet.service.http.depends import AdaptersDep, QuotasDep
from motet.service.schemas import Asked
from motet.types import SamplingParams

Text = Annotated[str, Field(max_length=200_000)]
Stop = Annotated[str, Field(max_length=500)]
"""Every token is looked at for each of them."""
MOST_SEQUENCES = 64
"""Completions of one request, of all its prompts together."""
_MOST_FIELDS = 100
Zero = Annotated[float, Field(ge=0, le=0)]
"""A field that clients send with its neutral value."""


STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""What an answer may be besides JSON: server-sent events, with `stream`."""


class StreamOptions(BaseModel):
    """What a stream holds besides tokens."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class Sampled(Asked):
    """What both kinds of completions take."""

    model: str = Field(max_length=300)
    """A base's name, or `job@version`: a number, `latest` or `best` (`best` without one)."""
    max_tokens: int | None = Field(None, ge=1, le=100_000)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=16)
    stop: Stop | Annotated[list[Stop], Field(max_length=8)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > _MOST_FIELDS:  # each would be a mistake of its own, in memory too
            raise ValueError(f"there are {len(value)} fields, and this takes at most {_MOST_FIELDS}")
        return value

    @property
    def tells_usage(self) -> bool:
        """Whether a stream ends with how many tokens were used."""
        return self.stream_options is not None and self.stream_options.include_usage

    def question(self, who: Principal, asked: Answerer, max_tokens: int, *, logprobs: bool) -> Complete:
        """What the engine is asked, apart from the prompt."""
        sampling = SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p or 1.0,
            max_tokens=max_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
        )
        seed = self.seed if self.seed is not None else time.time_ns()
        adapter, stream = None if asked.directory is None else str(asked.directory), bool(self.stream)
        return Complete(who.tenant_id, adapter, self.n or 1, seed, stream, logprobs, sampling, base=asked.base)


class ModelNames:
    """Finds what a request for completions names."""

    def __init__(self, quotas: QuotasDep, adapters: AdaptersDep) -> None:
        self._quotas, self._adapters = quotas, adapters

    async def answerer(self, who: Principal, model: str) -> Answerer:
        """What a model's name means.

        Raises:
            Refusal: there is no such model for the asker.
            LimitError: the asker's tokens of this day are spent.
        """
        await asyncio.to_thread(self._quotas.check_tokens, who.tenant_id)
        try:
            return await asyncio.to_thread(self._adapters.of_model, who, model)
        except NoModelError as error:
            raise Refusal(404, str(error), "model") from error


ModelNamesDep = Annotated[ModelNames, Depends()]


def usage(prompt: int, completion: int) -> dict[str, int]:
    """Counts of tokens, in the shape of the `openai` package."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


async def streamed(
    engine: EngineClient,
    question: Complete,
    head: dict[str, Any],
    choice: Callable[[Tokens], dict[str, Any]],
    tells_usage: bool,
) -> StreamingResponse:
    """Completions of one prompt as server-sent events: `head` and a choice each; `choice` gives what it holds of some tokens.

    Raises:
        EngineError, ConfigError: it cannot be answered, now or ever, and why.
    """
    prompt_tokens, answers = await stream(engine, question)

    async def bodies() -> AsyncIterator[dict[str, Any]]:
        n_tokens = 0
        async for tokens in answers:
            n_tokens += len(tokens.chunk.token_ids)
            one = {"index": tokens.chunk.index, **choice(tokens), "finish_reason": finish_reason(tokens.chunk)}
            yield {**head, "choices": [one]}
        if tells_usage:
            yield {**head, "choices": [], "usage": usage(prompt_tokens, n_tokens)}

    async def lines() -> AsyncIterator[str]:
        try:
            async for body in bodies():
                yield f"data: {json.dumps(body)}\n\n"
            yield "data: [DONE]\n\n"
        except (EngineError, ConfigError) as error:  # its status was sent long ago
            kind = "unavailable_error" if isinstance(error, EngineError) else "invalid_request_error"
            detail = {"message": str(error), "type": kind, "param": None, "code": None}
            yield f"data: {json.dumps({'error': detail})}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")
