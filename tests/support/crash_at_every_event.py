"""Kill a run with -9 at one file-system event after another, go on with the same command, and compare bytes.

A script of its own, because it forks: `python -m tests.support.crash_at_every_event DIRECTORY STRIDE`. An audit hook
counts every opening for writing, rename, link, mkdir, removal and truncation inside the run directory, and kills the
process at the N-th.
Prints how many events there were; ends with 1 and the first difference where bytes are not those of an undisturbed run.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from motet.commands.verify import verify
from tests.support.fake_run import Setting, job, run_jobs

EVENTS = {"os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}
JOBS = [
    job("steady", steps=3, checkpoint={"keep": 1}),
    job("lagging", steps=4, algorithm={"max_off_policy_steps": 2}, checkpoint={"every": 2}),
    job("early", steps=6, stop_when={"kl_above": 1e-9}, checkpoint={"every": 4}),
]


def contents(directory: Path) -> dict[str, bytes]:
    """Every file whose bytes must be those of an undisturbed run."""
    wanted = ("metrics.jsonl", "adapter_model.safetensors", "optimizer.safetensors", "state.json")
    files = [file for file in directory.rglob("*") if file.name in wanted or file.parent.name == "rollouts"]
    assert not [file for file in directory.glob("*/*/.tmp-*") if file.exists()]
    timeless = [file for file in files if file.name != "state.json"]
    return {str(file.relative_to(directory)): file.read_bytes() for file in timeless}


def in_child(directory: Path, kill_at: int | None) -> tuple[int, int]:
    """Run the jobs in a forked process; returns its wait status and how many events it counted."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        count = 0

        def hook(event: str, args: tuple[Any, ...]) -> None:
            nonlocal count
            writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wa+")
            if not (event in EVENTS or writes) or str(directory) not in str(args[0]):
                return
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        run_jobs(directory, JOBS, Setting(holdout=4))
        os.write(writing, str(count).encode())
        os._exit(0)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    told = os.read(reading, 20)
    os.close(reading)
    return status, int(told or 0)


def main() -> None:
    """Kill at every `stride`-th event."""
    scratch, stride = Path(sys.argv[1]), int(sys.argv[2])
    status, n_events = in_child(scratch / "whole", None)
    assert status == 0, status
    expected = contents(scratch / "whole")
    killed = 0
    for event in range(1, n_events + 1, stride):
        directory = scratch / f"killed-{event}"
        status, _ = in_child(directory, event)
        killed += os.WIFSIGNALED(status)
        if any(directory.glob("*/state/[0-9]*")) and verify(directory):
            print(f"killed at event {event} of {n_events}: what a crash leaves passes for damage")
            sys.exit(1)
        for draft in directory.glob(".tmp-*"):
            os.utime(draft, (0, 0))  # a younger one might belong to a process that works
        status, _ = in_child(directory, None)
        found = contents(directory) if status == 0 else {}
        if found != expected:
            names = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
            print(f"killed at event {event} of {n_events}: resumed with status {status}; not the same: {names[:5]}")
            sys.exit(1)
    print(f"{n_events} events, killed at {killed}")


if __name__ == "__main__":
    main()
