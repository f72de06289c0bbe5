"""The GPU day: pieces that pass, fail, hang or cannot run here, and the page that says so; and the folder for a machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.gpu_day import LIMIT, Piece, Result, go, main, page, pieces
from bench.speed.measure import Measured
from bench.speed.page import Run, record
from bench.speed.ratios import Ratio
from bench.speed.rows import Row

import gpu_kit

WORKS = "import sys; print('all good'); open(sys.argv[1], 'a').write('.')"
HANGS = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"


def test_a_day_says_what_became_of_each_piece_and_resumes(tmp_path: Path) -> None:
    count, mended, page = tmp_path / "count", tmp_path / "mended", tmp_path / "page.md"
    fails = f"import os, sys; print('no | card'); sys.exit(not os.path.exists({str(mended)!r}))"
    every = [
        Piece("works", "something", ("-c", WORKS, str(count))),
        Piece("fails", "another", ("-c", fails)),
        Piece("hangs", "a child that sleeps", ("-c", HANGS)),
        Piece("alone", "two cards", ("-c", "print('1 card'); raise SystemExit(77)")),
    ]
    first = go(every, tmp_path, page, only=["works", "fails", "alone"])
    assert [result.state for result in first.values()] == ["passed", "failed", "not here"]
    text = page.read_text()
    assert "1 of 4 pieces passed" in text
    assert "no \\| card" in text
    assert "| `hangs` | a child that sleeps | not run yet |" in text
    mended.touch()
    again = go(every, tmp_path, page, limit=2.0)
    assert {name: result.state for name, result in again.items()} == {
        "works": "passed", "fails": "passed", "hangs": "too slow", "alone": "not here"
    }  # fmt: skip
    assert count.read_text() == "."  # what has passed is not run again


def test_a_day_has_25_pieces_of_nine_minutes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every = pieces("cuda", ["0.5b", "8b"], tmp_path)
    assert (len({piece.name for piece in every}), LIMIT) == (25, 540.0)
    assert main(["--list", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("\n") == 25


def test_figures_have_units(tmp_path: Path) -> None:
    """A figure alone has its own; all others are ratios."""
    steps = Measured(Row("grpo", "a step", "", "value", "Motet", unit="s a step"), Ratio(1.5, 1.4, 1.6))
    train = Measured(Row("train", "gradients", "", "value", "Motet"), Ratio(0.002, 0.001, 0.004))
    exact = Measured(Row("exact", "decode", "fast", "cost", "Motet", "fast"), Ratio(1.234, 1.2, 1.3))
    none = Measured(Row("none", "decode", "fast", "cost", "Motet", "fast"), None, "no card")
    rows = record(Run("", True, [], [steps, train, exact, none], {}))["rows"]
    every = [Piece("one", "something", (), rows=True)]
    text = page(every, {"one": Result("one", "passed", 1.0, "", rows)}, {})
    assert "| value | 1.50 s a step | 1.40 s a step to 1.60 s a step |" in text
    assert "| value | 500 tokens/s | 1,000 tokens/s to 250 tokens/s |" in text
    assert "| cost | 1.23× | 1.2× to 1.3× |" in text
    assert "| cost | – |  | no card |" in text


@pytest.mark.soak
def test_copies_and_shards_on_two_ranks_learn_the_same(tmp_path: Path) -> None:
    ranks = next(piece for piece in pieces("cpu", [], tmp_path) if piece.name == "two-ranks")
    result = go([ranks], tmp_path, tmp_path / "page.md")["two-ranks"]
    assert (result.state, result.said) == ("passed", "copies and shards: the same adapters")


def test_every_row_of_the_bench_that_a_piece_names_exists() -> None:
    from bench.speed.plan import shape_blocks

    known = {row.name for block in shape_blocks("8b") for row in block.rows}
    named = {piece.words[-1] for piece in pieces("cuda", ["8b"], Path("here")) if piece.rows}
    assert len(named) == 6
    assert named <= known


def test_the_folder_has_what_a_machine_with_torch_lacks() -> None:
    found = gpu_kit.lacking("3.12")
    assert {"msgspec", "cloudpickle", "math-verify", "plotly", "hypothesis", "pydantic-core"} <= found.keys()
    assert not {"torch", "triton", "transformers", "peft", "pytest", "motet", "datasets"} & found.keys()
