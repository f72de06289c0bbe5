"""Recipes of the `tinker-cookbook` package as it comes, against a service: they run, go on, learn, and live through kills."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from motet.service.bases import SMALL_BASE
from tests.support.service_run import Service, serving
from tests.support.tinker_run import ROOT, job_of, tinker_python

ARITHMETIC = ("tinker_cookbook.recipes.math_rl.train", "env=arithmetic", "loss_fn=importance_sampling", "max_tokens=6")
SUPERVISED = ("tinker_cookbook.recipes.chat_sl.train", "train_on_what=last_assistant_message", "max_length=256")
KILLS = 4


@pytest.fixture
def service(tinker_service: Service) -> Service:
    return tinker_service


class Recipe:
    """One that runs, and writes below a directory."""

    def __init__(self, service: Service, log: Path, program: tuple[str, ...], *words: str) -> None:
        command = [tinker_python(), *program, *words]
        own = {"TINKER_BASE_URL": f"{service.url}/tinker", "TINKER_API_KEY": "tml-none", "TINKER_TELEMETRY": "0"}
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self.log, self._told = log, log.with_suffix(".out").open("w+")
        self.process = subprocess.Popen(
            command, env={**os.environ, **own, **offline}, stdout=self._told, stderr=subprocess.STDOUT
        )

    def done(self, seconds: float = 600.0) -> list[dict[str, Any]]:
        """Its metrics, once it has ended well."""
        try:
            self.process.wait(seconds)
        finally:
            self.process.kill()
            self.process.wait()
            self._told.close()
        assert self.process.returncode == 0, self.log.with_suffix(".out").read_text()[-4000:]
        return [json.loads(line) for line in (self.log / "metrics.jsonl").read_text().splitlines()]


def recipe(service: Service, log: Path, program: tuple[str, ...], *words: str) -> Recipe:
    """One of the cookbook's own programs on the small base, which it knows by a directory of this machine."""
    model = (f"model_name={SMALL_BASE}", "renderer_name=qwen3_instruct", "eval_every=0", f"log_path={log}")
    return Recipe(service, log, ("-m", *program), *model, "lora_rank=8", *words)


def checkpoints(log: Path) -> list[dict[str, Any]]:
    """What a recipe saved."""
    return [json.loads(line) for line in (log / "checkpoints.jsonl").read_text().splitlines()]


def conversations(path: Path) -> Path:
    """Sums to learn from, as JSON lines."""
    source = random.Random(5)
    lines = []
    for _ in range(192):
        a, b = source.randrange(60, 90), source.randrange(60, 90)
        messages = [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": str(a + b)}]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines))
    return path


def pairs(path: Path) -> Path:
    """A better and a worse answer to each question, as JSON lines."""
    lines = []
    for number in range(64):
        better, worse = ([{"role": "assistant", "content": said}] for said in (str(number + 1), "I do not know."))
        prompt = [{"role": "user", "content": f"What is {number} + 1?"}]
        comparison = {"prompt_conversation": prompt, "completion_A": better, "completion_B": worse}
        lines.append(json.dumps({"comparison": comparison, "label": "A"}))
    path.write_text("\n".join(lines))
    return path


@pytest.mark.soak
def test_the_arithmetic_recipe_runs_as_it_comes(service: Service, tmp_path: Path) -> None:
    words = ("group_size=4", "groups_per_batch=4", "learning_rate=1e-3", "save_every=1", "max_steps=2")
    metrics = recipe(service, tmp_path / "rl", ARITHMETIC, *words).done()
    assert [one["step"] for one in metrics if "env/all/reward/total" in one] == [0, 1]
    assert all(one["optim/kl_sample_train_v1"] == 0.0 for one in metrics if "optim/kl_sample_train_v1" in one)
    assert checkpoints(tmp_path / "rl")


@pytest.mark.soak
def test_supervised_then_reinforcement_and_a_run_that_goes_on(service: Service, tmp_path: Path) -> None:
    data = conversations(tmp_path / "sums.jsonl")
    words = (f"dataset={data}", "batch_size=16", "learning_rate=4e-3", "lr_schedule=constant", "save_every=0")
    metrics = recipe(service, tmp_path / "sft", SUPERVISED, *words).done()
    curve = [one["train_mean_nll"] for one in metrics if "train_mean_nll" in one]
    assert sum(curve[-2:]) < 0.85 * sum(curve[:2])
    start = f"load_checkpoint_path={checkpoints(tmp_path / 'sft')[-1]['state_path']}"
    words = ("group_size=4", "groups_per_batch=4", "learning_rate=1e-3", "save_every=1", start)
    log = tmp_path / "rl"
    recipe(service, log, ARITHMETIC, *words, "max_steps=2").done()
    metrics = recipe(service, log, ARITHMETIC, *words, "max_steps=3", "behavior_if_log_dir_exists=resume").done()
    assert [one["step"] for one in metrics if "env/all/reward/total" in one] == [0, 1, 2]
    assert all(one["optim/kl_sample_train_v1"] == 0.0 for one in metrics if "optim/kl_sample_train_v1" in one)
    models = {one["state_path"].split("/")[2] for one in checkpoints(log)}
    assert len(models) == 2, "the second run went on in a model of its own"


@pytest.mark.soak
def test_preferences_from_json_lines(service: Service, tmp_path: Path) -> None:
    program = (
        str(ROOT / "tests" / "support" / "cookbook_preferences.py"),
        str(SMALL_BASE),
        str(pairs(tmp_path / "pairs.jsonl")),
    )
    metrics = Recipe(service, tmp_path / "dpo", program, str(tmp_path / "dpo")).done()
    losses = [one["dpo_loss"] for one in metrics if "dpo_loss" in one]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3), "before a step a model is its reference"
    assert losses[-1] < 0.5 * losses[0]


