"""Jobs that differ only in their seed are one setting: in the terminal, in Python, and in the report."""

from __future__ import annotations

import io
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import motet
from motet.config import JobConfig
from motet.core.types import JobState
from motet.observe import settings_table, summary_table
from motet.observe.report import write_report
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.directory_checks import open_job
from motet.runtime.identity import of_config
from motet.runtime.progress import JobProgress
from motet.runtime.settings import Mean, common_name, setting_of, settings, t_quantile
from tests.support.run_directory import evaluation

pytestmark = pytest.mark.tier1

RESULTS = {"lr=0.1": (0.4, 0.5, 0.6), "lr=0.2": (0.7, 0.7, 0.7)}
"""Held-out rewards of three seeds."""


def sweep() -> list[tuple[str, str, list[tuple[int, float]]]]:
    """Name, setting and evaluations of each job."""
    return [
        (f"add-{lr}-seed={seed}", lr, [(0, 0.1), (8, value)])
        for lr, values in RESULTS.items()
        for seed, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("level", "degrees", "t"),
    [
        (0.95, 1, 12.7062),
        (0.95, 2, 4.3027),
        (0.95, 3, 3.1824),
        (0.95, 30, 2.0423),
        (0.99, 7, 3.4995),
        (0.95, 10**6, 1.96),
    ],
)
def test_quantiles_are_those_of_the_tables(level: float, degrees: int, t: float) -> None:
    assert t_quantile(level, degrees) == pytest.approx(t, rel=1e-4)


def test_an_interval_needs_two_figures() -> None:
    assert math.isnan(Mean.of([0.5]).half)
    assert Mean.of([0.4, 0.5, 0.6]).half == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-4)


def test_jobs_that_differ_only_in_seed_and_name_have_one_setting() -> None:
    def setting(**job: Any) -> str:
        return setting_of(of_config(JobConfig.model_validate({"data": "toy:add", "reward": "exact", **job})))

    assert setting(name="a", seed=1) == setting(name="b", seed=2) == setting(name="c")
    assert len({setting(name="a"), setting(name="a", steps=3), setting(name="a", data="toy:spell")}) == 3
    assert setting_of({}) == "", "what cannot be read is no setting"
    one, other = settings([("a", "", []), ("b", "", [])])
    assert (one.jobs, other.jobs) == (("a",), ("b",))


@pytest.mark.parametrize(
    ("names", "common"),
    [
        (("add-lr=1-seed=1", "add-lr=1-seed=2"), "add-lr=1"),
        (("add-seed=1-lr=1", "add-seed=2-lr=1"), "add-lr=1"),
        (("add-1", "add-12"), "add"),
        (("tests1", "tests2"), "tests"),
        (("add_seed1", "add_seed2"), "add"),
        (("one", "two"), "one"),
    ],
)
def test_a_setting_has_the_name_that_its_jobs_share(names: tuple[str, ...], common: str) -> None:
    assert common_name(names) == common


def test_seeds_that_are_not_done_do_not_count_yet() -> None:
    (one,) = settings([("a1", "x", [(0, 0.1), (8, 0.5)]), ("a2", "x", [(0, 0.1), (4, 0.9)]), ("a3", "x", [])])
    assert one.held_out is not None
    assert (one.held_out.n, one.held_out.mean) == (1, 0.5)


def test_the_summary_ranks_settings_and_no_seeds(tmp_path: Path) -> None:
    jobs = [
        JobProgress(name, 8, JobState.SUCCEEDED, 8, setting=setting, evaluations=evaluations)
        for name, setting, evaluations in sweep()
    ]
    console = Console(file=io.StringIO(), width=120)
    console.print(summary_table(jobs, tmp_path), settings_table(jobs))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    before, after = text.split("Settings: jobs that differ only in their seed")
    assert "1." not in before
    rows = [line.split() for line in after.splitlines() if "add" in line]
    assert rows == [
        ["1.", "add", "0.2", "3", "0.10→0.70", "±0.00", "+0.60"],
        ["2.", "add", "0.1", "3", "0.10→0.50", "±0.25", "+0.40"],
    ]
    assert "Student's t" in after
    assert settings_table(jobs[:1] + jobs[3:4]) is None, "no seed was repeated"


def test_a_result_in_a_notebook_has_settings(tmp_path: Path) -> None:
    jobs = {
        name: motet.JobResult(
            name, JobState.SUCCEEDED, tmp_path, tmp_path, (0.5,), tuple(evaluations), "", setting=setting
        )
        for name, setting, evaluations in sweep()
    }
    result = motet.RunResult(tmp_path, jobs, None)
    assert [(one.name, len(one.jobs)) for one in result.settings] == [("add-lr=0.1", 3), ("add-lr=0.2", 3)]
    title, heading, first, _ = repr(result).splitlines()[-4:]
    assert (title, heading.split()) == (
        "Settings: mean over the seeds, ± half of its 95 % interval (Student's t)", ["place", "setting", "seeds", "held-out"]
    )  # fmt: skip
    assert first.split() == ["1.", "add-lr=0.2", "3", "0.10", "→", "0.70", "±", "0.00"]
    assert result._repr_html_().count("<table>") == 2
    one = motet.RunResult(tmp_path, dict([next(iter(jobs.items()))]), None)
    assert "Settings" not in repr(one) + one._repr_html_()


def test_the_report_has_settings(tmp_path: Path) -> None:
    for name, setting, evaluations in sweep():
        directory = JobDirectory(tmp_path / name)
        open_job(directory, {"job": {"name": name, "seed": int(name[-1]), "optimizer": setting}, "seed": int(name[-1])})
        for version, value in evaluations:
            line = {"step": version, "version": version, "eval": evaluation(value, random.Random(0))}
            directory.append(directory.metrics, line)
    page = write_report(tmp_path).read_text()
    (data,) = (json.loads(part.partition("</script>")[0]) for part in page.split('id="report-data">')[1:])
    assert [(one["place"], one["name"], one["seeds"], one["mean"], one["half"]) for one in data["settings"]] == [
        (1, "add-lr=0.2", 3, 0.7, pytest.approx(0, abs=1e-9)),
        (2, "add-lr=0.1", 3, 0.5, 0.24841),
    ]
