"""The speed bench: arithmetic, turns, failures and the page; and Motet's own worker on a tiny base."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.speed import against_peers, page
from bench.speed.__main__ import main
from bench.speed.goals import GOALS, kind_of, units_of, with_goals
from bench.speed.limits import Counts, Machine, Shape, least_seconds
from bench.speed.link import Program, Workers
from bench.speed.measure import Measured, judge, run_block
from bench.speed.plan import cpu_blocks, shape_blocks
from bench.speed.profiling import (
    ATTENTION,
    BASE,
    COPIES,
    ELEMENTWISE,
    GROUPS,
    HEAD,
    LORA,
    REST,
    Dimensions,
    group_of,
)
from bench.speed.ratios import Goal, Ratio, compare, middle
from bench.speed.rows import Block, Row, Side
from bench.speed.table import cells, share_text, text

from motet.kernels.cpu.choice import of_machine
from tests.support.processes import ending
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[2]

# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_a_ratio_is_of_medians_and_its_spread_of_neighbours() -> None:
    faster = compare("faster", [1.0, 2.0, 4.0], [8.0, 6.0, 4.0])
    assert faster == Ratio(middle=3.0, low=1.0, high=8.0)
    assert compare("cost", [3.0, 3.3], [3.0, 3.0]).middle == pytest.approx(1.05)
    assert compare("value", [0.3, 0.1, 0.2]) == Ratio(0.2, 0.1, 0.3)
    assert middle([math.nan, 2.0]) == 2.0
    assert math.isnan(middle([math.nan]))


SHAPE = Shape(layers=2, width=8, inner=16, heads=2, kv_heads=1, head=4, vocabulary=32)


def test_the_limit_is_the_longer_of_products_and_bytes() -> None:
    body, head, one = SHAPE.body_weights, SHAPE.head_weights, SHAPE.adapter_weights(4)
    assert (body, head) == (2 * (64 + 32 + 32 + 64 + 3 * 128), 256)
    assert one == 2 * 4 * (16 + 12 + 12 + 16 + 3 * 24)
    decode = Counts(decoded=64, passes=1, adapters=2)
    slow_products = Machine(rate=1.0, bandwidth=1e12)
    assert least_seconds(decode, SHAPE, 4, slow_products) == pytest.approx(64 * 2 * (body + head + one))
    slow_memory = Machine(rate=1e12, bandwidth=1.0)
    assert least_seconds(decode, SHAPE, 4, slow_memory) == pytest.approx(2 * (body + head + 2 * one))


def test_the_limit_of_training_has_two_products_with_the_base_and_three_with_the_adapter() -> None:
    body, head, one = SHAPE.body_weights, SHAPE.head_weights, SHAPE.adapter_weights(4)
    machine = Machine(rate=1.0, bandwidth=1e12)
    counts = Counts(trained=10, headed=3, batches=1, adapters=1)
    assert least_seconds(counts, SHAPE, 4, machine) == pytest.approx(10 * (4 * body + 6 * one) + 3 * 4 * head)
    more = Counts(trained=10, headed=3, batches=1, adapters=1, context=5.0)
    assert least_seconds(more, SHAPE, 4, machine) > least_seconds(counts, SHAPE, 4, machine)
    update = Counts(adapters=1, updates=2)
    assert least_seconds(update, SHAPE, 4, Machine(1e12, 1.0)) == pytest.approx(2 * 34 * one)


@pytest.mark.parametrize(
    ("name", "shapes", "group"),
    [
        ("aten::mm", [[64, 576], [576, 1536]], BASE),
        ("mkldnn::_linear_pointwise", [[64, 576], [1536, 576], []], BASE),
        ("aten::mm", [[64, 576], [576, 4096]], HEAD),
        ("aten::mm", [[1024, 16], [16, 576]], LORA),
        ("aten::bmm", [[8, 8, 576], [8, 576, 48]], LORA),
        ("aten::bmm", [[192, 16, 64], [192, 64, 128]], ATTENTION),
        ("aten::_softmax", [[16, 4096], [], []], HEAD),
        ("aten::exp_", [[64, 3, 4, 64]], ATTENTION),
        ("aten::exp_", [[1, 64, 576]], ELEMENTWISE),
        ("aten::index_select", [[261, 3, 64, 64], [], [64]], COPIES),
        ("aten::embedding", [[4096, 576], [64]], COPIES),
        ("aten::searchsorted", [[64, 100], [64, 1]], HEAD),
        ("_TrainedLinear", [[1, 64, 576]], REST),
        ("autograd::engine::evaluate_function: X", [], REST),
    ],
)
def test_operations_are_told_apart(name: str, shapes: list[list[int]], group: str) -> None:
    assert group_of(name, shapes, Dimensions(vocabulary=4096, rank=16, head=64)) == group


# --- turns ------------------------------------------------------------------------------------------------------------

WORKER = """
import json, os, subprocess, sys, time
from contextlib import contextmanager
from bench.speed.workers.serve import Unavailable, options, serve

OPTIONS = options()

