"""Who may ask what of the Tinker protocol, and what nonsense does: every route with every kind of key, and broken messages."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.msgpack import encode
from sqlalchemy import delete, event, select

from motet.config.service import HttpConfig
from motet.core.types import JobState
from motet.hosts.hosts import Hosts
from motet.runtime.client_loop import ABOUT
from motet.runtime.journal import Done, Failed, Gradient, Journal, Nothing, Tensor
from motet.service.adapters.adapters import Adapters
from motet.service.database.store import Store
from motet.service.database.tables import StoredJob
from motet.service.errors import Refusal
from motet.service.events import EventBus
from motet.service.http.open_bytes import OpenBytes
from motet.service.tenants.ledger import Ledger
from motet.service.tenants.quotas import Quotas
from motet.service.tinker import runs, sessions, training
from motet.service.tinker.checkpoints import Checkpoints
from motet.service.tinker.futures import Futures
from motet.service.tinker.leases import Leases
from motet.service.tinker.models import Models
from motet.service.tinker.parts import PREFIX
from motet.service.tinker.samplers import SESSIONS, Samplers, sampler_id
from tests.support import inside
from tests.support.counting import calls
from tests.support.house import House, open_house
from tests.support.service_run import tiny
from tests.support.small_disk import small_disk
from tests.support.tinker_requests import journal, made, naming, request, saved, sent
from tests.support.tinker_run import job_of
from tests.support.waiting import PATIENCE, until, wait_until

OPEN = {"/healthz", "/downloads/{token}"}
"""Those that want no key: a link to a file is one itself."""
NAMELESS = {
    *("/client/config", "/client/dynamic_config", "/get_server_capabilities", "/create_session", "/session_heartbeat"),
    *("/telemetry", "/create_model", "/training_runs", "/checkpoints", "/sessions", "/auth/apikey/me"),
    *("/sessions/{session_id}", "/sessions/{session_id}/finish", *(path for _, path in runs.ELSEWHERE)),
}
"""Those that name nothing of anybody's, or show and end only what is the asker's own."""


def routes() -> set[tuple[str, str]]:
    """Every method and path below the prefix."""
    found = [route for module in (sessions, training, runs) for route in module.router.routes]
    return {
        (method, route.path.removeprefix(PREFIX))
        for route in found
        if isinstance(route, APIRoute)
        for method in route.methods or ()
    }


def asked(house: House, key: str, method: str, path: str, model: str, body: dict[str, Any]) -> Any:
    """An answer to one of them."""
    place = path.format(**{"run": model, "kind": "weights", "name": "w", "session_id": model.partition(":")[0], **body})
    return house.ask(method, PREFIX + place, key, json=body)


def test_every_route_wants_a_key_that_is_good(house: House) -> None:
    model = made(house)
    for method, path in routes():
        if path not in OPEN:
            for key in ("none", "wrong", "revoked", "expired"):
                answer = asked(house, key, method, path, model, {"name": "x", "token": "x"})
                assert answer.status_code == 401, (method, path, key, answer.text)
    headers = {"X-API-Key": f"tml-{house.keys['ours']}"}
    assert house.http.post(f"{PREFIX}/create_session", headers=headers, json={"tags": []}).status_code == 200


def test_what_is_anothers_is_not_there(house: House) -> None:
    model = made(house)
    place, kept = saved(house, model), journal(house, model)
    kept.put(1, encode(Nothing()))
    kept.answer(1, Done())
    everything = naming(model)
    unasked = {one for one in routes() if one[1] not in OPEN | NAMELESS} - {*everything}
    assert unasked == {("POST", "/forward_backward"), ("POST", "/cancel_future")}
    before = sorted(kept.path.iterdir())
    for (method, path), body in everything.items():
        answer = asked(house, "theirs", method, path, model, body)
        assert answer.status_code == 404, (method, path, answer.text)
    assert sent(house, request(model).SerializeToString(), "theirs").status_code == 404
    cancels = house.ask("POST", f"{PREFIX}/cancel_future", "theirs", json={"request_id": f"{model}/2"})
    assert (cancels.status_code, kept.cancelled(2)) == (404, False)
    for listed in ("training_runs", "checkpoints"):
        assert house.ask("GET", f"{PREFIX}/{listed}", "theirs").json()[listed] == []
    house.refused(404, "POST", f"{PREFIX}/sessions/{model.partition(':')[0]}/finish", "theirs", json={})
    assert (sorted(kept.path.iterdir()), json.loads((place / ABOUT).read_text())) == (before, {"number": 9})
    for number, ((method, path), body) in enumerate(everything.items()):
        answer = asked(
            house, "ours", method, path, model, {**body, **({"seq_id": number + 3} if "seq_id" in body else {})}
        )
        assert answer.status_code < 400, (method, path, answer.text)
        if path == "/asample":
            cancel_of_another(house, answer.json()["request_id"])


def test_a_colleague_sees_a_model_and_changes_nothing_of_it(house: House) -> None:
    _, house.keys["colleague"] = house.store.tenants.create_key("us", "colleague", "member")
    model = made(house)
    place, kept = saved(house, model), journal(house, model)
    kept.put(1, encode(Nothing()))
    kept.answer(1, Done())
    before = sorted(kept.path.iterdir())
    shown = {
        *(("POST", path) for path in ("/get_info", "/weights_info", "/create_sampling_session", "/asample")),
        *(("POST", path) for path in ("/retrieve_future", "/load_weights", "/copy_weights")),
        *(one for one in naming(model) if one[0] == "GET"),
    }
    """A new model from a colleague's checkpoint is the asker's own."""
    for (method, path), body in naming(model).items():
        answer = asked(house, "colleague", method, path, model, body)
        refused = answer.status_code == 403 and "was submitted by 'ours'" in answer.text
        assert (refused, answer.status_code < 400) == ((method, path) not in shown, (method, path) in shown), (
            path,
            answer.text,
        )
    assert sent(house, request(model).SerializeToString(), "colleague").status_code == 403
    session = model.partition(":")[0]
    again = {"session_id": session, "model_seq_id": 0, "base_model": "base", "lora_config": {"rank": 4}}
    for path, wanted in (
        ("cancel_future", {"request_id": f"{model}/2"}), (f"sessions/{session}/finish", {}), ("create_model", again),
    ):  # fmt: skip
        house.refused(403, "POST", f"{PREFIX}/{path}", "colleague", json=wanted)
    assert (sorted(kept.path.iterdir()), json.loads((place / ABOUT).read_text())) == (before, {"number": 9})
    assert not kept.cancelled(2)
    assert house.ask("GET", f"/v1/jobs/{job_of(model)}").json()["state"] == "queued"


def test_lists_read_what_they_show(house: House) -> None:
    """A tenant may have thousands of models, and each has its whole configuration."""
    models = [made(house) for _ in range(3)]
    session = models[0].partition(":")[0]
    with house.store.transaction() as database:
        kept = database.scalars(select(StoredJob).where(StoredJob.idempotency_key == models[2])).one()
        fields: Any = {name: getattr(kept, name) for name in ("tenant_id", "spec", "steps")}
        fields |= {"state": "cancelled", "wanted": "cancel"}
        many = {f"many-{n}": f"{session}:train:{n}" for n in range(1, 101)}
        database.add_all([StoredJob(id=one, name=one, idempotency_key=many[one], **fields) for one in many])
    specs = list[str]()

    def listen(one: StoredJob, _: object) -> None:
        specs.extend([one.name] if "spec" in one.__dict__ else [])

    event.listen(StoredJob, "load", listen)
    try:
        shown = {
            name: house.ask("GET", f"{PREFIX}/{name}?limit=2&offset={offset}").json()
            for name, offset in (("training_runs", 100), ("checkpoints", 0), ("sessions", 0))
        }
    finally:
        event.remove(StoredJob, "load", listen)
        with house.store.transaction() as database:
            database.execute(delete(StoredJob).where(StoredJob.id.in_(many)))
    runs = shown["training_runs"]
    assert [one["training_run_id"] for one in runs["training_runs"]] == [models[2], models[1]]
    assert runs["cursor"]["total_count"] >= 103
    assert shown["sessions"] == {"sessions": [one.partition(":")[0] for one in (models[0], models[2])]}
    assert len(shown["checkpoints"]["checkpoints"]) <= 2
    assert len(specs) <= 2


def test_a_session_is_its_tenants(house: House) -> None:
    session = house.ask("POST", f"{PREFIX}/create_session", json={"tags": []}).json()["session_id"]
    new = {"session_id": session, "model_seq_id": 0, "base_model": "base", "lora_config": {"rank": 4}}
    sampling = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "base"}
    base = sampler_id(session, 0, "base")
    for path, body in (
        ("create_model", new),
        ("create_sampling_session", sampling),
        ("session_heartbeat", {"session_id": session}),
    ):
        for odd in (session[:-1] + ("0" if session[-1] != "0" else "1"), session[:24], f"{session}0"):
            house.refused(404, "POST", f"{PREFIX}/{path}", json={**body, "session_id": odd})
        message = house.refused(404, "POST", f"{PREFIX}/{path}", "theirs", json=body)["message"]
        assert "there is no session" in message
        for place in body.keys() & {"model_seq_id", "sampling_session_seq_id"}:
            house.refused(400, "POST", f"{PREFIX}/{path}", json={**body, place: 10**12})  # its id would not be found
        assert house.ask("POST", f"{PREFIX}/{path}", json=body).is_success
    assert house.ask("GET", f"{PREFIX}/samplers/{base}").is_success
    house.refused(404, "GET", f"{PREFIX}/samplers/{base}", "theirs")


def test_a_finished_session_is_told_to_each_heartbeat(house: House) -> None:
    """A client whose heartbeat is answered otherwise in the moment in which it closes goes on with it for ever."""
    sessions = [house.ask("POST", f"{PREFIX}/create_session", json={}).json()["session_id"] for _ in range(2)]
    assert house.ask("POST", f"{PREFIX}/sessions/{sessions[0]}/finish", json={}).status_code == 204
    for session, status in zip(sessions, (410, 200), strict=True):
        beat = house.ask("POST", f"{PREFIX}/session_heartbeat", json={"session_id": session})
        assert beat.status_code == status


def cancel_of_another(house: House, name: str) -> None:
    """Nobody ends a sample of another tenant's."""
    futures = house.part(Futures)
    who = house.store.tenants.who(house.keys["ours"])
    assert who is not None
    counts = []
    for key in ("theirs", "ours"):
        house.ask("POST", f"{PREFIX}/cancel_future", key, json={"request_id": name})
        counts.append(futures.open(who))
    assert counts == [1, 0]


