"""The example files of every way to learn run, all jobs at once, two steps each; preferences come from what was logged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import motet
from motet.jobfile import load_jobs

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_each_way_to_learn_runs_from_its_file(tmp_path: Path) -> None:
    steps, rewarded = ["steps=2"], {"chain": "rewarded", "critic": "retry"}
    few = {file: ["data.size=128", f"jobs.{job}.algorithm.groups_per_step=2"] for file, job in rewarded.items()}
    files = ("chain", "critic", "chat", "preferences")
    jobs = [job for file in files for job in load_jobs(EXAMPLES / f"{file}.yaml", [*steps, *few.get(file, [])]).jobs]
    done = motet.run(jobs, base="small", quiet=True, directory=tmp_path / "run", engine={"samplers": 0})
    assert {name: job.message for name, job in done.jobs.items() if job.state != "succeeded"} == {}
    assert set(done.jobs) == {"taught", "rewarded", "retry", "chat", "pairs", "thumbs"}
    target = tmp_path / "pairs.jsonl"
    script = [sys.executable, *map(str, (EXAMPLES / "pairs.py", tmp_path / "run" / "retry", target))]
    answered = subprocess.run(script, capture_output=True, text=True, check=True, timeout=60)
    pairs = [json.loads(line) for line in target.read_text().splitlines()]
    assert answered.stdout == f"{len(pairs)} pairs in {target}\n"
    assert all(set(pair) == {"prompt", "chosen", "rejected"} and pair["chosen"] != pair["rejected"] for pair in pairs)
