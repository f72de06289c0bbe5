"""The page says where things are added: one of each (`additions.toml`) is added so, in a copy of the package, and used.

An addition is new files and lines that are put into existing ones; it replaces no line, and takes two files at most.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[2]

TABLE = tomllib.loads(Path(__file__).with_name("additions.toml").read_text(encoding="utf-8"))
ADDED = TABLE["addition"]
LINES = [(line["file"], line["old"], line["new"]) for addition in ADDED for line in addition["line"]]


def used(script: str, home: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(home), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", script, str(home)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False, cwd=home,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def add(package: Path) -> None:
    for addition in ADDED:
        for name, text in addition.get("new", {}).items():
            (package / name).write_text(text)
    for file, old, new in LINES:
        text = (package / file).read_text()
        (package / file).write_text(text.replace(old, new))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "src" / "motet", tmp_path / "motet")  # with what is compiled of the lines that stay
    return tmp_path / "motet"


def test_each_line_has_one_place_and_replaces_none() -> None:
    for file, old, new in LINES:
        text = (ROOT / "src" / "motet" / file).read_text()
        assert text.count(old) == 1, (file, old)
        assert _only_adds(text, text.replace(old, new)), (file, new)


@pytest.mark.soak
def test_one_of_each_is_added_where_the_page_says(package: Path) -> None:
    add(package)
    done = used(TABLE["scripts"]["used"], package.parent)
    said = (
        "counted a step of halved",
        "ordered by the new policy",
        "charged halved",
        "tracked step 0 of halved",
        "planned by the new kernel",
    )
    assert all(one in done.stdout for one in said), done.stdout
    run = package.parent / "run"
    assert (run / "halved" / "noted").read_text() == "0"
    norms = [
        json.loads((run / kind / "metrics.jsonl").read_text().splitlines()[0])["grad_norm"]
        for kind in ("grpo", "halved")
    ]
    assert norms[1] == pytest.approx(norms[0] / 2, rel=1e-4)
    assert (run / "signs" / "metrics.jsonl").read_text().count("grad_norm") == 1
    state = load_file(run / "lion" / "state" / "1" / "optimizer.safetensors")
    assert (sorted(state), float(state["step"])) == (["exp_avg", "step"], 1)
    stabilised = json.loads((run / "stabilised" / "versions" / "v1" / "adapter_config.json").read_text())
    assert stabilised["use_rslora"] is True
    rollouts = [json.loads(line) for line in (run / "grpo" / "rollouts" / "0.jsonl").read_text().splitlines()]
    assert all(one["reward"] == one["reward_parts"]["halved"] / 2 > 0 for one in rollouts)


@pytest.mark.soak
def test_added_optimizer_and_kind_of_lora_are_trained_kept_and_exported(package: Path) -> None:
    """Alone as together, off the device, from disk, by torch and by own kernels; consumers of an export compute the same."""
    add(package)
    used(TABLE["scripts"]["trained"], package.parent)


def _only_adds(before: str, after: str) -> bool:
    """Whether every word of a file is still there, in its order."""
    words = iter(re.findall(r"\w+|\S", after))
    return all(any(word == other for other in words) for word in re.findall(r"\w+|\S", before))


def test_the_page_names_these_files_and_no_more() -> None:
    page = (ROOT / "docs" / "extend.md").read_text().split("## How to add")[1]
    parts = {part.split("**")[1].rstrip("."): " ".join(part.split()) for part in re.split(r"\n\n(?=\*\*)", page)[1:]}
    new = {addition["what"]: {*addition.get("new", {})} for addition in ADDED}
    touched = {one["what"]: new[one["what"]] | {line["file"] for line in one["line"]} for one in ADDED}
    assert {what: len(files) for what, files in touched.items() if len(files) > 2} == {"A chat format": 4}
    for what, names in touched.items():
        for name in names:
            assert f"`{Path(name).parent}/`" in parts[what] if name in new[what] else f"`{name}" in parts[what], (
                what,
                name,
            )
