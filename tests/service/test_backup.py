"""`motet backup` and `motet restore`: a copy of a running service continues as the service would."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from motet.core.checksums import hash_of, sums_of
from motet.core.errors import RunError
from motet.core.types import ADAPTER_FILES
from motet.runtime.checkpoint import Committed, JobDirectory
from motet.runtime.damage import damages
from motet.runtime.directory_checks import open_job
from motet.service.backup import MANIFEST, Copied, _copy, back_up, restore
from motet.service.database.store import Store
from motet.service.database.tenants import Principal
from tests.support.database import new_database
from tests.support.service_run import serving, tiny
from tests.support.waiting import wait_until

NAMES = (*ADAPTER_FILES, *(f"tensor-{number}" for number in range(20)))


def silent(place: str) -> None:
    pass


def copied(house, tmp_path: Path) -> Path:
    back_up(house.storage.directory, tmp_path / "copy", "", silent)
    return tmp_path / "copy"


def test_a_restored_service_has_the_database_the_jobs_and_the_files(house, tmp_path):
    (house.storage.directory / "run" / house.job["id"] / "versions" / ".tmp-v9").mkdir(exist_ok=True)
    copy = copied(house, tmp_path)
    restored = restore(copy, tmp_path / "again", "", silent)
    job = JobDirectory(tmp_path / "again" / "run" / house.job["id"])
    original = house.storage.job(house.job["id"])
    assert restored.jobs == len(list(original.path.parent.iterdir()))
    assert (job.newest(), job.versions()) == (original.newest(), original.versions())
    assert not list(tmp_path.rglob(".tmp-*"))
    assert not list(tmp_path.rglob("access.log"))
    assert {path.stat().st_mode & 0o77 for path in (tmp_path / "again").rglob("*") if path.is_file()} == {0}
    store = Store(f"sqlite:///{tmp_path / 'again' / 'motet.db'}")
    owner = store.tenants.find("us")
    assert owner is not None
    assert store.job(Principal.member_of(owner.id), house.job["id"]) is not None
    store.close()


@pytest.mark.parametrize("damage", ["altered", "missing", "manifest"])
def test_a_damaged_backup_is_refused_and_leaves_nothing(house, tmp_path, damage):
    copy = copied(house, tmp_path)
    file = next(path for path in sorted((copy / "files").rglob("*")) if path.is_file())
    match damage:
        case "altered":
            file.write_bytes(file.read_bytes()[:-1] + b"x")
        case "missing":
            file.unlink()
        case "manifest":
            (copy / MANIFEST).unlink()
    with pytest.raises(RunError, match=r"damaged|whole"):
        restore(copy, tmp_path / "again", "", silent)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]


ELSEWHERE = ["../outside", "a/../../outside", "/{place}/outside", "a/./b", "a//b", "./a", "a/", "", ".", "x\0y"]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_manifest_that_points_elsewhere_is_refused(house, tmp_path, name):
    """Also where the file that it names is in the backup: it would be written elsewhere."""
    copy, name = copied(house, tmp_path), name.format(place=tmp_path)
    (copy / "a" / "b").mkdir(parents=True)
    (tmp_path / "outside").write_text("x")
    (copy / "outside").write_text("x")
    with pytest.raises(RunError, match="outside of the backup"):
        restore(with_file(copy, name, b"x"), tmp_path / "below" / "again", "", silent)
    assert not (tmp_path / "below").exists()
    assert (tmp_path / "outside").read_text() == "x"


@pytest.mark.parametrize("what", ["a link", "below a link", "below a file", "a pipe", "a long name", "twice"])
def test_what_is_not_a_file_of_the_backup_itself_is_refused(house, tmp_path, what):
    copy, name = copied(house, tmp_path), "more/file"
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("x")
    match what:
        case "a link":
            (copy / "more").mkdir()
            (copy / name).symlink_to(tmp_path / "outside" / "file")
        case "below a link":
            (copy / "more").symlink_to(tmp_path / "outside")
        case "below a file":
            name = "motet.db/file"
        case "a pipe":
            (copy / "more").mkdir()
            os.mkfifo(copy / name)
        case "a long name":
            name = "x" * 300
        case "twice":
            (copy / "more").symlink_to(copy / "files")  # inside the backup, as by a file system without capital letters
    with pytest.raises(RunError, match=r"missing|cannot be restored"):
        restore(with_file(copy, name, b"x"), tmp_path / "again", "", silent)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("text", ["[]", '{"files": []}', '{"files": {"a": 1}}', '{"files": null}', "\xff"])
def test_a_manifest_of_another_kind_is_refused(house, tmp_path, text):
    (copy := copied(house, tmp_path)).joinpath(MANIFEST).write_bytes(text.encode("latin1"))
    with pytest.raises(RunError, match="not a complete backup"):
        restore(copy, tmp_path / "again", "", silent)


def with_file(copy: Path, name: str, content: bytes) -> Path:
    """A backup whose manifest also lists this file."""
    manifest = json.loads((copy / MANIFEST).read_text())
    manifest["files"][name] = hashlib.sha256(content).hexdigest()
    (copy / MANIFEST).write_text(json.dumps(manifest))
    return copy


def test_targets_that_exist_and_directories_of_no_service_are_refused(house, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(RunError, match="new directory"):
        back_up(house.storage.directory, tmp_path / "there", "", silent)
    with pytest.raises(RunError, match="elsewhere"):
        back_up(house.storage.directory, house.storage.directory / "inside", "", silent)
    with pytest.raises(RunError, match=r"motet\.db"):
        back_up(tmp_path / "there", tmp_path / "copy", "", silent)
    copy = copied(house, tmp_path)
    (tmp_path / "there" / "mine").touch()
    with pytest.raises(RunError, match="not empty"):
        restore(copy, tmp_path / "there", "", silent)


def test_postgres_is_copied_and_put_back_by_its_own_programs(postgres, tmp_path):
    with new_database(postgres) as before, new_database(postgres) as after:
        store = Store(before)
        store.tenants.create_key("team", "k", "member")
        store.close()
        (tmp_path / "served" / "files").mkdir(parents=True)
        back_up(tmp_path / "served", tmp_path / "copy", before, silent)
        with pytest.raises(RunError, match="--database"):
            restore(tmp_path / "copy", tmp_path / "again", "", silent)
        restore(tmp_path / "copy", tmp_path / "again", after, silent)
        store = Store(after)
        assert [tenant for _, tenant in store.tenants.keys_of(None)] == ["team"]
        store.close()


def test_how_a_program_of_postgres_ended_is_told(tmp_path, monkeypatch):
    (tmp_path / "served" / "files").mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    program = tmp_path / "pg_dump"
    for does, how in (("echo no room >&2; exit 3", "ended with exit status 3: no room"), ("kill -9 $$", "SIGKILL")):
        program.write_text(f"#!/bin/sh\n{does}\n")
        program.chmod(0o700)
        with pytest.raises(RunError, match=f"^pg_dump .*{how}"):
            back_up(tmp_path / "served", tmp_path / "copy", "postgresql://nobody@nowhere/none", silent)


def served_job(tmp_path: Path) -> tuple[Path, JobDirectory]:
    """A service's directory with one job that has no commit."""
    served = tmp_path / "served"
    served.mkdir()
    Store(f"sqlite:///{served / 'motet.db'}").close()
    job = JobDirectory(served / "run" / "job-1")
    open_job(job, {"name": "job-1"})
    return served, job


