"""What clients of the Tinker protocol send, without a client and without an engine: who may, what is refused, what is kept."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.msgpack import encode

from motet.algorithms.client import CLIENT_LOSSES, ClientLoss, batch_of, datum
from motet.config import OF_CLIENT
from motet.config.service import HttpConfig
from motet.core.batch import LossInputs
from motet.runtime.journal import (
    KEPT_BYTES,
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
from motet.service.errors import Refusal
from motet.service.http.bodies import MOST_GRADIENT
from motet.service.tinker.checkpoints import Checkpoints
from motet.service.tinker.futures import Futures
from motet.service.tinker.leases import Leases
from motet.service.tinker.models import MOST_COMMANDS, MOST_WAITING, Models
from motet.service.tinker.parts import PREFIX
from motet.service.tinker.wire import (
    CONTENT_TYPE,
    FLOAT32,
    KINDS,
    SMALL,
    SampleBytes,
    gradient_of,
    read_gradient,
    read_small,
    write_samples,
)
from tests.support.house import House, open_house
from tests.support.tinker_requests import journal, made, request, sent, wide
from tests.support.tinker_run import job_of
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.tier1


def test_a_command_is_kept_once_and_its_outcome_answers_it(house: House) -> None:
    model = made(house)
    body = request(model).SerializeToString()
    first, again = sent(house, body), sent(house, body)
    assert first.json() == again.json() == {"request_id": f"{model}/1"}
    other = sent(house, request(model, forward_only=True).SerializeToString())
    assert (other.status_code, "another one" in other.text) == (400, True)
    kept = journal(house, model)
    assert (kept.path / "00000001.cmd").read_bytes() == gradient_of(read_gradient(body)).command, "encoded once"
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


@pytest.mark.parametrize("route", ["save_weights", "save_weights_for_sampler", "save_weights_external"])
def test_a_checkpoint_that_expires_is_asked_for_twice(house: House, route: str) -> None:
    model = made(house)
    body = {"model_id": model, "seq_id": 1, "path": "x", "ttl_seconds": 3600}
    first, again = (house.ask("POST", f"{PREFIX}/{route}", json=body).json() for _ in range(2))
    assert first == again == {"request_id": f"{model}/1"}


def test_a_sampling_session_that_is_counted_twice_is_one(house: House) -> None:
    """The package counts again when it sends again."""
    model = made(house)
    body = {"model_id": model, "seq_id": 1}
    promises = [
        house.ask("POST", f"{PREFIX}/save_weights_for_sampler", json={**body, "sampling_session_seq_id": count}).json()
        for count in (0, 1)
    ]
    assert promises == [{"request_id": f"{model}/1"}] * 2


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "dimuon": ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "adam_params"),
    "field": ("optim_step", {"adam_params": {"momentum": 1}}, "adam_params.momentum"),
    "name": ("save_weights", {"path": "../x"}, "path"),
    "encryption": ("save_weights_external", {"path": "x", "age_encryption_recipients": ["age1"]}, "age_encryption_rec"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_command_uses_its_number_up(house: House, name: str) -> None:
    model = made(house)
    route, body, words = REFUSED[name]
    answer = house.ask("POST", f"{PREFIX}/{route}", json={"model_id": model, "seq_id": 1, **body})
    assert (answer.status_code, words in answer.text) == (400, True), answer.text
    assert journal(house, model).command(1) == Nothing()


def plainly(body: Any) -> dict[str, Any]:
    """A body of JSON in ASCII, which clients' own encoders would refuse to make."""
    return {"content": json.dumps(body), "headers": {"Content-Type": "application/json"}}


