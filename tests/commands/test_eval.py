"""`motet eval`: what a table says is what the answers say, and an answer depends on its row and its sample alone."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from motet.commands.cli import app
from motet.commands.evaluate import Asked, task_of
from motet.config.jobfile import load_jobs
from motet.hosts.running import run_config
from tests.support.commands import Motet, job_file
from tests.support.small_runs import REWARDS, job

ONCE = """
import os, signal
from pathlib import Path

def stop(problem, completion, pid, mark):
    try:
        Path(mark).touch(exist_ok=False)
        os.kill(pid, signal.SIGINT)
    except FileExistsError:
        pass
    return 1.0

def cut(problem, completion):
    raise ValueError("a cut emoji: \\ud83d")

class Echo:
    def step(self, text):
        return None if len(text) > 3 else "longer, please"

    def get_reward(self):
        return 0.5
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job file whose job `digits` has three versions; its other jobs have none."""
    directory = tmp_path_factory.mktemp("eval")
    rewards, once = directory / "rewards.py", directory / "once.py"
    rewards.write_text(REWARDS)
    once.write_text(ONCE)
    rows = directory / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "1"}]}\n' * 8)
    held_out = {"size": 64, "holdout": 12}
    learns = {key: job("rows", rewards)[key] for key in ("name", "steps", "adapter")}
    mark = {"pid": os.getpid(), "mark": str(directory / "pressed")}
    jobs = [
        job("digits", rewards, data=held_out),
        {**learns, "data": str(rows), "algorithm": "sft"},
        job("away", rewards, environment="agent"),
        job("raises", rewards, data=held_out, reward=f"{rewards}:raises"),
        job("cut", rewards, data=held_out, reward=f"{once}:cut"),
        job("pressed", rewards, data=held_out, reward={"name": f"{once}:stop", "args": mark}),
        job("echo", rewards, data=held_out, environment=f"{once}:Echo"),
    ]
    path = Path(job_file(directory, *jobs, engine={"max_rows": 4}, run=str(directory / "run")))
    config = load_jobs(path)
    assert run_config(config.model_copy(update={"jobs": config.jobs[:1]})).ok
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_row(answers: Sequence[dict[str, Any]], model: str) -> dict[tuple[int, int], tuple[str, float]]:
    return {
        (line["problem"], line["index"]): (line["completion"], line["reward"])
        for line in answers
        if line["model"] == model
    }


def interval(figures: Sequence[float], quantile: float) -> tuple[float, float]:
    return fmean(figures), quantile * stdev(figures) / math.sqrt(len(figures))


@pytest.fixture(scope="module")
def whole(trained: Path) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """What is printed, each answer and the figures of an evaluation with three answers a row."""
    out, figures = trained.with_name("answers.jsonl"), trained.with_name("figures.json")
    words = ["eval", str(trained), "digits@latest", "digits@1", "--samples", "3", "--solved", "0.2"]
    result = CliRunner().invoke(app, [*words, "--out", str(out), "--json", str(figures)])
    assert result.exit_code == 0, result.output
    return result.stdout, lines(out), json.loads(figures.read_text())


def test_what_is_printed_is_what_was_answered(whole: tuple[str, list[dict[str, Any]], dict[str, Any]]) -> None:
    printed, answers, told = whole
    names = ["base", "digits@latest (v3)", "digits@1"]
    assert [one["model"] for one in told["models"]] == names
    assert "12 of 12 rows of toy:add, 3 answers each, seed 0" in printed
    rewards = {name: [reward for _, reward in by_row(answers, name).values()] for name in names}
    rows = {name: [some[at : at + 3] for at in range(0, 36, 3)] for name, some in rewards.items()}
    for one in told["models"]:
        own = rows[one["model"]]
        mean, half = interval([fmean(some) for some in own], 2.201)
        assert (one["reward"]["mean"], one["reward"]["half"]) == pytest.approx((mean, half), rel=1e-3)
        assert f"{mean:.3f} [{mean - half:.3f}, {mean + half:.3f}]" in printed
        assert one["pass@3"]["mean"] == fmean(any(reward >= 0.2 for reward in some) for some in own)
    for one in told["differences"]:
        pairs = zip(rows["base"], rows[one["second"]], strict=True)
        more = interval([fmean(second) - fmean(first) for first, second in pairs], 2.593)
        assert (one["first"], one["problems"]) == ("base", 12)
        assert (one["more"]["mean"], one["more"]["half"]) == pytest.approx(more, rel=1e-3)
        assert f"{more[0]:+.3f}" in printed
    assert rewards["digits@1"] != rewards["base"] != rewards["digits@latest (v3)"]


def test_an_answer_depends_on_its_row_and_its_sample_alone(
    trained: Path, whole: tuple[str, list[dict[str, Any]], dict[str, Any]], tmp_path: Path, says: Motet
) -> None:
    place, out = trained.parent / "run/digits/versions/v1", tmp_path / "few.jsonl"
    words = ("eval", trained, place, "--task", "digits", "--rows", 5, "--no-base", "--out", out)
    assert says(*words)[0] == 0
    alone = by_row(lines(out), str(place))
    assert len(alone) == 5
    assert alone.items() <= by_row(whole[1], "digits@1").items()


def test_other_rows_and_rewards_greedy_and_as_parquet(trained: Path, tmp_path: Path, says: Motet) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "answers.parquet"
    rows.write_text("".join(f'{{"prompt": "Say {n}", "answer": "{n}"}}\n' for n in range(6)))
    words = ("--data", rows, "--reward", f"{trained.parent}/rewards.py:vowels", "--greedy", "--out", out)
    code, printed, err = says("eval", trained, "digits@0", *words)
    assert code == 0, err
    assert f"6 of 6 rows of {rows}, greedy" in printed
    table = parquet.read_table(out).to_pylist()
    assert [line["prompt"] for line in table] == [f"Say {n}" for n in range(6)] * 2
    assert [line["completion"] for line in table[:6]] == [line["completion"] for line in table[6:]]  # v0 is the base
    assert all(line["reward"] == sum(letter in "aeiou" for letter in line["completion"]) / 8 for line in table)


@pytest.mark.parametrize(
    ("more", "others"),
    [
        ({"stop_when": {"held_out_above": 0.9}, "eval": {"every": 1}}, True),
        ({"stop_when": {"kl_above": 1.0}, "algorithm": {"kl": {"coef": 0.1}}}, False),
    ],
)
def test_when_a_job_ends_does_not_matter_to_an_evaluation(
    more: dict[str, Any], others: bool, trained: Path, tmp_path: Path, says: Motet
) -> None:
    """Other rows come without held-out ones, which such a rule may need; so does the job's algorithm."""
    rows, rewards = tmp_path / "rows.jsonl", trained.with_name("rewards.py")
    rows.write_text('{"prompt": "Say 1", "answer": "1"}\n' * 2)
    file = job_file(tmp_path, job("ends", rewards, **more), engine={"max_rows": 4}, run=str(tmp_path / "run"))
    version = trained.parent / "run" / "digits" / "versions" / "v1"
    code, printed, err = says("eval", file, version, *(("--data", rows) if others else ()))
    assert code == 0, err
    assert "2 of 2 rows" in printed