def test_no_job_passes_for_a_model(house: House) -> None:
    model = made(house)
    headers = {"Idempotency-Key": f"{model}1"}
    one = house.ask("POST", "/v1/jobs", json=tiny("posing"), headers=headers)
    several = house.ask("POST", "/v1/submissions", json={"jobs": [{"job": tiny("posing")}]}, headers=headers)
    for answer in (one, several):
        assert answer.status_code == 400
        assert "Idempotency-Key" in answer.json()["error"]["message"]
    assert house.ask("GET", "/v1/jobs/posing").status_code == 404


def test_what_is_published_is_there_for_all_until_it_is_not(house: House) -> None:
    model = made(house)
    place, path = saved(house, model), f"tinker://{model}/weights/w"
    for method, status in (("POST", 200), ("DELETE", 404)):
        house.ask(method, f"{PREFIX}/training_runs/{model}/checkpoints/weights/w/publish")
        info = house.ask("POST", f"{PREFIX}/weights_info", "theirs", json={"tinker_path": path})
        assert info.status_code == status
        removed = house.ask("DELETE", f"{PREFIX}/training_runs/{model}/checkpoints/weights/w", "theirs")
        assert (removed.status_code, place.is_dir()) == (404, True)


def test_a_run_says_when_it_was_asked_last(house: House) -> None:
    model = made(house)
    step = {"model_id": model, "seq_id": 1, "adam_params": {}}
    assert house.ask("POST", f"{PREFIX}/optim_step", json=step).is_success
    os.utime(journal(house, model).path / "00000001.sum", (10**9, 10**9))
    run = house.ask("GET", f"{PREFIX}/training_runs/{model}").json()
    assert run["last_request_time"] == "2001-09-09T01:46:40Z"


