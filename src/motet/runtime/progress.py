"""What is told of a job: its events, and its live progress, which its loops or its host's messages write and views read."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from motet.config import JobConfig
from motet.core.types import JobState
from motet.process.channel import ChannelMessage
from motet.rewards.reward_elsewhere import weights_of
from motet.runtime.diagnoses import Diagnoses
from motet.runtime.held_out import REWARD, figure_of
from motet.runtime.metrics import BESIDE

_EVALUATION_ALONE = {"step", "version", "eval", "tokens_sampled", "tokens_trained", *BESIDE}
"""Fields of a job's last line, which belongs to no step."""
STOPPED_EARLY = "stopped early"
"""What the message of a job begins with that a rule of `stop_when` ended."""
_REPORT_SECONDS = 1.0
"""Seconds between reports of open work, because each is written to a database."""


class JobChanged(ChannelMessage, frozen=True):
    """A job has a new state or message."""

    job: str
    state: JobState
    message: str
    """The reason, or a notice for a person."""
    inexact: list[str] | None = None
    """Why its bytes may depend on more than the job; None before it was checked."""
    spent: bool = False  # whether the job is paused because its budget is spent
    key: str = ""
    """Unique for each event of a host, so that an event sent twice is stored once."""
    tokens: int = 0  # as of `JobStanding`


class JobStepped(ChannelMessage, frozen=True):
    """A step of a job is done, or its last version evaluated."""

    job: str
    line: dict[str, Any]
    """The line of metrics.jsonl, with the step's tokens and, if this process trained it, its seconds."""
    best: bool = False  # whether it evaluates what is the best version so far, by the rule `best_by`
    best_by: str = ""


class JobWorked(ChannelMessage, frozen=True):
    """A part of a step is done, whether or not the step is ever finished."""

    job: str
    step: int  # the version that the step started from
    tokens: int  # tokens trained in the step so far, times the targets of each
    sampled: int = 0  # tokens sampled so far that are in no finished step


class Obeyed(ChannelMessage, frozen=True):
    """A command of a job's client is done; its outcome is in the job's journal."""

    job: str


JobEvent = JobChanged | JobStepped | JobWorked | Obeyed


class JobStanding(msgspec.Struct, frozen=True):
    """The progress of a running job, as its host sends it."""

    phase: str
    """`sampling`, `scoring 12/64`, `training`, `evaluating` or `saving`."""
    step: int
    rollouts_done: int  # in the step that is being sampled
    rollouts_wanted: int
    tokens: int
    """Tokens sampled and trained on this host."""
    tokens_per_second: float
    seconds_left: float | None
    host: int | None = None
    warnings: list[str] = []


@dataclass
class UnderWay:
    """Rollouts of steps, or of evaluations, that are sampled or scored now."""

    begun: int = 0
    """Since none was under way."""
    open: int = 0
    scoring: int = 0
    """Of the open ones."""
    scored_alone: float = 0.0
    """Seconds in which all that were open were scored, and nothing was sampled."""
    _since: float = math.nan

    def _look(self) -> None:
        now = time.monotonic()
        if not math.isnan(self._since):
            self.scored_alone += now - self._since
        self._since = now if 0 < self.open == self.scoring else math.nan

    @contextlib.contextmanager
    def sampled(self, n: int) -> Iterator[None]:
        """While n rollouts are sampled and scored."""
        self.begun, self.open = (self.begun if self.open else 0) + n, self.open + n
        self._look()
        try:
            yield
        finally:
            self.open -= n
            self._look()

    @contextlib.contextmanager
    def scored(self, n: int) -> Iterator[None]:
        """While n of them are scored."""
        self.scoring += n
        self._look()
        try:
            yield
        finally:
            self.scoring -= n
            self._look()


