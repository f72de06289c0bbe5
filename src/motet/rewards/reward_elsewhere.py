"""Rewards that are scored outside the job's processes: by HTTP, a reward worker, or a judge model.

`RewardPool` gets a function for each kind, which returns a number for each completion, or the reason for a missing one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pydantic import ConfigDict, Field, ValidationError, field_validator

from motet.config import Config, RewardConfig
from motet.config.urls import parse_url
from motet.core.errors import RewardError
from motet.core.plain_json import as_json
from motet.core.types import LARGEST_REWARD, NOT_JUDGED
from motet.rewards.reward_answers import (
    LONGEST_NAME,
    LONGEST_TEXT,
    AnswerContext,
    Noted,
    ScoreOutcome,
    as_given,
    logged,
    parts_as_given,
    sound,
)

MOST_LETTERS = 4000
"""Most characters of a reason."""
LONGEST_TRANSCRIPT = 2**20
"""Most characters of a conversation, as JSON, that is sent to a scorer."""
MOST_TOGETHER = 2**25
"""Most bytes of answers and conversations in one message: half of its limit, because the problem is sent too."""


class Chance(str):
    """A reason caused by the clock or the network: another run could have another result."""

    __slots__ = ()


ScoreOrReason = float | str | None
"""A finite number, the reason for a missing score, or None if the reward does not apply."""
Transcripts = list[list[dict[str, Any]]]
"""The messages of each completion's whole conversation; empty if each is only the prompt and the completion."""


@dataclass(frozen=True)
class AnswerDetails:
    """What a scorer sees of completions besides their text, in plain values."""

    transcripts: Transcripts = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)
    """`thought`, `speech`, `calls` and `unread` of each; empty if each is only speech."""
    state: dict[str, Any] = field(default_factory=dict)
    """`TrainerState`, for a worker's function; empty without."""


NO_DETAILS = AnswerDetails()
Elsewhere = Callable[[str, RewardConfig, dict[str, Any], list[str], AnswerDetails], Awaitable[list[ScoreOrReason]]]
"""(job, reward, problem, completions, what else is seen) → one score per completion, in order; a `Problem` as plain values.

A worker gets texts of completions, the others their speech."""


@runtime_checkable
class Judging(Protocol):
    """A scorer that counts its spending and must be closed."""

    def spend(self, job: str) -> Mapping[str, Any]:
        """A job's spending so far; empty without any."""
        ...

    def leave(self, job: str) -> None:
        """Forget a job that has left this host."""
        ...

    async def close(self) -> None:
        """Stop asking."""
        ...


_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_OWN_HEADERS = ("host", "content-length", "content-type", "transfer-encoding", "connection", "accept-encoding")
MASK = "•••"
"""Shown instead of a header's value."""
SEALED = "sealed:"
"""Prefix of encrypted header values in a service."""
_LONGEST_HEADER, _LONGEST_SEALED = 8000, 11_000


class HttpArgs(Config):
    """An HTTP address scores."""

    url: str = Field(max_length=2000)
    """Where problem and completions are sent."""
    headers: dict[str, str] = Field({}, max_length=20)
    """Sent too, such as `Authorization`; never shown back."""
    args: dict[str, Any] = {}
    """Sent along as `args`."""

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        import httpx2  # the code that asks must understand the URL too

        try:
            parts, good = parse_url(url), bool(httpx2.URL(url).raw_host)
        except (ValueError, httpx2.InvalidURL):
            good = False
        if not good:
            raise ValueError("must look like https://example.org/score")
        if parts.username is not None or parts.password is not None:
            raise ValueError("must not hold a password, which would be shown; send it as a header")
        return url

    @field_validator("headers")
    @classmethod
    def _are_headers(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if not _HEADER.fullmatch(name) or name.lower() in _OWN_HEADERS:
                raise ValueError(f"{name[:100]!r} is not a header that can be set")
            if value == MASK:
                raise ValueError(f"the value of {name} is the mask shown instead of it; give the value itself")
            most = _LONGEST_SEALED if value.startswith(SEALED) else _LONGEST_HEADER
            if not value.isascii() or not value.isprintable() or value != value.strip() or len(value) > most:
                raise ValueError(
                    f"the value of {name} must be at most {_LONGEST_HEADER} plain letters, without spaces around them"
                )
        return headers


class WorkerArgs(Config):
    """A reward worker on its owner's machine scores."""

    function: str = Field("", max_length=300)
    """The worker's function: `rewards.py:reward`, or only `reward`; by default, the worker's only function."""
    args: dict[str, Any] = {}
    """Its keyword arguments."""


class JudgeArgs(Config):
    """A model of the service judges; `args` is a score_model, label_model or multi grader (docs: "Graders", openai.md)."""

    model_config = ConfigDict(extra="allow")


ELSEWHERE: Mapping[str, type[Config]] = {"http": HttpArgs, "worker": WorkerArgs, "judge": JudgeArgs}
"""Rewards that no process of the job scores, with the models of their arguments; the first line of a model's docstring says who
scores."""
SPENDING = ("key", "at_once", "budget", "prices")
"""Arguments of a judge about payment, which change no score."""
SEES_ALL = frozenset({"http", "worker"})
"""Rewards among these that get whole conversations."""


def check(reward: RewardConfig) -> None:
    """Check the arguments of such a reward. Raises RewardError if they are invalid."""
    if reward.function is not None or reward.name not in ELSEWHERE:
        return
    try:
        ELSEWHERE[reward.name].model_validate(reward.args)
    except ValidationError as error:
        mistake = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in mistake["loc"])
        fields = ", ".join(ELSEWHERE[reward.name].model_fields)
        message = {
            "missing": "is missing",
            "extra_forbidden": f"there is no such argument; there are {fields}",
        }.get(mistake["type"], str(mistake["msg"]).removeprefix("Value error, "))
        raise RewardError(f"reward {reward.name}: args.{field}: {message}") from error


