"""The warnings and forecasts of `motet check`, from a job's data and a few sampled groups."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, pstdev, stdev
from typing import Any

from motet.chat.template import Chat
from motet.config import JobConfig, PricesConfig
from motet.core.types import Group, Problem, Rollout
from motet.environments.episode import ENVIRONMENTS
from motet.observe.text import count_text, duration_text
from motet.runtime.answer_signs import in_thought, no_signal
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.metrics import distinct, group_metrics

_ROWS = 200
"""Most rows to examine."""
_SHOWN = 60
_MOST_TOKENS = 1000
"""Most tokens of reference answers to compare with others."""
_TWINS = 8
"""Tokens with the same output weights as another, from which on none of them was learned."""
_TOO_MANY = 0.1
"""Share of reference answers that are too long, above which a warning is shown."""
_MOST_CUT = 0.5
_ALIKE = 0.5
_SLOW_REWARDS = 0.5
"""Share of the time of rewards from which on it is told."""
_ERRORS = 2.0
"""Half the width of a forecast, in standard errors."""
_FIRST_STEPS = 8
"""First steps of a run to compare a forecast with."""
_SHORT = 10.0
"""Seconds below which decimals are shown."""
_SPACE = re.compile(r"\s+")


def warnings_of(config: JobConfig, chat: Chat, data: Sequence[Problem], groups: Sequence[Group]) -> Iterator[str]:
    """Problems that would waste a job's time, one sentence each."""
    problems = _some(data)
    most, temperature = config.sampling.max_tokens, config.sampling.temperature
    yield from (found for found in (_mangled(chat, problems), _too_short(chat, problems, most)) if found)
    rollouts = [rollout for group in groups for rollout in group.scored]
    cut = fmean(rollout.truncated for rollout in rollouts) if rollouts else 0.0
    if cut > _MOST_CUT:
        yield f"{cut:.0%} of the answers were cut at sampling.max_tokens ({most}): raise it, or ask for shorter answers"
    yield from (found for found in (_unread(rollouts), _unknown(config, chat)) if found)
    alike = [group for group in groups if len(group.scored) > 1 and len({one.completion for one in group.scored}) == 1]
    if groups and len(alike) > _ALIKE * len(groups):
        yield (
            f"all answers of a group are the same in {len(alike)} of {len(groups)} groups, which teaches nothing: raise "
            f"sampling.temperature ({temperature:g})"
        )
    elif groups and distinct(groups) < _ALIKE:
        yield f"only {distinct(groups):.0%} of a group's answers differ: raise sampling.temperature or use other problems"


