"""Entry point: `python -m motet.hosts`, with the path of its log if the parent of a service owns it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
import time
from pathlib import Path

from motet.config import HostConfig
from motet.config.jobfile import check_fields
from motet.core.errors import DeviceLost, RunError
from motet.hosts.answers import reason
from motet.hosts.launch import warm_up
from motet.hosts.line import ServiceLine
from motet.hosts.listener import ADDRESS, TOKEN
from motet.hosts.messages import HostFailed, StartHost, ToHost
from motet.hosts.process import HostProcess
from motet.process.channel import Alive, Parent
from motet.process.heartbeat import DeviceWatch, Pulse
from motet.runtime.rundir import RunDirectory

_LOCK_SECONDS = 60.0
_SWITCH_SECONDS = 0.0005
"""Interpreter switch interval, because the device's thread needs the interpreter a hundred times per step."""


def main() -> None:
    """Load modules and the base, report that the host is ready, and serve until the input ends."""
    address, token = os.environ.pop(ADDRESS, ""), os.environ.pop(TOKEN, "")
    serving, parent = threading.Event(), _line() if len(sys.argv) > 1 else _parent(address, token)
    watched: list[DeviceWatch] = []

    def say(still: int | None) -> None:
        with contextlib.suppress(OSError, ValueError):  # the parent is gone
            job = pulse.job if still else watched[0].job if watched else ""
            parent.send(Alive(still or 0, watched[0].look() if watched else 0, job))

    pulse = Pulse(say)
    if isinstance(parent, Parent):  # while this one loads, the next engine needs the cores and the directory
        parent.on_hang_up(lambda: None if serving.is_set() else os._exit(0))
    warm_up()
    sys.setswitchinterval(_SWITCH_SECONDS)
    start = parent.first()
    if not isinstance(start, StartHost):
        return
    if not start.own_jobs:  # files of a service are private
        os.umask(0o077)
    try:
        tree = {"base": start.base, "engine": start.engine, "rollout": start.rollout}
        config = check_fields(HostConfig, tree, "motet serve")
        engine = config.engine.model_copy(update={"trust_remote_code": start.trust_remote_code})
        config = config.model_copy(update={"engine": engine})
        with contextlib.ExitStack() as stack:
            server = HostProcess(config, _run_directory(Path(start.run), start.host), start, parent)
            stack.callback(server.close)
            serving.set()
            if server.base.info.device == "cpu" and engine.n_ranks == 1:  # others compute elsewhere
                watched.append(DeviceWatch(server.workshop.device))
            asyncio.run(server.serve(pulse))
    except Exception as error:  # the parent shows the reason and starts it again
        sys.stderr.write(f"{(failure := reason(error))}\n")
        parent.send(HostFailed(failure, isinstance(error, DeviceLost)))
    os._exit(0)


def _parent(address: str, token: str) -> Parent[ToHost]:
    return Parent[ToHost].at(address, token, ToHost) if address else Parent[ToHost](ToHost)


def _line() -> ServiceLine:
    """On the socket that this process has as its standard input."""
    owner = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return ServiceLine(owner, lambda line: print(line, file=sys.stderr, flush=True), lambda: os._exit(0))


def _run_directory(path: Path, host: int | None) -> RunDirectory:
    """Locked; the engine of a service that was killed may still be in its last turn."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return RunDirectory(path, "" if host is None else f"host-{host}")
        except RunError:
            if not os.access(path, os.W_OK) or time.monotonic() > deadline:
                raise
        time.sleep(0.2)


if __name__ == "__main__":
    main()
