"""A directory of its own, in which what a model wrote runs behind the wall (`motet.wall`), with limits of time and memory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, Self

from motet import wall

MODULE = "motet.tasks.sandbox_process"
SECONDS = 10.0
MEMORY_MB = 512
_BY_THE_CLOCK = 3.0
"""How many times its CPU time a program may take by the clock, so that a busy machine decides nothing."""
_SHOWN = 4000
"""Characters of a long text that a model is told, from its beginning and from its end."""


@dataclass(frozen=True)
class Ran:
    """What came of a program."""

    output: str
    """What it printed."""
    errors: str
    """What it wrote to standard error."""
    status: int | None
    """Its exit status, or minus the signal that ended it; None where its time was up."""

    def __str__(self) -> str:
        """As a model is told."""
        ended = "[ended: it took too long]" if self.status is None else f"[exit status {self.status}]"
        said = (_shortened(text.rstrip("\n")) for text in (self.output, self.errors))
        return "\n".join(filter(None, (*said, ended if self.status != 0 else ""))) or "[no output]"


class Sandbox:
    """Where programs of one episode run, one after another; files that they write are there for the next one."""

    def __init__(self, seconds: float = SECONDS, memory_mb: int = MEMORY_MB) -> None:
        """Each program has so many seconds of CPU time, three times as many by the clock, and so much memory."""
        self._seconds, self._memory_mb = seconds, memory_mb
        self._made = tempfile.TemporaryDirectory(prefix="motet-sandbox-")
        self.directory = Path(self._made.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the directory."""
        self._made.cleanup()

    def python(self, code: str, given: str = "") -> Ran:
        """Run a program in Python; `given` is its standard input."""
        return self._run("python", code, given)

    def shell(self, command: str, given: str = "") -> Ran:
        """Run a command in `sh`."""
        return self._run("shell", command, given)

    def tested(self, code: str, tests: Sequence[str]) -> list[bool]:
        """Run a program, then in what it left each of some tests; which of them raise nothing."""
        nonce = os.urandom(16).hex()
        ran = self._run("tests", code, json.dumps({"nonce": nonce, "tests": list(tests)}))
        _, known, said = ran.output.rpartition(nonce)
        return [bool(one) for one in json.loads(said)] if known else [False] * len(tests)

    def _run(self, kind: Literal["python", "shell", "tests"], code: str, given: str) -> Ran:
        text = code.encode("utf-8", "replace")
        head = {"kind": kind, "bytes": len(text), "seconds": self._seconds, "memory_mb": self._memory_mb}
        # Files, which the process cannot make longer than its limit.
        with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                wall.command(MODULE, str(os.getpid())),
                stdin=subprocess.PIPE, stdout=printed, stderr=errors,
                cwd=self.directory, env=wall.environment(HOME=str(self.directory), PYTHONHASHSEED="0"), start_new_session=True,
            )  # fmt: skip
            status: int | None = None
            try:
                sent = json.dumps(head).encode() + b"\n" + text + given.encode("utf-8", "replace")
                process.communicate(sent, timeout=self._seconds * _BY_THE_CLOCK)
                status = process.returncode
            except subprocess.TimeoutExpired:
                pass
            finally:
                _end(process)
            # The directory has another name each time, and what a model is told depends on nothing of that kind.
            output, said = (_whole(file).replace(str(self.directory), "~") for file in (printed, errors))
            return Ran(output, said, None if status == -signal.SIGXCPU else status)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _whole(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def _shortened(text: str) -> str:
    if len(text) <= 2 * _SHOWN:
        return text
    return f"{text[:_SHOWN]}\n… {len(text) - 2 * _SHOWN} characters …\n{text[-_SHOWN:]}"
