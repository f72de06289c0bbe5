"""The GPU day: pieces that pass, fail, hang or cannot run here, and the page that says so; and the folder for a machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.gpu_day import LIMIT, Piece, go, main, pieces

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
