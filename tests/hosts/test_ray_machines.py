"""Hosts on Ray nodes that share one directory and nothing else: own network, home and project, as on machines of a cluster."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from motet.core.types import ADAPTER_WEIGHTS
from tests.support.namespaces import PATIENCE, Machines, machines, why_not

pytestmark = pytest.mark.soak
NAMES, STEPS = ("one", "two"), 8
OWN = "from marks import clean\n\n\ndef exact(problem, completion):\n    return float(clean(completion) == problem.answer)\n"
ADDRESS = "10.77.0.1:6379"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Machines]:
    """The head and a second machine, each with one core; the project is on the first alone."""
    if reason := why_not():
        pytest.skip(reason)
    with machines() as made:
        made.add(2)
        project = made.project(1)
        (project / "data").mkdir()
        (project / "marks.py").write_text("def clean(text):\n    return text.strip()\n")
        (project / "own.py").write_text(OWN)
        rows = [{"prompt": f"{one % 10} + {one // 10} =", "answer": str(one % 10 + one // 10)} for one in range(40)]
        (project / "data" / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (project / "jobs.yaml").write_text(yaml.safe_dump(jobs(STEPS)))
        made.start_ray(1, "--include-dashboard=false")
        made.start_ray(2)
        yield made


def jobs(steps: int, **fields: Any) -> dict[str, Any]:
    job = {"data": "data/sums.jsonl", "reward": "own.py:exact", "steps": steps, "sampling": {"max_tokens": 8}, **fields}
    job["algorithm"] = {"group_size": 4, "groups_per_step": 2}
    engine = {"hosts": 2, "threads": 1, "samplers": 0}
    made = [{"name": name, "adapter": {"rank": 2 + number}, **job} for number, name in enumerate(NAMES)]
    return {"base": "small", "engine": engine, "jobs": made}


def weights(run: Path, steps: int = STEPS) -> list[bytes]:
    return [(run / name / "versions" / f"v{steps}" / ADAPTER_WEIGHTS).read_bytes() for name in NAMES]


@pytest.fixture(scope="module")
def alone(cluster: Machines, tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """What one process of the first machine makes of the jobs: with the same home, and so with the same compiled kernels."""
    run = tmp_path_factory.mktemp("alone") / "run"
    with run.with_suffix(".out").open("wb") as out:
        made = cluster.popen(1, "motet", "run", "jobs.yaml", "--run", run, "--set", "engine.hosts=1", out=out)
    assert made.wait(PATIENCE) == 0, said(run)
    return weights(run)


def start(cluster: Machines, run: Path, *words: str) -> subprocess.Popen[bytes]:
    with run.with_suffix(".out").open("wb") as out:
        return cluster.popen(1, "motet", "run", *words, "--run", run, "--ray", ADDRESS, out=out)


def said(run: Path) -> str:
    return run.with_suffix(".out").read_text()


def test_own_code_and_data_arrive_on_a_node_without_the_project(cluster: Machines, alone: list[bytes]) -> None:
    run = cluster.shared / "run"
    process = start(cluster, run, "jobs.yaml")
    assert process.wait(PATIENCE) == 0, said(run)
    assert "host 0 answers" in said(run)
    assert "host 1 answers" in said(run)
    assert weights(run) == alone
    (copy,) = run.glob(".project-*")
    assert (copy / "marks.py").is_file()
