"""A process that its small parent starts again, and signs of life: a long step is none of silence."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from motet.core.device import Device
from motet.process.heartbeat import DeviceWatch, Pulse, Restarts, works_for
from motet.process.supervised import Owned
from tests.support.waiting import PATIENCE, wait_until

SERVER = """
import asyncio, os, socket, sys
from motet.process.supervised import supervised
listening = socket.create_server(("127.0.0.1", 0))
print("port", listening.getsockname()[1], flush=True)
say = lambda text: print("said", text, flush=True)
heart = supervised(say, "the child", lambda: print("prepared", flush=True), [listening])

async def main():
    listening.setblocking(False)
    loop, turning = asyncio.get_running_loop(), asyncio.create_task(heart.turn())
    await asyncio.sleep(0.1)
    print("child", os.getpid(), heart.first, flush=True)
    while True:
        connection, _ = await loop.sock_accept(listening)
        word = await loop.sock_recv(connection, 10)
        if word == b"stick":
            while True:
                pass
        if word.isdigit():
            sys.exit(int(word))
        connection.close()

asyncio.run(main())
"""


class Supervised:
    """A program whose child listens."""

    def __init__(self, code: str = SERVER, *words: str) -> None:
        command, pipe = [sys.executable, "-c", code, *words], subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        with contextlib.ExitStack() as failed:
            failed.callback(self.close)
            self.port = int(self.hears("port"))
            failed.pop_all()

    def hears(self, word: str) -> str:
        """The rest of the next line, which has to begin so; what is prepared may come at any time."""
        assert self.process.stdout is not None
        while (line := self.process.stdout.readline()).startswith("prepared") and word != "prepared":
            pass
        assert line.startswith(word), line
        return line.removeprefix(word).strip()

    def child(self, *, first: bool) -> int:
        """The process that serves now."""
        pid, told = self.hears("child").split()
        assert told == str(first)
        return int(pid)

    def close(self) -> None:
        """Leave nothing running."""
        self.process.kill()
        self.process.communicate()

    def says(self, word: bytes) -> None:
        """Connect and say a word to the child."""
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(word)


@pytest.fixture
def program() -> Iterator[Supervised]:
    with contextlib.closing(Supervised()) as made:
        yield made


def test_a_child_that_dies_is_started_again_with_its_sockets(program: Supervised) -> None:
    before = program.child(first=True)
    assert program.hears("prepared") == ""
    os.kill(before, signal.SIGKILL)
    assert program.hears("said") == (
        "the child was killed with SIGKILL, which Motet did not send (the system may be out of memory): it is started again"
    )
    after = program.child(first=False)
    assert after != before
    program.says(b"7")  # the port is the same, and was never closed
    assert program.hears("said") == "the child ended with exit status 7: it is started again"
    os.kill(program.child(first=False), signal.SIGSEGV)
    assert program.hears("said").endswith(": it is started again in 1 s")
    os.kill(program.child(first=False), signal.SIGKILL)
    assert program.hears("said").endswith(": it is started again in 2 s")
    os.kill(program.child(first=False), signal.SIGKILL)
    assert program.hears("said").endswith(": it is started again in 4 s")
    program.process.terminate()  # while there is no child
    assert program.process.wait(PATIENCE) == 0


def test_a_process_that_ends_again_and_again_stays_away_for_longer_and_longer() -> None:
    restarts = Restarts()
    assert [restarts.seconds_after(0.1) for _ in range(10)] == [0, 0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert restarts.seconds_after(61.0) == 0.0, "it worked for a minute"
    assert [restarts.seconds_after(float("-inf")) for _ in range(3)] == [0, 1, 2], "it was never ready"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_goes_through_and_the_end_is_the_childs(program: Supervised, number: int) -> None:
    child = program.child(first=True)
    program.process.send_signal(number)
    status = program.process.wait(PATIENCE)
    assert not psutil.pid_exists(child)
    assert status in (-number, 1), "as a Python program that is not supervised: by its signal, or a KeyboardInterrupt"
    with pytest.raises(ConnectionRefusedError):
        program.says(b"")


def test_what_ends_before_it_serves_or_by_itself_is_not_started_again() -> None:
    first = SERVER.replace('print("child"', 'sys.exit(3)\n    print("child"').replace(
        "asyncio.create_task(heart.turn())", "None"
    )
    with contextlib.closing(Supervised(first)) as program:
        assert program.process.wait(PATIENCE) == 3
    with contextlib.closing(Supervised()) as program:
        program.child(first=True)
        program.says(b"0")
        assert program.process.wait(PATIENCE) == 0


def test_a_child_ends_with_its_parent_also_when_it_is_stopped(program: Supervised) -> None:
    child = psutil.Process(program.child(first=True))
    child.suspend()
    program.process.kill()
    program.process.wait()
    assert psutil.wait_procs([child], timeout=PATIENCE)[1] == []


@pytest.mark.parametrize("how", ["stopped", "stuck"])
def test_a_child_that_does_not_answer_is_ended_and_started_again(program: Supervised, how: str) -> None:
    child = program.child(first=True)
    program.hears("prepared")  # it serves
    if how == "stopped":
        os.kill(child, signal.SIGSTOP)
    else:
        program.says(b"stick")
    assert program.hears("said") == "the child did not answer for 9 s and was ended: it is started again"
    program.child(first=False)
    program.process.terminate()


OWNER = """
import asyncio, os, socket, sys
from pathlib import Path
from motet.process.supervised import Owned, supervised
log, code = Path(sys.argv[1]), "import os, socket, sys; s = socket.socket(fileno=0); print('begun', flush=True)\\n"
code += "while (got := socket.recv_fds(s, 1, 1))[1]: socket.socket(fileno=got[1][0]).sendall(b'%d' % os.getpid())"
owned = Owned(lambda log: [sys.executable, "-c", code])
owned.begin(str(log))
print("port", 0, flush=True)
heart = supervised(lambda text: print("said", text, flush=True), "the child", lambda: print("prepared", flush=True), (), owned)

