"""Notes of jobs about their settings, and rows that are too long: what a hint says can be done, and helps."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest

import motet
from motet.config import JobConfig
from motet.core.errors import ConfigError, LimitError
from motet.data.shared import Sources
from motet.hosts.preparing import prepare
from motet.model.load import load_base
from motet.runtime.directory_checks import Given
from motet.runtime.rundir import RunDirectory
from tests.support.service_run import Service, tiny

ROWS = [{"prompt": f"{n} is", "answer": str(n)} for n in range(12)]
SFT: dict[str, Any] = {
    "name": "rows",
    "data": {"source": ROWS, "holdout": 0},
    "algorithm": {"type": "sft", "rows_per_step": 4},
    "steps": 1,
    "eval": {"every": 0},
}


def test_a_run_and_a_check_note_a_setting_that_the_algorithm_does_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = {
        "name": "a",
        "data": "toy:add",
        "reward": "exact",
        "steps": 1,
        "eval": {"every": 0},
        "sampling": {"max_tokens": 4},
    }
    ill = {**job, "algorithm": {"type": "cispo", "clip_high": 5.0, "group_size": 2, "groups_per_step": 2}}
    told = "job a: algorithm.clip_high: the loss cispo does not read it; set algorithm.importance_cap"
    assert [note for note in motet.run([ill], directory=tmp_path / "ill", quiet=True).notes if note.startswith(told)]
    motet.check([ill], rollouts=2)
    assert told in capsys.readouterr().out
    well = {**ill, "algorithm": {"type": "cispo", "importance_cap": 5.0, "group_size": 2, "groups_per_step": 2}}
    assert not [
        note for note in motet.run([well], directory=tmp_path / "well", quiet=True).notes if "algorithm" in note
    ]


def test_a_check_shows_the_parts_of_a_reward_and_names_one_that_no_answer_earns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = {"name": "a", "data": {"source": ROWS, "holdout": 2}, "sampling": {"max_tokens": 4}, "adapter": {"rank": 4}}
    nothing, digits = ({"name": "regex", "args": {"pattern": one}} for one in ("never said", "."))
    for rewards, dead in (([digits, nothing], True), ([digits, {"name": "length", "args": {"target": 4}}], False)):
        motet.check([{**job, "reward": rewards}], rollouts=2)
        out = capsys.readouterr().out
        assert ("was 0 in all 8 answers: only the rest of the reward is learned" in out) == dead
        assert re.search(r"^ +[\d.]+ \(regex\S* [\d.]+, \S+ [\d.]+\)  '", out, re.MULTILINE), "of each answer"
        assert re.search(r"\(regex\S* [\d.e-]+,", " ".join(out.split("job a")[0].split())), "of all"
    motet.check([{**job, "reward": digits}], rollouts=2)
    assert "(regex" not in capsys.readouterr().out


@pytest.mark.parametrize("long", ["answer", "prompt"])
def test_a_row_that_is_too_long_has_a_cure_that_works(long: str, tmp_path: Path) -> None:
    """`data.max_prompt_tokens` leaves rows out by their prompts alone."""
    row = {**ROWS[0], long: "12 34 " * 3000}
    ill = {**SFT, "data": {"source": [*ROWS, row], "holdout": 0}}
    with pytest.raises(ConfigError, match=r"row 13 has.*tokens with its answer, more") as error:
        motet.run([ill], directory=tmp_path / "ill", quiet=True)
    most = re.search(r"data\.max_prompt_tokens: (\d+)", str(error.value))
    assert bool(most) == (long == "prompt")
    well = {**ill, "data": {**ill["data"], "max_prompt_tokens": int(most[1])}} if most else SFT
    assert most or "shorten its answer, or take the row out" in str(error.value)
    assert motet.run([well], directory=tmp_path / "well", quiet=True).ok


def test_rows_that_would_fill_the_engine_are_refused_with_the_number_that_fits(tmp_path: Path) -> None:
    base, directory = load_base("small"), RunDirectory(tmp_path)

    def prepared(n: int, most: int | None) -> None:
        config = JobConfig.model_validate({**SFT, "algorithm": {"type": "sft", "rows_per_step": n}})
        prepare(Given(config, directory.job(config.name)), base.info, Sources(), step_tokens=most)

    with contextlib.closing(directory):
        with pytest.raises(LimitError, match=r"is 131072,.*set it to 32768, or"):
            prepared(131_072, 10**12)
        prepared(32_768, 10**12)
        prepared(131_072, None)  # whoever has no limit


@pytest.mark.slow
def test_a_service_says_what_settings_do_and_that_rows_may_have_been_learned(shared_service: Service) -> None:
    drawn = {"source": "toy:sort_letters", "size": 64, "holdout": 4, "seed": 1}
    ill = {"type": "cispo", "clip_high": 5.0, "group_size": 4, "groups_per_step": 2}
    with motet.Client(shared_service.url) as client:
        client.submit(tiny("taught", 1))
        shared_service.becomes("taught", "succeeded")
        jobs = {
            "well": client.submit(tiny("well", 1, adapter={"init": "taught@latest"})),
            "ill": client.submit(tiny("ill", 1, adapter={"init": "taught@latest"}, data=drawn, algorithm=ill)),
        }
        told = {
            name: " ".join(str(event.data.get("message")) for event in client.events(job.id, follow=True))
            for name, job in jobs.items()
        }
    for note in ("the loss cispo does not read it; set algorithm.importance_cap", "with another data.seed; give both"):
        assert note in told["ill"]
        assert note not in told["well"]
