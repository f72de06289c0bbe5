"""The reward `judge` of a run: a model scores, grades by a rubric, or orders the answers.

The model is at an OpenAI-compatible address, or is the base of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
import httpx2
import msgspec
from pydantic import Field, ValidationError

from motet.chat.template import Chat
from motet.config import Config, RewardConfig
from motet.core.errors import EngineError, JobFailed, RewardError
from motet.core.types import Message, Problem
from motet.rewards.graders import item_of
from motet.rewards.graders.shapes import Grader, Judge, JudgeSampling, Rank, judges, parse
from motet.rewards.graders.template import Fields, UnfilledError
from motet.rewards.judge_answers import FILE, JudgeAnswers, Said, Spend, key_of
from motet.rewards.judging import MAX_TOKENS, Graders, most_tokens, prompt, score_or_reason
from motet.rewards.judging_room import Room
from motet.rewards.reward_elsewhere import AnswerDetails, Elsewhere, HttpArgs, ScoreOrReason
from motet.rewards.reward_http import Addresses, AddressFailed, AddressRefused, HttpRewards
from motet.rewards.reward_walls import Walls

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
"""Seconds between two attempts; each pause doubles."""
_PER = 1e6
"""Tokens per unit of price."""
_NOTHING = Spend()
_LONGEST_ANSWER = 200_000
"""Most characters of an answer that are kept."""
_END, _VERDICT = "</think>", re.compile(r'\{\s*"')
BASE = "base"
"""Name of the run's base as a judge."""
TEMPLATE = "chat_template_kwargs"
"""The only additional field of a request to the run's base."""
_NO_URL = (
    "reward judge: args.url is missing: name an OpenAI-compatible server, such as http://localhost:8000/v1, write "
    f"`model: {BASE}` for the base of the run, or submit the job to `motet serve`, whose own models can judge"
)
OfBase = Callable[[str, Mapping[str, Any]], Awaitable[Said]]
"""(job, request) → the answer of the run's base. Raises EngineError."""


class Prices(Config):
    """Prices per million tokens."""

    read: float = Field(0.0, ge=0, le=1e9)
    """Of questions (input tokens)."""
    written: float = Field(0.0, ge=0, le=1e9)
    """Of answers (output tokens)."""


class JudgeAddress(Config):
    """The address of a judge: fields of the reward's `args`, beside the grader's."""

    url: str | None = Field(None, max_length=2000)
    """Base URL of an OpenAI-compatible server, such as `https://api.openai.com/v1`. None means the base of the run."""
    key: str | None = Field(None, pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")
    """Name of the environment variable with the API key."""
    at_once: int = Field(8, ge=1, le=1000)
    """Most open questions to this `url`, over all jobs of a process; the smallest number counts."""
    body: dict[str, Any] = {}
    """More fields of the request, such as `reasoning_effort`; null leaves a field out."""
    budget: int | None = Field(None, ge=1, le=10**15)
    """Tokens that the job's judges may read and write; above it no question is asked and the job fails."""
    prices: Prices = Prices()
    """Per million tokens, to report the cost."""


def parts_of(reward: RewardConfig) -> tuple[JudgeAddress, Grader]:
    """Address and grader of a reward `judge` in a run. Raises RewardError if an argument is missing or wrong."""
    own = {name: value for name, value in reward.args.items() if name in JudgeAddress.model_fields}
    if "url" not in own and not {"model", "graders"} & reward.args.keys():
        raise RewardError(_NO_URL)
    try:
        address = JudgeAddress.model_validate(own)
        if address.url is not None:
            HttpArgs(url=address.url)
    except ValidationError as error:
        mistake = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in mistake["loc"])
        raise RewardError(f"reward judge: args.{field}: {str(mistake['msg']).removeprefix('Value error, ')}") from error
    grader = parse({name: value for name, value in reward.args.items() if name not in own}, "reward judge: args")
    if not judges(grader):
        raise RewardError(f"reward judge: a {grader.type} grader asks no model: take the reward `grader`")
    if address.url is None and any(judge.model != BASE for judge in judges(grader)):
        raise RewardError(_NO_URL)
    if address.url is None and (set(address.body) - {TEMPLATE} or not isinstance(address.body.get(TEMPLATE, {}), dict)):
        raise RewardError(
            f"reward judge: args.body: the base takes {TEMPLATE} alone, a mapping; set args.sampling_params for the rest"
        )
    return address, grader


def check(reward: RewardConfig) -> None:
    """Check a reward `judge` before any question. Raises RewardError if an argument is wrong, or the key is not set."""
    address, _ = parts_of(reward)
    _key(address)


