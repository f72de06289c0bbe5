"""Decode steps from tokens to tokens give every request the bits that steps in turn give it, and copy what changed."""

from __future__ import annotations

import ast
import contextlib
import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from triton.compiler.errors import CompilationError  # type: ignore[import-untyped, unused-ignore]
from triton.runtime.errors import OutOfResources, PTXASError  # type: ignore[import-untyped, unused-ignore]

from motet.core.types import AdapterRef, FinishReason, GenerateRequest, SamplingParams
from motet.model.device_steps import BLOCKS, DRAWN, KEY, PLAIN, POSITION, TEMPERATURE, TOKEN, TOP_P, DeviceStep, Flight
from motet.model.kv_cache import KVCache
from motet.model.lora import AdapterWeights
from motet.model.lora_model import LoraModel
from motet.rollout.decoder import Decoder
from motet.rollout.model_runner import AheadRunner, ModelRunner
from motet.rollout.sequences import Prompt, SampledSequence
from motet.rollout.step_table import StepTable
from tests.support import cuda_bases as cuda
from tests.support import tiny_models as tiny
from tests.support.decoding import EveryThird, outcomes
from tests.support.late_queue import LateQueue, RefusingRecorder, Work

from motet.kernels.cuda.base import CudaBase  # isort: skip  # kernels are made for the interpreter
from motet.kernels.cuda.products import Products, ProductWeight  # isort: skip
from motet.kernels.cuda.step import CudaSteps  # isort: skip
from motet.kernels.cuda.step_memory import AdapterSlots  # isort: skip
from motet.kernels.cuda.bit_trial import Sizes, Trial  # isort: skip
from motet.kernels.cuda.product_backends import BUCKETS, REFERENCE, ProductShape, WayTable  # isort: skip
from tests.support.bad_ways import BadLibrary, WatchedRecorder  # isort: skip

BASE = "llama_long"


@functools.cache
def small() -> LoraModel:
    """A base whose products are by small tiles, which are fast here."""
    base = tiny.load(BASE, device=cuda.DEVICE.type)
    base.kernels = own = CudaBase(base, lambda _: Products(WayTable(0, 0, base.dtype.itemsize)))
    base.attention = own.attention
    return base


def version(number: int) -> AdapterWeights:
    """Adapters of other ranks and targets."""
    some = cuda.targets(small(), "v_proj", "o_proj", "up_proj")
    ranks = {1: 3, 2: 18, 3: 7}
    return tiny.adapter(small(), rank=ranks[number], targets=some if number == 2 else "all-linear", seed=number)


@dataclass(frozen=True)
class Ask:
    """One request."""

    tick: int
    prompt: int
    adapter: int = 0
    seeds: tuple[int, ...] = (1,)
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def prompt_of(self, name: str, versions: MutableMapping[int, AdapterWeights], chunks: list[Any]) -> Prompt:
        """A request whose chunks gather in a list."""
        weights, ref = versions.get(self.adapter), AdapterRef("a", self.adapter) if self.adapter else None
        if weights is None and self.adapter:
            weights = versions[self.adapter] = version(self.adapter)
            weakref.finalize(weights, weights.flat.fill_, math.nan)
        ids = tiny.tokens(self.prompt, seed=self.prompt).numpy()
        request = GenerateRequest(name, "job", ids, ref, self.sampling, self.seeds)
        prompt = Prompt(request, weights, chunks.append)
        prompt.waiting = [SampledSequence(prompt, index, key) for index, key in enumerate(self.seeds)]
        if self.sampling.grammar:
            for sequence in prompt.waiting:
                sequence.grammar = EveryThird()
        return prompt


@dataclass(frozen=True)
class Seen:
    """What a step asked for."""

    group: int
    truncates: bool
    n_adapters: int
    changed: bool
    """Whether rows, their adapters or masks differ from the group's step before."""


class Watched(AheadRunner):
    """Notes each step."""

    def __init__(self, base: LoraModel, cache: KVCache, queue: LateQueue) -> None:
        super().__init__(base, cache, CudaSteps(cuda.own(base), cache, queue, queue.recorder))
        self.queue = queue
        self.seen: list[Seen] = []
        self._weights: dict[int, list[int]] = {}

    def launch(self, step: DeviceStep) -> Flight:
        weights = [id(each) for each in step.weights]
        changed = self._weights.get(step.group) != weights or len(step.changes_C2) > 0 or step.masks_NV is not None
        self._weights[step.group] = weights
        n_adapters = len({id(each) for each in step.weights if each is not None})
        self.seen.append(Seen(step.group, step.truncates, n_adapters, changed))
        return super().launch(step)