def test_a_checkpoint_that_goes_while_it_is_listed_is_left_out(house: House) -> None:
    model = made(house)
    place, run = saved(house, model), f"/training_runs/{model}"
    shutil.copytree(place, place.with_name("first"))
    (place / "adapter_model.safetensors").symlink_to("gone")  # it was there when the directory was read
    for path in (f"{run}/checkpoints", "/checkpoints"):
        listed = house.ask("GET", f"{PREFIX}{path}").json()["checkpoints"]
        ours = [one["checkpoint_id"] for one in listed if model in one["tinker_path"]]
        assert ours == ["weights/first"], path
    assert house.ask("GET", f"{PREFIX}{run}").is_success


def test_a_checkpoint_is_as_old_as_before_when_its_lifetime_is_set(house: House) -> None:
    model = made(house)
    last, run = saved(house, model), f"{PREFIX}/training_runs/{model}"
    first = shutil.copytree(last, last.with_name("first"))
    os.utime(first / ABOUT, (1000, 1000))
    for method, path, body in (
        ("PUT", "ttl", {"ttl_seconds": 3600}),
        ("POST", "publish", {}),
        ("DELETE", "publish", {}),
    ):
        assert house.ask(method, f"{run}/checkpoints/weights/first/{path}", json=body).is_success
    listed = house.ask("GET", f"{run}/checkpoints").json()["checkpoints"]
    assert [(one["checkpoint_id"], one["time"][:4]) for one in listed][:1] == [("weights/first", "1970")]
    assert house.ask("GET", run).json()["last_checkpoint"]["checkpoint_id"] == "weights/w"


