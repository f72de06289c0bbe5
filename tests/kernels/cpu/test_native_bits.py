"""The processor changes no bit of what own kernels train: other forms of the kernels, and torch with fewer instructions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from motet.config import EngineConfig
from motet.hosts.launch import load
from motet.kernels.cpu import building
from tests.support import native_calls
from tests.support.bits_run import digests

ROOT = Path(__file__).parents[3]
OLD = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL",
}
"""What has torch, MKL, oneDNN and numpy take no instruction that an old processor lacks."""


def elsewhere(command: list[str], **environment: str) -> str:
    """What a command prints last, as on another processor."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def small() -> Any:
    native_calls.directory()
    return load("small", EngineConfig(threads=1, kernels="native", dtype="bfloat16"))


def test_another_form_and_older_libraries_train_the_same_bytes(small: Any, tmp_path: Path) -> None:
    """Weights, moments, tokens and metrics, there with two threads."""
    form = "avx2" if "avx2" in native_calls.forms() else "portable"
    command = ["-m", "tests.support.bits_run", str(tmp_path / "there"), "bfloat16", "2"]
    there = elsewhere(command, MOTET_KERNELS_FORM=form, **OLD)
    assert json.loads(there) == digests(small, tmp_path / "here")


@pytest.mark.soak
def test_every_form_trains_the_same_bytes(tmp_path: Path) -> None:
    """In float32; the test before is in bfloat16."""
    ways = [{"MOTET_KERNELS_FORM": form} for form in native_calls.forms()]
    ways += [OLD, {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2"}]
    found = [
        json.loads(elsewhere(["-m", "tests.support.bits_run", str(tmp_path / str(place)), "float32"], **way))
        for place, way in enumerate(ways)
    ]
    assert all(each == found[0] for each in found)


@pytest.mark.soak
def test_arm_has_the_same_bits(tmp_path: Path) -> None:
    """The portable form, compiled for ARM and emulated, on numbers that no denormal comes near."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("install g++-aarch64-linux-gnu and qemu-user to compare ARM")
    flags = [*building.FLAGS, "-static", f"-I{building.SOURCES}"]
    flags.remove("-shared")
    sources = [str(ROOT / "tests" / "support" / "native_bits.cpp"), *map(str, sorted(building.SOURCES.glob("*.cpp")))]
    printed = []
    for command, run in ((building.compiler(), []), ([compiler], [emulator])):
        program = str(tmp_path / command[0].rpartition("/")[2])
        subprocess.run([*command, *flags, *sources, "-o", program], check=True)
        printed.append(subprocess.run([*run, program], check=True, capture_output=True, text=True).stdout)
    assert printed[0] == printed[1]
    assert len(printed[0].splitlines()) == 14
