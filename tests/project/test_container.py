"""The Containerfile, carried out in a fresh Debian: its image has Python 3.11 on the same Debian or a newer one."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx2
import psutil  # type: ignore[import-untyped]
import pytest

from tests.conftest import ROOT
from tests.support.waiting import PATIENCE, wait_until

DEBIAN = "bookworm"


class Image:
    """A root directory in which the instructions of a Containerfile are carried out."""

    def __init__(self, root: Path, options: str) -> None:
        """`options` are the build argument PIP_OPTIONS."""
        self.root = root
        self._directory, self._user = "/", "root"
        self._variables = {"PATH": os.environ["PATH"], "PIP_OPTIONS": options, "PIP_BREAK_SYSTEM_PACKAGES": "1"}
        self.program, self.arguments = list[str](), list[str]()

    def follow(self, file: Path) -> None:
        """Carry out all instructions but those that only describe the image."""
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        for instruction in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
            verb, _, rest = instruction.partition(" ")
            match verb:
                case "COPY":
                    *sources, target = rest.split()
                    place = self.root / self._directory[1:] / target
                    for source in sources:
                        if (file.parent / source).is_dir():
                            shutil.copytree(
                                file.parent / source, place, ignore=shutil.ignore_patterns("built", "*.egg-info")
                            )
                        else:
                            shutil.copy(file.parent / source, place)
                case "RUN":
                    self.run(["sh", "-ec", rest])
                case "WORKDIR":
                    self._directory = rest
                    (self.root / rest[1:]).mkdir(parents=True, exist_ok=True)
                case "USER":
                    self._user = rest
                case "ENTRYPOINT":
                    self.program = json.loads(rest)
                case "CMD":
                    self.arguments = json.loads(rest)
                case _:
                    assert verb in ("", "FROM", "ARG", "VOLUME", "EXPOSE", "STOPSIGNAL"), instruction

    def command(self, words: list[str]) -> list[str]:
        """What runs a command in the image; its processes end with the first."""
        apart = ["unshare", "--mount", "--pid", "--fork", f"--root={self.root}", "--mount-proc"]
        become = ["setpriv", f"--reuid={self._user}", f"--regid={self._user}", "--init-groups"]
        named = [f"{name}={value}" for name, value in self._variables.items()]
        home = "/root" if self._user == "root" else f"/home/{self._user}"
        return [*apart, f"--wd={self._directory}", "env", "-i", f"HOME={home}", *named, *become, *words]

    def run(self, words: list[str]) -> str:
        """Run a command to its end."""
        done = subprocess.run(self.command(words), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout


def wheels(directory: Path) -> str:
    """The options with which pip installs what Motet needs from files: the image need not reach an index."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["serve"]]
    needed += project["build-system"]["requires"]
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(directory)]
    subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), *needed], check=True)
    return "--no-index --find-links /wheels"


@pytest.mark.soak
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("debootstrap") is None or sys.version_info[:2] != (3, 11),
    reason="needs root, debootstrap and Python 3.11",
)
def test_the_image_serves_with_its_own_kernels(tmp_path: Path) -> None:
    root = tmp_path / "root"
    packages = "python3,python3-pip,python3-dev,ca-certificates,util-linux"
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={packages}", DEBIAN, str(root)],
        check=True,
        capture_output=True,
    )
    image = Image(root, wheels(root / "wheels"))
    image.follow(ROOT / "Containerfile")
    assert re.search(r"own CPU kernels[│\s]+(amx|avx512|avx2)", image.run(["motet", "doctor"]))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [*image.program, *image.arguments, "--port", str(port)]
    with subprocess.Popen(image.command(words)) as served:
        try:
            wait_until(lambda: ready(port), PATIENCE, served)
        finally:
            for first in psutil.Process(served.pid).children():  # the others end with it
                first.terminate()
        assert served.wait(PATIENCE) == 0
    assert (root / "served" / "motet.db").is_file()


def ready(port: int) -> bool:
    """Whether the service says that it is ready."""
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/readyz", trust_env=False).status_code == 200
    except httpx2.TransportError:
        return False
