"""Find observers by name, before anything slow."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import cast

from motet.config.observer import ObserverConfig
from motet.core.errors import ConfigError
from motet.process.own_code import OwnCode
from motet.tracking.observing import ObserverFactory
from motet.tracking.trackers import TRACKERS

OWN = OwnCode("observer", ConfigError, tuple(TRACKERS))


def load(config: ObserverConfig) -> ObserverFactory:
    """The function that creates an observer for a job.

    Raises:
        ConfigError: there is no such observer, its package is not installed, or its arguments do not fit.
    """
    if config.function is None and config.name in TRACKERS:
        made = TRACKERS[config.name]
        try:
            importlib.import_module(made.package)
        except ImportError as error:
            raise ConfigError(
                f"observer {config.name}: {made.package} is not installed; run pip install '.[{config.name}]' in Motet's "
                f"directory ({error})"
            ) from error
        target: object = made
    else:
        target = OWN.find(config.name) if config.function is None else config.function
    if not callable(target):
        raise ConfigError(f"observer {config.name!r} is {type(target).__name__}; give a class or a function")
    try:
        inspect.signature(target).bind(None, **config.args)
    except TypeError as error:
        raise ConfigError(f"observer {config.name!r}, called with the job and args {config.args}: {error}") from error
    return cast(ObserverFactory, functools.partial(target, **config.args))