def test_metadata_and_copies_survive_a_power_failure(house: House) -> None:
    first, second, checkpoints = made(house), made(house), house.part(Checkpoints)
    saved(house, first)
    who = house.store.tenants.who(house.keys["ours"])
    assert who is not None
    found = checkpoints.find(who, f"tinker://{first}/weights/w")
    with calls() as counted:
        checkpoints.publish(found, True)
        assert counted["fsync"] == 1
        copy = checkpoints.copy(found, house.part(Models).find(who, second), None)
    assert counted["fsync"] == 1 + len([*copy.directory.iterdir()]) + 2, "its files, its directory and its name"


def test_a_lifetime_and_a_publication_that_come_at_once_are_both_kept(house: House) -> None:
    model, checkpoints = made(house), house.part(Checkpoints)
    saved(house, model)
    who = house.store.tenants.who(house.keys["ours"])
    assert who is not None
    found = checkpoints.find(who, f"tinker://{model}/weights/w")
    with ThreadPoolExecutor(2) as threads:
        for seconds in range(100, 400):
            before = time.time()
            changes = [
                threads.submit(checkpoints.expire, found, seconds),
                threads.submit(checkpoints.publish, found, seconds % 2 == 0),
            ]
            for change in changes:
                change.result()
            about = found.about()
            assert about["public"] == (seconds % 2 == 0)
            assert before + seconds <= about["expires"] <= time.time() + seconds


@pytest.mark.parametrize("odd", ["w" * 300, "w\0", "..", "", "w\n"])
def test_no_checkpoint_has_a_name_that_none_may_have(house: House, odd: str) -> None:
    model = made(house)
    saved(house, model)
    path = f"tinker://{model}/weights/{odd}"
    sampling = {"session_id": model.partition(":")[0], "sampling_session_seq_id": 0, "model_path": path}
    status = 422 if "\0" in odd else 404  # no body has such a text
    house.refused(status, "POST", f"{PREFIX}/create_sampling_session", json=sampling)
    for key in ("ours", "theirs"):
        house.refused(status, "POST", f"{PREFIX}/weights_info", key, json={"tinker_path": path})


