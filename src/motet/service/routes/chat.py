"""Completions in the form that the `openai` package speaks: from the base, or from any saved version, also while it trains."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from motet.service.asking import Asker, AtDesk, Refusal
from motet.service.desk import Desk
from motet.service.host_link import chunk_of
from motet.service.schemas import Model, Models
from motet.service.store import Principal, new_id
from motet.types import FinishReason

router = APIRouter(prefix="/v1", tags=["completions"])
Text = Annotated[str, Field(max_length=200_000)]
REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "stop"}


class Part(BaseModel):
    """A piece of a message's content."""

    type: Literal["text"]
    text: Text


class ChatMessage(BaseModel):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[Part]

    def plain(self) -> dict[str, str]:
        """As the engine takes it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(BaseModel):
    """What a stream holds besides tokens."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class ChatRequest(BaseModel):
    """A conversation to go on with. Fields that this service does not know are refused by name."""

    model_config = ConfigDict(extra="forbid")
    model: str = Field(max_length=300)
    """The base's name, or `job@version`: a number, `latest` or `best` (`best` without one)."""
    messages: list[ChatMessage] = Field(min_length=1, max_length=1000)
    max_tokens: int | None = Field(None, ge=1, le=100_000)
    max_completion_tokens: int | None = Field(None, ge=1, le=100_000)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=16)
    stop: str | list[str] | None = Field(None, max_length=8)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


@router.get("/models")
def models(who: Asker, desk: AtDesk) -> Models:
    """The base, and the versions of the asker's adapters."""
    found = [Model(id=desk.settings.base)]
    for job in desk.store.jobs(who, limit=200):
        numbers = [*map(str, desk.versions(job.id))]
        names = [*numbers, *(["latest", "best"] if numbers else [])]
        found.extend(Model(id=f"{job.name}@{name}", created=int(job.created)) for name in names)
    return Models(data=found)


@router.post("/chat/completions", response_model=None)
async def chat(who: Asker, desk: AtDesk, wanted: ChatRequest) -> Response:
    """Go on with a conversation."""
    question = {
        "adapter": await asyncio.to_thread(_adapter, desk, who, wanted.model),
        "messages": [message.plain() for message in wanted.messages],
        "n": wanted.n or 1,
        "seed": wanted.seed if wanted.seed is not None else time.time_ns(),
        "stream": bool(wanted.stream),
        "logprobs": bool(wanted.logprobs),
        "sampling": {
            "temperature": 1.0 if wanted.temperature is None else wanted.temperature,
            "top_p": wanted.top_p or 1.0,
            "max_tokens": wanted.max_completion_tokens or wanted.max_tokens or 512,
            "stop": [wanted.stop] if isinstance(wanted.stop, str) else wanted.stop or [],
        },
    }
    answer = desk.link.answer(**question)
    first = await anext(answer)  # a refusal comes before the first byte of a stream
    if wanted.stream:
        usage = wanted.stream_options is not None and wanted.stream_options.include_usage
        return StreamingResponse(_stream(answer, first, wanted.model, usage), media_type="text/event-stream")
    return JSONResponse(await _whole(answer, first, wanted))


def _adapter(desk: Desk, who: Principal, model: str) -> str | None:
    """The directory of a version; None for the base."""
    if model in (desk.settings.base, "base"):
        return None
    name, _, number = model.partition("@")
    job = desk.store.job(who, name)
    found = None if job is None else desk.version(job, number or "best")
    if found is None:
        raise Refusal(404, f"there is no model {model!r}; GET /v1/models lists them", "model")
    return str(found[1])


async def _whole(answer: AsyncIterator[dict[str, Any]], first: dict[str, Any], wanted: ChatRequest) -> dict[str, Any]:
    choices: dict[int, dict[str, Any]] = {}
    tokens = 0
    async for message in answer:
        if (chunk := chunk_of(message)) is None:
            continue
        tokens += len(chunk.token_ids)
        choice = choices.setdefault(chunk.index, {"text": "", "logprobs": [], "reason": None})
        choice["text"] += chunk.text
        choice["logprobs"] += _logprobs(message)
        choice["reason"] = REASONS.get(chunk.finish_reason or FinishReason.ERROR, "stop")
    return {
        "id": new_id("chatcmpl"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": wanted.model,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice["text"], "refusal": None},
                "logprobs": {"content": choice["logprobs"], "refusal": None} if wanted.logprobs else None,
                "finish_reason": choice["reason"],
            }
            for index, choice in sorted(choices.items())
        ],
        "usage": _usage(first["prompt_tokens"], tokens),
    }


async def _stream(
    answer: AsyncIterator[dict[str, Any]], first: dict[str, Any], model: str, usage: bool
) -> AsyncIterator[str]:
    head = {"id": new_id("chatcmpl"), "object": "chat.completion.chunk", "created": int(time.time()), "model": model}
    begun: set[int] = set()
    tokens = 0
    async for message in answer:
        if (chunk := chunk_of(message)) is None:
            continue
        tokens += len(chunk.token_ids)
        delta = {"content": chunk.text, **({} if chunk.index in begun else {"role": "assistant"})}
        begun.add(chunk.index)
        reason = None if chunk.finish_reason is None else REASONS.get(chunk.finish_reason, "stop")
        told = {"content": _logprobs(message), "refusal": None} if message["texts"] else None
        choice = {"index": chunk.index, "delta": delta, "logprobs": told, "finish_reason": reason}
        yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
    if usage:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': _usage(first['prompt_tokens'], tokens)})}\n\n"
    yield "data: [DONE]\n\n"


def _logprobs(message: dict[str, Any]) -> list[dict[str, Any]]:
    pairs = zip(message["texts"], message["chunk"]["logprobs"], strict=False)
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []} for text, logprob in pairs
    ]


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
