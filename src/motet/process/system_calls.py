"""The system calls of a process behind the wall, as a seccomp filter.

A process that starts no programs may make the calls in `ALLOWED` and no others: whatever a later kernel brings is refused too.
Programs (`programs=True`) may make all that are not in `REFUSED`. In both, calls that could reach or find another process are
allowed only with the arguments in `_arguments`.

A call that a filter refuses fails with EPERM. A call that it does not know fails with ENOSYS, as on an older kernel, because C
libraries then try another way. `MOTET_WALL_LOG` shows them. No call ends the process.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyseccomp import SyscallFilter

ALLOWED = frozenset(
    """
 read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek sendfile copy_file_range splice close
 close_range dup dup2 dup3 pipe pipe2 stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2
 readlink readlinkat getdents getdents64 link linkat symlink symlinkat getcwd chdir fchdir rename renameat renameat2
 mkdir mkdirat rmdir unlink unlinkat ftruncate fsync fdatasync fadvise64 readahead umask getxattr lgetxattr fgetxattr
 listxattr llistxattr flistxattr poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait
 epoll_pwait2 eventfd eventfd2 recvfrom recvmsg recvmmsg getsockname getpeername shutdown timerfd_create timerfd_settime
 timerfd_gettime signalfd signalfd4 mmap munmap mprotect mremap msync madvise brk pkey_alloc pkey_free pkey_mprotect
 arch_prctl futex futex_waitv set_robust_list set_tid_address rseq sched_yield sched_get_priority_max
 sched_get_priority_min getcpu rt_sigaction rt_sigprocmask rt_sigpending rt_sigreturn rt_sigsuspend rt_sigtimedwait
 sigaltstack restart_syscall pause alarm getitimer setitimer timer_settime timer_gettime timer_getoverrun timer_delete
 nanosleep time gettimeofday times getpid gettid getpgrp getuid geteuid getgid getegid getresuid getresgid getgroups
 getrlimit setrlimit getrusage getrandom uname sysinfo wait4 waitid exit exit_group
""".split()
)
"""Calls about the process itself, its memory, threads and timers, and about files, which Landlock guards."""

REFUSED = frozenset(
    """
 socket connect bind listen accept accept4 sendmsg sendmmsg io_uring_setup io_uring_enter io_uring_register io_setup
 fork vfork execve execveat ptrace process_vm_readv process_vm_writev kcmp process_madvise pidfd_open pidfd_getfd
 pidfd_send_signal tkill rt_sigqueueinfo rt_tgsigqueueinfo get_robust_list capget ioprio_get
 setpriority ioprio_set sched_setaffinity sched_setscheduler sched_setparam sched_setattr migrate_pages move_pages
 chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat setxattr lsetxattr fsetxattr removexattr lremovexattr
 fremovexattr utime utimes utimensat futimesat truncate openat2 creat inotify_init inotify_init1 inotify_add_watch fanotify_init
 name_to_handle_at open_by_handle_at flock quotactl quotactl_fd sync syncfs mknod mknodat
 fallocate memfd_create memfd_secret shmget shmat shmctl msgget msgsnd msgrcv msgctl semget semop semtimedop semctl
 mq_open mq_unlink add_key request_key keyctl
 mount umount2 pivot_root chroot unshare setns fsopen fsmount move_mount open_tree mount_setattr swapon swapoff
 bpf perf_event_open userfaultfd syslog acct reboot kexec_load kexec_file_load init_module finit_module delete_module
 sethostname setdomainname settimeofday clock_settime adjtimex clock_adjtime ioperm iopl setuid setgid setreuid setregid
 setresuid setresgid setgroups setfsuid setfsgid vhangup nfsservctl lookup_dcookie personality setsid setpgid
""".split()
)
"""Calls that fail with EPERM, whatever their arguments. Landlock does not cover those that change a file's owner, mode, times
or attributes, or that reach other processes of the same user. `setsid` and `setpgid` would leave the group that is
killed at the end."""

_STARTING = frozenset({"fork", "vfork", "execve"})
"""Refused calls that programs may make."""

_LATER = frozenset(range(424, 600)) - {436, 439, 441, 444, 445, 446, 449, 450, 453, 454, 455, 456, 462}
"""Numbers, equal on all architectures, of calls added after 2019 that programs may not make: all but close_range, faccessat2,
epoll_pwait2, Landlock's own, and those for the process's own futexes and memory. Without clone3 the C library takes clone,
whose flags a filter can read."""
_MEMORY = frozenset({449, 453, 454, 455, 456, 462})
"""Of these, the ones for futexes and memory, whose names an older libseccomp does not know."""
_NUMBERS = range(600)
LOGGED = "MOTET_WALL_LOG"
"""The environment variable with which the kernel's audit logs each call that fails, by its number. Only where it is set: a
process could fill the log, and slow down others that are audited. The process itself cannot tell: with SIGSYS instead of an
error, a call while signals are blocked, such as the C library's when it starts a thread, would end the process."""

_EPERM, _ENOSYS = 1, 38
_THREAD = 0x10000
_NOT_CLONED = 0x7E02A000
"""Flags of clone: a namespace, a traced child, or a child of the caller's parent, which would have to wait for it."""
_ASYNC = 0o20000  # os.O_ASYNC is missing from Python

