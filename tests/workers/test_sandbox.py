"""What a model wrote runs in a directory of its own, behind the wall, within limits; and is judged by the data's tests."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from motet.config import RewardConfig
from motet.core.errors import RewardError
from motet.core.types import Message, Problem
from motet.process import wall
from motet.rewards.reward_answers import ScoreOutcome
from motet.rewards.reward_pool import RewardPool
from motet.rewards.reward_walls import Walls
from motet.workers.sandbox import Sandbox
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="walls are made of Landlock and seccomp")
ADDS = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
READS = "```\na, b = map(int, input().split())\nprint(a + b)\n```"


def scored(
    answer: str, tests: Any, walls: Walls | None = None, wall_seconds: float = 60.0, **args: Any
) -> ScoreOutcome:
    return judged(answer, RewardConfig(name="code", args=args, wall_seconds=wall_seconds), tests, walls)


def judged(answer: str, reward: RewardConfig, tests: Any = None, walls: Walls | None = None) -> ScoreOutcome:
    problem = Problem(0, (Message("user", "Write add."),), "", {"tests": tests})

    async def main() -> list[ScoreOutcome]:
        pool = RewardPool(1, walls=walls)
        try:
            await pool.register("job", [reward])
            return await pool.score("job", problem, [answer])
        finally:
            await pool.close()

    (one,) = asyncio.run(main())
    return one


TEXTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]
PAIRS = [{"input": "1 2\n", "output": "3"}, {"input": "5 5", "output": "10\n"}]


@pytest.mark.parametrize(
    ("answer", "tests", "args", "reward"),
    [
        (ADDS, TEXTS, {}, 1.0),
        pytest.param(ADDS, "\n".join(TEXTS), {}, 1.0, marks=pytest.mark.soak),
        pytest.param(ADDS, [*TEXTS, "assert add(1, 1) == 3"], {}, 0.0, marks=pytest.mark.soak),
        (ADDS, [*TEXTS, "assert add(1, 1) == 3", "add('x', 1)"], {"partial": True}, 0.5),
        pytest.param(READS, PAIRS, {}, 1.0, marks=pytest.mark.soak),
        (READS.replace("+", "*"), [*PAIRS, {"input": "2 2", "output": "4"}], {"partial": True}, 1 / 3),
        (READS, json.dumps(PAIRS), {}, 1.0),
        pytest.param(READS.replace("+", "*"), json.dumps(PAIRS), {}, 0.0, marks=pytest.mark.soak),
        pytest.param(READS, {"inputs": ["1 2"], "outputs": [3]}, {}, 1.0, marks=pytest.mark.soak),
        (READS.replace("+", "*"), json.dumps({"inputs": ["1 2"], "outputs": ["3"]}), {}, 0.0),
        ("import sys; print(repr(sys.stdin.read()))", [{"input": None, "output": "''"}], {}, 1.0),
        (ADDS, {"hard": TEXTS}, {"column": "tests.hard"}, 1.0),
        pytest.param("no code at all", TEXTS, {}, 0.0, marks=pytest.mark.soak),
        ("import os; os._exit(0)", TEXTS, {}, 0.0),
        pytest.param("raise SystemExit", TEXTS, {}, 0.0, marks=pytest.mark.soak),
        pytest.param("print([True, True])", TEXTS, {}, 0.0, marks=pytest.mark.soak),
        (ADDS.replace("def", "import atexit\natexit.register(print, 'bye')\ndef"), TEXTS, {}, 1.0),
        pytest.param("print('x' * (2**24 - 40))", TEXTS, {}, 0.0, marks=pytest.mark.soak),
        ("while True: pass", TEXTS, {"seconds": 0.5}, 0.0),
    ],
)
def test_a_program_is_worth_what_its_tests_say(answer, tests, args, reward):
    one = scored(answer, tests, **args)
    assert (one.reward, one.error) == (reward, "")


def test_a_row_without_tests_fails_and_a_service_without_a_wall_refuses():
    assert "no tests in the column 'tests'" in scored(ADDS, []).error
    assert "a test has no output" in scored(ADDS, [{"input": "1"}]).error
    with pytest.raises(RewardError, match="has to run behind a wall"):
        scored(ADDS, TEXTS, walls=Walls(required=True, missing=lambda: "no Landlock"))


@pytest.mark.parametrize("run", ["python", "shell"])
def test_a_program_reaches_nothing_outside(tmp_path: Path, run: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("7")
    attempts = [
        f"print(open({str(secret)!r}).read())",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        "open('../new', 'w')",
        "import socket; socket.socket()",
        f"import os; os.kill({os.getpid()}, 0)",
        "import os; os.symlink('/etc/passwd', 'link')",
        f"print(open('/proc/{os.getpid()}/environ').read())",
    ]
    with Sandbox() as sandbox:
        for attempt in attempts:
            ran = sandbox.python(attempt) if run == "python" else sandbox.shell(f'{sys.executable} -c "{attempt}"')
            assert "PermissionError" in ran.errors, (attempt, ran)
    assert not (tmp_path / "new").exists()


def test_what_a_command_starts_ends_with_it_and_nothing_is_left():
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with Sandbox(seconds=1) as sandbox:
        ran = sandbox.shell("(setsid sleep 77 &) ; (sleep 77 &) ; sleep 0.5; echo begun")
        assert ran.output.startswith("begun")
        late = sandbox.shell("sleep 77")
        directory = sandbox.directory
    assert (late.status, str(late)) == (None, "[ended: it took too long]")
    assert not directory.exists()
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before

    def alive() -> list[psutil.Process]:
        return [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "77"]]

    wait_until(lambda: not alive())  # they are killed, and go when the machine has a moment for them


KILLED = """
import asyncio, sys
from motet.config import RewardConfig
from motet.core.types import Message, Problem
from motet.rewards.reward_pool import RewardPool
from motet.workers.sandbox import Sandbox

