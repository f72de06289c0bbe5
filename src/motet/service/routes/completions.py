"""Completions of plain prompts, as the `openai` package's `completions.create` asks for them. No chat template is applied."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from msgspec.structs import replace
from pydantic import Field

from motet.service.database.tables import new_id
from motet.service.engine.answers import whole
from motet.service.engine.messages import Tokens
from motet.service.errors import Refusal
from motet.service.http.depends import Asker, EngineDep
from motet.service.http.sampling import MOST_SEQUENCES, STREAMED, ModelNamesDep, Sampled, Text, streamed, usage

router = APIRouter(prefix="/v1", tags=["completions"])
_MAX_TOKENS = 16
_MOST_PROMPTS = 16
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, max_length=200_000, fail_fast=True)]
Prompts = Annotated[list[Text], Field(min_length=1, max_length=_MOST_PROMPTS, fail_fast=True)]
PromptIds = Annotated[list[Ids], Field(min_length=1, max_length=_MOST_PROMPTS, fail_fast=True)]


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
async def complete(who: Asker, engine: EngineDep, names: ModelNamesDep, wanted: CompletionRequest) -> Response:
    """Go on with prompts. Choice i · n + k is the k-th completion of prompt i."""
    question = wanted.question(
        who,
        await names.directory(who, wanted.model),
        wanted.max_tokens or _MAX_TOKENS,
        logprobs=wanted.logprobs is not None,
    )
    questions = [replace(question, prompt=prompt) for prompt in wanted.prompts()]
    if (asked := len(questions) * question.n) > MOST_SEQUENCES:
        raise Refusal(
            400,
            f"n: {len(questions)} prompts with n {question.n} are {asked} completions; a request may have {MOST_SEQUENCES}",
            "n",
        )
    head = {"id": new_id("cmpl"), "object": "text_completion", "created": int(time.time()), "model": wanted.model}
    if wanted.stream:
        if len(questions) > 1:
            raise Refusal(400, "prompt: one prompt can be streamed at a time; leave `stream` out for several", "prompt")
        return await streamed(engine, questions[0], head, _Texts().choice, wanted.tells_usage)
    answers = await asyncio.gather(*(whole(engine, question) for question in questions))
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
        offset = self._offsets.get(tokens.index, 0)
        self._offsets[tokens.index] = offset + sum(map(len, tokens.texts))
        logprobs = _logprobs(tokens.texts, tokens.logprobs, offset) if tokens.texts else None
        return {"text": tokens.text, "logprobs": logprobs}


def _logprobs(tokens: list[str], logprobs: list[float], offset: int) -> dict[str, Any]:
    """`text_offset` counts characters of the completion's own text."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    of_tokens = [logprob for _, logprob in zip(tokens, logprobs, strict=False)]
    return {"tokens": tokens, "token_logprobs": of_tokens, "top_logprobs": None, "text_offset": offsets}
