"""How a process ended is what is told: by its own words, and a signal only where nobody here sent it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from motet.config import EnvironmentConfig, RewardConfig
from motet.core.errors import EngineError
from motet.core.types import Message, Problem
from motet.environments.agent_processes import AgentProcesses
from motet.environments.environment_messages import EnvironmentStep, Reset
from motet.environments.environments import EnvironmentWorkers
from motet.process.child import ChildPipes
from motet.process.ending import how_it_ended, size_of
from motet.process.isolated_calls import IsolatedPool
from motet.rewards.reward_messages import REWARD_CALLS, ScoreCompletions
from motet.rewards.reward_workers import load_request
from motet.workers.worker_link import ProcessDiedError, WorkerLink
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.tier1

PROBLEM = Problem(0, (Message("user", "hi"),), "1")
KILLED = "was killed with SIGKILL, which Motet did not send (the system may be out of memory)"

CODE = """
import os, sys
import numpy as np

def broken(seed):
    raise PermissionError(13, "Permission denied", "/opt/kit/numpy")

def fails(problem, completion):
    np.random.seed = broken
    return 1.0

def closes(problem, completion):
    for number in range(3, 64):
        try:
            os.close(number)
        except OSError:
            pass
    return 1.0

def empties(problem, completion):
    numbers = range(3, 64)
    os.dup2(0, min(n for n in numbers if os.path.realpath(f"/proc/self/fd/{n}").rpartition("/")[2].startswith("pipe:")))
    return 1.0

async def leaves(problem):
    os._exit(4)

async def dies(problem):
    os.kill(os.getpid(), 9)

class Fails:
    def step(self, text):
        np.random.seed = broken
        return "and"

async def agent(problem):
    from motet.workers import worker_messages
    del worker_messages.StopCall
    return 1.0
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(CODE)
    return tmp_path / "own.py"


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("os.close(1); time.sleep(0.5); raise ValueError('no such file')",
         r"ended with exit status 1; the last line of .*/log is: ValueError: no such file"),
        ("print('x' * 9999, file=sys.stderr); os._exit(3)", r"ended with exit status 3; the last line of .* is: x{300}"),
        ("os._exit(3)", r"ended with exit status 3 \(hint\)"),
        ("os.kill(os.getpid(), 9)", re.escape(KILLED)),
        ("os.abort()", r"was killed with SIGABRT \(compiled code gave up\)"),
        ("os.kill(os.getpid(), 40)", "was killed with signal 40"),
    ],
)  # fmt: skip
def test_a_process_that_closes_its_output_before_it_exits_ends_by_itself(tmp_path: Path, code: str, how: str) -> None:
    async def main() -> str:
        (tmp_path / "log").write_text("of an earlier process\n")
        command = [sys.executable, "-c", f"import os, sys, time\n{code}"]
        pipes = await ChildPipes.start(command, tmp_path / "log", os.environ, 2**16)
        await pipes.output.read()
        return await pipes.how_it_ended(" (hint)")

    assert re.fullmatch(how, asyncio.run(main()))


def test_a_process_that_was_stopped_here_is_not_said_to_have_been_killed(tmp_path: Path) -> None:
    async def main() -> str:
        pipes = await ChildPipes.start([sys.executable, "-c", "input()"], tmp_path / "log", os.environ, 2**16)
        await pipes.kill()
        return await pipes.how_it_ended()

    assert asyncio.run(main()) == "was stopped by Motet"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("fails", r"failed outside a call: PermissionError: \[Errno 13\] Permission denied: '/opt/kit/numpy'; see .*/log"),
        ("closes", r"ended with exit status 1; the last line of .*/log is: OSError: \[Errno 9\] Bad file descriptor"),
        ("empties", "failed outside a call: its input ended; see .*/log"),
    ],
)  # fmt: skip
def test_an_exception_outside_a_rewards_call_is_told_as_what_it_is(own: Path, name: str, told: str) -> None:
    async def main() -> str:
        request = load_request([RewardConfig(name=f"{own}:{name}")], None, walled=False)
        link = await WorkerLink.start(REWARD_CALLS, request, own.parent / "log")
        try:
            while True:  # the first may be answered
                await link.call(ScoreCompletions(0, PROBLEM, ["text"], 60, 1024), PATIENCE, 60)
        except ProcessDiedError as error:
            return str(error)
        finally:
            await link.kill()

    said = asyncio.run(main())
    assert re.fullmatch(told, said), said


def test_an_exception_outside_an_environments_call_is_told_as_what_it_is(own: Path) -> None:
    async def main() -> str:
        workers = EnvironmentWorkers(EnvironmentConfig(name=f"{own}:Fails"), own.parent / "log", 1)
        await workers.open()
        episode = workers.episode(1)
        await episode.do(Reset({}))
        said = [(await episode.do(EnvironmentStep(text))).error for text in "ab"]
        await workers.close()
        return said[1]

    assert re.fullmatch(r"the environment failed outside a call: PermissionError: .*; see .*/log", asyncio.run(main()))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("agent", "its process failed outside a call: AttributeError: .*StopCall.*; see .*/log"),
        ("leaves", r"its process ended with exit status 4 \(an agent must return, not exit\)"),
        ("dies", f"its process {re.escape(KILLED)}"),
    ],
)
def test_how_the_process_of_an_agent_ended_is_told(own: Path, name: str, told: str) -> None:
    async def main() -> str:
        agents = AgentProcesses(f"{own}:{name}", {}, own.parent / "log")
        process, later = await agents.usable(), time.time() + 60
        said = ""
        while not said:  # the first may be answered
            said = (await agents.run(process, PROBLEM, "http://127.0.0.1:1", "key", later, 0)).error
        await agents.close()
        return said

    assert re.fullmatch(told, asyncio.run(main()))


# --- work apart ---------------------------------------------------------------------------------------------------------------


def test_work_whose_process_was_killed_from_outside_is_not_said_to_be_too_much() -> None:
    pool = IsolatedPool()

    async def main() -> None:
        asked = asyncio.create_task(pool.call("us", eval, b"__import__('time').sleep(600)"))
        await until(lambda: bool(pool.pids()))
        os.kill(pool.pids()[0], signal.SIGKILL)
        await asked

    with pytest.raises(EngineError, match=re.escape(f"the process for this work {KILLED}")):
        asyncio.run(main())
    pool.close()


def test_work_that_ends_with_its_service_is_not_said_to_be_too_much() -> None:
    pool = IsolatedPool()

    async def main() -> None:
        asked = asyncio.create_task(pool.call("us", eval, b"__import__('time').sleep(600)"))
        await until(lambda: bool(pool.pids()))
        pool.close()
        await asked

    with pytest.raises(EngineError, match=r"the process for this.*stopped by Motet"):
        asyncio.run(main())


def test_the_last_line_of_a_log_that_was_moved_aside_is_told(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("it began\n" * 100)
    began = size_of(log)
    log.write_text("it failed\n")
    assert how_it_ended(3, log=log, since=began) == f"ended with exit status 3; the last line of {log} is: it failed"


def test_the_last_line_of_what_was_printed_is_told_where_there_is_no_log() -> None:
    printed = "Traceback (most recent call last):\n  at a place\nValueError: no such file\n"
    assert how_it_ended(1, printed=printed) == "ended with exit status 1; its last line is: ValueError: no such file"
    assert how_it_ended(-11, printed="\n") == "was killed with SIGSEGV (a crash in compiled code)"
