"""Compiles the C++ kernels: one library per form (instruction set), from the same sources.

Imports nothing else of Motet, so that `pip install` can run it before Motet is installed, and `make` while packages download:

    python src/motet/kernels/cpu/building.py          # the forms that this processor may select
    python src/motet/kernels/cpu/building.py --all    # every form: tests and wheels need them
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"

FLAGS = (
    "-std=c++17 -O2 -fPIC -shared -pthread -fvisibility=hidden -fvisibility-inlines-hidden -ffp-contract=off "
    "-Wall -Wextra -Wno-maybe-uninitialized -Wno-unknown-warning-option"
).split()

_AVX512 = ("-DMOTET_AVX512", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma")
FORMS: dict[str, tuple[str, ...]] = {
    "amx": (*_AVX512, "-DMOTET_AMX", "-mamx-tile", "-mamx-bf16"),
    "avx512": _AVX512,
    "avx2": ("-DMOTET_AVX2", "-mavx2", "-mfma"),
    "portable": (),
}
"""Compiler flags of each form, the fastest first. Other processors than x86-64 have `portable` only."""

_UNITS = {"amx": "amx_bf16", "avx512": "avx512dq", "avx2": "fma"}
"""What Linux calls the instructions of a form, in /proc/cpuinfo."""

SECONDS = 600
"""Time limit for compiling one form."""


class CannotBuild(Exception):
    """There is no compiler, or it failed; the message contains the end of its output."""


def compiler() -> list[str]:
    """The command of the C++ compiler: `$CXX`, or the first of g++, clang++ and c++ that is installed."""
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named)
    for name in ("g++", "clang++", "c++"):
        installed = shutil.which(name)
        if installed:
            return [installed]
    raise CannotBuild("no C++ compiler was found: install g++ or clang++, or name one in CXX")


def forms_here() -> list[str]:
    """Forms that can be compiled for this machine, the fastest first."""
    intel = platform.machine().lower() in {"x86_64", "amd64"}
    return list(FORMS) if intel else ["portable"]


def forms_of_processor() -> list[str]:
    """Forms that this processor may select, the fastest first: with AVX-512 it never selects AVX2; on an unknown one all."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("flags")[2].partition("\n")[0].split()
    except OSError:
        return forms_here()
    forms = [form for form in forms_here() if form not in _UNITS or _UNITS[form] in flags]
    return [form for form in forms if form != "avx2" or "avx512" not in forms]


def file_name(form: str) -> str:
    """File name of a form's library."""
    return f"libmotet_{form}.so"


def fingerprint() -> str:
    """Hash of sources and flags, 16 hex digits; a library with another one is out of date."""
    digest = hashlib.sha256(repr((FLAGS, FORMS)).encode())
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.hpp")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def build(directory: Path, forms: list[str] | None = None, extra: tuple[str, ...] = ()) -> dict[str, str | None]:
    """Compile forms into a directory, each file atomically. Returns an error message for each form, or None.

    A library of these sources and flags that is there already is left as it is, unless there are extra flags.

    Raises:
        CannotBuild: there is no compiler, or the portable form, the reference for all others, did not compile.
    """
    command = compiler()
    directory.mkdir(parents=True, exist_ok=True)
    forms = forms or forms_here()

    def build(form: str) -> str | None:
        try:
            _build_one(command, directory, form, extra)
        except CannotBuild as error:
            return str(error)
        return None

    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        made = dict(zip(forms, pool.map(build, forms), strict=True))
    failed = made.get("portable")
    if failed is not None:
        raise CannotBuild(failed)
    return made


def _build_one(command: list[str], directory: Path, form: str, extra: tuple[str, ...]) -> None:
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    target = directory / file_name(form)
    if not extra and target.exists() and fingerprint().encode() in target.read_bytes():
        return
    define = f'-DMOTET_FINGERPRINT="{fingerprint()}"'
    with tempfile.TemporaryDirectory(dir=directory) as made:
        output = Path(made) / target.name
        call = [*command, *FLAGS, *FORMS[form], *extra, define, *sources, "-o", str(output)]
        try:
            done = subprocess.run(call, capture_output=True, text=True, timeout=SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotBuild(f"{command[0]} did not compile the {form} form: {error}") from error
        if done.returncode:
            raise CannotBuild(f"{command[0]} did not compile the {form} form:\n{done.stderr.strip()[-2000:]}")
        output.replace(target)


if __name__ == "__main__":
    try:
        MADE = build(Path(__file__).parent / "built", None if "--all" in sys.argv else forms_of_processor())
    except CannotBuild as error:
        MADE = {"portable": str(error)}
    for message in filter(None, MADE.values()):
        print(f"motet: its own CPU kernels are missing: {message}", file=sys.stderr)
