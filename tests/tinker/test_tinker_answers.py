"""Every command of a client ends in an answer: whatever its numbers are, whatever fails, and if one never arrives."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from msgspec.msgpack import encode

from motet.core.json_text import json_text, named
from motet.runtime.client_loop import ABOUT
from motet.runtime.journal import Done, Failed, Gradient, Journal, Nothing, OptimStep, Tensor
from motet.service.tinker.models import MISSING_SECONDS, MOST_AHEAD, Models
from motet.service.tinker.parts import PREFIX
from motet.service.tinker.wire import CONTENT_TYPE
from tests.support.house import House
from tests.support.service_run import tiny
from tests.support.tinker_requests import journal, made, request, saved, sent
from tests.support.tinker_run import Scripts

STEP = OptimStep(1e-3, (0.9, 0.95), 1e-8, 0.0, None)


def outcome(house: House, model: str, number: int) -> Any:
    """The answer of a future."""
    return house.ask("POST", f"{PREFIX}/retrieve_future", json={"request_id": f"{model}/{number}"})


# --- numbers that are not finite ------------------------------------------------------------------------------------------


def test_the_package_gets_an_answer_whatever_a_field_holds(tinker_scripts: Scripts) -> None:
    found = dict(tinker_scripts["worst"])
    lost, steps = found.pop("lost"), found.pop("steps")
    assert not [name for name, told in {**found, **lost}.items() if told == "never"]
    texts = "half a letter", r"\ud800", r"\x00"  # no body has them
    assert set(lost) <= {name for name in lost if any(one in name for one in texts) or name == "no data"}
    failed = {name: told for name, told in found.items() if "the model has failed" in told or "internal error" in told}
    assert not failed, "a number ends no model"
    assert not [name for name, told in found.items() if name.startswith(("model: rank", "model: ttl")) and told == "ok"]
    odd = {name: one for name, one in steps.items() if one is not None and one["skipped:sum"]}
    assert {"ppo advantage 3e+38", "weight 3e+38"} <= odd.keys()
    assert all(math.isnan(one["grad_norm:mean"]) for one in odd.values())
    assert all(one is not None for name, one in steps.items()), "and each step after it is made, or skipped"


def test_a_metric_that_is_not_finite_is_answered_by_its_name(house: House) -> None:
    model = made(house)
    kept = journal(house, model)
    kept.put(1, encode(STEP))
    kept.answer(1, Done({"metrics": {"grad_norm:mean": math.nan, "lr:mean": -math.inf, "skipped:sum": 1.0}}))
    answer = outcome(house, model, 1)
    assert answer.status_code == 200
    assert json.loads(answer.content, parse_constant=pytest.fail)["metrics"] == {
        "grad_norm:mean": "NaN", "lr:mean": "-Infinity", "skipped:sum": 1.0,
    }  # fmt: skip
    kept.put(2, request(model, 2).SerializeToString())
    kept.answer(2, Gradient([Tensor.of(np.asarray([math.nan, -math.inf], np.float32))], {"loss:sum": math.inf}))
    assert outcome(house, model, 2).headers["content-type"] == CONTENT_TYPE


def test_json_that_no_number_and_no_half_letter_can_break() -> None:
    given: Mapping[str, Any] = {"a": [math.nan, (math.inf, 1.5)], "b": {"c": -math.inf}, "d": "\ud800"}
    assert json.loads(json_text(given), parse_constant=pytest.fail) == {
        "a": [None, [None, 1.5]],
        "b": {"c": None},
        "d": "\ud800",
    }
    assert json.loads(json_text(given, named))["a"] == ["NaN", ["Infinity", 1.5]]


def test_steps_whose_figures_are_not_finite_are_kept_and_shown(house: House) -> None:
    job = house.ask("POST", "/v1/jobs", json=tiny("odd")).json()["id"]
    house.recorder.record_step(job, {"step": 0, "loss": math.nan, "reward": math.inf, "grad_norm": math.nan})
    for path in ("/v1/jobs/odd/events", "/v1/jobs/odd", "/v1/jobs"):
        answer = house.ask("GET", path)
        assert answer.status_code == 200, (path, answer.text)
        json.loads(answer.content, parse_constant=pytest.fail)


# --- faults of the service --------------------------------------------------------------------------------------------------


def test_a_fault_while_a_future_is_read_fails_it_for_good_and_is_told_once(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    model = made(house)
    kept = journal(house, model)
    kept.put(1, encode(STEP))
    (kept.path / "00000001.out").write_bytes(b"\xc1 no outcome")
    with caplog.at_level(logging.ERROR):
        answers = [outcome(house, model, 1) for _ in range(50)]
    assert {one.status_code for one in answers} == {200}
    assert answers[0].json()["category"] == "server"
    assert answers[0].headers["x-request-id"] in answers[0].json()["error"]
    told = [one for one in caplog.records if one.exc_info]
    assert len(told) == 1
    assert answers[0].headers["x-request-id"] in told[0].getMessage()


def test_a_fault_of_a_route_is_final_below_the_prefix_and_a_500_elsewhere(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    model = made(house)
    (journal(house, model).path / "model.json").write_text("{")
    house.app.add_api_route("/broken", _broken)
    with caplog.at_level(logging.ERROR):
        for path, status in ((f"{PREFIX}/training_runs/{model}", 400), ("/broken", 500), ("/broken", 500)):
            answer = house.ask("GET", path)
            assert answer.status_code == status, (path, answer.text)
            assert answer.headers["x-request-id"] in answer.json()["error"]["message"]
    assert len([one for one in caplog.records if one.exc_info]) == 2


def _broken() -> None:
    raise LookupError("nobody thought of this")


def test_a_command_that_meets_a_fault_has_used_its_number(house: House) -> None:
    model = made(house)
    (saved(house, model) / ABOUT).write_text("{")
    answer = house.ask("POST", f"{PREFIX}/save_weights", json={"model_id": model, "seq_id": 1, "path": "w"})
    assert answer.status_code == 400, answer.text
    assert journal(house, model).command(1) == Nothing()


# --- numbers that never arrive ----------------------------------------------------------------------------------------------


def waited(house: House, kept: Journal, *numbers: int) -> None:
    """Commands came long ago."""
    for number in numbers:
        os.utime(kept.path / f"{number:08d}.cmd", (time.time() - 2 * MISSING_SECONDS,) * 2)
    house.part(Models)._began = 0.0


def test_what_waits_for_a_number_that_never_came_is_told_and_the_next_go_on(house: House) -> None:
    model = made(house)
    kept = journal(house, model)
    kept.answer(0, Done())
    kept.drop(0)
    kept.put(1, encode(STEP))
    for number in (4, 3, 6):
        assert sent(house, request(model, number).SerializeToString()).is_success
    waited(house, kept, 3, 4)
    answer = outcome(house, model, 3).json()
    assert answer["error"].startswith("request 2 of this model never came")
    assert "Requests 2 to 6 are refused" in answer["error"]
    assert [outcome(house, model, number).json()["category"] for number in (2, 4, 5, 6)] == ["user"] * 4
    assert (kept.command(1), kept.done(1)) == (STEP, False), "what came before it is executed"
    assert sent(house, request(model, 2).SerializeToString()).status_code == 400, "it comes too late"
    assert sent(house, request(model, 7).SerializeToString()).is_success
    assert kept.waits(7)


def test_no_number_is_missed_before_its_time(house: House) -> None:
    model = made(house)
    kept = journal(house, model)
    for number in (1, 2):
        kept.put(number, encode(STEP))
    waited(house, kept, 1, 2)
    models = house.part(Models)
    job = models.find(_who(house), model)
    assert not models.pass_over(job), "all are there: the first may take long"
    assert sent(house, request(model, 4).SerializeToString()).is_success
    assert 0 < models.look_in(job, 4) <= MISSING_SECONDS, "3 may be on its way"
    waited(house, kept, 4)
    models._held[job.id] = time.time()
    assert models.look_in(job, 4) > MISSING_SECONDS - 5, "3 was told to come again later"
    models._held.clear()
    assert models.look_in(job, 4) <= 0
    kept.answer(1, Failed("no"))
    assert models.pass_over(job)
    assert isinstance(kept.outcome(4), Failed)
    assert (kept.command(2), kept.outcome(2)) == (STEP, None)


def test_a_number_far_from_the_others_is_refused(house: House) -> None:
    model = made(house)
    for number in (MOST_AHEAD + 1, 2**31 - 1):
        answer = sent(house, request(model, number).SerializeToString())
        assert (answer.status_code, "numbers follow each other" in answer.text) == (400, True)
    assert len(list(journal(house, model).path.glob("*.cmd"))) == 1
    assert sent(house, request(model, MOST_AHEAD).SerializeToString()).is_success


def _who(house: House) -> Any:
    return house.store.tenants.who(house.keys["ours"])
