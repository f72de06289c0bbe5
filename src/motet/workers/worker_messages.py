"""Messages to and from processes that run a user's code: it is loaded once, then called; each call has one reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from motet.core.errors import MotetError
from motet.process.channel import ChannelMessage

Limit = Literal["", "cpu", "memory"]
"""The limit that a call hit; its process should get no further calls then."""


class WorkerMessage(ChannelMessage, frozen=True, kw_only=True):
    """A message of one call."""

    call: int = 0
    """Number of the call; its reply has the same."""


class LoadCode(WorkerMessage, frozen=True, kw_only=True):
    """The first message: what is to be called."""

    import_path: list[str]
    walled: bool = False
    """Whether calls run behind a wall."""

    @property
    def of_others(self) -> bool:
        """Whether the code is that of somebody who may not use this machine as they like."""
        return False


class StopCall(WorkerMessage, frozen=True):
    """Stop a call that is no longer awaited; only that call has a reply."""


class WorkerReply(WorkerMessage, frozen=True):
    """The reply to a call."""

    def fits(self, request: WorkerMessage) -> bool:
        """Whether it can be a reply to `request`: a user's code may write anything to the pipe."""
        raise NotImplementedError

    def too_long(self, request: WorkerMessage, error: Exception) -> WorkerReply | None:
        """The reply instead of this one, which is too long; None if there is none."""
        return None


class LoadRefused(WorkerReply, frozen=True):
    """Loading failed; the text says why."""

    error: str

    def fits(self, request: WorkerMessage) -> bool:
        """Whether something was to be loaded."""
        return isinstance(request, LoadCode)


@dataclass(frozen=True)
class Calls:
    """What a process is for."""

    module: str
    """It has `MESSAGES`, the union of those to the process, and `load`, which returns a reply and what answers calls."""
    kind: str
    """`reward`, `environment` or `agent`, for messages."""
    replies: Any
    """The union of its replies."""
    refused: type[MotetError]
    """The error if it does not load."""
    at_once: bool = False
    """Whether it takes many calls at once, without limits of processor and memory; otherwise one at a time."""
