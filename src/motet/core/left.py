"""Fields that left the configuration, and what to do instead of each.

A file that uses one is refused with that, or told that it has no effect. Stored configurations and old files are read as if
values that ask for nothing were not there.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
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


_SPECULATE = Left("leave it out; results are the same bits", idle=(True,), ignored="engine.speculate")
_NUMERICS = Left(
    "leave it out; jobs that began with other numerics than exact begin anew, or resume with --accept-changes",
    idle=("exact",),
)
_WHOLE = (
    "leave it out, or use it under `eval` or in `motet chat`: tokens that cannot be drawn would bias the importance ratios of "
    "training"
)
_OF_A_KEY = "write {}, which limits all keys of a tenant together, and raise it if a tenant has several busy keys"
LEFT: Mapping[str, Mapping[str, Left]] = {
    "EngineConfig": {"speculate": _SPECULATE, "numerics": _NUMERICS},
    "ServedBase": {"speculate": replace(_SPECULATE, ignored="bases.speculate"), "numerics": _NUMERICS},
    "SamplingConfig": {name: Left(_WHOLE, idle=(idle,)) for name, idle in (("top_p", 1), ("top_k", 0), ("min_p", 0))},
    "LaunchConfig": {
        "dtype": Left('write `args: ["--dtype", "bfloat16"]`', idle=("auto",)),
        "max_positions": Left('write `args: ["--max-model-len", "4096"]`, for SGLang `--context-length`', idle=(0,)),
        "max_loras": Left('write `args: ["--max-loras", "8"]`, for SGLang `--max-loras-per-batch`', idle=(0,)),
        "max_cpu_loras": Left(
            'write `args: ["--max-cpu-loras", "64"]`, for SGLang `--max-loaded-loras`; a service whose jobs have '
            "max_off_policy_steps above 4 names servers of its own in rollout.urls", idle=(0,),
        ),
        "lora_backend": Left('write `args: ["--lora-backend", "csgmv"]`', idle=("triton",)),
        "stream_interval": Left(
            'write `args: ["--stream-interval", "16"]`', idle=(8,), ignored="rollout.launch.stream_interval"
        ),
        "preload": Left(
            "the system keeps the base's files in memory; to read a copy, make one and write `args: [\"--model\", COPY]`, "
            "for SGLang `--model-path`",
            ignored="rollout.launch.preload",
        ),
    },
    "RolloutConfig": {
        "agents": Left(
            "vLLM fetches versions by `publish_by: tensors`; SGLang and releases of vLLM that are not tested read them from "
            "`rollout.directory`, which all machines must share, and systemd restarts such servers",
            idle=(None, []),
        ),
        "keep_versions": Left(
            "servers unload versions that nothing needs; load one again from its directory in the run",
            ignored="rollout.keep_versions",
        ),
        "request_seconds": Left("a completion has 1,800 s", idle=(1800,), ignored="rollout.request_seconds"),
        "health_seconds": Left(
            "servers are asked every 5 s, or more often with a rollout.patience_seconds below 60", idle=(5,),
            ignored="rollout.health_seconds",
        ),
        "publish_seconds": Left(
            "a version has a tenth of rollout.patience_seconds to load, but at least a minute", idle=(60,),
            ignored="rollout.publish_seconds",
        ),
        "verify_tls": Left("name the certificates to trust in rollout.ca_file", idle=(True,)),
    },
    "JobConfig": {
        "race": Left(
            "train longer with `lr: auto`, which is better first, or search settings with examples/search.py; candidates of "
            "earlier races are ordinary jobs",
            idle=(None, False),
        ),
    },
    "HttpConfig": {
        "header_seconds": Left("it is a third of http.body_seconds", idle=(10,), ignored="http.header_seconds"),
        "work_memory_mb": Left("each process may use 1,024 MB", idle=(1024,), ignored="http.work_memory_mb"),
        **{f"{name}_per_key": Left(_OF_A_KEY.format(f"{name}_per_tenant")) for name in ("requests", "streams")},
    },
    "OidcConfig": {
        "client_secret": Left("give the secret in the environment variable MOTET_OIDC_SECRET", idle=("",)),
        "name_claim": Left(
            "people are named by the first of preferred_username, email, name and sub", idle=("",),
            ignored="oidc.name_claim",
        ),
    },
}  # fmt: skip
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
