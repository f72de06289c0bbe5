"""What is derived instead of asked for: cores, sampling processes, the KV cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from motet.config import budgets

pytestmark = pytest.mark.tier1

GIB = 1 << 30


@pytest.mark.parametrize(("told", "cores"), [("3", 3), ("1", 1), ("0", None), ("", None), ("4,2", None), (None, None)])
def test_cores_are_those_that_openmp_is_told_or_all(
    monkeypatch: pytest.MonkeyPatch, told: str | None, cores: int | None
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if told is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", told)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 4, 5, 7}, raising=False)
    assert budgets.cores() == (cores or 5)


@pytest.mark.parametrize(
    ("threads", "base_bytes", "memory", "samplers"),
    [
        (1, 1 << 20, 64 * GIB, 0),  # this process takes the one core
        (2, 1 << 20, 64 * GIB, 1),
        (4, 1 << 20, 64 * GIB, 3),
        (64, 1 << 20, 64 * GIB, 7),
        (8, GIB, 16 * GIB, 2),  # a quarter of the memory, two copies of the weights each
        (8, GIB, 8 * GIB, 1),
        (8, GIB, 8 * GIB - 1, 0),
        (8, 0, GIB, 7),
    ],
)
def test_samplers_by_cores_and_memory(threads: int, base_bytes: int, memory: int, samplers: int) -> None:
    assert budgets.samplers(threads, base_bytes, memory) == samplers


def test_rows_are_those_whose_states_take_half_of_the_memory() -> None:
    assert budgets.rows_with_states(64, 0, GIB) == 64
    assert budgets.rows_with_states(64, 50 << 20, 16 * GIB) == 64
    assert budgets.rows_with_states(64, 50 << 20, GIB) == 9, "and a slot for a prompt"
    assert budgets.rows_with_states(64, 50 << 20, 1 << 20) == 1


def test_the_cache_holds_a_full_batch_where_memory_allows_and_the_longest_sequence_always() -> None:
    needs = [budgets.Need(10, 20), budgets.Need(100, 30)]  # 130 tokens: three blocks of 64
    assert budgets.kv_tokens(needs, 8, 64, 1, GIB) == 9 * 192
    assert budgets.kv_tokens(needs, 8, 64, 10, 6000) == 576
    assert budgets.kv_tokens(needs, 8, 64, 10, 100) == 192
    judged = [*needs, budgets.Need(10, 20, 500)]  # eight blocks
    assert budgets.kv_tokens(judged, 8, 64, 1, GIB) == 9 * 192 + 8 * 512
    assert budgets.kv_tokens(judged, 8, 64, 10, 6000) == 576
    assert budgets.kv_tokens(judged, 8, 64, 10, 100) == 192, "never more than there is"


def written(root: Path, files: dict[str, object]) -> None:
    """Files with these texts."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")


V1 = {"limit": "memory/memory.limit_in_bytes", "used": "memory/memory.usage_in_bytes"}


@pytest.mark.parametrize(
    ("own", "files", "left"),
    [
        ("0::/", {}, 8),
        ("0::/a/b", {"a/b/memory.max": 4 * GIB, "a/b/memory.current": 3 * GIB}, 1),
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": 4 * GIB, "a/memory.current": 2 * GIB}, 2),
        (
            "0::/a",
            {"a/memory.max": 4 * GIB, "a/memory.current": 3 * GIB, "a/memory.stat": f"anon 1\ninactive_file {GIB}"},
            2,
        ),
        ("0::/a", {"a/memory.max": 64 * GIB, "a/memory.current": GIB}, 8),
        ("0::/a", {"a/memory.max": GIB, "a/memory.current": 2 * GIB}, 0),
        ("0::/../x", {"memory.max": 4 * GIB}, 8),
        ("3:cpu:/x\n5:memory:/docker/x", {V1["limit"]: 4 * GIB, V1["used"]: GIB}, 3),  # the container's own is the root
        ("5:memory:/", {V1["limit"]: 0x7FFFFFFFFFFFF000, V1["used"]: GIB}, 8),
    ],
)
def test_memory_is_what_the_machine_and_the_limits_of_a_container_leave(
    tmp_path: Path, own: str, files: dict[str, object], left: int
) -> None:
    written(tmp_path / "proc", {"meminfo": f"MemTotal: 99 kB\nMemAvailable: {8 * GIB // 1024} kB", "self/cgroup": own})
    stats = {str(Path(name).parent / "memory.stat"): "anon 1" for name in files}
    written(tmp_path / "cgroup", {**stats, **files})
    assert budgets.available_memory(tmp_path / "proc", tmp_path / "cgroup") == left * GIB