async def main():
    turning = asyncio.create_task(heart.turn())
    await asyncio.sleep(0.1)
    with heart.connect(log) as connection:
        print("child", os.getpid(), heart.first, connection.recv(10).decode(), flush=True)
    for line in sys.stdin:
        status = heart.kill(log)
        while status is None:
            status = heart.status(log)
        with heart.connect(log) as connection:
            print("ended", status, connection.recv(10).decode(), flush=True)

asyncio.run(main())
"""


def test_what_a_parent_owns_is_connected_with_each_child_and_ends_with_the_parent(tmp_path: Path) -> None:
    with contextlib.closing(Supervised(OWNER, str(tmp_path / "log"))) as program:
        child, first, before = program.hears("child").split()
        owned = psutil.Process(int(before))
        program.hears("prepared")  # it serves
        os.kill(int(child), signal.SIGKILL)
        program.hears("said")
        child, again, after = program.hears("child").split()
        assert (first, again, after) == ("True", "False", before)
        assert program.process.stdin is not None
        program.process.stdin.write("again\n")
        program.process.stdin.flush()
        status, started = program.hears("ended").split()
        assert (status, started == before, owned.is_running()) == ("-9", False, False)
        left = [psutil.Process(int(pid)) for pid in (child, started)]
        left[1].suspend()
        program.process.kill()
        program.process.wait()
        wait_until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in left), PATIENCE)
    assert (tmp_path / "log").read_text() == "begun\n" * 2


def test_a_child_that_dies_before_it_reads_an_answer_harms_no_parent(tmp_path: Path) -> None:
    owned, (parent, child) = Owned(lambda log: ["/bin/true"]), socket.socketpair()
    with parent, child:
        child.sendall(b"connect " + os.fsencode(tmp_path / "log"))
        assert owned.answer(parent)
        os.waitpid(psutil.Process().children()[-1].pid, 0)
        child.close()
        assert not owned.answer(parent)
    owned.release()


# --- signs of life ----------------------------------------------------------------------------------------------------------


def test_a_turn_of_the_device_is_judged_by_its_progress_and_not_by_its_length() -> None:
    device, go = Device(), threading.Event()
    try:
        watch = DeviceWatch(device)

        def works() -> None:
            """A step that takes as long as it likes."""
            while not go.is_set():
                pass

        working = device.submit(works)
        found = []
        for _ in range(12):
            used = time.process_time() - time.thread_time()
            while time.process_time() - time.thread_time() < used + 0.03:
                time.sleep(0.001)
            found.append(watch.look())
        assert set(found) == {0}
        go.set()
        working.result()
        assert [watch.look() for _ in range(12)][-1] == 0, "a device without work waits"
        go.clear()
        waiting = device.submit(go.wait)  # as in a deadlock
        while device.beat % 2 == 0:
            time.sleep(0.001)
        watch.look()
        assert [watch.look() for _ in range(12)] == list(range(1, 13))
        go.set()
        waiting.result()
    finally:
        device.close()


def test_a_loop_that_turns_is_not_still_and_before_and_after_it_is_not_judged() -> None:
    said: list[int | None] = []
    heard = threading.Event()

    def say(still: int | None) -> None:
        said.append(still)
        heard.set()

    pulse = Pulse(say)

    def until(wanted: int | None) -> None:
        while True:
            heard.clear()
            if said and said[-1] == wanted:
                return
            assert heard.wait(PATIENCE)

    async def work() -> None:
        until(None)
        turning = asyncio.create_task(pulse.turn())
        await asyncio.to_thread(until, 0)
        until(2)  # the loop stands
        turning.cancel()
        await asyncio.gather(turning, return_exceptions=True)
        until(None)

    asyncio.run(work())


def test_the_job_in_whose_turn_the_loop_stands_is_known() -> None:
    pulse, seen = Pulse(lambda _: None), list[str]()

    async def stands() -> None:
        with ThreadPoolExecutor(1) as other:
            seen.append(other.submit(lambda: pulse.job).result())

    async def of_a_job(name: str) -> None:
        works_for(name)
        await stands()
        await asyncio.gather(asyncio.create_task(stands()), asyncio.to_thread(lambda: None))

    async def work() -> None:
        turning = asyncio.create_task(pulse.turn())
        await asyncio.sleep(0)
        await asyncio.gather(asyncio.create_task(of_a_job("a")), asyncio.create_task(of_a_job("b")))
        await asyncio.create_task(stands())
        turning.cancel()

    asyncio.run(work())
    assert sorted(seen) == ["", "a", "a", "b", "b"]
    assert seen[-1] == ""
