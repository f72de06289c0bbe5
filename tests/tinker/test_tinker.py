"""The `tinker` package itself against a service: losses, checkpoints, samples, refusals."""

from __future__ import annotations

import os
import re
import subprocess

import numpy as np
import pytest

from tests.support.service_run import Service
from tests.support.tinker_run import ROOT, Scripts, job_of, tinker_python
from tests.support.waiting import PATIENCE


@pytest.fixture(scope="module")
def scripts(tinker_scripts: Scripts) -> Scripts:
    return tinker_scripts


@pytest.mark.cell("Tinker client", "embedded")
def test_the_first_loop_learns_and_sampler_and_trainer_agree(tinker_service: Service, scripts: Scripts) -> None:
    found = scripts["first_loop"]
    assert found["rank"] == 4
    assert found["before"][:-1] == found["of_base"][1:], "before any step a model is the base"
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert found["losses"][-1] < found["losses"][0]
    assert set(found["metrics"]) == {"grad_norm:mean", "lr:mean", "skipped:sum"}
    assert found["sampled"] == found["again"], "a seed gives the same samples"
    for (tokens, logprobs, reason), trained in zip(found["sampled"], found["trained"], strict=True):
        assert (len(tokens), reason) == (6, "length")
        assert logprobs == trained[-6:], "gap 0.0"
    assert found["scored"][0] is None
    assert found["scored"][1:] == found["trained"][0]
    assert tinker_service.ended(job_of(found["model"])) == "succeeded", "the client finished"
    assert [step["state"] for step in [tinker_service.job(job_of(found["model"]))]] == ["succeeded"]
    assert tinker_service.steps(job_of(found["model"])) == [0, 1, 2, 3]


def test_every_loss_is_the_documented_sum_and_has_its_gradient(scripts: Scripts) -> None:
    found = scripts["losses"]
    assert set(found) == {"importance_sampling", "ppo", "cispo", "dro"}
    for name, one in found.items():
        assert one["value"] == pytest.approx(one["formula"], rel=1e-5), name
        assert one["only"] == pytest.approx(one["formula"], rel=1e-5), name
        assert one["norms"][0] == pytest.approx(one["norms"][1], rel=1e-4), name
        built_in, custom = one["after"]
        np.testing.assert_allclose(built_in, custom, rtol=1e-4, atol=1e-4, err_msg=name)


def test_targets_may_be_soft_and_a_look_leaves_no_gradient(scripts: Scripts) -> None:
    found = scripts["soft_targets"]
    assert found["idle"] == 0.0
    assert found["look"] == pytest.approx(found["value"], rel=1e-6)
    np.testing.assert_allclose(np.asarray(found["wide"]).T, found["narrow"], rtol=1e-5)


def test_a_state_is_gone_on_from_to_the_bit(tinker_service: Service, scripts: Scripts) -> None:
    found = scripts["checkpoints"]
    straight, resumed, begun = found["finals"]
    assert straight == resumed == begun
    names = [job_of(model) for model in found["models"]]
    assert len({tinker_service.weights(name) for name in names}) == 1
    assert found["same"] != straight
    assert found["listed"] == ["weights/half", "sampler_weights/out"]
    assert found["metadata"] == [{"note": "half"}, None]
    assert found["left"] == ["sampler_weights/out"]
    assert set(found["models"]) <= set(found["runs"])
    assert found["base_of_path"] == "small"
    assert len(found["greedy"]) <= 4


def test_samples_stop_where_they_are_told_and_follow_their_model(scripts: Scripts) -> None:
    found = scripts["samples"]
    (free, reason), second = found["free"]
    assert (len(free), reason) == (12, "length"), "an empty list stops nothing"
    assert second == [free, reason], "greedy"
    assert found["at_token"][0] == [free[: free.index(found["third"]) + 1], "stop"]
    assert found["at_text"][0][1] == "stop"
    assert len(found["at_text"][0][0]) <= 4
    first, other = found["warm"]
    assert first != other, "each sample has a random number of its own"
    assert found["filled"] == [4, "length"], "without max_tokens a sample ends with the room of the base, 1024"
    assert found["before"][1:] == found["base"][1:]
    assert found["after"][1:] == found["now"] != found["before"][1:]
    assert found["suffix"] == [None] * 6 + found["base"][6:]


def test_parts_of_a_request_are_put_in_order(scripts: Scripts) -> None:
    found = scripts["chunks"]
    assert found["n"] == 1030
    assert found["value"] == pytest.approx(sum(found["values"]), rel=1e-5)
    assert found["norms"][0] == pytest.approx(found["norms"][1], rel=2e-3), "up to rounding"
    assert found["last"] == found["fresh"] != found["alone"]


def test_the_page_shows_a_loop_that_runs(tinker_service: Service) -> None:
    (example,) = re.findall(
        r"^```py\n(.*?)^```", (ROOT / "docs" / "tinker.md").read_text(encoding="utf-8"), re.M | re.S
    )
    url = {"TINKER_BASE_URL": f"{tinker_service.url}/tinker", "TINKER_API_KEY": "tml-none", "TINKER_TELEMETRY": "0"}
    done = subprocess.run(
        [tinker_python(), "-c", example],
        env={**os.environ, **url},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    values = [float(line.split()[1]) for line in lines if line.startswith("loss ")]
    assert len(values) == 20
    assert values[-1] < values[0] / 5
    assert not lines[-1].startswith("loss "), "it says something"


REFUSALS = {
    "loss": ("BadRequestError", "use importance_sampling, ppo, cispo or gspo"),
    "setting": ("BadRequestError", "loss_fn_config.epsilon is nothing that ppo takes; it takes clip_low_threshold"),
    "beta": ("BadRequestError", "dro needs loss_fn_config.beta"),
    "input": ("BadRequestError", "loss_fn_inputs.weights is unknown here"),
    "token": ("RequestFailedError", "has the token id 1000000"),
    "base": ("BadRequestError", "give 'small'"),
    "path": ("NotFoundError", "there is no model 'none'"),
    "taken": ("BadRequestError", "there is a checkpoint 'twice' already"),
}


def test_what_cannot_be_done_is_told_at_once_and_the_next_goes_on(scripts: Scripts) -> None:
    found = scripts["refusals"]
    for name, (kind, message) in REFUSALS.items():
        told, words, seconds = found[name]
        assert told == kind, (name, found[name])
        assert message in words, (name, words)
        assert seconds < PATIENCE, (name, "nothing is asked again and again")
    assert found["after"]["grad_norm:mean"] > 0
