"""The quarter of an hour on a card: parts that pass, fail, hang or cannot run here, the page with a column for each card, the
archive, and the folder for a machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

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
from bench.gpu.schedule import Part, Result, Schedule, end, kept, result_of
from bench.gpu.tokens import MOST_GAP, beside, completions
from bench.speed.shapes import SHAPES
from bench.speed.workers.job_files import figures

import gpu_kit
from motet.config import EngineConfig
from motet.core.types import Chunk
from motet.model.frozen_weight import FrozenWeight
from tests.support import cuda_bases
from tests.support import tiny_models as tiny
from tests.support.processes import ending
from tests.support.waiting import PATIENCE, wait_until

SAYS = "import json, sys; print(json.dumps(dict(group='speed', row=sys.argv[1], value=1234.5, unit='tokens/s')), flush=True)"
HANGS = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
FAILS = f"{SAYS}; import os; print('no | card'); sys.exit(not os.path.exists(sys.argv[2]))"


def program(text: str, *words: object) -> tuple[str, ...]:
    return ("-c", text, *map(str, words))


def columns(place: Path) -> dict[str, page.Column]:
    return page.read(place / "page.json")


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


def test_a_base_is_made_in_each_session_that_needs_it_and_in_no_other(tmp_path: Path) -> None:
    every = [Part("base", "", (), 1, makes=tmp_path), Part("bits", "", (), 1, needs="base"), Part("demo", "", (), 1)]
    passed = {part.name: Result(part.name, "passed", 1.0, "") for part in every}
    assert to_run(every, passed, []) == []
    assert to_run(every, {**passed, "bits": Result("bits", "cut", 1.0, "")}, []) == every[:2]
    assert to_run(every, passed, ["demo"]) == every[2:]
    assert to_run(every, passed, ["base"]) == every[:1]


def test_what_is_timed_runs_alone_and_in_its_turn(tmp_path: Path) -> None:
    """Each part writes its name when it begins and when it ends."""
    diary = tmp_path / "diary"
    text = "import sys; f = open(sys.argv[1], 'ab', 0); f.write(sys.argv[2].encode()); f.write(sys.argv[2].encode())"
    names = [("a", False), ("b", False), ("C", True), ("D", True), ("e", False)]
    every = [Part(name, "", program(text, diary, name), 100, alone=alone) for name, alone in names]
    Schedule(every, tmp_path, 600, lambda results: None).run()
    written = diary.read_text()
    assert (sorted(written[:4]), written[4:]) == (["a", "a", "b", "b"], "CCDDee")


def test_no_part_begins_when_the_time_is_over_and_results_of_before_stay(tmp_path: Path) -> None:
    part = Part("decode", "", program(SAYS, "decode"), 100)
    Schedule([part], tmp_path, 0.0, lambda results: None).run()
    assert kept(tmp_path)["decode"].state == "not run"
    Schedule([part], tmp_path, 600.0, lambda results: None).run()
    late = Schedule([part], tmp_path, 0.0, lambda results: None).run()
    assert (late["decode"].state, len(late["decode"].figures)) == ("passed", 1)


def test_a_run_replaces_what_it_measured_in_its_own_column_and_nothing_else(tmp_path: Path) -> None:
    written = tmp_path / "page.md"
    written.write_text(f"# Cards\n\nBy hand.\n\n{page.BEGIN}old\n{page.END}\nAfter.\n")
    figures = Figure("speed", "decode", 100.0, "tokens/s", "torch"), Figure("bits", "rows", "0 of 8 unequal")
    first = page.merged({}, "H200", {"commit": "aaaa"}, [Result("decode", "passed", 1.0, "", figures)])
    other = page.merged(first, "B200", {"commit": "bbbb"}, [Result("decode", "failed", 1.0, "why")])
    assert other["H200"] == first["H200"]
    faster = Result("decode", "passed", 1.0, "", (Figure("speed", "decode", 200.0, "tokens/s", "cuda"),))
    again = page.merged(other, "H200", {"commit": "cccc"}, [faster, Result("train", "not run", 0.0, "")])
    assert again["B200"] == other["B200"]
    page.write(written, again)
    assert columns(tmp_path) == again
    text = written.read_text()
    assert text.startswith("# Cards\n\nBy hand.\n")
    assert text.endswith("\nAfter.\n")
    assert "| decode | 200 tokens/s (cuda) | – |" in text
    assert "| rows | 0 of 8 unequal (at aaaa) | – |" in text  # of an older commit
    assert "| `decode` | passed | failed: why |" in text
    assert "train" not in text
    assert "old" not in text


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


def test_a_part_that_is_cut_keeps_the_figures_that_it_has_printed() -> None:
    whole = json.dumps({"group": "bits", "row": "rows", "value": 1})
    cut = result_of(Part("bits", "", (), 9), None, f"{whole}\nnoise\n{whole[:-9]}", 9.0)
    assert cut == Result("bits", "cut", 9.0, "ended after 9 s", (Figure("bits", "rows", 1),))


SLOW_TESTS = """
import time, pytest
@pytest.mark.parametrize("number", range(4))
def test_slow(number):
    assert number != 1, "what a card showed"
    if number == 2:
        open("begun", "w").close()
        time.sleep(600)
"""


def test_tests_that_are_cut_say_how_far_they_came_and_what_failed(tmp_path: Path) -> None:
    """What is cut is the part whose log says that the third test has begun; no clock decides."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_card.py").write_text(SLOW_TESTS)
    part = Part("tests", "", ("-m", "pytest", "-v", "-p", "no:cacheprovider", "tests"), 1)
    command = [sys.executable, *part.words]
    with (
        (tmp_path / "log").open("wb") as log,
        ending(subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)) as process,
    ):
        wait_until((tmp_path / "begun").exists, process=process)
        end(process, signal.SIGINT, PATIENCE)
    said = (tmp_path / "log").read_text()
    cut = result_of(part, None, said, 100.2)
    assert (cut.state, cut.said) == ("cut", "ended after 100 s: 1 passed, 1 failed of 4 tests")
    assert "what a card showed" in said.partition("FAILURES")[2]
    of_some = said.replace("collected 4 items", "collected 9 items / 5 deselected / 4 selected")
    assert result_of(part, None, of_some, 100.2) == cut


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


def test_a_file_whose_tests_are_all_for_the_soak_has_no_part_without_tests(tmp_path: Path) -> None:
    names = {part.name for part in parts("cuda", ["0.5b"], tmp_path, tmp_path)}
    assert {"tests-cuda-ranks-more", "tests-cuda-base", "tests-cuda-base-more"} <= names
    assert "tests-cuda-ranks" not in names


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


def test_jobs_in_turn_are_timed_without_what_lies_between_them() -> None:
    def step(end: float) -> dict[str, Any]:
        return {
            "time": end, "seconds": {"sample": 1.5, "train": 0.5}, "tokens_sampled": 8, "tokens_trained": 12, "trainable": 8,
        }  # fmt: skip

    jobs = [[step(12.0), step(14.0)], [step(22.0), step(24.0)]]
    args = {"groups": 1, "each": 4, "jobs": 2, "max_tokens": 2}
    assert figures(jobs, args, 64, 1024)["seconds"] == 14
    found = figures(jobs, {**args, "without_gaps": True}, 64, 1024)
    assert (found["seconds"], found["units"]) == (8, 4)


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