@dataclass
class Run:
    """What came of requests."""

    found: list[Any]
    preempted: int
    seen: Sequence[Seen] = ()
    works: Sequence[Work] = ()
    most: int = 0


def run(asks: Sequence[Ask], *, rows: int, cache: KVCache, executor: ModelRunner) -> Run:
    """Adapters' memory is NaN as soon as nobody holds them."""
    decoder = Decoder(small(), cache, max_rows=rows, prefill_tokens=64, executor=executor)
    chunks: list[list[Any]] = []
    versions = weakref.WeakValueDictionary[int, AdapterWeights]()
    preempted = tick = 0
    while len(chunks) < len(asks) or not decoder.idle:
        for ask in [ask for ask in asks if ask.tick == tick]:
            chunks.append([])
            decoder.add(ask.prompt_of(f"r{len(chunks)}", versions, chunks[-1]))
        decoder.tick()
        preempted += bool(decoder.rows.preempted)
        tick += 1
    assert cache.n_free == cache.n_blocks, "all blocks are back"
    found = [outcomes(own, len(ask.seeds)) for own, ask in zip(chunks, asks, strict=True)]
    if isinstance(executor, Watched):
        return Run(found, preempted, executor.seen, executor.queue.done, executor.queue.most)
    return Run(found, preempted)


ASKS = (
    Ask(0, 14, 1, (1, 2), SamplingParams(max_tokens=6)),
    Ask(0, 14, 0, (3,), SamplingParams(max_tokens=4, temperature=0.0)),
    Ask(0, 9, 2, (4,), SamplingParams(max_tokens=2, temperature=0.8, top_p=0.9)),
    Ask(0, 6, 1, (5,), SamplingParams(max_tokens=3, grammar="third")),
    Ask(1, 7, 3, (2**64 - 5,), SamplingParams(max_tokens=6, temperature=1.3, stop_token_ids=(157, 236))),
)
"""Two adapters and none side by side, then another; a group that forks; a row that ends where the host does not expect it."""


def run_all(*, ahead: bool) -> Run:
    """All of them, with so few blocks that a row is preempted."""
    base = small()
    cache, queue = KVCache(5, base.block_size, base.device, clean=False), LateQueue(base.device)
    executor = Watched(base, cache, queue) if ahead else ModelRunner(base, cache)
    return run(ASKS, rows=5, cache=cache, executor=executor)


@pytest.fixture(scope="module")
def ahead() -> Run:
    return run_all(ahead=True)


def test_requests_get_the_bits_that_steps_in_turn_give_them(ahead: Run) -> None:
    """Tokens, logprobs, texts and reasons, while every step runs as late as it may."""
    in_turn = run_all(ahead=False)
    assert ahead.found == in_turn.found
    assert ahead.preempted
    assert in_turn.preempted
    assert ahead.most > 1, "steps are in flight"
    reasons = {outcome[3] for outcomes_of in ahead.found for outcome in outcomes_of}
    assert reasons == {FinishReason.LENGTH, FinishReason.STOP}


def test_what_is_copied_is_what_changed_and_launches_do_not_depend_on_adapters(ahead: Run) -> None:
    launches, n_adapters = list[Counter[str]](), set()
    for seen, work in zip(ahead.seen, [work for work in ahead.works if work.launches], strict=True):
        assert (work.sent > 0) == seen.changed
        own = work.launches.copy()
        assert own.pop("write_changes", 0) <= seen.changed
        assert own.pop("pick_truncated", 0) == seen.truncates
        if seen.n_adapters:
            launches.append(own)
            n_adapters.add(seen.n_adapters)
    assert len(n_adapters) > 1
    assert {seen.changed for seen in ahead.seen} == {False, True}
    assert all(own == launches[0] for own in launches)


