"""Chats in three formats, and completions of plain prompts without a template.

The base or any saved version answers, also while its job is training.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response, StreamingResponse
from msgspec.structs import replace
from pydantic import BeforeValidator, Field, model_validator

from motet.chat.completer import (
    EVENTS,
    AnswerPiece,
    ChatFormat,
    Nullable,
    error_event,
    event,
    refuse_unsupported,
    whole,
)
from motet.chat.completions import ChatRequest, StreamOptions, usage
from motet.chat.messages import MessagesRequest
from motet.chat.responses import ResponsesRequest
from motet.chat.structure import check_grammar
from motet.core.errors import ConfigError, ContextFull, EngineError
from motet.core.types import SamplingParams
from motet.hosts.hosts import form_of, longest_prompt
from motet.hosts.messages import Complete
from motet.service.adapters.adapters import Answerer, NoModelError
from motet.service.adapters.listing import PLACE
from motet.service.answers import StoredVersion, all_whole, ask
from motet.service.composition import Service
from motet.service.database.tables import new_id
from motet.service.database.tenants import Principal
from motet.service.depends import Asker, ServiceDep, while_there
from motet.service.errors import Refusal, bad_field
from motet.service.http.pages import page
from motet.service.routing import TenantRoute
from motet.service.schemas import Asked, Model, Models
from motet.service.schemas.token_ids import SomeIds
from motet.service.storage import Storage

router = APIRouter(prefix="/v1", tags=["completions"], route_class=TenantRoute)
Text = Annotated[str, Field(max_length=200_000)]
Stop = Annotated[str, Field(min_length=1, max_length=500)]
"""Each is compared at every token."""
Stops = Annotated[list[Stop], Field(max_length=8)]
MOST_SEQUENCES = 64
"""Completions of one request, over all its prompts."""


def _no_penalty(value: object) -> object:
    if isinstance(value, int | float) and value != 0:
        raise ValueError("penalties are not supported; leave it out, or give 0")
    return value


Zero = Annotated[float, BeforeValidator(_no_penalty), Field(ge=0, le=0)]
"""A field that clients send with its neutral value."""
Limit = Annotated[int, Field(ge=1, lt=2**31)]
_MAX_TOKENS = 16
_MOST_FIELDS = 100
_MOST_PROMPTS = 16
_UNKNOWN: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys((
        "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf", "grammar",
        "json_schema", "response_format", "output_format", "output_config", "stop", "stop_sequences", "stop_regex", "n",
        "max_tokens", "max_completion_tokens", "max_output_tokens", "allowed_token_ids", "chat_template", "typical_p",
        "mirostat", "options", "samplers", "custom_logit_processor", "thinking_token_budget", "logits_processors",
    ), ()),
    "top_k": (-1, 0), "min_p": (0,), "repetition_penalty": (1,), "length_penalty": (1,), "min_tokens": (0,), "best_of": (1,),
    "use_beam_search": (False,), "ignore_eos": (False,), "include_stop_str_in_output": (False,), "stop_token_ids": ([],),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,), "bad_words": ([],),
    "chat_template_kwargs": ({},), "prompt_logprobs": (), "n_predict": (), "reasoning_effort": ("default",),
    "verbosity": ("medium",),
}  # fmt: skip
"""Fields of other servers and formats that would change what the model reads or samples, with their neutral values."""
Prompts = Annotated[list[Text], Field(min_length=1, max_length=_MOST_PROMPTS, fail_fast=True)]
PromptIds = Annotated[list[SomeIds], Field(min_length=1, max_length=_MOST_PROMPTS, fail_fast=True)]
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""Responses other than JSON: server-sent events, with `stream`."""


class Sampled(Nullable):
    """Common fields of all requests: the model and the sampling."""

    model: str = Field(max_length=300)
    """A base's name, or `job@version`: a number, `latest` or `best` (`best` without one)."""
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: Any) -> Any:
        # each could become an error message, which takes memory
        if isinstance(value, dict) and len(value) > _MOST_FIELDS:
            raise ValueError(f"there are {len(value)} fields, and this takes at most {_MOST_FIELDS}")
        return value

    def question(self, who: Principal, asked: Answerer) -> Complete:
        """The engine's question, without prompt and length."""
        temperature = 1.0 if self.temperature is None else self.temperature
        sampling = SamplingParams(temperature, top_p=self.top_p or 1.0)
        seed = self.seed if self.seed is not None else time.time_ns()
        adapter = None if asked.directory is None else str(asked.directory)
        template = dict(asked.template)
        about: dict[str, Any] = {"base": asked.base, "template": template, "account": who.account or ""}
        return Complete(who.tenant_id, adapter, 1, seed, False, False, sampling, **about)


class ServedChat(ChatFormat, Sampled):
    """A chat with a base or a stored version."""


class ChatCompletion(ChatRequest, ServedChat):
    """A conversation to continue."""

    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    stop: Stop | Stops | None = None
    top_logprobs: Literal[0] | None = None


class Responses(ResponsesRequest, ServedChat):
    """A conversation to continue."""

    max_output_tokens: Limit | None = None


