"""The directory of a run: one process at a time, and an identity that every attempt shares."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from motet.commands.control import send
from motet.core.errors import RunError
from motet.process.importable import of_python
from motet.runtime.rundir import RunDirectory, opened
from tests.support.processes import ending

pytestmark = pytest.mark.tier1

HOLD = """
import sys
from pathlib import Path
from motet.runtime.rundir import RunDirectory
directory = RunDirectory(Path(sys.argv[1]))
print(directory.run_id, directory.attempt, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the run directory `tmp_path / "run"`."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    pipe = subprocess.PIPE
    with ending(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)) as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith(" 0\n")
        yield process


def test_a_second_process_is_refused_by_name(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    with pytest.raises(RunError, match=rf"run is in use by another process \(pid {holder.pid}\); wait for it, stop it"):
        RunDirectory(tmp_path / "run")


def test_a_process_that_was_killed_leaves_no_lock(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    holder.kill()
    holder.wait()
    directory = RunDirectory(tmp_path / "run")
    assert directory.attempt == 1
    directory.close()


def test_what_was_half_written_when_a_process_was_killed_is_removed_later(tmp_path: Path) -> None:
    """Of files of the run, of a fork, and of a job that was being deleted; a young draft may belong to a process that lives."""
    drafts = [tmp_path / f".tmp-{name}" for name in ("0a1b2c3d-run.json", "young.json", "job-deleted")]
    drafts[0].touch()
    drafts[1].touch()
    (drafts[2] / "state").mkdir(parents=True)
    (tmp_path / "job").mkdir()
    os.utime(tmp_path / "job", (0, 0))
    before = time.time() - 4000
    for old in (drafts[0], drafts[2]):
        os.utime(old, (before, before))
    with contextlib.closing(RunDirectory(tmp_path)):
        assert [one for one in drafts if one.exists()] == [drafts[1]]
        assert (tmp_path / "job").is_dir()


def test_what_a_run_keeps_is_withheld_from_processes_behind_the_wall(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    with opened(tmp_path / "run"):
        found = of_python([str(tmp_path)])
        assert found.left_out == {str(tmp_path): f"it contains {tmp_path / 'run'}, where Motet keeps files"}
        assert package not in found.places
    assert package in of_python([str(tmp_path)]).places


def test_the_identity_stays_and_attempts_count(tmp_path: Path) -> None:
    seen = []
    for _ in range(3):
        directory = RunDirectory(tmp_path)
        seen.append((directory.run_id, directory.attempt))
        directory.close()
    assert [attempt for _, attempt in seen] == [0, 1, 2]
    assert len({run_id for run_id, _ in seen}) == 1
    other = RunDirectory(tmp_path / "other")
    other.close()
    assert other.run_id != seen[0][0]


@pytest.mark.parametrize("damage", ["", "{", "{}", "[]", '{"run_id": "a", "attempt": null}'])
def test_a_damaged_identity_is_a_new_one(damage: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(damage)
    directory = RunDirectory(tmp_path)
    assert (len(directory.run_id), directory.attempt) == (8, 0)
    directory.close()


def test_a_place_that_cannot_be_a_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"be a run directory:.*give another one"):
        RunDirectory(tmp_path / "file")
    with pytest.raises(RunError, match=r"cannot be a run.*Not a directory"):
        RunDirectory(tmp_path / "file" / "below")
    (tmp_path / "run.json").mkdir()
    with pytest.raises(RunError, match=r"cannot be a run.*Is a directory"):
        RunDirectory(tmp_path)
    (tmp_path / "run.json").rmdir()
    RunDirectory(tmp_path).close()  # nobody has it any more


def test_words_reach_a_running_process_only(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(RunError, match="run has no job 'a'; there are: none"):
        send(run, "a", "pause")
    for name in ("b", "a"):
        (run / name).mkdir()
        (run / name / "job.yaml").write_text("")
    with pytest.raises(RunError, match="run has no job 'c'; there are: a, b"):
        send(run, "c", "pause")
    assert send(run, "a", "pause") == "asked a to pause"
    assert (run / "a" / "control").read_text() == "pause"
    holder.kill()
    holder.wait()
    with pytest.raises(RunError, match=r"no process runs.*run; start it with"):
        send(run, "a", "pause")
    with pytest.raises(RunError, match="there is no run directory"):
        send(tmp_path / "nowhere", "a", "cancel")
    assert not (tmp_path / "nowhere").exists()


def test_parts_of_a_run_share_its_directory_and_nobody_else(tmp_path: Path) -> None:
    one, two = RunDirectory(tmp_path, "host-0"), RunDirectory(tmp_path, "host-1")
    assert one.run_id == two.run_id
    assert one.attempt != two.attempt
    for part in ("", "host-0"):
        with pytest.raises(RunError, match="in use by another process"):
            RunDirectory(tmp_path, part)
    one.close()
    two.close()
    alone = RunDirectory(tmp_path)
    with pytest.raises(RunError, match="in use by another process"):
        RunDirectory(tmp_path, "host-0")
    alone.close()