def changes_of(table: StepTable, row: int, token: int, block: int) -> list[tuple[int, int]]:
    """A row at position 0 that is drawn at temperature 1, the only one of its step."""
    one = int(np.float64(1).view(np.int64))
    record = {TOKEN: token, POSITION: 0, DRAWN: 1, KEY: row, TEMPERATURE: one, TOP_P: one, BLOCKS: block}
    start = row * table.width
    return [*((start + column, value) for column, value in record.items()), (table.order_at(PLAIN), row)]


def launched(
    weights: Sequence[AdapterWeights | None], steps: CudaSteps, table: StepTable, cache: KVCache, *, corrected: bool
) -> Iterator[Flight]:
    """A step for each, of a row by itself; its token may be corrected at once."""
    for row, own in enumerate(weights):
        wrong = [(row * table.width + TOKEN, 3)] if corrected else []
        changes = np.array([*wrong, *changes_of(table, row, 30 + row, cache.take(1)[0])], np.int64)
        flight = steps.launch(DeviceStep(PLAIN, 1, changes, (own,), 1, truncates=False))
        changes[:] = 0
        yield flight


def test_steps_in_flight_have_their_own_changes_and_adapters() -> None:
    """Each begins before the one before has run, but for memory that is still to be copied, and rows beside each other.

    Graphs are there before: what waits runs before a GPU records one.
    """
    cache, queue = KVCache(8, small().block_size, small().device, clean=False), LateQueue(small().device)
    steps, table = CudaSteps(cuda.own(small()), cache, queue, queue.recorder), StepTable(3, 2)
    steps.hold(table)
    for flight in launched((version(3), None), steps, table, cache, corrected=False):
        flight.tokens()
    found = []
    for at_once in (True, False):
        weights = version(1), None, version(3)
        queue.most = 0
        flights = launched(weights, steps, table, cache, corrected=at_once)
        drawn = [flight.tokens() for flight in (flights if at_once else list(flights))]
        found.append([(each.tokens_N.tolist(), each.logprobs_N.tolist(), each.usable_N.tolist()) for each in drawn])
        assert queue.most == (1 if at_once else 2)
        kept = [weakref.ref(own) for own in weights if own is not None]
        del weights
        assert [own() for own in kept] == [None, None], "adapters of no step are free"
    assert found[0] == found[1]
    assert len({str(each) for each in found[0]}) == 3


def drawn_by_a_library(*, splits: bool) -> tuple[Any, Any]:
    """A token and its logprob, by a library that splits K on streams other than that of its trial, or nowhere."""
    base, recorder, used_on = small(), WatchedRecorder(), list[object]()

    def is_faulty(_n_rows: int, _biased: bool) -> bool:
        used_on.append(WatchedRecorder.running)
        return splits and used_on[-1] not in (None, recorder.stream)

    def tried(weights: Sequence[ProductWeight]) -> Products:
        table, shape, library = WayTable(0, 0, base.dtype.itemsize), ProductShape.of(weights[0]), BadLibrary(is_faulty)
        Trial(base.device, base.dtype, recorder, Sizes((1,), ())).run(table, [shape], library)
        table.speeds[shape, BUCKETS[0]] = {REFERENCE.name: 9.0, library.name: 1.0}
        used_on.clear()
        return Products(table)

    cache, table = KVCache(1, base.block_size, base.device, clean=False), StepTable(1, 2)
    steps = CudaBase(base, tried, recorder).steps(cache)
    steps.hold(table)
    (flight,) = launched((None,), steps, table, cache, corrected=False)
    drawn = flight.tokens()
    assert set(used_on) == {recorder.stream}
    return drawn.tokens_N.tolist(), drawn.logprobs_N.tolist()


def test_steps_use_a_library_on_the_stream_on_which_it_was_tried() -> None:
    """On another it has another workspace."""
    assert drawn_by_a_library(splits=True) == drawn_by_a_library(splits=False)


NO_GRAPHS = [
    (RuntimeError("this device has no graphs"), "this device has no graphs"),
    (OutOfResources(250_000, 232_448, "shared memory"), "shared memory"),
    (PTXASError("ptxas ended"), "ptxas ended"),
    (CompilationError(None, ast.Pass(), "no such product"), "no such product"),
]


