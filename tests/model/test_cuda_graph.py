"""The arithmetic of a GPU, on a CPU: kernels in Triton's interpreter, grouped products, tiles of rows, recorded decoding.

What only a GPU can show, that its libraries give a row the same bits in any company, is in `test_gpu`.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.compiler.errors import CompilationError  # type: ignore[import-untyped, unused-ignore]
from triton.runtime.errors import OutOfResources  # type: ignore[import-untyped, unused-ignore]

import tests.support.triton_on_cpu
from motet.model.accelerator import Recorder, Replay
from motet.model.arithmetic import Arithmetic
from motet.model.attention import Span
from motet.model.cuda_graph import CudaGraphRunner
from motet.model.kv_cache import KVCache
from motet.model.load import load_base
from motet.model.lora import AdapterWeights
from motet.model.lora_model import LoraModel
from motet.rollout.decode_steps import NewTokens
from motet.rollout.model_runner import ModelRunner
from tests.support import tiny_models as tiny
from tests.support.cases import few
from tests.support.small_runs import fingerprint, job, metrics, run

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # numpy on Inf and NaN

LIKE_A_GPU = Arithmetic(rows=16, tile=16, products="grouped", attention="triton", logit_rows=16, graphs=True)
WAYS = {
    "exact": LIKE_A_GPU,
    "of a mixture": dataclasses.replace(LIKE_A_GPU, tile=0),
    "not recorded": dataclasses.replace(LIKE_A_GPU, graphs=False),
}


def base_with(arithmetic: Arithmetic, name: str = "llama") -> LoraModel:
    found = load_base(
        str(tiny.directory(name)),
        dtype="bfloat16",
        device=str(tests.support.triton_on_cpu.DEVICE),
        block_size=tiny.BLOCK,
        arithmetic=arithmetic,
    )
    assert found.arithmetic == arithmetic, found.info.notes
    return found


@pytest.fixture(scope="module")
def recorded() -> LoraModel:
    return base_with(LIKE_A_GPU)


@pytest.fixture(scope="module")
def plain() -> LoraModel:
    return base_with(WAYS["not recorded"])


class Texts:
    """Sequences that grow in a cache of their own."""

    def __init__(self, base: LoraModel, adapters: Sequence[AdapterWeights | None]) -> None:
        self.adapters = list(adapters)
        self.cache = KVCache(64, tiny.BLOCK, base.device)
        self.runner = ModelRunner(base, self.cache)
        self.lengths = [3 + 5 * place for place in range(len(adapters))]
        self.blocks = [self.cache.take(-(-(length + 40) // tiny.BLOCK)) for length in self.lengths]
        ids = [tiny.tokens(length, seed=place).tolist() for place, length in enumerate(self.lengths)]
        self.read(ids, [0] * len(ids))

    @torch.inference_mode()
    def read(self, ids: list[list[int]], starts: list[int]) -> torch.Tensor:
        inputs = [
            NewTokens(*each, self.blocks[place])
            for place, each in enumerate(zip(self.adapters, ids, starts, strict=True))
        ]
        return self.runner.logits(inputs).clone()

    def decode(self, token: int) -> torch.Tensor:
        """Logits after one more token of each."""
        found = self.read([[token + place] for place in range(len(self.lengths))], self.lengths)
        self.lengths = [length + 1 for length in self.lengths]
        return found


@pytest.mark.soak
def test_recorded_decoding_has_the_bits_of_decoding(recorded: LoraModel, plain: LoraModel) -> None:
    """While adapters of two ranks and the base share the rows, one is replaced, and sequences cross blocks."""
    found = []
    for base in (recorded, plain):
        first, second, wide, later = (
            tiny.adapter(base, rank=rank, seed=seed) for rank, seed in ((8, 1), (8, 2), (16, 3), (8, 4))
        )
        texts = Texts(base, [first, None, second, wide, first])
        logits = [texts.decode(10 + turn) for turn in range(3)]
        texts.adapters[0] = later
        logits.append(texts.decode(40))
        found.append(logits)
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.soak
def test_more_adapters_than_a_table_has_room_for(recorded: LoraModel, plain: LoraModel) -> None:
    found = []
    for base in (recorded, plain):
        adapters = [tiny.adapter(base, rank=8, seed=seed) for seed in range(12)]
        texts = Texts(base, adapters[:3])
        logits = [texts.decode(10)]
        texts = Texts(base, adapters)
        found.append([*logits, texts.decode(20), texts.decode(30)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.soak
def test_what_cannot_be_grouped_is_not_recorded(recorded: LoraModel, plain: LoraModel) -> None:
    """Rank 4 does not fill what a grouped product inputs at a time."""
    ours, theirs = (Texts(base, [tiny.adapter(base, rank=4, seed=1), None]) for base in (recorded, plain))
    assert torch.equal(ours.decode(10), theirs.decode(10))


class FailingRecorder(Recorder):
    """Fails where it is to record, as torch does where the cause was another error."""

    def __init__(self, place: torch.device, error: Exception, *, behind: bool = False) -> None:
        super().__init__(place)
        self._error, self._behind = error, behind

    def capture(self, run: Replay, *, first: bool) -> Replay:
        try:
            raise self._error
        except Exception as error:
            if self._behind:
                raise RuntimeError("the recording was not ended") from error
            raise


NO_GRAPHS = {
    "it waits for the device": RuntimeError("it waits for the device"),
    "shared memory": OutOfResources(250_000, 232_448, "shared memory"),
    "no such product": CompilationError(None, ast.Pass(), "no such product"),
    "an address is not aligned": AssertionError("an address is not aligned"),
}


def test_what_cannot_be_recorded_is_computed_without_graphs() -> None:
    """Whatever it fails by, before or while it is recorded; where memory is short, the next step tries again."""
    base = base_with(LIKE_A_GPU)
    for behind in (False, True):
        for reason, error in NO_GRAPHS.items():
            assert not recorded_by(FailingRecorder(base.device, error, behind=behind), base)
            assert not base.arithmetic.graphs
            why = base.info.notes[-1].removeprefix("slower than it could be, without graphs: ")
            assert reason in why
            assert "\n" not in why
            base.compute_with(LIKE_A_GPU)
        assert not recorded_by(FailingRecorder(base.device, torch.OutOfMemoryError("no memory"), behind=behind), base)
        assert base.arithmetic.graphs
    assert recorded_by(Recorder(base.device), base)


@torch.inference_mode()
def recorded_by(recorder: Recorder, base: LoraModel) -> bool:
    """Whether a step of one row is recorded."""
    cache = KVCache(4, tiny.BLOCK, base.device)
    return CudaGraphRunner(base, cache, recorder).logits([5], [Span(0, 1, cache.take(1))], [None]) is not None


@pytest.mark.parametrize("way", few(WAYS, "of a mixture"))
def test_a_base_is_proved_with_it(way: str) -> None:
    base = base_with(WAYS[way])
    assert base.info.exact or (way == "of a mixture" and base.device.type == "cuda")
    assert base.info.notes == ((base.info.inexact,) if base.info.inexact else ())


@pytest.mark.soak
def test_jobs_learn_exactly(recorded: LoraModel, tmp_path: Path) -> None:
    """Alone or in company the same bytes, and sampler and trainer agree: whole runs."""
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def digits(problem, completion):\n    return sum(c.isdigit() for c in completion) / 8\n")
    fields: dict[str, Any] = {
        "steps": 2,
        "sampling": {"max_tokens": 2},
        "adapter": {"rank": 8},
        "algorithm": {"group_size": 2, "groups_per_step": 2},
        "data": {"holdout": 0},
    }
    mine = job("mine", rewards, **fields)
    assert run(recorded, tmp_path / "alone", [mine]).ok
    company = [
        job("wide", rewards, **{**fields, "adapter": {"rank": 16}}),
        mine,
        job("odd", rewards, **{**fields, "adapter": {"rank": 4}}),
    ]
    together = run(recorded, tmp_path / "together", company)
    assert together.ok, together
    assert fingerprint(tmp_path / "alone" / "mine") == fingerprint(tmp_path / "together" / "mine")
    records = [line for one in company for line in metrics(tmp_path / "together" / one["name"]) if line.get("tokens")]
    assert {line["logprob_gap"] for line in records} == {0.0}
