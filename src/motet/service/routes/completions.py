"""Completions as the `openai` package asks for them: of conversations, and of plain prompts, to which no template is applied.

The base answers, or any saved version, also while it trains.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from msgspec.structs import replace
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from motet.agents.structure import check_grammar, grammar_of
from motet.apart import Apart
from motet.cluster.client import EngineClient, longest_sequence
from motet.cluster.messages import Complete, Tokens
from motet.errors import ConfigError, EngineError, EpisodeRefusal
from motet.service.adapters.adapters import Answerer, NoModelError
from motet.service.answers import all_whole, finish_reason, stream, whole
from motet.service.database.tables import new_id
from motet.service.database.tenants import Principal
from motet.service.errors import Refusal, bad_field
from motet.service.http.depends import (
    AdaptersDep,
    ApartDep,
    Asker,
    EngineDep,
    QuotasDep,
    StorageDep,
    StoreDep,
    while_there,
)
from motet.service.routes.adapters import SharesDep
from motet.service.schemas import Asked, Model, Models
from motet.types import SamplingParams

router = APIRouter(prefix="/v1", tags=["completions"])
Text = Annotated[str, Field(max_length=200_000)]
Stop = Annotated[str, Field(max_length=500)]
"""Every token is looked at for each of them."""
MOST_SEQUENCES = 64
"""Completions of one request, of all its prompts together."""
_MOST_FIELDS = 100


def _no_penalty(value: object) -> object:
    if isinstance(value, int | float) and value != 0:
        raise ValueError("penalties are not supported; leave it out, or give 0")
    return value


Zero = Annotated[float, BeforeValidator(_no_penalty), Field(ge=0, le=0)]
"""A field that clients send with its neutral value."""
_MAX_TOKENS = 16
_CHAT_TOKENS = 512
_MOST_PROMPTS = 16
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, max_length=200_000, fail_fast=True)]
Prompts = Annotated[list[Text], Field(min_length=1, max_length=_MOST_PROMPTS, fail_fast=True)]
PromptIds = Annotated[list[Ids], Field(min_length=1, max_length=_MOST_PROMPTS, fail_fast=True)]
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
        await asyncio.to_thread(self._quotas.check_day, who.tenant_id)
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
    without_places: Callable[[str], str],
) -> StreamingResponse:
    """Completions of one prompt as server-sent events: `head` and a choice each; `choice` gives what it holds of some tokens.

    Errors are told `without_places` of this machine.

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
            detail = {"message": without_places(str(error)), "type": kind, "param": None, "code": None}
            yield f"data: {json.dumps({'error': detail})}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


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
    response_format: dict[str, Any] | None = None
    """`json_schema`, `json_object` or `text`: tokens that would leave the schema are not drawn."""

    async def grammar(self, apart: Apart, key: str) -> str:
        """What the answer keeps to, checked in a process of its own.

        Raises:
            Refusal: it cannot be kept to, and why.
        """
        try:
            grammar = grammar_of(self.response_format, tools=False)
            await check_grammar(grammar, apart, key)
            return grammar
        except EpisodeRefusal as error:
            raise bad_field("response_format", str(error).removeprefix("response_format: ")) from error


@router.get("/models", response_model_exclude_none=True)
def models(who: Asker, store: StoreDep, storage: StorageDep, adapters: AdaptersDep, shares: SharesDep) -> Models:
    """The bases, the versions of the asker's jobs, uploaded adapters, and what others share."""
    bases = adapters.bases

    def model(name: str, base: str | None, created: float = 0) -> Model:
        return Model(id=name, created=int(created), base=bases.shown(base))

    data = [Model(id=name) for name in bases.names]
    for job in store.jobs(who, limit=200):
        data.extend(model(f"{job.name}@{name}", job.base, job.created) for name in storage.version_names(job.id))
    data.extend(model(one.name, one.base, one.created) for one in adapters.all(who))
    data.extend(model(name, base) for name, base in shares.received_models(who).items())
    return Models(data=data)


