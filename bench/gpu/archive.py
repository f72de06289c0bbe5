"""All that a session has to bring home, in one file of at most 16 MB."""

from __future__ import annotations

import io
import tarfile
import zlib
from pathlib import Path

MOST_BYTES = 16 * 2**20
NAME = "gpu-quarter.tar.gz"
_MOST_OF_A_FILE = 2 * 2**20
"""Bytes of a file; of longer ones the end is packed."""
_OVERHEAD = 1024
_PATTERNS = ("*.md", "*.json", "*.log", "*.spy", "*.profile.txt", "demo/**/*.log", "demo/**/status.json")
"""In order of worth."""


def pack(place: Path, most: int = MOST_BYTES) -> Path:
    """Write the archive of a folder of results; files that do not fit are left out, those of least worth first."""
    files = list(dict.fromkeys(file for pattern in _PATTERNS for file in sorted(place.glob(pattern)) if file.is_file()))
    room, half = most - _OVERHEAD, place / f".{NAME}"
    with tarfile.open(half, "w:gz") as archive:
        for file in files:
            content = file.read_bytes()[-_MOST_OF_A_FILE:]
            room_for_it = len(zlib.compress(content)) + _OVERHEAD
            if room_for_it > room:
                continue
            room -= room_for_it
            entry = tarfile.TarInfo(str(file.relative_to(place)))
            entry.size, entry.mtime = len(content), int(file.stat().st_mtime)
            archive.addfile(entry, io.BytesIO(content))
    return half.rename(place / NAME)
