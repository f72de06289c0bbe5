"""Requests of the Tinker protocol, without a client: models of a tenant's, and messages for a gradient of one."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from motet.runtime.client_loop import ABOUT
from motet.runtime.journal import Journal
from motet.service.tinker.parts import PREFIX
from motet.service.tinker.samplers import path_part, sampler_id
from motet.service.tinker.wire import CONTENT_TYPE, INT64, KINDS
from tests.support.house import House
from tests.support.tinker_run import job_of
from tests.support.waiting import PATIENCE

CHECKPOINT = "/training_runs/{run}/checkpoints/{kind}/{name}"


def made(house: House, key: str = "ours") -> str:
    """A new model of a tenant's."""
    session = house.ask("POST", f"{PREFIX}/create_session", key, json={"tags": []}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "base", "lora_config": {"rank": 4}}
    promise = house.ask("POST", f"{PREFIX}/create_model", key, json=body).json()
    assert promise == {"request_id": f"{session}:train:0/0", "model_id": f"{session}:train:0"}
    return str(promise["model_id"])


def journal(house: House, model: str) -> Journal:
    """What was asked of a model."""
    return Journal(house.storage.job(house.ask("GET", f"/v1/jobs/{job_of(model)}").json()["id"]).path)


def saved(house: House, model: str) -> Path:
    """A checkpoint of a model, as its session would write it."""
    job = house.ask("GET", f"/v1/jobs/{job_of(model)}").json()["id"]
    place = house.storage.job(job).path / "checkpoints" / "weights" / "w"
    place.mkdir(parents=True)
    (place / ABOUT).write_text(json.dumps({"number": 9}))
    (place / "adapter_config.json").write_text("{}")
    return place


def request(model: str, number: int = 1, **fields: Any) -> Any:
    """A sound request for a gradient of one datum."""
    found = KINDS["Request"](model_id=model, seq_id=number, loss_fn="cross_entropy", **fields)
    datum = found.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(3, dtype="<i4").tobytes()
    targets = datum.loss_fn_inputs.add(key="target_tokens").value
    targets.dense, targets.dtype = np.arange(1, 4, dtype="<i8").tobytes(), INT64
    targets.shape.append(3)
    return found


def sent(house: House, body: bytes, key: str = "ours") -> Any:
    """The answer to a request for a gradient."""
    return house.ask("POST", f"{PREFIX}/forward_backward", key, content=body, headers={"Content-Type": CONTENT_TYPE})


def naming(model: str) -> dict[tuple[str, str], dict[str, Any]]:
    """What each route is asked that names something of a tenant's: the body, and what stands in its path."""
    path, session = f"tinker://{model}/weights/w", model.partition(":")[0]
    live = sampler_id(session, 0, path_part(path))
    new, prompt = {"session_id": session, "model_seq_id": 7}, {"chunks": [{"tokens": [1, 2]}]}
    command = {"model_id": model, "seq_id": 3}
    return {
        ("POST", "/get_info"): {"model_id": model},
        ("POST", "/optim_step"): {**command, "adam_params": {}},
        ("POST", "/save_weights"): {**command, "path": "x"},
        ("POST", "/save_weights_for_sampler"): {**command, "path": "x"},
        ("POST", "/save_weights_external"): {**command, "path": "x"},
        ("POST", "/load_weights"): {**new, "path": path, "optimizer": False},
        ("POST", "/copy_weights"): {**new, "model_seq_id": 8, "source_path": path},
        ("POST", "/weights_info"): {"tinker_path": path},
        ("POST", "/create_sampling_session"): {"session_id": session, "sampling_session_seq_id": 0, "model_path": path},
        ("GET", "/samplers/{name}"): {"name": live},
        ("POST", "/asample"): {"prompt": prompt, "sampling_params": {}, "sampling_session_id": live},
        ("POST", "/retrieve_future"): {"request_id": f"{model}/1"},
        ("GET", "/training_runs/{run}"): {},
        ("GET", "/training_runs/{run}/checkpoints"): {},
        ("POST", f"{CHECKPOINT}/publish"): {},
        ("DELETE", f"{CHECKPOINT}/publish"): {},
        ("PUT", f"{CHECKPOINT}/ttl"): {"ttl_seconds": 100},
        ("GET", f"{CHECKPOINT}/external_weights_urls"): {},
        ("GET", f"{CHECKPOINT}/archive"): {},
        ("DELETE", CHECKPOINT): {},
        ("POST", "/unload_model"): {"model_id": model},
    }


