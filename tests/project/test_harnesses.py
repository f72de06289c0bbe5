"""lm-eval and inspect-ai as they are, in an environment of their own (`make harnesses`), sent to a service's chat route."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.speed.envs import directory, python_of

from tests.support.commands import Motet, job_file
from tests.support.service_run import Service, serving

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "harnesses"
JOB = {
    "name": "add",
    "data": {"source": "toy:add", "size": 64, "holdout": 4},
    "reward": "exact",
    "steps": 3,
    "adapter": {"rank": 4},
    "checkpoint": {"keep": 4},  # the untrained one, too
    "optimizer": {"lr": 0.01},
    "sampling": {"max_tokens": 8},
    "algorithm": {"group_size": 8, "groups_per_step": 4},
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("service")) as found:
        found.submit(JOB)
        assert found.ended("add") == "succeeded"
        yield found


def harness(service: Service, place: Path, *command: str) -> None:
    """Run a command of the environment beside the example's files, without a network."""
    shutil.copytree(EXAMPLES, place, dirs_exist_ok=True)
    tool, *words = command
    done = subprocess.run(
        [python_of(directory(), "harnesses").with_name(tool), *words],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(place),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "OPENAI_API_KEY": "none",
            "MOTET_API_KEY": "none",
            "MOTET_BASE_URL": f"{service.url}/v1",
        },
        capture_output=True, text=True, check=False, cwd=place, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def by_lm_eval(service: Service, place: Path, model: str) -> list[str]:
    """The answers; each counts as lm-eval says."""
    url = f"{service.url}/v1/chat/completions"
    arguments = f"model={model},base_url={url},num_concurrent=8"
    words = ["--model", "local-chat-completions", "--model_args", arguments, "--apply_chat_template"]
    words += ["--tasks", "motet_add", "--include_path", ".", "--log_samples", "--output_path", "results"]
    harness(service, place, "lm_eval", *words)
    (samples,) = place.glob("results/*/samples_motet_add_*.jsonl")
    (results,) = place.glob("results/*/results_*.json")
    lines = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda line: line["doc_id"])
    score = json.loads(results.read_text())["results"]["motet_add"]["exact_match,none"]
    answers = [line["resps"][0][0] for line in lines]
    right = [line["target"] == answer for line, answer in zip(lines, answers, strict=True)]
    assert score == pytest.approx(sum(right) / len(right))
    return answers


def by_inspect(service: Service, place: Path, model: str) -> list[str]:
    """The answers."""
    words = ["eval", "add.py", "--model", f"openai-api/motet/{model}", "--log-dir", "logs", "--log-format", "json"]
    harness(service, place, "inspect", *words, "--display", "plain")
    (log,) = place.glob("logs/*.json")
    samples = sorted(json.loads(log.read_text())["samples"], key=lambda sample: sample["id"])
    return [sample["output"]["choices"][0]["message"]["content"] for sample in samples]


@pytest.mark.soak
def test_harnesses_get_the_answers_that_motet_eval_gets(service: Service, tmp_path: Path, says: Motet) -> None:
    found = []
    for version in ("latest", "0"):
        adapter, out = tmp_path / f"adapter-{version}", tmp_path / f"{version}.jsonl"
        code, _, err = says("pull", "add", "--version", version, "--to", adapter, "--url", service.url)
        assert code == 0, err
        (place,) = (path.parent for path in adapter.rglob("adapter_config.json"))
        words = ("--data", EXAMPLES / "add.jsonl", "--greedy", "--no-base", "--out", out)
        code, _, err = says("eval", job_file(tmp_path, JOB), place, *words)
        assert code == 0, err
        own = [json.loads(line)["completion"] for line in out.read_text().splitlines()]
        assert by_lm_eval(service, tmp_path / f"lm_eval-{version}", f"add@{version}") == own
        assert by_inspect(service, tmp_path / f"inspect-{version}", f"add@{version}") == own
        found.append(own)
    assert found[0] != found[1]
