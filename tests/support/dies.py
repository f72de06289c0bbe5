"""Own code that kills its process with SIGKILL the first times that it is asked for something."""

DIES_OFTEN = """
import os
import signal
from pathlib import Path


def dies(what):
    died = Path(f"{where}/{what}")
    before = died.read_text() if died.exists() else ""
    if len(before) < times:
        died.write_text(before + "x")
        os.kill(os.getpid(), signal.SIGKILL)
"""
"""Needs `where`, a directory, and `times`."""
