"""What both clients' methods have in common."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from motet.service.schemas import Job
from motet.types import JobState


def as_method(call: Callable[..., Any]) -> inspect.Signature:
    """What `help` shows of a method that asks this."""
    found = inspect.signature(call)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    answer = str(found.return_annotation).removeprefix("Call[").removesuffix("]")
    return found.replace(parameters=[own, *found.parameters.values()], return_annotation=answer)


def ended(job: Job) -> bool:
    """Whether nothing more will happen to a job."""
    return JobState(job.state).final
