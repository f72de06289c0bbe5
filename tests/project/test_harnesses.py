"""lm-eval, inspect-ai and verifiers as they are, in environments of their own, sent to a service."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bench.speed.envs import directory, python_of

from motet.model.find import SMALL_BASE
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


def harness(
    service: Service,
    place: Path,
    *command: str,
    environment: str = "harnesses",
    prepare: Callable[[Path], None] = lambda _: None,
) -> None:
    """Run a command of the environment beside the example's files, once they are prepared, without a network."""
    shutil.copytree(EXAMPLES, place, dirs_exist_ok=True)
    prepare(place)
    tool, *words = command
    done = subprocess.run(
        [python_of(directory(), environment).with_name(tool), *words],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(place),
            "PYTHONPATH": str(Path(__file__).resolve().parents[1] / "support"),
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


LONG = "What is 7 + 7? " * 400
"""More than the context of the small base."""


def with_a_long_row(place: Path) -> None:
    """Make the second of the example's rows too long."""
    rows = (EXAMPLES / "add.jsonl").read_text().splitlines()[:4]
    rows[1] = json.dumps({**json.loads(rows[1]), "prompt": LONG})
    (place / "add.jsonl").write_text("\n".join(rows) + "\n")


def test_inspect_ends_an_evaluation_with_a_row_beyond_the_context(service: Service, tmp_path: Path) -> None:
    words = ["eval", "add.py", "--model", "openai-api/motet/add", "--log-dir", "logs", "--log-format", "json"]
    harness(service, tmp_path, "inspect", *words, "--display", "plain", prepare=with_a_long_row)
    (log,) = (json.loads(path.read_text()) for path in tmp_path.glob("logs/*.json"))
    assert log["status"] == "success"
    stops = [
        sample["output"]["choices"][0]["stop_reason"] for sample in sorted(log["samples"], key=lambda one: one["id"])
    ]
    assert stops[1] == "model_length"
    assert "model_length" not in stops[:1] + stops[2:]


def test_lm_eval_ends_an_evaluation_with_a_row_beyond_the_context(service: Service, tmp_path: Path) -> None:
    """Its completions route cuts a prompt to the context; its chat route ends at the first refusal."""
    arguments = (
        f"model=add,base_url={service.url}/v1/completions,num_concurrent=1,tokenizer={SMALL_BASE},max_length=1024"
    )
    words = ["--model", "local-completions", "--model_args", arguments, "--apply_chat_template"]
    words += ["--tasks", "motet_add", "--include_path", ".", "--log_samples", "--output_path", "results"]
    harness(service, tmp_path, "lm_eval", *words, prepare=with_a_long_row)
    (samples,) = tmp_path.glob("results/*/samples_motet_add_*.jsonl")
    answers = [json.loads(line)["resps"][0][0] for line in samples.read_text().splitlines()]
    assert len(answers) == 4
    assert all(answers)


def test_verifiers_ends_an_evaluation_with_a_row_beyond_the_context(service: Service, tmp_path: Path) -> None:
    config = f"""
model = "add"
push = false
output_dir = "out"
[client]
base_url = "{service.url}/v1"
api_key_var = "OPENAI_API_KEY"
[env.taskset]
id = "long_sums_taskset"
[env.agent.harness]
id = "long_sums_taskset"
[env.agent.runtime]
type = "subprocess"
"""
    (tmp_path / "eval.toml").write_text(config)
    harness(service, tmp_path, "vf-eval", "@", "eval.toml", environment="verifiers")
    (traces,) = tmp_path.glob("out/**/traces.jsonl")
    lines = [json.loads(line) for line in traces.read_text().splitlines()]
    lines.sort(key=lambda line: line["task"]["data"]["idx"])
    assert [line["ok"] for line in lines] == [True, False, True, True, True]
    assert "context length" in json.dumps(lines[1]["traces"])
