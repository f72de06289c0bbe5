"""Each mistake of `tests/messages.toml` is told in one line that names the field and what to write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from motet.config import DataConfig, JobConfig
from motet.config.jobfile import parse_jobs, validate
from motet.config.told import told
from motet.core.errors import MotetError
from motet.data.dataset import load_dataset
from motet.hosts.checks import check_run
from tests.support.tables import read, table

pytestmark = pytest.mark.tier1

FILES = {
    "rewards.py": "def reward(problem, completion):\n    return 1.0\n",
    "broken.py": "def reward(problem, completion):\n    return (1.0\n",
    "absent.py": "import nobody_has_this\n",
    "needs.py": "def reward(problem, completion, *, level):\n    return 1.0\n",
    "hello.py": "class Hello:\n    def step(self, text):\n        return ''\n",
    "odd.py": "class Odd:\n    pass\n",
    "plain.jsonl": '{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n',
    "pairs.jsonl": '{"prompt": "a", "chosen": "x", "rejected": "x"}\n',
}
LISTED = {"name": "add", "data": "toy:add", "rewards": ["exact"]}
FEW = {"source": "toy:add", "size": 16, "holdout": 2}
JOB = {"name": "add", "data": "toy:add", "reward": "exact"}
TEAM = {"name": "pair", "data": "toy:add", "team": ["first", "second"], "environment": "own.py:Lengths", "steps": 4}


def job(fields: str, **usual: Any) -> dict[str, Any]:
    """A job with these fields; one that learns from rows alone has no reward."""
    given = yaml.safe_load(f"{{{fields}}}")
    made = {**JOB, **usual, **given}
    if any(word in str(given.get("algorithm")) for word in ("sft", "dpo", "distill")) and "reward" not in given:
        del made["reward"]
    return made


def checked(**fields: Any) -> object:
    """A run with these sections, before anything is loaded."""
    return check_run(validate({"base": "small", "run": "run", "jobs": [{**JOB, "data": FEW}], **fields}, ""))


def team(text: str) -> object:
    """A team with fields of its job in braces, or with a section beside it."""
    given = yaml.safe_load(text)
    tree = {"jobs": [{**TEAM, **given}]} if text.startswith("{") else {**given, "jobs": [TEAM]}
    return validate({"base": "small", **tree}, "jobs.yaml")


def load_rows(fields: dict[str, Any]) -> object:
    """Rows of data."""
    return load_dataset(DataConfig(**{"holdout": 0, **fields}))


def load_file(name: str, content: str) -> object:
    """Rows of a file; a lone surrogate stands for a byte that is no UTF-8."""
    Path(name).write_bytes(content.encode(errors="surrogateescape"))
    return load_rows({"source": name})


READ: dict[str, Callable[[str], object]] = {
    "job": lambda text: parse_jobs(yaml.safe_dump({"base": "small", "jobs": [job(text)]}), "jobs.yaml"),
    "file": lambda text: parse_jobs(text, "jobs.yaml"),
    "engine": lambda text: parse_jobs(f"base: small\n{text}\njobs: [{JOB}]", "jobs.yaml"),
    "set": lambda text: parse_jobs(yaml.safe_dump({"base": "small", "jobs": [LISTED]}), "", (text,)),
    "before": lambda text: checked(jobs=[job(text, name="a", data=FEW, steps=1)]),
    "run": lambda text: checked(**yaml.safe_load(text)),
    "team": team,
    "rows": lambda text: load_rows(read(text)),
    "files": lambda text: load_file(*read(text)),
}


def message(kind: str, text: str) -> str:
    """What a person reads."""
    if kind == "told":
        return "\n".join(told(JobConfig.model_validate(job(text)), 10_000, Counter()))
    with pytest.raises(MotetError) as caught:
        READ[kind](text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "text", "field", "words"),
    [(kind, *row) for kind, rows in table("messages").items() for row in rows if kind != "learned"],
)
def test_message_names_field_and_cure(
    kind: str, text: str, field: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items() if kind == "before" else ():
        Path(name).write_text(content)
    found = message(kind, text)
    assert [line for line in found.splitlines() if all(word in line for word in (field, *words.split()))], found
    if kind == "job":
        (first, _) = found.splitlines()
        assert first == "jobs.yaml has 1 mistake:"
