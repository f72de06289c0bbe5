"""Files that hostile tenants send as rewards; a service runs each behind the wall, in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping

WAYS_OUT = '''
"""Does what the answer names, and says what came of it: the attempts of `motet doctor`, by code that knows Motet."""
import os, socket
from motet.process import breaking_out

class Outside(breaking_out._Outside):
    def __init__(self, process, group):
        self.process, self.group = process, group
        self.place, self.file = os.open(os.path.dirname(os.__file__), os.O_RDONLY), os.open(os.__file__, os.O_RDONLY)
        self.pipe, self.socket = os.pipe(), socket.socketpair()
        self.terminal = self.pipe[0]
        self._library = breaking_out.ctypes.CDLL(None, use_errno=True)

def attempts(process, group):
    there = Outside(process, group)
    parts = breaking_out._on_files, breaking_out._on_signals, breaking_out._on_processes
    return {**{k: v for part in parts for k, v in part(there).items()}, "taking memory": lambda: breaking_out._set_aside(8)}

def reward(problem, completion, process, group):
    never = breaking_out.wall.NEVER_HELD
    outcome = breaking_out.outcome_of(attempts(process, group)[completion], never.get(completion, "was possible"))
    assert outcome in ("held", never.get(completion)), outcome
    return 1.0
'''
"""`args` name another process and its group."""


def one(statements: str, modules: str = "os", parameters: str = "*args") -> str:
    """A file whose function does this, and then gives 1."""
    body = statements.replace("\n", "\n    ")
    return f"import {modules}\n\ndef reward(problem, completion, {parameters}):\n    {body}\n    return 1.0\n"


SPIN = "while True: pass"
LIFTED = one(
    "signal.setitimer(signal.ITIMER_PROF, 0)\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
    "resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY,) * 2)\n" + SPIN,
    "resource, signal",
)
"""Computes for ever, without the limits that its process has put upon itself."""
BETWEEN = """
import os, resource, signal

def spin(*_):
    signal.setitimer(signal.ITIMER_PROF, 0)
    while True: pass

def reward(problem, completion):
    if completion == "spin":
        signal.signal(signal.SIGALRM, spin)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    return float(os.getpid())
"""
"""Computes for ever when nobody has asked it anything."""
AT_ONCE = """
import asyncio, os

async def reward(problem, completion):
    await asyncio.sleep(0.3)
    return float(os.getpid())
"""

PRINTS = "for _ in range(99): os.write(2, b'x' * (1 << 20))"
WAYS: Mapping[str, tuple[str, str]] = {
    "a thread": ("threading.Thread(target=print).start()", "can't start new thread"),
    "a thread of C": ("_thread.start_new_thread(print, ())", "can't start new thread"),
    "a pool": ("concurrent.futures.ThreadPoolExecutor(1).submit(print)", "can't start new thread"),
    "a program": ("subprocess.run(['/bin/true'])", "Permission"),
    "a file of another": ("open(theirs)", "Permission denied"),
    "its directory": ("os.listdir(os.path.dirname(theirs))", "Permission denied"),
    "a link to it": ("os.link(theirs, theirs + '.link')", "Permission denied|cross-device"),
    "memory of its parent": ("open(f'/proc/{process}/mem', 'rb')", "Permission denied"),
    "files of its parent": ("os.listdir(f'/proc/{process}/fd')", "Permission denied"),
    "its own descriptors": ("os.listdir('/proc/self/fd')", "Permission denied"),
    "a debugger": ("assert ctypes.CDLL(None).ptrace(16, process, 0, 0) == 0", "AssertionError"),
    "a secret of the environment": ("os.environ['MOTET_SECRET_KEY']", "KeyError"),
    "a descriptor over a socket": ("socket.send_fds(socket.socketpair()[0], [b'x'], [0])", "not permitted"),
    "more memory": ("resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)", "not allowed to raise"),
    "more of the processors": ("os.nice(-1)", "not permitted|Permission"),
    "a module beside": ("__import__('beside')", "No module named 'beside'"),
    "a log without end": (PRINTS, "File too large"),
}
"""Further ways out, and why each fails."""


def ways() -> str:
    """A file whose function takes the way that the answer names."""
    names = "_thread, concurrent.futures, ctypes, os, resource, socket, subprocess, threading"
    each = "".join(f"    if completion == {name!r}:\n        {statement}\n" for name, (statement, _) in WAYS.items())
    return f"import {names}\n\ndef reward(problem, completion, theirs, process):\n{each}    return 1.0\n"
