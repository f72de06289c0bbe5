"""Every exception that Motet raises on purpose. Each message says what is wrong and what to do next.

MotetError
├── ConfigError        a job file, option or field is wrong: nothing has started
│   └── GraderError    a field of a grader is wrong, or not supported here
├── DataError          a data source or row cannot be used
├── RewardError        a reward cannot be loaded (a reward that fails on a rollout is data, not an exception)
├── BaseModelError     the base model cannot be loaded or failed its proof
├── AdapterError       an adapter directory or shape does not fit
├── EngineError        a request that an engine cannot serve
│   ├── ContextFull    a prompt and its new tokens are longer than the context
│   ├── ServerGone     a server does not answer
│   ├── ServerRefused  a server answers with an error
│   ├── ServerFault    a server's answer is wrong
│   └── ServerUnfit    a server has no room for the jobs
├── ScorerAway         a job's scorer is absent, and the job must pause
├── DeviceError        the device failed under several jobs at once: they resume from their last commits
├── DeviceLost         the device can do no more work: the run ends, commits are kept
│   └── RankGone       a process with a part of the base ended
├── JobFailed          a job fails; the others continue
├── ProbeError         the adapter that answers is not the adapter that was trained
├── StoreError         the service's database refuses something
├── LimitError         a limit of the service does not allow something
├── ServiceError       a service does not answer its client, or refuses something
└── RunError           a run directory cannot be used (locked, other job file, damaged)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class MotetError(Exception):
    """Base class of all errors with a message meant for people."""

    code = ""
    """The code by which clients of OpenAI's API know the error, if there is one."""


def for_scripts(call: Callable[P, T]) -> Callable[P, T]:
    """Let a function that scripts call raise errors for people without Motet's own frames: the message says all."""

    @functools.wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except MotetError as error:
            raise error.with_traceback(None) from None

    return called


class ConfigError(MotetError):
    """A job file, an option or a field is wrong."""


class GraderError(ConfigError):
    """A field of a grader is wrong, or asks for something that is not supported here."""

    def __init__(self, where: str, reason: str) -> None:
        """`where` is the field's path, with dots."""
        super().__init__(f"{where}: {reason}")
        self.where = where


class DataError(MotetError):
    """A data source or one of its rows cannot be used."""


class RewardError(MotetError):
    """A reward cannot be loaded or called."""


class EnvironmentFault(MotetError):
    """An environment cannot be used: its class does not load, or is not an environment."""


class ChatRefusal(MotetError):
    """A chat request cannot be answered.

    The message begins with the field's name if a field is wrong. The rollout of an agent continues.
    """


class WallError(MotetError):
    """A process cannot be put behind a wall."""


class BaseModelError(MotetError):
    """The base model cannot be loaded, or failed the proof at load."""


class AdapterError(MotetError):
    """An adapter directory or shape does not fit the base."""


class EngineError(MotetError):
    """A request that the engine cannot serve."""


class ContextFull(EngineError):
    """A prompt and its new tokens are longer than the context. Clients look for these words and this code."""

    code = "context_length_exceeded"

    def __init__(self, n_prompt: int, n_new: int, most: int, cure: str = "", where: str = "") -> None:
        """`most` is the length of the context in tokens; `where` comes before the message, `cure` ends it."""
        super().__init__(
            f"{where}This model's maximum context length is {most} tokens. However, you requested {n_prompt + n_new} tokens "
            f"({n_prompt} in the prompt, {n_new} in the completion), and the prompt is too long for that; "
            f"{cure or 'shorten the prompt or ask for fewer tokens'}"
        )


class ServerGone(EngineError):
    """A server does not answer."""


class ServerRefused(EngineError):
    """A server answers with an error."""

    def __init__(self, message: str, status: int, detail: str) -> None:
        """`status` is HTTP's; `detail` is the server's message."""
        super().__init__(message)
        self.status = status
        self.detail = detail


class ServerFault(EngineError):
    """A server's answer is wrong."""


class ServerUnfit(EngineError):
    """A server has no room for the jobs; the message names the setting."""


class ScorerAway(MotetError):
    """A job's scorer is absent, and the job must pause; it resumes from its last commit."""


OF_SERVERS = (ServerGone, ServerRefused, ServerFault, ServerUnfit)
"""Faults of servers, perhaps temporary; any other EngineError is the request's fault."""


class DeviceError(MotetError):
    """The device failed while working for several jobs, so the cause is unknown."""


class HostGone(EngineError):
    """The host is not available, or stopped meanwhile; a retry may reach another one."""

    def __init__(self, reason: str = "") -> None:
        """Without a reason, the host is starting."""
        super().__init__(reason or "the engine is starting; try again in a moment")


class DeviceLost(MotetError):
    """The device can do no more work in this process; the run ends, and its jobs resume from their last commits."""

    def __init__(self, how: str) -> None:
        """`how` it was lost."""
        super().__init__(f"{how}. Nothing committed is lost: start again, and every job resumes from its last commit")


class RankGone(DeviceLost):
    """A process that holds a part of the base ended."""


class JobFailed(MotetError):
    """One job fails, with the reason; other jobs continue."""


class ProbeError(JobFailed):
    """The adapter that answers is not the adapter that was trained."""


class StoreError(MotetError):
    """The service's database cannot be opened, or refuses something."""


class LimitError(MotetError):
    """A limit of the service is exceeded; the message names the limit, its usage, and who can change it."""

    def __init__(self, message: str, status: int, seconds: int | None = None) -> None:
        """`status` is HTTP's: 403 if it will never fit, 429 if it may later, after `seconds` if known."""
        super().__init__(message)
        self.status, self.seconds = status, seconds


class ServiceError(MotetError):
    """A service does not answer, or refuses what its client asks."""

    def __init__(self, message: str, status: int = 0) -> None:
        """`status` is HTTP's; 0 without an answer."""
        super().__init__(message)
        self.status = status


class RunError(MotetError):
    """A run directory cannot be used: locked, damaged, or made from another job file."""


class DiskFull(RunError):
    """Something could not be written because the disk is full."""


class StorageFull(DiskFull):
    """Something was not stored because it exceeds its tenant's storage limit."""

    def __init__(self, message: str, needs: int) -> None:
        """`needs` is its size in bytes."""
        super().__init__(message)
        self.needs = needs
