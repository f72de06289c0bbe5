"""Speculative decoding: drafts the next tokens, which a tick verifies in extra rows.

A draft is accepted if it equals the token sampled at its position. A row's logits do not depend on other rows, so
drafts change the speed, never the tokens. Guesses come from the prompt, from its other completions, and from the job's
earlier answers to the same prompt.
"""

from __future__ import annotations

import hashlib
import weakref
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from motet.core.types import IntArray
from motet.model.lora_model import LoraModel
from motet.rollout.sequences import Prompt, SampledSequence

_ORDERS = (4, 2)
"""Context lengths, in tokens, of n-gram guesses; used if no other completion began in the same way."""
_LONGEST = 8
"""Most tokens of one draft."""
_ANSWERS = 8
"""Earlier answers kept per prompt."""
_KEPT_TOKENS = 2_000_000
"""Limit on all kept answers together; each counts at least `_LEAST_TOKENS`."""
_LEAST_TOKENS = 32
_ANSWER_TOKENS = 512
"""Kept tokens at the start of an answer."""
_CONTEXTS = 100_000
"""Most contexts whose continuations are known around one prompt, about 20 MB."""
_PROMPT_TOKENS = 1024
"""Tokens read at the end of a prompt."""
_GAIN = 1.03
"""Smallest expected speed-up that justifies drafts."""
_LEAST = 2e-4
"""Seconds per row of a tick below which drafting costs too much of the time."""
_LONGEST_REST = 16
"""Most ticks without drafts after drafts did not pay off."""
_TRIALS = 64
"""One in this many decisions uses all likely drafts, to measure the cost of rows."""
_LIKELY = 0.6

Key = tuple[str, str, str, bytes]
"""Tenant, job, adapter, and a digest of the prompt."""
_HITS = 1000
"""Most pairs of job and temperature with kept hit rates."""


class _Prediction:
    """A guess for the token that follows a context."""

    __slots__ = ("agreed", "seen", "token")

    def __init__(self, token: int) -> None:
        self.token, self.agreed, self.seen = token, 1, 1

    def take(self, token: int) -> None:
        """Count a token; keeps the majority candidate (Boyer and Moore)."""
        self.seen += 1
        if token == self.token:
            self.agreed += 1
        elif self.agreed:
            self.agreed -= 1
        else:
            self.token, self.agreed = token, 1

    @property
    def confidence(self) -> int:
        """Confidence, 0 to 7."""
        return 2 * min(self.seen, 4) + (self.agreed == self.seen) - 2


class _Hits:
    """Hit rates by kind of guess, with exponential decay."""

    def __init__(self) -> None:
        self._right, self._tried = [1.0] * 64, [2.0] * 64

    def rate(self, kind: int) -> float:
        """Share of guesses of this kind that were right."""
        return self._right[kind] / self._tried[kind]

    def add(self, kind: int, right: bool) -> None:
        self._right[kind] = 0.98 * self._right[kind] + right
        self._tried[kind] = 0.98 * self._tried[kind] + 1


class _Position:
    """A position in a completion, identified by its last tokens and by all tokens since its start."""

    __slots__ = ("length", "prefix", "recent", "seeded")

    def __init__(self, recent: list[int], seed: int) -> None:
        self.recent, self.length = recent, 0
        self.prefix, self.seeded = 1, hash((2, seed))

    def after(self, token: int) -> _Position:
        position = _Position.__new__(_Position)
        position.recent, position.length = [*self.recent[1 - _ORDERS[0] :], token], self.length + 1
        position.prefix, position.seeded = hash((self.prefix, token)), hash((self.seeded, token))
        return position

    def numbers(self) -> list[tuple[int, int]]:
        """Lookup keys, the most specific first: (hash, kind of key)."""
        found = [(self.seeded, 0), (self.prefix, 1 + (self.length >= 8))]
        return found + [
            (hash(tuple(self.recent[-order:])), 3 + index)
            for index, order in enumerate(_ORDERS)
            if order <= len(self.recent)
        ]


