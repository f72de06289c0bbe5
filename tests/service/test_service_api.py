"""A whole service against its own OpenAPI document: whatever is asked, no 5xx and nothing that is not documented."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

import motet
from motet.service.adapters.archive import pack
from tests.support.api_requests import Asked
from tests.support.service_run import ROWS, Service, serving, tiny

pytestmark = pytest.mark.slow


GRADER = {
    "type": "string_check",
    "name": "same",
    "operation": "eq",
    "input": "{{sample.output_text}}",
    "reference": "a",
}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with serving(tmp_path / "served") as found:
        yield found


def furnished(service: Service, directory: Path, name: str = "known") -> Asked:
    """A service with one of everything, and what to say about each."""
    service.submit(tiny(name, 1))
    assert service.ended(name) == "succeeded"
    with motet.Client(service.url) as client:
        home = client.pull(name, directory=directory)
        adapter = client.push(home, f"{name}-brought")
        rows = directory / "rows.jsonl"
        rows.write_bytes(ROWS)
        file = client.upload(rows)
        key = client.create_key("others").id
        share = client.share(name, "others").id
    known = {"job": name, "adapter": adapter.name, "file": file, "share": share, "key": key, "tenant": "others"}
    known |= {"version": "latest", "word": "pause"}
    tuned = {"type": "reinforcement", "reinforcement": {"grader": GRADER, "hyperparameters": {"n_epochs": 1}}}
    bodies = {
        "/v1/jobs": tiny("odd", 1),
        "/v1/shares": {"name": name, "tenant": "others"},
        "/v1/adapters": {"file": pack(home, "adapter")},
        "/v1/chat/completions": {"model": "small", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
        "/v1/responses": {"model": "small", "input": "a", "max_output_tokens": 4},
        "/v1/messages": {"model": "small", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
        "/v1/completions": {"model": f"{name}@best", "prompt": "a", "max_tokens": 4},
        "/v1/check": {"text": "{name: x, data: 'toy:add', reward: exact}"},
        "/v1/fine_tuning/jobs": {"model": "small", "training_file": file, "method": tuned},
        "/v1/fine_tuning/alpha/graders/run": {"grader": GRADER, "model_sample": "a", "item": {}},
        "/v1/fine_tuning/alpha/graders/validate": {"grader": GRADER},
    }
    return Asked(service.url, known, bodies)


def told(asked: Asked) -> str:
    """What was wrong, for a person."""
    return "\n\n".join(f"{title}\n{example}" for title, example in sorted(asked.faults.items()))


def test_answers_are_those_of_the_document(service: Service, tmp_path: Path) -> None:
    asked = furnished(service, tmp_path).ask(300, seed=0)
    assert asked.faults == {}, told(asked)
    assert asked.total >= 125
    assert {status // 100 for _, status in asked.statuses} == {2, 4}


@pytest.mark.parametrize(("trusted", "address"), [("", "127.0.0.1"), ("127.0.0.1", "198.51.100.7")])
def test_an_address_that_a_client_writes_itself_counts_only_where_the_operator_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: str, address: str
) -> None:
    monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)
    if trusted:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
    with serving(tmp_path / "served", ready=False) as service, httpx2.Client() as client:
        client.get(f"{service.url}/v1/models", headers={"X-Forwarded-For": "198.51.100.7"})
        last = (service.directory / "access.log").read_text(encoding="utf-8").splitlines()[-1]
        assert json.loads(last)["address"] == address


@pytest.mark.soak
def test_a_thousand_requests(service: Service, tmp_path: Path) -> None:
    done, slowest = 0, 0.0
    for number in range(40):
        asked = furnished(service, tmp_path, f"known{number}").ask(2_000, seed=1000 * number + 7)
        assert asked.faults == {}, told(asked)
        done, slowest = done + asked.total, max(slowest, asked.slowest)
        if done >= 1_000:
            break
    print(f"{done} requests, slowest {slowest:.2f} s")
    assert done >= 1_000
