"""Services for tests of the client: `motet serve` in a process of its own, the jobs it gets, and `motet` as a command.

with running(directory, "--no-keys") as service: ...     # service.url, service.stop(), service.start()
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from motet import cli

TINY: dict[str, Any] = {
    "steps": 2,
    "sampling": {"max_tokens": 8},
    "adapter": {"rank": 4},
    "algorithm": {"group_size": 4, "groups_per_step": 2},
}


def tiny(name: str, **fields: Any) -> dict[str, Any]:
    data = {"source": "toy:sort_letters", "size": 64, "holdout": 4}
    return {"name": name, "data": data, "reward": "exact", **TINY, **fields}


def job_file(directory: Path, *jobs: dict[str, Any], **fields: Any) -> str:
    path = directory / "jobs.yaml"
    path.write_text(json.dumps({"base": "small", "jobs": jobs, **fields}))  # JSON is YAML
    return str(path)


def rows_in(directory: Path) -> Path:
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i} + 1 =", "answer": str(i + 1)}) + "\n" for i in range(20)))
    return path


@dataclass
class Service:
    """`motet serve` in a process of its own."""

    directory: Path
    words: tuple[str, ...]
    port: int = 0
    process: subprocess.Popen[str] | None = None
    said: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def key(self) -> str:
        return "".join(re.findall(r"mk-[\w-]+", "".join(self.said)))

    def start(self) -> None:
        if not self.port:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
        config = self.directory / "serve.yaml"
        config.write_text("engine: {threads: 1, samplers: 0, max_rows: 16}\n")
        command = [sys.executable, "-m", "motet", "serve", "--base", "small", "--directory", str(self.directory)]
        command += ["--port", str(self.port), "--config", str(config), *self.words]
        self.process = subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )  # fmt: skip

    def wait(self, address: str = "/readyz") -> None:
        assert self.process is not None
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(httpx2.TransportError):
                if httpx2.get(f"{self.url}{address}", trust_env=False).status_code == 200:
                    if not self.said:
                        assert self.process.stdout is not None
                        for line in self.process.stdout:
                            self.said.append(line)
                            if "motet serves" in line:
                                break
                    return
            time.sleep(0.1)
        raise AssertionError("the service did not start")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        assert self.process is not None
        self.process.send_signal(how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def running(directory: Path, *words: str, address: str = "/readyz") -> Iterator[Service]:
    service = Service(directory, words)
    service.start()
    try:
        service.wait(address)
        yield service
    finally:
        service.stop()


Motet = Callable[..., tuple[int, str, str]]


def speaker(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Motet:
    """Exit code, output and errors of a command."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["motet", *map(str, words)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return int(code or 0), out, err

    return run
