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
from bench.speed.link import Program, SideFailed, Workers
from bench.speed.measure import Measured, judge, run_block
from bench.speed.plan import cpu_blocks, shape_blocks
from bench.speed.plot import draw
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
    totals,
)
from bench.speed.ratios import Goal, Ratio, compare, cost, middle
from bench.speed.rows import Block, Row, Side, chosen
from bench.speed.table import cells, cost_text, markdown, number, share_text, text

from motet.kernels.cpu.choice import of_machine
from tests.support.processes import ending
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[2]

# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_costs_are_seconds_for_each_unit_or_the_figure_itself() -> None:
    assert cost({"seconds": 3.0, "units": 12}) == 0.25
    assert cost({"value": 7.0, "seconds": 1.0, "units": 1}) == 7.0
    assert cost({"seconds": 3.0, "units": 12, "busy": 0.9}, "busy") == 0.9


def test_a_ratio_is_of_medians_and_its_spread_of_neighbours() -> None:
    faster = compare("faster", [1.0, 2.0, 4.0], [8.0, 6.0, 4.0])
    assert faster == Ratio(middle=3.0, low=1.0, high=8.0)
    assert compare("cost", [3.0, 3.3], [3.0, 3.0]).middle == pytest.approx(1.05)
    assert compare("value", [0.3, 0.1, 0.2]) == Ratio(0.2, 0.1, 0.3)
    assert middle([math.nan, 2.0]) == 2.0
    assert math.isnan(middle([math.nan]))


@pytest.mark.parametrize(
    ("goal", "met", "missed"), [(Goal("≥", 2.0), 2.0, 1.9), (Goal("≤", 1.1), 1.1, 1.2), (Goal("<", 0.5), 0.4, 0.5)]
)
def test_goals(goal: Goal, met: float, missed: float) -> None:
    assert goal.met(met)
    assert not goal.met(missed)


SHAPE = Shape(layers=2, width=8, inner=16, heads=2, kv_heads=1, head=4, vocabulary=32)


def test_a_shape_counts_the_weights_of_a_real_model(small_base_dir: Path) -> None:
    from safetensors import safe_open

    shape = Shape.of(small_base_dir)
    with safe_open(str(small_base_dir / "model.safetensors"), framework="np") as file:
        sizes = {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert shape.body_weights == sum(size for name, size in sizes.items() if "proj" in name)
    assert shape.head_weights == sizes["model.embed_tokens.weight"]


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


def test_what_has_no_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="sampled"):
        Counts.of({"decoded": 1, "sampled": 2})


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


def test_what_no_operation_accounts_for_is_python() -> None:
    sizes = Dimensions(vocabulary=4096, rank=16, head=64)
    events = [("aten::mm", [[64, 576], [576, 1536]], 0.5), ("aten::add", [[64, 576]], 0.25), ("_Python", [], 9.0)]
    found = totals(events, 1.0, sizes)
    assert (found[BASE], found[ELEMENTWISE], found[REST]) == (0.5, 0.25, 0.25)
    assert sum(found.values()) == pytest.approx(1.0)


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


def test_a_smaller_work_can_warm_up_and_nothing_can(workers: Workers, tmp_path: Path) -> None:
    workers.start(["a", "b"])
    small = Side("a", "turn", {"seconds": 1.0}, {"seconds": 0.1})
    block = Block(
        "block",
        "",
        {"ours": small, "theirs": Side("b", "turn", {"seconds": 1.0}, False)},
        (row("r", "ours", "theirs"),),
    )
    run_block(block, workers, 1, print)
    assert (tmp_path / "diary").read_text().split() == ["a", "a", "b"]


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


def test_no_answer_in_time_is_a_failure(workers: Workers) -> None:
    workers.start(["a"])
    slow = {"op": "prepare", "work": "turn", "warm": True, "args": {"seconds": 1.0, "sleeps": 30}}
    with pytest.raises(SideFailed, match="no answer within 0 s"):
        workers.ask("a", slow, seconds=0.2)


# --- tables -----------------------------------------------------------------------------------------------------------


def test_numbers_have_three_figures() -> None:
    assert [number(value) for value in (12345.6, 123.4, 12.34, 1.234, 0.01234, math.nan)] == [
        "12,346",
        "123",
        "12.3",
        "1.23",
        "0.012",
        "–",
    ]
    assert cost_text(1 / 1112, "tokens/s") == "1,112 tokens/s"
    assert cost_text(0.00001, "ms") == "0.01 ms"
    assert cost_text(2**30, "MB") == "1,024 MB"
    assert cost_text(0.912, "%") == "91.2 %"


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