class _Continuations:
    """Observed continuations in the texts around one prompt."""

    def __init__(self, prompt_ids: IntArray, answers: Iterable[tuple[int, IntArray]], hits: _Hits) -> None:
        self._hits = hits
        self._predictions: dict[int, _Prediction] = {}
        self._positions: dict[int, _Position] = {}
        self._end = prompt_ids[-_ORDERS[0] :].tolist()
        recent: list[int] = []
        for token in prompt_ids[-_PROMPT_TOKENS:].tolist():
            for order in _ORDERS:
                if order <= len(recent):
                    self._take(hash(tuple(recent[-order:])), token)
            recent = [*recent[1 - _ORDERS[0] :], token]
        for seed, answer in answers:
            position = _Position(self._end, seed)
            for token in answer.tolist():
                position = self._follow(position, token)

    def read(self, sequence: SampledSequence) -> _Position:
        """Read a completion's new tokens; returns its position."""
        position = self._positions.get(sequence.index) or _Position(self._end, sequence.key)
        for token in sequence.tokens[position.length :]:
            found = self._predict(position)
            if found is not None:
                self._hits.add(found[1], found[0] == token)
            position = self._follow(position, token)
        self._positions[sequence.index] = position
        return position

    def draft(self, position: _Position, most: int) -> list[tuple[int, float]]:
        """Likely next tokens, each with the probability that all tokens up to it are right."""
        likely, drafted = 1.0, list[tuple[int, float]]()
        while len(drafted) < most and (found := self._predict(position)) is not None:
            likely *= self._hits.rate(found[1])
            drafted.append((found[0], likely))
            position = position.after(found[0])
        return drafted

    def _predict(self, position: _Position) -> tuple[int, int] | None:
        """The best guess for the next token, and its kind."""
        for key, sort in position.numbers():
            found = self._predictions.get(key)
            if found is not None:
                return found.token, 8 * sort + found.confidence
        return None

    def _follow(self, position: _Position, token: int) -> _Position:
        for key, _ in position.numbers():
            self._take(key, token)
        return position.after(token)

    def _take(self, key: int, token: int) -> None:
        if (known := self._predictions.get(key)) is not None:
            known.take(token)
        elif len(self._predictions) < _CONTEXTS:
            self._predictions[key] = _Prediction(token)