def test_a_link_opens_what_it_was_made_for(house: House) -> None:
    model = made(house)
    saved(house, model)
    urls = house.ask("GET", f"{PREFIX}/training_runs/{model}/checkpoints/weights/w/external_weights_urls").json()[
        "urls"
    ]
    assert [*urls] == ["adapter_config.json"]
    link = urls["adapter_config.json"]
    assert house.http.get(link).text == "{}", "without a key"
    assert house.http.get(f"{link[:-8]}AAAAAAA=").status_code == 403


def test_an_archive_is_not_made_of_what_is_deleted_while_it_waits_for_its_turn(house: House) -> None:
    model, who = made(house), house.store.tenants.who(house.keys["ours"])
    assert who is not None
    place, adapter = saved(house, model), house.part(Adapters).path("adapter-brought")
    may, reading = threading.Event(), house.service.read_threads
    waits = asyncio.run_coroutine_threadsafe(reading.run(who.tenant_id, may.wait), house.app.state.loop)
    link = house.ask("GET", f"{PREFIX}/training_runs/{model}/checkpoints/weights/w/archive").headers["location"]
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(house.ask, "GET", url) for url in (link, "/v1/adapters/brought/download")]
        wait_until(lambda: inside.queued(reading, who.tenant_id) == 2)
        for directory in (place, adapter):
            directory.rename(directory.with_name("gone"))
        may.set()
        answers = [one.result() for one in asked]
    (adapter.with_name("gone")).rename(adapter)
    assert [one.status_code for one in answers] == [404, 404]
    assert all("deleted meanwhile" in one.text for one in answers)
    assert waits.result()


