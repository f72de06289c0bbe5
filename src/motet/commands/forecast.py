"""What `motet check` warns of and forecasts, out of a job's data and a few sampled groups."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from motet.config import JobConfig, PricesConfig
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.metrics import distinct
from motet.tasks.chat import Chat
from motet.types import Group, Problem
from motet.view.text import count_text, duration_text

_ROWS = 200
"""Rows that are looked at."""
_SHOWN = 60
_TOO_MANY = 0.1
"""Share of reference answers longer than an answer may be, above which it is said."""
_MOST_CUT = 0.5
_ALIKE = 0.5
_ERRORS = 2.0
"""Standard errors to both sides of a forecast."""
_FIRST_STEPS = 8
"""Steps of a run that a forecast is compared with."""
_SHORT = 10.0
"""Seconds below which a fraction is shown."""
_SPACE = re.compile(r"\s+")


def warnings_of(config: JobConfig, chat: Chat, data: Sequence[Problem], groups: Sequence[Group]) -> Iterator[str]:
    """What would waste a job's time, a sentence each."""
    problems = [data[row] for row in range(0, len(data), max(1, len(data) // _ROWS))][:_ROWS]
    most, temperature = config.sampling.max_tokens, config.sampling.temperature
    yield from (found for found in (_mangled(chat, problems), _too_short(chat, problems, most)) if found)
    rollouts = [rollout for group in groups for rollout in group.scored]
    cut = fmean(rollout.truncated for rollout in rollouts) if rollouts else 0.0
    if cut > _MOST_CUT:
        yield f"{cut:.0%} of the answers were cut at sampling.max_tokens ({most}): raise it, or ask for shorter answers"
    alike = [group for group in groups if len(group.scored) > 1 and len({one.completion for one in group.scored}) == 1]
    if groups and len(alike) > _ALIKE * len(groups):
        yield (
            f"all answers of a group are the same in {len(alike)} of {len(groups)} groups, which teaches nothing: raise "
            f"sampling.temperature ({temperature:g})"
        )
    elif groups and distinct(groups) < _ALIKE:
        yield f"only {distinct(groups):.0%} of a group's answers differ: raise sampling.temperature or use other problems"


def _mangled(chat: Chat, problems: Sequence[Problem]) -> str:
    """Prompts whose text does not come back after template, tokeniser and decoding; white space may change."""
    bad = [(problem, lost) for problem in problems if (lost := _lost(chat, problem))]
    if not bad:
        return ""
    problem, (role, text) = bad[0]
    return (
        f"{len(bad)} of {len(problems)} prompts do not reach the model as they are; in row {problem.id + 1} the chat "
        f"template or the tokeniser changes the {role}'s message {text[:_SHOWN]!r}: change data.system, "
        "data.chat_template_kwargs or the text"
    )


def _lost(chat: Chat, problem: Problem) -> tuple[str, str] | None:
    read = _SPACE.sub("", "".join(chat.token_texts(chat.prompt_ids(problem).tolist())))
    for message in problem.messages:
        if _SPACE.sub("", message.content) not in read:
            return message.role, message.content
    return None


def _too_short(chat: Chat, problems: Sequence[Problem], most: int) -> str:
    """Reference answers that would not fit into an answer."""
    lengths = [
        len(chat.tokenizer.encode(problem.answer, add_special_tokens=False)) for problem in problems if problem.answer
    ]
    longer = sum(length >= most for length in lengths)
    if not lengths or longer <= _TOO_MANY * len(lengths):
        return ""
    return (
        f"{longer} of {len(lengths)} reference answers have {most} tokens or more (the longest {max(lengths)}), and answers "
        "are cut at sampling.max_tokens: raise it"
    )


@dataclass(frozen=True)
class Forecast:
    """Of all steps of a job and its evaluations; pairs are the two ends of a range."""

    tokens: tuple[float, float]
    """Sampled."""
    seconds: tuple[float, float]
    """For the job alone."""
    judge: float = 0.0
    """What judges cost, in the middle of the range."""
    length: tuple[float, float] = (0, 0)
    """Tokens of an answer."""
    step_seconds: tuple[float, float] = (0, 0)

    def text(self, prices: PricesConfig) -> str:
        """In one line."""
        costs = [one / 3600 * prices.hour + self.judge for one in self.seconds]
        line = f"forecast: {_range(map(count_text, self.tokens))} tokens sampled, {_range(map(duration_text, self.seconds))}"
        return f"{line}, cost {_range(f'{cost:.2f}' for cost in costs)}" if any(costs) else line

    def against(self, steps: FirstSteps) -> str:
        """The forecast beside what the first steps took, in one line."""
        tokens, seconds = _range(map(count_text, self.length)), _range(map(_short_time, self.step_seconds))
        took = "" if steps.seconds is None else f", and took {_short_time(steps.seconds)} each (forecast {seconds})"
        first = "step" if steps.n == 1 else f"{steps.n} steps"
        line = f"its first {first} sampled {count_text(steps.length)} tokens an answer (forecast {tokens}){took}"
        low, high = self.length
        if low <= steps.length <= high or not low:
            return line
        scale = steps.length / (low + high) * 2
        total = count_text(scale * fmean(self.tokens))
        return f"{line}; answers are {'longer' if scale > 1 else 'shorter'} than here, so expect about {total} tokens in all"


@dataclass(frozen=True)
class Seconds:
    """Of a job alone, estimated from a few groups."""

    sample: float
    """Of a step's groups."""
    train: float
    """Of a step's training."""
    evaluate: float = 0.0
    """Of one evaluation."""

    @property
    def step(self) -> float:
        """Of a whole step."""
        return self.sample + self.train

    def whole(self, config: JobConfig, held_out: int) -> float:
        """Of all steps, and of the evaluations on so many problems."""
        return self.step * config.steps + (self.evaluate * config.eval.count(config.steps) if held_out else 0)


@dataclass(frozen=True)
class FirstSteps:
    """What the first steps of a run took."""

    n: int
    length: float
    """Tokens of an answer, without evaluations; the mean."""
    seconds: float | None
    """From the end of a step to that of the next, the median; None of one step."""

    @classmethod
    def read(cls, job: JobDirectory) -> FirstSteps | None:
        """From a job's logs; None if they have no step, or cannot be read."""
        try:
            lines = [line for line in _first_lines(job.metrics) if line.get("rollouts") and line.get("length")]
            times = [float(line["time"]) for line in _first_lines(job.timings)]
            answers = sum(line["rollouts"] for line in lines)
            tokens = sum(line["length"] * line["rollouts"] for line in lines)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None
        gaps = [later - earlier for earlier, later in pairwise(times)]
        return cls(len(lines), tokens / answers, median(gaps) if gaps else None) if answers else None


def _first_lines(path: Path) -> list[Any]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in itertools.islice(file, _FIRST_STEPS) if line.endswith("\n")]


def _range(ends: Iterable[str]) -> str:
    low, high = ends
    return low if low == high else f"{low} to {high}"


def _short_time(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < _SHORT else duration_text(seconds)


def forecast(
    config: JobConfig, groups: Sequence[Group], took: Seconds, spend: Mapping[str, Any], held_out: int
) -> Forecast:
    """Out of a few groups of a first step.

    Problems differ in how long their answers are, so the range is that of the mean over groups, two standard errors to
    both sides, and never above `max_tokens`. How lengths change while a job learns is not known before.

    Args:
        config: the job.
        groups: with rollouts.
        took: estimated from them.
        spend: what judges took for them, as `RewardPool.spend` says.
        held_out: problems of an evaluation.
    """
    means = [fmean(one.sampled for one in group.rollouts) for group in groups if group.rollouts]
    if not means or not (mean := fmean(means)):
        return Forecast((0, 0), (0, 0))
    error = _ERRORS * stdev(means) / math.sqrt(len(means)) if len(means) > 1 else mean
    turns = config.environment.turns
    low, high = max(mean - error, mean / 4), min(mean + error, max(mean, config.sampling.max_tokens * turns))
    evaluations = config.eval.count(config.steps) if held_out else 0
    each = config.rl.groups_per_step * config.rl.group_size * config.rl.oversampling
    answers = each * config.steps + evaluations * held_out * config.eval.n
    seconds = took.whole(config, held_out)
    asked = sum(len(group.rollouts) for group in groups)
    return Forecast(
        (answers * low, answers * high),
        (seconds * low / mean, seconds * high / mean),
        float(spend.get("cost", 0.0)) / asked * answers,
        (low, high),
        (took.step * low / mean, took.step * high / mean),
    )
