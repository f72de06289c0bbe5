"""The wall around a process that reads a model's answers or other people's data: it calls `enter` before it reads them.

Behind the wall a process has no network, starts no process, and can neither signal others nor change their limits. It can read
Python's own files and the given ones, write only the given ones, and never raise its hard memory limit. Landlock protects files
(Linux 5.13), seccomp the rest; both also apply to root, and neither needs a privilege.

`python -m motet.process.wall` tries to break out; `probe` runs it to learn what holds on this machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import logging
import os
import resource
import signal
import site
import socket
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import gettempdir, mkdtemp

from motet.core.errors import WallError

_log = logging.getLogger(__name__)
PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_MOST_WRITTEN = 1 << 28

_SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/zero")
_EPERM, _ENOSYS = 1, 38
_CLONE_THREAD = 0x10000
_PROBE_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1

_REFUSED = """
 socket connect bind listen accept accept4 sendmsg sendmmsg io_uring_setup io_uring_enter io_uring_register
 fork vfork execve execveat ptrace process_vm_readv process_vm_writev kcmp process_madvise pidfd_open pidfd_getfd
 pidfd_send_signal tkill rt_sigqueueinfo rt_tgsigqueueinfo
 setpriority ioprio_set sched_setaffinity sched_setscheduler sched_setparam sched_setattr migrate_pages move_pages
 chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat setxattr lsetxattr fsetxattr removexattr lremovexattr
 fremovexattr utime utimes utimensat futimesat truncate openat2 creat inotify_init inotify_init1 inotify_add_watch fanotify_init
 name_to_handle_at open_by_handle_at flock quotactl quotactl_fd
 fallocate memfd_create memfd_secret shmget shmat shmctl msgget msgsnd semget semop mq_open add_key request_key keyctl
 mount umount2 pivot_root chroot unshare setns fsopen fsmount move_mount open_tree mount_setattr swapon swapoff
 bpf perf_event_open userfaultfd syslog acct reboot kexec_load kexec_file_load init_module finit_module delete_module
 sethostname setdomainname settimeofday clock_settime adjtimex clock_adjtime ioperm iopl setuid setgid setreuid setregid
 setresuid setresgid setgroups setfsuid setfsgid vhangup nfsservctl lookup_dcookie personality
""".split()
"""System calls that fail with EPERM, whatever their arguments. Landlock does not cover those that change a file's owner, mode,
times or attributes, or that reach other processes of the same user."""

_STARTING = frozenset({"fork", "vfork", "execve"})
"""System calls that start programs."""
_LEAVING = frozenset({"setsid", "setpgid"})
"""System calls with which a program would leave its process group, and so survive when the group is killed."""

_LATER = frozenset(range(424, 600)) - {436, 439, 441, 444, 445, 446, 449, 450, 451, 453, 454, 455, 456, 462}
"""Numbers, equal on all architectures, of system calls added after 2019 that fail behind the wall: all but close_range,
faccessat2, epoll_pwait2, Landlock's own, and those for the process's own futexes and memory. Without clone3 the C library takes
clone, whose flags a filter can read."""


HOMES = ("MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "NUMBA_CACHE_DIR", "HF_HOME")
"""The directory for files that libraries create for themselves."""


def missing() -> str:
    """Why this machine has no wall; empty if it has one."""
    broken = [f"{what}: {outcome}" for what, outcome in probe().items() if outcome != "held"]
    return "; ".join(broken)


@functools.cache
def probe() -> Mapping[str, str]:
    """The attempts of a process behind the wall to break out; for each `held`, or what happened instead."""
    if sys.platform != "linux":
        return {"the wall": f"{sys.platform} has none; it takes Linux with Landlock and seccomp"}
    try:
        done = subprocess.run(
            command(__name__), env=environment(), cwd="/", capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )  # fmt: skip
        outcomes: dict[str, str] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"the wall": f"a process behind it did not answer within {_PROBE_SECONDS:g} s"}
    except ValueError:
        return {"the wall": f"a process behind it ended with status {done.returncode}: {last_line(done.stderr)}"}
    return outcomes


def command(module: str, *arguments: str) -> list[str]:
    """The command that starts one of Motet's own processes; files in the working directory do not affect it."""
    return [sys.executable, "-P", "-m", module, *arguments]


