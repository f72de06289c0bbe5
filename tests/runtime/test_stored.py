"""What a tenant stores: counted wherever it is written, refused beyond its limit, and gone when nothing needs it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.msgpack import encode

from motet.config.service import LimitsConfig
from motet.core.errors import StorageFull
from motet.core.types import JobState
from motet.hosts.hosts import Hosts
from motet.hosts.messages import SetRule, ToHost
from motet.runtime.journal import KEPT_BYTES, Done, Journal, OptimStep
from motet.runtime.slots import Rule
from motet.runtime.storage_room import StorageRoom
from motet.service.tenants.quotas import QuotaEnforcer
from motet.service.tenants.stored import Measured, StoredBytes, measured
from motet.service.tinker.parts import PREFIX
from tests.support.counting import calls
from tests.support.fake_run import FakeRun, Setting, job, metrics, run_jobs, weights
from tests.support.house import House, open_house
from tests.support.service_run import tiny
from tests.support.tinker_requests import journal, made, request, sent
from tests.support.tinker_run import job_of
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.tier1

MB = 2**20
STEP = {"adam_params": {"learning_rate": 1e-3}}


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """A service of its own for each test: what is stored is counted."""
    with open_house(tmp_path) as found:
        yield found


def stored(house: House) -> int:
    """As the tenant is told, once what has changed was measured."""
    house.part(StoredBytes).measure()
    found: int = house.ask("GET", "/v1/limits").json()["stored_bytes"]
    return found


def limit(house: House, **limits: Any) -> None:
    """Set those of `us`."""
    answer = house.ask("PUT", "/v1/tenants/us/limits", "admin", json=limits)
    assert answer.status_code == 200, answer.text


def gradient(model: str, number: int, tokens: int) -> bytes:
    """A request of about twelve bytes a token."""
    wanted = request(model, number)
    datum, long = wanted.data[0], wanted.data.add()
    long.model_input.add().encoded_text.tokens = b"\1\0\0\0" * tokens
    targets = long.loss_fn_inputs.add(key="target_tokens").value
    targets.dense, targets.dtype = b"\1\0\0\0\0\0\0\0" * tokens, datum.loss_fn_inputs[0].value.dtype
    targets.shape.append(tokens)
    body: bytes = wanted.SerializeToString()
    return body


def test_files_count_in_blocks_and_a_file_with_two_names_once(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "one").write_bytes(b"x" * 4097)
    (tmp_path / "sub" / "small").write_bytes(b"x")
    os.link(tmp_path / "one", tmp_path / "sub" / "again")
    (tmp_path / "empty").touch()
    assert measured(tmp_path) == Measured(6 * 4096, 4098, 4), "two directories, and one block of the empty file"
    assert measured(tmp_path / "none") == Measured(0, 0, 0)


def test_a_job_with_many_files_is_measured_once_in_many_steps(house: House) -> None:
    """Each step leaves a receipt and rollouts: to look at all of them after each step takes the square of the steps."""
    found, job_id = house.part(StoredBytes), house.job["id"]
    receipts = house.storage.job(job_id).receipts
    receipts.mkdir()
    for number in range(2000):
        (receipts / f"v{number}.json").write_bytes(b"x")
    stored(house)
    looked = Counter[str]()
    for number in range(2000, 2100):
        (receipts / f"v{number}.json").write_bytes(b"x")
        found.changed(job_id)
        with calls() as counted:
            found.measure(all_changed=False)
        looked += counted
    assert 2000 < looked["lstat"] < 100 * 150
    before = found.of(house.store.tenants.made("us").id)
    assert before < stored(house) + 4096 * 30
    limit(house, storage_mb=2100 * 4096 / MB)
    assert (
        house.ask("POST", "/v1/jobs", json=tiny("more")).status_code == 403
    )  # measured at once where it would not fit


def test_configurations_of_cancelled_jobs_count_until_they_are_deleted(house: House) -> None:
    before = stored(house)
    for number in range(4):
        long = tiny(f"long-{number}")
        long["data"] |= {"template": "{prompt}" + "x" * 50_000}
        answer = house.ask("POST", "/v1/jobs", json=long)
        assert answer.status_code in (200, 201), answer.text
        house.ask("POST", f"/v1/jobs/long-{number}/cancel")
    assert before + 4 * 50_000 < stored(house)
    limit(house, storage_mb=(before + 4 * 50_000) / MB)
    refused = house.ask("POST", "/v1/jobs", json=tiny("more"))
    assert (refused.status_code, "storage_mb" in refused.text) == (403, True)
    for number in range(4):
        assert house.ask("DELETE", f"/v1/jobs/long-{number}").status_code in (200, 204)
    assert stored(house) < before + 50_000


def test_configurations_of_many_jobs_are_one_query(house: House) -> None:
    jobs = [house.ask("POST", "/v1/jobs", json=tiny(f"job-{number}")).json()["id"] for number in range(4)]
    sizes = house.part(StoredBytes)
    stored(house)
    for job_id in jobs:
        sizes.changed(job_id)
    with calls(own_thread=True) as counted:
        sizes.measure()
    assert counted["measured"] >= 4
    assert counted["StoredBytes._specs"] == 1


def test_commands_of_a_client_count_are_refused_beyond_the_limit_and_go_with_the_model(house: House) -> None:
    model = made(house)
    before = stored(house)
    limit(house, storage_mb=(before + MB) / MB)
    answers = [sent(house, gradient(model, number, 20_000), "ours") for number in range(1, 9)]
    taken = sum(answer.status_code == 200 for answer in answers)
    assert 1 <= taken <= 5
    assert [answer.status_code for answer in answers[taken:]] == [403] * (8 - taken)
    message = answers[-1].json()["error"]["message"]
    assert all(word in message for word in ("storage_mb", "do not fit", "delete", "--storage-mb"))
    written = journal(house, model).waiting()[1]
    assert written > 150_000
    assert before + written < stored(house) <= before + MB + 3 * 4096 * (8 - taken)
    commands = journal(house, model)
    assert [commands.known(number) for number in range(1, 9)] == [True] * 8  # those that were refused hold up no others
    step = house.ask("POST", f"{PREFIX}/optim_step", json={"model_id": model, "seq_id": 9, **STEP})
    assert step.status_code == 200, step.text  # it makes room
    assert stored(house) > before + written // 2  # measured, not forgotten
    assert house.ask("POST", f"/v1/jobs/{job_of(model)}/cancel").json()["state"] == "cancelled"
    assert commands.waiting()[1] == 0
    assert stored(house) <= before + 4096
    told = house.ask("POST", f"{PREFIX}/retrieve_future", json={"request_id": f"{model}/1"}).json()
    assert "cancelled" in told["error"]


def test_even_small_commands_end_a_little_beyond_the_limit(house: House) -> None:
    model = made(house)
    beyond = journal(house, model).path / "filler"
    beyond.write_bytes(b"x" * (MB - 150_000))
    house.part(StoredBytes).changed(beyond.parent.parent.name)
    assert stored(house) > MB - 150_000
    limit(house, storage_mb=0)
    codes = []
    for number in range(1, 24):
        step = house.ask("POST", f"{PREFIX}/optim_step", json={"model_id": model, "seq_id": number, **STEP})
        codes.append(step.status_code)
    assert (codes[0], codes[-1]) == (200, 403)
    assert stored(house) <= house.ask("GET", "/v1/limits").json()["limits"]["storage_mb"] * MB + MB


def test_open_samples_count_until_they_are_given_up(house: House) -> None:
    before = stored(house)
    sample = {"prompt": {"chunks": [{"tokens": [1] * 5000}]}, "sampling_params": {}}
    names = [house.ask("POST", f"{PREFIX}/asample", json=sample).json()["request_id"] for _ in range(3)]
    assert stored(house) >= before + 3 * 10_000
    limit(house, open_samples=3)
    assert "open_samples" in house.refused(429, "POST", f"{PREFIX}/asample", json=sample)["message"]
    limit(house, open_samples=1000)
    many = {**sample, "num_samples": 998}
    assert "and 998 more are too many" in house.refused(429, "POST", f"{PREFIX}/asample", json=many)["message"]
    names.append(house.ask("POST", f"{PREFIX}/asample", json={**many, "num_samples": 997}).json()["request_id"])
    assert (
        "1000 completions of samples are open"
        in house.refused(429, "POST", f"{PREFIX}/asample", json=sample)["message"]
    )
    limit(house, storage_mb=stored(house) / MB)
    assert "storage_mb" in house.refused(403, "POST", f"{PREFIX}/asample", json=sample)["message"]
    for name in names:
        house.ask("POST", f"{PREFIX}/cancel_future", json={"request_id": name})
    assert stored(house) == before + 4096, "the directory stays"
    limit(house, open_samples=3, storage_mb=None)
    alone = house.ask("POST", f"{PREFIX}/asample", json=many)
    assert alone.status_code == 200, "one sample alone may have any number of completions"
    house.ask("POST", f"{PREFIX}/cancel_future", json={"request_id": alone.json()["request_id"]})


def test_models_of_clients_are_bounded(house: House) -> None:
    limit(house, client_models=1)
    model = made(house)
    session = house.ask("POST", f"{PREFIX}/create_session", json={"tags": []}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "base", "lora_config": {"rank": 4}}
    assert "client_models" in house.refused(429, "POST", f"{PREFIX}/create_model", json=body)["message"]
    assert house.ask("POST", "/v1/jobs", json=tiny("plain")).status_code == 201
    house.ask("POST", f"/v1/jobs/{job_of(model)}/cancel")
    assert house.ask("POST", f"{PREFIX}/create_model", json=body).status_code == 200


def test_jobs_of_a_tenant_that_stores_too_much_pause_until_it_has_deleted_something(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules: list[SetRule] = []

    def send(*messages: ToHost) -> None:
        rules.extend(message for message in messages if isinstance(message, SetRule))

    monkeypatch.setattr(house.part(Hosts), "send", send)
    enforcer, us = house.part(QuotaEnforcer), house.ask("GET", "/v1/limits").json()["id"]
    grows = house.ask("POST", "/v1/jobs", json=tiny("grows")).json()["id"]
    limit(house, storage_mb=(stored(house) + 10_000) / MB)
    enforcer.enforce()
    held = [rule for rule in rules if rule.tenant == us and rule.rule.hold]
    assert not held
    rollouts = house.storage.job(grows).path / "rollouts"
    rollouts.mkdir(parents=True)
    (rollouts / "0.jsonl").write_bytes(b"x" * 2 * MB)  # as its engine does
    house.recorder.record_step(grows, {"step": 0, "loss": 0.0})
    enforcer.enforce()
    enforcer.enforce()
    (held_rule,) = [rule for rule in rules if rule.rule.hold]
    assert held_rule.tenant == us
    for word in ("storage_mb", "delete", "it continues", "Nothing committed is lost"):
        assert word in held_rule.rule.hold
    house.recorder.record_state(grows, JobState.CANCELLED, "")
    assert house.ask("DELETE", "/v1/jobs/grows").status_code == 204
    enforcer.enforce()
    assert rules[-1].tenant == us
    assert not rules[-1].rule.hold


def test_a_job_whose_commit_does_not_fit_waits_for_room_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    seen: list[tuple[JobState, str, list[int]]] = []

    async def script(run: FakeRun) -> None:
        grows = run.jobs["grows"]
        await until(lambda: "storage_mb" in grows.progress.message, PATIENCE)
        seen.append((grows.state, grows.progress.message, grows.directory.steps()))
        assert not list(grows.directory.path.glob("state/.tmp-*"))
        run.pipeline.rule("us", Rule(room=2**30))
        await until(lambda: grows.state.final and run.state("other").final, PATIENCE)
        run.pipeline.stop()

    jobs, alone = [job("grows"), job("other")], tmp_path / "alone"
    run_jobs(alone, [job("grows")])
    size = sum(path.stat().st_size for path in (alone / "grows" / "state" / "4").iterdir())
    setting = Setting(max_idle=60.0, tenants={"grows": "us"}, rules={"us": Rule(room=size * 3 // 2)})
    beside = run_jobs(tmp_path / "beside", jobs, setting, script)
    ((state, message, steps),) = seen
    assert (state, "it continues" in message, steps) == (JobState.QUEUED, True, [0])
    assert (beside.state("grows"), beside.state("other")) == (JobState.SUCCEEDED, JobState.SUCCEEDED)
    assert metrics(tmp_path / "beside", "grows") == metrics(alone, "grows")
    assert weights(tmp_path / "beside", "grows", 4) == weights(alone, "grows", 4)


def test_files_of_a_role_or_a_critic_count(tmp_path: Path) -> None:
    (tmp_path / "critic").mkdir()
    (tmp_path / "critic" / "optimizer.safetensors").write_bytes(bytes(MB))
    (tmp_path / "optimizer.safetensors").write_bytes(bytes(MB))
    room = StorageRoom()
    room.set("us", 3 * MB)
    room.take("us", tmp_path)
    assert room.of("us") == MB
    with pytest.raises(StorageFull, match=r"takes 2\.0 MB, and.*may store 1\.0 more"):
        room.take("us", tmp_path)


def test_defaults_bound_what_a_tenant_may_use() -> None:
    bounded = ("running_jobs", "queued_jobs", "client_models", "open_samples", "tokens_per_day", "storage_mb")
    assert all(getattr(LimitsConfig(), name) is not None for name in bounded)


def test_outcomes_beyond_a_size_go_but_those_of_the_newest_step_stay(tmp_path: Path) -> None:
    kept = Journal(tmp_path)
    big = Done({"text": "x" * (KEPT_BYTES // 2 - 100)})
    for number in range(5):
        kept.put(number, encode(OptimStep(0.1, (0.9, 0.9), 1e-8, 0.0, None)))
        kept.answer(number, big)
    kept.forget(5, 3)
    assert [kept.outcome(number) is not None for number in range(5)] == [False, True, True, True, True]
    kept.put(5, encode(OptimStep(0.1, (0.9, 0.9), 1e-8, 0.0, None)))
    kept.end(outcomes=True)
    assert (kept.command(5), kept.outcome(4) is not None, kept.known(5)) == (None, True, True)
    kept.describe({"lora": 1})
    kept.end(outcomes=False)
    assert [path.name for path in kept.path.iterdir()] == ["model.json"]