def with_headers(reward: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """A reward as plain values, with the values of its headers replaced."""
    args = reward.get("args")
    headers = args.get("headers") if isinstance(args, Mapping) and reward.get("name") == "http" else None
    if not isinstance(args, Mapping) or not isinstance(headers, Mapping):
        return dict(reward)
    return {**reward, "args": {**args, "headers": {name: change(str(value)) for name, value in headers.items()}}}


def masked(reward: Mapping[str, Any]) -> dict[str, Any]:
    """A reward for display: values of headers are masked, and of code only its size is shown."""
    shown = with_headers(reward, lambda _: MASK)
    return {**shown, "code": f"{len(shown['code'])} characters"} if shown.get("code") else shown


def without_spending(reward: Mapping[str, Any]) -> dict[str, Any]:
    """A reward as plain values, without a judge's fields about payment, which change no score."""
    if reward.get("name") != "judge":
        return dict(reward)
    return {**reward, "args": {name: value for name, value in reward["args"].items() if name not in SPENDING}}


def needs_a_service(name: str) -> RewardError:
    """The message about a reward that needs a service."""
    return RewardError(
        f"reward {name!r} is scored beside a service: submit the job to `motet serve`, or name a function of yours as "
        "`file.py:function`"
    )


def label_of(reward: RewardConfig) -> str:
    """Name of a reward in metrics: for a worker, its function; for a file, without the folder."""
    name = str(reward.args.get("function") or reward.name) if reward.name == "worker" else reward.name
    file, _, function = name.rpartition(":")
    return f"{Path(file).name}:{function}" if file.endswith(".py") else name


def labels_of(rewards: Sequence[RewardConfig]) -> list[str]:
    """Names of a job's rewards in metrics; a repeated name becomes `name#2`."""
    labels: list[str] = []
    for reward in rewards:
        label = label_of(reward)
        before = sum(label == label_of(other) for other in rewards[: len(labels)])
        labels.append(f"{label}#{before + 1}" if before else label)
    return labels


def weights_of(rewards: Sequence[RewardConfig]) -> dict[str, float]:
    """The weight of each reward by its label; those of weight 0 are measured and not trained on."""
    return {label: reward.weight for label, reward in zip(labels_of(rewards), rewards, strict=True)}


def summed(labels: Sequence[str], rewards: Sequence[RewardConfig], scores: Sequence[ScoreOrReason]) -> ScoreOutcome:
    """The weighted sum of the scores that apply, as in TRL; without any, a completion has no reward.

    A reward of weight 0 is measured and decides nothing: neither the reward nor whether there is one or it is exact.
    """
    metrics, extra = logged(scores)
    parts: dict[str, float] = {}
    failed, total, clock_limited = list[str](), 0.0, False
    for label, reward, score in zip(labels, rewards, scores, strict=True):
        monitor = not reward.weight
        if isinstance(score, int | float) and not (monitor and abs(score) > LARGEST_REWARD):
            parts[label] = float(score)
            total += reward.weight * score
        elif monitor and score is not None:
            why = score if isinstance(score, str) else f"gave {score:g}, which is too large"
            extra[f"reward {label}"[:LONGEST_NAME]] = why[:LONGEST_TEXT]
        elif isinstance(score, str):
            failed.append(f"reward {label}: {score}")
            clock_limited |= isinstance(score, Chance)
    asked = [label for label, reward in zip(labels, rewards, strict=True) if reward.weight]
    if not failed and not parts.keys() & set(asked):
        failed = [
            f"{NOT_JUDGED}: {', '.join(asked)} returned None, which means that it does not judge this answer; return 0.0 "
            "for no reward"
        ]
    if not failed and not abs(total) <= LARGEST_REWARD:
        failed = [f"the weighted sum of the rewards is {total:g}: give smaller weights or rewards"]
    return ScoreOutcome(math.nan if failed else total, parts, "; ".join(failed), clock_limited, metrics, extra)


def number(value: Any) -> ScoreOrReason:
    """A finite number from a JSON value, or the reason why it is not one."""
    if value is None:
        return "gave no score"
    if not isinstance(value, int | float):
        return f"gave {_kind(value)}, not a number"
    try:
        score = float(value)
    except OverflowError:
        score = math.inf
    return score if math.isfinite(score) else f"gave {score}, not a finite number"


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return "text"
    return "a list" if isinstance(value, list) else "a mapping" if isinstance(value, Mapping) else "non-JSON data"


def to_wire(scores: Sequence[ScoreOrReason]) -> list[Any]:
    """Scores as JSON values: a number, `{"score": number, "metrics", "extra"}`, a text, `{"chance": text}`, or null."""
    return list(map(_as_wire, scores))


def _as_wire(score: ScoreOrReason) -> Any:
    if isinstance(score, Chance):
        return {"chance": str(score)[:MOST_LETTERS]}
    if isinstance(score, Noted):
        return {"score": float(score), "metrics": dict(score.metrics), "extra": dict(score.extra)}
    return score[:MOST_LETTERS] if isinstance(score, str) else score


def from_wire(values: Any, n: int) -> list[ScoreOrReason]:
    """Decode the result of `to_wire` for `n` completions; invalid values become reasons."""
    if not isinstance(values, list) or len(values) != n:
        count = f"{len(values)} scores" if isinstance(values, list) else _kind(values)
        return [f"gave {count} for {n} completions"] * n
    return [_read(value) for value in values]


def _read(value: Any) -> ScoreOrReason:
    if value is None or isinstance(value, str):
        return value if value != "" else "gave no score"
    if isinstance(value, Mapping) and "score" in value:
        score, metrics, extra = number(value["score"]), value.get("metrics") or {}, value.get("extra") or {}
        good = isinstance(metrics, Mapping) and isinstance(extra, Mapping) and sound(metrics, extra)
        return Noted.of(score, metrics, extra) if isinstance(score, int | float) and good else score
    if isinstance(value, Mapping):
        return Chance(str(value.get("chance") or "gave no score"))
    return number(value)


def to_send(
    name: str, texts: Sequence[str], context: AnswerContext
) -> tuple[list[tuple[list[int], list[str], AnswerDetails]], list[ScoreOrReason]]:
    """Answers in messages to the scorer of a reward, each with their places; and for each answer the reason if it has none.

    An answer with a conversation too long to send is in no message.
    """
    sees_all = name in SEES_ALL
    talks = [as_json(as_given(one)) for one in context.transcripts if sees_all] or [[] for _ in texts]
    parts = [as_json(parts_as_given(one)) for one in context.parts if sees_all]
    if name != "worker" and context.parts:  # a worker's function gets the text, as in the job's processes
        texts = [one.speech for one in context.parts]
    state = asdict(context.state) if name == "worker" and context.state else {}
    written = [json.dumps(one, ensure_ascii=False) for one in talks]
    limit = f"the most that are sent to be scored are {LONGEST_TRANSCRIPT}"
    others = [json.dumps(one, ensure_ascii=False) for one in parts] or [""] * len(texts)
    sizes = [len("".join(one).encode(errors="replace")) for one in zip(written, texts, others, strict=True)]
    sent = [n for n, one in enumerate(written) if len(one) <= LONGEST_TRANSCRIPT]
    messages = [
        (
            some,
            [texts[n] for n in some],
            AnswerDetails([talks[n] for n in some if any(talks)], [parts[n] for n in some if parts], state),
        )
        for some in in_parts(sent, sizes, MOST_TOGETHER)
    ]
    return messages, [f"the conversation has {len(one)} characters; {limit}" for one in written]


def in_parts(sent: Sequence[int], sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Groups of answers, by their places, with at most so many bytes; one answer may have more."""
    part, size = list[int](), 0
    for n in sent:
        if part and size + sizes[n] > most:
            yield part
            part, size = [], 0
        part.append(n)
        size += sizes[n]
    if part:
        yield part
