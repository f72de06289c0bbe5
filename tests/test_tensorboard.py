"""The TensorBoard export, read back by TensorBoard's own loader."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from motet.errors import MotetError, RunError
from motet.report.read import read_lines
from motet.tensorboard import TensorBoardExport, write_events
from tests.run_directory import step_line, write_job, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "evening")


def events(directory: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Tag → (step, value, wall time), as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found: dict[str, list[tuple[int, float, float]]] = {}
    for path in sorted(directory.glob("events.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                number = value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value
                found.setdefault(value.tag, []).append((event.step, number, event.wall_time))
    return found


def _values(lines: list[tuple[int, float, float]]) -> dict[int, float]:
    assert len({step for step, _, _ in lines}) == len(lines)
    return {step: value for step, value, _ in lines}


def test_events_hold_the_metrics(run: Path, tmp_path: Path) -> None:
    write_events(run, tmp_path)
    found = events(tmp_path / "add")
    lines: list[Mapping[str, Any]] = [line for line in read_lines(run / "add" / "metrics.jsonl") if "reward" in line]
    assert _values(found["reward"]) == pytest.approx({line["step"]: line["reward"] for line in lines})
    assert set(_values(found["eval/reward"])) == {0, 10, 20, 30, 40}
    assert "reward_parts/exact" in found
    assert "step" not in found
    assert found["reward"][3][2] == pytest.approx(read_lines(run / "add" / "timings.jsonl")[3]["time"])
    assert set(_values(events(tmp_path / "count_letters")["entropy"])) == {step for step in range(26) if step % 4 != 1}


def test_export_follows_a_run(tmp_path: Path) -> None:
    rng = random.Random(0)
    run, log = tmp_path / "run", tmp_path / "log"
    directory = write_job(run, "add", done=3, steps=9, top=0.9, state="running", every=0)
    with TensorBoardExport(run, log) as export:
        assert export.update() == 3
        assert export.update() == 0
        with directory.metrics.open("ab") as file:
            file.write(b'{"step": 3, "reward"')
        assert export.update() == 0
        with directory.metrics.open("ab") as file:
            file.write(b": 0.75}\n")
        write_job(run, "late", done=1, steps=9, top=0.9, state="running", every=0)
        assert export.update() == 2
        assert _values(events(log / "add")["reward"])[3] == 0.75
        directory.metrics.write_bytes(b"")  # cut back: the run resumed from its start
        directory.append(directory.metrics, step_line(0, 0.2, rng))
        assert export.update() == 1
    assert set(_values(events(log / "add")["reward"])) == {0}


def test_exporting_again_replaces_only_its_own_files(run: Path, tmp_path: Path) -> None:
    (tmp_path / "add").mkdir()
    (tmp_path / "add" / "events.out.tfevents.1.other").write_bytes(b"")
    write_events(run, tmp_path)
    first = events(tmp_path / "add")
    write_events(run, tmp_path)
    assert events(tmp_path / "add") == first
    assert (tmp_path / "add" / "events.out.tfevents.1.other").exists()


def test_missing_tensorboard_says_what_to_install(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(MotetError, match=r"pip install '\.\[tensorboard\]'"):
        write_events(run, tmp_path)


def test_events_of_no_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no metrics"):
        write_events(tmp_path, tmp_path / "log")
