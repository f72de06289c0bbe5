"""`motet chat` in a terminal: Ctrl-C ends it at the prompt, and an answer that cannot be given does not."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from motet.commands.cli import app
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.tier1

SCRIPT = """
import asyncio, fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the terminal is this process's: Ctrl-C in it is a signal
from motet.commands.chat import converse

async def answer(messages, plain):
    yield ("base" if plain else "adapter") + f" {len(messages)}"

with asyncio.Runner() as runner:
    converse(runner, answer, "runs/[all]/adapter", None)
"""


def test_ctrl_c_ends_a_conversation() -> None:
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=follower, stdout=follower, stderr=follower, start_new_session=True
    )
    os.close(follower)
    shown = ""

    def until(text: str) -> None:
        nonlocal shown
        deadline = time.monotonic() + PATIENCE
        while text not in shown:
            assert time.monotonic() < deadline, shown
            if select.select([leader], [], [], 1.0)[0]:
                shown += os.read(leader, 4096).decode()

    try:
        until("runs/[all]/adapter; an empty line ends")
        until("> ")
        for line, said in (
            ("Hello", "adapter 1"),
            ("And?", "adapter 3"),
            ("/base", "base answers"),
            ("/help", "there are /base"),
        ):
            os.write(leader, f"{line}\n".encode())
            until(said)
        os.write(leader, b"Hi\n")
        until("base 1")
        shown = shown.partition("base 1")[2]
        until("> ")  # the answer has ended, and a line is read again
        deadline = time.monotonic() + PATIENCE
        while process.poll() is None and time.monotonic() < deadline:
            os.write(leader, b"\x03")  # lost if it comes between the prompt and the read behind it
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
        assert process.poll() not in (None, 0)
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def test_a_message_that_has_no_room_does_not_end_a_conversation() -> None:
    told = CliRunner().invoke(app, ["chat", "small", "--max-tokens", "4"], input=f"{'x ' * 5000}\nhi\n\n")
    assert told.exit_code == 0, told.output
    too_long, after, _ = told.output.split("> ")[1:]
    assert "maximum context length is 1024 tokens" in too_long
    assert "(10007 in the prompt, 4 in the completion)" in " ".join(too_long.split())
    assert "context" not in after


def test_an_answer_cannot_steer_the_terminal() -> None:
    hostile = SCRIPT.split("\n", 3)[3].replace("yield (", 'yield "\\x1b]0;owned\\x07\\x1b"; yield "[2J" + (')
    told = subprocess.run(
        [sys.executable, "-c", f"import asyncio\n{hostile}"],
        input="Hello\n\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert "adapter 1" in told.stdout
    assert "\x1b" not in told.stdout


def test_thoughts_are_apart_from_answers_and_sent_back_as_thoughts() -> None:
    thinks = """
import asyncio
from motet.commands.chat import converse
from motet.core.types import Thought

async def answer(messages, plain):
    if len(messages) == 1:
        for piece in (Thought("I "), Thought("add."), "It is ", "2."):
            yield piece
    else:
        yield Thought(repr(messages[1]))

with asyncio.Runner() as runner:
    converse(runner, answer, "job@best", None)
"""
    told = subprocess.run(
        [sys.executable, "-c", thinks], input="Hello\nAnd?\n\n", capture_output=True, text=True, check=True
    ).stdout
    assert "> I add.\nIt is 2.\n" in told
    assert "content='It is 2.'" in told
    assert "thought='I add.'" in told
    assert "(the answer ended in its thought)" in told
