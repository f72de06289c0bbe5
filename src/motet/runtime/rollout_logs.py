"""The rollout logs of a job: `<step>.jsonl`, and `eval-<version>.jsonl`, which is written before the step of its number."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_NAME = re.compile(r"(eval-)?(\d+)\.jsonl")
_FIRST = "eval-0.jsonl"


def in_order(names: Iterable[str]) -> list[str]:
    """The rollout logs among these files, in the order of writing; their times would differ in a copy."""
    found = {name: match for name in names if (match := _NAME.fullmatch(name))}
    return sorted(found, key=lambda name: (int(found[name][2]), not found[name][1]))


def prune_logs(folder: Path, most_bytes: float) -> None:
    """Delete the oldest logs; keep the newest log, and the first and the newest evaluation."""
    logs = in_order(path.name for path in folder.iterdir())
    kept = {_FIRST, *logs[-1:], *[name for name in logs if name.startswith("eval-")][-1:]}
    sizes = {name: (folder / name).stat().st_size for name in logs if name != _FIRST}
    total = sum(sizes.values())
    for name in (one for one in logs if one not in kept):
        if total <= most_bytes:
            break
        total -= sizes[name]
        (folder / name).unlink()
