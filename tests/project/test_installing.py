"""What a person sees while `make` installs: how far pip is, its errors in full, and its exit status."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from motet.kernels.cpu.building import forms_here
from tests.conftest import ROOT
from tests.support.waiting import PATIENCE

_BACKEND = """
import pathlib, time, zipfile

def build_wheel(directory, settings=None, metadata=None):
    until = time.monotonic() + {patience}
    while not pathlib.Path({go!r}).exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    {then}
    with zipfile.ZipFile(pathlib.Path(directory) / "slow-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("slow.py", "")
        wheel.writestr("slow-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: slow\\nVersion: 1\\n")
        wheel.writestr("slow-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("slow-1.dist-info/RECORD", "")
    return "slow-1-py3-none-any.whl"
"""


def _begin(place: Path, output: int, then: str = "pass", *, session: bool = False) -> subprocess.Popen[bytes]:
    """Install a package that is built when `place/go` is there."""
    project = place / "slow"
    project.mkdir()
    (project / "backend.py").write_text(_BACKEND.format(patience=PATIENCE, go=str(place / "go"), then=then))
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "slow"\nversion = "1"\n'
    )
    command = [sys.executable, str(ROOT / "scripts" / "install.py"), "--no-index", "--target", str(place / "there")]
    return subprocess.Popen(
        [*command, str(project)], stdout=output, stderr=subprocess.STDOUT, close_fds=True, start_new_session=session
    )


def _lines(reads: int) -> Iterator[str]:
    with os.fdopen(reads, errors="replace") as file:
        yield from file


def test_without_a_terminal_a_line_says_what_pip_does(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    process = _begin(tmp_path, writes)
    os.close(writes)
    lines = _lines(reads)
    assert re.search(r"\d+ s, .*(slow|metadata)", next(lines), re.IGNORECASE), "what pip printed last"
    (tmp_path / "go").touch()
    last = list(lines)[-1]
    assert "1 packages installed" in last
    assert process.wait() == 0
    assert (tmp_path / "there" / "slow.py").is_file()


def test_errors_are_told_in_full_with_the_exit_status_of_pip(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    reads, writes = os.pipe()
    process = _begin(tmp_path, writes, "raise OSError('no compiler ' + 'x' * 300)")
    os.close(writes)
    text = "".join(_lines(reads))
    assert "no compiler " + "x" * 300 in text
    assert "pip failed" in text.splitlines()[-1]
    assert process.wait() == 1


@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_shows_what_pip_does(target: str) -> None:
    """All that a newcomer calls installs by the script, and nothing holds its lines back."""
    command = ["make", "--dry-run", "--always-make", target]
    recipes = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "python scripts/install.py --constraint constraints.txt --editable" in recipes
    assert "output-sync" not in recipes
    assert not re.search(r"pip install .*--quiet", recipes)
    assert "compileall" not in recipes, "Python compiles what it imports; all that is installed takes 45 s"


@pytest.mark.parametrize("whom", [os.killpg, os.kill], ids=["all of them, as a terminal does", "it alone"])
def test_ctrl_c_ends_it_without_a_traceback(tmp_path: Path, whom: Callable[[int, int], None]) -> None:
    reads, writes = os.pipe()
    process = _begin(tmp_path, writes, session=True)
    os.close(writes)
    lines = _lines(reads)
    next(lines)
    whom(process.pid, signal.SIGINT)
    rest = "".join(lines)
    assert process.wait() == 130
    assert "Traceback" not in rest
    assert "scripts/install.py" not in rest


_COMPILER = """#!/bin/sh
echo called >> {place}/calls
touch {place}/go
for last; do :; done
echo "$@" > "$last"
"""


def _compiler(place: Path) -> dict[str, str]:
    """Write a compiler that counts its calls, and whose libraries name the sources; gives the environment that names it."""
    compiler = place / "compiler"
    compiler.write_text(_COMPILER.format(place=place))
    compiler.chmod(0o700)
    return {**{name: value for name, value in os.environ.items() if name != "MOTET_KERNELS"}, "CXX": str(compiler)}


def _copied(place: Path) -> Path:
    """Copy what installs and what compiles; gives the copy's installing script."""
    for name in ("scripts/install.py", "src/motet/kernels/cpu/building.py"):
        (place / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, place / name)
    shutil.copytree(
        ROOT / "src" / "motet" / "kernels" / "cpu" / "csrc", place / "src" / "motet" / "kernels" / "cpu" / "csrc"
    )
    return place / "scripts" / "install.py"


def test_kernels_are_compiled_while_pip_runs(tmp_path: Path) -> None:
    """Pip builds this package when the compiler has begun."""
    project = tmp_path / "slow"
    project.mkdir()
    backend = _BACKEND.format(patience=PATIENCE, go=str(tmp_path / "go"), then="pass")
    (project / "backend.py").write_text(f"{backend}\n\nbuild_editable = build_wheel\n")
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "slow"\nversion = "1"\n'
    )
    script, environment = _copied(tmp_path), _compiler(tmp_path)
    command = [
        sys.executable,
        str(script),
        "--no-index",
        "--prefix",
        str(tmp_path / "there"),
        "--editable",
        str(project),
    ]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert "libmotet_portable.so" in {
        file.name for file in (tmp_path / "src" / "motet" / "kernels" / "cpu" / "built").iterdir()
    }


def test_a_library_of_these_sources_is_not_compiled_again(tmp_path: Path) -> None:
    script, environment = _copied(tmp_path), _compiler(tmp_path)
    command = [sys.executable, str(script.parents[1] / "src" / "motet" / "kernels" / "cpu" / "building.py"), "--all"]
    for _ in range(2):
        subprocess.run(command, env=environment, check=True)
    forms = (tmp_path / "calls").read_text().splitlines()
    assert len(forms) == len(forms_here())
    sources = sorted((tmp_path / "src" / "motet" / "kernels" / "cpu" / "csrc").glob("*.cpp"))
    sources[0].write_text(sources[0].read_text() + "\n")
    subprocess.run(command, env=environment, check=True)
    assert len((tmp_path / "calls").read_text().splitlines()) == 2 * len(forms)
