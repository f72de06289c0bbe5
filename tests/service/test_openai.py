"""The stock `openai` client against the routes without an engine: files, fine-tuning jobs; and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import openai
import pytest

from motet.config.service import RateConfig
from motet.core.types import JobState
from motet.hosts.host_link import HostLink
from motet.hosts.hosts import Hosts
from motet.hosts.messages import Abandon, Complete, PromptRead, QuestionRefused, ToHost
from tests.support.house import House, open_house
from tests.support.openai_requests import (
    GRADER,
    JUDGE,
    WORDS,
    answered,
    client_of,
    method,
    pairs,
    rows,
    uploaded,
)
from tests.support.service_run import Json, tiny
from tests.support.waiting import PATIENCE, wait_until


@pytest.fixture
def client(house: House) -> Iterator[openai.OpenAI]:
    """Of tenant `ours`."""
    with client_of(str(house.http.base_url).rstrip("/"), house.keys["ours"]) as found:
        yield found


def test_files_have_the_clients_shape(house: House, client: openai.OpenAI) -> None:
    data = rows(*WORDS)
    file = client.files.create(file=("a.jsonl", data), purpose="fine-tune")
    assert (file.object, file.purpose, file.status, file.bytes) == ("file", "fine-tune", "processed", len(data))
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == data
    others = [uploaded(client, data, f"{name}.jsonl") for name in "bcd"]
    newest = [one.id for one in client.files.list()]
    assert newest[:4] == [*reversed(others), file.id]
    assert [one.id for one in client.files.list(limit=2)] == newest  # over several pages
    assert [one.id for one in client.files.list(order="asc")] == newest[::-1]
    assert [one.id for one in client.files.list(after=newest[0], limit=100)] == newest[1:]
    assert not client.files.list(purpose="batch").data
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("a.jsonl", data), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        client.files.create(
            file=("a.jsonl", data), purpose="fine-tune", expires_after={"anchor": "created_at", "seconds": 3600}
        )
    house.refused(404, "GET", f"/v1/files/{others[0]}/content", "theirs")


def test_hyperparameters_become_fields_of_the_job(house: House, client: openai.OpenAI) -> None:
    training, validation = uploaded(client, rows(*WORDS)), uploaded(client, rows("LAMP", "ROSE", "DCBA"))
    job = client.fine_tuning.jobs.create(
        model="small",
        training_file=training,
        validation_file=validation,
        suffix="mapped",
        seed=7,
        metadata={"team": "a"},
        method=method(
            n_epochs=3,
            batch_size=4,
            learning_rate_multiplier=0.5,
            compute_multiplier=2,
            eval_interval=5,
            eval_samples=2,
            reasoning_effort="default",
        ),
        extra_body={"motet": {"sampling": {"max_tokens": 8}, "algorithm": {"type": "dr_grpo"}, "data": {"size": 8}}},
    )
    found = house.ask("GET", f"/v1/jobs/{job.id}").json()
    spec = found["spec"]
    assert found["name"].startswith("mapped-")
    assert spec["steps"] == 6  # 3 · 7 / 4, rounded up: one row is in the validation file too
    assert spec["data"]["source"] == training
    assert (spec["data"]["eval_source"], spec["data"]["holdout"], spec["data"]["size"]) == (validation, 3, 8)
    assert spec["algorithm"]["type"] == "dr_grpo"
    assert (spec["algorithm"]["groups_per_step"], spec["algorithm"]["group_size"]) == (4, 16)
    assert spec["optimizer"]["lr_multiplier"] == 0.5
    assert (spec["eval"]["every"], spec["eval"]["n"]) == (5, 2)
    assert (spec["seed"], spec["sampling"]["max_tokens"]) == (7, 8)
    assert spec["rewards"][0]["name"] == "grader"
    assert spec["rewards"][0]["args"] == GRADER
    assert (job.object, job.status, job.seed, job.metadata) == ("fine_tuning.job", "queued", 7, {"team": "a"})
    assert (job.fine_tuned_model, job.finished_at, job.trained_tokens) == (None, None, None)
    assert job.hyperparameters.n_epochs == 3
    again = client.fine_tuning.jobs.retrieve(job.id)
    assert again == job
    assert again.method is not None
    assert again.method.reinforcement is not None
    assert again.method.reinforcement.grader.model_dump() == GRADER
    usual = client.fine_tuning.jobs.create(model="base", training_file=training, method=method(n_epochs="auto"))
    spec = house.ask("GET", f"/v1/jobs/{usual.id}").json()["spec"]
    assert (spec["steps"], spec["algorithm"]["group_size"], spec["data"]["holdout"]) == (50, 8, 0)


def test_answers_and_preferences_become_jobs_that_learn_from_rows(house: House, client: openai.OpenAI) -> None:
    """As the package's users have them: `messages` that end with an answer, and OpenAI's form of pairs."""
    training, validation = uploaded(client, pairs(*WORDS)), uploaded(client, pairs("LAMP", "DCBA"))
    job = client.fine_tuning.jobs.create(
        model="small",
        training_file=training,
        validation_file=validation,
        method={"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.3, "n_epochs": 2, "batch_size": 4}}},
    )
    spec = house.ask("GET", f"/v1/jobs/{job.id}").json()["spec"]
    assert (spec["algorithm"]["type"], spec["algorithm"]["beta"], spec["algorithm"]["rows_per_step"]) == ("dpo", 0.3, 4)
    assert (spec["steps"], spec["data"]["eval_source"], spec["data"]["holdout"]) == (4, validation, 2)
    assert spec["rewards"] == []
    assert job.method is not None
    assert job.method.type == "dpo"
    assert job.method.dpo is not None
    assert job.method.dpo.hyperparameters is not None
    assert (job.method.dpo.hyperparameters.beta, job.method.dpo.hyperparameters.n_epochs) == (0.3, 2)
    taught = client.fine_tuning.jobs.create(model="small", training_file=uploaded(client, answered(*WORDS)))
    spec = house.ask("GET", f"/v1/jobs/{taught.id}").json()["spec"]
    assert (spec["algorithm"]["type"], spec["algorithm"]["rows_per_step"], spec["steps"]) == ("sft", 16, 50)
    assert taught.method is not None
    assert taught.method.type == "supervised"
    same = pairs("LAMP").replace(b'"LAMP?"', b'"ALMP"')
    with pytest.raises(openai.BadRequestError, match="row 1: chosen and rejected are the same"):
        client.fine_tuning.jobs.create(model="small", training_file=uploaded(client, same), method={"type": "dpo"})


def test_jobs_are_listed_page_by_page_and_only_ones_own(house: House, client: openai.OpenAI) -> None:
    client.fine_tuning.jobs.create(model="small", training_file=uploaded(client, rows(*WORDS)), method=method())
    with client_of(str(house.http.base_url).rstrip("/"), house.keys["theirs"]) as client:
        file = uploaded(client, rows(*WORDS))
        made = [
            client.fine_tuning.jobs.create(
                model="small", training_file=file, method=method(), metadata={"number": str(number % 2)}
            ).id
            for number in range(5)
        ]
        house.ask("POST", "/v1/jobs", "theirs", json=tiny("plain"))
        assert [job.id for job in client.fine_tuning.jobs.list(limit=2)] == made[::-1]
        assert [job.id for job in client.fine_tuning.jobs.list(after=made[2])] == made[1::-1]
        assert [job.id for job in client.fine_tuning.jobs.list(metadata={"number": "1"}, limit=1)] == [made[3], made[1]]
        with pytest.raises(openai.NotFoundError):
            client.fine_tuning.jobs.retrieve("plain")
        assert client.fine_tuning.jobs.pause(made[0]).id == made[0]
        house.recorder.record_state(made[0], JobState.CANCELLED, "")
        with pytest.raises(openai.BadRequestError, match="cancelled"):
            client.fine_tuning.jobs.resume(made[0])
        assert client.fine_tuning.jobs.retrieve(made[0]).status == "cancelled"
        assert house.ask("DELETE", f"/v1/jobs/{made[0]}", "theirs").status_code == 204
        assert made[0] not in [job.id for job in client.fine_tuning.jobs.list()]
        for path in ("", "/events", "/checkpoints"):
            house.refused(404, "GET", f"/v1/fine_tuning/jobs/{made[1]}{path}", "ours")
        house.refused(404, "POST", f"/v1/fine_tuning/jobs/{made[1]}/cancel", "ours")
        with pytest.raises(openai.BadRequestError, match="there is no file") as refusal:  # another tenant's
            client.fine_tuning.jobs.create(model="small", training_file=house.file["id"], method=method())
        assert refusal.value.param == "training_file"


def test_the_same_request_again_is_the_same_job(house: House, client: openai.OpenAI) -> None:
    asked: Json = {"model": "small", "training_file": uploaded(client, rows(*WORDS)), "method": method()}
    headers = {"Idempotency-Key": "tuned"}
    first, second = (client.fine_tuning.jobs.create(**asked, extra_headers=headers) for _ in range(2))
    assert first.id == second.id
    again = {"x-stainless-retry-count": "1"}  # as the package sends it after a lost answer
    assert client.fine_tuning.jobs.create(**asked, extra_headers=again).id == first.id
    assert client.fine_tuning.jobs.create(**asked).id != first.id


def test_a_job_that_the_package_creates_again_after_a_429_is_one(tmp_path: Path) -> None:
    with (
        open_house(tmp_path, rate=RateConfig(requests_per_second=0.5, burst=4)) as house,
        client_of(str(house.http.base_url).rstrip("/"), house.keys["ours"]) as client,
    ):
        patient = client.with_options(max_retries=9)
        asked: Json = {"model": "small", "training_file": uploaded(patient, rows(*WORDS)), "method": method()}
        while (answer := house.ask("GET", "/v1/me")).status_code == 200:
            pass
        assert (answer.status_code, answer.headers["Retry-After"] in ("1", "2")) == (429, True)
        made = patient.fine_tuning.jobs.create(**asked)
        assert [job.id for job in patient.fine_tuning.jobs.list()] == [made.id]


def test_rows_that_cannot_be_used_are_refused_with_their_number(client: openai.OpenAI) -> None:
    good = rows(*WORDS)
    for data, words in (
        (good + b'\n{"prompt": "x", "want": "x"}', "row 9"),
        (good + b'\n{"messages": [], "want": "x"}', "row 9"),
        (good + b'\n{"messages": [{"role": "user", "content": "x"}]}', "row 9 has no column 'want'"),
    ):
        with pytest.raises(openai.BadRequestError, match=words) as refusal:
            client.fine_tuning.jobs.create(model="small", training_file=uploaded(client, data), method=method())
        assert refusal.value.param == "training_file"
    same = uploaded(client, good)
    with pytest.raises(openai.BadRequestError, match="none is left") as refusal:
        client.fine_tuning.jobs.create(model="small", training_file=same, validation_file=same, method=method())
    assert refusal.value.param == "validation_file"


def test_a_version_is_gone_on_from(house: House, client: openai.OpenAI) -> None:
    asked: Json = {"training_file": uploaded(client, rows(*WORDS)), "method": method()}
    job = client.fine_tuning.jobs.create(model="ended@latest", **asked)
    assert house.ask("GET", f"/v1/jobs/{job.id}").json()["spec"]["adapter"]["init"] == "ended@latest"
    assert job.model == "ended@latest"


def test_a_model_is_shown_as_it_is_listed(house: House, client: openai.OpenAI) -> None:
    share = house.ask("POST", "/v1/shares", json={"name": "ended", "tenant": "them"}).json()
    with client_of(str(house.http.base_url).rstrip("/"), house.keys["theirs"]) as theirs:
        for one, name in ((client, "ended@latest"), (client, "brought"), (theirs, "us/ended@best")):
            listed = list(one.models.list())
            assert {"small", name} <= {model.id for model in listed}
            assert [one.models.retrieve(model.id) for model in listed] == listed
        assert (client.models.retrieve("ended").id, client.models.retrieve("base").id) == ("ended", "small")
        for one, name in ((client, "ended@9"), (client, "nothing"), (theirs, "ended@2"), (theirs, "us/brought")):
            with pytest.raises(openai.NotFoundError, match=f"there is no model '{name}'") as refused:
                one.models.retrieve(name)
            assert (refused.value.param, refused.value.type) == ("model", "not_found_error")
    house.ask("DELETE", f"/v1/shares/{share['id']}")


class Samples:
    """A host's process: it answers a prompt of one token id without an end, breaks off one of two, and refuses longer ones."""

    def __init__(self, host: HostLink, place: Path) -> None:
        """`place` is named where an answer is broken off."""
        self._host, self._place = host, place
        self.begun, self.abandoned = set[int](), set[int]()

    def send(self, message: ToHost) -> None:
        """Begin, refuse or abandon."""
        if isinstance(message, Abandon):
            self.abandoned.add(message.key)
        if isinstance(message, Complete):
            self.begun.add(message.key)
            answers = self._host._open[message.key]
            length = len(message.prompt or message.messages or ())
            if length < 3:
                answers.put_nowait(PromptRead(message.key, length))
            if length == 2:
                answers.put_nowait(QuestionRefused(message.key, f"{self._place}/run/job-1/adapter_config.json is gone"))
            if length > 2:
                answers.put_nowait(QuestionRefused(message.key, "the prompt is too long", never=True))

    @contextlib.contextmanager
    def answering(self, house: House) -> Iterator[None]:
        """Stand in the place of the engine while the block runs."""
        engine = house.part(Hosts)

        async def stand_in(there: bool) -> None:
            self._host.ready, self._host._child = there, cast("Any", self if there else None)
            (engine.there[self._host.base].set if there else engine.there[self._host.base].clear)()

        for there in (True, False):
            asyncio.run_coroutine_threadsafe(stand_in(there), house.app.state.loop).result(PATIENCE)
            if there:
                yield


