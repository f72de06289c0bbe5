"""What rewards see of answers, what they may log of them, and the result of scoring one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from motet.core.nested import answer_of
from motet.core.types import Message, Problem, TurnParts

FIRST_ROWS = 100
"""Rows that are looked at to see which columns all have."""
MOST_LOGGED = 64
"""Most metrics, and most columns, of one answer."""
ANSWER_NAMED = "answer (data.answer)"
"""Among the columns of a job that names the column with the answers."""
LONGEST_NAME = 64
LONGEST_TEXT = 1000
"""Most characters of a logged text."""


@dataclass(frozen=True)
class TrainerState:
    """How far a job is, under the names of the `TrainerState` of transformers, which rewards written for TRL read."""

    global_step: int = 0
    """Steps done before the answers were sampled; for an evaluation, the version that it measures."""
    max_steps: int = 0
    epoch: float = 0.0
    """Passes over the data so far."""
    num_train_epochs: int = 0
    """Passes over the data of the whole job, rounded up."""
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True

    @classmethod
    def at(cls, step: int, steps: int, per_step: int, rows: int) -> TrainerState:
        """That of a step that takes `per_step` of the data's rows."""
        rows = max(rows, 1)
        return cls(step, steps, step * per_step / rows, math.ceil(steps * per_step / rows))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            known = ", ".join(one.name for one in fields(TrainerState))
            raise AttributeError(f"trainer_state has no {name!r} here; it has {known}")


def ground_truth(problem: Problem, *, named: bool = False) -> Any:
    """What verl calls so: `reward_model.ground_truth` of the row, or its column `ground_truth`, or the reference answer.

    Nulls are passed over. If the job has `named` the answers, the others are taken only as other forms of the same value.
    """
    row, model = problem.metadata, problem.metadata.get("reward_model")
    values = [model.get("ground_truth") if isinstance(model, Mapping) else None, row.get("ground_truth")]
    found = (one for one in values if one is not None and (not named or answer_of(one) == problem.answer))
    return next(found, problem.answer)


def columns_of(*sources: Iterable[Problem], named: str | None = None) -> list[str] | None:
    """What reward functions find in each of the first problems: columns, `answer`, verl's `reward_model.ground_truth`.

    Columns without any value are left out. ANSWER_NAMED is added if the job has `named` that of the answers.
    None if there are no problems.
    """
    common: dict[str, None] | None = None
    filled = set[str]()
    for problem in itertools.chain(*(itertools.islice(problems, FIRST_ROWS) for problems in sources)):
        names = dict.fromkeys(problem.metadata)
        empty = {name for name, value in problem.metadata.items() if value is None}
        if problem.answer:
            names["answer"] = None
            empty.discard("answer")
        model = problem.metadata.get("reward_model")
        if isinstance(model, Mapping) and model.get("ground_truth") is not None:
            names["reward_model.ground_truth"] = None
        filled |= names.keys() - empty
        common = names if common is None else {name: None for name in common if name in names}
    return (
        None if common is None else [name for name in common if name in filled] + [ANSWER_NAMED] * (named is not None)
    )


Transcript = Sequence[Message]
_ALWAYS = ("role", "content")


@dataclass(frozen=True)
class AnswerContext:
    """What rewards may see of a problem's answers besides their text; each sequence is empty or has one entry per answer."""

    transcripts: Sequence[Transcript] = ()
    """Whole conversations; empty if each is only the prompt and the text."""
    parts: Sequence[TurnParts] = ()
    """Empty if all of each text is speech."""
    shown: Callable[[], list[tuple[str, str]]] | None = None
    """The prompt, and prompt and answer, as the model read and wrote them, special tokens included."""
    state: TrainerState | None = None
    """None where no job asks."""

    def whole(self, problem: Problem, texts: Sequence[str]) -> Sequence[Transcript]:
        """The conversation of each answer."""
        return self.transcripts or [(*problem.messages, Message("assistant", text)) for text in texts]


NO_CONTEXT = AnswerContext()


