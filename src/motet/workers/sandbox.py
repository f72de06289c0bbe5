"""A directory in which a model's programs run behind the wall (`motet.process.wall`), with limits of time and memory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar, Literal, Self

from motet.process import wall
from motet.process.child import ChildProcess, TimedOut

MODULE = "motet.workers.sandbox_process"
PLACE = "MOTET_SANDBOXES"
"""The environment variable with the directory of this process's sandboxes; default: that for temporary files."""
SECONDS = 10.0
MEMORY_MB = 512
WRITTEN_MB = 64.0
"""Bytes of all files of one sandbox."""
FILES = 1024
"""Files and directories of one sandbox."""
_TOGETHER_MB = 1024.0
"""Bytes of all files in all sandboxes of this process."""
_LOOK_SECONDS = 0.02
_BY_THE_CLOCK = 3.0
"""Wall-clock limit as a multiple of the CPU time limit, so that a busy machine does not decide the result."""
_SHOWN = 4000
"""Characters shown to the model from the start and from the end of a long text."""


@dataclass(frozen=True)
class ProgramResult:
    """Result of a program."""

    output: str
    """Standard output."""
    errors: str
    """Standard error."""
    status: int | None
    """Its exit status, or minus the signal that ended it; None if its time was up."""
    wrote: str = ""
    """Why it was stopped for writing too much; all files of its sandbox were deleted."""

    def __str__(self) -> str:
        """As shown to a model."""
        ended = "[ended: it took too long]" if self.status is None else f"[exit status {self.status}]"
        ended = f"[ended: it wrote more than {self.wrote}; all files were removed]" if self.wrote else ended
        said = (_shortened(text.rstrip("\n")) for text in (self.output, self.errors))
        return "\n".join(filter(None, (*said, ended if self.status != 0 else ""))) or "[no output]"


class Sandbox:
    """Runs the programs of one episode in sequence; files that they write stay for the next one."""

    _sizes: ClassVar[dict[Path, int]] = {}
    """Bytes of the open sandboxes of this process, as last measured."""

    def __init__(self, seconds: float = SECONDS, memory_mb: int = MEMORY_MB) -> None:
        """Limits per program: CPU seconds (three times as many by the clock) and memory."""
        self._seconds, self._memory_mb = seconds, memory_mb
        self._made = tempfile.TemporaryDirectory(prefix="motet-sandbox-", dir=os.environ.get(PLACE))
        self.directory = Path(self._made.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the directory."""
        self._sizes.pop(self.directory, None)
        self._made.cleanup()

    def python(self, code: str, given: str = "") -> ProgramResult:
        """Run a program in Python; `given` is its standard input."""
        return self._run("python", code, given)

    def shell(self, command: str) -> ProgramResult:
        """Run a command in `sh`."""
        return self._run("shell", command, "")

    def tested(self, code: str, tests: Sequence[str]) -> list[bool]:
        """Run a program, then each test in the state that it left; returns which tests pass, that is, do not raise."""
        nonce = os.urandom(16).hex()
        ran = self._run("tests", code, json.dumps({"nonce": nonce, "tests": list(tests)}))
        _, known, said = ran.output.rpartition(nonce)
        try:
            passed = json.loads(said.partition("\n")[0]) if known else []  # it may print more as it ends
        except ValueError:  # cut off, because it has printed as much as it may
            passed = []
        return [bool(one) for one in passed] or [False] * len(tests)

    def _run(self, kind: Literal["python", "shell", "tests"], code: str, given: str) -> ProgramResult:
        text = code.encode("utf-8", "replace")
        head = {"kind": kind, "bytes": len(text), "seconds": self._seconds, "memory_mb": self._memory_mb}
        # The output goes to files, which the process cannot make longer than its limit.
        with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
            process = ChildProcess(
                wall.command(MODULE, str(os.getpid())), Path(os.devnull), stdout=printed, stderr=errors,
                cwd=self.directory, env=wall.environment(HOME=str(self.directory), PYTHONHASHSEED="0"),
                start_new_session=False, process_group=0,  # in the session of its worker (`process.guard`)
            )  # fmt: skip
            status: int | None = None
            sent = json.dumps(head).encode() + b"\n" + text + given.encode("utf-8", "replace")
            try:
                wrote = self._watched(process, sent)
                status = process.returncode
            finally:
                _end(process)
            wrote = wrote or self._too_much(process.pid)  # count its last files too
            if wrote:
                self._clear()
            output, said = (self._unnamed(_whole(file)) for file in (printed, errors))
            return ProgramResult(output, said, None if status == -signal.SIGXCPU else status, wrote)

    def _unnamed(self, text: str) -> str:
        """Without the names of directories, which differ each time: the text for the model must not depend on them."""
        return text.replace(str(self.directory), "~").replace(str(self.directory.parent), tempfile.gettempdir())

    def _watched(self, process: ChildProcess, sent: bytes) -> str:
        """Wait until a program has ended, timed out, or written too much; returns the excess, if any."""
        until, given = time.monotonic() + self._seconds * _BY_THE_CLOCK, sent or None
        while (left := until - time.monotonic()) > 0:
            try:
                process.communicate(given, timeout=min(left, _LOOK_SECONDS))
                break
            except TimedOut:
                given = None  # passed on to the caller
            if wrote := self._too_much(process.pid):
                return wrote
        return ""

    def _too_much(self, program: int) -> str:
        """Which limit the sandbox's files exceed; empty if none."""
        count, size = 0, _unlinked(program)
        for root, directories, files in os.walk(self.directory):
            count += len(directories) + len(files)
            if count > FILES:
                return f"{FILES} files"
            for name in files:
                with contextlib.suppress(OSError):  # it was removed meanwhile
                    size += os.lstat(os.path.join(root, name)).st_size
        self._sizes[self.directory] = size
        if size > WRITTEN_MB * 2**20:
            return f"{WRITTEN_MB:g} MB"
        others = sum(list(self._sizes.values())) - size
        return f"there is room for beside {len(self._sizes) - 1} others" if others + size > _TOGETHER_MB * 2**20 else ""

    def _clear(self) -> None:
        for path in self.directory.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._sizes.pop(self.directory, None)


def _unlinked(program: int) -> int:
    """Bytes of a program's open files without a name; two of them have its output."""
    sizes = dict[int, int]()
    with contextlib.suppress(OSError):  # it has ended
        for handle in os.scandir(f"/proc/{program}/fd"):
            with contextlib.suppress(OSError):
                status = os.stat(handle.path)
                if stat.S_ISREG(status.st_mode) and not status.st_nlink:
                    sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def _end(process: ChildProcess) -> None:
    """Kill a program and all processes that it started."""
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
