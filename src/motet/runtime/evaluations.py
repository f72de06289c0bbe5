"""The held-out evaluations of a job in order, and what they say about its training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from motet.runtime.held_out import ACCURACY, REWARD, figure_of, unchanged

CHANCE = 2.0
"""Standard errors that a difference must exceed: chance alone does that in one of forty comparisons."""
RISE = 0.05
"""Rise of the held-out loss above its least, as a part of it: the same rows are scored each time, so that little is noise."""
NOTHING, HARDLY = "nothing was learned", "hardly learned"
"""How the sign of a job that ended without having learned begins."""


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of one version."""

    version: int
    figure: float
    """Held-out reward, accuracy or log-likelihood."""
    error: float
    """Its standard error; inf if unknown."""
    loss: float
    """NaN if the job samples answers."""

    def __str__(self) -> str:
        return f"{self.figure:.2f} (v{self.version})"


@dataclass
class Evaluations:
    """All evaluations of a job."""

    by_version: dict[int, Evaluation] = field(default_factory=dict)
    """In order; without those that have no figure."""
    name: str = REWARD
    """Of the figure."""
    untrained: int = 0
    """The last version that equals the adapter that the job began with."""
    chosen: int | None = None
    """The best version, as the job's commits say."""

    def see_step(self, line: Mapping[str, Any]) -> None:
        """Take in the line of a step."""
        if unchanged(line) and line["step"] == self.untrained:
            self.untrained += 1

    def add(self, version: int, evaluation: Mapping[str, Any]) -> None:
        """Take in the `eval` part of a line; without a figure it says nothing."""
        name, figure = figure_of(evaluation)
        if not math.isfinite(figure):
            return
        error, rows = (_number(evaluation.get(part)) for part in ("reward_stderr", "rows"))
        if name == ACCURACY and rows > 0:
            error = math.sqrt(max(figure * (1 - figure), 0.0) / rows)
        loss = _number(evaluation.get("loss", evaluation.get("nll")))
        self.name = name
        self.by_version[version] = Evaluation(version, figure, error if math.isfinite(error) else math.inf, loss)

    @property
    def newest(self) -> int:
        """The newest version with a figure; -1 without one."""
        return next(reversed(self.by_version), -1)

    def worse(self) -> str:
        """Where the newest version is worse than the best one, or all are worse than the untrained one, beyond chance."""
        first, best, last = self._untrained, self._best, self.by_version.get(self.newest)
        if best is None or last is None:
            return ""
        if first and self._is_trained(best.version) and first.figure - best.figure > self._chance(first, best):
            return (
                f"v{best.version}, the best trained version, is worse on held-out problems than v{first.version}, which is "
                f"untrained ({best.figure:.2f} against {first.figure:.2f}): training did harm, take no version of it"
            )
        if not best.figure - last.figure > CHANCE * math.hypot(best.error, last.error):
            return ""
        return (
            f"v{last.version} is worse on held-out problems than v{best.version} ({last.figure:.2f} against "
            f"{best.figure:.2f}): take v{best.version}"
        )

    def fallen(self) -> tuple[float, float] | None:
        """The first and the newest figure, where the newest is lower by more than chance explains."""
        first, last = next(iter(self.by_version.values()), None), self.by_version.get(self.newest)
        if (
            first is None
            or last is None
            or not first.figure - last.figure > CHANCE * math.hypot(first.error, last.error)
        ):
            return None
        return first.figure, last.figure

    def untrained_best(self) -> str:
        """Where the best version equals the adapter that the job began with: an earlier release allowed that."""
        best, trained = self._best, max(self._trained, key=lambda result: result.figure, default=None)
        if best is None or self._is_trained(best.version):
            return ""
        other = f"; the best trained one has held-out {self.name} {trained}" if trained else ""
        return (
            f"the best version, v{best.version}, is untrained: it equals the adapter that the job began with, and was chosen "
            f"by the rule of the release that began the job{other}"
        )

    def flat(self, least: int) -> str:
        """For a job that has ended: where no step changed it, or `least` steps made it no better by more than chance."""
        first, best = self._untrained, self._best
        if first is None or self.worse() or self.untrained_best():
            return ""
        if self.newest <= self.untrained:
            return f"{NOTHING}: no step changed the adapter, and every version equals the one that the job began with"
        if best is None or self.newest < least or best.figure - first.figure > self._chance(first, best) / CHANCE:
            return ""
        return f"{HARDLY}: held-out {self.name} {first} untrained, {best} for the best version, which may be chance"

    def loss(self, slower: str) -> tuple[str, bool]:
        """Where the held-out loss of rows rises, and whether it is above that of the untrained adapter.

        `slower` says how to lower the rate. A larger `beta` is no cure: with the same answers the loss of preferences grows.
        """
        losses = {version: result.loss for version, result in self.by_version.items() if math.isfinite(result.loss)}
        if len(losses) < 2:
            return "", False
        least = min(losses, key=lambda version: losses[version])
        (first, at_first), (last, now) = next(iter(losses.items())), next(reversed(losses.items()))
        if not now - losses[least] > RISE * abs(losses[least]):
            return "", False
        before = f"; v{first} had {at_first:.2f}" if first != least else ""
        shorter = f", or set steps to {least}" if self._is_trained(least) else ""
        return (
            f"the held-out loss rises ({losses[least]:.2f} at v{least} to {now:.2f} at v{last}{before}): {slower}{shorter}"
        ), now > at_first

    @property
    def _best(self) -> Evaluation | None:
        """That of the best version; of the best trained one where nothing says which version is the best."""
        if self.chosen is not None:
            return self.by_version.get(self.chosen)
        return max(self._trained, key=lambda result: result.figure, default=None)

    @property
    def _trained(self) -> list[Evaluation]:
        return [result for result in self.by_version.values() if self._is_trained(result.version)]

    @property
    def _untrained(self) -> Evaluation | None:
        """The first evaluation, if its version is untrained."""
        return next((result for result in self.by_version.values() if not self._is_trained(result.version)), None)

    def _is_trained(self, version: int) -> bool:
        return version > self.untrained

    @staticmethod
    def _chance(first: Evaluation, other: Evaluation) -> float:
        """A difference that chance explains; a hundredth of the figure where no error is known."""
        error = math.hypot(first.error, other.error)
        return CHANCE * (error if math.isfinite(error) else abs(first.figure) / 100)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