def small_words(tmp_path: Path) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Recipes that bring their data along or read them from a file, each with sizes that take a minute."""
    steps = ("max_steps=1", "save_every=0")
    alone = ("lora_rank=8",)
    tools = f"toolalpaca_data_path={tmp_path / 'tools'}"
    return {
        "guess_number": ("multiplayer_rl.guess_number.train", ("group_size=2", "batch_size=2", "max_tokens=8", *steps)),
        "shorter": ("preference.shorter.train", ("group_size=2", "batch_size=2", "max_tokens=8", "max_steps=1")),
        "prompt_distillation": (
            "prompt_distillation.train",
            (f"file_path={tmp_path / 'sums.jsonl'}", "batch_size=8", "max_length=128", *steps, *alone),
        ),
        "sdft": (
            "sdft.train",
            ("dataset=toolalpaca", tools, "groups_per_batch=2", "max_tokens=8", "topk=5", *steps, *alone),
        ),
    }


@pytest.mark.soak
@pytest.mark.parametrize("name", ["guess_number", "shorter", "prompt_distillation", "sdft"])
def test_other_recipes_run_as_they_come(service: Service, tmp_path: Path, name: str) -> None:
    conversations(tmp_path / "sums.jsonl")
    rows = "{'prompt': [f'What is {i} + 1?' for i in range(20)], 'golden_response': [[str(i + 1)] for i in range(20)]}"
    made = f"import datasets; datasets.Dataset.from_dict({rows}).save_to_disk({str(tmp_path / 'tools')!r})"
    subprocess.run([tinker_python(), "-c", made], check=True, capture_output=True)
    program, words = small_words(tmp_path)[name]
    model = (f"model_name={SMALL_BASE}", "renderer_name=qwen3_instruct", "eval_every=0", f"log_path={tmp_path / 'log'}")
    found = Recipe(service, tmp_path / "log", ("-m", f"tinker_cookbook.recipes.{program}"), *model, *words).done()
    assert found


WORDS = ("group_size=4", "groups_per_batch=4", "learning_rate=1e-3", "save_every=2", "max_steps=6")


def ended(service: Service, log: Path) -> tuple[bytes, list[Any]]:
    """The adapter that a recipe ended with, and its rewards."""
    model = checkpoints(log)[-1]["state_path"].split("/")[2]
    assert service.ended(job_of(model)) == "succeeded"
    metrics = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    return service.weights(job_of(model)), [one.get("env/all/reward/total") for one in metrics]


@pytest.mark.soak
def test_four_kills_change_no_bit_of_the_arithmetic_recipe(service: Service, tmp_path: Path) -> None:
    recipe(service, tmp_path / "calm", ARITHMETIC, *WORDS).done()
    expected, source, kills, in_a_row = ended(service, tmp_path / "calm"), random.Random(1), 0, 0
    with serving(tmp_path / "service") as killed:
        running = recipe(killed, tmp_path / "wild", ARITHMETIC, *WORDS)
        while running.process.poll() is None:
            time.sleep(source.uniform(0.0, 4.0))
            if kills == KILLS:
                continue
            killed.until(lambda: killed.answers("/readyz") and len(killed.engines()) == 1)
            kills += 1
            if source.random() < 0.5 and in_a_row < 4:  # a sample is given up when five engines in a row ended under it
                killed.engine().kill()
                in_a_row += 1
            else:
                killed.kill()
                killed.start(ready=False)
                in_a_row = 0
        running.done()
        print(f"{kills} kills")
        assert ended(killed, tmp_path / "wild") == expected
        assert kills == KILLS
