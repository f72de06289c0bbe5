"""A job as the runtime knows it, and the one table of its transitions."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from motet.batch import LossFunctions
from motet.config import EnvironmentConfig, JobConfig
from motet.device import Device, used_by
from motet.errors import MotetError
from motet.protocols import RolloutEngine, Trainer, WeightSync
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.learner import Learner
from motet.runtime.progress import JobProgress
from motet.runtime.scheduler import FairScheduler
from motet.runtime.start_turns import StartTurns
from motet.runtime.storage_room import StorageRoom
from motet.tasks.chat import Chat
from motet.tasks.dataset import Dataset
from motet.tasks.episode import OwnEnvironment
from motet.tasks.reward_pool import RewardPool
from motet.types import JobState, SamplingParams

Result = TypeVar("Result")


@dataclass(frozen=True)
class StateChanged:
    """A job has another state, or another message with it."""

    state: JobState
    message: str
    """Why, or what a person should know."""
    inexact: tuple[str, ...]
    """Why its bytes may depend on more than itself."""


@dataclass(frozen=True)
class StepDone:
    """A step is done, or the last version evaluated."""

    line: Mapping[str, Any]
    """Of metrics.jsonl, with the tokens of the step and, where it was trained in this process, its seconds."""


@dataclass(frozen=True)
class Executed:
    """A part of a step that a client drives was done, whether or not the step comes."""

    step: int
    """The version that it started from."""
    tokens: int
    """All of the step so far, times their targets."""


@dataclass(frozen=True)
class CommandObeyed:
    """A command of the job's client is done."""


JobEvent = StateChanged | StepDone | Executed | CommandObeyed
JobObserver = Callable[[JobEvent], None]


def _unobserved(event: JobEvent) -> None:
    """Drop the event."""


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
    """What every job of a run shares, put together by `launch`."""

    engine: RolloutEngine
    trainer: Trainer
    sync: WeightSync
    device: Device
    scheduler: FairScheduler
    learner: Learner
    rewards: RewardPool
    micro_batch_tokens: int
    probe_tolerance: float
    """Largest mean logprob difference between engine and trainer at a publish; 0 where they share tensors and are exact."""
    engine_suffix: str
    """`{run id}.{attempt}`, so that engine-side names never repeat."""
    keep_versions: int | None = None
    """Versions that an engine keeps besides those that are needed; 0 keeps all."""
    threads: int = 0
    """Torch threads; 0 where there is no torch."""
    positions: int = 0
    """Of the base's longest sequence."""
    vocabulary: int = 0
    """Tokens that the base knows."""
    functions: LossFunctions | None = None
    """What the trainer's losses compute with; None is torch's."""
    room: StorageRoom = field(default_factory=StorageRoom)
    agents: Callable[[str, EnvironmentConfig], OwnEnvironment] | None = None
    """The agent of a job that runs elsewhere; None where there is no elsewhere."""

    @functools.cached_property
    def starts(self) -> StartTurns:
        """Whose turn it is to start a job."""
        return StartTurns(self.scheduler.others)

    async def on_device(self, job: str, call: Callable[[], Result]) -> Result:
        """Run a trainer call of one job in the device's turn; its time is that job's."""
        with used_by(job, *self.scheduler.payer(job)):
            return await self.device.run(call)


@dataclass
class Job:
    """One job of a run: what was asked for, resolved, and where it stands."""

    config: JobConfig
    data: Dataset
    chat: Chat
    directory: JobDirectory
    base_rate: float
    """The learning rate before warm-up and schedule."""
    stop_token_ids: tuple[int, ...]
    progress: JobProgress
    inexact: list[str] = field(default_factory=list)
    """Why bytes may differ from a solo run; grows, never shrinks."""
    starts: int = 0
    """How often the job took a slot in this process: part of engine-side names."""
    restarts: int = 0
    """How often it was taken up again after a fault of the device."""
    held: bool = False
    """Whether the rule of its tenant paused it; it resumes with that rule."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there may be something that the job waits for."""
    observer: JobObserver = _unobserved
    tenant: str = ""
    """Whose job it is; a run without a service has one tenant."""
    before: Job | None = None
    """The job of this run that has to succeed first, because this one goes on with its adapter."""
    before_version: str = "best"
    """Which version of it: `best`, `latest`, or its number."""
    until: int | None = None
    """Steps after which it waits for a decision of its race; None where it trains to the end."""

    @property
    def name(self) -> str:
        """The job's name; its adapter's too."""
        return self.config.name

    @property
    def seed(self) -> int:
        """The job's seed."""
        return self.config.effective_seed

    @property
    def state(self) -> JobState:
        """Where the job stands."""
        return self.progress.state

    @property
    def arrived(self) -> bool:
        """Whether it waits for a decision of its race."""
        return self.until is not None and self.progress.step >= self.until

    def move(self, state: JobState, message: str = "") -> None:
        """Change state and record it.

        Raises:
            MotetError: the table does not allow it.
        """
        if state not in TRANSITIONS[self.state]:
            raise MotetError(f"job {self.name!r} is {self.state} and cannot become {state}")
        self.progress.state = state
        self.progress.message = message
        self.progress.phase = ""
        self.observer(StateChanged(state, message, tuple(self.inexact)))
        self.directory.write_status({"state": state.value, "message": message, "inexact": list(self.inexact)})

    def note(self, text: str) -> None:
        """Tell a person something until the job has another state, beside why it has this one; once."""
        if text not in self.progress.message:
            self.progress.message = f"{self.progress.message}; {text}" if self.progress.message else text
            self.observer(StateChanged(self.state, self.progress.message, tuple(self.inexact)))

    def sampling(self) -> SamplingParams:
        """How training rollouts are drawn."""
        given = self.config.sampling
        return SamplingParams(
            temperature=given.temperature,
            max_tokens=given.max_tokens,
            stop=tuple(given.stop),
            stop_token_ids=self.stop_token_ids,
        )

    def evaluation_sampling(self) -> SamplingParams:
        """How evaluation rollouts are drawn."""
        given = self.config.eval
        return replace(
            self.sampling(), temperature=given.temperature, top_p=given.top_p, top_k=given.top_k, min_p=given.min_p
        )

    def init_directory(self) -> Path:
        """The PEFT directory that the adapter starts from."""
        assert self.config.adapter.init is not None
        if self.before is not None:
            return self.before.directory.version_named(self.before_version)
        return Path(os.path.expanduser(self.config.adapter.init))

    def evaluates(self, version: int) -> bool:
        """Whether this version is evaluated: the first, the last, and every so many."""
        if not self.data.holdout:
            return False
        every = self.config.eval.every
        return version in (0, self.config.steps) or (every > 0 and version % every == 0)

    def note_inexact(self, reason: str) -> None:
        """Remember that the job's bytes may depend on more than itself."""
        if reason not in self.inexact:
            self.inexact.append(reason)
