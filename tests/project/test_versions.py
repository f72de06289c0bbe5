"""The oldest and the newest versions of Python, torch and transformers that Motet is for, with the tests that depend on them.

`make test` runs everything on the pinned versions.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = "algorithms chat commands config core model native process rollout running runtime tasks tracking training view"


def interpreter(version: str) -> Path | None:
    """A Python of this version, as `python3.13` or of pyenv."""
    found = shutil.which(f"python{version}")
    for path in (*([Path(found)] if found else []), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")):
        asked = subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True, check=False)
        if asked.returncode == 0:
            return path
    return None


@pytest.mark.soak
@pytest.mark.parametrize(
    ("version", "torch", "transformers"),
    [
        pytest.param("3.11", "2.11.0", "5.17.0", id="oldest"),
        pytest.param("3.13", "2.13.0", "5.23.0", id="newest"),
    ],
)
def test_the_rooms_that_depend_on_them_pass(tmp_path: Path, version: str, torch: str, transformers: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"needs Python {version}")
    copy, pins = tmp_path / "copy", {"torch": torch, "transformers": transformers}
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    lines = [line for line in lines if line.partition("==")[0] not in pins]
    (copy / "constraints.txt").write_text("\n".join([*lines, *(f"{name}=={pin}" for name, pin in pins.items())]))
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True)
    inside = str(tmp_path / "venv" / "bin" / "python")
    packages = [inside, "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt", "--editable"]
    subprocess.run([*packages, ".[serve,reasoning,dev]"], cwd=copy, check=True, timeout=1800)
    command = [inside, "-m", "pytest", "-q", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
    rooms = [f"tests/{room}" for room in ROOMS.split() if (copy / "tests" / room).is_dir()]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CI")}
    done = subprocess.run(
        [*command, *rooms], cwd=copy, env=environment, capture_output=True, text=True, check=False, timeout=7200
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