def test_an_environment_answers_as_in_training(trained: Path, tmp_path: Path, says: Motet) -> None:
    out = tmp_path / "answers.jsonl"
    code, _, err = says("eval", trained, "digits@1", "--task", "echo", "--rows", 4, "--out", out)
    assert code == 0, err
    turns = [len(line["turns"]) for line in lines(out)]
    assert len(turns) == 8
    assert max(turns) > 1
    assert all(line["reward_parts"]["environment"] == 0.5 for line in lines(out))


def test_ctrl_c_leaves_what_is_done(
    trained: Path, whole: tuple[str, list[dict[str, Any]], dict[str, Any]], tmp_path: Path, says: Motet
) -> None:
    out, figures = tmp_path / "answers.jsonl", tmp_path / "figures.json"
    words = ("eval", trained, "digits@1", "--task", "pressed", "--samples", 8, "--seed", 1)
    code, printed, err = says(*words, "--out", out, "--json", figures)
    assert code == 130, err
    done = json.loads(figures.read_text())["rows"]
    assert 0 < done < 12
    assert f"{done} of 12 rows" in printed
    answers = lines(out)
    assert len(answers) == 2 * 8 * done
    known = {place: text for place, (text, _) in by_row(whole[1], "digits@1").items()}
    others = {place: text for place, (text, _) in by_row(answers, "digits@1").items() if place in known}
    assert any(text != known[place] for place, text in others.items())  # of another seed


def test_what_cannot_be_evaluated_is_refused(trained: Path, tmp_path: Path, says: Motet) -> None:
    (tmp_path / "there.jsonl").touch()
    for words, why in (
        (["digit"], "'digit' is no job of the file and no directory; did you mean digits?"),
        (["digits@9"], "kept versions: 0, 1, 2, 3"),
        (["digits@new"], "write digits@best, digits@latest or digits@12"),
        (["echo"], "run has no version of echo: train it, or name the directory of its run with --set run=DIRECTORY"),
        ([trained.parent / "run/digits/versions/v1"], "--task must name the job"),
        (["digits", "--task", "nobody"], "--task 'nobody' is no job of the file; name the job whose problems"),
        (["digits", "--task", "rows"], "job rows learns rows and has no reward: give one with --reward"),
        (["digits", "--task", "away"], "environment 'agent' runs beside a service"),
        (["digits", "--greedy", "--samples", 2], "leave out --samples"),
        (["digits", "--out", tmp_path / "there.jsonl"], "give a new file that ends with .jsonl or .parquet"),
        (["digits", "--out", tmp_path / "answers"], "give a new file that ends with .jsonl or .parquet"),
        (["digits", "--data", tmp_path / "none.jsonl"], "none.jsonl"),
    ):
        code, _, err = says("eval", trained, *words)
        assert code == 2, (words, err)
        assert why in err


def test_other_rows_are_of_the_same_subset_and_split(tmp_path: Path) -> None:
    """As held-out rows of another source are."""
    data = {"source": "hub/sums", "subset": "main", "eval_split": "test", "prompt": "asked"}
    config = load_jobs(job_file(tmp_path, {**job("sums", tmp_path), "data": data, "reward": "exact"}))
    found = task_of(config, ["sums"], Asked(data="hub/others")).data
    assert (found.source, found.subset, found.split, found.prompt) == ("hub/others", "main", "test", "asked")
    of_file = task_of(config, ["sums"], Asked(data=job_file(tmp_path))).data
    assert (of_file.subset, of_file.split, of_file.prompt) == (None, "train", "asked")


def test_rewards_that_fail_are_told(trained: Path, says: Motet) -> None:
    code, printed, _ = says("eval", trained, "digits@1", "--task", "raises", "--rows", 2)
    assert code == 1
    assert "base: 2 answers got no reward" in printed
    assert "the tenant's own mistake" in printed


def test_half_of_a_character_in_an_error_is_told(trained: Path, tmp_path: Path, says: Motet) -> None:
    code, printed, _ = says("eval", trained, "digits@1", "--task", "cut", "--rows", 1, "--json", tmp_path / "figures")
    assert (code, "a cut emoji" in printed) == (1, True)
    assert "a cut emoji: ?" in (tmp_path / "figures").read_text()
