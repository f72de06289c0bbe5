"""Machines that share only one directory: network namespaces of this one, each with a home and files of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil  # type: ignore[import-untyped]

from tests.support.waiting import wait_until

PORT = 6379
STORE = 80 * 2**20  # the least that Ray takes
PATIENCE = 300.0
_NODE = 'hostname "$1"; mount --bind "$2" "$3"; cd "$4"; shift 4; exec "$@"'
"""What a command of a node runs in: the name of the machine, and nothing of the other machines' files."""


def why_not() -> str:
    """Why this machine makes no such machines; empty if it does."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "network namespaces need `ip` and `unshare` (iproute2, util-linux)"
    name = f"motet-try-{os.getpid()}"
    tried = subprocess.run(
        f"ip netns add {name} && ip -n {name} link add name br0 type bridge && ip netns exec {name} unshare -m --uts true",
        shell=True, capture_output=True, text=True, check=False,
    )  # fmt: skip
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return f"network namespaces are not permitted here: {tried.stderr.strip()}" if tried.returncode else ""


class Machines:
    """The first has a bridge that links of the others end at. Address N is 10.77.0.N."""

    def __init__(self, place: Path) -> None:
        self.place, self.shared, self._id = place, place / "shared", secrets.token_hex(2)
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        for folder in ("shared", "machines", "empty"):
            (place / folder).mkdir()
        self._ip("netns", "add", self._name(1))
        for words in (
            "link add name br0 type bridge",
            "addr add 10.77.0.1/24 dev br0",
            "link set br0 up",
            "link set lo up",
        ):
            self._ip("-n", self._name(1), *words.split())
        self._new_files(1)

    def _name(self, number: int) -> str:
        return f"motet-{self._id}-{number}"

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def _new_files(self, number: int) -> None:
        for folder in ("home", "project", "hidden"):
            (self.place / "machines" / str(number) / folder).mkdir(parents=True)

    def project(self, number: int) -> Path:
        """Where commands of a machine run; no other machine sees it."""
        return self.place / "machines" / str(number) / "project"

    def add(self, number: int) -> None:
        """Another machine, which has a cable to the first."""
        first, name, cable = self._name(1), self._name(number), f"v{number}"
        self._ip("netns", "add", name)
        self._ip("-n", first, "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        self._ip("-n", first, "link", "set", cable, "master", "br0", "up")
        for words in (f"addr add 10.77.0.{number}/24 dev eth0", "link set eth0 up", "link set lo up"):
            self._ip("-n", name, *words.split())
        self._new_files(number)

    def popen(self, number: int, *words: object, out: IO[bytes]) -> subprocess.Popen[bytes]:
        """A command on a machine; of other machines' files it sees the shared ones."""
        own = self.place / "machines" / str(number)
        environment = {
            **os.environ, "HOME": str(own / "home"), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_agent_register_timeout_ms": "300000",
            "RAY_worker_niceness": "0", "RAY_DISABLE_IMPORT_WARNING": "1",
        }  # fmt: skip
        hidden, node = self.place / "machines" / ("2" if number == 1 else "1"), f"node-{number}"
        inside = ["unshare", "-m", "--uts", "sh", "-c", _NODE, "sh", node, self.place / "empty", hidden]
        command = ["ip", "netns", "exec", self._name(number), *inside, self.project(number), *words]
        hidden.mkdir(exist_ok=True)
        return subprocess.Popen(
            [*map(str, command)], env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )  # fmt: skip

    def start_ray(self, number: int, *options: str) -> None:
        """The head on the first machine; on others a node that joins it. One core each."""
        common = ["--num-cpus", "1", "--object-store-memory", str(STORE), "--disable-usage-stats", "--block", *options]
        head = ["--head", "--port", str(PORT), "--temp-dir", str(self.place / "t")]
        where = head if number == 1 else ["--address", f"10.77.0.1:{PORT}"]
        log = self.place / f"ray-{number}"
        with log.open("wb") as out:
            ray = self.popen(number, "ray", "start", "--node-ip-address", f"10.77.0.{number}", *where, *common, out=out)
        self._running[number] = ray
        wait_until(lambda: b"Ray runtime started" in log.read_bytes(), PATIENCE, ray)

    def kill(self, number: int) -> None:
        """All processes of a machine, at once."""
        ray = self._running.pop(number, None)
        pids = subprocess.run(["ip", "netns", "pids", self._name(number)], capture_output=True, text=True, check=False)
        for pid in pids.stdout.split():
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(int(pid)).kill()
        if ray is not None:
            ray.wait()

    def close(self) -> None:
        """Leave no process and no namespace."""
        for folder in sorted((self.place / "machines").iterdir(), reverse=True):
            self.kill(int(folder.name))
            subprocess.run(["ip", "netns", "del", self._name(int(folder.name))], capture_output=True, check=False)


@contextlib.contextmanager
def machines() -> Iterator[Machines]:
    """While the block runs. In a short path: Ray has sockets below it."""
    with tempfile.TemporaryDirectory(prefix="mray", ignore_cleanup_errors=True) as place:
        made = Machines(Path(place))
        try:
            yield made
        finally:
            made.close()
