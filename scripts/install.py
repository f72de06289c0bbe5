"""Installs packages with pip and tells how far it is: one changing line on a terminal, elsewhere a line every ten seconds.

    python scripts/install.py --constraint constraints.txt '.[serve]'

The environment is that of the interpreter. Errors are printed in full, and pip's exit status is kept. With `--editable` the
C++ kernels that this processor may select are compiled while packages download.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

SECONDS = 10
KERNELS = Path(__file__).resolve().parents[1] / "src" / "motet" / "kernels" / "cpu" / "building.py"


class Progress:
    """What pip does now, from what it prints."""

    def __init__(self) -> None:
        self.name, self.began = Path(sys.prefix).name, time.monotonic()
        self.terminal = sys.stdout.isatty()
        self.doing, self._wanted, self._before = "pip starts", 0, 0
        self._lock = threading.Lock()

    def read(self, lines: Iterable[str]) -> None:
        """Follow what pip prints of its progress."""
        for line in map(str.strip, lines):
            if line.startswith("Installing collected packages:"):
                self._before, self._wanted = _installed(), line.count(",") + 1
            elif not line.startswith(("Requirement already", "Looking in")) and line:
                self.doing = line.partition(" (from ")[0]

    def tell(self, errors: Iterable[str]) -> None:
        """Print errors and warnings."""
        for line in errors:
            with self._lock:
                self._erase()
                print(line, end="", file=sys.stderr, flush=True)

    def show(self) -> None:
        """Print the present state."""
        done = min(max(_installed() - self._before, 0), self._wanted)
        doing = f"installing package {done} of {self._wanted}" if self._wanted else self.doing
        line = f"{self.name}: {time.monotonic() - self.began:.0f} s, {doing}"
        with self._lock:
            self._erase()
            cut = line[: shutil.get_terminal_size().columns - 1] if self.terminal else line
            print(cut, end="" if self.terminal else "\n", flush=True)

    def end(self, status: int) -> None:
        """Print how it ended."""
        self._erase()
        how = f"{self._wanted} packages installed" if status == 0 else "pip failed"
        print(f"{self.name}: {time.monotonic() - self.began:.0f} s, {how}", flush=True)

    def _erase(self) -> None:
        if self.terminal:
            print("\r\033[K", end="", flush=True)


def _installed() -> int:
    return sum(1 for _ in Path(sysconfig.get_path("purelib")).glob("*.dist-info"))


def install(arguments: Sequence[str]) -> int:
    """Run pip with these arguments; gives its exit status."""
    if "--editable" not in arguments or "MOTET_KERNELS" in os.environ:
        return _install(arguments, dict(os.environ))
    status = 1
    with subprocess.Popen([sys.executable, str(KERNELS)], start_new_session=True) as compiler:
        try:
            status = _install(arguments, {**os.environ, "MOTET_KERNELS": "skip"})
        finally:
            if status:  # also Ctrl-C
                os.killpg(compiler.pid, signal.SIGTERM)
        if compiler.poll() is None:
            print("compiling Motet's CPU kernels", flush=True)
    return status


def _install(arguments: Sequence[str], environment: dict[str, str]) -> int:
    command = [sys.executable, "-m", "pip", "install", "--no-compile", "--progress-bar", "off", *arguments]
    progress = Progress()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", env=environment
    ) as pip:
        followed: list[tuple[object, IO[str] | None]] = [(progress.read, pip.stdout), (progress.tell, pip.stderr)]
        readers = [threading.Thread(target=follow, args=(lines,)) for follow, lines in followed]  # type: ignore[arg-type]
        for reader in readers:
            reader.start()
        try:
            while True:
                try:
                    pip.wait(1 if progress.terminal else SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    progress.show()
        except KeyboardInterrupt:
            pip.terminate()  # also where the signal was for this process alone
            raise
        finally:
            for reader in readers:  # which read until pip has ended; leaving the block closes what they read
                reader.join()
    progress.end(pip.returncode)
    return pip.returncode


if __name__ == "__main__":
    try:
        sys.exit(install(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
