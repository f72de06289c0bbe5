"""The routes of a service alone, in this process and without an engine, with two tenants and a job that has ended.

with open_house(directory) as house:     # or the fixture `house`
    house.ask("GET", "/v1/jobs", "ours")
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import uvicorn
from fastapi import FastAPI
from sqlalchemy import event
from sqlalchemy.engine import Engine

from motet.config.service import Role, ServiceConfig
from motet.core.types import JobState
from motet.rollout.server_process import free_port
from motet.runtime.checkpoint import Committed
from motet.runtime.directory_checks import open_job
from motet.service.adapters.adapters import Adapters
from motet.service.app import create_app
from motet.service.composition import Service
from motet.service.database.store import Store
from motet.service.database.tables import Share, UploadedAdapter, now
from motet.service.database.tenants import Principal
from motet.service.http.bodies import Bodies
from motet.service.http.connections import Connections, raise_open_files
from motet.service.jobs.recorder import EventRecorder
from motet.service.settings import Settings
from motet.service.storage import Storage
from tests.support.service_run import ROWS, Json, tiny
from tests.support.waiting import PATIENCE

Part = TypeVar("Part")


@dataclass(frozen=True)
class House:
    """A service with two tenants; its engine is never started."""

    app: FastAPI
    http: httpx2.Client
    keys: dict[str, str]
    job: Json
    """Of tenant `ours`, ended, with a version and rollouts."""
    file: Json
    connections: Connections

    def part(self, kind: type[Part]) -> Part:
        """A part of the service."""
        parts = *vars(self.service).values(), *vars(self.app.state.tinker).values()
        return next(one for one in parts if type(one) is kind)

    @property
    def service(self) -> Service:
        """What it is made of."""
        service: Service = self.app.state.service
        return service

    @property
    def store(self) -> Store:
        """Its database."""
        return self.service.store

    @property
    def storage(self) -> Storage:
        """Its files."""
        return self.service.storage

    @property
    def bodies(self) -> Bodies:
        """What limits its requests."""
        layer: Any = self.app.middleware_stack
        while not isinstance(layer, Bodies):
            layer = getattr(layer, "app", None) or layer._app
        return layer

    @property
    def recorder(self) -> EventRecorder:
        """What keeps the events that an engine would send."""
        return self.service.recorder

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
        """Keep the loop for tests."""
        self.config.app.state.loop = asyncio.get_running_loop()  # type: ignore[union-attr]
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Graders' processes end with their loop."""
        await self.config.app.state.service.grading.close()  # type: ignore[union-attr]
        await super().shutdown(sockets)


@contextlib.contextmanager
def statements() -> Iterator[list[str]]:
    """The SQL that this process executes meanwhile."""
    asked = list[str]()
    listened = Engine, "before_cursor_execute", lambda _, __, query, *more: asked.append(query)
    event.listen(*listened)
    try:
        yield asked
    finally:
        event.remove(*listened)


@contextlib.contextmanager
def open_house(directory: Path, **settings: Any) -> Iterator[House]:
    """A service in this process, while the block runs."""
    own = {
        name: settings.pop(name)
        for name in ("open_to_all", "hub", "rewards", "public_url", "database")
        if name in settings
    }
    if settings.pop("sent_rewards", False):
        settings["rewards"] = {"tenants": True}
    port, loop = settings.pop("port", None) or free_port(), settings.pop("loop", "auto")
    app = create_app(Settings("small", directory, config=ServiceConfig(max_upload_mb=0.01, **settings), **own))
    service: Service = app.state.service
    store = service.store
    keys = {"none": "", "wrong": "mk-nobody"}
    people: tuple[tuple[str, str, Role, float | None], ...] = (
        ("admin", "staff", "admin", None),
        ("ours", "us", "member", None),
        ("theirs", "them", "member", None),
        ("expired", "us", "member", now() - 1),
        ("revoked", "us", "member", None),
    )
    for name, tenant, role, expires in people:
        key, keys[name] = store.tenants.create_key(tenant, name, role, expires)
        if name == "revoked":
            store.tenants.revoke_key(key.id)
    connections = Connections(service.settings.config.http, raise_open_files(), service.access.charge)
    options: Json = {"http": connections.protocol, "ws": "none", "loop": loop}
    server = _Server(uvicorn.Config(app, port=port, lifespan="off", log_level="error", **options))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, trust_env=False) as http:
            file = http.post("/v1/files", headers=_bearer(keys["ours"]), files={"file": ("rows.jsonl", ROWS)}).json()
            job = http.post("/v1/jobs", headers=_bearer(keys["ours"]), json=tiny("ended")).json()
            _finish(service, job["id"])
            _bring(service.adapters, store)
            yield House(app, http, keys, job, file, connections)
    finally:
        server.should_exit = True
        thread.join()
        service.request_files.close()
        store.close()


def _bring(adapters: Adapters, store: Store) -> None:
    """Two adapters that `ours` uploaded, and a share of one of them with nobody's tenant."""
    owner = store.tenants.made("us")
    who = Principal(owner.id, owner.name, "key-none", "member")
    for name in ("brought", "lent"):
        row = UploadedAdapter(
            id=f"adapter-{name}", tenant_id=owner.id, name=name, bytes=4, rank=32, alpha=32.0, target_modules=["q_proj"]
        )
        adapters.add(who, row)
        adapters.path(row.id).mkdir(parents=True)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (adapters.path(row.id) / file).write_text("{}")
    nobody = store.tenants.made("nobody").id
    adapters.share(Share(id="share-1", tenant_id=owner.id, object="adapter-lent", with_tenant=nobody))


def _finish(service: Service, job_id: str) -> None:
    """What the engine would have sent and written."""
    directory, recorder = service.storage.job(job_id), service.recorder
    open_job(directory, {"job": job_id})
    for step in range(2):
        rollouts = [{"text": "x", "reward": reward, "step": step} for reward in (0.0, 0.5, 1.0, None)]
        directory.write_rollouts(str(step), rollouts)
        recorder.record_step(job_id, {"step": step, "loss": 0.0})

    def save(path: Path) -> None:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (path / name).write_text("{}")

    directory.commit(Committed(step=2, best_version=2), save)
    recorder.record_state(job_id, JobState.SUCCEEDED, "")
