"""A file system of a given size, for tests of full disks."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """A file system in memory; needs root, or sudo without a password."""
    path.mkdir()
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    options = f"size={size},uid={os.geteuid()}"
    mount = [*sudo, "mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    try:
        subprocess.run(mount, capture_output=True, check=True)
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("mounting a small file system needs root or sudo")
    try:
        yield path
    finally:
        subprocess.run([*sudo, "umount", path], check=True)
