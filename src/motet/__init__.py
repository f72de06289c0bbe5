"""Motet trains many LoRA adapters at once by reinforcement learning, each for its own job, over one frozen base model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from motet.process.mkl import add_in_one_order

__version__ = "0.2.0"

add_in_one_order()

if TYPE_CHECKING:
    from motet.client import AsyncClient, Client
    from motet.commands.check import check
    from motet.config import EngineConfig, JobConfig, RunConfig
    from motet.config.jobfile import load_jobs
    from motet.core.batch import AdamW
    from motet.core.errors import MotetError
    from motet.core.types import Message, Problem, Rollout
    from motet.hosts.running import run
    from motet.hosts.verbs import Verbs
    from motet.observe.results import JobResult, RunResult

_HOMES = {
    "motet.core.batch": ("AdamW",),
    "motet.client": ("AsyncClient", "Client"),
    "motet.commands.check": ("check",),
    "motet.config": ("EngineConfig", "JobConfig", "RunConfig"),
    "motet.core.errors": ("MotetError",),
    "motet.config.jobfile": ("load_jobs",),
    "motet.observe.results": ("JobResult", "RunResult"),
    "motet.hosts.running": ("run",),
    "motet.core.types": ("Message", "Problem", "Rollout"),
    "motet.hosts.verbs": ("Verbs",),
}

__all__ = [
    "AdamW",
    "AsyncClient",
    "Client",
    "EngineConfig",
    "JobConfig",
    "JobResult",
    "Message",
    "MotetError",
    "Problem",
    "Rollout",
    "RunConfig",
    "RunResult",
    "Verbs",
    "__version__",
    "check",
    "load_jobs",
    "run",
]


def __getattr__(name: str) -> Any:
    """Import public names when they are first used, so that `import motet` is quick."""
    import importlib

    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'motet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
