"""What `motet.run` gives back, as Python and notebooks show it."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import motet
from motet.commands.run import _farewell
from motet.core.types import JobState

pytestmark = pytest.mark.tier1


def job(name: str, state: JobState, best: Path, rewards: tuple[float, ...], message: str = "") -> motet.JobResult:
    return motet.JobResult(name, state, best, best, rewards, ((0, 0.25), (2, 0.5)) if rewards else (), message)


def test_a_result_is_a_table(tmp_path: Path) -> None:
    best = tmp_path / "add" / "versions" / "v2"
    best.mkdir(parents=True)
    jobs = [
        job("add", JobState.SUCCEEDED, best, (0.125, float("nan"), 0.75)),
        job("sort", JobState.FAILED, tmp_path / "nowhere", (), "the reward <b> is gone"),
    ]
    result = motet.RunResult(tmp_path, {one.name: one for one in jobs}, None)
    assert repr(result).splitlines() == [
        f"RunResult: {tmp_path}, report: not written",
        f"job   state      steps  reward       held-out     {'best version':{len(str(best))}}".rstrip(),
        f"add   succeeded  3      0.12 → 0.75  0.25 → 0.50  {best}",
        f"sort  failed     0                                {'':{len(str(best))}}  the reward <b> is gone",
    ]
    html = result._repr_html_()
    assert html.startswith(f"<table><caption>{tmp_path}, report: not written</caption><thead><tr><th>job</th>")
    assert (
        f"<tr><td>add</td><td>succeeded</td><td>3</td><td>0.12 → 0.75</td><td>0.25 → 0.50</td><td>{best}</td>" in html
    )
    assert "<td>the reward &lt;b&gt; is gone</td>" in html


def test_nobody_is_sent_to_the_adapter_of_a_job_that_failed(tmp_path: Path) -> None:
    jobs = []
    for name, state in (("broken", JobState.FAILED), ("well", JobState.SUCCEEDED)):
        best = tmp_path / name / "versions" / "v2"
        best.mkdir(parents=True)
        jobs.append(job(name, state, best, (0.5,)))
    for shown, said in ((jobs, ["well"]), (jobs[:1], [])):
        shown_to = StringIO()
        assert (
            _farewell(
                Console(file=shown_to, width=400),
                motet.RunResult(tmp_path, {one.name: one for one in shown}, None),
                "small",
            )
            == 1
        )
        told = re.findall(r"--adapter \S+/(\w+)/versions", shown_to.getvalue())
        assert told == said
