"""The example files of every way to learn run, all jobs at once, two steps each; preferences come from what was logged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import motet
from motet.jobfile import load_jobs

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_each_way_to_learn_runs_from_its_file(tmp_path: Path) -> None:
    steps, rewarded = ["steps=2"], {"chain": "rewarded", "critic": "retry", "code": "code", "game": "game"}
    few = {file: ["data.size=128", f"jobs.{job}.algorithm.groups_per_step=2"] for file, job in rewarded.items()}
    for file in ("code", "game"):
        few[file] = [few[file][1], "data.holdout=4"]
    files = (*rewarded, "chat", "preferences")
    jobs = [job for file in files for job in load_jobs(EXAMPLES / f"{file}.yaml", [*steps, *few.get(file, [])]).jobs]
    done = motet.run(jobs, base="small", quiet=True, directory=tmp_path / "run", engine={"samplers": 0})
    assert {name: job.message for name, job in done.jobs.items() if job.state != "succeeded"} == {}
    learned = {"taught", "rewarded", "retry", "code", "digits", "game"}
    assert set(done.jobs) == {*learned, "chat", "pairs", "thumbs"}
    target = tmp_path / "pairs.jsonl"
    script = [sys.executable, *map(str, (EXAMPLES / "pairs.py", tmp_path / "run" / "retry", target))]
    answered = subprocess.run(script, capture_output=True, text=True, check=True, timeout=60)
    pairs = [json.loads(line) for line in target.read_text().splitlines()]
    assert answered.stdout == f"{len(pairs)} pairs in {target}\n"
    assert all(set(pair) == {"prompt", "chosen", "rejected"} and pair["chosen"] != pair["rejected"] for pair in pairs)


@pytest.mark.soak
def test_a_game_is_learned(tmp_path: Path) -> None:
    """By a third of what can be won at least, on games that it was not trained on."""
    config = load_jobs(EXAMPLES / "game.yaml")
    done = motet.run(config.jobs, base="small", quiet=True, directory=tmp_path / "run")
    assert done.jobs["game"].state == "succeeded", done.jobs["game"].message
    lines = (tmp_path / "run" / "game" / "metrics.jsonl").read_text().splitlines()
    held_out = [line["eval"]["reward"] for line in map(json.loads, lines) if "eval" in line]
    assert held_out[-1] - held_out[0] >= 0.3, held_out
