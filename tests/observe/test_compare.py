"""`motet compare`: paired differences on the same held-out problems, and what it does not claim."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from motet.observe.report.comparison import compare, read_evaluated, side_of_job
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.directory_checks import open_job
from tests.support.commands import Motet
from tests.support.run_directory import evaluation

pytestmark = pytest.mark.tier1

Judge = Callable[[int], float]


def good(share: float, seed: int = 0) -> Judge:
    """Right on a share of the problems, the same for a seed."""
    return lambda problem: float(random.Random(1000 * seed + problem).random() < share)


def ask(n: int) -> dict[str, str]:
    """A problem as in a rollout log."""
    return {"prompt": f"What is {n}?", "answer": str(n)}


def write(
    path: Path, judge: Judge, problems: Sequence[int] = range(64), version: int = 8, more: bool = False, **job: Any
) -> Path:
    """A job that answered held-out problems at its newest version; with `more`, each begins with other turns."""
    directory = JobDirectory(path)
    open_job(directory, {"job": {"name": path.name, "rewards": [{"name": "exact"}], **job}})
    for at in (0, version):
        rewards = [judge(problem) if at else 0.0 for problem in problems]
        record = evaluation(sum(rewards) / len(rewards), random.Random(0))
        directory.append(directory.metrics, {"step": at, "version": at, "reward": 0.5, "eval": record})
        directory.write_rollouts(
            f"eval-{at}",
            (
                {"problem": n, "reward": r, **({"prompt": "And?", "answer": ""} if more else ask(n))}
                for n, r in zip(problems, rewards, strict=True)
            ),
        )
    return path


def test_two_jobs_are_compared_problem_by_problem(tmp_path: Path, says: Motet) -> None:
    """Both miss most problems, and the second misses fewer of the same: alone, their errors would hide it."""
    first = write(tmp_path / "first", lambda n: float(n % 4 == 0))
    second = write(tmp_path / "second", lambda n: float(n % 4 == 0 or n % 8 == 1))
    code, out, err = says("compare", first, second)
    assert (code, err) == (0, "")
    row = " ".join(line for line in out.splitlines() if "+0.125" in line)
    assert "64" in row
    assert "[+0.042, +0.208]" in row
    assert row.split()[-1] == "better"
    assert "against first:" in out
    assert "one job a side: another seed may come out differently" in out


@pytest.mark.parametrize("command", [("compare",), ("diff", "--rollouts")])
def test_problems_that_differ_in_earlier_turns_are_several(tmp_path: Path, says: Motet, command: Sequence[str]) -> None:
    for name, share in (("first", 0.2), ("second", 0.9)):
        write(tmp_path / name, good(share), more=True)
    code, out, err = says(command[0], tmp_path / "first", tmp_path / "second", *command[1:])
    assert (code, err) == (0, "")
    assert re.search(r"second +1 +64 .*better" if command == ("compare",) else "5 of 64 problems", out)


@pytest.mark.parametrize("words", [("compare", "--svg"), ("diff", "--json"), ("data", "--to")])
def test_a_file_that_cannot_be_written_is_refused_first(words: tuple[str, str], tmp_path: Path, says: Motet) -> None:
    command, option = words
    places = [write(tmp_path / name, good(0.5)) for name in ("first", "second")]
    (rows := tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "x.jsonl").mkdir()
    for file, why in (
        ("nowhere/x.jsonl", "make the directory"),
        ("x.jsonl", "is a directory: give the name of a file"),
    ):
        code, out, err = says(command, *([rows] if command == "data" else places), option, tmp_path / file)
        assert (code, out) == (2, "")
        assert f"{option} {tmp_path / file}" in err
        assert why in err


def test_it_says_when_it_cannot_tell(tmp_path: Path, says: Motet) -> None:
    first, second = (write(tmp_path / f"seed{seed}", good(0.5, seed)) for seed in (1, 2))
    assert "cannot tell" in says("compare", first, second)[1]


def test_a_job_that_failed_before_its_first_evaluation_is_left_out(tmp_path: Path, says: Motet) -> None:
    write(tmp_path / "low", good(0.2))
    write(tmp_path / "high", good(0.8), optimizer={"lr": "0.2"})
    open_job(failed := JobDirectory(tmp_path / "early"), {"job": {"name": "early", "optimizer": {"lr": "0.3"}}})
    failed.write_status({"state": "failed", "message": "its reward", "inexact": []})
    code, out, _ = says("compare", tmp_path)
    assert code == 0
    assert "early (failed) is left out: it has no held-out evaluation" in out
    assert "against high:" in out


def test_the_settings_of_a_run_are_compared_over_tasks_and_seeds(tmp_path: Path, says: Motet) -> None:
    for lr, share in (("0.1", 0.2), ("0.2", 0.8), ("0.3", 0.75)):
        for task, first in (("add", 0), ("sort", 500)):
            for seed in (1, 2, 3):
                name = f"{task}-lr={lr}-seed={seed}"
                write(tmp_path / name, good(share, seed), range(first, first + 64), seed=seed, optimizer={"lr": lr})
    code, out, err = says("compare", tmp_path, "--svg", tmp_path / "curves.svg")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert [line.split()[0] for line in lines if line.endswith(" 6")] == ["lr=0.2", "lr=0.3", "lr=0.1"]
    assert "against lr=0.2:" in lines
    assert next(line for line in lines if line.startswith("lr=0.1 6 64 -0.5")).endswith(" worse")
    assert next(line for line in lines if line.startswith("lr=0.3 6 64")).endswith(" cannot tell")
    assert "95 % interval by Student's t over pairs of jobs, for all 2 differences together" in out
    assert (tmp_path / "curves.svg").read_text().count("<path") == 3 + 3


def test_two_runs_are_compared_by_the_names_of_their_jobs(tmp_path: Path, says: Motet) -> None:
    for run, share in (("before", 0.3), ("after", 0.9)):
        for seed in (1, 2, 3):
            write(tmp_path / run / f"add-{seed}", good(share, seed))
    write(tmp_path / "after" / "new", good(0.5))
    _, out, _ = says("compare", tmp_path / "before", tmp_path / "after")
    assert re.search(r"after +3 +64 +\+0\.\d+ \[\+.*\]  better", out)
    assert "1 job without a partner left out" in out


def test_many_comparisons_need_more_to_say_that_one_is_better(tmp_path: Path) -> None:
    sides = [side_of_job(str(n), read_evaluated(write(tmp_path / f"{n}", good(0.5, n)))) for n in range(4)]
    (alone,), three = compare(sides[:2], best_first=False), compare(sides, best_first=False)
    assert [one.first for one in three] == ["0"] * 3
    assert three[0].more.mean == alone.more.mean
    assert three[0].more.half == pytest.approx(alone.more.half * 2.459 / 1.998, rel=1e-3)
    (_, _, last) = compare(sides, best_first=True)
    assert last.more.half > three[-1].more.half * 0.99


def test_what_makes_a_comparison_weak_is_said(tmp_path: Path, says: Motet) -> None:
    first = write(tmp_path / "first", good(0.5), range(64))
    second = write(tmp_path / "second", good(0.5), range(32, 96), version=6, rewards=[{"name": "contains"}])
    _, out, _ = says("compare", first, second)
    assert "32 of 64 held-out problems are in both, and count" in out
    assert "compared at different versions, v8 and v6" in out
    assert "their rewards differ: each is measured by its own" in out


def test_held_out_answers_that_were_not_read_are_told(tmp_path: Path) -> None:
    whole, part = (read_evaluated(write(tmp_path / name, good(0.5), range(n))) for name, n in (("a", 64), ("b", 40)))
    (found,) = compare([side_of_job("a", whole), side_of_job("b", part)], best_first=False)
    assert "only the first 40 of the 64 held-out answers of b were read, and count" in found.notes
    assert not any("of a were read" in note for note in found.notes)


def test_what_cannot_be_compared_is_refused(tmp_path: Path, says: Motet) -> None:
    job = write(tmp_path / "run" / "a", good(0.5))
    other = write(tmp_path / "b", good(0.5), range(100, 110))
    directory = JobDirectory(tmp_path / "unevaluated")
    open_job(directory, {"job": {}})
    directory.append(directory.metrics, {"step": 0, "reward": 0.5})
    for places, why in (
        ([job, other], "a and b have no held-out problem in common"),
        ([tmp_path / "run", other], "is a run, and not all others are: compare runs with runs, or jobs with jobs"),
        ([tmp_path / "rum"], "is not the directory of a run: name one, or two or more jobs"),
        ([tmp_path / "run"], "has one setting only; name another run or job"),
        ([job, directory.path], "job unevaluated has no held-out evaluation to compare; set eval.every"),
    ):
        code, _, err = says("compare", *places)
        assert code == 2
        assert why in err