def _key(address: JudgeAddress) -> str:
    key = os.environ.get(address.key or "", "")
    if address.key is not None and not (key and key.isascii() and key.isprintable()):
        raise RewardError(f"reward judge: args.key names {address.key}: set that environment variable to the API key")
    return key


class Judges:
    """Asks judges, for all jobs of a process. Lives in one event loop."""

    def __init__(self, directory: Path, http: HttpRewards, base: OfBase | None = None) -> None:
        """`directory` is that of the run: each job keeps its answers in its own directory below."""
        self._directory, self._http, self._base = directory, http, base
        self._graders = Graders(Walls())
        self._gates: weakref.WeakValueDictionary[str, Room] = weakref.WeakValueDictionary()
        self._spent: dict[str, Spend] = {}
        """The spending of jobs on this host; their files have the same figures."""
        self._open: dict[tuple[str, str], asyncio.Task[str]] = {}

    async def __call__(
        self, job: str, reward: RewardConfig, problem: dict[str, Any], completions: list[str], seen: AnswerDetails
    ) -> list[ScoreOrReason]:
        """Scores of all completions of a problem; a failure is a reason in place of a score."""
        address, grader = parts_of(reward)
        kept = JudgeAnswers(self._directory / job / FILE)

        async def asked(judge: Judge, messages: list[dict[str, str]]) -> tuple[str, int]:
            return await self._said(job, address, kept, _request(address, judge, messages), reward.wall_seconds), 0

        item = item_of(msgspec.convert(problem, Problem))
        graded = await self._graders.graded(job, grader, item, completions, asked)
        return [score_or_reason(one) for one in graded]

    def spend(self, job: str) -> Mapping[str, Any]:
        """A job's spending on judges so far; empty without questions. Reads the job's file on the first call only."""
        spent = self._spend(job)
        return asdict(spent) if spent.questions else {}

    def leave(self, job: str) -> None:
        """Forget a job's spending, because it may run on another host before it returns."""
        self._spent.pop(job, None)

    def _spend(self, job: str) -> Spend:
        if (known := self._spent.get(job)) is not None:
            return known
        read = JudgeAnswers(self._directory / job / FILE).spend()
        return self._spent.setdefault(job, read)  # another thread may have kept an answer since

    async def close(self) -> None:
        """Stop asking, and end the processes of graders that ask no model."""
        for question in list(self._open.values()):
            question.cancel()
        await self._graders.close()

    async def _said(
        self, job: str, address: JudgeAddress, kept: JudgeAnswers, body: Mapping[str, Any], seconds: float
    ) -> str:
        """The stored answer to a question, or a new one; simultaneous equal questions share it."""
        key = key_of(address.url or BASE, body)
        if (known := await asyncio.to_thread(kept.find, key)) is not None:
            return known
        if (under_way := self._open.get((job, key))) is None:
            under_way = self._open[job, key] = asyncio.create_task(self._ask(job, address, kept, key, body, seconds))
            under_way.add_done_callback(lambda done: self._forget((job, key), done))
        return await asyncio.shield(under_way)  # the answer is paid: keep it even if the caller is cancelled

    def _forget(self, question: tuple[str, str], done: asyncio.Task[str]) -> None:
        del self._open[question]
        if not done.cancelled():
            done.exception()  # callers may be cancelled

    async def _ask(
        self, job: str, address: JudgeAddress, kept: JudgeAnswers, key: str, body: Mapping[str, Any], seconds: float
    ) -> str:
        gate = self._gates.setdefault(address.url or BASE, Room())
        async with gate.take(1, address.at_once):
            if address.budget is not None and (await asyncio.to_thread(self._spend, job)).tokens >= address.budget:
                raise JobFailed(
                    f"the judges took args.budget, {address.budget:,} tokens: raise it, and run the same command again"
                )
            if address.url is None:
                assert self._base is not None, "a pool that scores has a base"
                said = await self._base(job, body)
            else:
                said = await self._answer(job, address, address.url, body, seconds)
            cost = (said.read * address.prices.read + said.written * address.prices.written) / _PER
            paid = await asyncio.to_thread(kept.keep, key, said, cost)
            if paid.questions > self._spent.get(job, _NOTHING).questions:  # a later total may be there already
                self._spent[job] = paid
        if said.text is None:
            host = httpx2.URL(address.url or "").host
            raise EngineError(f"{host} answered without text, or with too much of it: set sampling_params.max_tokens")
        return said.text

    async def _answer(self, job: str, address: JudgeAddress, url: str, body: Mapping[str, Any], seconds: float) -> Said:
        """One answer; temporary failures are retried until the time is over, and then raise EngineError."""
        host, reason, pause = httpx2.URL(url).host, "", _FIRST_PAUSE
        try:
            key = _key(address)
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            args = HttpArgs(url=f"{url.rstrip('/')}/chat/completions", headers=headers)
            limits = (body.get(name) for name in ("max_tokens", "max_completion_tokens"))
            most, asked = next((n for n in limits if isinstance(n, int)), MAX_TOKENS), json.dumps(body).encode()
            with anyio.fail_after(seconds):
                for attempt in range(1, 10**6):
                    try:
                        got = await self._http.post_once(job, args, asked, attempt)
                        return _read(got, len(asked), most)
                    except AddressFailed as error:
                        reason = f" ({host} {error})"
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
        except TimeoutError as error:
            raise EngineError(f"{host} gave no answer in {seconds:g} s (reward field wall_seconds){reason}") from error
        except AddressRefused as error:
            raise EngineError(f"{host} {error}") from error
        except RewardError as error:
            raise EngineError(str(error)) from error
        raise AssertionError