def deep(levels: int) -> Any:
    """Lists within lists."""
    found: Any = []
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize(
    "odd",
    ["\ud800", {"\ud800": 1}, deep(40), deep(900), 2**70, "x" * 9000],
    ids=["half", "key", "deep", "deeper", "int", "long"],
)
def test_metadata_that_cannot_be_kept_are_refused_and_nothing_is_left_of_them(house: House, odd: Any) -> None:
    about = {"a": odd}
    new = {"session_id": "session-" + "0" * 16, "model_seq_id": 0, "base_model": "base", "user_metadata": about}
    before = len(house.ask("GET", "/v1/jobs").json()["data"])
    house.refused(400, "POST", f"{PREFIX}/create_model", **plainly(new))
    assert len(house.ask("GET", "/v1/jobs").json()["data"]) == before
    model = made(house)
    for number, route in enumerate(("save_weights", "save_weights_for_sampler"), 1):
        body = {"model_id": model, "seq_id": number, "path": "x", "user_metadata": about}
        house.refused(400, "POST", f"{PREFIX}/{route}", **plainly(body))
        assert journal(house, model).command(number) == Nothing()


def test_a_body_that_cannot_be_read_is_a_400(house: House) -> None:
    text = json.dumps(deep(900)).replace("[", "[" * 8).replace("]", "]" * 8)
    for body in (text, '{"model_id": "\\ud800", "seq_id": 1}', "[1"):
        house.refused(400, "POST", f"{PREFIX}/save_weights", content=body)


@pytest.mark.parametrize("route", ["training_runs", "checkpoints", "sessions"])
def test_page_begins_at_the_largest_number_that_a_database_holds(house: House, route: str) -> None:
    assert house.ask("GET", f"{PREFIX}/{route}", params={"offset": str(2**53)}).is_success


def sparse(found: Any, shape: list[int], rows: list[int]) -> None:
    """Targets without values, of a shape that takes no bytes of the message to be large."""
    targets = found.data[-1].loss_fn_inputs[0].value
    targets.ClearField("dense")
    targets.sparse_csr.crow_indices = np.asarray(rows, "<i8").tobytes()
    targets.shape[:] = shape


@pytest.mark.parametrize(
    ("shape", "rows", "words"),
    [
        ([2**32, 2**32], None, "shape"),
        ([0, 2**62], None, "shape"),
        ([0, 2**62], [0], "shape"),
        ([1, 2**22 + 1], [0, 0], "shape"),
        ([3, 1], [0, 2**63 - 1, -2, 0], "row indices"),
    ],
)
def test_an_impossible_shape_is_refused_and_its_number_used_up(
    house: House, shape: list[int], rows: list[int] | None, words: str
) -> None:
    model = made(house)
    body = request(model)
    sparse(body, shape, rows or [])
    if rows is None:
        body.data[0].loss_fn_inputs[0].value.ClearField("sparse_csr")
    answer = sent(house, body.SerializeToString())
    assert (answer.status_code, words in answer.text) == (400, True), answer.text
    assert journal(house, model).command(1) == Nothing()


def test_no_tensor_becomes_dense_before_all_shapes_are_compared() -> None:
    body = request("session-0:train:0")
    body.data[0].model_input[0].encoded_text.tokens = b"abcd"
    found, weights = KINDS["Request"](), body.data[0].loss_fn_inputs.add(key="weights").value
    weights.sparse_csr.crow_indices, weights.dtype = np.zeros(2, "<i8").tobytes(), FLOAT32
    weights.shape[:] = [1, 2**20]
    for shape, words in (([1, 2**20], "targets, more than"), ([1, 1], "weights has shape [1, 1048576]")):
        found.CopyFrom(body)
        sparse(found, shape, [0, 0])
        tracemalloc.start()
        asked = gradient_of(read_gradient(found.SerializeToString()))
        assert tracemalloc.get_traced_memory()[1] < 2**20
        tracemalloc.stop()
        assert words in asked.reason
    assert read_small(found.SerializeToString()) is None  # it is a few bytes long, and read apart


@pytest.mark.parametrize("field", ["settings", "v2", "loss_fn_inputs"])
def test_a_name_that_is_no_text_is_refused_and_its_number_used_up(house: House, field: str) -> None:
    model = made(house)
    found = request(model)
    names = found.data[0].loss_fn_inputs if field == "loss_fn_inputs" else getattr(found, field)
    for name in ("??", "!!"):
        names.add(key=name)
    answer = sent(house, found.SerializeToString().replace(b"??", b"\xff\xff"))
    assert (answer.status_code, "is no text in UTF-8" in answer.text) == (400, True), answer.text
    assert journal(house, model).command(1) == Nothing()


