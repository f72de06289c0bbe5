"""What clients of the Tinker protocol send, without a client and without an engine: who may, what is refused, what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from motet.algorithms.client import CLIENT_LOSSES, ClientLoss
from motet.algorithms.losses import LossInputs
from motet.runtime.journal import (
    Datum,
    Done,
    ForwardBackward,
    Gradient,
    Journal,
    JournalError,
    Nothing,
    OptimStep,
    Tensor,
)
from motet.service.tinker import runs, sampling, startup, training
from motet.service.tinker.leases import Leases
from motet.service.tinker.models import Models
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


OPEN = {"/healthz"}


def routes() -> list[tuple[str, str]]:
    """Every method and path below the prefix."""
    found = [route for module in (startup, training, sampling, runs) for route in module.router.routes]
    return [(method, route.path) for route in found if isinstance(route, APIRoute) for method in route.methods or ()]


def test_every_route_wants_a_key_and_another_tenants_model_is_not_there(house: House) -> None:
    model = made(house)
    assert len(routes()) > 25
    for method, path in routes():
        place = (
            path.replace("{run}", model).replace("{session_id}", model.partition(":")[0]).replace("{kind}", "weights")
        )
        if path.removeprefix(PREFIX) in OPEN:
            continue
        for headers in ({}, {"X-API-Key": "tml-mk-nobodys"}):
            answer = house.http.request(method, place, headers=headers, json={})
            assert answer.status_code == 401, (method, path, answer.text)
    assert house.ask("GET", f"{PREFIX}/training_runs/{model}").status_code == 200
    assert house.ask("GET", f"{PREFIX}/training_runs/{model}", "theirs").status_code == 404
    listed = [house.ask("GET", f"{PREFIX}/training_runs", key).json()["training_runs"] for key in ("ours", "theirs")]
    assert (model in [run["training_run_id"] for run in listed[0]], listed[1]) == (True, [])
    assert sent(house, request(model).SerializeToString(), "theirs").status_code == 404
    step = {"model_id": model, "seq_id": 1, "adam_params": {}}
    assert house.ask("POST", f"{PREFIX}/optim_step", "theirs", json=step).status_code == 404
    future = {"request_id": f"{model}/0"}
    assert house.ask("POST", f"{PREFIX}/retrieve_future", "theirs", json=future).status_code == 404
    key = {"X-API-Key": f"tml-{house.keys['ours']}"}
    assert house.http.post(f"{PREFIX}/create_session", headers=key, json={"tags": []}).status_code == 200


def test_a_command_is_kept_once_and_its_outcome_answers_it(house: House) -> None:
    model = made(house)
    body = request(model).SerializeToString()
    first, again = sent(house, body), sent(house, body)
    assert first.json() == again.json() == {"request_id": f"{model}/1"}
    other = sent(house, request(model, forward_only=True).SerializeToString())
    assert (other.status_code, "another one" in other.text) == (400, True)
    kept = journal(house, model)
    command = kept.command(1)
    assert isinstance(command, ForwardBackward)
    (sample,) = [datum.sample() for datum in command.data]
    assert sample.token_ids.tolist() == [0, 1, 2, 0]
    assert sample.targets is not None
    assert sample.targets.tolist() == [0, 1, 2, 3]
    assert sample.loss_mask.tolist() == [False, True, True, True]
    kept.answer(1, Gradient([Tensor.of(np.asarray([-1.0, -2.0, -3.0], np.float32))], {"loss:sum": 6.0}))
    answer = house.ask("POST", f"{PREFIX}/retrieve_future", json=first.json())
    assert answer.headers["content-type"] == CONTENT_TYPE
    output = KINDS["Output"].FromString(answer.content)
    (field,) = output.loss_fn_outputs[0].fields
    assert np.frombuffer(field.value.data, "<f4").tolist() == [-1.0, -2.0, -3.0]
    assert [(one.key, one.value) for one in output.metrics] == [("loss:sum", 6.0)]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "dimuon": ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "adam_params"),
    "field": ("optim_step", {"adam_params": {"momentum": 1}}, "adam_params.momentum"),
    "name": ("save_weights", {"path": "../x"}, "path"),
    "outside": ("save_weights_external", {"path": "x"}, "motet pull"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_command_uses_its_number_up(house: House, name: str) -> None:
    model = made(house)
    route, body, words = REFUSED[name]
    answer = house.ask("POST", f"{PREFIX}/{route}", json={"model_id": model, "seq_id": 1, **body})
    assert (answer.status_code, words in answer.text) == (400, True), answer.text
    assert journal(house, model).command(1) == Nothing()


_KNOWN: list[str] = []


def model_of(house: House) -> str:
    """One model for many requests."""
    if not _KNOWN:
        _KNOWN.append(made(house))
    return _KNOWN[0]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_nonsense_is_a_400_and_nothing_else(house: House, data: st.DataObject) -> None:
    body = bytearray(request(model_of(house), data.draw(st.integers(1, 5))).SerializeToString())
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(body)))
        body[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    answer = sent(house, bytes(body))
    assert answer.status_code in (200, 400, 404), answer.text


def test_a_client_that_says_nothing_for_a_day_has_finished(house: House) -> None:
    now = 0.0
    leases = Leases(house.part(Models), house.store, lambda: now)
    silent, alive = made(house), made(house)
    leases.end_silent()
    for _ in range(25):
        now += 3600
        leases.renew(alive.partition(":")[0])
        leases.end_silent()
    assert [journal(house, model).finished for model in (silent, alive)] == [True, False]


def test_a_job_that_waits_for_a_client_is_not_submitted(house: House) -> None:
    job = {"name": "mine", "data": "toy:add", "algorithm": "client"}
    assert "only a client makes such a job" in house.refused(400, "POST", "/v1/jobs", json=job)["message"]


def test_commands_are_written_once_and_forgotten_once_committed(tmp_path: Path) -> None:
    kept = Journal(tmp_path)
    step = OptimStep(1e-3, (0.9, 0.95), 1e-8, 0.0, None)
    kept.write(2, step)
    assert kept.command(1) is None
    kept.write(1, Nothing())
    kept.write(2, step)
    with pytest.raises(JournalError, match="request 2"):
        kept.write(2, Nothing())
    assert Journal(tmp_path).command(2) == step
    kept.answer(1, Done({"a": 1}))
    kept.answer(2, Done({"a": 2}))
    kept.forget(2)
    assert (kept.command(1), kept.command(2)) == (None, step)
    assert [kept.outcome(number) for number in (1, 2, 3)] == [Done({"a": 1}), Done({"a": 2}), None]


def _by_hand(name: str, lp: torch.Tensor, q: torch.Tensor, a: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    ratio = torch.exp(lp - q)
    match name:
        case "cross_entropy":
            return -lp
        case "importance_sampling":
            return -ratio * a
        case "ppo":
            return -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
        case "cispo":
            return -ratio.clamp(0.0, 4.0).detach() * lp * a
        case "gspo":
            means = [((lp - q) * mask)[part].sum() / mask[part].sum() for part in SEQUENCES]
            means = torch.cat([mean.expand(len(lp[part])) for mean, part in zip(means, SEQUENCES, strict=True)])
            ratio = torch.exp(means.detach() + lp - lp.detach())
            return -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
    return -(lp * a - 0.5 * 0.05 * (lp - q) ** 2)


SEQUENCES = (slice(0, 20), slice(20, 64))


@pytest.mark.parametrize("name", CLIENT_LOSSES)
def test_losses_and_gradients_are_those_of_the_formulas(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    lp, q, a, w = (torch.randn(64, generator=generator) for _ in range(4))
    lp.requires_grad_()
    mask = (torch.rand(64, generator=generator) < 0.7).float()
    known = {key: value if value is not None else 0.05 for key, value in CLIENT_LOSSES[name].settings.items()}
    inputs = LossInputs(
        logprobs_N=lp, entropy_N=torch.zeros(64), sampler_logprobs_N=q, advantages_N=a, weights_N=w,
        sample_N=(torch.arange(64) >= 20).long(), n_samples=2, ratio_mask_N=mask,
    )  # fmt: skip
    found = (ClientLoss(name, known).token_losses(inputs)[0] * w).sum()
    (gradient,) = torch.autograd.grad(found, lp)
    expected = (_by_hand(name, lp, q, a, mask) * w).sum()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, lp)[0])


def test_a_datum_of_many_targets_is_a_sample_of_many() -> None:
    targets = np.arange(6, dtype="<i4").reshape(3, 2)
    weights = np.ones((3, 2), np.float32)
    sample = Datum(np.arange(3, dtype="<i4").tobytes(), targets.tobytes(), 2, Tensor.of(weights)).sample()
    assert (sample.n_tokens, sample.n_targets, sample.n_trainable) == (4, 2, 3)
    assert sample.targets is not None
    assert sample.targets[1:].tolist() == targets.tolist()