def test_prompts_beside_one_that_is_refused_are_abandoned(tmp_path: Path) -> None:
    with open_house(tmp_path) as house:
        samples = Samples(house.part(Hosts).hosts[0], tmp_path)
        with samples.answering(house):
            asked = {"model": "small", "prompt": [[1], [2], [3, 4, 5], [5]]}
            error = house.refused(400, "POST", "/v1/completions", json=asked)
            assert error["message"] == "the prompt is too long"
            wait_until(lambda: len(samples.abandoned) == len(samples.begun) - 1 > 1)


def test_an_answer_that_breaks_off_names_no_place_of_this_machine(house: House) -> None:
    samples = Samples(house.part(Hosts).hosts[0], house.storage.directory)
    with samples.answering(house):
        for path, asked in (
            ("/v1/completions", {"prompt": [1, 2]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 2}),
        ):
            said = [house.refused(503, "POST", path, json={"model": "small", **asked})["message"]]
            streamed = house.ask("POST", path, json={"model": "small", "stream": True, **asked})
            said.append(json.loads(streamed.text.partition("data: ")[2])["error"]["message"])
            assert said == ["job-1/adapter_config.json is gone"] * 2
        judge = {**JUDGE, "input": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}
        run = {"grader": judge, "model_sample": "a", "item": {}}
        errors = house.ask("POST", "/v1/fine_tuning/alpha/graders/run", json=run).json()["metadata"]["errors"]
        assert "job-1/adapter_config.json is gone" in errors["model_grader_server_error_details"]
        assert str(house.storage.directory) not in str(errors)