class Client:
    """A model on a service that runs, asked without the `tinker` package; numbers of commands begin at 1."""

    def __init__(self, http: httpx2.Client, rank: int = 4) -> None:
        """`http` asks the service under a tenant's key."""
        self.http, self.number = http, 0
        session = self.ask("create_session", {"tags": []})["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "small", "lora_config": {"rank": rank}}
        self.model = str(self.ask("create_model", body)["model_id"])
        self.job = job_of(self.model)

    def ask(self, path: str, body: Any) -> Any:
        """The answer to a question, which has to be a success."""
        answer = self.http.post(f"{PREFIX}/{path}", json=body)
        assert answer.is_success, answer.text
        return answer.json()

    def send_gradient(self, lengths: Sequence[int], targets: int = 0, *, forward_only: bool = False) -> httpx2.Response:
        """Any answer to a request for a gradient of sequences of these lengths, with so many targets of each token."""
        self.number += 1
        body = wide(self.model, self.number, lengths, targets, forward_only=forward_only)
        return self.http.post(f"{PREFIX}/forward_backward", content=body, headers={"Content-Type": CONTENT_TYPE})

    def gradient(self, lengths: Sequence[int], targets: int = 0, *, forward_only: bool = False) -> str:
        """The id of the future of a gradient."""
        answer = self.send_gradient(lengths, targets, forward_only=forward_only)
        assert answer.is_success, answer.text
        return str(answer.json()["request_id"])

    def step(self, rate: float = 1e-3) -> str:
        """The id of the future of an optimizer step."""
        self.number += 1
        body = {"model_id": self.model, "seq_id": self.number, "adam_params": {"learning_rate": rate}}
        return str(self.ask("optim_step", body)["request_id"])

    def sample(self, tokens: Sequence[int], max_tokens: int, **more: Any) -> str:
        """The id of the future of a sample of the base."""
        body = {"base_model": "small", "prompt": {"chunks": [{"tokens": list(tokens)}]}, **more}
        return str(self.ask("asample", {**body, "sampling_params": {"max_tokens": max_tokens}})["request_id"])

    def cancel(self, future: str) -> None:
        """Cancel what is not done."""
        self.ask("cancel_future", {"request_id": future})

    def wait(self, future: str, seconds: float = 240.0) -> Any:
        """An answer: a message as bytes, or JSON."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            answer = self.http.post(f"{PREFIX}/retrieve_future", json={"request_id": future}, timeout=PATIENCE)
            assert answer.is_success, answer.text
            if answer.headers["content-type"] == CONTENT_TYPE:
                return answer.content
            if (body := answer.json()).get("type") != "try_again":
                return body
        raise AssertionError(f"{future} is not done: {body}")

    def finish(self) -> None:
        """No more comes for the model."""
        self.ask("unload_model", {"model_id": self.model})


def wide(model: str, number: int, lengths: Sequence[int], targets: int = 0, *, forward_only: bool = False) -> bytes:
    """A request for a gradient of sequences of these lengths; `targets` of each token, 0 is one without a dimension."""
    found = KINDS["Request"](model_id=model, seq_id=number, loss_fn="cross_entropy", forward_only=forward_only)
    for length in lengths:
        datum = found.data.add()
        datum.model_input.add().encoded_text.tokens = (np.arange(length) % 90).astype("<i4").tobytes()
        tensor = datum.loss_fn_inputs.add(key="target_tokens").value
        tensor.dtype = INT64
        tensor.dense = (np.arange(length * max(1, targets)) % 89).astype("<i8").tobytes()
        tensor.shape.extend([length, targets] if targets else [length])
    data: bytes = found.SerializeToString()
    return data
