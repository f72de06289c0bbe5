"""The wall around a process that reads a model's answers or other people's data: it calls `enter` before it reads them.

Behind the wall a process has no network, starts no process, and can neither signal, find nor limit others. It can read Python's
own files and the given ones, write only the given ones, and never raise its hard memory limit. Landlock protects files
(Linux 5.13), seccomp the rest (`system_calls`); both also apply to root, and neither needs a privilege.

`python -m motet.process.wall` tries to break out (`breaking_out`); `probe` runs it to learn what holds on this machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import resource
import runpy
import signal
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import gettempdir, mkdtemp

from motet.core.errors import WallError
from motet.process import importable
from motet.process.child import run
from motet.process.ending import how_it_ended, last_line
from motet.process.system_calls import LOGGED, filter_calls

PACKAGE_ROOT = importable.PACKAGE_ROOT
_MOST_WRITTEN = 1 << 28
_MOST_PENDING = 512

_PROBE, _PROBE_SECONDS = "motet.process.breaking_out", 60.0
_PR_SET_PDEATHSIG = 1

HOMES = ("MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "NUMBA_CACHE_DIR", "HF_HOME")
"""The directory for files that libraries create for themselves."""


NEVER_HELD = {
    "seeing that a process exists": "possible: Landlock shows the names in /proc, but not what is in its files"
}
"""Attempts that no wall of this kind holds, and what `probe` says about them."""


def missing() -> str:
    """Why this machine has no wall; empty if it has one."""
    broken = [
        f"{what}: {outcome}" for what, outcome in probe().items() if outcome not in ("held", NEVER_HELD.get(what))
    ]
    return "; ".join(broken)


def probe() -> Mapping[str, str]:
    """The attempts of a process behind the wall to break out; for each `held`, or what happened instead."""
    return _examined()[0]


def left_out() -> Mapping[str, str]:
    """Directories of this process's import path of which a process behind the wall reads nothing, and why."""
    return _examined()[1]


@functools.cache
def _examined() -> tuple[Mapping[str, str], Mapping[str, str]]:
    """`probe` and `left_out`."""
    if sys.platform != "linux":
        return {"the wall": f"{sys.platform} has none; it takes Linux with Landlock and seccomp"}, {}
    asked = command(_PROBE, json.dumps([str(Path(entry or ".").resolve()) for entry in sys.path]))
    try:
        done = run(asked, env=environment(), seconds=_PROBE_SECONDS)
        answer = json.loads(done.stdout)
        return answer["outcomes"], answer["left_out"]
    except TimeoutError as error:
        return {"the wall": f"a process behind it gave {error}"}, {}
    except ValueError:
        said = f": {last_line(done.stderr)}"
        return {"the wall": f"a process behind it {how_it_ended(done.returncode)}{said}"}, {}


def command(module: str, *arguments: str) -> list[str]:
    """The command that starts one of Motet's own processes; files in the working directory do not affect it."""
    return [sys.executable, "-P", "-m", module, *arguments]


FIXED = {"LC_ALL": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "0"}
"""Variables of processes that run a person's code: its results must not depend on the machine, nor on the process."""


def environment(**more: str) -> dict[str, str]:
    """The environment of a process behind the wall: no variables of this process, and no threads of numpy.

    Libraries look for a directory of their own to write to, and matplotlib does not load without one.
    """
    homes = dict.fromkeys(HOMES, _home())
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    logged = {LOGGED: os.environ[LOGGED]} if LOGGED in os.environ else {}
    fixed = {**importable.variables(), **logged, "PYTHONDONTWRITEBYTECODE": "1", "PATH": "", **FIXED}
    return {**fixed, **threads, **homes, **more}


@functools.cache
def _home() -> str:
    """A directory of this user for files of libraries. Behind the wall they cannot write there, and work without."""
    place = Path(gettempdir()) / f"motet-home-{os.getuid()}"
    with contextlib.suppress(OSError):
        place.mkdir(mode=0o700, exist_ok=True)
        status = place.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
            return str(place)
    return mkdtemp(prefix="motet-home-")  # the first one belongs to somebody else


def check_outside(directory: Path) -> None:
    """Raise WallError if a directory's files can be read from behind the wall."""
    for root in importable.of_python(sys.path).places:
        if directory.resolve().is_relative_to(root):
            raise WallError(
                f"{directory} is inside {root}, which processes of rewards may read: choose another directory"
            )


