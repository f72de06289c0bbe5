"""Diagnoses from the lines of metrics.jsonl: what may be wrong with a training, why, and what to do.

A diagnosis is an alarm only where the held-out reward falls too; otherwise it is a hint. Thresholds are chosen so that healthy
runs are silent: below, each has its reason.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, variance
from typing import Any

from motet.runtime.answer_signs import CUT_OFF, NO_SIGNAL, Earned, in_thought, is_near, it_is, no_signal
from motet.runtime.evaluations import CHANCE, Evaluations

Line = Mapping[str, Any]
PAGE = "docs/not-learning.md"
"""The page on causes and remedies; each kind of diagnosis has an anchor there."""
RECENT = 10
"""Steps that a diagnosis looks back on: the reward of fewer is mostly noise."""
LEAST = 5
"""Steps before the first diagnosis, and how many at each end are compared."""
FAR = 1.0
"""KL to the reference in nats per token, beyond that at the start. A run that improves may pass it, as one of the demo does:
it is not judged."""
LONGER = 2.0
"""Factor between the mean lengths of answers, in either direction: healthy answers settle within it or improve."""
ALIKE = 0.5
"""Share of distinct answers, as a part of the share at first. A run that improves may fall further: it is not judged."""
IDENTICAL = 1.1
"""Distinct answers in a group: nearly every group has only one."""
ENTROPY = 0.1
"""Entropy as a part of that at first: less leaves nothing to explore."""
PART_LOST = 0.5
"""What is left of one part of a summed reward while another part rises: less is no trade but a sacrifice."""
FIRST_COEF = 0.01
"""Weight of the penalty to begin with, where a job has none."""
NORM = 1.5
"""Growth of the adapter's norm over the recent steps: the first ten of the demo, where it grows most, reach 1.1."""
_NEVER_ALARMS = ("failed", "no-signal", "never", "thought", "flat", "untrained")
"""They say that nothing is learned, not that something wrong is."""


@dataclass(frozen=True)
class Diagnosis:
    """What may be wrong, with its cause or remedy."""

    kind: str
    """Anchor on the page."""
    says: str
    alarm: bool
    """Whether the held-out reward falls too."""

    def __str__(self) -> str:
        return f"{'alarm' if self.alarm else 'hint'}: {self.says} ({PAGE}#{self.kind})"


