"""The rollout logs of a job: `<step>.jsonl`, and `eval-<version>.jsonl`, which is written before the step of its number."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable
from pathlib import Path

_NAME = re.compile(r"(eval-)?(\d+)\.jsonl")
_FIRST = "eval-0.jsonl"


def prefix(evals: bool) -> str:
    """The beginning of a log's name."""
    return "eval-" if evals else ""


def in_order(names: Iterable[str]) -> list[str]:
    """The rollout logs among these files, in the order of writing; their times would differ in a copy."""
    found = {name: match for name in names if (match := _NAME.fullmatch(name))}
    return sorted(found, key=lambda name: (int(found[name][2]), not found[name][1]))


def rollout_sums(checksums: Path, length: int) -> dict[str, str]:
    """sha256 of each rollout file that the first `length` bytes of checksums.jsonl list, in the order of writing."""
    lines = map(json.loads, checksums.read_bytes()[:length].splitlines())
    return {entry["file"]: entry["sha256"] for entry in lines}


def prune_logs(folder: Path, most_bytes: float) -> None:
    """Delete the oldest logs; keep the newest log, and the first and the newest evaluation."""
    logs = in_order(path.name for path in folder.iterdir())
    kept = {_FIRST, *logs[-1:], *[name for name in logs if _is_evaluation(name)][-1:]}
    sizes = {name: (folder / name).stat().st_size for name in logs if name != _FIRST}
    total = sum(sizes.values())
    for name in (log for log in logs if log not in kept):
        if total <= most_bytes:
            break
        total -= sizes[name]
        (folder / name).unlink()


def must_be_there(logs: Iterable[str], there: Container[str]) -> list[str]:
    """The logs that pruning leaves, if the oldest step and the oldest evaluation that are there are its oldest.

    An evaluation is deleted after all steps before it. A step may be deleted before the newest evaluation, which stays.
    """
    ordered = in_order(logs)
    found = [name for name in ordered if name in there and name != _FIRST]
    evaluations = [name for name in ordered if _is_evaluation(name)]
    step = next((name for name in found if not _is_evaluation(name)), None)
    evaluation = next((name for name in found if _is_evaluation(name)), None)
    kept = {_FIRST, *ordered[-1:]}
    kept |= set(ordered[ordered.index(step) :]) if step else set()
    kept |= set(evaluations[evaluations.index(evaluation) :]) if evaluation else set()
    return [name for name in ordered if name in kept]


def _is_evaluation(name: str) -> bool:
    return name.startswith(prefix(evals=True))
