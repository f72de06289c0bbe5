"""`motet serve`, with jobs that it owns and with clients that own their loop: the same GRPO on the small base."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.speed.workers.serve import Repeat, options, serve, versions

OPTIONS = options()
LOOP = Path(__file__).with_name("tinker_loop.py")
_service: dict[str, Any] = {}


def load() -> dict[str, Any]:
    """Start a service."""
    directory = Path(tempfile.mkdtemp(prefix="bench-service-"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        _service["url"] = f"http://127.0.0.1:{probe.getsockname()[1]}"
    config = directory / "engine.yaml"
    config.write_text(json.dumps({"engine": {"samplers": 0, "threads": OPTIONS["threads"]}}))
    command = [sys.executable, "-m", "motet", "serve", "--base", OPTIONS["model"], "--no-keys", "--directory"]
    command += [str(directory), "--port", _service["url"].rpartition(":")[2], "--config", str(config)]
    _service["process"] = subprocess.Popen(command, stdout=sys.stderr)
    while not _answers():
        assert _service["process"].poll() is None, "the service has ended"
        time.sleep(0.1)
    return {"versions": versions("motet", "torch", "transformers")}


def _answers() -> bool:
    with contextlib.suppress(OSError):
        return bool(urllib.request.urlopen(f"{_service['url']}/readyz", timeout=5).status == 200)
    return False


def _ask(path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{_service['url']}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


@contextmanager
def jobs(args: dict[str, Any]) -> Iterator[Repeat]:
    """Jobs that the service owns, from their submission to their end."""

    def repeat() -> dict[str, Any]:
        stamp, started = time.time_ns(), time.perf_counter()
        names = [f"job-{stamp}-{number}" for number in range(args["jobs"])]
        for name in names:
            _ask("/v1/jobs", job(name, args))
        left = set(names)
        while left:
            time.sleep(0.02)
            for name in list(left):
                state = _ask(f"/v1/jobs/{name}")["state"]
                assert state in ("queued", "running", "succeeded"), state
                left -= {name} if state == "succeeded" else set()
        return {"seconds": time.perf_counter() - started, "units": args["jobs"] * args["steps"]}

    yield repeat


def job(name: str, args: dict[str, Any]) -> dict[str, Any]:
    """What is submitted."""
    return {
        "name": name,
        "data": {"source": "toy:sort_letters", "size": 256, "holdout": 0},
        "reward": "exact",
        "steps": args["steps"],
        "sampling": {"max_tokens": args["max_tokens"]},
        "adapter": {"rank": 16, "alpha": 32},
        "optimizer": {"lr": 1e-5},
        "algorithm": {"type": "grpo", "group_size": args["each"], "groups_per_step": args["groups"]},
    }


@contextmanager
def clients(args: dict[str, Any]) -> Iterator[Repeat]:
    """Clients that own their loop, from the making of their model to its last step."""
    words = [str(args[name]) for name in ("jobs", "steps", "groups", "each", "max_tokens")]
    command = [OPTIONS["tinker"], str(LOOP), f"{_service['url']}/tinker", "small", *words]
    own = {**os.environ, "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, stderr=sys.stderr
    )

    def repeat() -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        return {**json.loads(process.stdout.readline()), "units": args["jobs"] * args["steps"]}

    try:
        yield repeat
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    try:
        serve(load, {"jobs": jobs, "clients": clients})
    finally:
        if "process" in _service:
            _service["process"].terminate()
