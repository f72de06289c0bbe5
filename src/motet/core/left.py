"""Fields that left the configuration, and what to do instead of each.

A file that uses one is refused with that, or told that it has no effect. Stored configurations and old files are read as if
values that ask for nothing were not there.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Left:
    """A field that left."""

    cure: str
    """What to do instead, as the end of a message."""
    idle: tuple[Any, ...] = (None,)
    """Values that ask for nothing."""
    ignored: str = ""
    """Its name as users write it, if no value ever changed a result: then none is refused, and those that are not idle get a
    line of notice."""


class LeftNotice(FutureWarning):
    """The notice about a field that has no effect any more."""


_SPECULATE = "leave it out; results are the same bits"
LEFT: Mapping[str, Mapping[str, Left]] = {
    "EngineConfig": {"speculate": Left(_SPECULATE, idle=(True,), ignored="engine.speculate")},
    "ServedBase": {"speculate": Left(_SPECULATE, idle=(True,), ignored="bases.speculate")},
    "RolloutConfig": {
        "agents": Left(
            "vLLM fetches versions by `publish_by: tensors`; SGLang and releases of vLLM that are not tested read them from "
            "`rollout.directory`, which all machines must share, and systemd restarts such servers",
            idle=(None, []),
        ),
    },
    "JobConfig": {
        "race": Left(
            "train longer with `lr: auto`, which is better first, or search settings with examples/search.py; candidates of "
            "earlier races are ordinary jobs",
            idle=(None, False),
        ),
    },
}
"""By section, as the name of its class."""


def without_idle(section: str, tree: Any) -> Any:
    """Return the tree of a section without fields that left and ask for nothing."""
    left = LEFT.get(section)
    if left is None or not isinstance(tree, dict):
        return tree
    kept = {}
    for name, value in tree.items():
        if name in left and left[name].ignored and value not in left[name].idle:
            said = f"{left[name].ignored} has no effect any more: {left[name].cure}"
            warnings.warn(said, LeftNotice, stacklevel=2)
        elif name not in left or value not in left[name].idle:
            kept[name] = value
    return kept