_FCNTL = (
    fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL,
    fcntl.F_SETLK, fcntl.F_SETLKW, fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW,
)  # fmt: skip
"""Commands of fcntl, beside F_SETFL without O_ASYNC. Others send signals (F_SETOWN, F_SETSIG, F_SETLEASE, F_NOTIFY), name the
process that holds a lock (F_GETLK), or use up what a user's pipes may hold (F_SETPIPE_SZ)."""
_IOCTL = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x40049409)
"""TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX and FICLONE. Others send signals (FIOSETOWN, SIOCSPGRP,
FIOASYNC) or write to the terminal (TIOCSTI)."""
_PRCTL = (3, 15, 16, 21, 23, 30, 38, 39, 40, 42, 51, 64, 0x53564D41)
"""PR_SET_NAME, PR_SET_NO_NEW_PRIVS, PR_SET_VMA, and what only asks. Others would let the process outlive its parent
(PR_SET_PDEATHSIG) or hide from it (PR_SET_DUMPABLE)."""
_GETSOCKOPT = (3, 4, 7, 8, 38, 39)
"""SO_TYPE, SO_ERROR, SO_SNDBUF, SO_RCVBUF, SO_PROTOCOL and SO_DOMAIN. SO_PEERCRED names the process at the other end."""
_OF_A_PROCESS = (
    "prlimit64", "getpgid", "getsid", "sched_getaffinity", "sched_getscheduler", "sched_getparam", "sched_getattr",
    "sched_rr_get_interval",
)  # fmt: skip
_OF_A_CLOCK = ("clock_gettime", "clock_getres", "clock_nanosleep", "timer_create")
"""Calls whose first argument is a clock; a negative one is that of a process."""


@dataclass(frozen=True)
class Argument:
    """A condition on one argument of a call: its bits in `mask` have this value. The kernel reads most arguments as 32 bits."""

    place: int
    value: int
    mask: int = 0xFFFFFFFF


Ways = Sequence[tuple[Argument, ...]]
"""A call is allowed if all conditions of one entry hold."""


def _one_of(place: int, values: Iterable[int]) -> Ways:
    return [(Argument(place, value),) for value in values]


def _arguments(programs: bool, process: int, threads: bool = True) -> Mapping[str, Ways]:
    """The calls that are allowed with certain arguments alone, and no way if with none; `process` is the id of the caller.

    A number of another process is refused whether or not there is such a process.
    """
    thread = [(Argument(0, _THREAD, _THREAD | _NOT_CLONED),)]
    truncating, mode = os.O_TRUNC, os.O_ACCMODE  # Landlock sees a truncation by a reader from Linux 6.2 on

    def opening(place: int) -> Ways:
        writing = [(Argument(place, how, mode),) for how in (os.O_WRONLY, os.O_RDWR)]
        return [(Argument(place, 0, truncating),), *writing]

    return {
        "clone": [(Argument(0, 0, _NOT_CLONED),)] if programs else thread if threads else [],
        "open": opening(1),
        "openat": opening(2),
        "fcntl": [*_one_of(1, _FCNTL), (Argument(1, fcntl.F_SETFL), Argument(2, 0, _ASYNC))],
        "ioctl": _one_of(1, _IOCTL),
        "prctl": _one_of(0, _PRCTL),
        "socketpair": _one_of(0, (socket.AF_UNIX,)),
        "getsockopt": [(Argument(1, socket.SOL_SOCKET), *way) for way in _one_of(2, _GETSOCKOPT)],
        "sendto": [(Argument(4, 0, 2**64 - 1),)],  # without an address
        "kill": _one_of(0, (process,)),
        "tgkill": _one_of(0, (process,)),
        "getpriority": _one_of(1, (0, process)),
        **{name: _one_of(0, (0, process)) for name in _OF_A_PROCESS},
        **{name: [(Argument(0, 0, 1 << 31),)] for name in _OF_A_CLOCK},
    }


def numbers_of(names: Iterable[str]) -> set[int]:
    """The numbers of calls on this machine's architecture, without those that it does not have."""
    from pyseccomp import resolve_syscall, system_arch

    return {number for name in names if (number := resolve_syscall(system_arch(), name)) >= 0}


def filter_calls(programs: bool, threads: bool = True) -> None:
    """Filter this process's calls, for good. `programs`: it starts programs, which are filtered too; `threads`: or threads."""
    _rules(programs, threads).load()


def _rules(programs: bool, threads: bool = True) -> SyscallFilter:
    from pyseccomp import ALLOW, ERRNO, GT, MASKED_EQ, Arg, Attr, SyscallFilter

    process = os.getpid()
    arguments = _arguments(programs, process, threads)
    bounded = {number: ways for name, ways in arguments.items() for number in numbers_of([name])}
    if programs:
        unknown = set(_LATER)
        allowed = set(_NUMBERS) - unknown - numbers_of(REFUSED - _STARTING)
    else:
        allowed = numbers_of(ALLOWED) | _MEMORY
        unknown = set(_NUMBERS) - allowed - numbers_of(REFUSED)
    rules = SyscallFilter(ERRNO(_EPERM))
    rules.set_attr(Attr.ACT_BADARCH, ERRNO(_ENOSYS))  # 32-bit programs, and numbers of x32
    rules.set_attr(Attr.CTL_LOG, LOGGED in os.environ)
    for number in allowed - bounded.keys():
        rules.add_rule(ALLOW, number)
    for number in unknown - bounded.keys():
        rules.add_rule(ERRNO(_ENOSYS), number)
    for number, ways in bounded.items():
        for way in ways:
            rules.add_rule(ALLOW, number, *(Arg(bound.place, MASKED_EQ, bound.mask, bound.value) for bound in way))
    # the C library asks for the processors of a thread to learn of its stack, and goes on without an answer
    rules.add_rule(ERRNO(_ENOSYS), "sched_getaffinity", Arg(0, GT, process))
    return rules
