"""The section `observers`: observers of steps, such as experiment trackers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from motet.core.settings import Config
from motet.core.suggestions import doubled_in


class ObserverConfig(Config):
    """Something that receives every step of every job. A plain string is the name."""

    name: str
    """`tensorboard`, `wandb`, `mlflow`, `trackio`, `swanlab` or `parquet`; `file.py:Class` or `module:Class` for your own."""
    args: dict[str, Any] = {}
    """Keyword arguments of the observer, such as `project` of `wandb`."""
    function: Any = Field(None, exclude=True)
    """The class or function, when the run is started from Python."""


def _spelled(value: Any) -> Any:
    """Expand one or several observers given by name or as objects."""
    if isinstance(value, str | dict) or callable(value):
        value = [value]
    return [_one(item) for item in value] if isinstance(value, list | tuple) else value


def _one(item: Any) -> Any:
    if isinstance(item, str):
        return {"name": item}
    if callable(item):
        return {"name": getattr(item, "__name__", type(item).__name__), "function": item}
    return item


def _have_names_of_their_own(observers: Sequence[ObserverConfig]) -> Sequence[ObserverConfig]:
    """Refuse repeated names: progress is stored by name."""
    if doubled := doubled_in(one.name for one in observers):
        raise ValueError(f"two observers have the name {doubled[0]!r}; keep one")
    return observers


Observers = Annotated[
    list[ObserverConfig], Field(fail_fast=True), BeforeValidator(_spelled), AfterValidator(_have_names_of_their_own)
]