def enter(
    memory_mb: int,
    *,
    readable: Sequence[Path] = (),
    writable: Sequence[Path] = (),
    most_written: int = _MOST_WRITTEN,
    programs: bool = False,
    threads: bool = True,
    where_possible: bool = False,
) -> None:
    """Go behind the wall, for good. The process must have no second thread yet.

    Args:
        memory_mb: address space beyond the current use, as a hard limit.
        readable: files and directories to read, besides Python's own.
        writable: directories in which files may be created.
        most_written: size limit of each file in bytes, also of files that are open already, such as a log.
        programs: allow it to start programs, which are behind the wall too and stay in its process group.
        threads: allow it to start threads.
        where_possible: continue with limits only if this machine has no wall.

    Raises:
        WallError: it cannot be put up; the process must not continue.
    """
    limit_memory(memory_mb)
    for kind, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, most_written), (resource.RLIMIT_NOFILE, 256)):
        _lower(kind, most)
    if sys.platform == "linux":  # of timers and queued signals, which all processes of a user share
        _lower(resource.RLIMIT_SIGPENDING, _MOST_PENDING)
    try:
        running = len(os.listdir("/proc/self/task"))
        if running != 1:
            raise WallError(f"no wall can be put up: the process has {running} threads already")
        if not writable:  # libraries ask for a directory when they are imported, and behind the wall none can be found
            gettempdir()
        found = importable.of_python(sys.path)
        sys.path[:] = found.path
        importable.warm(sys.path)
        _hold_files(found, readable, writable)
        _drop_capabilities()
        filter_calls(programs, threads)
    except (ImportError, OSError, RuntimeError) as error:
        if not where_possible:
            raise WallError(f"no wall can be put up: {error}") from error


def end_with(parent: int) -> None:
    """Ask Linux for SIGKILL when the parent is gone, which works even in a call that never returns.

    On other systems the process ends at the end of its input, between two calls.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def limit_memory(extra_mb: int) -> None:
    """Set the hard memory limit to this much beyond the current use."""
    _lower(resource.RLIMIT_AS, address_space() + extra_mb * 2**20)


def _lower(kind: int, most: int) -> None:
    """Set a hard limit, which an earlier one may hold below this."""
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def address_space() -> int:
    """Bytes of address space in use; 0 if the system does not report them (macOS). Behind the wall after a call before it."""
    try:
        return int(os.pread(_statm(os.getpid()), 100, 0).split()[0]) * resource.getpagesize()
    except OSError:
        return 0


@functools.cache
def _statm(process: int) -> int:  # a fork has another file
    return os.open(f"/proc/{process}/statm", os.O_RDONLY)


def _hold_files(found: importable.Readable, readable: Sequence[Path], writable: Sequence[Path]) -> None:
    from landlockpy import AccessFS, Ruleset, Scope

    of_file = AccessFS.READ_FILE | AccessFS.EXECUTE  # libraries are mapped as executable
    written = AccessFS.WRITE_FILE | AccessFS.MAKE_REG | AccessFS.REMOVE_FILE | AccessFS.TRUNCATE
    written |= AccessFS.MAKE_DIR | AccessFS.REMOVE_DIR
    # from Linux 6.12 on, Landlock also refuses signals to others, as the filter of calls does everywhere
    with Ruleset(scoped=Scope.SIGNAL | Scope.ABSTRACT_UNIX_SOCKET) as rules:
        for place in [*found.places, *readable]:
            rules.allow_path(place, of_file | AccessFS.READ_DIR if place.is_dir() else of_file)
        for place in found.listed:
            rules.allow_path(place, AccessFS.READ_DIR)
        for place in writable:
            rules.allow_path(place, written | AccessFS.READ_FILE | AccessFS.READ_DIR)
        rules.allow_path("/dev/null", AccessFS.READ_FILE | AccessFS.WRITE_FILE)
        rules.restrict()


def _drop_capabilities() -> None:
    """Drop all capabilities; without them, root cannot raise its limits again. The layout is that of capset(2), version 3."""
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, none) != 0:
        raise OSError(ctypes.get_errno(), "capabilities cannot be dropped")


if __name__ == "__main__":
    runpy.run_module(_PROBE, run_name="__main__")