@dataclass
class Diagnoses:
    """The first and the newest steps of one job."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """Of rewards, by the names of their parts; those of weight 0 are measured and not trained on."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """The job's settings, as job.yaml has them: `algorithm`, `optimizer`, `sampling`, `steps`; those left out are unknown."""
    first: list[Line] = field(default_factory=list)
    recent: deque[Line] = field(default_factory=lambda: deque(maxlen=RECENT))
    kl: float | None = None
    """The newest KL to the reference that was measured."""
    kl_at_start: float = 0.0
    """That of version 0: of an adapter that began elsewhere."""
    earned: Earned = field(default_factory=Earned)
    rollouts: int = 0
    """Of all steps."""
    failed: int = 0
    """Those without a reward."""
    errors: Counter[str] = field(default_factory=Counter)
    """Rollouts by the reason why they have no reward, where it is known."""
    peak: tuple[int, float, float] | None = None
    """The step with the highest mean reward of those with signal, that reward and its standard error."""
    held_out: Evaluations = field(default_factory=Evaluations)
    _warnings: dict[str, str] | None = field(default=None, init=False, repr=False, compare=False)
    """None where something came since they were derived; views ask for them more often than steps end."""

    def see(self, line: Line) -> None:
        """Take in the next step's line, with its `errors` where they are known."""
        self.held_out.see_step(line)
        if "no_signal" not in line:
            return
        self._warnings = None
        if len(self.first) < LEAST:
            self.first.append(line)
        self.recent.append(line)
        self.kl = next(_numbers([line], "kl_base"), self.kl)
        if self.kl is not None and line.get("version") == 0:
            self.kl_at_start = self.kl
        self.earned.see(line)
        self.rollouts += int(next(_numbers([line], "rollouts"), 0))
        self.failed += int(next(_numbers([line], "failed"), 0))
        if isinstance(errors := line.get("errors"), Mapping):
            self.errors.update({str(reason): int(n) for reason, n in errors.items() if isinstance(n, int)})
        reward, share = _mean([line], "reward"), _mean([line], "no_signal")
        if share < NO_SIGNAL and not reward <= (self.peak or (0, -math.inf))[1]:
            spread, n = next(_numbers([line], "reward_std"), 0.0), next(_numbers([line], "rollouts"), math.inf)
            self.peak = int(line.get("step", 0)), reward, spread / math.sqrt(max(n, 1))

    def see_evaluation(self, version: int, evaluation: Line) -> None:
        """Take in the held-out figure of a version."""
        self._warnings = None
        self.held_out.add(version, evaluation)

    def choose(self, version: int | None) -> None:
        """Take in which version is the best so far."""
        self._warnings = None
        self.held_out.chosen = version

    @property
    def warnings(self) -> dict[str, str]:
        """Each diagnosis as one line for people, by kind."""
        if self._warnings is None:
            self._warnings = {diagnosis.kind: str(diagnosis) for diagnosis in self.diagnoses}
        return self._warnings

    @property
    def diagnoses(self) -> list[Diagnosis]:
        """What a person should look at."""
        held_out, risen = self.held_out, _risen(self.first, self.recent)
        found = {"failed": self._failed(), "worse": held_out.worse(), "untrained": held_out.untrained_best()}
        falls = bool(found["worse"])
        found["loss"], above = held_out.loss(self._slower)
        steps = self.job.get("steps")
        found["flat"] = held_out.flat(RECENT) if isinstance(steps, int) and LEAST <= steps <= held_out.newest else ""
        if risen and len(self.recent) == RECENT:
            found |= {"gamed": self._gamed(), "one-part": self._one_part()}
        rewarded = math.isfinite(_mean(self.recent, "reward"))
        if rewarded and len(self.recent) >= LEAST:
            found |= self._not_learning() if not risen else {"no-signal": self._left_to_learn()}
            found["never"] = self._never()
        if rewarded and len(self.recent) >= LEAST and (not risen or falls):
            found |= {
                "far": _far(self.kl, self.kl_at_start, self._section("algorithm"), self._slower),
                "length": self._length(),
            }
        if len(self.recent) >= LEAST:
            found["norm"] = self._norm()
        return [
            Diagnosis(kind, says, above if kind == "loss" else falls and kind not in _NEVER_ALARMS)
            for kind, says in found.items()
            if says
        ]

    def _not_learning(self) -> dict[str, str]:
        """Where the reward has not risen, what is missing; one sentence of those that have one cause."""
        answers, inside = (sum(_numbers(self.recent, name)) for name in ("rollouts", "in_thought"))
        if thought := in_thought(inside, answers, _mean(self.recent, "truncated"), self._section("sampling")):
            return {"thought": thought}
        unjudged = 0 < answers <= 2 * sum(_numbers(self.recent, "failed"))  # such groups show nothing of the problems
        if not unjudged and (lost := self._lost()):
            return {"lost": lost}
        if self._section("algorithm").get("teacher"):  # it teaches by each token, whatever the rewards are
            return {}
        if identical := self._identical():
            return {"identical": identical}
        return {
            "no-signal": "" if unjudged else self._no_signal(),
            "alike": self._alike(),
            "entropy": self._no_entropy(),
        }

    def _no_signal(self) -> str:
        share, reward, spread = (_mean(self.recent, name) for name in ("no_signal", "reward", "reward_std"))
        return no_signal(share, reward, spread, self._section("algorithm"), self.earned.seen)

    def _left_to_learn(self) -> str:
        """Where the reward has risen, and then stopped far below what an answer earned."""
        seen = self.earned.seen
        return "" if seen is None or is_near(_mean(self.recent, "reward"), seen) else self._no_signal()

    def _never(self) -> str:
        steps = self.job.get("steps")
        return self.earned.never(self.weights, min(RECENT, max(LEAST, steps)) if isinstance(steps, int) else RECENT)

    def _section(self, name: str) -> Mapping[str, Any]:
        section = self.job.get(name)
        return section if isinstance(section, Mapping) else {}

    @property
    def _slower(self) -> str:
        """Which field lowers the rate of each step: `optimizer.lr: auto` has no value to lower."""
        optimizer = self._section("optimizer")
        name = "lr_multiplier" if optimizer.get("lr") == "auto" else "lr"
        return f"lower optimizer.{name}{it_is(optimizer.get(name))}"

    @property
    def _warmer(self) -> str:
        return f"raise sampling.temperature{it_is(self._section('sampling').get('temperature'))}"

    @property
    def _newest(self) -> list[Line]:
        return list(self.recent)[-LEAST:]

    def _length(self) -> str:
        before, now = _mean(self.first, "length"), _mean(self._newest, "length")
        cut = _mean(self._newest, "truncated")
        ends = cut >= CUT_OFF and cut - _mean(self.first, "truncated") >= CUT_OFF / 2
        drifts = before > 0 and (now >= LONGER * before or now * LONGER <= before)
        if not (ends or drifts):
            return ""
        more = f", and {cut:.0%} end at max_tokens" if ends else ""
        return (
            f"the length of answers drifts ({before:.0f} to {now:.0f} tokens){more}, and they are not better: the reward may "
            "depend on length; read some answers"
        )

    def _norm(self) -> str:
        norms = list(_numbers([*list(self.recent)[:1], *self._newest[-1:]], "adapter_norm"))
        if len(norms) < 2 or not norms[1] >= NORM * norms[0]:
            return ""
        return (
            f"the adapter's norm runs away ({norms[0]:.3g} to {norms[1]:.3g} in {len(self.recent)} steps): {self._slower} "
            "and begin again"
        )

    def _identical(self) -> str:
        rollouts, groups, distinct = (_mean(self._newest, name) for name in ("rollouts", "groups", "distinct"))
        if not groups > 0 or not rollouts >= 2 * groups or not distinct * rollouts / groups <= IDENTICAL:
            return ""
        return (
            "all answers of a group are the same in nearly every group: nothing can be learned from them; "
            f"{self._warmer}, or {self._slower} and begin again"
        )

    def _one_part(self) -> str:
        """Where the reward rises by one part at the cost of another that is trained on too."""
        parts = {name: weight for name, weight in self.weights.items() if weight}
        ends = {name: tuple(_part(lines, name, parts[name]) for lines in (self.first, self._newest)) for name in parts}
        known = {name: (a, b) for name, (a, b) in ends.items() if len(a) > 1 and len(b) > 1}
        lost = [
            name
            for name, (a, b) in known.items()
            if fmean(a) > 0 and fmean(b) < PART_LOST * fmean(a) and fmean(a) - fmean(b) > CHANCE * _error(a, b)
        ]
        top = max(known, key=lambda name: fmean(known[name][1]) - fmean(known[name][0]), default="")
        if not lost or top in lost:
            return ""
        return (
            f"the reward rises by {top} alone ({_ends(*known[top])}) while {lost[0]} falls ({_ends(*known[lost[0]])}): "
            f"{top} outweighs it; set its weight to {parts[top] / 2:g}, or that of {lost[0]} to {2 * parts[lost[0]]:g}"
        )

    def _failed(self) -> str:
        if not self.failed:
            return ""
        why = f", commonest: {self.errors.most_common(1)[0][0]}" if self.errors else ""
        return f"{self.failed} of {self.rollouts} rollouts have no reward{why}"

    def _lost(self) -> str:
        """Where a reward that had signal fell to where nearly no group has any."""
        last = self._newest
        now, spread = _mean(last, "reward"), _mean(self.first, "reward_std")
        if self.peak is None or not _mean(last, "no_signal") >= NO_SIGNAL or not self.peak[1] - now > spread / 2:
            return ""
        if not self.peak[1] - now > CHANCE * self.peak[2]:  # a few rewards of a hard problem are no peak
            return ""
        return (
            f"had signal and lost it after step {self.peak[0]} (mean reward {self.peak[1]:.2g}, now {now:.2g}): the learning "
            f"rate is too high; {self._slower} and begin again"
        )

    def _alike(self) -> str:
        before, now = _mean(self.first, "distinct"), _mean(self.recent, "distinct")
        if not now <= ALIKE * before:
            return ""
        return (
            f"answers grow alike, and not better: {now:.0%} of a group's are distinct, at first {before:.0%}; "
            f"{self._slower}, or {self._warmer}"
        )

    def _no_entropy(self) -> str:
        before, now = _mean(self.first, "entropy"), _mean(self._newest, "entropy")
        if not (before > 0 and now <= ENTROPY * before):
            return ""
        return (
            f"the entropy is nearly gone ({before:.2g} to {now:.2g} nats per token), and the reward has not risen: nothing "
            f"new is tried; {self._slower} and begin again"
        )

    def _gamed(self) -> str:
        """What speaks against a reward that rises: a monitor or held-out rewards that fall, or answers that never end."""
        last, reasons = self._newest, []
        for name in [name for name, weight in self.weights.items() if not weight]:
            before, now = (_part(lines, name) for lines in (self.first, last))
            if len(before) > 1 and len(now) > 1 and fmean(before) - fmean(now) > CHANCE * _error(before, now):
                reasons.append(f"{name} falls ({_ends(before, now)})")
        if first_last := self.held_out.fallen():
            reasons.append(f"held-out reward falls ({first_last[0]:.2g} to {first_last[1]:.2g})")
        longer, cut = _mean(last, "length") > LONGER * _mean(self.first, "length"), _mean(last, "truncated")
        if longer and cut >= CUT_OFF > _mean(self.first, "truncated"):
            reasons.append(f"{cut:.0%} of the answers end at max_tokens")
        if not reasons:
            return ""
        return (
            f"the reward rises while {' and '.join(reasons)}: it may measure something else than you want; read the "
            "rollouts with the highest reward"
        )


