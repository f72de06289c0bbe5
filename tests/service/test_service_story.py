"""A day of a team: two tenants, four jobs through four doors, a chat, a crash, and an adapter that is taken home."""

from __future__ import annotations

import json
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import motet
from tests.support.adapter_files import loads_with_peft
from tests.support.service_run import Service, tiny
from tests.support.waiting import PATIENCE

pytestmark = [
    pytest.mark.soak,
]

STEPS = 24
REWARD = '''
def half_right(problem, completion):
    """Share of the answer's letters that the completion has in their places."""
    return sum(a == b for a, b in zip(problem.answer, completion.strip())) / max(len(problem.answer), 1)
'''
JOBS = """
base: small
defaults: {{steps: {steps}, sampling: {{max_tokens: 8}}, algorithm: {{group_size: 4, groups_per_step: 2}}}}
jobs:
  - {{name: {name}, data: {{source: "toy:{task}", size: 64, holdout: 4}}, reward: {reward}}}
"""


class Team(Service):
    """A service that asks for keys, and what its people type."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, keys=True)
        self.scratch = directory.parent

    def types(self, key: str, *words: str) -> str:
        """What a command prints; it has to succeed."""
        process = self.motet(*words, key=key, cwd=self.scratch, err=subprocess.PIPE)
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, out + err
        return out

    def job_file(self, name: str, task: str, reward: str) -> str:
        """A file of one job."""
        path = self.scratch / f"{name}.yaml"
        path.write_text(textwrap.dedent(JOBS.format(steps=STEPS, name=name, task=task, reward=reward)))
        return path.name


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Team]:
    """Its service."""
    found = Team(tmp_path / "served")
    try:
        yield found
    finally:
        found.close()


def test_the_story_of_a_team(team: Team, tmp_path: Path, small_base_dir: Path) -> None:
    team.start()
    ours, theirs = (team.types(team.admin_key, "keys", "create", name).strip() for name in ("team-a", "team-b"))

    # team-a: through the client of a hosted service
    client = openai.OpenAI(base_url=f"{team.url}/v1", api_key=ours, max_retries=0)
    rows = "".join(
        json.dumps({"messages": [{"role": "user", "content": f"Say {word}."}], "word": word}) + "\n"
        for word in ("cab", "bed", "add", "dad", "ace", "bead", "fed", "cafe")
    )
    file = client.files.create(file=("words.jsonl", rows.encode()), purpose="fine-tune")
    grader = {
        "type": "string_check", "name": "said", "operation": "ilike",
        "input": "{{sample.output_text}}", "reference": "{{item.word}}",
    }  # fmt: skip
    method: Any = {"type": "reinforcement", "reinforcement": {"grader": grader, "hyperparameters": {"n_epochs": 10}}}
    tuning = client.fine_tuning.jobs.create(
        model="small",
        training_file=file.id,
        suffix="tuned",
        method=method,
        extra_body={"motet": {"sampling": {"max_tokens": 8}, "algorithm": {"group_size": 4, "groups_per_step": 2}}},
    )

    # team-b: a reward that runs on their machine, and Python
    (tmp_path / "rewards.py").write_text(REWARD)
    file_name = team.job_file("judged", "reverse", "worker")
    worker = team.motet("submit", file_name, "--reward", "rewards.py:half_right", key=theirs, cwd=tmp_path)
    try:
        with motet.Client(team.url, theirs) as python:
            python.submit(tiny("count", STEPS, data={"source": "toy:count_letters", "size": 64, "holdout": 4}))
            team.become(theirs)
            team.until(lambda: "judged" in {job.name for job in python.jobs()})
            for name in ("judged", "count"):
                team.reaches(name, 2)
            # team-a: from the command line, last, so that it still runs below
            team.types(ours, "submit", team.job_file("sort", "sort_letters", "exact"))
            team.become(ours)
            team.reaches("sort", 2)
            assert {job.name for job in python.jobs()} == {"judged", "count"}, "another tenant's jobs are not there"
            with pytest.raises(motet.core.errors.ServiceError, match="no job"):
                python.job("sort")

        # a conversation with an adapter that trains
        answer = client.chat.completions.create(
            model="sort@latest", messages=[{"role": "user", "content": "Sort the letters of dca."}], max_tokens=8
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0
        assert team.job("sort")["state"] == "running"

        # the power fails
        before = team.job("sort")["step"]
        team.kill()
        team.start()
        assert team.job("sort")["step"] >= before
        assert team.ended("sort") == "succeeded", team.job("sort")["message"]
        assert team.steps("sort") == list(range(STEPS + 1))
        team.until(lambda: client.fine_tuning.jobs.retrieve(tuning.id).status not in ("queued", "running"))
        assert client.fine_tuning.jobs.retrieve(tuning.id).status == "succeeded"
        team.become(theirs)
        for name in ("judged", "count"):
            assert team.ended(name) == "succeeded", team.job(name)["message"]
        told, _ = worker.communicate(timeout=PATIENCE)
        assert worker.returncode == 0, told
    finally:
        if worker.poll() is None:
            worker.kill()
        worker.communicate()
        client.close()

    # home
    told = team.types(ours, "pull", "sort", "--version", "latest", "--to", "home")
    directory = next((tmp_path / "home").iterdir())
    assert directory.name in told
    used = json.loads(team.types(ours, "usage", "--json"))
    assert used, "what it cost"
    loads_with_peft(directory, small_base_dir)
