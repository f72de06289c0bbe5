"""Chat completions as the `openai` package asks for them: from the base, or from any saved version, also while it trains."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field

from motet.service.database.tables import new_id
from motet.service.engine.answers import Answered, begin, pieces, usage, whole
from motet.service.http.depends import AdaptersDep, Asker, EngineDep, StorageDep, StoreDep
from motet.service.http.sampling import STREAMED, ModelNamesDep, Sampled, Text, with_its_end
from motet.service.routes.shares import SharesDep
from motet.service.schemas import Model, Models

router = APIRouter(prefix="/v1", tags=["completions"])
_MAX_TOKENS = 512


class Part(BaseModel):
    """A piece of a message's content."""

    type: Literal["text"]
    text: Text


class ChatMessage(BaseModel):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[Part], Field(max_length=1000, fail_fast=True)]

    def plain(self) -> dict[str, str]:
        """As the engine takes it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(Sampled):
    """A conversation to go on with."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=1000, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, le=100_000)
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None


@router.get("/models")
def models(who: Asker, store: StoreDep, storage: StorageDep, adapters: AdaptersDep, shares: SharesDep) -> Models:
    """The base, the versions of the asker's jobs, uploaded adapters, and what others share."""
    data = [Model(id=adapters.base)]
    for job in store.jobs(who, limit=200):
        names = storage.version_names(job.id)
        data.extend(Model(id=f"{job.name}@{name}", created=int(job.created)) for name in names)
    data.extend(Model(id=one.name, created=int(one.created)) for one in adapters.all(who))
    data.extend(Model(id=name) for name in shares.received_models(who))
    return Models(data=data)


@router.post("/chat/completions", response_model=None, responses=STREAMED)
async def chat(who: Asker, engine: EngineDep, names: ModelNamesDep, wanted: ChatRequest) -> Response:
    """Go on with a conversation."""
    adapter = await names.directory(who, wanted.model)
    limit = wanted.max_completion_tokens or wanted.max_tokens or _MAX_TOKENS
    question = wanted.question(who, adapter, limit, logprobs=bool(wanted.logprobs))
    question["messages"] = [message.plain() for message in wanted.messages]
    if wanted.stream:
        prompt_tokens, answer = await begin(engine, question)
        lines = with_its_end(_stream(answer, prompt_tokens, wanted))
        return StreamingResponse(lines, media_type="text/event-stream")
    return JSONResponse(_body(await whole(engine, question), wanted))


def _body(answered: Answered, wanted: ChatRequest) -> dict[str, Any]:
    return {
        "id": new_id("chatcmpl"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": wanted.model,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": _logprobs(choice.tokens, choice.logprobs) if wanted.logprobs else None,
                "finish_reason": choice.reason,
            }
            for index, choice in enumerate(answered.choices)
        ],
        "usage": usage(answered.prompt_tokens, answered.tokens),
    }


async def _stream(answer: AsyncIterator[dict[str, Any]], prompt_tokens: int, wanted: ChatRequest) -> AsyncIterator[str]:
    head: dict[str, Any] = {"id": new_id("chatcmpl"), "object": "chat.completion.chunk"}
    head |= {"created": int(time.time()), "model": wanted.model}
    begun: set[int] = set()
    tokens = 0
    async for piece in pieces(answer):
        tokens += piece.n_tokens
        delta = {"content": piece.text, **({} if piece.index in begun else {"role": "assistant"})}
        begun.add(piece.index)
        logprobs = _logprobs(piece.tokens, piece.logprobs) if piece.tokens else None
        choice = {"index": piece.index, "delta": delta, "logprobs": logprobs, "finish_reason": piece.reason}
        yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
    if wanted.tells_usage:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': usage(prompt_tokens, tokens)})}\n\n"
    yield "data: [DONE]\n\n"


def _logprobs(tokens: list[str], logprobs: list[float]) -> dict[str, Any]:
    pairs = zip(tokens, logprobs, strict=False)
    content = [{"token": text, "logprob": one, "bytes": list(text.encode()), "top_logprobs": []} for text, one in pairs]
    return {"content": content, "refusal": None}
