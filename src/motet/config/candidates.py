"""The candidates of a race: their settings, and the versions at which the race decides. Pure functions of the job."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from motet.algorithms.policy_gradient import PolicyGradient
from motet.config.chain import check_chains
from motet.config.job import NAME_PATTERN, JobConfig
from motet.config.race import RaceConfig, ValueList, ValueRange
from motet.core import seeds
from motet.core.errors import ConfigError
from motet.core.section import Config

_RATE = "optimizer.lr_multiplier"
_BY_HAND, _AUTO = ValueRange(low=0.1, high=10), ValueRange(low=0.333, high=3)
"""Factors on a learning rate that was chosen by hand, and on `auto`."""
_RANK = {"adapter.rank": ValueList(values=[8, 16, 32, 64])}
_GROUP = {"algorithm.group_size": ValueList(values=[4, 8, 16])}
_CLIP = {"algorithm.clip_high": ValueList(values=[0.2, 0.28, 0.4])}
_LEAST_FIRST = 3
"""Steps before the first decision, unless `race.first` is set."""


@dataclass(frozen=True)
class RaceCopy:
    """A candidate that begins at a decision, from the state of another one and with another learning rate."""

    name: str
    of: str
    """The candidate that it continues."""
    step: int
    """Steps that this one had done."""
    factor: float
    """On the learning rate of this one."""
    tokens: int = 0
    """That this one had sampled and trained."""


@dataclass(frozen=True)
class RacePlan:
    """A race before it begins."""

    name: str
    settings: RaceConfig
    steps: int
    """Steps of a candidate that trains to the end."""
    candidates: tuple[JobConfig, ...]
    """Ordinary jobs; the first has the settings of the job as it is written."""
    values: Mapping[str, Mapping[str, Any]]
    """By candidate: the settings that differ, by field."""
    rungs: tuple[tuple[int, int], ...]
    """(version whose evaluation decides, candidates that continue), in order."""

    def stop(self, rung: int) -> int | None:
        """Steps after which candidates wait for decision `rung`; None after the last.

        The evaluation of a version is recorded with the step that starts from it.
        """
        return self.rungs[rung][0] + 1 if rung < len(self.rungs) else None

    def own_places(self, keep: int) -> int:
        """How many of the places after a decision candidates keep; copies get the others."""
        return math.ceil(keep / 2) if self.settings.exploit else keep

    def copies(self, best: Sequence[str], keep: int, rung: int, first: int) -> list[RaceCopy]:
        """The candidates that begin at decision `rung`: the best one with each factor, then the second one, and so on.

        They get the `keep` places that `best`, the candidates that continue, leave; the number of the first copy is `first`.
        """
        step = self.stop(rung) or self.steps
        pairs = [(of, factor) for of in best for factor in self.settings.exploit][: keep - len(best)]
        return [
            RaceCopy(_copy_name(self.name, number, of, factor), of, step, factor)
            for number, (of, factor) in enumerate(pairs, first)
        ]

    @property
    def total_steps(self) -> int:
        """The most steps of all candidates together."""
        total, live, before = 0, len(self.candidates), 0
        for rung, (_, keep) in enumerate(self.rungs):
            stop = self.stop(rung) or self.steps
            total, live, before = total + live * (stop - before), keep, stop
        return total + live * (self.steps - before)


def raced(jobs: Sequence[JobConfig]) -> tuple[list[JobConfig], list[RacePlan]]:
    """Replace each job that races by its candidates. Raises ConfigError if one cannot race."""
    plans = {job.name: plan(job, job.race) for job in jobs if job.race is not None}
    for job in jobs:
        init = job.adapter.init or ""
        if init in plans or init.rpartition("@")[0] in plans:
            raise ConfigError(
                f"job {job.name}: adapter.init names {init!r}, which is a race; start from the race's winner in another run"
            )
    found = [one for job in jobs for one in (plans[job.name].candidates if job.name in plans else (job,))]
    try:
        check_chains(found)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return found, [*plans.values()]


def candidates_of(jobs: Sequence[JobConfig]) -> list[JobConfig]:
    """The jobs of a file and all candidates of their races; for a job without `race`, those of `motet run --race`."""
    known = list(jobs)
    for job in jobs:
        with contextlib.suppress(ConfigError):  # it cannot race
            known += plan(job, job.race or RaceConfig()).candidates
    return known


def plan(job: JobConfig, race: RaceConfig) -> RacePlan:
    """Draw the candidates of a job. Raises ConfigError if it cannot race."""
    _check(job)
    n, rungs, every = race.candidates, *_rungs(job, race)
    drawn = {path: _draw(job, path, choice, n - 1) for path, choice in (race.over or _space(job)).items()}
    given = [{}, *({path: column[number] for path, column in drawn.items()} for number in range(n - 1))]
    candidates = [_candidate(job, number, values, every) for number, values in enumerate(given)]
    for one in candidates:
        _check(one)
    values = {one.name: {path: functools.reduce(getattr, path.split("."), one) for path in drawn} for one in candidates}
    return RacePlan(job.name, race, job.steps, tuple(candidates), values, rungs)


def copied(job: JobConfig, copy: RaceCopy) -> JobConfig:
    """The job of a copy: an ordinary one, whose learning rate changes at the step where it began."""
    before = {step: factor for step, factor in job.optimizer.lr_factors.items() if step <= copy.step}
    later = {step: factor for step, factor in job.optimizer.lr_factors.items() if step > copy.step}
    last = before[max(before)] if before else 1.0
    factors = {**before, copy.step: last * copy.factor, **{step: one * copy.factor for step, one in later.items()}}
    rounded = {step: float(f"{factor:.6g}") for step, factor in factors.items()}
    return job.model_copy(update={"name": copy.name, "optimizer": _with(job.optimizer, ["lr_factors"], rounded)})


def _copy_name(job: str, number: int, of: str, factor: float) -> str:
    parent = of.removeprefix(f"{job}-c=").partition("-")[0]
    short = f"{job}-c={number:02d}"
    name = f"{short}-of={parent}-times={factor:g}"
    return name if NAME_PATTERN.fullmatch(name) else short


def _check(job: JobConfig) -> None:
    """Refuse jobs without reproducible rewards of held-out rows."""
    algorithm, where = job.algorithm, f"job {job.name}: race: "
    if job.team:
        raise ConfigError(f"{where}a race compares one adapter with others, and a team has several; use a sweep")
    if not isinstance(algorithm, PolicyGradient) or not algorithm.needs_rewards:
        raise ConfigError(
            f"{where}algorithm {algorithm.type} has no rewards of held-out rows, which a race compares; use an algorithm "
            "with rewards, or a sweep"
        )
    if job.data.holdout == 0 and job.data.eval_source is None:
        raise ConfigError(f"{where}a race compares held-out rows; set data.holdout above 0, or data.eval_source")
    if algorithm.over_provision > 1 or algorithm.in_flight == "continue":
        raise ConfigError(
            f"{where}algorithm.over_provision and in_flight: continue depend on the clock, and decisions must not; leave "
            "them out"
        )
    if job.budget is not None:
        raise ConfigError(f"{where}`budget` would stop single candidates; set race.budget for all of them together")
    if job.stop_when.rules:
        raise ConfigError(f"{where}`stop_when` would end single candidates between decisions; leave it out")
    if mistake := algorithm.mistake(job.sampling.max_tokens):
        raise ConfigError(f"{where}{mistake}")


def _rungs(job: JobConfig, race: RaceConfig) -> tuple[tuple[tuple[int, int], ...], int]:
    """The rungs, and the steps between evaluations.

    The last decision is half way; each one before it comes `keep_one_in` times sooner, but none before `first`.
    """
    steps, given = job.steps, "every" in job.eval.model_fields_set
    if given and job.eval.every == 0:
        raise ConfigError(f"job {job.name}: race: evaluations decide; set eval.every above 0, or leave it out")
    first = race.first or max(_LEAST_FIRST, round(steps / 4) - 1)
    unit = job.eval.every if given else first
    first, keeps, live = math.ceil(first / unit) * unit, [], race.candidates
    last = min(race.finalists, race.candidates - 1)
    while live > last:
        live = max(last, math.ceil(live / race.keep_one_in))
        keeps.append(live)
    rungs = dict[int, int]()
    for place, keep in enumerate(keeps):
        wanted = steps / (2 * race.keep_one_in ** (len(keeps) - 1 - place)) - 1
        rungs.setdefault(max(first, round(wanted / unit) * unit), keep)
    if max(rungs) + 1 >= steps:
        raise ConfigError(
            f"job {job.name}: race: {steps} steps are too few, as the last decision needs {max(rungs) + 1}; raise steps, or "
            "lower race.first or eval.every"
        )
    return tuple(sorted(rungs.items())), unit


def _space(job: JobConfig) -> dict[str, ValueRange | ValueList]:
    """The fields that a race varies by default; the clip only if several updates reuse a batch."""
    clip = _CLIP if job.rl.updates_per_batch > 1 and job.rl.loss != "gspo" else {}
    rate = {_RATE: _AUTO if job.optimizer.lr == "auto" else _BY_HAND}
    return {**rate, **({} if job.adapter.init else _RANK), **_GROUP, **clip}


def _draw(job: JobConfig, path: str, choice: ValueRange | ValueList, n: int) -> list[Any]:
    """One value for each drawn candidate: every part of a range, and every value of a list, comes about equally often."""
    order = seeds.permutation(seeds.key(job.effective_seed, f"race/{path}"), n).tolist()
    if isinstance(choice, ValueList):
        return [choice.values[place * len(choice.values) // n] for place in order]
    key, ratio = np.full(n, seeds.key(job.effective_seed, f"race/{path}"), np.uint64), choice.high / choice.low
    within = seeds.uniforms(key, np.arange(n, 2 * n, dtype=np.uint64)).tolist()
    return [
        float(f"{choice.low * ratio ** ((place + part) / n):.2g}") for place, part in zip(order, within, strict=True)
    ]


def _candidate(job: JobConfig, number: int, given: Mapping[str, Any], every: int) -> JobConfig:
    """An ordinary job. All share the seed of the job, so they see the same problems, unless they race over seeds."""
    if type(given.get("seed", 0)) is not int:
        raise ConfigError(
            f"job {job.name}: race.over: seed {given['seed']!r} is not a whole number; list whole numbers"
        )
    labels = [f"{path.rpartition('.')[2]}={value}" for path, value in given.items()]
    names = ("-".join([f"{job.name}-c={number:02d}", *labels[:shown]]) for shown in range(len(labels), -1, -1))
    name = next((one for one in names if NAME_PATTERN.fullmatch(one)), None)
    if name is None:
        raise ConfigError(
            f"job {job.name}: race: the job's name leaves no room for the endings of candidates' names; shorten it"
        )
    evaluation = _with(_with(job.eval, ["every"], every), ["confirm"], True)
    fields = {"name": name, "seed": job.effective_seed, "race": None, "eval": evaluation}
    one = job.model_copy(update=fields)
    for path, value in given.items():
        section, _, rest = path.partition(".")
        try:
            changed = _with(getattr(one, section), rest.split("."), value) if rest else int(value)
        except (ValidationError, AttributeError, ValueError, TypeError) as error:
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise ConfigError(f"job {job.name}: race.over.{path}: {value!r} cannot be used: {why}") from error
        one = one.model_copy(update={section: changed})
    if "algorithm.group_size" in given and "algorithm.groups_per_step" not in given:  # keep the rollouts of a step
        groups = max(1, round(job.rl.group_size * job.rl.groups_per_step / one.rl.group_size))
        one = one.model_copy(update={"algorithm": _with(one.algorithm, ["groups_per_step"], groups)})
    return one


def _with(section: Config, path: Sequence[str], value: Any) -> Config:
    """A section with another value, validated."""
    field, *below = path
    changed = _with(getattr(section, field), below, value) if below else value
    return type(section).model_validate({**section.model_dump(exclude_unset=True), field: changed})
