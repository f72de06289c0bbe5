"""When a decoding step is recorded as a graph: never because adapters join or leave, or rows have more blocks. Nothing runs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from motet.model.accelerator import Recorder, Replay, WorkQueue
from motet.model.device_steps import MASKED, PLAIN, DeviceStep
from motet.model.kv_cache import KVCache
from motet.model.lora import AdapterWeights
from motet.rollout.step_table import StepTable
from tests.support import cuda_bases as cuda
from tests.support import tiny_models as tiny

from motet.kernels.cuda.attention import PIECE  # isort: skip  # kernels are made for the interpreter
from motet.kernels.cuda.step import CudaSteps  # isort: skip

BASE = "llama_long"
ONE_PIECE = PIECE // tiny.BLOCK
"""Blocks up to which the keys of a row are one piece."""
_numbers = itertools.count()


class CountingRecorder(Recorder):
    """Counts what it is to record."""

    captures = 0

    def capture(self, run: Replay, *, first: bool) -> Replay:
        self.captures += 1
        return run


class IdleQueue(WorkQueue):
    """Does no work."""

    def begin(self, work: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


def joined(rank: int = 4) -> AdapterWeights:
    """An adapter that was not there before."""
    return tiny.adapter(cuda.base(BASE), rank=rank, seed=next(_numbers))


class Steps:
    """Steps of at most 40 rows with 4,096 keys, one after the other."""

    def __init__(self) -> None:
        base = cuda.base(BASE)
        self._recorder, self._vocabulary = CountingRecorder(base.device), base.info.vocab_size
        cache = KVCache(1, base.block_size, base.device, clean=False)
        self._steps = CudaSteps(cuda.own(base), cache, IdleQueue(base.device), self._recorder)
        self._steps.hold(StepTable(40, 16 * ONE_PIECE))

    def captures(
        self,
        weights: Sequence[AdapterWeights | None],
        n_blocks: int = 1,
        *,
        truncates: bool = False,
        group: int = PLAIN,
    ) -> int:
        """Graphs that a step of these rows records."""
        before, nothing = self._recorder.captures, np.empty((0, 2), np.int64)
        masks_NV = np.ones((len(weights), self._vocabulary), np.bool_) if group == MASKED else None
        step = DeviceStep(group, len(weights), nothing, weights, n_blocks, truncates, masks_NV)
        self._steps.launch(step).tokens()
        return self._recorder.captures - before


@pytest.fixture
def steps() -> Steps:
    """Of 9 to 16 rows, with an adapter and without, whose keys are one piece."""
    made = Steps()
    assert made.captures([joined(), *[None] * 8]) == 1
    assert made.captures([None] * 9) == 1
    return made


def test_no_graph_is_captured_as_adapters_join_and_leave_and_rows_get_blocks(steps: Steps) -> None:
    """Up to eight at a time of no larger rank, in 9 to 16 rows with up to 256 keys."""
    chance, present = random.Random(1), list[AdapterWeights]()
    for _ in range(40):
        present = [one for one in present if chance.random() < 0.7]
        present += [joined(chance.randrange(1, 5)) for _ in range(chance.randrange(9 - len(present)))]
        n_rows = chance.randrange(9, 17)
        weights = [*present, *chance.choices([None, *present], k=n_rows - len(present))]
        assert steps.captures(weights, chance.randrange(1, ONE_PIECE + 1)) == 0


def test_one_graph_is_captured_for_all_keys_beyond_a_piece(steps: Steps) -> None:
    row = [joined()] * 9
    found = [steps.captures(row, n_blocks) for n_blocks in (ONE_PIECE + 1, 2 * ONE_PIECE, 16 * ONE_PIECE, ONE_PIECE)]
    assert found == [1, 0, 0, 0]


def test_one_graph_is_captured_for_more_than_eight_adapters(steps: Steps) -> None:
    assert [steps.captures([joined() for _ in range(n)] + [None] * (16 - n)) for n in (8, 9, 16, 8)] == [0, 1, 0, 0]


def test_one_graph_is_captured_for_more_rows_and_for_other_draws(steps: Steps) -> None:
    own = joined()
    assert [steps.captures([own] * n) for n in (16, 17, 32, 9)] == [0, 1, 0, 0]
    assert [steps.captures([own] * 9, truncates=truncates) for truncates in (True, True, False)] == [1, 0, 0]
    assert [steps.captures([own] * 9, group=group) for group in (MASKED, MASKED, PLAIN)] == [1, 0, 0]


def test_an_adapter_with_a_wider_a_than_any_before_drops_the_graphs_of_rows_with_adapters(steps: Steps) -> None:
    """Once: those that come after it, and wider ones that come back, find them."""
    wide, beyond = joined(rank=18), ONE_PIECE + 1
    assert steps.captures([joined()] * 9, beyond) == 1
    assert steps.captures([wide] * 9) == 1
    assert steps.captures([joined()] * 9, beyond) == 1
    assert steps.captures([None] * 9) == 0
    assert [steps.captures([own] * 9, n_blocks) for own in (joined(), joined(18)) for n_blocks in (1, beyond)] == [
        0
    ] * 4
