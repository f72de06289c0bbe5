"""How a child process ended, in words: the one place that says so.

A signal is named only if this process did not send it. A process that fails outside a call writes its reason as its last
message (`ProcessFault`); one that cannot even do that leaves it in its log.
"""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from pathlib import Path

EXIT_SECONDS = 10.0
"""Time for a process that has closed its output to exit by itself; an interpreter with large libraries takes a while."""
_HINTS = {
    signal.SIGKILL: ", which Motet did not send (the system may be out of memory)",
    signal.SIGTERM: ", which Motet did not send",
    signal.SIGSEGV: " (a crash in compiled code)",
    signal.SIGBUS: " (a crash in compiled code)",
    signal.SIGILL: " (a crash in compiled code)",
    signal.SIGABRT: " (compiled code gave up)",
}
_TAIL_BYTES = 4096


def how_it_ended(
    status: int | None,
    *,
    stopped: bool = False,
    log: Path | None = None,
    since: int = 0,
    printed: str = "",
    hint: str = "",
) -> str:
    """`ended with exit status 3`, `was killed with SIGSEGV (…)`, `was stopped by Motet`: a phrase without its subject.

    Args:
        status: as `subprocess` reports it; None if it has not ended.
        stopped: whether this process killed it before it ended by itself.
        log: its standard error; its last line is quoted.
        since: size of the log at its start.
        printed: what it wrote, instead of a log.
        hint: said after the status of a process that wrote nothing.
    """
    said = _last_line_of(log, since) if log is not None else ""
    words = f"; the last line of {log} is: {said}" if said else ""
    if printed.strip():
        words = f"; its last line is: {last_line(printed)}"
    if stopped and status in (None, -signal.SIGKILL, -signal.SIGTERM):
        return f"was stopped by Motet{words}"
    if status is None:
        return f"closed its connection{words}"
    if status >= 0:
        return f"ended with exit status {status}{words or hint}"
    try:
        number = signal.Signals(-status)
    except ValueError:  # a real-time signal
        return f"was killed with signal {-status}{words}"
    return f"was killed with {number.name}{_HINTS.get(number, '')}{words}"


def last_line(said: str) -> str:
    """The last line that one of Motet's processes printed; for a traceback, the error without its place."""
    lines = said.strip().splitlines()
    return lines[-1].strip()[-300:] if lines else "it said nothing"


def last_words(error: BaseException) -> str:
    """The last line of an exception's traceback."""
    try:
        return last_line("".join(traceback.format_exception_only(error))).encode(errors="replace").decode()
    except Exception:  # the __str__ of a user's exception may fail
        return type(error).__name__


def size_of(log: Path | None) -> int:
    """The size of a log, before a process that appends to it starts."""
    with contextlib.suppress(OSError):
        return 0 if log is None else log.stat().st_size
    return 0


def _last_line_of(log: Path, since: int) -> str:
    with contextlib.suppress(OSError), log.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(since if since <= end else 0, end - _TAIL_BYTES))  # a long log was moved aside meanwhile
        text = file.read(_TAIL_BYTES).decode(errors="replace").strip()
        return last_line(text) if text else ""
    return ""
