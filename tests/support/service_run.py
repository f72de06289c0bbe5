"""A `motet serve` of its own process for tests: started, asked, killed, and read.

with serving(directory) as service:
    service.submit(tiny("sort")); service.ended("sort")

with serving(directory, keys=True) as service:     # one that asks for keys; tests/support/house.py has the routes alone
    service.become(service.admin_key); service.submit(tiny("sort"))
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import psutil  # type: ignore[import-untyped]

from motet.rollout.server_process import free_port
from tests.support.waiting import PATIENCE

ENGINE = "engine: {samplers: 0, threads: 1}\n"
ROWS = b'{"prompt": "a?", "answer": "b"}\n{"prompt": "c?", "answer": "d"}\n'
FINAL = ("succeeded", "failed", "cancelled")
LASTING = 5000
"""Steps of a job that is cancelled in the end: minutes."""

Json = dict[str, Any]


def tiny(name: str, steps: int = 3, **fields: Any) -> Json:
    """A job of the small base that takes a second."""
    return {
        "name": name,
        "data": {"source": "toy:sort_letters", "size": 64, "holdout": 4},
        "reward": "exact",
        "steps": steps,
        "sampling": {"max_tokens": 8},
        "algorithm": {"group_size": 4, "groups_per_step": 2},
        **fields,
    }


def host_process(run: Path, number: int) -> Any:
    """The process of a host, by the lock that it holds; one that is alone holds that of the whole run directory."""
    locks = [run / f".lock.host-{number}", run / ".lock"]
    return psutil.Process(int(next(lock for lock in locks if lock.exists()).read_text()))


class Service:
    """One directory, and the process that serves it now; with `keys` it asks for them."""

    def __init__(self, directory: Path, *options: str, keys: bool = False, base: str | None = "small") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.port = directory, free_port()
        config = directory / "engine.yaml"
        config.write_text(ENGINE)
        self._command = [sys.executable, "-m", "motet", "serve", "--directory", str(directory), "--port"]
        self._command += [str(self.port), "--config", str(config), *([] if keys else ["--no-keys"])]
        self._command += options if "--base" in options or base is None else ["--base", base, *options]
        self._http = httpx2.Client(base_url=self.url, timeout=PATIENCE, trust_env=False)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    # --- the process ----------------------------------------------------------------------------------------------------

    def start(self, *, ready: bool = True) -> None:
        """Start it, and wait until its engine is ready (or only until it answers)."""
        self.launch()
        self.until(lambda: self.answers("/readyz" if ready else "/healthz"))

    def launch(self) -> None:
        """Start its process, and wait for nothing."""
        with (self.directory / "out").open("ab") as out:
            self.process = subprocess.Popen(self._command, stdout=out, stderr=out)

    def answers(self, path: str) -> bool:
        """Whether a health check succeeds."""
        with contextlib.suppress(httpx2.TransportError):
            return self._http.get(path).status_code == 200
        return False

    def http(self) -> Any:
        """The process that answers; `process` is its small parent, which starts it again."""
        assert self.process is not None
        commands = [one for one in psutil.Process(self.process.pid).children() if "motet.hosts" not in one.cmdline()]
        return min(commands, key=psutil.Process.create_time)

    def engine(self) -> Any:
        """The engine's process."""
        (one,) = self.engines()
        return one

    def engines(self) -> list[Any]:
        """The processes of its hosts, in the order they were started."""
        log = str(self.directory / "engine")
        named = [(one, one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline", "ppid"])]
        found = [one for one, words in named if "motet.hosts" in words and words[-1].startswith(log)]
        pids = {one.pid for one in found}
        # A process that a host is starting has the host's command line until it executes its own program.
        hosts = [one for one in found if one.info["ppid"] not in pids]
        return sorted(hosts, key=psutil.Process.create_time)

    def kill(self) -> None:
        """Kill its small parent; its other processes end with it."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def terminate(self, seconds: float = PATIENCE) -> None:
        """Stop it as an operator does."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(seconds)

    def close(self) -> None:
        """Leave nothing running."""
        self._http.close()
        own = [psutil.Process(self.process.pid)] if self.process is not None and self.process.poll() is None else []
        below = [below for one in (*own, *self.engines()) for below in one.children(recursive=True)]
        if own:
            self.kill()
        for engine in self.engines():
            engine.kill()
        _, alive = psutil.wait_procs(below, timeout=10)
        for one in alive:
            one.kill()

    def until(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Wait for something to become true."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process is None or self.process.poll() is None, (self.directory / "out").read_text()
            assert time.monotonic() < deadline, self._story()
            time.sleep(0.1)

    def _story(self) -> str:
        names = ("out", *sorted(path.name for path in self.directory.glob("engine*.log")))
        return "\n".join(path.read_text() for path in map(self.directory.joinpath, names) if path.is_file())

    # --- who asks -------------------------------------------------------------------------------------------------------

    @property
    def admin_key(self) -> str:
        """The first key, which it tells when it begins to serve a new directory."""
        found = re.search(r"mk-[\w-]+", (self.directory / "out").read_text())
        assert found is not None
        return found[0]

    def become(self, key: str) -> None:
        """Ask with this key from now on."""
        self._http.headers["Authorization"] = f"Bearer {key}"

    def environment(self, key: str = "") -> dict[str, str]:
        """What people who use it set once."""
        named = {"MOTET_API_KEY": key} if key else {}
        return {**os.environ, "MOTET_URL": self.url, "PYTHONUNBUFFERED": "1", **named}

    def motet(
        self, *words: object, key: str = "", cwd: Path | None = None, env: Mapping[str, str] | None = None,
        out: int = subprocess.PIPE, err: int | None = subprocess.STDOUT,
    ) -> subprocess.Popen[str]:  # fmt: skip
        """`motet` in a process of its own, as one of them types it."""
        command, where = [sys.executable, "-m", "motet", *map(str, words)], {**self.environment(key), **(env or {})}
        return subprocess.Popen(command, cwd=cwd, env=where, stdout=out, stderr=err, text=True)

    def key_for(self, tenant: str) -> str:
        """A new key of a tenant's, asked for as an admin."""
        return str(self.ask("POST", "/v1/keys", json={"tenant": tenant})["key"])

    # --- what it answers ------------------------------------------------------------------------------------------------

    def ask(self, method: str, path: str, **request: Any) -> Any:
        """The body of an answer, which has to be a success."""
        answer = self._http.request(method, path, **request)
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    def refused(self, status: int, method: str, path: str, **request: Any) -> Json:
        """The error that a question is answered with."""
        answer = self._http.request(method, path, **request)
        assert answer.status_code == status, answer.text
        error: Json = answer.json()["error"]
        return error

    def get(self, path: str) -> httpx2.Response:
        """An answer of any kind."""
        return self._http.get(path)

    def submit(self, job: Json) -> Json:
        """Hand a job in."""
        found: Json = self.ask("POST", "/v1/jobs", json=job)
        return found

    def job(self, name: str) -> Json:
        """A job as it stands."""
        found: Json = self.ask("GET", f"/v1/jobs/{name}")
        return found

    def steer(self, name: str, word: str) -> None:
        """Ask for `pause`, `resume` or `cancel`."""
        self.ask("POST", f"/v1/jobs/{name}/{word}")

    def reaches(self, name: str, step: int) -> None:
        """Wait until a job has done so many steps."""
        self.until(lambda: self.job(name)["step"] >= step)

    def becomes(self, name: str, *states: str) -> Json:
        """Wait for a state of a job."""
        self.until(lambda: self.job(name)["state"] in states)
        return self.job(name)

    def ended(self, name: str) -> str:
        """Wait until a job has ended, and say how."""
        return str(self.becomes(name, *FINAL)["state"])

    def events(self, name: str) -> list[Json]:
        """All that happened to a job."""
        found: list[Json] = self.ask("GET", f"/v1/jobs/{name}/events")["data"]
        return found

    def steps(self, name: str) -> list[int]:
        """Of the step events, in the order they are told."""
        return [event["data"]["step"] for event in self.events(name) if event["kind"] == "step"]

    def states(self, name: str) -> list[str]:
        """Of the state events, in the order they are told."""
        return [event["data"]["state"] for event in self.events(name) if event["kind"] == "state"]

    def forget_last_step(self, name: str) -> None:
        """Take the newest step out of the database of a service that is not running."""
        with contextlib.closing(sqlite3.connect(self.directory / "motet.db")) as database:
            (last,) = database.execute(
                "SELECT max(events.id) FROM events JOIN jobs ON jobs.id = job_id WHERE kind = 'step' AND name = ?",
                (name,),
            ).fetchone()
            assert last is not None
            database.execute("DELETE FROM events WHERE id = ?", (last,))
            database.commit()

    def adapter(self, name: str, version: str = "latest") -> dict[str, bytes]:
        """The files of a version, as they are downloaded."""
        packed = self._http.get(f"/v1/jobs/{name}/versions/{version}/download")
        assert packed.is_success, packed.text
        with tarfile.open(fileobj=io.BytesIO(packed.content)) as archive:
            files = {member.name.partition("/")[2]: archive.extractfile(member) for member in archive.getmembers()}
            return {path: file.read() for path, file in files.items() if file is not None}

    def weights(self, name: str) -> bytes:
        """The bytes of a job's last adapter."""
        return self.adapter(name)["adapter_model.safetensors"]


@contextlib.contextmanager
def serving(
    directory: Path, *options: str, keys: bool = False, ready: bool = True, base: str | None = "small"
) -> Iterator[Service]:
    """A service that is ready (or only answers), while the block runs; without `base` the options say which it has."""
    service = Service(directory, *options, keys=keys, base=base)
    try:
        service.start(ready=ready)
        yield service
    finally:
        service.close()
