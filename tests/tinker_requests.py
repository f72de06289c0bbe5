"""Requests of the Tinker protocol, without a client: models of a tenant's, and messages for a gradient of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from motet.runtime.client_loop import ABOUT
from motet.runtime.journal import Journal
from motet.service.tinker.parts import PREFIX
from motet.service.tinker.wire import CONTENT_TYPE, INT64, KINDS
from tests.house import House
from tests.tinker_run import job_of


def made(house: House) -> str:
    """A new model of a tenant's."""
    session = house.ask("POST", f"{PREFIX}/create_session", json={"tags": []}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "base", "lora_config": {"rank": 4}}
    promise = house.ask("POST", f"{PREFIX}/create_model", json=body).json()
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