def test_a_step_that_cannot_be_recorded_runs_and_is_told() -> None:
    """Recorders run a step before they record it: the row is not moved on by that."""
    base, weights = small(), (version(1),)
    found, notes = [], len(base.info.notes)
    for error, _ in [*NO_GRAPHS, (None, "")]:
        cache, queue = KVCache(2, base.block_size, base.device, clean=False), LateQueue(base.device)
        recorder = queue.recorder if error is None else RefusingRecorder(base.device, queue, error)
        steps = CudaSteps(cuda.own(base), cache, queue, recorder)
        table = StepTable(1, 2)
        steps.hold(table)
        changes = np.array(changes_of(table, 0, 30, cache.take(1)[0]), np.int64)
        flights = [
            steps.launch(DeviceStep(PLAIN, 1, own, weights, 1, truncates=False)) for own in (changes, changes[:0])
        ]
        found.append([flight.tokens().logprobs_N.tolist() for flight in flights])
    assert all(each == found[-1] for each in found)
    for note, (_, reason) in zip(base.info.notes[notes:], NO_GRAPHS, strict=True):
        assert note.startswith("slower than it could be")
        assert reason in note.rpartition(": decoding steps are not recorded as graphs: ")[2]


class FailingQueue(LateQueue):
    """Raises at some calls, of which the device has begun some works nevertheless."""

    def __init__(self, place: torch.device, fails: Mapping[int, bool]) -> None:
        """`fails` says of numbers of calls whether the work runs."""
        super().__init__(place)
        self._fails, self._calls = fails, 0

    def begin(self, work: Callable[[], None]) -> Callable[[], None]:
        self._calls += 1
        if self._fails.get(self._calls, True):
            wait = super().begin(work)
        if self._calls in self._fails:
            raise torch.OutOfMemoryError("planted")
        return wait


def test_what_a_failed_launch_did_not_send_comes_with_the_next() -> None:
    """The memory of its changes may still be read, when two further steps have begun."""
    base, weights, found = small(), (version(1),), []
    for fails in ({}, {1: False, 3: True, 5: True, 7: False}):
        cache, queue = KVCache(3, base.block_size, base.device, clean=False), FailingQueue(base.device, fails)
        steps, table = CudaSteps(cuda.own(base), cache, queue), StepTable(2, 10)
        steps.hold(table)
        moved = [(TOKEN, 40), (POSITION, 1), (DRAWN, 2), *((BLOCKS + number, 0) for number in range(2, 10))]
        flights: list[Flight] = []
        for own, changes in (
            (weights, [*changes_of(table, 0, 30, cache.take(1)[0]), (POSITION, 0)]),
            (weights, moved),
            ((None,), changes_of(table, 1, 31, cache.take(1)[0])),
        ):
            unsent, n_before = np.array(changes, np.int64), len(flights)
            while len(flights) == n_before:
                with contextlib.suppress(torch.OutOfMemoryError):
                    flights.append(steps.launch(DeviceStep(PLAIN, 1, unsent, own, 1, truncates=False)))
                unsent = unsent[:0]
        drawn = [flight.tokens() for flight in flights]
        found.append([(each.tokens_N.tolist(), each.logprobs_N.tolist()) for each in drawn])
        assert len(queue.done) == 5 + sum(fails.values())
    assert found[0] == found[1]


def test_the_address_of_an_adapter_that_is_gone_is_never_used() -> None:
    """Another adapter may have the identity of one that was freed."""
    slots = AdapterSlots(3)
    first, second = version(1), version(1)
    assert slots.place({1: first, 2: second}, ()) == ({1: 0, 2: 1}, [(0, first), (1, second)])
    assert slots.place({2: second}, ()) == ({2: 1}, [])
    del first
    third = version(1)
    assert slots.place({1: third, 2: second}, ()) == ({1: 0, 2: 1}, [(0, third)])
    fourth = version(1)
    assert slots.place({4: fourth}, (0,)) == ({4: 2}, [(2, fourth)]), "free ones first, and none of another group"
    fifth = version(1)
    assert slots.place({5: fifth}, (0, 2)) == ({5: 1}, [(1, fifth)])


def test_decoders_run_ahead_where_the_kernels_can() -> None:
    for base, kind in ((small(), AheadRunner), (tiny.base("llama"), ModelRunner)):
        cache = KVCache(2, base.block_size, base.device, clean=False)
        decoder = Decoder(base, cache, max_rows=2, prefill_tokens=64)
        assert type(decoder.runner) is kind
