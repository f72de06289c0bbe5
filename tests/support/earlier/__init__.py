"""Files that commit 10c3bf87 left when it was killed halfway: see scripts/make_earlier.py."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
KNOWN: dict[str, Any] = json.loads((_HERE / "known.json").read_text())
"""The adapters of undisturbed jobs by sha256, the processor that gave them; the service's keys, jobs and usage."""


def unpack(name: str, target: Path) -> Path:
    """`project`: job file, data, reward and run directory; `served`: a service's directory."""
    with tarfile.open(_HERE / f"{name}.tar.xz") as archive:
        archive.extractall(target, filter="data")
    return target / name
