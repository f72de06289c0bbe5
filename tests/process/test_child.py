"""A child process with pipes, and what it forked."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from pathlib import Path

import pytest

from motet.process.child import ChildPipes

pytestmark = pytest.mark.tier1

FORKS = """
import os, time
if os.fork() == 0:
    os.setsid()
    print(flush=True)
    time.sleep(3)
    os._exit(0)
time.sleep(60)
"""
"""A child of it in a session of its own has its pipes for a while."""


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
def test_what_was_not_sent_to_a_killed_process_is_dropped(tmp_path: Path) -> None:
    async def main() -> None:
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        pipes = await ChildPipes.start([sys.executable, "-c", FORKS], tmp_path / "log", os.environ, 2**16)
        await pipes.output.readline()
        pipes.input.write(b"x" * 2**20)
        await pipes.kill()
        await asyncio.sleep(0.1)
        assert pipes.input.transport.get_write_buffer_size() == 0
        assert len(os.listdir("/proc/self/fd")) <= before

    asyncio.run(main())
