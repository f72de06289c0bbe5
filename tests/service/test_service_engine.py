"""`motet serve` with its engine: jobs end with the bytes of `motet run`, whoever is beside them and whatever dies."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil  # type: ignore[import-untyped]
import pytest

from tests.support.adapter_files import loads_with_peft, run_alone, weights_of
from tests.support.service_run import LASTING, Json, Service, tiny

pytestmark = [
    pytest.mark.slow,
]

LONG, LONGER = 8, 16
"""Steps of jobs that something happens to meanwhile."""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, alone: dict[str, bytes]) -> Iterator[Service]:
    """One for the whole file, whose engine is starting."""
    assert alone  # made before: meanwhile the engine would be ready
    with contextlib.closing(Service(tmp_path_factory.mktemp("serve") / "served")) as found:
        found.launch()
        found.until(lambda: found.answers("/healthz"))
        yield found


@pytest.fixture(scope="module")
def service(started: Service) -> Service:
    """That service, once its engine is ready."""
    started.until(lambda: started.answers("/readyz"))
    return started


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Adapters of `motet run`, each job without company."""
    return weights_of(run_alone(tmp_path_factory.mktemp("alone"), tiny("life"), tiny("steady", LONG)))


LAGGING: Json = {"algorithm": {"group_size": 4, "groups_per_step": 2, "max_off_policy_steps": 1}}


def clock_of_processes() -> float:
    """The seconds that times of processes are ahead of those of files: they count from a boot in whole seconds."""
    ahead = list[float]()
    for _ in range(5):  # one may be made late
        now = time.time()
        with psutil.Popen([sys.executable, "-c", ""]) as made:
            ahead.append(made.create_time() - now)
    return min(ahead)


def test_the_engine_loads_while_the_service_does(started: Service) -> None:
    """Both take seconds: one after the other, whoever uses the service would wait for their sum."""
    began = started.engine().create_time() - clock_of_processes()
    assert began < (started.directory / "secret.key").stat().st_mtime, (
        "which the application makes, once it is imported"
    )


# --- deaths -----------------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_jobs_survive_whatever_dies_often_with_the_same_bytes(tmp_path: Path) -> None:
    """One after the other, also before they are ready."""
    jobs = tiny("first", LONGER), tiny("second", LONGER, **LAGGING)
    alone = weights_of(run_alone(tmp_path / "alone", *jobs))
    with contextlib.closing(Service(tmp_path / "served")) as service:
        service.start(ready=False)
        _survive(service, alone)


def _survive(service: Service, alone: dict[str, bytes]) -> None:
    """Of a service whose engine is starting."""
    service.submit(tiny("first", LONGER))  # while the engine is starting
    service.submit(tiny("second", LONGER, **LAGGING))
    service.submit(tiny("waiting", 1))
    service.steer("waiting", "cancel")
    service.reaches("first", 1)
    service.engine().kill()
    service.reaches("second", 2)
    service.kill()
    service.forget_last_step("second")  # as if it had died between the commit and the telling
    service.start(ready=False)
    service.kill()  # before its engine was ready
    service.start()
    service.reaches("first", 4)
    service.engine().kill()
    service.reaches("second", 6)
    service.terminate()
    service.start()
    for name in ("first", "second"):
        assert service.ended(name) == "succeeded", service.job(name)["message"]
        assert service.steps(name) == list(range(LONGER + 1))
        assert service.states(name)[0] == "queued"
        assert set(service.states(name)[1:-1]) == {"running"}
        assert service.weights(name) == alone[name]
    assert service.ended("waiting") == "cancelled"


# --- jobs -------------------------------------------------------------------------------------------------------------------


@pytest.mark.cell("single turn", "embedded")
def test_a_job_runs_as_motet_run_does(service: Service, alone: dict[str, bytes]) -> None:
    service.submit(tiny("life"))
    assert service.ended("life") == "succeeded"
    assert service.states("life") == ["queued", "running", "succeeded"]
    assert service.steps("life") == [0, 1, 2, 3]
    assert [event["kind"] for event in service.events("life")][:3] == ["state", "state", "step"]
    assert service.events("life")[-1]["data"]["state"] == "succeeded"
    assert service.weights("life") == alone["life"]
    job = service.job("life")
    assert (job["step"], job["steps"], job["message"]) == (3, 3, "")
    assert job["ended"] >= job["created"]
    assert service.ask("GET", "/v1/jobs/life/rollouts")["steps"] == [0, 1, 2]


def test_neighbours_that_come_go_pause_and_fail_change_no_byte(service: Service, alone: dict[str, bytes]) -> None:
    service.submit(tiny("steady", LONG))
    service.submit(tiny("regretted", LONG))
    service.steer("regretted", "cancel")  # before the engine has prepared it
    service.submit(tiny("resting", 4 * LONG))  # not done before it is asked to pause
    service.submit({**tiny("broken"), "data": {"source": "toy:sort_letters", "prompt": "nowhere"}})
    service.reaches("resting", 2)
    service.steer("resting", "pause")
    service.submit(tiny("dropped", LASTING))
    service.reaches("dropped", 1)
    service.steer("dropped", "cancel")
    assert service.becomes("resting", "paused")["step"] < 4 * LONG
    service.steer("resting", "resume")
    assert service.ended("steady") == "succeeded"
    assert service.weights("steady") == alone["steady"]
    found = {name: service.ended(name) for name in ("regretted", "resting", "broken", "dropped")}
    assert found == {"regretted": "cancelled", "resting": "succeeded", "broken": "failed", "dropped": "cancelled"}
    assert "nowhere" in service.job("broken")["message"]
    assert service.steps("resting") == list(range(4 * LONG + 1))
    assert service.states("resting") == ["queued", "running", "paused", "queued", "running", "succeeded"]
    assert service.steps("dropped")[:1] == [0]
    assert service.steps("regretted") == []


