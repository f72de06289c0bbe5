"""The operator's key, which encrypts secrets of jobs: made once, kept to its owner, missed when it is gone."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet

from motet.config import JobConfig
from motet.config.service import ServiceConfig
from motet.core.errors import ConfigError, RunError
from motet.core.types import JobState, Wanted
from motet.rewards.reward_elsewhere import SEALED
from motet.runtime.checkpoint import Committed, JobDirectory
from motet.runtime.directory_checks import open_job
from motet.runtime.identity import of_config
from motet.service.app import create_app
from motet.service.composition import Service
from motet.service.database.tables import StoredJob
from motet.service.jobs.submissions import GivenJob
from motet.service.secrets import KEY_FILE, KEY_VARIABLE, Secrets
from motet.service.settings import Settings
from tests.support.database import person
from tests.support.service_run import Json, tiny

pytestmark = pytest.mark.tier1

HIDDEN: Json = {
    "name": "http",
    "args": {"url": "https://example.org/score", "headers": {"Authorization": "hidden-word"}},
}


@contextlib.contextmanager
def parts(directory: Path, **config: Any) -> Iterator[Service]:
    """A service that is put together and never started."""
    app = create_app(Settings("small", directory, config=ServiceConfig(**config)))
    found: Service = app.state.service
    try:
        yield found
    finally:
        found.store.close()


def submitted(service: Service, name: str) -> StoredJob:
    """A job whose reward has a secret."""
    job = {name: value for name, value in tiny(name).items() if name != "reward"}
    (kept,) = service.submissions.submit(person(service.store, "us"), [GivenJob({**job, "rewards": [HIDDEN]})], None)
    return kept


def test_a_key_is_made_once_and_opens_what_was_kept_before(tmp_path: Path) -> None:
    with parts(tmp_path) as service:
        submitted(service, "kept")
    key = (tmp_path / KEY_FILE).read_text()
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    with parts(tmp_path) as service:
        (job,) = service.store.open_jobs()
        (reward,) = JobConfig.model_validate(job.spec).rewards
        assert reward.args["headers"] != HIDDEN["args"]["headers"]
        assert Secrets([key.strip()]).opened(reward).args["headers"] == HIDDEN["args"]["headers"]
        service.handover.message(job)
    assert (tmp_path / KEY_FILE).read_text() == key


@pytest.mark.parametrize("found", ["", Fernet.generate_key().decode()], ids=["gone", "another"])
def test_a_key_that_is_gone_or_another_is_missed_and_what_to_do_is_said(tmp_path: Path, found: str) -> None:
    with parts(tmp_path) as service:
        submitted(service, "kept")
    path = tmp_path / KEY_FILE
    key = path.read_text()
    path.unlink()
    if found:
        path.write_text(found)
    said = rf"put it back from a backup.*make {re.escape(str(path))} an empty file"
    with pytest.raises(ConfigError, match=said), parts(tmp_path):
        pass
    assert path.is_file() == bool(found)
    # a new one, with which nothing was encrypted yet, first
    path.write_text(f"{Fernet.generate_key().decode()}\n{key}")
    with parts(tmp_path) as service:
        service.handover.message(service.store.open_jobs()[0])
    path.write_text("")
    with parts(tmp_path) as service:
        (lost,) = service.store.open_jobs()
        with pytest.raises(ConfigError, match="submit the job again"):
            service.handover.message(lost)
        service.recorder.record_state(lost.id, JobState.FAILED, "")
        lost.state = "failed"
        with pytest.raises(ConfigError, match="submit the job again"):
            service.submissions.steer(lost, Wanted.RUN)
        submitted(service, "anew")
    with parts(tmp_path) as service:
        service.handover.message(service.store.open_jobs()[0])


def test_a_key_may_come_from_the_environment_or_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with parts(tmp_path / "a", secret_key_file=str(tmp_path / "elsewhere" / "key")):
        pass
    assert (tmp_path / "elsewhere" / "key").is_file()
    assert not (tmp_path / "a" / KEY_FILE).exists()
    monkeypatch.setenv(KEY_VARIABLE, Fernet.generate_key().decode())
    with parts(tmp_path / "b"):
        pass
    assert not (tmp_path / "b" / KEY_FILE).exists()
    monkeypatch.setenv(KEY_VARIABLE, "hello")
    with pytest.raises(ConfigError, match=f"{KEY_VARIABLE} holds no key: make one with python"), parts(tmp_path / "b"):
        pass


def save(path: Path) -> None:
    """What a commit has of an adapter."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (path / name).write_text("{}")


def test_another_password_is_no_other_job(tmp_path: Path) -> None:
    directory = JobDirectory(tmp_path / "job")

    def identity(word: str, url: str = "https://example.org") -> Json:
        args = {"url": url, "headers": {"Authorization": word}}
        job = {**tiny("job"), "rewards": [{"name": "http", "args": args}]}
        del job["reward"]
        return of_config(JobConfig.model_validate(job))

    open_job(directory, identity("first"))
    assert "first" not in (directory.path / "job.yaml").read_text()
    directory.commit(Committed(step=1), save)
    assert not open_job(directory, identity("second")), "and nothing is told of the old one"
    with pytest.raises(RunError, match=r"another\.example"):
        open_job(directory, identity("second", "https://another.example"))


def test_what_a_tenant_has_sealed_is_no_text_for_clients() -> None:
    secrets = Secrets([Fernet.generate_key().decode()])
    fields = {"person": "somebody"}
    assert secrets.unpack("code", secrets.pack("code", fields), 60) == fields
    sealed = secrets.seal(json.dumps(["code", fields]))
    assert secrets.unpack("code", sealed.removeprefix(SEALED), 60) is None