@dataclass
class JobProgress:
    """Current progress of one job."""

    name: str
    steps: int
    """Steps configured."""
    state: JobState = JobState.QUEUED
    step: int = 0
    """Steps done."""
    phase: str = ""
    """Current activity: `sampling`, `training`, `evaluating`, `saving`."""
    rollouts_done: int = 0
    """Of the step that is being sampled."""
    rollouts_wanted: int = 0
    training: UnderWay = field(default_factory=UnderWay)
    held_out: UnderWay = field(default_factory=UnderWay)
    rewards: list[float] = field(default_factory=list)
    """Mean of `figure` for each step done; higher is better."""
    figure: str = REWARD
    """`reward`; without rewards `log-lik`, the mean log-likelihood of an answer token; for preferences `accuracy`."""
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    """(version, figure of the held-out problems)."""
    errors: list[float] = field(default_factory=list)
    """Standard error of each evaluation; nan if unknown."""
    best_version: int | None = None
    """The best version, as the job's commits say; None before a trained version was evaluated."""
    best_by: str = ""
    """The rule that decides it (`Committed.best_by`)."""
    diagnoses: Diagnoses = field(default_factory=Diagnoses)
    """Warnings derived from the metrics."""
    tokens: int = 0
    """Tokens sampled and trained in this process."""
    started: float = 0.0
    """Monotonic start time; 0 before."""
    first_step: int = 0
    """Step at which the job began to run, or to run again."""
    first_tokens: int = 0
    """`tokens` at that step."""
    message: str = ""
    """Reason of a failure, or a notice."""
    inexact: list[str] = field(default_factory=list)
    """Why bytes may differ from a solo run; reasons are only added."""
    spent: bool = False
    """Whether it is paused because its budget is spent."""
    setting: str = ""
    """Equal for jobs that differ only in their seed; empty if unknown."""
    next_line: int = 0
    """The step of the next metrics line; a host sends lines again that another one sent."""
    counted: int = 0
    """`tokens` of its host that are counted."""

    @classmethod
    def of(cls, config: JobConfig, setting: str = "") -> JobProgress:
        """Progress of a job that has not begun."""
        settings = config.model_dump(mode="json", include={"algorithm", "optimizer", "sampling", "steps"})
        diagnoses = Diagnoses(weights_of(config.rewards), settings)
        return cls(config.name, config.steps, diagnoses=diagnoses, setting=setting)

    def take_up(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add what an earlier process recorded."""
        for line in lines:
            self.next_line = int(line["step"]) + 1
            if not line.keys() <= _EVALUATION_ALONE:
                self.stepped(line)
            if "eval" in line:
                self.evaluated(int(line["step"]), line["eval"])  # of the version that the step started from

    def evaluated(self, version: int, evaluation: Mapping[str, Any]) -> None:
        """Add the `eval` part of a line."""
        error = evaluation.get("reward_stderr")
        if self.evaluations and self.evaluations[-1][0] == version:  # again, in a step that was cut
            del self.evaluations[-1], self.errors[-1]
        self.evaluations.append((version, figure_of(evaluation)[1]))
        self.diagnoses.see_evaluation(version, evaluation)
        self.errors.append(math.nan if error is None else float(error))

    def choose(self, best: int | None, by: str) -> None:
        """Take in which version is the best so far, and by which rule."""
        self.best_version, self.best_by = best, by
        self.diagnoses.choose(best)

    def stepped(self, line: Mapping[str, Any]) -> None:
        """Add the line of a finished step."""
        self.figure, value = figure_of(line)
        self.rewards.append(value)
        self.diagnoses.see(line)

    def hear(self, event: JobEvent) -> None:
        """Follow a job that another process runs."""
        if isinstance(event, JobStepped) and (step := int(event.line["step"])) >= self.next_line:
            self.next_line = step + 1
            if "loss" in event.line:
                self.stepped(event.line)
                self.step = step + 1
            if "eval" in event.line:
                self.evaluated(step, event.line["eval"])
                self.choose(step if event.best else self.best_version, event.best_by)
        elif isinstance(event, JobChanged):
            self.state, self.message, self.phase, self.spent = event.state, event.message, "", event.spent
            self.inexact = self.inexact if event.inexact is None else event.inexact
            if self.state is JobState.RUNNING:  # on a host that counts from here
                self.counted = event.tokens
            self._count(event.tokens)
            if self.state is JobState.RUNNING and not self.started:
                self.begin(self.step)

    def see(self, standing: JobStanding) -> None:
        """Take in a host's report; nothing once the job runs no more, when its host's last report may still be there."""
        if self.state is JobState.RUNNING:
            self._count(standing.tokens)
            self.phase = standing.phase
            self.rollouts_done, self.rollouts_wanted = standing.rollouts_done, standing.rollouts_wanted

    def _count(self, tokens: int) -> None:
        self.tokens += max(0, tokens - self.counted)
        self.counted = max(tokens, self.counted)

    def begin(self, step: int) -> None:
        """Count rates from now on: the job runs, or runs again, from `step`."""
        self.step = self.first_step = step
        self.first_tokens, self.started = self.tokens, time.monotonic()

    @property
    def status(self) -> dict[str, Any]:
        """What status.json of the job's directory says."""
        return {"state": self.state.value, "message": self.message, "inexact": list(self.inexact)}

    @property
    def open(self) -> bool:
        """Whether the job has work left that it may do."""
        return not self.state.final and not self.spent

    @property
    def standing(self) -> JobStanding:
        """The progress as it is sent."""
        return JobStanding(
            phase=self.activity,
            step=self.step,
            rollouts_done=self.rollouts_done,
            rollouts_wanted=self.rollouts_wanted,
            tokens=self.tokens,
            tokens_per_second=round(self.tokens_per_second, 1),
            seconds_left=self.seconds_left,
            warnings=list(self.diagnoses.warnings.values()),
        )

    @property
    def activity(self) -> str:
        """`phase`; while nothing is sampled and rewards run, `scoring 12/64`."""
        busy = [part for part in (self.training, self.held_out) if part.open]
        if self.phase not in ("sampling", "evaluating") or not busy or any(part.scoring < part.open for part in busy):
            return self.phase
        if self.training.open:
            return f"scoring {self.rollouts_done}/{self.rollouts_wanted}"
        return f"scoring {self.held_out.begun - self.held_out.open}/{self.held_out.begun} (evaluation)"

    @property
    def stopped_early(self) -> bool:
        """Whether a rule of `stop_when` ended the job."""
        return self.state is JobState.SUCCEEDED and self.message.startswith(STOPPED_EARLY)

    @property
    def tokens_per_second(self) -> float:
        """Mean since the job began to run."""
        seconds = time.monotonic() - self.started if self.started else 0.0
        return (self.tokens - self.first_tokens) / seconds if seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimate from the steps done so far; None before the first."""
        done = self.step - self.first_step
        if not self.started or done <= 0:
            return None
        return (time.monotonic() - self.started) / done * (self.steps - self.step)


class OpenWork:
    """Tokens of a job in no finished step yet. They are charged when they are done, also if their step never ends."""

    def __init__(self, report: Callable[[], None]) -> None:
        """`report` is called when there is more, at intervals."""
        self._report = report
        self.sampled = 0
        """For any step or evaluation that is not finished."""
        self.trained = 0
        """In the current step."""
        self._reported = (0, 0)
        self._at = time.monotonic()

    def add(self, *, sampled: int = 0, trained: int = 0) -> None:
        """Count tokens that were just sampled or trained."""
        self.sampled += sampled
        self.trained += trained
        if time.monotonic() - self._at >= _REPORT_SECONDS:
            self.report()

    def finished(self, sampled: int) -> None:
        """A step or an evaluation is recorded, with all tokens that were sampled for it."""
        self.sampled = max(0, self.sampled - sampled)
        self.trained = 0
        self._reported = (self.sampled, self.trained)

    def report(self) -> None:
        """Report what is not reported."""
        self._at = time.monotonic()
        if (now := (self.sampled, self.trained)) != self._reported:
            self._reported = now
            self._report()
