"""A client's model beside others, and through kill -9 of either process: the same bytes."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from motet import AdamW, EngineConfig, Verbs
from motet.algorithms import datum
from tests.support.service_run import Service, serving, tiny
from tests.support.tinker_requests import Client
from tests.support.tinker_run import Script, Scripts, job_of, run_script
from tests.support.waiting import PATIENCE

WIDE = 90
"""Targets of each token of a gradient that takes the device long."""


@pytest.fixture(scope="module")
def alone(tinker_service: Service, tinker_scripts: Scripts) -> tuple[Any, dict[str, bytes]]:
    """What the six steps find when nobody else is there, and adapters: the client's, and a job's that ran after it."""
    found = tinker_scripts["steps"]
    tinker_service.submit(tiny("sort", 4))
    assert tinker_service.ended("sort") == "succeeded"
    adapters = {
        name: tinker_service.weights(job) for name, job in (("client", job_of(found["model"])), ("sort", "sort"))
    }
    tinker_service.ask("DELETE", "/v1/jobs/sort")
    return found, adapters


def test_company_changes_no_bit_of_a_client_or_of_a_job(
    alone: tuple[Any, dict[str, bytes]], tinker_service: Service
) -> None:
    (expected, adapters), service = alone, tinker_service
    others = [tiny("sort", 4), tiny("other", 6, adapter={"rank": 4})]
    for job in others:
        service.submit(job)
    found = run_script(service, "steps+first_loop+steps")
    assert [service.ended(job["name"]) for job in others] == ["succeeded"] * 2
    for one in (found[0], found[2]):
        assert one["values"] == expected["values"]
        assert service.weights(job_of(one["model"])) == adapters["client"]
    assert service.weights("sort") == adapters["sort"]


def test_the_verbs_of_python_train_the_same_bytes(alone: tuple[Any, dict[str, bytes]], tmp_path: Path) -> None:
    """What the script `steps` asks over HTTP, without a service."""
    expected, adapters = alone
    with Verbs("small", engine=EngineConfig(samplers=0, threads=1)) as verbs:
        verbs.add_adapter("a", rank=8, seed=3)
        for step in range(6):
            rng, data = np.random.default_rng(7), []
            for index in range(2 + step % 3):
                tokens = [5, 16, 27, 38, 49, 60, 71, 82, 90 + index]
                q, advantages = -9.0 + 2 * rng.standard_normal(8), rng.standard_normal(8)
                data.append(datum(tokens[:-1], tokens[1:], logprobs=q, advantages=advantages))
            values = [verbs.forward_backward({"a": data}, "ppo")["a"].stats.loss for _ in range(2)]
            verbs.optim_step("a", AdamW(1e-3, eps=1e-12, clip_norm=math.inf))
            assert values == expected["values"][step]
        verbs.save_adapter("a", tmp_path)
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == adapters["client"]


def _with_kills(service: Service, who: str) -> Any:
    """The six steps, with a kill between a gradient and its step."""
    before = {job["id"] for job in service.ask("GET", "/v1/jobs")["data"]}
    client = Script(service, "steps", "none", "0.6")
    service.until(lambda: any(job["id"] not in before for job in service.ask("GET", "/v1/jobs")["data"][:1]))
    job = service.ask("GET", "/v1/jobs")["data"][0]  # the newest
    service.reaches(job["name"], 2)
    commands = service.directory / "run" / job["id"] / "commands"
    service.until(lambda: any(path.with_suffix(".out").exists() for path in commands.glob("*.cmd")))
    if who == "service":
        service.kill()
        service.start()
    else:
        service.engines()[service.job(job["name"])["progress"].get("host", 0)].kill()
    return client.found()


@pytest.mark.cell("Tinker client", "hosts 2")
@pytest.mark.soak
@pytest.mark.parametrize("who", ["engine", "service", "host"])
def test_kill_9_changes_no_bit(
    alone: tuple[Any, dict[str, bytes]], tinker_service: Service, tmp_path: Path, who: str
) -> None:
    expected, adapters = alone
    hosts = serving(tmp_path, "--hosts", "2") if who == "host" else contextlib.nullcontext(tinker_service)
    with hosts as service:
        found = _with_kills(service, who)
        assert found["values"] == expected["values"]
        assert service.weights(job_of(found["model"])) == adapters["client"]
        assert service.ended(job_of(found["model"])) == "succeeded"
        assert service.steps(job_of(found["model"])) == list(range(6))


@pytest.mark.soak
def test_idle_clients_make_room_and_go_on(alone: tuple[Any, dict[str, bytes]], tmp_path: Path) -> None:
    expected, adapters = alone
    config = tmp_path / "one.yaml"
    config.write_text("engine: {samplers: 0, threads: 1, slots: 1, kv_tokens: 512}\npatience_seconds: 0.3\n")
    with serving(tmp_path / "service", "--config", str(config)) as service:
        client = Script(service, "steps,room", "none", "1.5")
        service.until(lambda: len(service.ask("GET", "/v1/jobs")["data"]) == 1)
        service.submit(tiny("sort", 4))
        assert service.ended("sort") == "succeeded"
        found, room = client.found()
        assert "queued" in service.states(job_of(found["model"]))[1:], "it gave its slot away"
        assert found["values"] == expected["values"]
        assert service.weights(job_of(found["model"])) == adapters["client"]
        assert room == {"filled": [12, "length"]}, "without max_tokens: as many as the KV cache holds"


def trained(service: Service, job: str) -> int:
    """Tokens times targets that a job was charged."""
    lines = service.ask("GET", "/v1/usage")["data"]
    return sum(line["tokens_trained"] for line in lines if line["name"] == job)


def test_cancelling_again_and_again_computes_earlier_gradients_three_times_at_most(shared_service: Service) -> None:
    with httpx2.Client(base_url=shared_service.url, timeout=PATIENCE, trust_env=False) as http:
        client, ends = Client(http), []
        client.wait(client.gradient([7, 9]))
        for n_samples in (26, 26, 26, 6):  # the first three are cancelled long before they are done
            before, future = trained(shared_service, client.job), client.gradient([1000] * n_samples, WIDE)
            shared_service.until(lambda before=before: trained(shared_service, client.job) > before + 1000)  # type: ignore[misc]
            client.cancel(future)
            ends.append(isinstance(client.wait(future), dict))
        assert ends == [True, True, True, False]
        client.step()
        client.finish()
        assert shared_service.ended(client.job) == "succeeded"


def test_a_gradient_that_is_cancelled_ends_and_leaves_no_trace(shared_service: Service) -> None:
    """The step after it has the bytes of one without it; what the device did for it is charged."""

    with httpx2.Client(base_url=shared_service.url, timeout=PATIENCE, trust_env=False) as http:
        plain, other = Client(http), Client(http)
        for client in (plain, other):
            client.gradient([7, 9])
            if client is other:
                long = [client.gradient([1000] * 26, WIDE), client.gradient([1000] * 26, WIDE)]
                shared_service.until(lambda: trained(shared_service, other.job) > 1000)
                for future in reversed(long):
                    client.cancel(future)
                assert ["cancelled" in client.wait(future)["error"] for future in long] == [True, True]
            client.gradient([5])
            assert client.wait(client.step())["metrics"]["skipped:sum"] == 0
            client.finish()
            assert shared_service.ended(client.job) == "succeeded"
    assert shared_service.weights(other.job) == shared_service.weights(plain.job)
    least = 8 + 10 + 6
    assert trained(shared_service, plain.job) == least
    assert least + 1000 < trained(shared_service, other.job) < 26 * 1001 * WIDE, "the rest of it was done all the same"