def _far(kl: float | None, at_start: float, algorithm: Mapping[str, Any], slower: str) -> str:
    """Where the policy went far from its reference, which is no teacher."""
    if kl is None or not kl - at_start >= FAR or algorithm.get("teacher", "base") != "base":
        return ""
    penalty = algorithm.get("kl")
    penalty = penalty if isinstance(penalty, Mapping) else {}
    reference, coef = penalty.get("reference", "base"), penalty.get("coef")
    cure = f"raise algorithm.kl.coef{it_is(coef)}" if coef else f"set algorithm.kl.coef to {FIRST_COEF}"
    before = f" (at first {at_start:.2g})" if at_start >= FAR / 10 else ""
    if before and reference == "base" and "teacher" not in algorithm:  # it would be pulled back beyond where it began
        cure += " and set algorithm.kl.reference to start"
    of = f"the {reference}" if reference in ("base", "start") else "algorithm.kl.reference"
    return f"far from {of}: KL {kl:.2g} nats per token{before}; {slower}, or {cure}"


def _part(lines: Iterable[Line], name: str, weight: float = 1.0) -> list[float]:
    """What one part of the reward adds to it, in each of the lines that know it."""
    parts = (line.get("reward_parts") for line in lines)
    return [weight * value for value in _numbers((part for part in parts if isinstance(part, Mapping)), name)]


def _ends(before: Sequence[float], now: Sequence[float]) -> str:
    return f"{fmean(before):.2g} to {fmean(now):.2g}"


def _error(*samples: Sequence[float]) -> float:
    """Standard error of the difference between the means of two samples."""
    return math.sqrt(sum(variance(sample) / len(sample) for sample in samples))


def _risen(first: Sequence[Line], recent: Iterable[Line]) -> bool:
    """Whether the reward has risen by more than half of its spread: what then has no signal was learned."""
    newest = list(recent)[-LEAST:]
    spread = _mean([*first, *newest], "reward_std")
    return _mean(newest, "reward") - _mean(first, "reward") > spread / 2


def _mean(lines: Iterable[Line], key: str) -> float:
    known = list(_numbers(lines, key))
    return fmean(known) if known else math.nan


def _numbers(lines: Iterable[Line], key: str) -> Iterator[float]:
    for line in lines:
        value = line.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            yield float(value)