def call_apart(
    module: str,
    *arguments: str,
    given: str = "",
    seconds: float | None = None,
    environ: Mapping[str, str] | None = None,
) -> str:
    """The output of `python -m module` for this input; by default in the environment of a walled process.

    Raises:
        TimeoutError: it took more seconds by the clock.
        ChildProcessError: it printed nothing, or failed; the text is its last line.
    """
    environ = environment() if environ is None else environ
    try:
        done = subprocess.run(
            command(module, *arguments), input=given, env=environ, capture_output=True, timeout=seconds, check=False,
            text=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"no answer within {seconds:g} s") from error
    if done.returncode != 0 or not done.stdout:
        _log.warning("%s failed (exit status %d):\n%s", module, done.returncode, done.stderr[-2000:])
        raise ChildProcessError(last_line(done.stderr))
    return done.stdout


def environment(**more: str) -> dict[str, str]:
    """The environment of a process behind the wall: no variables of this process, and no threads of numpy.

    Libraries look for a directory of their own to write to, and matplotlib does not load without one.
    """
    homes = dict.fromkeys(HOMES, _home())
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    fixed = {"PYTHONPATH": str(PACKAGE_ROOT), "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8", "PATH": ""}
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


def last_line(said: str) -> str:
    """The last line that one of Motet's processes printed; for a traceback, the error without its place."""
    lines = said.strip().splitlines()
    return lines[-1].strip()[-300:] if lines else "it said nothing"


