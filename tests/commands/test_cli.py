"""The command line and `motet.run`, as people use them: real processes, the small base, a few steps."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import motet
from motet.commands.doctor import gpu_kernels
from motet.commands.overview import COMMANDS
from motet.core.checksums import sealed
from motet.core.types import Problem
from motet.process.importable import PACKAGE_ROOT
from motet.runtime.checkpoint import Committed
from motet.runtime.directory_checks import RULES
from tests.support.commands import Motet, job_file
from tests.support.processes import ending
from tests.support.waiting import PATIENCE, wait_until

ROOT = Path(__file__).resolve().parents[2]
MAIN = "from motet.commands.cli import main; main()"
TINY: dict[str, Any] = {
    "sampling": {"max_tokens": 3},
    "adapter": {"rank": 4},
    "algorithm": {"group_size": 2, "groups_per_step": 2},
    "eval": {"every": 0},
}
JOB_FILE = """
base: small
engine: {threads: 1, max_rows: 8}
defaults:
  steps: 24
  sampling: {max_tokens: 3}
  adapter: {rank: 4}
  algorithm: {group_size: 2, groups_per_step: 2}
  data: {size: 64, holdout: 2}
  eval: {every: 0}
jobs:
  - {name: add, data: "toy:add", reward: numeric}
  - {name: sort, data: "toy:sort_numbers", reward: {contains: 1}}
"""


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """What a test started; ended here where the test failed before it could."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def start(directory: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", MAIN, *words]
    return subprocess.Popen(command, cwd=directory, env=environment, stdout=pipe, stderr=pipe, text=True)


