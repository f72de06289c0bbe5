"""Ranks of bases whose gradients are whole numbers send each other whole numbers, which have the same bits in every order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from motet.model.unit_sums import UnitSums
from motet.training.torch_trainer import TorchTrainer
from tests.support import card_ranks, cuda_bases
from tests.support.rank_groups import ADAMW, SHAPES
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # numpy on Inf and NaN
ROOT = Path(__file__).parents[3]


def test_sums_of_ranks_have_one_value_in_every_order() -> None:
    numbers = [torch.tensor([number, -number, 1 << 40, 0]) for number in (3, 1 << 50, 7)]
    each = [(flat, largest, n) for n, (flat, largest) in enumerate(zip(numbers, (9, 1 << 51, 2), strict=True), 1)]
    found = []
    for order in ((0, 1, 2), (2, 1, 0)):
        whole = UnitSums.empty(4, torch.device("cpu"))
        for flat, largest, n_units in (each[place] for place in order):
            whole.add(UnitSums(flat, torch.tensor([largest]), n_units))
        found.append((whole.flat.tolist(), whole.largest.tolist(), whole.n_units))
    assert found[0] == found[1] == ([10 + (1 << 50), -10 - (1 << 50), 3 << 40, 0], [1 << 51], 6)


@pytest.mark.soak
@pytest.mark.skipif(torch.cuda.is_available(), reason="each rank would need a card of its own")
@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_any_number_of_ranks_has_the_sums_and_steps_of_one_device(n_ranks: int, tmp_path: Path) -> None:
    one = TorchTrainer(cuda_bases.base("llama_long"), slots=8)
    for name in card_ranks.NAMES:
        one.add_adapter(name, SHAPES[name], ord(name), head=name == card_ranks.CRITIC)
    one.forward_backward(card_ranks.batch())
    for name in card_ranks.NAMES:
        assert not one.optim_step(name, ADAMW).skipped
    one.forward_backward(card_ranks.batch())
    words = [sys.executable, "-m", "tests.support.card_ranks"]
    ranks = [
        subprocess.Popen(
            [*words, str(rank), str(n_ranks), str(tmp_path / "meeting")], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for rank in range(n_ranks)
    ]
    try:
        lines = [line for rank in ranks for line in rank.communicate(timeout=PATIENCE)[0].splitlines()]
    finally:
        for rank in ranks:
            rank.kill()
    assert sorted(map(json.loads, lines)) == [card_ranks.learned(one, name) for name in card_ranks.NAMES]