def load():
    if OPTIONS["name"] == "broken":
        sys.exit("no such engine")
    print("libraries print here")
    spin = [sys.executable, "-c", "while True: pass"]
    child = subprocess.Popen(spin, start_new_session=True).pid if OPTIONS.get("child", True) else 0
    return {"pid": os.getpid(), "child": child}

@contextmanager
def turn(args):
    def repeat():
        time.sleep(args.get("sleeps", 0))
        if args.get("fails"):
            raise ValueError("out of\\nluck")
        with open(OPTIONS["diary"], "a") as diary:
            diary.write(OPTIONS["name"] + "\\n")
        return {"seconds": args["seconds"], "units": 2}
    yield repeat

@contextmanager
def never(args):
    raise Unavailable("it has none")
    yield

serve(load, {"turn": turn, "never": never})
"""


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    """Workers `a` and `b`, which do what they are told and let a child spin, and `broken` and `missing`."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)

    def program(name: str, missing: str = "") -> Program:
        options = json.dumps({"name": name, "diary": str(tmp_path / "diary")})
        return Program(name, [sys.executable, str(script), options], {"PYTHONPATH": str(ROOT)}, missing)

    programs = [program("a"), program("b"), program("broken"), program("missing", "nobody installed it")]
    with Workers(programs, tmp_path / "logs", tmp_path, print) as found:
        yield found


def row(name: str, ours: str, other: str, goal: Goal | None = None) -> Row:
    return Row(name, f"work of {name}", "the other", "faster", ours, other, goal)


def two_sides(**b_args: Any) -> Block:
    sides = {"ours": Side("a", "turn", {"seconds": 1.0}), "theirs": Side("b", "turn", {"seconds": 3.0, **b_args})}
    return Block("block", "about", sides, (row("row", "ours", "theirs", Goal("≥", 2.0)),))


def test_sides_take_turns_after_a_warm_up_each(workers: Workers, tmp_path: Path) -> None:
    workers.start(["a", "b"])
    block = two_sides()
    answers, failed = run_block(block, workers, 3, print)
    assert (tmp_path / "diary").read_text().split() == ["a", "b"] + ["a", "b"] * 3
    assert not failed
    (found,) = judge(block, answers, failed, None, None)
    assert found.ratio == Ratio(3.0, 3.0, 3.0)
    assert found.met is True
    assert (found.ours, found.other, found.repeats) == (0.5, 1.5, 3)


def state(pid: int) -> str:
    """What Linux says of a process: R runs, S sleeps, T is stopped; empty when it is gone or only waited for."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""
    return "" if letter == "Z" else letter


def ticks(pid: int) -> int:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether it comes to hold: signals take a moment."""
    end = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


on_linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@on_linux
def test_who_is_not_measured_is_stopped_and_at_the_end_killed(workers: Workers) -> None:
    workers.start(["a", "b"])
    pids = [workers.loaded[name][key] for name in "ab" for key in ("pid", "child")]
    assert eventually(lambda: {state(pid) for pid in pids} == {"T"})
    request = {"work": "turn", "args": {"seconds": 1.0}}
    workers.ask("a", {"op": "prepare", "warm": False, **request})
    assert eventually(lambda: {state(pid) for pid in pids} == {"T"})
    before = [ticks(pid) for pid in pids]
    time.sleep(0.2)
    assert [ticks(pid) for pid in pids] == before
    workers.end("a")
    workers.end("b")
    assert eventually(lambda: not any(state(pid) for pid in pids))