def check_outside(directory: Path) -> None:
    """Raise WallError if a directory's files can be read from behind the wall."""
    for root in _readable():
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
    where_possible: bool = False,
) -> None:
    """Go behind the wall, for good. The process must have no second thread yet.

    Args:
        memory_mb: address space beyond the current use, as a hard limit.
        readable: files and directories to read, besides Python's own.
        writable: directories in which files may be created.
        most_written: size limit of each file in bytes, also of files that are open already, such as a log.
        programs: allow it to start programs, which are behind the wall too and stay in its process group.
        where_possible: continue with limits only if this machine has no wall.

    Raises:
        WallError: it cannot be put up; the process must not continue.
    """
    limit_memory(memory_mb)
    for kind, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, most_written), (resource.RLIMIT_NOFILE, 256)):
        resource.setrlimit(kind, (most, most))
    try:
        threads = len(os.listdir("/proc/self/task"))
        if threads != 1:
            raise WallError(f"no wall can be put up: the process has {threads} threads already")
        _hold_files(readable, writable)
        _drop_capabilities()
        _filter_calls(programs)
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
    most = address_space() + extra_mb * 2**20
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def address_space() -> int:
    """Bytes of address space in use; 0 if the system does not report them (macOS)."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _readable() -> list[Path]:
    """The directories of Python's own files and the system's libraries, with links resolved."""
    places: list[str | Path] = [*_SYSTEM, sys.prefix, sys.base_prefix, PACKAGE_ROOT, *site.getsitepackages()]
    places += [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return sorted({Path(place).resolve() for place in places if Path(place).exists()})


def _hold_files(readable: Sequence[Path], writable: Sequence[Path]) -> None:
    from landlockpy import AccessFS, Ruleset

    of_file = AccessFS.READ_FILE | AccessFS.EXECUTE  # libraries are mapped as executable
    written = AccessFS.WRITE_FILE | AccessFS.MAKE_REG | AccessFS.REMOVE_FILE | AccessFS.TRUNCATE
    written |= AccessFS.MAKE_DIR | AccessFS.REMOVE_DIR
    with Ruleset() as rules:
        for place in [*_readable(), *readable]:
            rules.allow_path(place, of_file | AccessFS.READ_DIR if place.is_dir() else of_file)
        for place in writable:
            rules.allow_path(place, written | AccessFS.READ_FILE | AccessFS.READ_DIR)
        rules.allow_path("/dev/null", AccessFS.READ_FILE | AccessFS.WRITE_FILE)
        rules.restrict()


def _drop_capabilities() -> None:
    """Drop all capabilities; without them, root cannot raise its limits again. The layout is that of capset(2), version 3."""
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, none) != 0:
        raise OSError(ctypes.get_errno(), "capabilities cannot be dropped")


def _filter_calls(programs: bool) -> None:
    from pyseccomp import ALLOW, ERRNO, GT, LT, MASKED_EQ, NE, Arg, SyscallFilter, resolve_syscall, system_arch

    rules = SyscallFilter(ALLOW)
    refused = {*_REFUSED, *_LEAVING} - _STARTING if programs else _REFUSED
    numbers = {number for name in refused if (number := resolve_syscall(system_arch(), name)) >= 0}
    for number in numbers - _LATER:
        rules.add_rule(ERRNO(_EPERM), number)
    for number in _LATER:
        rules.add_rule(ERRNO(_ENOSYS), number)
    if not programs:
        rules.add_rule(ERRNO(_EPERM), "clone", Arg(0, MASKED_EQ, _CLONE_THREAD, 0))
    rules.add_rule(ERRNO(_EPERM), "sendto", Arg(4, NE, 0))  # to an address
    for own in (LT, GT):  # to others
        rules.add_rule(ERRNO(_EPERM), "kill", Arg(0, own, os.getpid()))
        rules.add_rule(ERRNO(_EPERM), "tgkill", Arg(0, own, os.getpid()))
    rules.add_rule(ERRNO(_EPERM), "prlimit64", Arg(0, NE, 0))
    for name, place in (("open", 1), ("openat", 2)):  # Landlock sees this from Linux 6.2 on
        if resolve_syscall(system_arch(), name) >= 0:
            rules.add_rule(
                ERRNO(_EPERM), name, Arg(place, MASKED_EQ, os.O_TRUNC | os.O_ACCMODE, os.O_TRUNC | os.O_RDONLY)
            )
    rules.load()


# --- trying to break out ------------------------------------------------------------------------------------------------------


def _set_aside(gigabytes: int) -> None:
    """Raise the memory limit as far as possible, then allocate more than that."""
    limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, limits)
    bytearray(gigabytes << 30)


def _attempts() -> Mapping[str, Callable[[], object]]:
    """The attempts that must fail, in words that fit before `was possible`."""
    other = os.getppid()
    return {
        "reading a file": lambda: open("/etc/passwd", "rb").close(),
        "listing a directory": lambda: os.listdir("/"),
        "reading another process": lambda: open(f"/proc/{other}/environ", "rb").close(),
        "writing a file": lambda: open(f"/tmp/motet-wall-{os.getpid()}", "wb").close(),
        "changing a file's mode": lambda: os.chmod(__file__, os.stat(__file__).st_mode),
        "opening a socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close(),
        "opening a local socket": lambda: socket.socket(socket.AF_UNIX).close(),
        "starting a process": os.fork,
        "running a program": lambda: os.execv("/bin/true", ["true"]),
        "signalling a process": lambda: os.kill(other, 0),
        "limiting a process": lambda: resource.prlimit(other, resource.RLIMIT_CORE),
        "taking memory": lambda: _set_aside(8),
    }


def _break_out() -> dict[str, str]:
    outcomes = {}
    for what, attempt in _attempts().items():
        outcomes[what] = "held"
        try:
            attempt()
            outcomes[what] = "was possible"
        except (PermissionError, MemoryError):
            pass
        except OSError as error:
            outcomes[what] = f"failed for another reason: {error}"
    return outcomes


if __name__ == "__main__":
    try:
        enter(memory_mb=1024)
        json.dump(_break_out(), sys.stdout)
    except WallError as error:
        json.dump({"the wall": str(error)}, sys.stdout)
