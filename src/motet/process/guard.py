"""Ends what another process leaves when this program's input ends, also because the process that started both was killed.

`run COMMAND …` runs a command, and ends it with its group. `remove DIRECTORY` gets a worker's process id as input; it ends
the worker's session and removes the directory. It uses only the standard library, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

END_SECONDS = 10.0
"""Seconds between SIGTERM and SIGKILL."""
_REMOVE_SECONDS = 2.0


def run(command: list[str]) -> int:
    """Run the command; returns its exit status."""
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"Error: {command[0]} cannot be run: {error.strerror}", flush=True)
        return 127
    threading.Thread(target=_end_with_input, args=(child,), daemon=True).start()
    status = child.wait()
    _kill_others(os.getpgrp(), os.getpgid)
    return status if status >= 0 else 128 - status


def remove(directory: str) -> int:
    """Kill all processes of the worker's session, which programs behind the wall cannot leave, and remove the directory."""
    worker, until = sys.stdin.read(), time.monotonic() + _REMOVE_SECONDS
    killed = set[int]()
    while time.monotonic() < until:
        found = _kill_others(int(worker), os.getsid) - killed if worker else set[int]()
        killed |= found
        shutil.rmtree(directory, ignore_errors=True)
        if not found and not os.path.exists(directory):  # what was killed may write until it is gone
            break
        time.sleep(0.02)
    return 0


def _end_with_input(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 1024):
        pass
    child.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + END_SECONDS
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # kills the guard too: it leads the group


def _kill_others(leader: int, leader_of: Callable[[int], int]) -> set[int]:
    """Kill every other process of a group or session; there is no /proc on other systems."""
    found = set[int]()
    with contextlib.suppress(OSError):
        for process in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                if process != os.getpid() and leader_of(process) == leader:
                    os.kill(process, signal.SIGKILL)
                    found.add(process)
    return found


if __name__ == "__main__":
    sys.exit(run(sys.argv[2:]) if sys.argv[1] == "run" else remove(sys.argv[2]))
