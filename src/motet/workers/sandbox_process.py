"""The process that runs a model's program: `python -m motet.workers.sandbox_process PARENT_PID`.

Its first line of input describes the rest: the program, then the program's input. The process goes behind the wall
before it reads either.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from motet.process import wall

_MOST_WRITTEN = 1 << 24
_NAME = "<program>"


def main() -> None:
    """Read the program, and run it."""
    wall.end_with(int(sys.argv[1]))
    head = json.loads(_line())
    seconds = math.ceil(head["seconds"])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    shell = head["kind"] == "shell"
    wall.enter(
        head["memory_mb"], writable=[Path.cwd()], most_written=_MOST_WRITTEN, programs=shell, where_possible=True
    )
    code = _bytes(head["bytes"]).decode()
    if shell:
        os.execve("/bin/sh", ["sh", "-c", code], {**os.environ, "PATH": "/usr/bin:/bin"})
    sys.argv[:] = ["program.py"]
    sys.path[:0] = [os.getcwd()]
    if head["kind"] == "tests":
        _test(code, json.load(sys.stdin))
    else:
        sys.exit(_ran(code, {"__name__": "__main__"}))


def _line() -> bytes:
    """The first line of the input, without reading a byte beyond it."""
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(0, 1)
    return line


def _bytes(n: int) -> bytes:
    read = b""
    while len(read) < n and (more := os.read(0, n - len(read))):
        read += more
    return read


def _ran(code: str, names: dict[str, Any]) -> int:
    """The exit status of a program."""
    try:
        exec(compile(code, _NAME, "exec"), names)  # noqa: S102  # behind the wall
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException as error:
        trace = error.__traceback__
        traceback.print_exception(type(error), error, trace and trace.tb_next)
        return 1
    return 0


def _test(code: str, given: Mapping[str, Any]) -> None:
    """Report at the end which tests passed, with a secret that a program which merely prints or exits does not know."""
    names: dict[str, Any] = {"__name__": "__main__"}
    ended = _ran(code, names)
    passed = [ended == 0 and _ran(test, names) == 0 for test in given["tests"]]
    sys.stdout.flush()
    print(given["nonce"], json.dumps(passed), sep="", flush=True)


if __name__ == "__main__":
    main()