@on_linux
def test_workers_die_with_a_bench_that_is_killed(workers: Workers, tmp_path: Path) -> None:
    code = (
        "import json, sys, time\nfrom pathlib import Path\nfrom bench.speed.link import Program, Workers\n"
        "options = json.dumps({'name': 'a', 'diary': '', 'child': False})\n"
        f"program = Program('a', [sys.executable, {str(tmp_path / 'worker.py')!r}, options])\n"
        f"workers = Workers([program], Path({str(tmp_path)!r}), Path({str(ROOT)!r}), lambda _: None)\n"
        "workers.start(['a'])\nprint(workers.loaded['a']['pid'], flush=True)\ntime.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    with ending(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)) as bench:
        assert bench.stdout is not None
        pid = int(bench.stdout.readline())
        assert eventually(lambda: state(pid) == "T")
    assert eventually(lambda: not state(pid))


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_peer_that_fails_leaves_its_rows_and_the_others_go_on(workers: Workers) -> None:
    workers.start(["a", "b", "broken", "missing"])
    sides = {
        "ours": Side("a", "turn", {"seconds": 1.0}),
        "good": Side("b", "turn", {"seconds": 2.0}),
        "raises": Side("b", "turn", {"seconds": 2.0, "fails": True}),
        "never": Side("b", "never"),
        "broken": Side("broken", "turn", {"seconds": 2.0}),
        "missing": Side("missing", "turn", {"seconds": 2.0}),
    }
    rows = tuple(row(name, "ours", name, Goal("≥", 2.0)) for name in sides if name != "ours")
    block = Block("block", "", sides, rows)
    answers, failed = run_block(block, workers, 2, print)
    found = {item.row.name: item for item in judge(block, answers, failed, None, None)}
    assert found["good"].ratio == Ratio(2.0, 2.0, 2.0)
    assert found["raises"].reason == "raises: ValueError: out of luck"
    assert found["never"].reason == "never: it has none"
    assert found["broken"].reason == "broken: the process ended: no such engine"
    assert found["missing"].reason == "missing: nobody installed it"
    assert "not measured: never: it has none" in cells(found["never"])
    assert found["never"].met is None


# --- tables -----------------------------------------------------------------------------------------------------------


RESULTS = [
    Measured(
        row("one", "ours", "theirs", Goal("≥", 2.0)),
        Ratio(2.5, 2.0, 3.0),
        ours=0.001,
        other=0.0025,
        limit=0.437,
        repeats=3,
    ),
    Measured(row("two", "ours", "theirs", Goal("≥", 2.0)), Ratio(1.5, 1.5, 1.5), ours=0.001, other=0.0015, repeats=1),
    Measured(row("three", "ours", "theirs"), None, "it | broke"),
    Measured(
        Row("four", "publish", "", "value", "ours", goal=Goal("<", 1e-3), unit="ms"),
        Ratio(1e-5, 1e-5, 2e-5),
        ours=1e-5,
        repeats=2,
    ),
]


def test_a_limit_that_is_passed_is_none() -> None:
    assert [share_text(share) for share in (math.nan, 0.004, 1.0, 1.0001, 2.63)] == [
        "–", "0 %", "100 %", "limit passed", "limit passed"
    ]  # fmt: skip
    passed = replace(RESULTS[0], limit=2.63)
    assert cells(passed)[-1] == "limit passed"
    assert "400 tokens/s · limit passed · goal" in text([passed])
    told = page.remember(replace(a_run(), results=[passed]), "AMD family 25 with AVX2", {})
    assert list(told["AMD family 25 with AVX2"]["rows"].values()) == ["**2.50×** (2.00–3.00), limit passed"]
    assert "`limit passed` marks rows for which this is no limit" in " ".join(page.compose(a_run(), "", "").split())


def a_run() -> page.Run:
    return page.Run(
        title="Speed",
        quick=False,
        blocks=[two_sides()],
        results=RESULTS,
        environment={"processor": "some", "date": "2026-11-24"},
        limits={"value": 5e11, "bandwidth": 4e10, "together": {"64×8×8": 4e11}, "apart": {"64×8×8": 5e11}},
        profiles={"decode": {**dict.fromkeys(GROUPS, 0.0), BASE: 3.0, REST: 1.0}},
    )


def test_goals_are_those_of_the_processor() -> None:
    facts = {"vendor_id": "GenuineIntel", "cpu family": "6", "flags": "fpu avx2 avx512f avx512_bf16 amx_bf16"}
    assert (kind_of(facts), units_of(facts)[0]) == ("Intel with AMX", "amx_bf16")
    facts |= {"vendor_id": "AuthenticAMD", "cpu family": "26", "flags": "avx2 avx512f avx512_bf16"}
    assert kind_of(facts) == "AMD family 26 with AVX512_BF16"
    assert kind_of({}) == "another processor"
    blocks = [against_peers.decode_block(True)]
    bounds = [
        [row.goal and row.goal.bound for row in with_goals(blocks, {"flags": unit})[0].rows]
        for unit in ("amx_bf16", "avx2", "")
    ]
    assert bounds == [[2.5, 8, 1.1], [1.5, 6, 1.1], [1.5, 6, 1.1]]
    named = {row.name for block in cpu_blocks(False) for row in block.rows}
    assert set(GOALS) <= named


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [True, False])
def test_rows_compare_sides_that_are_there(quick: bool) -> None:
    blocks = [*cpu_blocks(quick), *(block for shape in ("tiny", "0.5b", "8b") for block in shape_blocks(shape))]
    for block in blocks:
        assert {name for item in block.rows for name in (item.ours, item.other) if name} == set(block.sides), block.name
    names = [item.name for block in cpu_blocks(quick) for item in block.rows]
    assert len(names) == len(set(names))
    assert {block.name for block in cpu_blocks(True)} <= {block.name for block in cpu_blocks(False)}


# --- Motet ------------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_motet_alone_on_a_tiny_base(tmp_path: Path) -> None:
    """The path that a GPU takes: workers, limits, rows, profile and page, end to end."""
    assert main(["--shape", "tiny", "--repeats", "1", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert {item["name"]: item["reason"] for item in found["rows"]} == dict.fromkeys(
        ("adapters-tiny", "train-tiny", "grpo-tiny", "at-once-tiny"), ""
    )
    assert all(item["ratio"] > 0 for item in found["rows"])
    assert all(0 < item["limit"] < 1 for item in found["rows"])
    assert found["limits"]["value"] > 1e9
    assert all(groups[BASE] > 0 and groups[LORA] > 0 for groups in found["profiles"].values())
    assert bool(found["profiles"]) == (of_machine().kernels == "torch"), "torch's profiler sees torch's kernels alone"
    written = (tmp_path / "benchmarks.md").read_text()
    assert "tiny: eight jobs at once" in written
    assert (tmp_path / "benchmarks.svg").is_file()