def test_a_gradient_that_takes_too_much_to_read_uses_its_number_up(tmp_path: Path) -> None:
    with open_house(
        tmp_path, http=HttpConfig(work_seconds=0.001)
    ) as house:  # no process begins within twelve times that
        model = made(house)
        answer = sent(house, wide(model, 300, [SMALL // 4]))
        assert (answer.status_code, "takes too much" in answer.text) == (413, True), answer.text
        assert journal(house, model).command(300) == Nothing()
        odd = request(model).SerializeToString()[::-1] + bytes(SMALL)  # it does not begin with a model
        assert sent(house, odd).status_code == 413
        assert sent(house, wide("session-0:train:0", 1, [SMALL // 4])).status_code == 413


@pytest.mark.parametrize("declared", [True, False])
def test_a_gradient_that_is_too_long_uses_its_number_up(house: House, declared: bool) -> None:
    model, part = made(house), bytes(2**20)
    head = request(model, 300).SerializeToString()
    length = {"content-length": str(MOST_GRADIENT + 1)} if declared else {}
    first, parts = head + bytes(len(part) - len(head)), MOST_GRADIENT // len(part)
    body = itertools.chain([first], itertools.repeat(part, parts - 1), [b"."])
    answer = house.ask(
        "POST", f"{PREFIX}/forward_backward", content=body, headers={"content-type": CONTENT_TYPE, **length}
    )
    assert (answer.status_code, "32 MB at most; send the data in parts" in answer.text) == (413, True), answer.text
    assert journal(house, model).command(300) == Nothing()


def test_sparse_data_are_counted_together_before_any_of_them_is_made_dense(house: House) -> None:
    model = made(house)
    body = request(model)
    body.data[0].model_input[0].encoded_text.tokens = b"abcd"
    for _ in range(3):
        sparse(body, [1, 2**21], [0, 0])
        body.data.add().CopyFrom(body.data[0])
    tracemalloc.start()
    answer = sent(house, body.SerializeToString())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (answer.status_code, "send fewer data" in answer.text) == (400, True), answer.text
    assert peak < 2**24
    assert journal(house, model).command(1) == Nothing()


def test_a_client_that_says_nothing_for_a_day_has_finished(house: House) -> None:
    now = 0.0
    leases = Leases(house.part(Models), house.part(Checkpoints), house.part(Futures), house.store, lambda: now)
    silent, alive = made(house), made(house)
    leases.end_silent()
    for _ in range(25):
        now += 3600
        leases.renew(alive.partition(":")[0])
        leases.end_silent()
    assert [journal(house, model).finished for model in (silent, alive)] == [True, False]


def test_a_model_has_no_rows_and_every_other_job_needs_some(house: House) -> None:
    spec = house.ask("GET", f"/v1/jobs/{job_of(made(house))}").json()["spec"]
    assert spec["data"]["source"] == OF_CLIENT
    elsewhere = {"name": "mine", "data": {"source": OF_CLIENT, "eval_source": "/etc/hosts"}, "algorithm": "client"}
    assert "data.eval_source: a client evaluates" in house.refused(400, "POST", "/v1/jobs", json=elsewhere)["message"]
    job = {"name": "mine", "data": OF_CLIENT, "reward": "exact"}
    assert "data.source: is missing" in house.refused(400, "POST", "/v1/jobs", json=job)["message"]


def test_commands_are_written_once_and_forgotten_once_committed(tmp_path: Path) -> None:
    kept = Journal(tmp_path)
    step = OptimStep(1e-3, (0.9, 0.95), 1e-8, 0.0, None)
    kept.put(2, encode(step))
    assert kept.command(1) is None
    kept.put(1, encode(Nothing()))
    kept.put(2, encode(step))
    with pytest.raises(JournalError, match="request 2"):
        kept.put(2, encode(Nothing()))
    assert Journal(tmp_path).command(2) == step
    kept.answer(1, Done({"a": 1}))
    kept.answer(2, Done({"a": 2}))
    kept.forget(2)
    assert (kept.command(1), kept.command(2)) == (None, step)
    assert [kept.outcome(number) for number in (1, 2, 3)] == [Done({"a": 1}), Done({"a": 2}), None]


def test_an_answer_that_is_not_kept_any_more_is_not_waited_for(house: House) -> None:
    model = made(house)
    kept, who = journal(house, model), house.store.tenants.who(house.keys["ours"])
    assert who is not None
    for number in (1, 2, 3):
        kept.put(number, encode(Nothing()))
        kept.answer(number, Done({"text": "x" * (KEPT_BYTES // 2 + 1)}))
    kept.put(4, encode(Nothing()))
    kept.forget(4, 3)

    async def asked(number: int) -> Any:
        return await house.part(Futures).wait(who, f"{model}/{number}", 0.0)

    def told(number: int) -> Any:
        return asyncio.run_coroutine_threadsafe(asked(number), house.app.state.loop).result(PATIENCE)

    assert [told(number)["type" if number == 4 else "text"][:3] for number in (2, 3, 4)] == ["xxx", "xxx", "try"]
    for number in (1, 5):
        with pytest.raises(Refusal, match="too old to be kept"):
            told(number)


def test_gradients_that_wait_are_bounded_and_their_step_is_taken(house: House) -> None:
    model = made(house)
    first = request(model, 1).SerializeToString()
    assert sent(house, first).status_code == 200
    os.truncate(journal(house, model).path / "00000001.cmd", MOST_WAITING + 1)  # with holes: it takes no room
    assert sent(house, first).status_code == 200, "it is known"
    more = sent(house, request(model, 2).SerializeToString())
    assert (more.status_code, "call optim_step" in more.text) == (400, True), more.text
    assert journal(house, model).command(2) == Nothing()
    step = {"model_id": model, "seq_id": 3, "adam_params": {}}
    assert house.ask("POST", f"{PREFIX}/optim_step", json=step).json() == {"request_id": f"{model}/3"}
    os.truncate(journal(house, model).path / "00000001.cmd", 2 * MOST_WAITING + 1)
    assert (
        "wait for those before this one"
        in house.refused(400, "POST", f"{PREFIX}/optim_step", json={**step, "seq_id": 4})["message"]
    )
    assert journal(house, model).command(4) is None


def test_commands_that_wait_are_bounded_in_number(house: House) -> None:
    model = made(house)
    kept = journal(house, model)
    for number in range(2, MOST_COMMANDS + 1):  # number 1, for which all wait, does not come
        (kept.path / f"{number:08d}.cmd").touch()
    more = sent(house, request(model, MOST_COMMANDS + 2).SerializeToString())
    assert (more.status_code, f"{MOST_COMMANDS} commands" in more.text) == (400, True), more.text
    assert kept.command(MOST_COMMANDS + 2) == Nothing()
    first = {"model_id": model, "seq_id": 1, "adam_params": {}}
    assert house.ask("POST", f"{PREFIX}/optim_step", json=first).is_success
    for number in range(MOST_COMMANDS + 2, 2 * MOST_COMMANDS + 2):
        (kept.path / f"{number:08d}.cmd").touch()
    step = {**first, "seq_id": 2 * MOST_COMMANDS + 2}
    told = house.refused(400, "POST", f"{PREFIX}/optim_step", json=step)["message"]
    assert "wait for those before this one" in told
    assert kept.command(2 * MOST_COMMANDS + 2) is None


def test_what_goes_while_it_is_counted_is_not_counted(tmp_path: Path, house: House) -> None:
    kept = Journal(tmp_path)
    kept.put(2, encode(Nothing()))
    (kept.path / "00000001.cmd").symlink_to("gone")  # it was there when the directory was read
    assert kept.waiting()[1] == (kept.path / "00000002.cmd").stat().st_size
    asked = house.storage.samples("tenant")
    asked.mkdir(parents=True)
    (asked / "sample-gone").symlink_to("gone")
    old = asked / "sample-old"
    old.touch()
    os.utime(old, (0, 0))
    house.part(Futures).clear()
    assert not old.exists()


def _by_hand(
    name: str, known: Mapping[str, float], lp: torch.Tensor, q: torch.Tensor, a: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    ratio = torch.exp(lp - q)
    low, high = known.get("clip_low_threshold"), known.get("clip_high_threshold")
    match name:
        case "cross_entropy":
            return -lp
        case "importance_sampling":
            return -ratio * a
        case "ppo":
            return -torch.minimum(ratio * a, ratio.clamp(low, high) * a)
        case "cispo":
            return -ratio.clamp(low, high).detach() * lp * a
        case "gspo":
            means = [(((lp - q) * mask)[part].sum() / mask[part].sum()).expand(len(lp[part])) for part in SEQUENCES]
            ratio = torch.exp(torch.cat(means).detach() + lp - lp.detach())
            return -torch.minimum(ratio * a, ratio.clamp(low, high) * a)
    return -(lp * a - 0.5 * known["beta"] * (lp - q) ** 2)


SEQUENCES = (slice(0, 20), slice(20, 64))


OTHERS = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5, "beta": 0.05}


@pytest.mark.parametrize("other", [False, True], ids=["defaults", "settings"])
@pytest.mark.parametrize("name", CLIENT_LOSSES)
def test_losses_and_gradients_are_those_of_the_formulas(name: str, other: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    lp, q, a, w = (torch.randn(64, generator=generator) for _ in range(4))
    lp.requires_grad_()
    mask = torch.ones(64) if other else (torch.rand(64, generator=generator) < 0.7).float()
    known = {key: OTHERS[key] if other or own is None else own for key, own in CLIENT_LOSSES[name].settings.items()}
    inputs = LossInputs(
        logprobs_N=lp, entropy_N=torch.zeros(64), sampler_logprobs_N=q, advantages_N=a, weights_N=w,
        sample_N=(torch.arange(64) >= 20).long(), n_samples=2, ratio_mask_N=None if other else mask,
    )  # fmt: skip
    found = (ClientLoss(name, known).token_losses(inputs)[0] * w).sum()
    (gradient,) = torch.autograd.grad(found, lp)
    expected = (_by_hand(name, known, lp, q, a, mask) * w).sum()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, lp)[0])


def test_a_datum_of_many_targets_is_a_sample_of_many() -> None:
    targets = np.arange(6, dtype="<i4").reshape(3, 2)
    weights = np.ones((3, 2), np.float32)
    sample = Datum(np.arange(3, dtype="<i4").tobytes(), targets.tobytes(), 2, Tensor.of(weights)).sample()
    assert (sample.n_tokens, sample.n_targets, sample.n_trainable) == (4, 2, 3)
    assert sample.targets is not None
    assert sample.targets[1:].tolist() == targets.tolist()


def test_a_completion_takes_the_memory_of_its_answer_while_it_comes() -> None:
    found, tokens, logprobs = SampleBytes(), np.arange(1000, 2000, dtype=np.int32), np.zeros(1000, np.float32)
    tracemalloc.start()
    try:
        for _ in range(100):
            found.add(tokens, logprobs)
        assert tracemalloc.get_traced_memory()[0] < 10 * 100_000
    finally:
        tracemalloc.stop()
    (sequence,) = KINDS["Samples"].FromString(write_samples([found], None)).sequences
    assert np.frombuffer(sequence.tokens, "<i4").tolist() == tokens.tolist() * 100
    assert len(sequence.logprobs) == 4 * 100_000


def test_samples_of_a_client_that_begin_alike_run_their_beginning_once_without_a_gradient() -> None:
    prompt, numbers = np.arange(20), np.random.default_rng(3)
    answers = [numbers.integers(50, 90, 5) for _ in range(4)]
    data = [datum(np.append(prompt, one[:-1]), np.append(prompt[1:], one)) for one in answers]
    loss = ClientLoss.of("importance_sampling")
    for by_sample in (False, True):
        (segment,) = batch_of(data, by_sample=by_sample).segments("a", loss, 1.0, 4096)
        assert segment.n_tokens == 4 * 25 if by_sample else segment.n_tokens <= 20 + 4 * 5
        assert segment.work == 4 * 25, "charged as sent"
