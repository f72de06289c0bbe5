"""The quarter of an hour on a card: parts that pass, fail, hang or cannot run here, the page with a column for each card, and
the archive."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from bench.gpu import page, two_ranks
from bench.gpu.__main__ import PAGE, go, main, to_run
from bench.gpu.archive import MOST_BYTES, pack
from bench.gpu.company import Company, questions
from bench.gpu.figures import Figure, figures_in
from bench.gpu.gradients import gradient_questions
from bench.gpu.parts import INSTALL_SECONDS, card_tests, parts
from bench.gpu.products import compared, rows_unequal
from bench.gpu.schedule import Part, Schedule, kept
from bench.gpu.tokens import MOST_GAP, beside, completions
from bench.speed.shapes import SHAPES

import gpu_kit
from motet.config import EngineConfig
from motet.core.types import Chunk
from motet.model.frozen_weight import FrozenWeight
from tests.support import cuda_bases
from tests.support import tiny_models as tiny

SAYS = "import json, sys; print(json.dumps(dict(group='speed', row=sys.argv[1], value=1234.5, unit='tokens/s')), flush=True)"
HANGS = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
FAILS = f"{SAYS}; import os; print('no | card'); sys.exit(not os.path.exists(sys.argv[2]))"


def program(text: str, *words: object) -> tuple[str, ...]:
    return ("-c", text, *map(str, words))


def test_a_part_that_fails_hangs_or_is_left_out_leaves_the_others(tmp_path: Path) -> None:
    mended, written = tmp_path / "mended", tmp_path / "docs" / "page.md"
    written.parent.mkdir()
    every = [
        Part("works", "", program(SAYS, "decode"), 100),
        Part("fails", "", program(FAILS, "a first figure", mended), 100),
        Part("needs-it", "", program(SAYS, "never"), 100, needs="fails"),
        Part("hangs", "", program(HANGS), 0.5, alone=True),
        Part("elsewhere", "", program("print('1 card'); raise SystemExit(77)"), 100),
    ]
    first = go(every, tmp_path, written, 600)
    states = {"works": "passed", "fails": "failed", "needs-it": "not run", "hangs": "cut", "elsewhere": "not here"}
    assert {name: result.state for name, result in first.items()} == states
    assert first["fails"].figures == (Figure("speed", "a first figure", 1234.5, "tokens/s"),)
    assert "| a first figure | 1,234 tokens/s |" in written.read_text()
    assert "failed: no \\| card" in written.read_text()
    with tarfile.open(tmp_path / "gpu-quarter.tar.gz") as archive:
        assert {"page.md", "page.json", "hangs.log", "fails.result.json"} <= set(archive.getnames())
    mended.touch()
    todo = to_run(every[:3], kept(tmp_path), [])
    assert [part.name for part in todo] == ["fails", "needs-it"]  # what has passed is not run again
    again = go(todo, tmp_path, written, 600)
    assert [again[part.name].state for part in every[:3]] == ["passed"] * 3


def test_what_is_timed_runs_alone_and_in_its_turn(tmp_path: Path) -> None:
    """Each part writes its name when it begins and when it ends."""
    diary = tmp_path / "diary"
    text = "import sys; f = open(sys.argv[1], 'ab', 0); f.write(sys.argv[2].encode()); f.write(sys.argv[2].encode())"
    names = [("a", False), ("b", False), ("C", True), ("D", True), ("e", False)]
    every = [Part(name, "", program(text, diary, name), 100, alone=alone) for name, alone in names]
    Schedule(every, tmp_path, 600, lambda results: None).run()
    written = diary.read_text()
    assert (sorted(written[:4]), written[4:]) == (["a", "a", "b", "b"], "CCDDee")


def test_the_page_is_what_its_figures_say(tmp_path: Path) -> None:
    copy = tmp_path / PAGE.name
    copy.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    page.write(copy, page.read(PAGE.with_suffix(".json")))
    assert copy.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8"), "write it by `page.write`"


def test_the_archive_has_a_bound_and_keeps_what_is_worth_most(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"{number:02}.log").write_bytes(os.urandom(2**20))
    (tmp_path / "z.result.json").write_text("{}")
    archive = pack(tmp_path, 4 * 2**20)
    assert 3 * 2**20 < archive.stat().st_size <= 4 * 2**20
    with tarfile.open(archive) as opened:
        assert opened.getnames() == ["z.result.json", "00.log", "01.log", "02.log"]
    assert MOST_BYTES == 16 * 2**20


def test_a_whole_run_takes_thirteen_minutes_by_its_own_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parts side by side take as long as the longest of them with the base that it waits for."""
    every = parts("cuda", ["0.5b", "8b"], tmp_path, tmp_path)
    limits = {part.name: part.limit for part in every}
    assert len(limits) == len(every)
    timed = [part for part in every if part.alone]
    first, last = every[: every.index(timed[0])], every[every.index(timed[-1]) + 1 :]
    beside = max(part.limit + limits.get(part.needs, 0) for part in first) + max(part.limit for part in last)
    assert INSTALL_SECONDS + beside + sum(part.limit for part in timed) < 780
    assert all(part.needs in limits for part in every if part.needs)
    assert main(["--list", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("\n") == len(every)


def test_every_test_that_needs_a_card_has_a_part() -> None:
    marked = [
        file
        for file in Path("tests").rglob("test_*.py")
        if "mark.gpu" in file.read_text() and file.parent.name != "project"
    ]
    assert {str(file) for file in marked} <= set(card_tests())
    assert "tests/model/test_kernels.py" in card_tests()


def test_products_whose_sums_depend_on_the_number_of_rows_are_found() -> None:
    """From the 65th row on, this one adds two halves of K."""

    def split(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        parts = [slice(0, None)] if len(x) < 65 else [slice(0, 60), slice(60, None)]
        y = sum(x[:, part].float() @ weight[:, part].float().T for part in parts)
        return torch.as_tensor(y).to(x.dtype)

    def in_order(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.stack([weight.float() @ row.float() for row in x]).to(x.dtype)

    device, kn = torch.device("cpu"), (SHAPES["tiny"]["hidden_size"], 64)
    bad, seen, where = compared(split, split, kn, device, bias=False, backward=False)
    assert 0 < bad < seen
    assert where  # compared with the pass of 65 rows
    assert 65 not in where
    assert compared(in_order, in_order, kn, device, bias=False, backward=False)[0] == 0


class SplitFromNineRows(FrozenWeight):
    """A head that adds two halves of K where there are more than eight rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = self.shape[1] // 2
        if len(x) <= 8:
            return super().forward(x)
        return x[:, :half] @ self.weight[:, :half].T + x[:, half:] @ self.weight[:, half:].T


def test_each_question_about_rows_in_company_has_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    base = tiny.load("llama")
    with torch.no_grad():
        assert questions(Company(base, 40, rows=(12, 20), chunks=(16, 7)), "tiny") == 0
    answers = figures_in(capsys.readouterr().out)
    assert [figure.text for figure in answers] == [f"0 of {rows} unequal" for rows in (32, 32, 4, 32, 32, 32, 32)]
    assert {figure.executor for figure in answers} == {"torch"}
    base.head = SplitFromNineRows(base.head.weight, None)
    with torch.no_grad():
        assert questions(Company(base, 40, rows=(12,), chunks=(16,)), "tiny") > 0
    found = {figure.row: figure.text.split()[0] for figure in figures_in(capsys.readouterr().out)}
    assert found.pop("tiny: logits of a row without adapter, alone") == "0"
    assert found.pop("tiny: logits in a pass twice as large") == "0"  # both have more than eight rows
    assert "0" not in found.values()


def test_each_question_about_gradients_has_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """Torch adds samples in floats and in order: twice and in company are equal there, cut and in another order are not."""
    base = tiny.load("llama")
    assert gradient_questions(base, "tiny", (9, 5, 7)) == 0
    answers = [figure.text for figure in figures_in(capsys.readouterr().out)]
    assert answers[:2] == ["0 of 8 unequal"] * 2
    assert "0 of 8 unequal" not in answers[2:]


def test_greedy_tokens_of_kernels_for_cards_are_compared_with_a_cpus() -> None:
    """Here in the interpreter; logprobs of a wrong norm are further away than two kernels round."""
    config, tokens = EngineConfig(device="cpu", threads=1, block_size=tiny.BLOCK, max_rows=8), 3
    theirs = completions(tiny.load("llama_long"), config, tokens)
    base = cuda_bases.load("llama_long")
    equal, gap = beside(completions(base, config, tokens), theirs)
    assert (equal, gap < 1e-3) == (8 * tokens, True)
    cuda_bases.own(base).plan.norm_out.mul_(0.5)
    equal, gap = beside(completions(base, config, tokens), theirs)
    assert (equal, gap > MOST_GAP) == (8 * tokens, True)  # the likeliest tokens stay so


def test_tokens_count_until_one_differs_and_logprobs_up_to_it() -> None:
    def chunk(ids: list[int], *logprobs: float) -> Chunk:
        return Chunk(0, np.array(ids, np.int32), np.array(logprobs, np.float32), np.full(len(ids), -1, np.int32), "")

    one = chunk([5, 6, 7], -0.5, -0.25, -9.0)
    assert beside([one], [one]) == (3, 0.0)
    assert beside([one], [chunk([5, 8, 7], -0.5, -0.75, 0.0)]) == (1, 0.5)
    assert beside([one, one], [chunk([9, 6, 7], -1.5, 0.0, 0.0), one]) == (3, 1.0)


def test_nan_equals_itself_and_zeros_have_signs() -> None:
    row = torch.tensor([[float("nan"), 0.0, 1.0]])
    assert rows_unequal(row, row.clone()) == 0
    assert rows_unequal(row, torch.tensor([[float("nan"), -0.0, 1.0]])) == 1


@pytest.mark.soak
def test_copies_and_shards_on_two_ranks_learn_the_same(tmp_path: Path) -> None:
    assert two_ranks.main(["cpu", str(tmp_path), "4"]) == 0


def test_the_folder_has_what_a_machine_with_torch_lacks() -> None:
    found = gpu_kit.lacking("3.12")
    assert {"msgspec", "cloudpickle", "math-verify", "plotly", "hypothesis", "pydantic-core"} <= found.keys()
    assert not {"torch", "triton", "transformers", "peft", "pytest", "motet", "datasets"} & found.keys()
