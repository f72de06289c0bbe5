"""The page says where things are added: one of each is added so, in a copy of the package, and used. At most two files each."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

ADDED: Mapping[str, tuple[Mapping[str, str], str, str, str]] = {
    # what is added: new files, and where a line goes: file, what stands there, what stands there then
    "An algorithm": (
        {
            "algorithms/halved.py": """
from typing import Literal
from motet.algorithms.presets import Grpo

class Halved(Grpo):
    type: Literal["halved"] = "halved"

    def token_losses(self, inputs):
        loss_N, clipped_N = super().token_losses(inputs)
        return 0.5 * loss_N, clipped_N
"""
        },
        "algorithms/registry.py",
        '    "grpo": Grpo,\n',
        '    "grpo": Grpo,\n    "halved": __import__("motet.algorithms.halved", fromlist=["Halved"]).Halved,\n',
    ),
    "A loop": (
        {
            "runtime/twice.py": """
from motet.runtime.rollout_loop import RolloutLoop

class Noted(RolloutLoop):
    async def step(self, step):
        await super().step(step)
        (self.job.directory.path / "noted").write_text(str(step))
"""
        },
        "runtime/pipeline.py",
        "    match job.config.algorithm:\n",
        '    if job.config.algorithm.type == "halved":\n'
        '        return __import__("motet.runtime.twice", fromlist=["Noted"]).Noted\n'
        "    match job.config.algorithm:\n",
    ),
    "A trainer": (
        {
            "training/counting.py": """
from motet.training.torch_trainer import TorchTrainer

class Counting(TorchTrainer):
    def optim_step(self, name, adamw):
        print(f"counted a step of {name}")
        return super().optim_step(name, adamw)
"""
        },
        "launch.py",
        "    from motet.training.torch_trainer import TorchTrainer\n\n    check",
        "    from motet.training.counting import Counting as TorchTrainer\n\n    check",
    ),
    "A wire protocol": (
        {
            "service/routes/greeting.py": """
from fastapi import APIRouter

router = APIRouter()

@router.get("/v1/greeting")
def greeting() -> dict[str, str]:
    return {"hello": "world"}
"""
        },
        "service/app.py",
        "ROUTES = (\n",
        'ROUTES = (\n    __import__("motet.service.routes.greeting", fromlist=["router"]),\n',
    ),
}
ENVIRONMENT = (
    (
        "tasks/episode.py",
        "ENVIRONMENTS: Mapping[str, Environment] = {",
        """
async def halved(context):
    rollouts = await single_turn(context)
    return tuple(replace(one, reward=0.5 * one.reward, reward_parts={"halved": one.reward}) for one in rollouts)


ENVIRONMENTS: Mapping[str, Environment] = {"halved": halved, """,
    ),
    ("config/job.py", '{"single": 1,', '{"halved": 1, "single": 1,'),
)
USE = """
import sys
from pathlib import Path
import motet
from motet.service.app import ROUTES

assert Path(motet.__file__).is_relative_to(sys.argv[1]), motet.__file__
assert any(route.path == "/v1/greeting" for module in ROUTES for route in module.router.routes)
job = {
    "data": {"source": "toy:add", "size": 16, "holdout": 0}, "reward": {"name": "length", "args": {"target": 3}}, "steps": 1,
    "sampling": {"max_tokens": 6}, "seed": 5, "environment": "halved",
}
jobs = [
    {**job, "name": kind, "algorithm": {"type": kind, "group_size": 4, "groups_per_step": 2}} for kind in ("grpo", "halved")
]
run = motet.run(jobs, base="small", quiet=True, directory=Path(sys.argv[1]) / "run", engine={"samplers": 0})
assert all(one.state == "succeeded" for one in run.jobs.values()), run
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "src" / "motet", tmp_path / "motet", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "motet"


def test_one_of_each_is_added_where_the_page_says(package: Path) -> None:
    lines = [(file, old, new) for _, file, old, new in ADDED.values()] + list(ENVIRONMENT)
    for files, *_ in ADDED.values():
        for name, text in files.items():
            (package / name).write_text(text)
    for file, old, new in lines:
        text = (package / file).read_text()
        assert text.count(old) == 1, (file, old)
        (package / file).write_text(text.replace(old, new))
    place = str(package.parent)
    done = subprocess.run(
        [sys.executable, "-c", USE, place],
        env={**os.environ, "PYTHONPATH": place}, capture_output=True, text=True, check=False, cwd=place,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "counted a step of halved" in done.stdout
    run = package.parent / "run"
    assert (run / "halved" / "noted").read_text() == "0"
    norms = [
        json.loads((run / kind / "metrics.jsonl").read_text().splitlines()[0])["grad_norm"]
        for kind in ("grpo", "halved")
    ]
    assert norms[1] == pytest.approx(norms[0] / 2, rel=1e-4)
    rollouts = [json.loads(line) for line in (run / "grpo" / "rollouts" / "0.jsonl").read_text().splitlines()]
    assert all(one["reward"] == one["reward_parts"]["halved"] / 2 > 0 for one in rollouts)


def test_the_page_names_these_files_and_no_more() -> None:
    page = (ROOT / "docs" / "extend.md").read_text().split("## How to add")[1]
    parts = {part.split("**")[1].rstrip("."): " ".join(part.split()) for part in re.split(r"\n\n(?=\*\*)", page)[1:]}
    for what, (files, file, *_) in ADDED.items():
        (new,) = files
        assert f"`{Path(new).parent}/`" in parts[what], what
        assert f"`{file}" in parts[what], what
        assert len({new, file}) == 2
    assert len(ENVIRONMENT) == 2
    for file, *_ in ENVIRONMENT:
        assert f"`{file}" in parts["An environment"], file