def test_a_copy_that_finds_no_room_leaves_nothing_and_can_be_asked_for_again(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk, open_house(disk / "served") as house:
        model = made(house)
        (saved(house, model) / "adapter_model.safetensors").write_bytes(b"x" * 2**20)
        copied = {
            "source_path": f"tinker://{model}/weights/w",
            "session_id": model.partition(":")[0],
            "model_seq_id": 1,
        }
        filler = disk / "filler"
        filler.write_bytes(b"x" * (shutil.disk_usage(disk).free - 2**19))
        told = house.refused(507, "POST", f"{PREFIX}/copy_weights", json=copied)["message"]
        assert told == "the disk of the service is full; try again once its operator has made room"
        assert [path.name for path in disk.rglob("*w") if path.is_dir()] == ["w"]
        filler.unlink()
        assert not house.part(Quotas)._reserved.total()
        found = house.ask("POST", f"{PREFIX}/copy_weights", json=copied).json()["tinker_path"]
        assert house.ask("POST", f"{PREFIX}/weights_info", json={"tinker_path": found}).status_code == 200
        assert len([*disk.rglob("w/adapter_model.safetensors")]) == 2


def test_why_a_command_failed_is_told_without_places(house: House) -> None:
    model = made(house)
    kept = journal(house, model)
    kept.put(1, encode(Nothing()))
    kept.answer(1, Failed(f"{kept.path}/x has alpha 8"))
    told = house.ask("POST", f"{PREFIX}/retrieve_future", json={"request_id": f"{model}/1"}).json()["error"]
    assert told.endswith("/x has alpha 8")
    assert str(house.storage.directory) not in told


def test_a_sample_is_begun_again_by_the_next_process(house: House) -> None:
    prompt = {"chunks": [{"tokens": [1, 2]}]}
    name = house.ask("POST", f"{PREFIX}/asample", json={"prompt": prompt, "sampling_params": {}}).json()["request_id"]
    who, other = (house.store.tenants.who(house.keys[key]) for key in ("ours", "theirs"))
    assert who is not None
    assert other is not None
    parts = (house.part(Models), house.part(Samplers), house.part(Quotas), house.part(Store), house.part(EventBus))
    fresh = Futures(*parts, house.storage, house.part(OpenBytes), house.service.write_threads)

    async def asked() -> Any:
        with pytest.raises(Refusal, match="sample again"):
            await fresh.wait(other, name)
        found = await fresh.wait(who, name, 0.0)
        await fresh.cancel(who, name)
        return found

    found = asyncio.run_coroutine_threadsafe(asked(), house.app.state.loop).result(PATIENCE)
    assert (found["queue_state"], found["queue_state_reason"]) == ("paused_capacity", "the engine is starting")
    house.ask("POST", f"{PREFIX}/cancel_future", json={"request_id": name})


def test_a_sample_that_a_service_gives_up_as_it_stops_is_asked_for_again(tmp_path: Path) -> None:
    with open_house(tmp_path) as house, ThreadPoolExecutor(1) as threads:
        hosts, prompt = house.part(Hosts), {"chunks": [{"tokens": [1, 2]}]}
        (host,) = hosts.hosts

        def on_loop(call: Callable[..., object], *given: object) -> None:
            house.app.state.loop.call_soon_threadsafe(call, *given)

        host.ready = True  # and never answers
        on_loop(hosts.there[host.base].set)
        promise = house.ask("POST", f"{PREFIX}/asample", json={"prompt": prompt, "sampling_params": {}}).json()
        wait_until(lambda: host.asked == 1)
        body = {"request_id": promise["request_id"]}
        fetching = threads.submit(house.ask, "POST", f"{PREFIX}/retrieve_future", json=body, timeout=PATIENCE)
        time.sleep(0.5)
        on_loop(house.app.state.lifecycle.drain, 0.0)
        assert fetching.result().json()["type"] == "try_again"


def leases(house: House) -> Leases:
    return Leases(house.part(Models), house.part(Checkpoints), house.part(Futures), house.store)


def test_a_checkpoint_that_has_expired_goes_though_nobody_asks_for_it(house: House) -> None:
    model = made(house)
    place = saved(house, model)
    kept = shutil.copytree(place, place.with_name("kept"))
    for directory, expires in ((place, time.time() - 1), (kept, time.time() + 3600)):
        (directory / ABOUT).write_text(json.dumps({"number": 9, "expires": expires}))

    async def watched() -> None:
        watching = asyncio.create_task(leases(house).watch(0.01))
        await until(lambda: not place.exists())
        watching.cancel()

    asyncio.run_coroutine_threadsafe(watched(), house.app.state.loop).result(PATIENCE)
    assert kept.is_dir()


def test_a_sample_that_nobody_fetches_is_forgotten_though_nobody_samples(house: House) -> None:
    prompt = {"chunks": [{"tokens": [1, 2]}]}
    name = house.ask("POST", f"{PREFIX}/asample", json={"prompt": prompt, "sampling_params": {}}).json()["request_id"]
    futures = house.part(Futures)
    inside.samples(futures).by_name[name].task = None
    inside.samples(futures).by_name[name].since = time.monotonic() - 1000.0  # as if it had ended then

    async def watched() -> None:
        watching = asyncio.create_task(leases(house).watch(0.01))
        await until(lambda: name not in inside.samples(futures).by_name)
        watching.cancel()

    asyncio.run_coroutine_threadsafe(watched(), house.app.state.loop).result(PATIENCE)


def test_old_files_of_samples_go_and_the_numbers_of_sampling_sessions_stay(house: House) -> None:
    session = house.ask("POST", f"{PREFIX}/create_session", json={"tags": []}).json()["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "base"}
    assert house.ask("POST", f"{PREFIX}/create_sampling_session", json=body).is_success
    who = house.store.tenants.who(house.keys["ours"])
    assert who is not None
    numbers = house.storage.samples(who.tenant_id) / SESSIONS
    old = [numbers.with_name(name) for name in (f"sample-{'0' * 24}", f".part-sample-{'0' * 24}")]
    for path in (numbers, *old):
        path.touch()
        os.utime(path, (1000, 1000))
    house.part(Futures).clear()
    assert [path.exists() for path in (numbers, *old)] == [True, False, False]


def test_stops_of_a_sample_are_few(house: House) -> None:
    sample = {"prompt": {"chunks": [{"tokens": [1]}]}}
    for stop in (["</answer>"] * 64, "a" * 500, list(range(1024))):
        name = house.ask("POST", f"{PREFIX}/asample", json={**sample, "sampling_params": {"stop": stop}}).json()
        house.ask("POST", f"{PREFIX}/cancel_future", json={"request_id": name["request_id"]})
    for many, words in (
        (["a"] * 65, "65 are too many"),
        (["a", "b" * 501], "501"),
        (list(range(1025)), "1025 are too"),
    ):
        error = house.refused(400, "POST", f"{PREFIX}/asample", json={**sample, "sampling_params": {"stop": many}})
        assert error["param"] == "sampling_params.stop"
        assert words in error["message"]


def test_answers_take_a_tenants_memory_until_they_are_sent_and_one_always_fits(tmp_path: Path) -> None:
    with open_house(tmp_path, http=HttpConfig(open_mb=4.0, open_mb_per_tenant=1.0)) as house:
        model, who, room = made(house), house.store.tenants.who(house.keys["ours"]), house.service.open_answers
        assert who is not None
        kept = journal(house, model)
        for number, length in ((1, 50_000), (2, 500_000)):
            kept.put(number, encode(Nothing()))
            kept.answer(number, Gradient([Tensor.of(np.zeros(length, np.float32))], {}))

        payer = who.tenant_id

        def fetched(number: int) -> int:
            body = {"request_id": f"{model}/{number}"}
            return house.ask("POST", f"{PREFIX}/retrieve_future", json=body).status_code

        def all_fetched() -> None:
            for number in (1, 2):
                assert fetched(number) == 200
                wait_until(lambda: payer not in inside.taken(room))

        all_fetched()
        room.take(payer, 2**19)  # of one that a slow client reads
        assert [fetched(1), fetched(2)] == [429, 429]
        room.give_back(payer, 2**19)
        for tenant in ("a", "b", "c", "d"):  # open samples, say
            house.part(OpenBytes).take(tenant, 2**20 * 4 // 5)
        all_fetched()


def test_a_client_is_told_what_it_waits_for(house: House) -> None:
    who = house.store.tenants.who(house.keys["ours"])
    assert who is not None
    model, loop = made(house), house.app.state.loop

    def told(request_id: str) -> tuple[str, str]:
        waiting = house.part(Futures).wait(who, request_id, 0.0)
        answer = asyncio.run_coroutine_threadsafe(waiting, loop).result(PATIENCE)
        assert isinstance(answer, dict)
        return answer["queue_state"], answer["queue_state_reason"]

    state, reason = told(f"{model}/0")
    assert (state, "slot" in reason) == ("paused_capacity", True)
    job = house.ask("GET", f"/v1/jobs/{job_of(model)}").json()["id"]
    house.recorder.record_state(job, JobState.PAUSED, "paused by hand")
    assert told(f"{model}/0") == ("paused_rate_limit", "paused by hand")

    limits = f"/v1/tenants/{who.tenant}/limits"
    house.part(Ledger).count_completion(who.tenant_id, "small", 2, 3)
    house.part(Ledger).flush()
    house.ask("PUT", limits, "admin", json={"tokens_per_day": 5})
    sample = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {}}
    name = house.ask("POST", f"{PREFIX}/asample", json=sample).json()["request_id"]
    state, reason = told(name)
    assert (state, "5 tokens of this tenant for this day are spent" in reason) == ("paused_rate_limit", True)
    plain = house.ask("POST", "/v1/completions", json={"model": "small", "prompt": "a"})
    assert plain.status_code == 429
    assert 1 <= int(plain.headers["retry-after"]) <= 86_400
    house.ask("PUT", limits, "admin", json={})
    assert told(name) == ("paused_capacity", "the engine is starting")
    unready = house.ask("POST", "/v1/completions", json={"model": "small", "prompt": "a"})
    assert (unready.status_code, unready.headers["retry-after"]) == (503, "1")
    house.ask("POST", f"{PREFIX}/cancel_future", json={"request_id": name})


def test_a_sample_that_is_cancelled_while_its_limits_are_looked_up_was_cancelled(house: House) -> None:
    who, futures = house.store.tenants.who(house.keys["ours"]), house.part(Futures)
    assert who is not None
    prompt = {"chunks": [{"tokens": [1, 2]}]}
    name = house.ask("POST", f"{PREFIX}/asample", json={"prompt": prompt, "sampling_params": {}}).json()["request_id"]

    async def scenario() -> None:
        inside.samples(futures).by_name[name].task = None  # as if its tenant's limits held it until now
        waiting = asyncio.create_task(futures.wait(who, name, 0.0))
        await asyncio.sleep(0)
        await futures.cancel(who, name)
        with pytest.raises(Refusal, match="was cancelled"):
            await waiting

    asyncio.run_coroutine_threadsafe(scenario(), house.app.state.loop).result(PATIENCE)


def test_a_job_that_would_compute_gradients_again_is_resumed_while_its_tenant_has_the_tokens(tmp_path: Path) -> None:
    """Those that are done and wait for their step are charged again when it resumes: three data of four tokens each."""
    with open_house(tmp_path / "served") as house:
        model, who = made(house), house.store.tenants.who(house.keys["ours"])
        assert who is not None
        kept = journal(house, model)
        for number in (1, 2, 3, 4):
            assert sent(house, request(model, number).SerializeToString()).status_code == 200
            if number < 4:  # the last is not done: it was admitted when it came
                kept.answer(number, Done())
        assert kept.work_again() == 3 * 4
        job = house.ask("GET", f"/v1/jobs/{job_of(model)}").json()["id"]
        house.recorder.record_state(job, JobState.PAUSED, "")
        for limit, status in ((11, 403), (20, 429)):
            if limit == 20:
                house.part(Ledger).count_completion(who.tenant_id, "small", 4, 5)
                house.part(Ledger).flush()
            house.ask("PUT", "/v1/tenants/us/limits", "admin", json={"tokens_per_day": limit})
            error = house.refused(status, "POST", f"/v1/jobs/{job}/resume")
            assert "resuming this job, which computes gradients again, takes 12 tokens" in error["message"]
        house.ask("PUT", "/v1/tenants/us/limits", "admin", json={"tokens_per_day": 21})
        assert house.ask("POST", f"/v1/jobs/{job}/resume").status_code == 202


_KNOWN: list[tuple[str, Journal, dict[str, bytes]]] = []


def two_models(house: House) -> tuple[str, Journal, dict[str, bytes]]:
    """A model for many requests, and a neighbour with what lies in its journal."""
    if not _KNOWN:
        model, neighbour = made(house), made(house)
        assert sent(house, request(neighbour).SerializeToString()).status_code == 200
        kept = journal(house, neighbour)
        _KNOWN.append((model, kept, {path.name: path.read_bytes() for path in kept.path.iterdir()}))
    return _KNOWN[0]


def broken(body: bytes, data: st.DataObject) -> bytes:
    """A message with some of its bytes changed, left out or put in."""
    changed = bytearray(body)
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(changed)))
        changed[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    return bytes(changed)


def nonsense(house: House, data: st.DataObject) -> None:
    """Whatever a message has become, it is a 400 and changes nothing beside it."""
    model, neighbour, before = two_models(house)
    answer = sent(house, broken(request(model, data.draw(st.integers(1, 5))).SerializeToString(), data))
    assert answer.status_code in (200, 400, 404), answer.text  # it may mean something still, or another model
    if answer.status_code == 400:
        assert answer.json()["error"]["message"]
    assert {path.name: path.read_bytes() for path in neighbour.path.iterdir()} == before


shared = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(shared, max_examples=100)
@given(st.data())
def test_nonsense_is_a_400_and_changes_nothing_beside_it(house: House, data: st.DataObject) -> None:
    nonsense(house, data)


@pytest.mark.soak
@settings(shared, max_examples=2000)
@given(st.data())
def test_much_nonsense_changes_nothing(house: House, data: st.DataObject) -> None:
    nonsense(house, data)