def motet_says(directory: Path, *words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    with ending(start(directory, *words)) as process:
        out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def lines(directory: Path, name: str) -> list[dict[str, Any]]:
    try:
        text = (directory / name / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def state(directory: Path, name: str) -> str:
    try:
        return str(json.loads((directory / name / "status.json").read_text())["state"])
    except FileNotFoundError:
        return ""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory that commands of this process are given in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


# --- without a base --------------------------------------------------------------------------------------------------


def test_the_command_line_loads_little() -> None:
    heavy = "{'torch', 'transformers', 'peft', 'datasets', 'pydantic', 'plotly', 'safetensors', 'numpy'}"
    code = f"import sys, motet, motet.commands.cli; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_and_version(here: Path, says: Motet) -> None:
    code, out, _ = motet_says(here, "--help")
    assert code == 0
    for command in ("run", "check", "chat", "doctor", "report", "pause", "resume", "cancel"):
        assert f"  {command} " in out
    code, out, _ = says("run", "--help")
    assert code == 0
    assert "data: toy:add" in out
    assert says("--version") == (0, f"motet {motet.__version__}\n", "")


@pytest.mark.usefixtures("here")
def test_help_lists_every_command_once_with_its_whole_sentence(says: Motet) -> None:
    from typer.main import get_command

    from motet.commands.cli import app
    from motet.commands.overview import HEADINGS

    commands = getattr(get_command(app), "commands", {})
    assert sorted(name for names in HEADINGS.values() for name in names) == sorted(commands)
    for words in ((), ("keys",), ("tenants",)):
        _, out, _ = says(*words, "--help")
        assert "..." not in out.replace("[ARGS]...", ""), out


@pytest.mark.parametrize("left", COMMANDS)
def test_what_left_is_refused_with_what_to_do_instead(says: Motet, left: str) -> None:
    command, *option = left.split(" ")
    for words in ([command, "x", *option], [command, "x", *(f"{one}=y" for one in option)]):
        code, _, aside = says(*words)
        assert (code, f"there is no `motet {left}` any more: {COMMANDS[left]}" in " ".join(aside.split())) == (
            2,
            True,
        ), aside


def test_field_that_is_ignored_is_one_line_of_notice(tmp_path: Path) -> None:
    job = {"name": "add", "data": "toy:add", "reward": "exact"}
    code, _, aside = motet_says(tmp_path, "check", job_file(tmp_path, job, engine={"speculate": False}))
    notice = "motet: engine.speculate has no effect any more: leave it out; results are the same bits"
    assert (code, aside.splitlines()) == (0, [notice])


def test_a_bad_job_file_is_exit_code_2_and_a_message(here: Path, says: Motet) -> None:
    (here / "jobs.yaml").write_text(JOB_FILE.replace("reward: numeric", "rewrd: numeric"))
    for command in ("run", "check"):
        code, _, err = says(command, "jobs.yaml")
        assert code == 2
        assert err.startswith("motet: jobs.yaml has 1 mistake:\n  job add: ")
        assert "job add: rewrd: there is no such field; did you mean reward? There are adapter" in err
    code, _, err = says("run", "nowhere.yaml")
    assert (code, err) == (2, "motet: cannot read the job file nowhere.yaml: No such file or directory\n")
    code, _, err = says("run", "jobs.yaml", "--set", "steps")
    assert (code, err.startswith("motet: --set 'steps' must look like path=value")) == (2, True)
    assert [item.name for item in here.iterdir()] == ["jobs.yaml"], "nothing is written for a job that cannot run"


def test_words_to_a_run_that_is_not_there(here: Path, says: Motet) -> None:
    for word in ("pause", "resume", "cancel"):
        code, _, err = says(word, "runs/nowhere", "add")
        assert code == 2
        assert "there is no run directory runs/nowhere" in err
    (here / "runs" / "done" / "add").mkdir(parents=True)
    (here / "runs" / "done" / "add" / "job.yaml").write_text("")
    code, _, err = says("pause", "runs/done", "add")
    assert code == 2
    assert err.startswith("motet: no process runs runs/done; start it with `motet run`")
    code, _, err = says("report", "runs/nowhere")
    assert code == 2
    assert err.startswith("motet: ")


# --- on the small base -----------------------------------------------------------------------------------------------


def test_one_run_with_everything_that_happens_to_it(
    here: Path, says: Motet, processes: list[subprocess.Popen[str]]
) -> None:
    (here / "jobs.yaml").write_text(JOB_FILE)
    run = here / "runs" / "jobs"
    process = start(here, "run", "jobs.yaml")
    processes.append(process)
    wait_until(lambda: len(lines(run, "add")) >= 1, PATIENCE, process)

    code, _, err = says("pause", "runs/jobs", "nobody")
    assert (code, err) == (2, "motet: runs/jobs has no job 'nobody'; there are: add, sort\n")
    assert says("pause", "runs/jobs", "sort")[:2] == (0, "asked sort to pause\n")
    wait_until(lambda: state(run, "sort") == "paused", PATIENCE, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, out + err
    assert re.search(r"^finishing step \d+ of add, then saving; press Ctrl-C again to stop now$", out, re.MULTILINE), (
        out
    )
    assert "resume with: motet run jobs.yaml" in out
    assert "Traceback" not in out + err
    for name in ("add", "sort"):
        steps = max(int(item.name) for item in (run / name / "state").iterdir())
        assert [line["step"] for line in lines(run, name)] == list(range(steps)), "a step that was done is not saved"
        assert 0 < steps < 24, "let the run take longer: it was over before it was interrupted"
        assert state(run, name) == "paused"

    again = start(here, "run", "jobs.yaml")
    processes.append(again)
    wait_until(lambda: (run / ".lock").read_text() == str(again.pid), PATIENCE, again)
    code, _, err = says("run", "jobs.yaml")
    assert code == 2
    assert err.startswith(
        f"motet: runs/jobs is in use by another process (pid {again.pid}); wait for it, stop it, or give"
    )
    out, err = again.communicate(timeout=PATIENCE)
    assert again.returncode == 0, out + err
    for name in ("add", "sort"):
        assert [line["step"] for line in lines(run, name)] == list(range(25))
        assert (run / name / "versions" / "v24" / "adapter_model.safetensors").is_file()
    assert "report: " in out
    code, out, _ = says("report", "runs/jobs")
    assert code == 0
    assert "<html" in Path(here, out.strip()).read_text()[:200]


def test_check_trains_nothing(here: Path, says: Motet) -> None:
    (here / "jobs.yaml").write_text(JOB_FILE)
    code, out, err = says("check", "jobs.yaml", "--rollouts", "2")
    assert code == 0, out + err
    for text in ("add", "sort", "62 / 2", "reference answer: ", "nothing was trained"):
        assert text in out
    assert [item.name for item in here.iterdir()] == ["jobs.yaml"]


HELLO = """
class Hello:
    def reset(self, answer):
        return "Look first."

    def look(self, where: str) -> str:
        \'\'\'Look at a place.\'\'\'
        return f"nothing in {where}"

    def step(self, text):
        return "Once more.", 0.0
"""


def test_check_shows_what_the_model_reads_and_says_what_run_would(here: Path, says: Motet) -> None:
    (here / "hello.py").write_text(HELLO)
    rows = [{"prompt": f"Say {n % 9}", "answer": str(n % 9)} for n in range(40)]
    (here / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (here / "zero.py").write_text("def zero(problem, completion):\n    return 0.0\n")
    tiny = {"sampling": {"max_tokens": 3}, "adapter": {"rank": 4}}
    jobs = [
        {"name": "talks", "data": {"source": "toy:add", "size": 32, "holdout": 4, "system": "Be brief."}, **tiny,
         "environment": {"name": "hello.py:Hello", "max_turns": 2}, "sampling": {"max_tokens": 32}},
        {"name": "zero", "data": {"source": "rows.jsonl", "holdout": 2}, "reward": "zero.py:zero", **tiny},
    ]  # fmt: skip
    old = here / "runs" / "jobs" / "zero"
    (old / "state" / "3").mkdir(parents=True)
    (old / "state" / "3" / "state.json").write_bytes(sealed(asdict(Committed(step=3, rules=RULES))))
    (old / "job.yaml").write_text("job: {steps: 7}")
    code, out, err = says("check", job_file(here, *jobs, engine={"threads": 1, "max_rows": 8}), "--rollouts", "2")
    assert (code, err) == (1, ""), out
    shown = re.findall(r"  (?:\d+|\d+ tokens:) ('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")", out)
    tokens = "".join(map(ast.literal_eval, shown))
    system, _, asked = tokens.partition("<|im_end|>")
    assert system.startswith("<|im_start|>system\nBe brief.\n\nYou may call tools")
    assert '"description": "Look at a place."' in system
    assert re.match(r"\n<\|im_start\|>user\n[^\n]*\n\nLook first\.<\|im_end\|>\n<\|im_start\|>assistant\n", asked)
    for said in (
        r"a conversation of 2 turns\n +assistant  .* \(reward 0\)\n +user  'Once more\.'\n +assistant  ",
        r"\d+ tokens are read before the first answer",
        r"\ncolumns: prompt = prompt, answer = answer\n",
        r"note: job zero: \d+ of 40 rows are left out of training, because their prompts are held out",
        r"job zero, from 8 answers: no signal in 100% of the groups \(mean reward 0\)",
        r"motet run refuses this: runs/jobs/zero was made by a different job, and has done 3 steps of it",
        "learning rate \\(auto\\): ",
    ):
        assert re.search(said, out), said


def test_a_full_disk_that_names_no_file_is_a_message(says: Motet, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `write` says; `open` names one."""
    # what could not be written is tried once more at its end
    with contextlib.suppress(OSError), Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code, _, err = says("--version")
    said = "motet: a file could not be written: No space left on device; free some space and try again\n"
    assert (code, err) == (2, said)


def test_a_file_where_a_directory_has_to_be_is_a_message(here: Path, says: Motet) -> None:
    (here / "taken").write_text("")
    assert says("init", "taken/jobs.yaml", "--yes") == (2, "", "motet: taken: File exists\n")


@pytest.mark.parametrize(
    "field", ["data.source=~nobody-x/x.jsonl", "adapter.init=~nobody-x/a", "reward=~nobody-x/r.py:f"]
)
def test_a_home_of_nobody_is_a_file_that_is_not_there(here: Path, says: Motet, field: str) -> None:
    (here / "jobs.yaml").write_text(JOB_FILE.replace("steps: 24", "steps: 1"))
    code, out, err = says("run", "jobs.yaml", "--set", f"jobs.add.{field}")
    assert code > 0
    assert field.split("=")[1].removesuffix(":f") in out + err
    assert "fault of Motet" not in out + err


def test_a_run_goes_on_where_tensorboard_events_cannot_be_written(here: Path, says: Motet) -> None:
    (here / "jobs.yaml").write_text(JOB_FILE)
    code, out, err = says("run", "jobs.yaml", "--set", "observers=tensorbord")
    assert code == 2, out
    assert "did you mean 'tensorboard'" in err
    assert not list(here.glob("runs/*/add"))
    (here / "events").touch()
    observers = f"observers=[{{name: tensorboard, args: {{directory: '{here / 'events'}'}}}}]"
    code, out, err = says("run", "jobs.yaml", "--set", "steps=1", "--set", observers)
    assert code == 0, out + err
    assert out.count("observer tensorboard failed and is off for job") == 1, out + err
    (here / "events").unlink()
    assert says("run", "jobs.yaml", "--set", "steps=2", "--accept-changes", "--set", observers)[0] == 0
    assert {path.parent.name.rpartition("-")[2] for path in here.glob("events/*/*")} == {"add", "sort"}


def test_check_fails_where_no_answer_gets_a_reward(here: Path, says: Motet) -> None:
    (here / "rewards.py").write_text(
        "def broken(problem, completion):\n    raise KeyError('level')\n\n"
        "def silent(completions):\n    return [1.0] + [None] * (len(completions) - 1)\n"
    )
    (here / "jobs.yaml").write_text(
        "base: small\ndefaults: {data: 'toy:add'}\njobs: [{name: a, reward: 'rewards.py:broken'}, "
        "{name: b, reward: 'rewards.py:silent'}]\n"
    )
    code, out, err = says("check", "jobs.yaml", "--rollouts", "2")
    said = " ".join(out.split())
    assert code == 1, out + err
    assert "job a: 8 of 8 answers got no reward: reward rewards.py:broken: KeyError: 'level'" in said
    assert "job b: 4 of 8 answers got no reward: no reward applies: rewards.py:silent returned None" in said
    assert "too hard or too easy" not in said, "nobody has judged the problems"


def test_doctor_says_which_cards_have_run_the_kernels_and_what_computes_instead() -> None:
    """As the pages do."""
    said = gpu_kernels()
    if importlib.util.find_spec("triton") is None:
        assert said == "Triton is not installed: torch's kernels compute every base"
        return
    for text in (importlib.metadata.version("triton"), "engine.kernels auto", "torch for all others", "checks at load"):
        assert text in said
    kernels, trial = (" ".join((ROOT / "docs" / name).read_text().split()) for name in ("cuda.md", "benchmarks-gpu.md"))
    assert ("no card has run these kernels" in said) == ("**No card has run these kernels.**" in kernels)
    assert "ran on an H200 and an H100, with Triton 3.6 and torch 2.11" in said
    assert "| tokens/s | H200 | H100 |" in trial
    assert "torch 2.11, Triton 3.6" in trial


def test_doctor_says_what_this_machine_can_do(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE_ROOT), "."]), "COLUMNS": "500"}
    command = [sys.executable, "-P", "-c", MAIN, "doctor"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    out = done.stdout
    assert done.returncode == 0, out + done.stderr
    assert re.search(r"held +\d+ of \d+ ways out that were tried", out), out
    assert "opening a socket" not in out, "what holds is counted"
    assert re.search(rf"packages in {tmp_path} .*not read: it is the working directory", out), out
    for text in (
        "base small",
        "float32",
        "bfloat16",
        "yes, bit for bit",
        "tokens/s",
        "slots: 16 adapters at once",
        "own CPU kernels",
        "MOTET_WALL_LOG=1 writes each to the kernel's log: type=1326",
    ):
        assert text in out
    for dtype in ("float32", "bfloat16"):
        assert re.search(rf"{dtype}[│\s]+(native|native-dpbf16|torch)[│\s]+\d", out), f"which kernels compute it\n{out}"
    float32, bfloat16 = (float(rate.replace(",", "")) for rate in re.findall(r"([\d,]+) tokens/s", out))
    assert ("set engine.dtype to float32" in out) == (float32 > 1.1 * bfloat16), "the advice is that of the table"


def test_doctor_is_read_on_one_screen() -> None:
    small = {**os.environ, "COLUMNS": "80", "FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "dumb"}
    asked = [sys.executable, "-m", "motet", "doctor"]
    done = subprocess.run(asked, env=small, capture_output=True, text=True, check=True)
    assert sum(max(1, math.ceil(len(line.rstrip()) / 80)) for line in done.stdout.splitlines()) <= 24, done.stdout
    assert "…" not in done.stdout, "no name is cut"


# --- from Python -----------------------------------------------------------------------------------------------------


def tiny(name: str, reward: Any, steps: int = 2) -> dict[str, Any]:
    data = {"source": "toy:add", "size": 32, "holdout": 2}
    return {"name": name, "data": data, "reward": reward, "steps": steps, **TINY}


def test_functions_as_rewards(tmp_path: Path) -> None:
    def shorter(problem: Problem, completion: str) -> float:
        assert problem.answer
        return -float(len(completion))

    def trl_style(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
        assert len(completions) == len(answer)
        return [float(len(str(completion))) for completion in completions]

    jobs: list[motet.JobConfig | dict[str, Any]] = [
        tiny("ours", shorter),
        tiny("trl", trl_style),
        motet.JobConfig(**tiny("both", [shorter, "numeric"])),
    ]
    result = motet.run(jobs, directory=tmp_path, engine={"threads": 1}, quiet=True)
    assert result.ok, {name: job.message for name, job in result.jobs.items()}
    assert result.jobs["ours"].rewards[0] <= 0 <= result.jobs["trl"].rewards[0]
    assert {version for version, _ in result.jobs["ours"].evaluations} == {0, 2}
    assert (result.jobs["trl"].adapter / "adapter_model.safetensors").is_file()
    assert set(lines(tmp_path, "both")[0]["reward_parts"]) == {"shorter", "numeric"}
    again = motet.run(jobs, directory=tmp_path, engine={"threads": 1}, quiet=True)
    assert again.ok
    assert again.jobs["ours"].message == "done before"


def test_inside_a_running_event_loop(tmp_path: Path) -> None:
    """As in a notebook, where the thread has a loop of its own."""

    async def cell() -> motet.RunResult:
        return motet.run([tiny("a", "numeric", steps=1)], directory=tmp_path, engine={"threads": 1}, quiet=True)

    assert asyncio.run(cell()).ok


WITHOUT_SERVE = """
import contextlib, io, json, sys
sys.modules.update(dict.fromkeys(["fastapi", "starlette", "uvicorn", "sqlalchemy", "alembic", "prometheus_client", "psycopg"]))
from motet.commands.cli import main
done = []
for arguments in json.loads(sys.argv[1]):
    sys.argv, said = ["motet", *arguments], io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as ended:
            done.append((ended.code or 0, said.getvalue()))
print(json.dumps(done))
"""


def test_without_the_packages_of_a_service_everything_else_runs(tmp_path: Path) -> None:
    (tmp_path / "jobs.yaml").write_text(JOB_FILE)
    commands = (
        ["run", "jobs.yaml", "--set", "steps=1"],
        ["ls", "--url", "http://127.0.0.1:1"],
        ["serve", "--base", "small", "--no-keys"],
    )
    command = [sys.executable, "-c", WITHOUT_SERVE, json.dumps(commands)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=PATIENCE)
    ran, listed, served = json.loads(done.stdout.splitlines()[-1])
    assert ran[0] == 0, ran
    assert listed[1].startswith("motet: nothing answers at http://127.0.0.1:1")
    assert served == [2, "motet: motet serve needs fastapi, which is not installed: pip install 'motet[serve]'\n"]


def test_jobs_are_checked_from_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(problem: motet.Problem, completion: str) -> float:
        raise ValueError("it is broken")

    async def cell() -> bool:
        return motet.check([tiny("a", "numeric", steps=1)], engine={"threads": 1}, rollouts=8)

    assert asyncio.run(cell())
    assert not motet.check([tiny("b", broken)], engine={"threads": 1}, rollouts=8)
    assert "answers got no reward: reward broken: ValueError: it is broken" in capsys.readouterr().out
    dates = [{"prompt": f"Day {n}?", "answer": f"2021-03-{n:02}"} for n in range(1, 13)]
    motet.check([{**tiny("c", "exact", steps=1), "data": dates}], engine={"threads": 1}, rollouts=2)
    assert "job c: the base never says '-', which " in capsys.readouterr().out


def test_mistakes_are_exceptions(tmp_path: Path) -> None:
    with pytest.raises(motet.MotetError, match="job a: steps: Input should be greater"):
        motet.run([tiny("a", "numeric", steps=0)], directory=tmp_path)
    with pytest.raises(motet.MotetError, match="two jobs have the name 'a'"):
        motet.run([motet.JobConfig(**tiny("a", "numeric")), tiny("a", "exact")], directory=tmp_path)