class _Ticks:
    """Duration of ticks by number of rows."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._seconds: dict[int, float] = {}

    def add(self, rows: int, seconds: float) -> None:
        """Add a measurement; the effect of a single slow tick is limited."""
        known = self._seconds.get(rows)
        if known is None:
            insort(self._rows, rows)
            self._seconds[rows] = seconds
        else:
            self._seconds[rows] = known + 0.2 * (min(seconds, 2 * known) - known)

    def knows(self, rows: int) -> bool:
        """Whether a tick of this size was measured."""
        return rows in self._seconds

    def of(self, rows: int) -> float:
        """Seconds for a number of rows, interpolated. Up to twice the largest measured number is assumed to cost no more."""
        at = bisect_left(self._rows, rows)
        if at == len(self._rows):
            most = self._rows[-1]
            return self._seconds[most] * max(1.0, rows / (2 * most))
        above = self._rows[at]
        if above == rows or at == 0:
            return self._seconds[above]
        below = self._rows[at - 1]
        part = (rows - below) / (above - below)
        return self._seconds[below] + part * (self._seconds[above] - self._seconds[below])


@dataclass
class Drafts:
    """Drafts for the sequences of one decoder, when they are worth their rows."""

    least: float = _LEAST
    drafted: int = 0
    """Drafted tokens that were checked."""
    accepted: int = 0
    """Drafted tokens that were accepted."""
    _answers: OrderedDict[Key, deque[tuple[int, IntArray]]] = field(default_factory=OrderedDict)
    """Answers with their seeds, by tenant, job and prompt; least recently used first."""
    _tokens: int = 0
    _hits: dict[tuple[str, float], _Hits] = field(default_factory=dict)
    """Hit rates by job and temperature."""
    _ticks: _Ticks = field(default_factory=_Ticks)
    _continuations: weakref.WeakKeyDictionary[Prompt, _Continuations] = field(default_factory=weakref.WeakKeyDictionary)
    _rest: int = 0
    _pause: int = 1
    _trial: int = 0

    def of(self, running: Sequence[SampledSequence], spare: int) -> list[list[int]]:
        """Drafts for each sequence, at most `spare` tokens together."""
        nothing: list[list[int]] = [[] for _ in running]
        if self._rest:
            self._rest -= 1
            return nothing
        n_rows = len(running)
        if spare <= 0 or not self._ticks.knows(n_rows) or self._ticks.of(n_rows) < self.least * n_rows:
            return nothing
        offers = [self._draft(item) for item in running]
        ranked = sorted(((likely, index) for index, offer in enumerate(offers) for _, likely in offer), reverse=True)
        n_chosen = self._worth(n_rows, [likely for likely, _ in ranked[:spare]])
        if not n_chosen:
            self._rest, self._pause = self._pause, min(2 * self._pause, _LONGEST_REST)
            return nothing
        self._pause = 1
        chosen = [0] * len(running)
        for _, index in ranked[:n_chosen]:
            chosen[index] += 1
        return [[token for token, _ in offer[:n]] for offer, n in zip(offers, chosen, strict=True)]

    def checked(self, n_rows: int, drafted: int, accepted: int, seconds: float) -> None:
        """Record a tick's duration, and the numbers of checked and accepted drafts."""
        self._ticks.add(n_rows + drafted, seconds)
        self.drafted += drafted
        self.accepted += accepted

    def keep(self, sequence: SampledSequence) -> None:
        """Keep an answer for later requests with the same prompt."""
        if sequence.grammar is not None:
            return
        key, tokens = _key(sequence.prompt), np.array(sequence.tokens[:_ANSWER_TOKENS], np.int32)
        answers = self._answers.setdefault(key, deque())
        self._answers.move_to_end(key)
        answers.append((sequence.key, tokens))
        self._tokens += _size(answers[-1])
        if len(answers) > _ANSWERS:
            self._tokens -= _size(answers.popleft())
        while self._tokens > _KEPT_TOKENS:
            _, oldest = self._answers.popitem(last=False)
            self._tokens -= sum(map(_size, oldest))

    def forget(self, adapter: str) -> None:
        """Drop the answers of an adapter that has no versions left."""
        for key in [key for key in self._answers if key[2] == adapter]:
            self._tokens -= sum(map(_size, self._answers.pop(key)))

    def _draft(self, sequence: SampledSequence) -> list[tuple[int, float]]:
        if sequence.grammar is not None:  # a grammar's mask depends on the token before
            return []
        prompt, sampling = sequence.prompt, sequence.prompt.request.sampling
        known = self._continuations.get(prompt)
        if known is None:
            hits = self._hits.setdefault((prompt.request.job, sampling.temperature), _Hits())
            while len(self._hits) > _HITS:
                del self._hits[next(iter(self._hits))]
            known = _Continuations(prompt.request.prompt_ids, self._answers.get(_key(prompt), ()), hits)
            self._continuations[prompt] = known
        return known.draft(known.read(sequence), min(_LONGEST, sampling.max_tokens - len(sequence.tokens) - 1))

    def _worth(self, n_rows: int, likely: list[float]) -> int:
        """The number of drafts with the highest expected tokens per second; sometimes more, to measure the cost of rows."""
        self._trial += 1
        if self._trial % _TRIALS == 1:
            return sum(each >= _LIKELY for each in likely)
        best, most = 0, n_rows / self._ticks.of(n_rows) * _GAIN
        for n, hoped in enumerate(accumulate(likely), 1):
            rate = (n_rows + hoped) / self._ticks.of(n_rows + n)
            if rate > most:
                best, most = n, rate
        return best


def can_draft(base: LoraModel) -> bool:
    """Whether rejected rows have no side effects: on other rows, on states, or on blocks read past the end."""
    return not (base.info.inexact or base.stateful or base.attention.reads_past_end or base.arithmetic.graphs)


def _key(prompt: Prompt) -> Key:
    request = prompt.request
    adapter = "" if request.adapter is None else request.adapter.name
    return request.tenant, request.job, adapter, hashlib.sha256(request.prompt_ids.tobytes()).digest()


def _size(answer: tuple[int, IntArray]) -> int:
    return max(_LEAST_TOKENS, len(answer[1]))