def tokens_of(reward: RewardConfig, chat: Chat, problem: Problem, n: int, new: int) -> int:
    """Upper limit on the tokens of a question to the run's base and its answer; 0 for a judge at an address.

    A ranking shows `n` answers, of at most `new` tokens each.
    """
    row = Fields("item", item_of(problem))
    found, own = [0], {name: value for name, value in reward.args.items() if name not in JudgeAddress.model_fields}
    for judge in judges(parse(own, "reward judge: args")) if reward.args.get("url") is None else ():
        if judge.model != BASE:  # a service resolves names of judges itself
            continue
        shown = [""] * n if isinstance(judge, Rank) else []
        with contextlib.suppress(UnfilledError):
            messages = tuple(Message(one["role"], one["content"]) for one in prompt(judge, row, "", shown))
            asked = len(chat.prompt_ids(Problem(0, messages, "")))
            found.append(asked + max(1, len(shown)) * new + most_tokens(judge))
    return max(found)


def _request(address: JudgeAddress, judge: Judge, messages: list[dict[str, str]]) -> dict[str, Any]:
    sampling = judge.sampling_params or JudgeSampling()
    fields = {
        "model": judge.model,
        "messages": messages,
        "max_tokens": most_tokens(judge),
        "temperature": sampling.temperature or 0.0,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        **address.body,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _read(body: bytes, asked: int, most: int) -> Said:
    """Read an answer in OpenAI's form. Raises AddressRefused if it has another one.

    If the server counts no tokens, each byte is one: never too few for a budget. The question has `asked` bytes; an answer
    without text counts as `most` tokens.
    """
    try:
        answer = json.loads(body)
        text = answer["choices"][0]["message"]["content"]
        usage = answer.get("usage") or {}
        read, written = (usage.get(name, 0) for name in ("prompt_tokens", "completion_tokens"))
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise AddressRefused(
            "answered with something that is not a chat completion: is url the base URL, ending in /v1?"
        ) from error
    if isinstance(text, str):  # a cut emoji is half a character, which cannot be stored
        text = text.encode("utf-8", "replace").decode()
    said = len(text.encode()) if isinstance(text, str) else most
    if isinstance(text, str):
        text = _spoken(text)
    if not isinstance(text, str) or len(text) > _LONGEST_ANSWER:
        text = None
    counts = [n if isinstance(n, int) and n > 0 else size for n, size in ((read, asked), (written, said))]
    return Said(text, min(counts[0], 10**9), min(counts[1], 10**9))


def _spoken(text: str) -> str:
    """What a judge says, where its server leaves its thought in the text; a verdict may quote the end of a thought."""
    thinks, end = text.lstrip().startswith("<think>"), text.find(_END)
    if end < 0:
        return "" if thinks else text
    if not thinks and _VERDICT.search(text, 0, end):
        return text
    verdict = _VERDICT.search(text, end)
    return text[text.rfind(_END, end, verdict.start() if verdict else len(text)) + len(_END) :]


def of_a_run(directory: Path, base: OfBase | None = None) -> dict[str, Elsewhere]:
    """Scorers outside reward processes for `motet run`, which may ask any address; without a `base`, only for checks."""
    http = HttpRewards(Addresses(anywhere=True))
    return {"http": http, "judge": Judges(directory, http, base)}
