"""The process: `python -m motet.hosting`."""

from __future__ import annotations

import asyncio
import json
import os
import select
import sys
import threading
import time
from pathlib import Path

from motet.config.service import Largest
from motet.errors import RunError
from motet.hosting.answers import reason
from motet.hosting.server import EngineServer
from motet.jobfile import validate
from motet.launch import warm_up
from motet.runtime.rundir import RunDirectory

_LOCK_SECONDS = 60.0


def main() -> None:
    """Load what is slow, then the base, say that all is ready, and serve until the input ends."""
    lines, out = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing that a library prints may pass for a message
    serving = threading.Event()
    threading.Thread(target=_end_with, args=(lines.fileno(), serving), name="motet-parent", daemon=True).start()
    warm_up()
    if not (first := lines.readline()):
        return
    hello = json.loads(first)
    installed, unwalled, patience = hello.pop("rewards"), hello.pop("unwalled"), hello.pop("patience_seconds")
    largest = Largest(**hello.pop("largest"))
    try:
        config = validate({**hello, "jobs": [{"name": "none", "data": "toy:add", "reward": "exact"}]}, "motet serve")
        server = EngineServer(config, _run_directory(Path(config.run)), out, installed, unwalled, patience, largest)
        serving.set()
        asyncio.run(server.serve(lines))
        server.workshop.close()
    except Exception as error:  # it is started again, and people hear of the reason meanwhile
        failure = reason(error)
        sys.stderr.write(f"{failure}\n")
        out.write(json.dumps({"failed": failure}).encode() + b"\n")
        out.flush()
    os._exit(0)


def _end_with(parent: int, serving: threading.Event) -> None:
    """End at once when the other process does while this one loads: the next engine needs the cores and the directory."""
    hung_up = select.poll()
    hung_up.register(parent, 0)
    hung_up.poll()
    if not serving.is_set():
        os._exit(0)


def _run_directory(path: Path) -> RunDirectory:
    """Locked; the engine of a service that was killed may still be in its last turn."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return RunDirectory(path)
        except RunError:
            if not os.access(path, os.W_OK) or time.monotonic() > deadline:
                raise
        time.sleep(0.2)


if __name__ == "__main__":
    main()
