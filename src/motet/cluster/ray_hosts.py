"""Hosts on the nodes of a Ray cluster: Ray places their processes, starts and watches them; messages go by sockets of Motet's.

This is the one module that imports Ray.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from motet.cluster.host import Engine
from motet.cluster.listener import ADDRESS, TOKEN, engine_that_connects
from motet.errors import EngineError


class RayLauncher:
    """Starts hosts on a cluster: the `Launch` of an `EngineClient`."""

    def __init__(self, address: str, *, cores: int, gpus: int = 0) -> None:
        """`address` is as for `ray.init`; each host asks for so many cores and GPUs of one node."""
        self._address, self._cores, self._gpus = address, cores, gpus
        self._opening = asyncio.Lock()

    async def __call__(self, log: Path) -> Engine:
        """Start the process of a host where there is room, and wait until it has connected.

        Raises:
            EngineError: the cluster cannot be reached, or the process ended at once.
        """
        try:
            async with self._opening:
                await asyncio.to_thread(self._connect)
            return await self._started(log)
        except (RayError, ConnectionError, ValueError, RuntimeError) as error:
            raise EngineError(f"Ray at {self._address!r} could not start a host: {error}") from error

    async def _started(self, log: Path) -> Engine:
        here = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        process: Any = _HostProcess.options(  # type: ignore[attr-defined]
            num_cpus=self._cores, num_gpus=self._gpus, scheduling_strategy="SPREAD", max_restarts=0, max_concurrency=2
        ).remote()

        async def begin(address: str, token: str) -> Any:
            return process.run.remote({ADDRESS: address, TOKEN: token}, os.getcwd(), str(log))

        async def end() -> None:
            ray.kill(process)

        return await engine_that_connects(here, begin, end)

    def _connect(self) -> None:
        if not ray.is_initialized():
            ray.init(address=self._address, log_to_driver=False, namespace="motet")


@ray.remote
class _HostProcess:
    """One process of a host; it ends with this actor, because the other end of its socket closes."""

    def run(self, settings: dict[str, str], directory: str, log: str) -> int:
        """Run it to its end, and give its exit status."""
        with Path(log).open("ab") as out:
            return subprocess.run(
                [sys.executable, "-P", "-m", "motet.hosting"],
                cwd=directory, env={**os.environ, **settings}, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True, check=False,
            ).returncode  # fmt: skip