def _some(data: Sequence[Problem]) -> list[Problem]:
    return [data[row] for row in range(0, len(data), max(1, len(data) // _ROWS))][:_ROWS]


def _unread(rollouts: Sequence[Rollout]) -> str:
    """A warning about turns that could not be read in the base's form."""
    why = Counter(turn.parts.unread for rollout in rollouts for turn in rollout.turns if turn.parts.unread)
    if not why:
        return ""
    n_turns = sum(len(rollout.turns) for rollout in rollouts)
    ((first, _),) = why.most_common(1)
    return f"{sum(why.values())} of {n_turns} turns could not be read: {first}"


def _unknown(config: JobConfig, chat: Chat) -> str:
    """A warning about a base whose thoughts cannot be read, or its calls, if the job may offer tools."""
    if strange := chat.form.strange:
        return (
            f"this base has tokens whose meaning Motet does not know ({', '.join(strange)}): if two of them stand around its "
            f"thoughts, name these in data.thoughts; else its thoughts are read as answers"
        )
    if chat.form.known or config.environment.name in ENVIRONMENTS:
        return ""
    return (
        f"this base has {chat.form.told}: calls are read as {chat.form.name}. If it writes them otherwise, its calls are "
        "not found; name its form in data.tool_format if it is one of those there"
    )


def _mangled(chat: Chat, problems: Sequence[Problem]) -> str:
    """A warning about prompts whose text changes through template, tokeniser and decoding, except for white space."""
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
    """A warning about reference answers that do not fit into an answer."""
    lengths = [answer_tokens(chat, problem.answer) for problem in problems if problem.answer]
    longer = sum(length >= most for length in lengths)
    if not lengths or longer <= _TOO_MANY * len(lengths):
        return ""
    return (
        f"{longer} of {len(lengths)} reference answers have {most} tokens or more (the longest {max(lengths)}), and answers "
        "are cut at sampling.max_tokens: raise it"
    )


def never_said(chat: Chat, data: Sequence[Problem], twins: Callable[[list[int]], list[int]]) -> str:
    """A warning about answers with tokens that the base never learned; `twins` counts tokens with the same output weights."""
    texts = [(row.answer, *map(row.metadata.get, ("completion", "chosen"))) for row in _some(data)]
    answers = [_encoded(chat, next((text for text in row if text and isinstance(text, str)), "")) for row in texts]
    needed = sorted(set(itertools.chain(*answers)))[:_MOST_TOKENS]
    unknown = {token for token, n in zip(needed, twins(needed), strict=True) if n >= _TWINS}
    pieces = [pair for ids in answers for pair in zip(chat.token_texts(ids), ids, strict=True)]
    if not (said := dict.fromkeys(text.strip() for text, token in pieces if token in unknown and text.strip())):
        return ""
    shown, n = ", ".join(map(repr, itertools.islice(said, 5))), sum(not unknown.isdisjoint(ids) for ids in answers)
    return (
        f"the base never says {shown}{' …' if len(said) > 5 else ''}, which {n} of {len(answers)} answers need: no text taught "
        "it these tokens, so it cannot tell them apart, and an adapter learns to say random ones. Write the answers without "
        "them, or name another base"
    )


def answer_tokens(chat: Chat, answer: str) -> int:
    """Tokens of a reference answer; half a character, which no tokenizer reads, counts as `?`."""
    return len(_encoded(chat, answer))


def _encoded(chat: Chat, text: str) -> list[int]:
    ids: list[int] = chat.tokenizer.encode(text.encode(errors="replace").decode(), add_special_tokens=False)
    return ids


def thought_of(config: JobConfig, groups: Sequence[Group]) -> str:
    """The warning of `motet run` about answers that end inside their thought."""
    figures = group_metrics(groups)
    answers = figures["rollouts"] - figures["failed"]
    return in_thought(figures.get("in_thought", 0), answers, figures["truncated"], config.sampling.model_dump())


def signal_of(config: JobConfig, groups: Sequence[Group]) -> str:
    """The warning of `motet run` that a few groups can show; none if most answers have no reward or cannot be read."""
    scored = [rollout for group in groups for rollout in group.scored]
    unread = sum(any(turn.parts.unread for turn in one.turns) for one in scored)
    if 2 * len(scored) <= sum(len(group.rollouts) for group in groups) or 2 * unread > len(scored):
        return ""
    rewards = [rollout.reward for rollout in scored]
    share = sum(not group.has_signal for group in groups) / len(groups)
    own = config.algorithm.model_dump(mode="json")
    return no_signal(share, fmean(rewards), pstdev(rewards), own, (min(rewards), max(rewards)))


@dataclass(frozen=True)
class Forecast:
    """Totals over a job's steps and evaluations; pairs are the two ends of a range."""

    tokens: tuple[float, float]
    """Sampled tokens."""
    seconds: tuple[float, float]
    """Seconds if the job runs alone."""
    judge: float = 0.0
    """The cost of judges, in the middle of the range."""
    length: tuple[float, float] = (0, 0)
    """Tokens of an answer."""
    step_seconds: tuple[float, float] = (0, 0)
    rewards: float = 0.0
    """The share of the time that rewards take."""

    def text(self, prices: PricesConfig) -> str:
        """The forecast in one line."""
        costs = [one / 3600 * prices.hour + self.judge for one in self.seconds]
        line = f"forecast: {_range(map(count_text, self.tokens))} tokens sampled, {_range(map(duration_text, self.seconds))}"
        line += f", cost {_range(f'{cost:.2f}' for cost in costs)}" if any(costs) else ""
        if self.rewards < _SLOW_REWARDS:
            return line
        cure = "score more at once (engine.reward_processes), or make the function async if it is not"
        return f"{line}; rewards take {self.rewards:.0%} of the time: {cure}"

    def against(self, steps: FirstSteps) -> str:
        """The forecast compared with the first steps, in one line."""
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
    """Seconds of a job that runs alone, estimated from a few groups."""

    sample: float
    """Seconds of sampling a step's groups."""
    train: float
    """Seconds of a step's training."""
    evaluate: float = 0.0
    """Seconds of sampling one evaluation."""
    score: float = 0.0
    """Seconds of scoring a step's answers, beyond sampling."""
    score_evaluation: float = 0.0
    """Seconds of scoring one evaluation."""

    @property
    def step(self) -> float:
        """Seconds of a whole step."""
        return self.sample + self.score + self.train

    def rewards(self, config: JobConfig, held_out: int) -> float:
        """Seconds of scoring all steps and evaluations."""
        return self.score * config.steps + (self.score_evaluation * config.eval.count(config.steps) if held_out else 0)

    def whole(self, config: JobConfig, held_out: int) -> float:
        """Seconds of all steps, and of the evaluations with this many problems."""
        each = self.evaluate + self.score_evaluation
        return self.step * config.steps + (each * config.eval.count(config.steps) if held_out else 0)


@dataclass(frozen=True)
class FirstSteps:
    """Measurements of the first steps of a run."""

    n: int
    length: float
    """Mean tokens of an answer, without evaluations."""
    seconds: float | None
    """Median seconds from the end of a step to that of the next; None with one step."""

    @classmethod
    def read(cls, job: JobDirectory) -> FirstSteps | None:
        """Read them from a job's logs; None if the logs have no step, or cannot be read."""
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
    """Forecast from a few groups of the first step.

    Lengths of answers differ between problems, so the range is the mean over groups ± two standard errors, and never
    above `max_tokens`. It cannot predict how lengths change while a job learns. `spend` is what judges cost for these
    groups, as in `RewardPool.spend`; `held_out` is the number of problems of an evaluation.
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
    seconds, rewards = took.whole(config, held_out), took.rewards(config, held_out)
    others, step = seconds - rewards, took.step - took.score  # the time of rewards does not follow the answers' length
    asked = sum(len(group.rollouts) for group in groups)
    return Forecast(
        (answers * low, answers * high),
        (others * low / mean + rewards, others * high / mean + rewards),
        float(spend.get("cost", 0.0)) / asked * answers,
        (low, high),
        (step * low / mean + took.score, step * high / mean + took.score),
        rewards / seconds if seconds else 0.0,
    )
