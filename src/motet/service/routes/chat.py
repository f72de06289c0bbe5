"""Chat completions as the `openai` package asks for them: from the base, or from any saved version, also while it trains."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from msgspec.structs import replace
from pydantic import BaseModel, Field

from motet.service.database.tables import new_id
from motet.service.engine.answers import whole
from motet.service.engine.messages import Tokens
from motet.service.http.depends import AdaptersDep, Asker, EngineDep, StorageDep, StoreDep
from motet.service.http.sampling import STREAMED, ModelNamesDep, Sampled, Text, streamed, usage
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
    question = replace(question, messages=[message.plain() for message in wanted.messages])
    head: dict[str, Any] = {"id": new_id("chatcmpl"), "object": "chat.completion"}
    head |= {"created": int(time.time()), "model": wanted.model}
    if wanted.stream:
        return await streamed(
            engine, question, {**head, "object": "chat.completion.chunk"}, _Deltas().choice, wanted.tells_usage
        )
    answer = await whole(engine, question)
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": _logprobs(choice.tokens, choice.logprobs) if wanted.logprobs else None,
            "finish_reason": choice.reason,
        }
        for index, choice in enumerate(answer.choices)
    ]
    return JSONResponse({**head, "choices": choices, "usage": usage(answer.prompt_tokens, answer.tokens)})


class _Deltas:
    """Tokens as a stream of a conversation has them: the first of each choice names the role."""

    def __init__(self) -> None:
        self._begun: set[int] = set()

    def choice(self, tokens: Tokens) -> dict[str, Any]:
        delta = {"content": tokens.text, **({} if tokens.index in self._begun else {"role": "assistant"})}
        self._begun.add(tokens.index)
        return {"delta": delta, "logprobs": _logprobs(tokens.texts, tokens.logprobs) if tokens.texts else None}


def _logprobs(tokens: list[str], logprobs: list[float]) -> dict[str, Any]:
    pairs = zip(tokens, logprobs, strict=False)
    content = [{"token": text, "logprob": one, "bytes": list(text.encode()), "top_logprobs": []} for text, one in pairs]
    return {"content": content, "refusal": None}