def test_commits_that_are_cleared_away_meanwhile_do_not_spoil_a_copy(tmp_path):
    served, job = served_job(tmp_path)
    over = threading.Event()

    def train() -> None:
        for step in itertools.count(1):
            if over.is_set():
                return

            def save(draft: Path, step: int = step) -> None:
                for name in NAMES:
                    (draft / name).write_text(f"{step}" * 1000)

            job.append(job.metrics, {"step": step})
            job.commit(Committed(step=step), save)
            job.prune(1, 1e9)
            time.sleep(0.01)  # a hundred commits a second

    thread = threading.Thread(target=train)
    thread.start()
    try:
        wait_until(lambda: bool(job.steps()))
        for copy in (tmp_path / f"copy-{number}" for number in range(20)):
            back_up(served, copy, "", silent)
            there = JobDirectory(copy / "run" / "job-1")
            newest = there.newest()
            assert newest is not None
            state = there.path / "state" / str(newest.step)
            assert (
                newest.sums.items()
                >= {name: total for name, total in sums_of(state).items() if name != "state.json"}.items()
            )
            assert {path.name for path in state.iterdir()} == {*NAMES, "state.json"}
            assert newest.step in there.versions()
            assert hash_of(there.metrics, newest.metrics_bytes).hexdigest() == newest.sums["metrics.jsonl"]
            assert damages(there) == []
    finally:
        over.set()
        thread.join()


