"""Files that two commits left when they were killed halfway, by the commit: see scripts/make_earlier.py."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
OTHER_RULES = {"10c3bf87": 0, "595e64a6": 3}
"""The commits whose jobs go on by other rules than today's, with the numbers of those rules."""
SAME_RULES = "d7a18f17"
"""The commit with today's rules."""
FIRST, *_ = COMMITS = (*OTHER_RULES, SAME_RULES)
KNOWN: dict[str, dict[str, Any]] = {
    commit: json.loads((_HERE / commit / "known.json").read_text()) for commit in COMMITS
}
"""The adapters of undisturbed jobs by sha256, the processor that gave them; the service's keys, jobs and usage."""


def unpack(commit: str, name: str, target: Path) -> Path:
    """`project`: job file, data, reward and run directory; `served`: a service's directory."""
    with tarfile.open(_HERE / commit / f"{name}.tar.xz") as archive:
        archive.extractall(target, filter="data")
    return target / name
