"""A `motet serve` of its own process for tests: started, asked, killed, and read.

with serving(directory) as service:
    service.submit(tiny("sort")); service.ended("sort")

with open_house(directory) as house:     # the routes alone, in this process, with two tenants and a job that has ended
    house.ask("GET", "/v1/jobs", "ours")
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
import socket
import sqlite3
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil  # type: ignore[import-untyped]
import uvicorn
from fastapi import FastAPI

from motet.runtime.checkpoint import Committed
from motet.service.app import create_app
from motet.service.database.store import Principal, Store
from motet.service.database.tables import Share, UploadedAdapter, now
from motet.service.desk import Desk, Settings
from motet.types import JobState

ENGINE = "engine: {samplers: 0, threads: 1}\n"
PATIENCE = 90.0
ROWS = b'{"prompt": "a?", "answer": "b"}\n{"prompt": "c?", "answer": "d"}\n'
FINAL = ("succeeded", "failed", "cancelled")

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


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Service:
    """One directory, and the process that serves it now."""

    def __init__(self, directory: Path, *options: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.port = directory, free_port()
        config = directory / "engine.yaml"
        config.write_text(ENGINE)
        self._command = [sys.executable, "-m", "motet", "serve", "--directory", str(directory), "--port"]
        self._command += [str(self.port), "--config", str(config), "--no-keys"]
        self._command += options if "--base" in options else ["--base", "small", *options]
        self._http = httpx2.Client(base_url=self.url, timeout=30.0, trust_env=False)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    # --- the process ----------------------------------------------------------------------------------------------------

    def start(self, *, ready: bool = True) -> None:
        """Start it, and wait until its engine is ready (or only until it answers)."""
        with (self.directory / "out").open("ab") as out:
            self.process = subprocess.Popen(self._command, stdout=out, stderr=out)
        self.until(lambda: self.answers("/readyz" if ready else "/healthz"))

    def answers(self, path: str) -> bool:
        """Whether a health check succeeds."""
        with contextlib.suppress(httpx2.TransportError):
            return self._http.get(path).status_code == 200
        return False

    def engine(self) -> Any:
        """The engine's process."""
        assert self.process is not None
        found = psutil.Process(self.process.pid).children()
        (one,) = [child for child in found if "motet.hosting" in child.cmdline()]
        return one

    def kill(self) -> None:
        """Kill it as a machine that loses its power does; its engine finds that out by itself."""
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
        if self.process is not None and self.process.poll() is None:
            below = psutil.Process(self.process.pid).children(recursive=True)
            self.kill()
            _, alive = psutil.wait_procs(below, timeout=10)
            for one in alive:
                one.kill()

    def until(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Wait for something to become true."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process is None or self.process.poll() is None, (self.directory / "out").read_text()
            assert time.monotonic() < deadline, self._story()
            time.sleep(0.02)

    def _story(self) -> str:
        names = ("out", "engine.log")
        return "\n".join(path.read_text() for path in map(self.directory.joinpath, names) if path.is_file())

    # --- what it answers ------------------------------------------------------------------------------------------------

    def ask(self, method: str, path: str, **request: Any) -> Any:
        """The body of an answer, which has to be a success."""
        answer = self._http.request(method, path, **request)
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

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
def serving(directory: Path, *options: str) -> Iterator[Service]:
    """A service that is ready, while the block runs."""
    service = Service(directory, *options)
    try:
        service.start()
        yield service
    finally:
        service.close()


# --- without an engine ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class House:
    """A service with two tenants; its engine is never started."""

    app: FastAPI
    http: httpx2.Client
    keys: dict[str, str]
    job: Json
    """Of tenant `ours`, ended, with a version and rollouts."""
    file: Json

    @property
    def desk(self) -> Desk:
        """What the routes share."""
        found: Desk = self.app.state.desk
        return found

    def ask(self, method: str, path: str, key: str = "ours", **request: Any) -> httpx2.Response:
        """Any answer."""
        headers = {**_bearer(self.keys[key]), **request.pop("headers", {})}
        return self.http.request(method, path, headers=headers, **request)

    def refused(self, status: int, method: str, path: str, key: str = "ours", **request: Any) -> Json:
        """The error of an answer, which has to be this one."""
        answer = self.ask(method, path, key, **request)
        assert answer.status_code == status, answer.text
        return error_of(answer)


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def error_of(answer: httpx2.Response) -> Json:
    """The error that an answer tells, which has the one shape."""
    body: Json = answer.json()
    assert set(body) == {"error"}
    error: Json = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert error["type"].endswith("_error")
    return error


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """The desk hears of what happens, as it would with an engine."""
        self.config.app.state.desk._loop = asyncio.get_running_loop()  # type: ignore[union-attr]
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Graders' processes end with their loop."""
        await self.config.app.state.desk.grading.close()  # type: ignore[union-attr]
        await super().shutdown(sockets)


@contextlib.contextmanager
def open_house(directory: Path, **settings: Any) -> Iterator[House]:
    """A service in this process, while the block runs."""
    app = create_app(Settings("small", directory, max_upload_mb=0.01, **settings))
    store, port = app.state.desk.store, free_port()
    keys = {"none": "", "wrong": "mk-nobody"}
    for name, tenant, role, expires in (
        ("admin", "staff", "admin", None),
        ("ours", "us", "member", None),
        ("theirs", "them", "member", None),
        ("expired", "us", "member", now() - 1),
        ("revoked", "us", "member", None),
    ):
        key, keys[name] = store.create_key(tenant, name, role, expires)
        if name == "revoked":
            store.revoke_key(key.id)
    server = _Server(uvicorn.Config(app, port=port, lifespan="off", log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=20.0, trust_env=False) as http:
            file = http.post("/v1/files", headers=_bearer(keys["ours"]), files={"file": ("rows.jsonl", ROWS)}).json()
            job = http.post("/v1/jobs", headers=_bearer(keys["ours"]), json=tiny("ended")).json()
            _finish(app.state.desk, job["id"])
            _bring(app.state.desk, store)
            yield House(app, http, keys, job, file)
    finally:
        server.should_exit = True
        thread.join()
        store.close()


def _bring(desk: Desk, store: Store) -> None:
    """Two adapters that `ours` uploaded, and a share of one of them with nobody's tenant."""
    owner = store.tenant("us")
    who = Principal(owner.id, owner.name, "key-none", "member")
    for name in ("brought", "lent"):
        row = UploadedAdapter(
            id=f"adapter-{name}", tenant_id=owner.id, name=name, bytes=4, rank=32, alpha=32.0, target_modules=["q_proj"]
        )
        desk.adapters.add(who, row)
        desk.adapters.path(row.id).mkdir(parents=True)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (desk.adapters.path(row.id) / file).write_text("{}")
    nobody = store.tenant("nobody").id
    desk.adapters.share(Share(id="share-1", tenant_id=owner.id, object="adapter-lent", with_tenant=nobody))


def _finish(desk: Desk, job_id: str) -> None:
    """What the engine would have told and written."""
    directory = desk.directory(job_id)
    directory.open({"job": job_id})
    for step in range(2):
        rollouts = [{"text": "x", "reward": reward, "step": step} for reward in (0.0, 0.5, 1.0, None)]
        directory.write_rollouts(str(step), rollouts)
        desk._hear(job_id, "step", {"step": step, "loss": 0.0})

    def save(path: Path) -> None:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (path / name).write_text("{}")

    directory.commit(Committed(step=2, best_version=2), save)
    desk._hear(job_id, "state", {"state": JobState.SUCCEEDED.value, "message": ""})