def sleeps(problem, completion):
    return len(Sandbox(seconds=100).shell("(sleep 4321.5 &); touch begun; sleep 4321.5; echo").output)

async def main():
    pool = RewardPool(1)
    await pool.register("job", [RewardConfig(name="own", function=sleeps, wall_seconds=float(sys.argv[1]))])
    await pool.score("job", Problem(0, (Message("user", ""),), ""), ["x"])
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.mark.parametrize("killed", ["worker", "parent"])
def test_what_a_command_started_ends_with_a_worker_or_its_parent_that_is_killed(tmp_path: Path, killed: str) -> None:
    def alive() -> list[psutil.Process]:
        return [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "4321.5"]]

    (script := tmp_path / "killed.py").write_text(KILLED)
    (files := tmp_path / "files").mkdir()
    command = [sys.executable, str(script), "8" if killed == "worker" else "1000"]
    environment = {**os.environ, "PYTHONPATH": str(wall.PACKAGE_ROOT), "TMPDIR": str(files)}
    with subprocess.Popen(command, env=environment) as parent:
        try:
            wait_until(lambda: len(alive()) == 2, process=parent)
            assert list(files.glob("motet-worker-*/*/begun"))
            if killed == "worker":  # its time is up
                wait_until(lambda: not alive(), process=parent)
            parent.kill()
            wait_until(lambda: not alive() and not list(files.glob("motet-worker-*")))
        finally:
            parent.kill()
            for one in alive():
                one.kill()


def test_limits_of_memory_and_of_what_is_written_hold():
    with Sandbox(memory_mb=256) as sandbox:
        assert "MemoryError" in sandbox.python("bytearray(1 << 30)").errors
        assert "File too large" in sandbox.python("while True: print('x' * 100000)").errors
        assert len(str(sandbox.python("print('x' * 100000)"))) < 10_000


WRITES = """
import os
held = []
for number in range({files}):
    path = f"{{number}}.bin"
    file = open(path, "wb")
    {then}
"""


@pytest.mark.parametrize(
    ("files", "then", "words"),
    [
        (20_000, "file.close()", "1024 files"),
        (2000, "file.write(b'x' * 15_000_000); file.close()", "64 MB"),
        (200, "os.unlink(path); file.write(b'x' * 15_000_000); file.flush(); held.append(file)", "64 MB"),
        (2000, "os.makedirs('/'.join(['d', str(number), 'e']))", "1024 files"),
    ],
)
def test_the_sum_and_the_number_of_what_a_program_writes_are_bounded(files: int, then: str, words: str) -> None:
    program = WRITES.format(files=files, then=then)
    with Sandbox(seconds=30) as sandbox:
        sandbox.python("open('kept', 'w').write('here')")
        assert str(sandbox.python("print(open('kept').read())")) == "here"
        ran = sandbox.python(program)
        assert words in str(ran), str(ran)[-500:]
        assert list(sandbox.directory.iterdir()) == []
        assert sandbox.python("open('next', 'w')").status == 0  # there is room again
    assert not sandbox.directory.exists()


def test_room_is_not_taken_without_being_written() -> None:
    with Sandbox() as sandbox:
        assert "PermissionError" in sandbox.python("import os; os.posix_fallocate(os.open('a', 66), 0, 1 << 20)").errors


def test_a_program_sees_the_same_each_time():
    """Neither the name of its directory nor the order of a set is another one."""

    def said() -> str:
        with Sandbox() as sandbox:
            return str(sandbox.python("import os; print(os.getcwd(), {'a', 'b', 'c'}); 1 / 0"))

    assert said() == said()
    assert tempfile.gettempdir() not in said()


OWN = """
import os
import signal
from pathlib import Path

from motet.workers.sandbox import Sandbox


def tells(problem, completion):
    with Sandbox() as sandbox:
        return float(str(sandbox.python("import os; print(os.path.dirname(os.getcwd()))")) == completion)


def is_killed(problem, completion):
    sandbox = Sandbox()
    sandbox.shell("echo here > kept")
    Path(completion).write_text(str(sandbox.directory))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_of_a_sandbox_whose_process_was_killed(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    one = judged(str(tmp_path / "where"), RewardConfig(name=f"{tmp_path}/own.py:is_killed", cpu_seconds=60))
    assert "SIGKILL" in one.error
    directory = Path((tmp_path / "where").read_text())
    assert not directory.exists()
    assert not directory.parent.exists()


def test_nothing_is_left_of_a_program_that_was_not_waited_for(tmp_path: Path) -> None:
    name = f"{tmp_path.name}-{os.getpid()}"
    one = scored(f"import time\nopen('{name}', 'w').close()\ntime.sleep(60)", TEXTS, wall_seconds=2, seconds=1)
    assert "by the clock" in one.error
    places = [place for place in os.listdir(tempfile.gettempdir()) if place.startswith("motet-")]
    left = [root for place in places for root, _, files in os.walk(Path(tempfile.gettempdir(), place)) if name in files]
    assert not left


def test_a_program_sees_the_same_in_each_process(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    assert judged(tempfile.gettempdir(), RewardConfig(name=f"{tmp_path}/own.py:tells", cpu_seconds=60)).reward == 1.0
