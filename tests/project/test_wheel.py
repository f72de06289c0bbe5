"""What is installed from a wheel, without a clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import motet

ROOT = Path(__file__).resolve().parents[2]


def build(directory: Path, *, kernels: bool) -> Path:
    """The wheel of this tree, with compiled kernels or without."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    copy = directory / "copy"  # building writes beside the sources
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "built"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    environment = {**os.environ, **({} if kernels else {"MOTET_KERNELS": "skip"})}
    subprocess.run([*pip, "--wheel-dir", str(directory), str(copy)], env=environment, check=True, timeout=300)
    (wheel,) = directory.glob("*.whl")
    return wheel


def test_a_wheel_has_all_files_of_the_package(tmp_path: Path) -> None:
    wheel = build(tmp_path, kernels=False)
    assert wheel.name.startswith(f"motet-{motet.__version__}-")
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
    source = ROOT / "src" / "motet"
    files = {
        f"motet/{path.relative_to(source)}"
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".pyc", ".so")
    }
    assert files <= names, sorted(files - names)


@pytest.mark.soak
def test_a_wheel_in_a_fresh_environment_runs_the_demo(tmp_path: Path) -> None:
    """Outside the tree, with the packages that it asks for."""
    wheel = build(tmp_path, kernels=True)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "--constraint",
        str(ROOT / "constraints.txt"),
        str(wheel),
    ]
    subprocess.run(install, cwd=tmp_path, check=True, timeout=900)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(tmp_path / "venv" / "bin" / "motet"), "demo", "--set", "steps=2", "--set", "engine.kernels=native"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for job in ("sort", "reverse", "count", "shift"):
        assert (tmp_path / "runs" / "demo" / job / "versions" / "v2" / "adapter_model.safetensors").is_file()