@router.post("/chat/completions", response_model=None, responses=STREAMED)
async def chat(
    request: Request,
    who: Asker,
    engine: EngineDep,
    apart: ApartDep,
    names: ModelNamesDep,
    storage: StorageDep,
    wanted: ChatRequest,
) -> Response:
    """Go on with a conversation."""
    asked = await names.answerer(who, wanted.model)
    limit = wanted.max_completion_tokens or wanted.max_tokens or _CHAT_TOKENS
    question = wanted.question(who, asked, limit, logprobs=bool(wanted.logprobs))
    grammar = await while_there(request, wanted.grammar(apart, who.tenant_id)) if wanted.response_format else ""
    sampling = dataclasses.replace(question.sampling, grammar=grammar)
    question = replace(question, messages=[message.plain() for message in wanted.messages], sampling=sampling)
    head: dict[str, Any] = {"id": new_id("chatcmpl"), "object": "chat.completion"}
    head |= {"created": int(time.time()), "model": wanted.model}
    if wanted.stream:
        head |= {"object": "chat.completion.chunk"}
        choice = _Deltas().choice
        return await streamed(engine, question, head, choice, wanted.tells_usage, storage.without_places)
    answer = await whole(engine, question)
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": _chat_logprobs(choice.tokens, choice.logprobs) if wanted.logprobs else None,
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
        delta = {"content": tokens.chunk.text, **({} if tokens.chunk.index in self._begun else {"role": "assistant"})}
        self._begun.add(tokens.chunk.index)
        return {
            "delta": delta,
            "logprobs": _chat_logprobs(tokens.texts, tokens.chunk.logprobs.tolist()) if tokens.texts else None,
        }


def _chat_logprobs(tokens: list[str], logprobs: list[float]) -> dict[str, Any]:
    pairs = zip(tokens, logprobs, strict=False)
    content = [{"token": text, "logprob": one, "bytes": list(text.encode()), "top_logprobs": []} for text, one in pairs]
    return {"content": content, "refusal": None}


class CompletionRequest(Sampled):
    """Prompts to go on with. `echo` and `suffix` are not supported, and `logprobs` tells of sampled tokens only."""

    prompt: Text | Prompts | Ids | PromptIds
    """Text or token ids; a list of them is completed one by one. It is fed to the model as it is."""
    logprobs: Literal[0] | None = None
    """0 tells the logprob of each sampled token; alternatives to it are not kept."""
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None

    def prompts(self) -> list[str | list[int]]:
        """One or several, each text or token ids."""
        given: Any = self.prompt
        single = isinstance(given, str) or isinstance(given[0], int)
        return [given] if single else list(given)


@router.post("/completions", response_model=None, responses=STREAMED)
async def complete(
    who: Asker, engine: EngineDep, names: ModelNamesDep, storage: StorageDep, wanted: CompletionRequest
) -> Response:
    """Go on with prompts. Choice i · n + k is the k-th completion of prompt i."""
    asked_of = await names.answerer(who, wanted.model)
    most = longest_sequence(engine, asked_of.base)
    length = max((len(one) for one in wanted.prompts() if isinstance(one, list)), default=0)
    if most and length > most:
        raise bad_field("prompt", f"it has {length} tokens; {most} are the most that this base reads")
    question = wanted.question(
        who, asked_of, wanted.max_tokens or _MAX_TOKENS, logprobs=wanted.logprobs is not None
    )  # fmt: skip
    questions = [replace(question, prompt=prompt) for prompt in wanted.prompts()]
    if (asked := len(questions) * question.n) > MOST_SEQUENCES:
        given = f"{len(questions)} prompts with n {question.n}"
        raise bad_field("n", f"{given} are {asked} completions; a request may have {MOST_SEQUENCES}")
    head = {"id": new_id("cmpl"), "object": "text_completion", "created": int(time.time()), "model": wanted.model}
    if wanted.stream:
        if len(questions) > 1:
            raise bad_field("prompt", "one prompt can be streamed at a time; leave `stream` out for several")
        choice = _Texts().choice
        return await streamed(engine, questions[0], head, choice, wanted.tells_usage, storage.without_places)
    answers = await all_whole(engine, questions)
    choices = [
        {
            "index": index,
            "text": one.text,
            "logprobs": _logprobs(one.tokens, one.logprobs, 0) if wanted.logprobs is not None else None,
            "finish_reason": one.reason,
        }
        for index, one in enumerate(choice for answer in answers for choice in answer.choices)
    ]
    used = usage(sum(one.prompt_tokens for one in answers), sum(one.tokens for one in answers))
    return JSONResponse({**head, "choices": choices, "usage": used})


class _Texts:
    """Tokens as a stream of a text has them: their offsets go on within each choice."""

    def __init__(self) -> None:
        self._offsets: dict[int, int] = {}

    def choice(self, tokens: Tokens) -> dict[str, Any]:
        offset = self._offsets.get(tokens.chunk.index, 0)
        self._offsets[tokens.chunk.index] = offset + sum(map(len, tokens.texts))
        logprobs = _logprobs(tokens.texts, tokens.chunk.logprobs.tolist(), offset) if tokens.texts else None
        return {"text": tokens.chunk.text, "logprobs": logprobs}


def _logprobs(tokens: list[str], logprobs: list[float], offset: int) -> dict[str, Any]:
    """`text_offset` counts characters of the completion's own text."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    of_tokens = [logprob for _, logprob in zip(tokens, logprobs, strict=False)]
    return {"tokens": tokens, "token_logprobs": of_tokens, "top_logprobs": None, "text_offset": offsets}
