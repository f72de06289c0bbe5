"""Make what tests/running/test_earlier.py and tests/service/test_earlier_service.py open: an earlier Motet's files.

    git worktree add /tmp/earlier 595e64a6
    PYTHONPATH=/tmp/earlier/src .venv/bin/python scripts/make_earlier.py tests/support/earlier/595e64a6

The Motet that Python finds trains and serves, and is killed halfway: a run directory with a job that is done and two
that are not, and a service's directory with its SQLite database. The adapters that the same jobs have without the kill
are written down beside them by sha256, with the processor that gave them. Its keys open nothing but that database.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import psutil  # type: ignore[import-untyped]

from digests import processor

Json = dict[str, Any]
ENGINE = {
    "threads": 1,
    "samplers": 0,
    "kernels": "torch",
    "dtype": "float32",
    "block_size": 16,
    "micro_batch_tokens": 128,
}
SMALL = {"rank": 1, "target_modules": ["layers.0.self_attn.k_proj"]}
GRPO = {
    "data": {"source": "rows.jsonl", "holdout": 2},
    "reward": "rewards.py:share",
    "adapter": SMALL,
    "sampling": {"max_tokens": 6},
    "checkpoint": {"keep": 1},
    "algorithm": {"group_size": 4, "groups_per_step": 2},
    "optimizer": {"lr": 0.01},
    "eval": {"every": 2},
}
PAIRS = {
    "data": {"source": "pairs.jsonl", "holdout": 2},
    "adapter": SMALL,
    "checkpoint": {"keep": 1},
    "algorithm": {"type": "dpo", "rows_per_step": 2},
    "optimizer": {"lr": 0.01},
    "eval": {"every": 2},
}
RUN: Json = {
    "base": "small",
    "run": "run",
    "engine": ENGINE,
    "jobs": [
        {"name": "done", **GRPO, "steps": 2, "checkpoint": {"keep": 2}},
        {"name": "half", **GRPO, "steps": 10},
        {"name": "pairs", **PAIRS, "steps": 10},
    ],
}
REWARDS = '''"""A reward of the project's own."""


def share(problem, completion):
    """The share of vowels in an answer."""
    return sum(letter in "aeiou" for letter in completion) / max(len(completion), 1)