def test_a_failed_job_can_be_resumed_and_an_ended_one_removed(service: Service) -> None:
    service.submit({**tiny("wrong"), "data": {"source": "toy:sort_letters", "prompt": "nowhere"}})
    assert service.ended("wrong") == "failed"
    service.steer("wrong", "resume")
    service.until(lambda: service.states("wrong").count("failed") == 2)  # it was tried again
    job = service.submit(tiny("short", 1))
    assert service.ended("short") == "succeeded"
    service.ask("DELETE", "/v1/jobs/short")
    assert service.get("/v1/jobs/short").status_code == 404
    assert not (service.directory / "run" / str(job["id"])).exists()
    service.submit(tiny("short", 1))
    assert service.ended("short") == "succeeded"


def test_a_job_starts_from_a_version_of_another(service: Service) -> None:
    service.submit(tiny("elder", 2))
    assert service.ended("elder") == "succeeded"
    service.submit(tiny("younger", 1, adapter={"init": "elder@latest"}))
    assert service.ended("younger") == "succeeded"
    name = "adapter_model.safetensors"
    assert service.adapter("younger", "0")[name] == service.adapter("elder", "2")[name]
    assert service.weights("younger") != service.weights("elder")


def test_a_downloaded_version_loads_with_peft(service: Service, tmp_path: Path, small_base_dir: Path) -> None:
    service.submit(tiny("taken"))
    assert service.ended("taken") == "succeeded"
    for name, data in service.adapter("taken", "latest").items():
        (tmp_path / name).write_bytes(data)
    loads_with_peft(tmp_path, small_base_dir)
    listed = service.ask("GET", "/v1/jobs/taken/versions")["data"]
    assert [one["version"] for one in listed if one["latest"]] == [3]
    assert len([one for one in listed if one["best"]]) == 1


# --- completions ------------------------------------------------------------------------------------------------------------


ASKED: Any = {
    "messages": [{"role": "user", "content": "Sort the letters of dca."}],
    "max_tokens": 12,
    "seed": 5,
}


def test_the_openai_client_talks_to_the_base_and_to_versions_while_a_job_trains(service: Service) -> None:
    service.submit(tiny("teaching", LASTING))
    service.reaches("teaching", 2)
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        names = {model.id for model in client.models.list()}
        assert {"small", "teaching@latest", "teaching@best"} <= names
        base = client.chat.completions.create(model="small", **ASKED)
        again = client.chat.completions.create(model="small", **ASKED)
        other = client.chat.completions.create(model="small", **{**ASKED, "seed": 6})
        assert base.choices == again.choices
        assert base.choices != other.choices
        assert base.usage is not None
        assert base.usage.total_tokens == base.usage.prompt_tokens + base.usage.completion_tokens
        tuned = client.chat.completions.create(model="teaching@latest", **ASKED, n=2, logprobs=True)
        assert [choice.index for choice in tuned.choices] == [0, 1]
        for choice in tuned.choices:
            assert choice.logprobs is not None
            told = choice.logprobs.content or []
            assert "".join(one.token for one in told) == choice.message.content
            assert all(one.logprob <= 0 for one in told)
        with pytest.raises(openai.NotFoundError, match="nobody@best"):
            client.chat.completions.create(model="nobody@best", **ASKED)
    assert service.job("teaching")["state"] == "running"
    service.steer("teaching", "cancel")
    assert service.ended("teaching") == "cancelled"


def test_a_stream_says_what_the_whole_answer_does(service: Service) -> None:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(model="small", **ASKED, n=2)
        texts, usage = {0: "", 1: ""}, None
        reasons: dict[int, str | None] = {}
        options: Any = {"include_usage": True}
        for chunk in client.chat.completions.create(model="small", **ASKED, n=2, stream=True, stream_options=options):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
        assert texts == {choice.index: choice.message.content for choice in whole.choices}
        assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
        assert usage == whole.usage
        text = whole.choices[0].message.content or ""
        stopped = client.chat.completions.create(model="small", **ASKED, stop=text[4:6])
        assert stopped.choices[0].message.content == text[: text.index(text[4:6])]
        assert stopped.choices[0].finish_reason == "stop"


def test_questions_that_cannot_be_answered_are_refused_with_the_reason(service: Service) -> None:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        for asked, words in (
            ({**ASKED, "logit_bias": {"5": 1}}, "logit_bias"),
            (
                {**ASKED, "messages": [{"role": "user", "content": "a " * 50_000}]},
                "maximum context length is 1024 tokens",
            ),
        ):
            with pytest.raises(openai.BadRequestError, match=words):
                client.chat.completions.create(model="small", **asked)
        assert client.chat.completions.create(model="small", **ASKED).choices  # and it goes on
