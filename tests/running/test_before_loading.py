"""What is refused before a base is loaded: exit code 2, a message that says what to do, the mistakes of all jobs at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

import motet
from motet.config import JobConfig
from motet.config.jobfile import parse_jobs, validate
from motet.core.checksums import hash_of, sealed
from motet.core.errors import ConfigError, MotetError, RunError
from motet.core.types import ADAPTER_CONFIG
from motet.data.row_files import OF_A_JOB
from motet.data.shared import Sources
from motet.hosts.checks import check_files, check_run
from motet.hosts.running import run_config
from motet.runtime.checkpoint import Committed, JobDirectory
from motet.runtime.directory_checks import RULES, Given
from tests.support.commands import Motet, job_file

TINY: dict[str, Any] = {"data": {"source": "toy:add", "size": 16, "holdout": 2}, "reward": "exact", "steps": 1}
FILES = {
    "rewards.py": "def reward(problem, completion):\n    return 1.0\n",
    "broken.py": "def reward(problem, completion):\n    return (1.0\n",
    "absent.py": "import nobody_has_this\n",
    "slow.py": "import time\n\ntime.sleep(0.5)\nimport nobody_has_this_either\n",
    "needs.py": "def reward(problem, completion, *, level):\n    return 1.0\n",
    "hello.py": "class Hello:\n    def step(self, text):\n        return ''\n",
    "odd.py": "class Odd:\n    pass\n",
    "plain.jsonl": '{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n',
    "pairs.jsonl": '{"prompt": "a", "chosen": "x", "rejected": "x"}\n',
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(**job: Any) -> str:
    """Why a job cannot run, which no base was asked about."""
    changed = {**TINY, "name": "a", **job}
    if "rows_per_step" in str(changed.get("algorithm")):
        del changed["reward"]
    with pytest.raises(MotetError) as caught:
        check_run(validate({"base": "small", "run": "runs/x", "jobs": [changed]}, "test"))
    return str(caught.value)


@pytest.mark.usefixtures("here")
def test_reward_of_python_takes_completion() -> None:
    assert "takes problem; write def reward(problem, completion)" in refused(reward=lambda problem: 1.0)


def test_a_host_checks_the_files_of_a_job_that_comes_alone(here: Path) -> None:
    """A service has its own names for jobs: the message is for the owner of one."""
    rows = [{"prompt": "Say a."}, {"prompt": "Say b."}]
    config = JobConfig.model_validate({**TINY, "name": "id", "data": {"source": rows, "holdout": 0}, "reward": "exact"})
    with pytest.raises(ConfigError, match=r"^reward 'exact' compares with a reference"):
        check_files([Given(config, JobDirectory(here / "id"))], Sources(OF_A_JOB))


def test_a_directory_of_a_job_is_no_adapter_and_its_versions_are_named(here: Path) -> None:
    for version in (2, 10):
        (here / "runs" / "demo" / "sort" / "versions" / f"v{version}").mkdir(parents=True)
    newest = "give a version of its adapter, such as runs/demo/sort/versions/v10"
    assert f"runs/demo/sort is the directory of a job; {newest}" in refused(adapter={"init": "runs/demo/sort"})
    assert f"runs/demo is a run directory; {newest}" in refused(adapter={"init": "runs/demo"})
    (here / "other").mkdir()
    assert f"other has no {ADAPTER_CONFIG}; give a directory" in refused(adapter={"init": "other"})


def test_mistakes_of_all_jobs_come_together_and_those_that_are_alike_once(here: Path) -> None:
    jobs = [
        {**TINY, "name": "a", "reward": "exct"},
        {**TINY, "name": "b", "reward": "broken.py:reward", "data": "plan.jsonl"},
        {**TINY, "name": "c", "reward": "broken.py:reward"},
        {**TINY, "name": "d", "reward": "rewards.py:reward"},
        {**TINY, "name": "e", "reward": "slow.py:reward"},
        {**TINY, "name": "f", "reward": "absent.py:reward"},
    ]
    config = validate({"base": "smal", "run": str(here / "run"), "jobs": jobs}, "test")
    with pytest.raises(ConfigError) as caught:
        check_run(config)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "there is no base 'smal'; did you mean 'small'?",
        "job a",
        "job b",
        "jobs b, c",
        "job e",
        "job f",
    ]


def test_a_changed_job_is_refused_and_one_that_has_ended_need_not_load_its_code_again(here: Path) -> None:
    def config(**job: Any) -> Any:
        return validate({"base": "small", "run": "runs/x", "jobs": [{**TINY, "name": "a", **job}]}, "test")

    done = here / "runs" / "x" / "a"
    (done / "state" / "1").mkdir(parents=True)
    (done / "state" / "1" / "state.json").write_bytes(sealed(asdict(Committed(step=1, rules=RULES))))
    (done / "job.yaml").write_text(json.dumps({"job": {"steps": 1}}))
    with pytest.raises(RunError, match=r"was made by a.*job, and has done 1 steps"):
        check_run(config())
    (done / "status.json").write_text('{"state": "succeeded"}')
    assert check_run(config(reward="broken.py:reward"), accept_changes=True)
    with pytest.raises(ConfigError, match="does not load"):
        check_run(config(reward="broken.py:reward", steps=2), accept_changes=True)


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_run_that_is_refused_leaves_nothing(here: Path, hosts: int) -> None:
    for job in ({"reward": "exct"}, {"adapter": {"target_modules": "q_prj"}})[: 3 - hosts]:
        with pytest.raises(ConfigError):
            motet.run([{**TINY, "name": "a", **job}], directory="new/run", engine={"hosts": hosts}, quiet=True)
        assert sorted(path.name for path in here.iterdir()) == sorted(FILES)


def test_what_a_job_is_said_to_be_made_of_is_what_was_read(here: Path) -> None:
    rows = here / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n}", "answer": "{n}"}}\n' for n in range(8)))
    config = validate(
        {"base": "small", "run": "runs/x", "jobs": [{**TINY, "name": "a", "data": {"source": "rows.jsonl"}}]}, "test"
    )
    read = hash_of(rows).hexdigest()

    def change() -> None:
        rows.write_text('{"prompt": "no", "answer": "no"}\n' * 9)

    assert run_config(config, loading=change).ok
    (said,) = yaml.safe_load((here / "runs" / "x" / "a" / "job.yaml").read_text())["contents"].values()
    assert read.startswith(said)


@pytest.mark.parametrize("command", ["run", "check"])
def test_commands_refuse_before_they_load(here: Path, says: Motet, command: str) -> None:
    code, out, err = says(command, job_file(here, {**TINY, "name": "a", "reward": "exct"}))
    assert (code, out) == (2, "")
    assert err.startswith("motet: job a: there is no reward 'exct': did you mean 'exact'?")
    code, out, err = says(command, job_file(here, {**TINY, "name": "a"}, observers=["wandbb"]))
    assert (code, out) == (2, "")
    assert err.startswith("motet: there is no observer 'wandbb': did you mean 'wandb'?")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("call", [motet.run, motet.check])
def test_python_refuses_before_it_loads(
    call: Callable[..., Any], hosts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="job a: there is no reward 'exct'"):
        call([{**TINY, "name": "a", "reward": "exct"}], engine={"hosts": hosts})
    assert "loading" not in capsys.readouterr().out


@pytest.mark.parametrize("call", [motet.run, motet.check])
@pytest.mark.parametrize(
    ("jobs", "said"),
    [
        ({**TINY, "name": "a"}, r"jobs must be a list of jobs \(got dict\)"),
        ("jobs.yaml", r"jobs must be a list of jobs \(got str\); those of a file are motet.load_jobs\(file\).jobs"),
        (None, r"jobs must be a list of jobs \(got NoneType\)"),
        (
            validate({"base": "small", "jobs": [{**TINY, "name": "a"}]}, ""),
            r"jobs must be a list of jobs \(got RunConfig\)",
        ),
        ([None], "job number 1: must be a mapping of fields"),
        ([{**TINY, "name": "a", "sweep": {"steps": [1, 2]}}], "job a: sweep: only a job file has sweeps"),
        (
            [{**TINY, "name": "a", "adapter": {"target_modules": []}}],
            "job a: adapter.target_modules: .*at least 1 item",
        ),
    ],
)
def test_python_says_what_jobs_are(call: Callable[..., Any], jobs: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        call(jobs)


@pytest.mark.usefixtures("here")
def test_a_service_and_a_chat_refuse_before_they_load(here: Path, says: Motet) -> None:
    (here / "served.yaml").write_text("bases: {a: smal, b: {base: ./nowhere, resident: 1, parking: gone}}\n")
    assert says("serve", "--config", "served.yaml", "--no-keys") == (
        2, "", "motet: there is no base 'smal'; did you mean 'small'?\nthere is no directory nowhere; give a model directory, "
        "a hub id, `small` or `smollm2`\nengine.parking: gone is no directory; make it, on a disk with room\n",
    )  # fmt: skip
    assert not (here / "served").exists()
    (here / "runs" / "a" / "versions" / "v3").mkdir(parents=True)
    told = "motet: runs/a is the directory of a job; give a version of its adapter, such as runs/a/versions/v3\n"
    assert says("chat", "small", "--adapter", "runs/a") == (2, "", told)


def test_the_jobs_of_the_examples_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = Path(__file__).parents[2] / "examples"
    monkeypatch.chdir(examples)
    config = parse_jobs((examples / "demo.yaml").read_text(), "demo.yaml", directory=examples)
    assert check_run(config)