'''
TOY = {"data": {"source": "toy:sort_letters", "size": 16, "holdout": 2}, "reward": "exact"}
DEADLINE = 300.0


def main() -> None:
    """Train, serve, kill, pack."""
    target = Path(sys.argv[1]).resolve()
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        known = {"processor": processor(), "adapters": make_run(Path(place) / "project")}
        pack(Path(place) / "project", target / "project.tar.xz")
        known |= make_service(Path(place) / "served")
        pack(Path(place) / "served", target / "served.tar.xz")
    (target / "known.json").write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
    print("\n".join(f"{path.name}: {path.stat().st_size} bytes" for path in sorted(target.iterdir())))


def pack(directory: Path, file: Path) -> None:
    """Pack a directory, without locks, sockets and reports, which nobody continues from."""
    left_out = re.compile(r"(^|/)(\.lock.*|report\..*|engine/.*|out|.*\.log)$")
    with tarfile.open(file, "w:xz", preset=9) as archive:
        archive.add(directory, directory.name, filter=lambda member: None if left_out.search(member.name) else member)


def until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait for something that a process does."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{process.args!r} ended with {process.poll()}, or takes too long")
        time.sleep(0.01)


def lines(path: Path) -> int:
    """The lines of a log."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


# --- a run directory --------------------------------------------------------------------------------------------------------


def make_run(project: Path) -> dict[str, str]:
    """Kill a run halfway; the sha256 of each job's adapters in one that nobody killed."""
    project.mkdir()
    rows = [{"prompt": f"Write the word number {number}.", "answer": "a"} for number in range(12)]
    pairs = [{"prompt": f"Say {number}.", "chosen": f"It is {number}.", "rejected": "No."} for number in range(12)]
    for name, content in (("rows.jsonl", rows), ("pairs.jsonl", pairs)):
        (project / name).write_text("".join(json.dumps(row) + "\n" for row in content))
    (project / "rewards.py").write_text(REWARDS)
    (project / "jobs.yaml").write_text(json.dumps(RUN, indent=2))
    command = [sys.executable, "-m", "motet", "run", "jobs.yaml"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run([*command, "--set", "run=whole"], cwd=project, env=environment, check=True)
    whole = project / "whole"
    kept = {
        str(path.relative_to(whole).parent): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(whole.glob("*/versions/*/adapter_model.safetensors"))
    }
    shutil.rmtree(whole)
    process = subprocess.Popen(command, cwd=project, env=environment, start_new_session=True)
    run = project / "run"
    halfway = (("half", 3), ("pairs", 3), ("done", 3))  # `done` has a line for its last evaluation too
    until(lambda: all(lines(run / name / "metrics.jsonl") >= count for name, count in halfway), process)
    until(lambda: '"succeeded"' in (run / "done" / "status.json").read_text(), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    states = {name: json.loads((run / name / "status.json").read_text())["state"] for name in ("done", "half", "pairs")}
    assert states == {"done": "succeeded", "half": "running", "pairs": "running"}, states
    shutil.rmtree(project / "__pycache__", ignore_errors=True)
    return kept


# --- a service --------------------------------------------------------------------------------------------------------------


class Served:
    """A service and one who asks it."""

    def __init__(self, directory: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        directory.mkdir()
        self.directory = directory
        config = directory.parent / "engine.yaml"
        config.write_text("engine: {samplers: 0, threads: 1}\n")  # as tests/support/service_run.py has it
        command = [sys.executable, "-m", "motet", "serve", "--base", "small", "--directory", str(directory)]
        self._out = (directory.parent / "out").open("wb")
        self.process = subprocess.Popen(
            [*command, "--port", str(port), "--config", str(config)],
            stdout=self._out, stderr=self._out, start_new_session=True,
        )  # fmt: skip
        self._http = httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30.0, trust_env=False)
        until(self._ready, self.process)
        found = re.search(r"mk-[\w-]+", Path(self._out.name).read_text())
        assert found is not None
        self.admin = found[0]

    def _ready(self) -> bool:
        with contextlib.suppress(httpx2.TransportError):
            return self._http.get("/readyz").status_code == 200
        return False

    def ask(self, key: str, method: str, path: str, **request: Any) -> Any:
        """The body of an answer, which has to be a success."""
        answer = self._http.request(method, path, headers={"Authorization": f"Bearer {key}"}, **request)
        if not answer.is_success:
            raise RuntimeError(f"{method} {path}: {answer.text}")
        return answer.json() if answer.content else None

    def submit(self, key: str, name: str, steps: int, after: str = "", **fields: Any) -> None:
        """Hand a job in."""
        job = {"name": name, **GRPO, **TOY, "steps": steps, **fields}
        self.ask(key, "POST", "/v1/jobs", json=job, params={"after": after} if after else {})

    def reaches(self, key: str, name: str, condition: Callable[[Json], bool]) -> None:
        """Wait until a job is so."""
        until(lambda: condition(self.ask(key, "GET", f"/v1/jobs/{name}")), self.process)

    def kill(self) -> None:
        """Kill it and its engine, as a machine that loses its power does."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        engine = str(self.directory / "engine")
        below += [
            process for process in psutil.process_iter(["cmdline"]) if engine in " ".join(process.info["cmdline"] or [])
        ]
        for process in (psutil.Process(self.process.pid), *below):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        psutil.wait_procs(below)
        self._http.close()
        self._out.close()


def make_service(directory: Path) -> Json:
    """Serve two tenants, and kill all; keys and what the database held."""
    service = Served(directory)
    try:
        found = use_service(service, directory)
    finally:
        service.kill()
    with contextlib.closing(sqlite3.connect(directory / "motet.db")) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        found["jobs"] = dict(database.execute("SELECT name, state FROM jobs ORDER BY name"))
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        found["rows"] = {name: database.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in tables}
    return found


def use_service(service: Served, directory: Path) -> Json:
    """What two tenants do with it."""
    ask, admin = service.ask, service.admin
    ours, theirs = (ask(admin, "POST", "/v1/keys", json={"tenant": name})["key"] for name in ("acme", "globex"))
    revoked = ask(admin, "POST", "/v1/keys", json={"tenant": "acme", "name": "old"})
    ask(admin, "DELETE", f"/v1/keys/{revoked['id']}")
    ask(admin, "PUT", "/v1/tenants/globex/limits", json={"tokens_per_day": 1000000, "storage_mb": 50})
    rows = b"".join(b'{"prompt": "Say %d.", "answer": "%d"}\n' % (number, number) for number in range(8))
    file = ask(ours, "POST", "/v1/files", files={"file": ("rows.jsonl", rows)}, data={"purpose": "fine-tune"})["id"]
    service.submit(ours, "done", 2)
    service.reaches(ours, "done", lambda job: job["state"] == "succeeded")
    service.submit(ours, "from-file", 1, data={"source": file, "holdout": 2})
    service.reaches(ours, "from-file", lambda job: job["state"] == "succeeded")
    service.submit(ours, "cancelled", 500)
    service.reaches(ours, "cancelled", lambda job: job["step"] >= 1)
    ask(ours, "POST", "/v1/jobs/cancelled/cancel")
    service.reaches(ours, "cancelled", lambda job: job["state"] == "cancelled")
    service.submit(theirs, "paused", 500)
    service.reaches(theirs, "paused", lambda job: job["step"] >= 1)
    ask(theirs, "POST", "/v1/jobs/paused/pause")
    service.reaches(theirs, "paused", lambda job: job["state"] == "paused")
    done = ask(ours, "GET", "/v1/jobs/done")["id"]
    version = directory / "run" / done / "versions" / "v2"
    with tempfile.TemporaryFile() as packed:
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for name in ("adapter_config.json", "adapter_model.safetensors"):
                archive.add(version / name, f"mine/{name}")
        packed.seek(0)
        adapter = ask(ours, "POST", "/v1/adapters", params={"name": "mine"}, files={"file": ("a.tgz", packed.read())})[
            "id"
        ]
    ask(ours, "POST", "/v1/shares", json={"name": "mine", "tenant": "globex"})
    ask(ours, "POST", "/v1/chat/completions", json={
        "model": "done", "messages": [{"role": "user", "content": "Sort: b a"}], "max_tokens": 4,
    })  # fmt: skip
    service.submit(ours, "half", 40)
    service.submit(ours, "queued", 2, after="half")
    service.reaches(ours, "half", lambda job: job["step"] >= 2)
    usage = ask(admin, "GET", "/v1/usage", params={"by": "tenant"})
    keys = {"admin": admin, "acme": ours, "globex": theirs, "revoked": revoked["key"]}
    return {"keys": keys, "usage": usage, "adapter": adapter, "file": file}


if __name__ == "__main__":
    main()
