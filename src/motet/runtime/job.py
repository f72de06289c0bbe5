"""A job as the runtime sees it, and the table of its state transitions."""

from __future__ import annotations

import asyncio
import functools
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from motet.chat.template import Chat
from motet.config import EnvironmentConfig, JobConfig
from motet.config.step_tokens import StepLimits
from motet.core.batch import LossFunctions
from motet.core.device import Device, used_by
from motet.core.errors import MotetError
from motet.core.token_ids import TokenIds
from motet.core.types import JobState, SamplingParams
from motet.data.dataset import Dataset
from motet.data.problems import RowTurns
from motet.environments.episode import OwnEnvironment
from motet.protocols import RolloutEngine, Trainer, WeightSync
from motet.rewards.reward_pool import RewardPool
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.finished_groups import FinishedGroups
from motet.runtime.learner import Learner
from motet.runtime.progress import JobChanged, JobEvent, JobProgress, JobWorked, OpenWork
from motet.runtime.scheduler import FairScheduler
from motet.runtime.slot_turns import StartTurns
from motet.runtime.storage_room import StorageRoom

Result = TypeVar("Result")


Agents = Callable[[str, EnvironmentConfig], OwnEnvironment]
"""Creates the environment of a job whose agent runs elsewhere."""


TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.PAUSED, JobState.CANCELLED, JobState.FAILED}),
    JobState.RUNNING: frozenset(
        {JobState.QUEUED, JobState.PAUSED, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}
    ),
    JobState.PAUSED: frozenset({JobState.QUEUED, JobState.CANCELLED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset({JobState.QUEUED}),
    JobState.CANCELLED: frozenset(),
}


@dataclass(frozen=True)
class Services:
    """Shared by all jobs of a host."""

    engine: RolloutEngine
    trainer: Trainer
    sync: WeightSync
    device: Device
    scheduler: FairScheduler
    learner: Learner
    rewards: RewardPool
    micro_batch_tokens: int
    probe_tolerance: float
    """Largest mean logprob difference between engine and trainer at a publish; 0 if they share tensors and are exact.
    """
    engine_suffix: str
    """`{run id}.{attempt}`, so that engine-side names never repeat."""
    threads: int = 0
    """Torch threads; 0 where their number changes no bit: without torch, and with own kernels."""
    positions: int = 0
    """Longest sequence of the base."""
    longest: int | None = None
    """Tokens of the longest sample for whose gradient there is memory; None if that is not known."""
    vocabulary: TokenIds = field(default_factory=lambda: TokenIds(0))
    """Token ids of the base."""
    functions: LossFunctions | None = None
    """Backend of the trainer's losses; None uses torch."""
    exact_logs: bool = False
    """Whether rollout logs hold exactly what is trained on, because rollouts cannot be sampled again (`recorded`)."""
    room: StorageRoom = field(default_factory=StorageRoom)
    steps: StepLimits = field(default_factory=StepLimits)
    rows: RowTurns = field(default_factory=RowTurns)
    agents: Agents | None = None
    """None if agents cannot run elsewhere."""

    @functools.cached_property
    def starts(self) -> StartTurns:
        """Limits how fast tenants start jobs."""
        return StartTurns(self.scheduler.others)

    async def on_device(self, job: str, call: Callable[[], Result]) -> Result:
        """Run a trainer call on the device; its time is charged to the job."""
        with used_by(job, *self.scheduler.payer(job)):
            return await self.device.run(call)


@dataclass
class Job:
    """One job of a run: its resolved configuration and its state."""

    config: JobConfig
    data: Dataset
    chat: Chat
    directory: JobDirectory
    base_rate: float
    """Learning rate before warm-up and schedule."""
    stop_token_ids: tuple[int, ...]
    progress: JobProgress
    starts: int = 0
    """Slots taken in this process; part of engine-side names."""
    restarts: int = 0
    """Restarts after device errors."""
    resumes: bool = False
    """Whether it had a slot when its host ended; its tenant does not rest after the next opening."""
    held: bool = False
    """Whether a rule of its tenant paused it; it resumes when the rule is lifted."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an event may have happened that the job waits for."""
    observer: Callable[[JobEvent], None] = lambda event: None
    """Called with each event; steps are plain JSON."""
    tenant: str = ""
    """Owner; empty in a run without a service."""
    before: Job | None = None
    """A job of this run that must succeed first, because this one starts from its adapter."""
    before_version: str = "best"
    """Which of its versions: `best`, `latest`, or a number."""
    notes: tuple[str, ...] = ()
    """What its message says when it begins, if nobody prints it."""
    keeps: object = None
    """What lives as long as a job needs it, such as data that jobs share."""
    finished: FinishedGroups = field(default_factory=FinishedGroups)
    """Groups of steps and evaluations that are not recorded yet; they stay while it waits without a slot."""

    def __post_init__(self) -> None:
        """Count its work from now on."""
        own = weakref.ref(self)  # no circle: its data is freed with its last user

        def report() -> None:
            if (job := own()) is not None:
                job.observer(JobWorked(job.name, job.progress.step, job.open_work.trained, job.open_work.sampled))

        self.open_work = OpenWork(report)

    @property
    def name(self) -> str:
        """Name of the job and of its adapter."""
        return self.config.name

    @property
    def seed(self) -> int:
        """The configured seed, or one derived from the job's name."""
        return self.config.effective_seed

    @property
    def state(self) -> JobState:
        """The current state."""
        return self.progress.state

    def move(self, state: JobState, message: str = "") -> None:
        """Change the state and record it.

        Raises:
            MotetError: the transition is not allowed.
        """
        if state not in TRANSITIONS[self.state]:
            raise MotetError(f"job {self.name!r} is {self.state} and cannot become {state}")
        self.progress.state = state
        self.progress.message = message
        self.progress.phase = ""
        self._tell()
        self.directory.write_status(self.progress.status)

    def note(self, text: str) -> None:
        """Append a notice to the message, once; it lasts until the state changes."""
        if text not in self.progress.message:
            self.progress.message = f"{self.progress.message}; {text}" if self.progress.message else text
            self._tell()

    def _tell(self) -> None:
        now, message = self.progress, self.progress.message
        if now.state is JobState.SUCCEEDED:
            message = message or "; ".join(now.diagnoses.warnings.values())
        self.observer(JobChanged(self.name, now.state, message, list(now.inexact), now.spent, tokens=now.tokens))

    def sampling(self) -> SamplingParams:
        """Sampling parameters for training."""
        given = self.config.sampling
        return SamplingParams(
            temperature=given.temperature,
            max_tokens=given.max_tokens,
            stop=tuple(given.stop),
            stop_token_ids=self.stop_token_ids,
        )

    def evaluation_sampling(self) -> SamplingParams:
        """Sampling parameters for evaluation."""
        given = self.config.eval
        return replace(
            self.sampling(), temperature=given.temperature, top_p=given.top_p, top_k=given.top_k, min_p=given.min_p
        )

    def init_directory(self) -> Path:
        """The PEFT directory of the initial adapter."""
        assert self.config.adapter.init is not None
        if self.before is not None:
            return self.before.directory.version_named(self.before_version)
        return Path(os.path.expanduser(self.config.adapter.init))

    @property
    def best_by(self) -> str:
        """The rule that decides the best version of a job that begins now."""
        by = self.config.algorithm.best_by
        return f"{by}, over the rows that decide" if self.config.eval.confirm else by

    def rate_of(self, role: str) -> float:
        """Learning rate of a role's adapter before warm-up and schedule; the job's without a team."""
        own = self.config.team[role].lr if role else None
        return self.base_rate if own is None else own

    def evaluates(self, version: int) -> bool:
        """Whether this version is evaluated: the first, the last, and every `eval.every`-th."""
        if not self.data.holdout:
            return False
        every = self.config.eval.every
        return version in (0, self.config.steps) or (every > 0 and version % every == 0)

    def note_inexact(self, reason: str) -> None:
        """Record a reason why the job's bytes may depend on more than the job."""
        if reason not in self.progress.inexact:
            self.progress.inexact.append(reason)
