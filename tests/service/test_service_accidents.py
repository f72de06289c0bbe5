"""What goes wrong in a service stays with the one it happens to: files that vanish, odd texts, and two who come together."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import shutil
import sqlite3
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from fastapi import Request
from sqlalchemy import create_engine, text
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnection
from sqlalchemy.orm import Session

import motet
from motet.config import JobConfig, RewardConfig
from motet.config.jobfile import normal_job
from motet.config.service import ANY_SIZE
from motet.core.errors import ConfigError, DiskFull, StoreError
from motet.core.types import Chunk, FinishReason, JobState, Wanted
from motet.hosts.charged import Charged
from motet.hosts.host_link import HostHandlers, HostLink
from motet.hosts.hosts import Hosts
from motet.hosts.messages import (
    Answer,
    Complete,
    ExamineAdapter,
    FromHost,
    JobStepped,
    PromptRead,
    ScoreRequest,
    ScoresAnswered,
    StartHost,
    Tokens,
)
from motet.hosts.scores import AskedOfService
from motet.observe.follow import Followers
from motet.process.channel import LONGEST_LINE, decode, encode
from motet.rewards.reward_http import Addresses, HttpRewards
from motet.service.adapters.adapters import Adapters
from motet.service.answers import Asks
from motet.service.app import create_app
from motet.service.bases import Bases
from motet.service.database.store import Store
from motet.service.database.tables import StoredJob
from motet.service.errors import _answer
from motet.service.events import EventBus, EventLog
from motet.service.jobs.handover import Handover
from motet.service.jobs.queue import JobQueue
from motet.service.jobs.recorder import EventRecorder
from motet.service.rewards import Grading, Scoring
from motet.service.schemas.workers import LeaseRequest
from motet.service.settings import Settings
from motet.service.storage import Storage
from motet.service.tenants.ledger import Ledger
from motet.service.tenants.stored import StoredBytes
from motet.service.tinker.parts import PREFIX
from motet.service.workers.rewards import RewardWorkers
from tests.support import inside
from tests.support.database import person, queued
from tests.support.house import House, open_house
from tests.support.misbehaving_rewards import misbehaving
from tests.support.places import Place
from tests.support.sending import sending
from tests.support.service_run import ROWS, Json, tiny
from tests.support.small_disk import small_disk
from tests.support.together import at_once
from tests.support.waiting import PATIENCE, until, wait_until


def uploaded(house: House) -> str:
    """The id of a new file."""
    return str(house.ask("POST", "/v1/files", files={"file": ("rows.jsonl", ROWS)}).json()["id"])


# --- what a job names goes away ---------------------------------------------------------------------------------------------


def test_a_job_whose_file_is_gone_when_it_may_start_fails_and_those_behind_it_start(house: House) -> None:
    file, later = uploaded(house), {"at": time.time() + 3600}
    jobs = list[str]()
    for name, data in (("unlucky", {"data": file}), ("lucky", {})):
        job = house.ask("POST", "/v1/jobs", json={**tiny(name), **data}, params=later).json()
        assert job["state"] == "queued"
        jobs.append(job["id"])
    assert house.ask("DELETE", f"/v1/files/{file}").status_code == 200
    for job in jobs:
        house.store.change_job(job, start_at=time.time() - 1)
    house.part(JobQueue).release()
    found = {name: house.ask("GET", f"/v1/jobs/{name}").json() for name in ("unlucky", "lucky")}
    assert (found["unlucky"]["state"], found["lucky"]["state"]) == ("failed", "queued")
    assert file in found["unlucky"]["message"]
    handed = [message.job["name"] for message in house.part(Handover).open_jobs()]
    assert found["lucky"]["id"] in handed
    assert found["unlucky"]["id"] not in handed


def test_a_start_that_cannot_be_linked_fails_its_job_alone(store: Store, tmp_path: Path) -> None:
    place = Place(store, tmp_path / "run")
    us = person(store, "us")
    elder = place.submit(us, "elder")
    place.save(elder, 1)
    younger = place.submit(us, "younger", after=["elder"], adapter={"init": "elder@best"})
    place.submit(us, "other", after=["elder"])
    place.end(elder)
    place.initial.path(younger.id).parent.write_text("no directory")  # as when the disk is full: no file can be made
    place.queue.release()
    wait_until(lambda: (place.now(younger).state, place.handed) == ("failed", ["other"]))
    assert place.now(younger).message


def test_those_who_wait_are_looked_at_again_after_whatever_goes_wrong(store: Store, tmp_path: Path) -> None:
    class Broken(Place):
        """Cannot hand over a job of one name."""

        failed = 0

        def __post_init__(self) -> None:
            super().__post_init__()
            self.queue._hand_over = self.take

        def take(self, job: StoredJob) -> None:
            """What the handover does with a job."""
            if job.name == "odd":
                self.failed += 1
                raise LookupError("nobody thought of this")
            self.handed.append(job.name)

    place = Broken(store, tmp_path / "run")
    us = person(store, "us")
    place.submit(us, "odd", at=time.time() + 1)

    async def work() -> None:
        watching_them = asyncio.create_task(place.queue.watch())
        await until(lambda: place.failed > 0)
        await asyncio.to_thread(place.submit, us, "plain", at=time.time() + 1)
        await until(lambda: place.handed == ["plain"], PATIENCE)
        watching_them.cancel()

    asyncio.run(work())


def test_a_failed_job_whose_file_is_gone_is_not_resumed_and_stays_failed(house: House) -> None:
    file = uploaded(house)
    job = house.ask("POST", "/v1/jobs", json={**tiny("stuck"), "data": file}).json()["id"]
    house.recorder.record_state(job, JobState.FAILED, "no luck")
    house.ask("DELETE", f"/v1/files/{file}")
    assert file in house.refused(400, "POST", "/v1/jobs/stuck/resume")["message"]
    assert house.ask("GET", "/v1/jobs/stuck").json()["state"] == "failed"


# --- events -----------------------------------------------------------------------------------------------------------------


def test_an_events_id_is_never_used_again(store: Store) -> None:
    us = person(store, "us")
    stays, goes = queued(store, us, "stays", {}, 3, None).id, queued(store, us, "goes", {}, 3, None).id
    last = store.add_event(goes, "step", "0", {})
    assert last is not None
    store.delete_job(goes)
    found = store.add_event(stays, "step", "0", {})
    assert found is not None
    assert found > last
    assert [event.key for event in store.events(stays, last)] == ["0"]


def recorder_of(store: Store, directory: Path) -> EventRecorder:
    """Of a service without observers."""
    bus, storage = EventBus(), Storage(directory)
    workers = [RewardWorkers(store, bus, 1.0)]
    return EventRecorder(
        store, storage, Ledger(store), StoredBytes(store, storage), bus, workers, Followers((), directory)
    )


def test_a_reason_with_characters_that_no_database_keeps_is_kept_without_them(store: Store, tmp_path: Path) -> None:
    job = queued(store, person(store, "us"), "sort", {}, 3, None).id
    recorder_of(store, tmp_path).record_state(job, JobState.FAILED, "a\0b\ud800c\u2028d")
    assert store.events(job)[-1].data["message"] == "ab?c\u2028d"
    recorder_of(store, tmp_path).record_state(
        job, JobState.RUNNING, "", [f"adapter.init: {tmp_path}/run/job-1/start\0"]
    )
    assert store.events(job)[-1].data["inexact"] == ["adapter.init: job-1/start"]


@pytest.mark.parametrize(
    "error",
    [
        NoConnection("the pool is empty"),
        InterfaceError("", {}, OSError("closed")),
    ],
)
def test_what_is_told_while_no_connection_is_free_is_kept_later(house: House, error: Exception) -> None:
    tries: list[str] = []

    def write() -> None:
        tries.append(house.recorder.failure)
        if len(tries) < 3:
            raise error

    house.recorder._write(write)
    assert len(tries) == 3
    assert "cannot be written" in tries[2]
    assert house.recorder.failure == ""


class Interrupted(Store):
    """A database that is away for some of its next transactions."""

    away: Sequence[bool] = ()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Session]:
        away, self.away = self.away[:1], self.away[1:]
        if any(away):
            raise OperationalError("", {}, OSError("the server closed the connection unexpectedly"))
        with super().transaction() as session:
            yield session


async def _stays() -> bool:
    return False


def test_rollouts_are_scored_though_the_database_is_away_for_a_moment(house: House, tmp_path: Path) -> None:
    store = Interrupted(f"sqlite:///{tmp_path / 'motet.db'}")
    us, config = person(store, "us"), JobConfig.model_validate(normal_job({**tiny("scored"), "reward": "worker"}))
    job = queued(store, us, "scored", config.model_dump(mode="json"), 3, None).id
    workers = RewardWorkers(store, EventBus(), 60.0)

    async def work() -> ScoresAnswered:
        scoring = Scoring(store, HttpRewards(Addresses(())), workers, house.part(Grading))
        reward = config.rewards[0].model_dump(mode="json")
        store.away = [True, False, False, True]  # the job is looked for, again, old units go, the unit is kept
        asking = asyncio.create_task(scoring.answer(ScoreRequest(7, job, reward, {"id": 1}, ["a", "b"], [])))
        async with asyncio.timeout(PATIENCE):
            while store.away:
                await asyncio.sleep(0.02)
            asked, stored = LeaseRequest(worker="w", most=1), Store.job_by_id(store, job)
            assert stored is not None
            for unit in await workers.lease(stored, asked, "key", _stays, lambda: lambda: None):
                await workers.settle(job, {unit["id"]: [0.5, 1.0]})
        return await asking

    assert asyncio.run(work()) == ScoresAnswered(7, [0.5, 1.0])
    store.close()


def test_a_tenant_whose_names_do_not_resolve_keeps_few_threads(house: House) -> None:
    reward = {"name": "http", "args": {"url": "https://scores.example"}, "wall_seconds": 600}
    config = JobConfig.model_validate(normal_job({**tiny("scored"), "reward": reward})).model_dump(mode="json")
    looked, answers = 0, asyncio.Event()

    async def resolve(host: str, port: int) -> list[str]:
        nonlocal looked
        looked += 1
        await answers.wait()
        return []

    async def work() -> None:
        http = HttpRewards(Addresses(("scores.example",)), resolve)
        scoring = Scoring(house.store, http, house.part(RewardWorkers), house.part(Grading))
        asking = list[asyncio.Task[ScoresAnswered]]()
        for tenant, number, most in (("many", 6, 8), ("few", 1, 10)):
            who = person(house.store, tenant)
            for job in [queued(house.store, who, f"names-{n}", config, 3, None).id for n in range(number)]:
                asked = [ScoreRequest(key, job, reward, {"id": 1}, ["a"], []) for key in range(3)]
                asking += [asyncio.create_task(scoring.answer(one)) for one in asked]
            await until(lambda most=most: looked >= most)  # type: ignore[misc]
            await asyncio.sleep(0.5)
            assert looked == most
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    asyncio.run(work())


def test_a_service_that_stops_waits_for_no_score_whose_database_is_away(house: House, tmp_path: Path) -> None:
    """Else the jobs that want it would keep the service for two minutes."""
    store = Interrupted(f"sqlite:///{tmp_path / 'motet.db'}")

    async def work() -> ScoresAnswered:
        store.away = [True] * 1000
        scoring = Scoring(store, HttpRewards(Addresses(())), house.part(RewardWorkers), house.part(Grading))
        asking = asyncio.create_task(scoring.answer(ScoreRequest(7, "a job", {"name": "judge"}, {}, [], [])))
        await until(lambda: len(store.away) < 999)
        scoring.close()
        async with asyncio.timeout(PATIENCE):
            return await asking

    assert asyncio.run(work()) == ScoresAnswered(7, away=True)
    store.close()


class Judging(Hosts):
    """Whatever it is asked gets full marks; counts how often it was asked."""

    asked = 0

    async def ask(self, question: Complete | ExamineAdapter, charged: Charged | None = None) -> AsyncIterator[Answer]:
        """An answer in one piece."""
        self.asked += 1
        yield PromptRead(0, 10)
        nothing = np.zeros(0, np.int32)
        chunk = Chunk(0, nothing, np.zeros(0, np.float32), nothing, '{"result": 1}', FinishReason.STOP)
        yield Tokens(0, chunk, [])


def test_a_judge_that_has_answered_is_not_asked_again_because_the_database_is_away(
    house: House, tmp_path: Path
) -> None:
    """Its tokens count: what may fail of the database comes before the first question."""
    settings = house.part(Settings)
    store, engine = Interrupted(f"sqlite:///{settings.directory / 'motet.db'}"), Judging([], tmp_path)
    adapters = Adapters(store, house.storage, house.part(Bases))
    grading = Grading(Asks(engine, lambda tenant: math.inf), adapters)
    scoring = Scoring(store, HttpRewards(Addresses(())), house.part(RewardWorkers), grading)
    judge = {"type": "score_model", "name": "j", "model": "brought", "input": [{"role": "user", "content": "Good?"}]}
    reward = RewardConfig(name="judge", args=judge).model_dump(mode="json")
    request = ScoreRequest(
        7, house.job["id"], reward, {"id": 1, "messages": [], "answer": "", "metadata": {}}, ["a", "b"], []
    )

    async def answered(away: Sequence[bool]) -> tuple[int, int]:
        """How often the database and the judge were asked."""
        store.away, engine.asked = away, 0
        assert await scoring.answer(request) == ScoresAnswered(7, [1.0, 1.0])
        return len(away) - len(store.away), engine.asked

    async def work() -> None:
        n_looks, n_questions = await answered([False] * 100)
        assert n_questions == 2
        for place in range(n_looks + 1):
            assert (await answered([*[False] * place, True]))[1] == 2, place

    asyncio.run(work())
    store.close()


def test_a_job_that_a_host_has_is_read_no_more_from_the_database(house: House) -> None:
    """One that is to be cancelled ends with its step there; ended before, it could be deleted while it trains."""
    client, handover = house.part(Hosts), house.part(Handover)
    job = house.ask("POST", "/v1/jobs", json=tiny("placed")).json()["id"]
    (message,) = [one for one in handover.open_jobs() if one.job["name"] == job]
    (host,) = client.hosts
    host.ready = True
    client._place(message, client.jobs.loads())
    host.ready = False
    assert house.ask("POST", f"/v1/jobs/{job}/cancel").is_success
    assert job not in [one.job["name"] for one in handover.open_jobs()]
    assert house.ask("GET", f"/v1/jobs/{job}").json()["state"] == "queued"
    inside.hear(client, host, None)  # its process is gone
    assert job not in [one.job["name"] for one in handover.open_jobs()]
    assert house.ask("GET", f"/v1/jobs/{job}").json()["state"] == "cancelled"


@pytest.mark.parametrize("ended", [JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED])
@pytest.mark.parametrize("wanted", [Wanted.CANCEL, Wanted.PAUSE])
def test_a_job_that_ends_while_it_is_asked_for_something_keeps_its_end(
    house: House, ended: JobState, wanted: Wanted
) -> None:
    job_id = house.ask("POST", "/v1/jobs", json=tiny(f"ends-{ended}-{wanted}")).json()["id"]
    seen = house.store.job_by_id(job_id)  # what the request read
    assert seen is not None
    house.recorder.record_state(job_id, ended, "why")
    asked = (
        contextlib.nullcontext()
        if (ended, wanted) == (JobState.CANCELLED, Wanted.CANCEL)
        else pytest.raises(StoreError)
    )
    with asked:
        house.service.submissions.steer(seen, wanted)
    job = house.store.job_by_id(job_id)
    assert job is not None
    assert (job.state, job.message) == (ended.value, "why")


def test_no_state_follows_that_of_a_job_which_has_succeeded_or_was_cancelled(store: Store, tmp_path: Path) -> None:
    recorder = recorder_of(store, tmp_path)
    for ended in (JobState.SUCCEEDED, JobState.CANCELLED, JobState.FAILED):
        job = queued(store, person(store, "us"), ended.value, {}, 3, None).id
        for state in (ended, JobState.PAUSED):
            recorder.record_state(job, state, "")
        stored = store.job_by_id(job)
        assert stored is not None
        assert stored.state == (JobState.PAUSED if ended is JobState.FAILED else ended).value


def test_texts_with_odd_ends_of_lines_come_whole(house: House) -> None:
    text = "a\u2028b\u2029c\x85d\x1ee\r\nf"
    odd = {"text": text, "reward": 0.5, "step": 1, "error": "a\ud800"}
    house.storage.job(house.job["id"]).write_rollouts("1", [odd])
    (one,) = house.ask("GET", "/v1/jobs/ended/rollouts?step=1").json()["data"]
    assert (one["text"], one["error"]) == (text, "a?")
    job = house.ask("POST", "/v1/jobs", json=tiny("told")).json()["id"]
    house.recorder.record_state(job, JobState.FAILED, text)
    with motet.Client(str(house.http.base_url), house.keys["ours"]) as client:
        assert [event.data["message"] for event in client.events(job, follow=True)] == ["", text]


def test_steps_are_told_again_only_from_the_first_that_is_not_kept(store: Store) -> None:
    job = queued(store, person(store, "us"), "sort", {}, 3, None).id
    assert EventLog(store, EventBus()).first_missing_step(job) == 0
    for step in (*range(12), 13):
        store.add_event(job, "step", str(step), {})
        assert EventLog(store, EventBus()).first_missing_step(job) == (step + 1 if step < 12 else 0)
    store.add_event(job, "step", "12", {})
    assert EventLog(store, EventBus()).first_missing_step(job) == 14


def test_the_engine_hears_how_many_steps_are_kept(house: House) -> None:
    job = house.ask("POST", "/v1/jobs", json=tiny("kept")).json()["id"]
    for step in range(3):
        house.recorder.record_step(job, {"step": step, "loss": 0.0})
    (message,) = [one for one in house.part(Handover).open_jobs() if one.job["name"] == job]
    assert message.first_step == 3


# --- two who come together --------------------------------------------------------------------------------------------------


def test_uploads_that_come_together_do_not_share_the_last_room(house: House) -> None:
    rows = b'{"prompt": "a?", "answer": "b"}\n' * 200
    stored = house.ask("GET", "/v1/limits").json()["stored_bytes"]
    most = (stored + 2.5 * len(rows)) / 2**20
    assert house.ask("PUT", "/v1/tenants/us/limits", "admin", json={"storage_mb": most}).status_code == 200
    try:
        answers = at_once(
            lambda _: house.ask("POST", "/v1/files", files={"file": ("rows.jsonl", rows)}).status_code, 12
        )
        assert sorted(answers) == [201] * 2 + [403] * 10
    finally:
        house.ask("PUT", "/v1/tenants/us/limits", "admin", json={})


def test_two_changes_of_a_job_that_come_together_both_count(house: House) -> None:
    house.ask("POST", "/v1/jobs", json=tiny("changed"))
    for round_ in range(1, 13):
        given = {"budget": round_}, {"priority": round_}

        def change(number: int, given: tuple[Json, ...] = given) -> int:
            return house.ask("PATCH", "/v1/jobs/changed", json=given[number % 2]).status_code

        assert at_once(change, 6) == [200] * 6
        spec = house.ask("GET", "/v1/jobs/changed").json()["spec"]
        assert (spec["budget"], spec["priority"]) == (round_, round_)


def test_a_stop_may_be_a_long_text_but_not_one_of_many(house: House) -> None:
    asked: Json = {"model": "small", "messages": [{"role": "user", "content": "a"}]}
    for stop in ("</answer>", ["</answer>"] * 8):
        house.refused(503, "POST", "/v1/chat/completions", json={**asked, "stop": stop})  # there is no engine here
    house.refused(400, "POST", "/v1/chat/completions", json={**asked, "stop": ["a"] * 9})


@pytest.mark.parametrize("error", [OSError(errno.EDQUOT, "quota"), DiskFull("the disk is full: /secret/place")])
def test_a_full_disk_is_told_as_one_and_without_its_places(error: Exception) -> None:
    answer = _answer(Request({"type": "http", "path": "/", "headers": []}), error)
    assert answer.status_code == 507
    assert "disk of the service is full" in bytes(answer.body).decode()
    assert b"secret" not in answer.body


def test_a_request_that_finds_no_room_on_the_disk_is_told_so_and_the_next_has_room(tmp_path: Path) -> None:
    asked: Json = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {}}
    with open_house(tmp_path / "house") as house, small_disk(tmp_path / "house" / "samples", "16k") as disk:
        filler = disk / "filler"
        filler.write_bytes(b"x" * 2**14)
        error = house.refused(507, "POST", f"{PREFIX}/asample", json=asked)
        assert (error["type"], "disk of the service is full" in error["message"]) == ("unavailable_error", True)
        assert [path for path in disk.rglob("*") if path.is_file()] == [filler], "a part of a file is left"
        filler.unlink()
        name = house.ask("POST", f"{PREFIX}/asample", json=asked).json()["request_id"]
        house.ask("POST", f"{PREFIX}/cancel_future", json={"request_id": name})


def test_an_upload_that_a_kill_left_without_a_row_is_removed_at_the_next_start(tmp_path: Path) -> None:
    """And one that has its row stays; what is moved was written to the disk before."""
    with open_house(tmp_path) as house:
        kept = {*(tmp_path / "files").iterdir(), *house.storage.adapters.iterdir()}
        killed = [house.storage.upload("file-killed", "rows.jsonl"), house.storage.adapters / "adapter-killed"]
        listed = [house.storage.upload(house.file["id"], "rows.jsonl"), house.storage.adapters / "adapter-brought"]
        for path in (*killed, *listed):
            part = house.storage.arriving(path)
            if path.suffix:
                part.write_bytes(b"{}\n")
            else:
                shutil.rmtree(path, ignore_errors=True)
                part.mkdir()
                (part / "adapter_config.json").write_text("{}")
            with contextlib.suppress(InterruptedError), house.storage.landed(part, path):
                raise InterruptedError  # the process is killed here
        assert {*(tmp_path / "files").iterdir(), *house.storage.adapters.iterdir()} == kept | {*killed}
        again = create_app(Settings("small", tmp_path)).state.service
        again.request_files.close()
        again.store.close()
        assert {*(tmp_path / "files").iterdir(), *house.storage.adapters.iterdir()} == kept
        part = house.storage.arriving(house.storage.adapters / "adapter-new")
        part.mkdir()
        (part / "lost").symlink_to("nothing")  # what cannot be synced has no place
        with pytest.raises(FileNotFoundError), house.storage.landed(part, house.storage.adapters / "adapter-new"):
            pass
        assert part.is_dir()


def test_a_killed_upload_leaves_its_part_where_the_next_start_removes_it(tmp_path: Path) -> None:
    rows = b'{"prompt": "a", "answer": "b"}\n' * 300
    with open_house(tmp_path) as house:
        kept = {*(tmp_path / "files").iterdir(), *house.storage.adapters.iterdir()}
        (tmp_path / "arriving").rmdir()  # it is empty
        with small_disk(tmp_path / "arriving", "8k") as parts:
            house.refused(507, "POST", "/v1/files", files={"file": ("rows.jsonl", rows)})
            assert not list(parts.iterdir())
        (tmp_path / "arriving" / "file-1.jsonl").write_bytes(rows)
        again = create_app(Settings("small", tmp_path)).state.service
        again.request_files.close()
        again.store.close()
        assert not (tmp_path / "arriving").exists()
        assert {*(tmp_path / "files").iterdir(), *house.storage.adapters.iterdir()} == kept


# --- the engine's messages --------------------------------------------------------------------------------------------------


def test_what_is_too_long_to_be_scored_elsewhere_is_a_reason_and_the_next_is_scored() -> None:
    sent: list[FromHost] = []

    def send(message: FromHost) -> None:
        sent.append(decode(encode(message), FromHost))

    async def work() -> None:
        scores, reward = AskedOfService(sending(send)), RewardConfig(name="judge")
        async with asyncio.timeout(PATIENCE):  # sent in spite of it, nobody would answer
            found = await scores("job", reward, {"id": 1, "metadata": {"page": "x" * LONGEST_LINE}}, ["a", "b"])
        assert len(found) == 2
        assert all("64 MB" in str(one) and "columns" in str(one) for one in found)
        assert sent == []
        asking = asyncio.create_task(scores("job", reward, {"id": 2}, ["a"]))
        await until(lambda: bool(sent))
        assert isinstance(sent[0], ScoreRequest)
        scores.hear(ScoresAnswered(sent[0].key, [0.5]))
        assert await asking == [0.5]

    asyncio.run(work())


@contextlib.contextmanager
def busy_threads() -> Iterator[None]:
    """All threads of the loop are taken, while the block runs."""
    gate, loop = threading.Event(), asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    taken = loop.run_in_executor(None, gate.wait)
    try:
        yield
    finally:
        gate.set()
        assert not taken.cancelled()


def test_the_engine_is_heard_and_addresses_are_found_while_the_threads_of_the_loop_are_taken(tmp_path: Path) -> None:
    heard: list[str] = []

    async def score(request: ScoreRequest) -> ScoresAnswered:
        return ScoresAnswered(request.key)

    host = HostLink(0, StartHost("small", "", {}, {}, {}, [], 1.0, ANY_SIZE), tmp_path / "log", ThreadPoolExecutor(1))
    host._handlers = HostHandlers(
        list, lambda event: heard.append(event.job), lambda _: None, score, lambda *_: None, lambda *_: None, lambda _: None
    )  # fmt: skip

    async def work(url: str) -> None:
        with busy_threads():
            async with asyncio.timeout(PATIENCE):
                await inside.handle(host, JobStepped("job-1", {}))
            rewards = HttpRewards(Addresses(("localhost",)), trust=ssl.create_default_context())
            reward = RewardConfig(name="http", args={"url": url, "args": {"scale": 7.0}}, wall_seconds=5)
            assert await rewards("job", reward, {"id": 7}, ["one", "three"]) == [3.0, 5.0]
        await host.stop()

    with misbehaving() as server:
        asyncio.run(work(server.url("good", "localhost")))
    assert heard == ["job-1"]


# --- the database is taken away -------------------------------------------------------------------------------------------


def _remove(directory: Path) -> None:
    for path in directory.glob("motet.db*"):
        path.unlink()


def _replace(directory: Path) -> None:
    shutil.copy(directory / "motet.db", directory / "other.db")
    (directory / "other.db").rename(directory / "motet.db")


def _remove_log(directory: Path) -> None:
    (directory / "motet.db-wal").unlink()


def _fill(directory: Path) -> None:
    """Put an older database into the same file, as a backup may be played back."""
    with contextlib.closing(sqlite3.connect(directory / "motet.db")) as database, database:
        database.execute("DELETE FROM starts")


@pytest.mark.parametrize("take_away", [_remove, _replace, _remove_log, _fill])
def test_a_database_that_is_removed_or_replaced_is_noticed_and_nothing_is_taken(
    tmp_path: Path, take_away: Callable[[Path], None]
) -> None:
    with open_house(tmp_path) as house:
        take_away(tmp_path)
        if take_away is _fill:
            time.sleep(1.1)  # rows are looked at once a second
        ready = house.http.get("/readyz")
        assert ready.status_code == 503
        assert "was removed or replaced while the service ran" in ready.json()["message"]
        assert str(tmp_path) not in ready.text
        for method, path, request in (
            ("POST", "/v1/jobs", {"json": tiny("lost")}),
            ("POST", "/v1/files", {"files": {"file": ("rows.jsonl", ROWS)}}),
            ("POST", "/v1/jobs/ended/resume", {}),
            ("DELETE", "/v1/jobs/ended", {}),
        ):
            assert "put the database back from a backup" in house.refused(503, method, path, **request)["message"], path
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [house.job["id"]]


def test_a_database_that_is_put_back_is_the_one_again(tmp_path: Path) -> None:
    with open_house(tmp_path) as house:
        (tmp_path / "motet.db").rename(tmp_path / "aside")
        assert house.http.get("/readyz").status_code == 503
        house.refused(503, "GET", "/v1/jobs")
        (tmp_path / "aside").rename(tmp_path / "motet.db")
        assert house.ask("GET", "/v1/jobs").status_code == 200


def test_tables_that_are_gone_are_another_database(store: Store, url: str) -> None:
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE starts"))
    engine.dispose()
    time.sleep(1.1)
    assert "was removed or replaced" in store.failure()


def test_what_tenants_read_has_no_places_of_this_machine(tmp_path: Path) -> None:
    storage, site = Storage(tmp_path), Path(pytest.__file__).parents[1]
    scripts = Path(__file__).resolve().parents[2] / "scripts"  # of sys.path, as what a .pth file names
    for said, shown in (
        (f"{tmp_path}/run/job-1/state/3/state.json is damaged", "job-1/state/3/state.json is damaged"),
        (f"KeyError: 'a' ({site}/pytest/__init__.py:3)", "KeyError: 'a' (__init__.py:3)"),
        (f"KeyError: 'a' ({scripts}/mine.py:3)", "KeyError: 'a' (mine.py:3)"),
        (
            f"no rows:\nTraceback (most recent call last):\n  File {site}/x.py\nOSError: {site}/x/y",
            "no rows:\nOSError: y",
        ),
        ("https://example.org/usr/x and a/b stay", "https://example.org/usr/x and a/b stay"),
    ):
        assert storage.without_places(said) == shown
    request = Request({"type": "http", "path": "/", "headers": []})
    answer = _answer(request, ConfigError(f"{tmp_path}/files/rows.jsonl: line 3"), storage.without_places)
    assert str(tmp_path).encode() not in bytes(answer.body)