@dataclass(frozen=True)
class Answer:
    """One answer, as a reward sees it."""

    text: str
    """As the template shows it."""
    parts: TurnParts | None = None
    """None if all of the text is speech."""
    transcript: Sequence[Mapping[str, Any]] = ()
    shown: tuple[str, str] = ("", "")
    """The prompt, and prompt and answer, with special tokens."""

    def part(self, of: str) -> str:
        """`text`, `speech` or `thought` of the answer."""
        if of == "text" or self.parts is None:
            return "" if of == "thought" else self.text
        return self.parts.thought if of == "thought" else self.parts.speech

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Its tool calls."""
        return calls_as_given(self.parts) if self.parts else []


class Logs:
    """What a function logs about the answers of one call, besides their scores."""

    def __init__(self, n: int) -> None:
        self._means: dict[str, list[float]] = {}
        self.metrics: list[dict[str, float]] = [{} for _ in range(n)]
        self.extra: list[dict[str, str]] = [{} for _ in range(n)]

    def log_metric(self, name: str, value: Any) -> None:
        """TRL's `log_metric`: a number for all answers of the call; a repeated one is averaged. Not finite: left out."""
        number = float(value)
        values = self._means.setdefault(_named("log_metric", name, self._means), [])
        if math.isfinite(number):
            values.append(number)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """TRL's `log_extra`: a value for each answer, for the rollout log."""
        if len(values) != len(self.extra):
            raise ValueError(f"log_extra: {column!r} has {len(values)} values for {len(self.extra)} completions")
        for known, value in zip(self.extra, values, strict=True):
            known[_named("log_extra", column, known)] = _text(value)

    def note(self, place: int, name: Any, value: Any) -> None:
        """An entry beside an answer's score: a number is a metric, anything else a column of the rollout log."""
        if not (name := str(name)[:LONGEST_NAME]):
            return
        if (number := _number(value)) is None:
            known = self.extra[place]
            known[_named("the entry", name, known)] = _text(value)
        elif math.isfinite(number):
            self.metrics[place][_named("the entry", name, self.metrics[place])] = number

    def of(self, place: int) -> tuple[dict[str, float], dict[str, str]]:
        """Metrics and columns of one answer."""
        means = {name: fmean(values) for name, values in self._means.items() if values}
        return {**means, **self.metrics[place]}, self.extra[place]


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, str) or not hasattr(value, "__float__") else float(value)
    except (TypeError, ValueError, OverflowError):  # an array, or a large number
        return None


def _text(value: Any) -> str:
    try:
        return str(value)[:LONGEST_TEXT]
    except ValueError:  # a number with more digits than Python writes
        return f"a value of type {type(value).__name__}"


def _named(what: str, name: Any, known: Mapping[str, Any]) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        raise ValueError(f"{what}: {name!r:.80} must be a name of 1 to {LONGEST_NAME} characters")
    if name not in known and len(known) >= MOST_LOGGED:
        raise ValueError(f"{what}: {name!r} is one name too many; the limit is {MOST_LOGGED}")
    return name


def sound(metrics: Mapping[Any, Any], extra: Mapping[Any, Any]) -> bool:
    """Whether what another process says was logged is within the limits."""
    names = [*metrics, *extra]
    return (
        max(len(metrics), len(extra)) <= MOST_LOGGED
        and all(isinstance(name, str) and 0 < len(name) <= LONGEST_NAME for name in names)
        and all(isinstance(value, int | float) and math.isfinite(value) for value in metrics.values())
        and all(isinstance(value, str) and len(value) <= LONGEST_TEXT for value in extra.values())
    )


class Noted(float):
    """A score, with what its function logged."""

    metrics: Mapping[str, float]
    extra: Mapping[str, str]

    @classmethod
    def of(cls, score: float, metrics: Mapping[str, float], extra: Mapping[str, str]) -> float:
        """The score; a plain number if nothing was logged."""
        if not metrics and not extra:
            return score
        noted = cls(score)
        noted.metrics, noted.extra = metrics, extra
        return noted


def logged(scores: Iterable[Any]) -> tuple[dict[str, float], dict[str, str]]:
    """What the functions of several rewards logged about one answer; numbers of one name are averaged."""
    noted = [score for score in scores if isinstance(score, Noted)]
    names = dict.fromkeys(name for one in noted for name in one.metrics)
    metrics = {name: fmean(one.metrics[name] for one in noted if name in one.metrics) for name in names}
    return metrics, {name: text for one in noted for name, text in one.extra.items()}


@dataclass(frozen=True)
class ScoreOutcome:
    """The result of scoring one completion."""

    reward: float
    """The weighted sum of the parts; NaN if one of them failed."""
    parts: Mapping[str, float]
    """Each reward that applies by name, before its weight; a second reward of the same name is `name#2`."""
    error: str = ""
    """Why the reward is missing."""
    clock_limited: bool = False
    """The clock or the network affected the result, so another run may differ."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the functions logged, by name."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Columns for the rollout log."""


def as_given(messages: Transcript) -> list[dict[str, Any]]:
    """Messages in the form that rewards get, without empty tool calls, names and thoughts."""
    plain = [asdict(replace(message, learned=False)) for message in messages]
    return [{key: value for key, value in message.items() if value or key in _ALWAYS} for message in plain]


def calls_as_given(parts: TurnParts) -> list[dict[str, Any]]:
    """Tool calls in the form that rewards get."""
    return [{"name": call.name, "arguments": dict(call.arguments)} for call in parts.calls]


def parts_as_given(parts: TurnParts) -> dict[str, Any]:
    """A turn's parts as plain values."""
    return {**asdict(parts), "calls": calls_as_given(parts)}


def problem_as_given(problem: Problem) -> dict[str, Any]:
    """A problem in the form that rewards get: plain values."""
    return {
        "id": problem.id, "messages": as_given(problem.messages), "answer": problem.answer, "metadata": problem.metadata,
        "conversational": problem.conversational,
    }  # fmt: skip
