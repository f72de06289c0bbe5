"""Devices: one file commands them, and what it does not know is refused."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from motet.core.errors import BaseModelError
from motet.model.accelerator import Recorder, add_in_full_precision, full_precision, place_of, take
from tests.support.torch_switches import USERS, are_motets, switches, users

SOURCE = Path(__file__).resolve().parents[2] / "src" / "motet"
CALLS = re.compile(r"torch\.(cuda|xpu|npu|mps|accelerator)\b|backends\.(cuda|mps)\b|_C\._cuda|\bnccl\b")


def test_one_file_asks_about_devices_and_commands_them() -> None:
    found = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if CALLS.search(path.read_text())}
    assert found == {"model/accelerator.py"}


@pytest.mark.parametrize("device", ["xpu", "npu:1", "mps", "hpu"])
def test_devices_on_which_nothing_is_proved_are_refused(device: str) -> None:
    with pytest.raises(BaseModelError, match=rf"engine\.device is {device}, .* use `cpu` or `cuda`"):
        place_of(device)


def test_a_cpu_takes_part_by_gloo_and_records_nothing() -> None:
    place = place_of("cpu", 3)
    assert (place.type, take(place)) == ("cpu", "gloo")
    run = lambda: torch.zeros(1)  # noqa: E731
    assert Recorder(place).capture(run, first=True) is run


@pytest.mark.parametrize("which", USERS)
def test_a_users_switches_are_put_back_when_the_last_of_all_threads_leaves(which: str) -> None:
    with users(which) as before, ThreadPoolExecutor(1) as other:
        full_precision.__enter__()
        assert are_motets()
        with full_precision:
            other.submit(full_precision.__enter__).result()
        full_precision.__exit__()
        assert are_motets()
        other.submit(full_precision.__exit__).result()
        assert switches() == before


def test_switches_of_a_process_stay_unless_the_caller_is_in_the_context() -> None:
    with users("medium") as before:
        with full_precision:
            add_in_full_precision(torch.device("cuda"))
            assert are_motets()
        assert switches() == before
        add_in_full_precision(torch.device("cpu"))
        assert switches() == before
        add_in_full_precision(torch.device("cuda"))
        assert are_motets()
