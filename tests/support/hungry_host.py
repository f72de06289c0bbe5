"""The process of a host that does nothing but die in the turn of its job `hungry`; a program of its own.

The run directory has `limit`, the file of its memory limit, and gets a line in `lives` for each process. The second one is
killed at an ordinary size; the others take memory until the system ends them.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from motet.core.types import JobState
from motet.hosts.messages import AddJob, HostReady, JobChanged, StartHost, ToHost
from motet.process.channel import Alive, Parent

MEGABYTES = 300
"""Its limit has to be below."""


def main() -> None:
    """Tell what a host tells."""
    parent = Parent[ToHost](ToHost)
    start: Any = parent.first()
    assert isinstance(start, StartHost)
    run = Path(start.run)
    lives = run / "lives"
    with lives.open("a") as out:
        out.write(f"{os.getpid()}\n")
    Path((run / "limit").read_text()).write_text(str(os.getpid()))
    parent.send(HostReady([]))
    begun = set[str]()
    while {"hungry", "neighbour"} - begun:
        message: Any = parent.first()
        if message is None:  # it is stopped
            return
        if isinstance(message, AddJob):
            begun.add(name := str(message.job["name"]))
            parent.send(JobChanged(name, JobState.RUNNING, ""))
    parent.send(Alive(0, 0, "hungry"))
    time.sleep(0.5)  # it is read
    if len(lives.read_text().split()) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    taken = [b"x" * (1 << 20) for _ in range(MEGABYTES)]
    raise AssertionError(f"{len(taken)} MB fit")


if __name__ == "__main__":
    main()
