"""Ends and removes what a worker leaves: `python worker_remains.py DIRECTORY`, with the worker's id as input.

It waits for the end of its input, so it also works if the process that started both is killed. Uses only the standard
library, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time

_SECONDS = 2.0


def main(directory: str) -> None:
    """Kill all processes of the worker's session, and remove the directory."""
    worker = sys.stdin.read()
    until, killed = time.monotonic() + _SECONDS, set[int]()
    while time.monotonic() < until:
        found = _session(int(worker)) - killed if worker else set[int]()
        for process in found:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        killed |= found
        shutil.rmtree(directory, ignore_errors=True)
        if not found and not os.path.exists(directory):  # what was killed may write until it is gone
            return
        time.sleep(0.02)


def _session(leader: int) -> set[int]:
    """The processes of a session, which programs behind the wall cannot leave."""
    found = set[int]()
    with contextlib.suppress(OSError):  # there is no /proc on other systems
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.getsid(int(name)) == leader:
                    found.add(int(name))
    return found


if __name__ == "__main__":
    main(sys.argv[1])
