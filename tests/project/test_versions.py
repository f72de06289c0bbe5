"""The oldest and the newest versions of Python, torch and transformers that Motet is for, with the tests that depend on them.

`make check` runs everything on the pinned versions, which are the newest of torch and transformers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOOSE = ("huggingface_hub", "setuptools", "triton")
"""Packages of which each version of torch and transformers wants another."""
OLDEST = {"torch": "2.11.0", "transformers": "5.17.0", "numpy": "2.3.5"}
"""The interpreter of Triton 3.6, which torch 2.11 wants, fails with numpy 2.4."""
NEWEST = {"torch": "2.13.0", "transformers": "5.23.0"}
MISSING = (
    *("lfm2", "those_of_stock[delta", "gemma-architecture", "peft_loads_nothing", "kernels_that_are_installed"),
    *("without_a_slot", "[Q4_1]", "[gguf_file-"),
)
"""Tests that fail with transformers 5.17: LFM2 is refused there, GGUF has fewer types, the delta rule another call."""
OF_TORCH = """
model/test_base.py model/test_expert_adapters.py model/test_four_bits.py model/test_gguf.py model/test_kernels.py
model/test_mixers.py model/test_peft_io.py kernels/cpu/test_native.py kernels/cuda/test_math.py
training/test_trainer.py chat/test_chat.py
"""
"""Tests that call what torch, transformers, peft and Triton change."""
OF_PYTHON = "core config kernels/cpu/test_native.py"


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
    ("version", "pins", "tests", "missing"),
    [
        pytest.param("3.11", OLDEST, OF_TORCH, MISSING, id="oldest"),
        pytest.param("3.13", NEWEST, OF_PYTHON, (), id="newest"),
    ],
)
def test_the_tests_that_depend_on_them_pass(
    tmp_path: Path, version: str, pins: dict[str, str], tests: str, missing: tuple[str, ...]
) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"needs Python {version}")
    copy = tmp_path / "copy"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    lines = [line for line in lines if line.partition("==")[0] not in (*pins, *LOOSE)]
    (copy / "constraints.txt").write_text("\n".join([*lines, *(f"{name}=={pin}" for name, pin in pins.items())]))
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True)
    inside = str(tmp_path / "venv" / "bin" / "python")
    packages = [inside, "-m", "pip", "install", "--quiet", "--no-compile", "--constraint", "constraints.txt"]
    packages += ["--editable"]
    subprocess.run([*packages, ".[serve,reasoning,dev]"], cwd=copy, check=True, timeout=1800)
    command = [inside, "-m", "pytest", "-q"]
    command += ["-W", "ignore:Conversion of an array with ndim:DeprecationWarning"]  # Triton 3.6
    command += ["-k", " and ".join(f"not {one}" for one in missing)] if missing else []
    files = [f"tests/{name}" for name in tests.split()]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CI")}
    done = subprocess.run(
        [*command, *files], cwd=copy, env=environment, capture_output=True, text=True, check=False, timeout=7200
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    print(done.stdout.splitlines()[-1])
