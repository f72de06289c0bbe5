"""Runs a command until it ends or this program's own input ends; then ends the command and its child processes.

Uses only the standard library, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

END_SECONDS = 10.0
"""Seconds between SIGTERM and SIGKILL."""


def main(command: list[str]) -> int:
    """Run the command; returns its exit status."""
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"Error: {command[0]} cannot be run: {error.strerror}", flush=True)
        return 127
    threading.Thread(target=_end_with_input, args=(child,), daemon=True).start()
    status = child.wait()
    _signal_others(signal.SIGKILL)
    return status if status >= 0 else 128 - status


def _end_with_input(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 1024):
        pass
    child.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + END_SECONDS
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # kills the guard too: it leads the group


def _signal_others(number: signal.Signals) -> None:
    """Signal every other process of the group, including ones that the command left behind."""
    own = os.getpid()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != own:
                with contextlib.suppress(OSError):
                    if os.getpgid(int(name)) == os.getpgrp():
                        os.kill(int(name), number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