def test_a_log_that_is_deleted_meanwhile_is_that_of_an_older_commit(tmp_path):
    served, job = served_job(tmp_path)

    def save(draft: Path) -> None:
        for name in ADAPTER_FILES:
            (draft / name).touch()

    def train(step: int) -> None:
        job.write_rollouts(str(step), [{"reward": 1.0}])
        job.commit(Committed(step=step + 1), save)
        job.prune(2, 0)

    train(0)
    job.receipts.mkdir()
    for number in range(2000):
        (job.path / "receipts" / f"other-{number}").touch()
    listed = [tmp_path / name / "run" / "job-1" / "manifest.jsonl" for name in (".part-copy", "copy")]

    def train_on() -> None:
        wait_until(lambda: any(file.exists() for file in listed))
        train(1)

    thread = threading.Thread(target=train_on)
    thread.start()
    back_up(served, tmp_path / "copy", "", silent)
    thread.join()
    assert job.steps() == [1, 2]
    assert damages(JobDirectory(tmp_path / "copy" / "run" / "job-1")) == []


def test_a_number_that_a_deleted_file_gave_to_another_links_nothing(tmp_path):
    places = [tmp_path / name for name in ("draft", "first", "second", "twin")]
    places[0].mkdir()
    places[1].write_text("one")
    os.link(places[1], places[3])
    copied = Copied()
    assert _copy(places[1], places[0] / "first", places[0], copied)
    places[2].write_text("two")
    (identity, there), status = copied.linked.popitem(), places[2].stat()
    copied.linked[status.st_dev, status.st_ino, *identity[2:]] = there  # as the file system would have it
    assert _copy(places[2], places[0] / "second", places[0], copied)
    assert (places[0] / "second").read_text() == "two"


BUSY = 60
"""Steps of a job that a backup meets in the middle."""


@pytest.mark.soak
def test_a_copy_of_a_busy_service_ends_its_jobs_with_the_same_bytes(tmp_path):
    with serving(tmp_path / "served") as service:
        service.submit(tiny("sort", steps=BUSY))
        service.reaches("sort", 4)
        subprocess.run(
            [sys.executable, "-m", "motet", "backup", str(tmp_path / "copy"), "--directory", str(service.directory)],
            check=True,
        )
        service.ended("sort")
        weights = service.weights("sort")
    again = tmp_path / "again"
    subprocess.run(
        [sys.executable, "-m", "motet", "restore", str(tmp_path / "copy"), "--directory", str(again)], check=True
    )
    shutil.copy(tmp_path / "served" / "secret.key", again)
    assert JobDirectory(next((again / "run").glob("job-*"))).steps()[-1] < BUSY
    with serving(again) as service:
        assert service.ended("sort") == "succeeded", service.job("sort")["message"]
        assert service.weights("sort") == weights
        assert sorted(set(steps := service.steps("sort"))) == steps == list(range(BUSY + 1)), (
            "the last line is an evaluation"
        )