class Messages(MessagesRequest, ServedChat):
    """A conversation to continue."""

    max_tokens: Limit
    stop_sequences: Stops | None = None


async def _answerer(service: Service, who: Principal, model: str, *, cpu: bool = False) -> Answerer:
    """Resolve the model of a request, which takes CPU time where `cpu` is set.

    Raises:
        Refusal: the requester can see no such model.
        LimitError: the requester's tokens or CPU seconds of this day are used up.
    """

    def found() -> Answerer:
        service.quotas.check_day(who.tenant_id, cpu=cpu)
        return service.adapters.of_model(who, model)

    try:
        return await asyncio.to_thread(found)
    except NoModelError as error:
        raise Refusal(404, str(error), "model") from error


@router.get("/models", response_model=Models)
def models(
    who: Asker,
    service: ServiceDep,
    after: Annotated[str | None, Query(pattern=PLACE, description="`next` of the previous page.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
) -> Response:
    """List the bases, the versions of the tenant's jobs, uploaded adapters, and adapters that others share."""
    data = [] if after is not None else [_base(service, name) for name in service.adapters.bases.names]
    listed, following = service.listing.page(who, after, limit)
    data.extend(_adapter(service, one.name, one.created, one.base) for one in listed)
    return page(Models(data=[], next=following), data, exclude_none=True)


def _base(service: Service, name: str) -> Model:
    form, note = form_of(service.hosts, name)
    most = longest_prompt(service.hosts, name) or None
    return Model(id=name, tool_format=form or None, note=note or None, max_model_len=most)


def _adapter(service: Service, name: str, created: float, base: str | None) -> Model:
    bases = service.adapters.bases
    most = 0 if bases.missing(base) else longest_prompt(service.hosts, bases.of(base))
    return Model(id=name, created=int(created), base=bases.shown(base), max_model_len=most or None)


@router.get("/models/{model:path}", response_model_exclude_none=True)
def show_model(who: Asker, service: ServiceDep, model: str) -> Model:
    """Get a model by any name that a request may give: a base, `job`, `job@version`, an uploaded or a shared adapter."""
    adapters = service.adapters
    if (base := adapters.bases.find(model)) is not None:
        return _base(service, base)
    named = adapters.named(who, model)
    if named is None or adapters.resolve(named) is None:
        raise Refusal(404, str(NoModelError(model)), "model")
    thing = named.thing
    created = 0 if "/" in model else thing.created  # those of other tenants do not tell when
    return _adapter(service, model, created, thing.base)


def events_of(pieces: AsyncIterator[str], storage: Storage) -> StreamingResponse:
    """Server-sent events; a late error becomes an event, because the status has been sent."""

    async def lines() -> AsyncIterator[str]:
        try:
            async for one in pieces:
                yield one
        except (EngineError, ConfigError) as error:
            kind = "unavailable_error" if isinstance(error, EngineError) else "invalid_request_error"
            yield error_event(storage.without_places(str(error)), kind, error.code)

    return StreamingResponse(lines(), media_type=EVENTS)


class Chats:
    """Answers chats in any format."""

    def __init__(self, request: Request, who: Principal, service: Service) -> None:
        self._request, self._who, self._service = request, who, service

    async def __call__(self, wanted: ServedChat, name: str) -> Response:
        """Answer a chat; `name` is the response's id.

        Raises:
            Refusal, ChatRefusal, LimitError, EngineError, ConfigError: there is no answer; the message says why.
        """
        who, service = self._who, self._service
        refuse_unsupported(wanted, _UNKNOWN)
        asked = wanted.conversation()
        answerer = await _answerer(service, who, wanted.model, cpu=bool(asked.limits.grammar))
        if asked.limits.grammar:
            await while_there(self._request, check_grammar(asked.limits.grammar, service.isolated, who.tenant_id))
        completer = StoredVersion(service.asks, wanted.question(who, answerer), wanted.model, name)
        reply = await while_there(self._request, completer.reply(asked))
        if asked.stream:
            return events_of(wanted.events(reply), service.storage)
        pieces = await while_there(self._request, whole(reply.pieces))
        size = _size(pieces) + 8 * len(reply.prompt_ids)
        return await service.encode_threads.answer(who.tenant_id, size, lambda: wanted.answer(reply, pieces))


async def _chats(request: Request, who: Asker, service: ServiceDep) -> Chats:
    return Chats(request, who, service)


ChatsDep = Annotated[Chats, Depends(_chats)]


@router.post("/chat/completions", response_model=None, responses=STREAMED)
async def chat(chats: ChatsDep, wanted: ChatCompletion) -> Response:
    """Continue a conversation, in the format of OpenAI's Chat Completions."""
    return await chats(wanted, new_id("chatcmpl"))


@router.post("/responses", response_model=None, responses=STREAMED)
async def responses(chats: ChatsDep, wanted: Responses) -> Response:
    """Continue a conversation, in the format of OpenAI's Responses. Responses are not stored."""
    return await chats(wanted, secrets.token_hex(8))


@router.post("/messages", response_model=None, responses=STREAMED)
async def messages(chats: ChatsDep, wanted: Messages) -> Response:
    """Continue a conversation, in the format of Anthropic's Messages."""
    return await chats(wanted, secrets.token_hex(8))


class CompletionRequest(Sampled, Asked):
    """Prompts to continue. `echo` and `suffix` are not supported; `logprobs` covers sampled tokens only."""

    prompt: Text | Prompts | SomeIds | PromptIds
    """Text or token ids, without a template; each element of a list is completed separately."""
    max_tokens: Limit | None = None
    n: int | None = Field(None, ge=1, le=16)
    stop: Stop | Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: Literal[0] | None = None
    """0 adds the logprob of each sampled token; alternatives are not available."""
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    user: Text | None = None

    def questions(self, who: Principal, asked: Answerer) -> list[Complete]:
        """The engine's question for each prompt."""
        question = self.question(who, asked)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        sampling = dataclasses.replace(question.sampling, max_tokens=self.max_tokens or _MAX_TOKENS, stop=stop)
        n, logprobs = self.n or 1, self.logprobs is not None
        question = replace(question, n=n, stream=bool(self.stream), logprobs=logprobs, sampling=sampling)
        return [replace(question, prompt=prompt) for prompt in self.prompts()]

    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list; each is text or token ids."""
        given: Any = self.prompt
        single = isinstance(given, str) or isinstance(given[0], int)
        return [given] if single else list(given)

    def choice(self, piece: AnswerPiece, index: int, offset: int = 0) -> dict[str, Any]:
        """A completion or a part of one; `offset` is its start in characters."""
        logprobs = None if self.logprobs is None else _logprobs(piece, offset)
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}


@router.post("/completions", response_model=None, responses=STREAMED)
async def complete(who: Asker, service: ServiceDep, request: Request, wanted: CompletionRequest) -> Response:
    """Continue prompts. Choice i · n + k is the k-th completion of prompt i."""
    asked_of = await _answerer(service, who, wanted.model)
    most = longest_prompt(service.hosts, asked_of.base)
    length = max((len(one) for one in wanted.prompts() if isinstance(one, list)), default=0)
    if most and length > most:
        full = ContextFull(length, wanted.max_tokens or _MAX_TOKENS, most)
        raise Refusal(400, str(full), "prompt", code=full.code)
    questions = wanted.questions(who, asked_of)
    if (asked := len(questions) * questions[0].n) > MOST_SEQUENCES:
        given = f"{len(questions)} prompts with n {questions[0].n}"
        raise bad_field("n", f"{given} are {asked} completions; a request may have {MOST_SEQUENCES}")
    head = {"id": new_id("cmpl"), "object": "text_completion", "created": int(time.time()), "model": wanted.model}
    if wanted.stream:
        if len(questions) > 1:
            raise bad_field("prompt", "one prompt can be streamed at a time; leave `stream` out for several")
        read, pieces = await ask(service.asks, questions[0], cut=wanted.max_tokens is None)
        return events_of(_texts(wanted, head, read.tokens, pieces), service.storage)
    answered = all_whole(service.asks, questions, cut=wanted.max_tokens is None)
    answers = await while_there(request, answered)
    completions = [one for _, choices in answers for one in choices]
    used = usage(sum(read for read, _ in answers), sum(len(one.token_ids) for one in completions))

    def body() -> dict[str, Any]:
        return {**head, "choices": [wanted.choice(one, index) for index, one in enumerate(completions)], "usage": used}

    return await service.encode_threads.answer(who.tenant_id, _size(completions), body)


def _size(answers: Sequence[AnswerPiece]) -> int:
    """About the bytes of whole answers as JSON, which may have figures for each of a hundred thousand tokens."""
    return sum(len(one.text) + 16 * len(one.token_ids) + 128 * len(one.tokens) for one in answers)


async def _texts(
    wanted: CompletionRequest, head: dict[str, Any], read: int, pieces: AsyncIterator[AnswerPiece]
) -> AsyncIterator[str]:
    offsets, sampled = Counter[int](), 0
    async for piece in pieces:
        yield event({**head, "choices": [wanted.choice(piece, piece.index, offsets[piece.index])]})
        offsets[piece.index] += sum(map(_letters, piece.tokens))
        sampled += len(piece.token_ids)
    if wanted.stream_options is not None and wanted.stream_options.include_usage:
        yield event({**head, "choices": [], "usage": usage(read, sampled)})
    yield "data: [DONE]\n\n"


def _letters(token: bytes) -> int:
    """The letters that begin in a token."""
    return sum(byte & 0xC0 != 0x80 for byte in token)


def _logprobs(piece: AnswerPiece, offset: int) -> dict[str, Any]:
    """`text_offset` counts characters from the start of the completion."""
    offsets = list(itertools.accumulate(map(_letters, piece.tokens), initial=offset))[:-1]
    return {
        "tokens": piece.escaped_tokens, "token_logprobs": piece.logprobs, "top_logprobs": None, "text_offset": offsets,
    }  # fmt: skip