def test_cells_say_ratio_spread_goal_and_share() -> None:
    one, two, three, four = (cells(item) for item in RESULTS)
    assert one[2:] == ("1,000 tokens/s", "400 tokens/s", "**2.50×** (2.00–3.00)", "≥ 2.00×, reached", "44 %")
    assert two[4:6] == ("**1.50×**", "≥ 2.00×, **not reached**")
    assert three[4:] == ("not measured: it | broke", "–", "–")
    assert four[1:] == ("–", "0.01 ms", "–", "0.01 ms – 0.02 ms", "< 1.00 ms, reached", "–")
    assert "2.50× (2.00–3.00) · Motet 1,000 tokens/s · the other: 400 tokens/s · 44 % of the limit" in text(RESULTS)


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


def test_bars_in_cells_do_not_break_a_table() -> None:
    lines = markdown(("a", "b"), [("x | y", "two\nlines")]).splitlines()
    assert lines == ["| a | b |", "| --- | --- |", "| x \\| y | two lines |"]


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


def test_what_people_wrote_survives_a_new_page(tmp_path: Path) -> None:
    file = tmp_path / "benchmarks.md"
    assert page.findings(file) == "\n"
    file.write_text(page.compose(a_run(), "benchmarks.svg", page.findings(file)))
    written = file.read_text().replace(page.END, f"Prompts in blocks of 32 paid.\n{page.END}")
    file.write_text(written)
    again = page.compose(a_run(), "benchmarks.svg", page.findings(file))
    assert again == written
    assert "| base products | 75.0 % |" in again
    rates = "500 GFLOP/s (400 GFLOP/s with all threads in one process (64×8×8); 500 with one process for each core"
    assert rates in " ".join(again.split())


def test_the_page_has_a_column_for_each_kind_of_processor() -> None:
    zen = page.remember(a_run(), "AMD family 26 with AVX512_BF16", {})
    assert "On each kind" not in page.compose(a_run(), "benchmarks.svg", "", zen)
    both = page.remember(a_run(), "Intel with AMX", json.loads(json.dumps(zen)))
    written = page.compose(a_run(), "benchmarks.svg", "", both)
    assert (
        "| ratio, share of limit | AMD family 26 with AVX512_BF16, 2026-11-24 | Intel with AMX, 2026-11-24 |" in written
    )
    assert "| work of one, against the other | **2.50×** (2.00–3.00), 44 % | **2.50×** (2.00–3.00), 44 % |" in written
    assert "work of four" not in written, "a figure that stands alone has no ratio"


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


def test_results_as_data_are_json_and_the_picture_is_the_same_again() -> None:
    rows = json.loads(json.dumps(page.record(a_run()), allow_nan=False))["rows"]
    assert [(item["ratio"], item["limit"], item["met"]) for item in rows] == [
        (2.5, 0.437, True),
        (1.5, None, False),
        (None, None, None),
        (1e-5, None, True),
    ]
    picture = draw(RESULTS)
    assert picture.startswith("<?xml")
    assert picture == draw(RESULTS)


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [True, False])
def test_rows_compare_sides_that_are_there(quick: bool) -> None:
    blocks = [*cpu_blocks(quick), *(block for shape in ("tiny", "0.5b", "8b") for block in shape_blocks(shape))]
    for block in blocks:
        assert {name for item in block.rows for name in (item.ours, item.other) if name} == set(block.sides), block.name
    names = [item.name for block in cpu_blocks(quick) for item in block.rows]
    assert len(names) == len(set(names))
    assert {block.name for block in cpu_blocks(True)} <= {block.name for block in cpu_blocks(False)}


def test_choosing_rows_leaves_out_sides_that_nobody_needs() -> None:
    (block,) = chosen([against_peers.decode_block(True)], ["adapters-64-rows"])
    assert set(block.sides) == {"Motet", "Motet, 8 adapters"}
    with pytest.raises(ValueError, match="decode-adapters"):
        chosen([against_peers.decode_block(True)], ["nothing"])


def test_the_list_and_a_row_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert "grpo-eight" in listed
    assert "decode:small" in listed
    assert main(["--only", "nothing"]) == 2
    assert "there is no row 'nothing'" in capsys.readouterr().err


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
