"""Steps that run ahead of the host give every request the bits that steps in turn give it, and touch nobody's memory."""

from __future__ import annotations

import asyncio
import itertools
import random
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from motet.core.device import Device
from motet.core.tenant_turns import TenantTurns
from motet.core.types import AdapterRef, Chunk, FinishReason, GenerateRequest, SamplingParams
from motet.model.device_steps import MASKED, TOKEN, DeviceStep, DrawnTokens, Flight
from motet.rollout.decode_steps import NewTokens, SynchronousSteps
from motet.rollout.decoder import Decoder
from motet.rollout.embedded import EmbeddedEngine
from motet.rollout.pipelined_steps import PipelinedSteps
from motet.rollout.sequences import Prompt, SampledSequence
from tests.support import inside
from tests.support import tiny_models as tiny
from tests.support.cases import few
from tests.support.decoding import EveryThird, outcomes
from tests.support.late_executor import AnsweringExecutor, LateExecutor, PoisonedCache, version
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.tier1

BLOCK = 4
N_VOCAB = tiny.VOCABULARY


class CountingTurns(TenantTurns):
    """Counts what is charged to each job."""

    def __init__(self) -> None:
        super().__init__(itertools.count(0, 0.001).__next__)
        self.parts = Counter[str]()

    def charge(self, seconds: float, parts: Any) -> Counter[str]:
        parts = list(parts)
        for payer, part in parts:
            self.parts[payer.job] += part
        return super().charge(seconds, parts)


class Stage:
    """A decoder, and all that it is asked for."""

    def __init__(
        self,
        chance: random.Random | None,
        n_blocks: int,
        rows: int,
        host: int = 0,
        executor: type[LateExecutor] = LateExecutor,
        prefill: int = 40,
    ) -> None:
        """Without `chance`, steps run in turn."""
        self.cache, self.turns = PoisonedCache(n_blocks, BLOCK, rows + 1), CountingTurns()
        ahead = None if chance is None else executor(self.cache, N_VOCAB, chance)
        self.executor = ahead or AnsweringExecutor(self.cache, N_VOCAB)
        self.decoder = Decoder(
            tiny.base("llama"), self.cache, max_rows=rows, prefill_tokens=prefill, kept_blocks=n_blocks // 3,
            host_bytes=host, turns=self.turns, executor=self.executor,
        )  # fmt: skip
        if ahead is not None:
            ahead.kept = self.decoder.kept
        self.chunks: dict[str, list[Any]] = {}
        self.versions: dict[AdapterRef, Any] = {}

    def ask(self, request: GenerateRequest) -> None:
        weights = None
        if request.adapter is not None:
            known = self.versions.get(request.adapter)
            weights = known or version(request.adapter.version if request.adapter.name != "broken" else float("nan"))
            self.versions[request.adapter] = weights
        self.chunks[request.id] = []
        prompt = Prompt(request, weights, self.chunks[request.id].append)
        prompt.waiting = [SampledSequence(prompt, index, key) for index, key in enumerate(request.seeds)]
        if request.sampling.grammar:
            for sequence in prompt.waiting:
                sequence.grammar = EveryThird()
        self.decoder.add(prompt)

    def unload(self, ref: AdapterRef) -> None:
        self.versions.pop(ref, None)
        self.decoder.forget_version(ref)

    def finish(self) -> None:
        for _ in range(3000):
            if self.decoder.idle:
                break
            self.decoder.tick()
        assert self.decoder.idle, "the decoder makes progress"
        for one in inside.kept_sequences(self.decoder):
            assert one.copy or len(one.blocks) == -(-len(one.token_ids) // BLOCK), "no block without a token"
        self.decoder.abort({f"job {job}" for job in range(3)})
        assert self.cache.n_free == self.cache.n_blocks, "all blocks are back"
        assert self.cache.states.n_free == self.cache.states.n_slots
        assert self.decoder.host.used == 0
        assert self.executor.faults == []

    def outcome(self, request: GenerateRequest) -> list[Any]:
        return outcomes(self.chunks[request.id], len(request.seeds))


def a_request(chance: random.Random, name: str, *, tenants: int, longest: int = 30) -> GenerateRequest:
    """Random in all that matters to a step."""
    prompt = np.array([chance.randrange(3, 40) for _ in range(chance.choice((1, 3, 4, 5, 9, 16)))], np.int32)
    adapter = chance.choice((None, AdapterRef("a", 1), AdapterRef("a", 2), AdapterRef("b", 3), AdapterRef("broken", 4)))
    sampling = SamplingParams(
        max_tokens=chance.randrange(1, longest),
        stop=chance.choice(((), (), ("e", "a", "t"), ("no such text",))),
        stop_token_ids=(*range(200, 200 + chance.choice((0, 5, 20))), 10**6),
        grammar=chance.choice(("", "", "", "third")),
    )
    seeds = tuple(chance.randrange(1 << 64) for _ in range(chance.randrange(1, 5)))
    job = chance.randrange(3)
    episodes = tuple(f"{name}/{index}" for index in range(len(seeds))) if chance.random() < 0.5 else ()
    return GenerateRequest(
        name, f"job {job}", prompt, adapter, sampling, seeds, chance.random() < 0.3, episodes=episodes,
        tenant=f"tenant {job % tenants}", chunk_tokens=chance.choice((1, 1, 4)),
    )  # fmt: skip


@pytest.mark.parametrize("ahead", [False, True])
def test_a_chunk_of_a_stream_comes_when_its_tokens_are_there(ahead: bool) -> None:
    stage, ids = Stage(random.Random(0) if ahead else None, 64, 8), np.array([5, 6, 7], np.int32)
    sampling, sizes = SamplingParams(max_tokens=30), dict[str, list[int]]()
    for name, n_tokens in (("each", 1), ("parts", 8)):
        stage.ask(GenerateRequest(name, "job 0", ids, None, sampling, (1,), stream=True, chunk_tokens=n_tokens))
    stage.finish()
    for name, chunks in stage.chunks.items():
        sizes[name] = [len(chunk.token_ids) for chunk in chunks]
    assert sizes["each"] == [1] * 30 or ahead
    assert sum(sizes["each"]) == 30
    reached = np.cumsum(sizes["parts"]).tolist()
    assert [place // 8 for place in reached] == [1, 2, 3, 3]
    assert [place % 8 for place in reached] == [0, 0, 0, 6] or (ahead and all(place % 8 < 3 for place in reached[:3]))


def in_turn(request: GenerateRequest) -> list[Any]:
    """What steps in turn give the request alone."""
    stage = Stage(None, 64, 8)
    stage.ask(replace(request, stream=False))
    stage.finish()
    return stage.outcome(request)


def is_beginning(part: Any, whole: Any) -> bool:
    n_tokens = len(part[0])
    return bool(part[0] == whole[0][:n_tokens] and part[1] == whole[1][:n_tokens])


@pytest.mark.parametrize("seed", few(range(48), *range(8), *range(24, 36)))
def test_whatever_happens_beside_it_a_request_gets_what_it_gets_in_turn(seed: int) -> None:
    """Requests come and are aborted, few blocks preempt, groups fork, episodes go on, versions are unloaded in flight.

    Half of them read prompts in parts of a few tokens.
    """
    chance = random.Random(seed)
    rows, tenants = chance.randrange(1, 9), chance.randrange(1, 3)
    n_blocks, host, part = chance.choice((12, 20, 64)), chance.choice((0, 1 << 20)), 40
    if seed >= 24:
        tenants, part = 3, 1 + seed % 20
    stage = Stage(random.Random(seed + 1), n_blocks, rows, host, prefill=part)
    asked, aborted = list[GenerateRequest](), set[str]()
    for tick in range(150):
        if tick < 100 and chance.random() < 0.2:
            asked.append(a_request(chance, f"r{len(asked)}", tenants=tenants))
            stage.ask(asked[-1])
        if asked and chance.random() < 0.05:
            gone = chance.choice(asked).id
            aborted.add(gone)
            stage.decoder.abort({gone})
        if stage.versions and chance.random() < 0.1:
            stage.unload(chance.choice(list(stage.versions)))
        if asked and chance.random() < 0.1 and (further := next_turn(stage, chance.choice(asked), f"r{len(asked)}")):
            asked.append(further)
            stage.ask(further)
        stage.decoder.tick()
    stage.finish()
    assert isinstance(stage.executor, LateExecutor)
    assert not asked or stage.executor.launches
    for request in asked:
        for got, wanted in zip(stage.outcome(request), in_turn(request), strict=True):
            assert is_beginning(got, wanted) if request.id in aborted else got == wanted


@pytest.mark.parametrize("seed", [26, 38, 46, 52])
def test_rows_that_end_while_others_are_admitted_are_not_preempted(seed: int) -> None:
    """Three tenants want few blocks, so admission waits for the step in flight and then chooses rows to preempt."""
    chance = random.Random(seed)
    stage, asked = Stage(random.Random(seed + 1), 14, 6, 0), list[GenerateRequest]()
    for tick in range(60):
        if tick < 50 and chance.random() < 0.35:
            asked.append(a_request(chance, f"r{tick}", tenants=3))
            stage.ask(asked[-1])
        stage.decoder.tick()
    stage.finish()
    for request in asked:
        assert list(stage.outcome(request)) == list(in_turn(request))


class Never(random.Random):
    """Lets no step run before it is waited for."""

    def random(self) -> float:
        return 1.0


Kind = Callable[[DeviceStep, LateExecutor], bool]


def joins(step: DeviceStep, executor: LateExecutor) -> bool:
    indices = step.changes_C2[:, 0]
    return bool((indices[indices < executor.table.order_at(0)] % executor.table.width == TOKEN).any())


class FailingOnce(LateExecutor):
    """Raises an error once, at the launch of a step of this kind or when it runs; nothing of it and of later ones arrives."""

    kind: Kind | None = None
    late = False

    def launch(self, step: DeviceStep) -> Any:
        if not self.late:
            self.fail(step)
        return super().launch(step)

    def compute(self, step: DeviceStep) -> Any:
        if self.late:
            self.fail(step)
        return super().compute(step)

    def fail(self, step: DeviceStep) -> None:
        if self.kind is not None and self.kind(step, self):
            self.kind = None
            if self.late:
                self.cache.late.clear()
            raise torch.OutOfMemoryError("planted")


STEPS: dict[str, Kind] = {
    "first": lambda step, executor: True,
    "joins": lambda step, executor: executor.launches > 3 and joins(step, executor),
    "growth": lambda step, executor: len(step.changes_C2) > 0 and not joins(step, executor),
    "masked": lambda step, executor: executor.launches > 3 and step.group == MASKED,
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", STEPS)
def test_after_a_step_that_raises_new_rows_get_what_they_get_in_turn(kind: str, late: bool) -> None:
    """Other numbers of rows take the same places in the table, of which the device has not what it was sent last."""
    for n_rows in range(1, 6):
        stage = Stage(Never(), 64, 8, executor=FailingOnce)
        assert isinstance(stage.executor, FailingOnce)
        stage.executor.kind, stage.executor.late = STEPS[kind], late
        with pytest.raises(torch.OutOfMemoryError):
            serve(stage)
        stage.decoder.fail_all()
        request, masked = rows_of("after", n_rows), rows_of("masked", 2, grammar="third")
        stage.ask(request)
        stage.ask(masked)
        stage.finish()
        assert stage.outcome(request) == in_turn(request)
        assert stage.outcome(masked) == in_turn(masked)


def serve(stage: Stage) -> None:
    """Rows with and without grammars come and grow beside others."""
    for tick in range(60):
        if tick in (0, 6):
            stage.ask(rows_of(f"before {tick}", 2 + tick // 3, grammar="third" if tick else ""))
            stage.ask(rows_of(f"beside {tick}", 1))
        stage.decoder.tick()


def rows_of(name: str, n: int, *, max_tokens: int = 12, grammar: str = "") -> GenerateRequest:
    """So many completions of one prompt."""
    sampling = SamplingParams(max_tokens=max_tokens, grammar=grammar)
    seeds = tuple(100 * len(name) + index for index in range(n))
    return GenerateRequest(name, "job 0", np.arange(3, 8, dtype=np.int32), None, sampling, seeds)


def next_turn(stage: Stage, request: GenerateRequest, name: str) -> GenerateRequest | None:
    """The episode of a completion that has ended, with its tokens and one more."""
    ended = [chunk for chunk in stage.chunks[request.id] if chunk.finish_reason is FinishReason.STOP]
    if not ended or not request.episodes or request.stream:
        return None
    chunk: Chunk = ended[0]
    read = np.concatenate([request.prompt_ids, chunk.token_ids, np.array([7], np.int32)])
    if len(read) + request.sampling.max_tokens > 44:
        return None
    return replace(
        request, id=name, prompt_ids=read, seeds=request.seeds[:1], episodes=(request.episodes[chunk.index],)
    )


@pytest.mark.parametrize("seed", range(6))
def test_the_same_tokens_are_charged_in_turn_and_ahead(seed: int) -> None:
    """A token that is dropped costs its job nothing."""
    charged, dropped = [], 0
    for ahead in (True, False):
        chance = random.Random(seed)
        stage = Stage(random.Random(seed) if ahead else None, 200, 40)
        requests = [a_request(chance, f"r{index}", tenants=1) for index in range(8)]
        for request in requests:
            stage.ask(request)
        stage.finish()
        charged.append(stage.turns.parts)
        if isinstance(stage.executor, LateExecutor):
            ended = [item[3] for request in requests for item in stage.outcome(request)]
            dropped = sum(reason is not FinishReason.LENGTH for reason in ended)
    assert dropped, "some rows ended where the host did not expect it"
    assert charged[0] == charged[1]


class TimedExecutor(LateExecutor):
    """On a device that does one piece of work after the other, in simulated time; the host waits for tokens only."""

    now = free = 0.0
    """Of the host; when the device has done what was begun."""

    def begin(self, seconds: float) -> float:
        self.free = max(self.free, self.now) + seconds
        return self.free

    def wait(self, end: float) -> None:
        self.now = max(self.now, end)

    def logits(self, inputs: Sequence[NewTokens]) -> torch.Tensor:
        self.begin(0.001 * sum(len(new.token_ids) for new in inputs))
        return super().logits(inputs)

    def draw(self, sequences: Any, raw_NV: torch.Tensor) -> DrawnTokens:
        self.wait(self.free)
        return super().draw(sequences, raw_NV)

    def launch(self, step: DeviceStep) -> Any:
        return TimedFlight(self, self.begin(0.01), super().launch(step))


@dataclass(frozen=True)
class TimedFlight:
    executor: TimedExecutor
    end: float
    flight: Flight

    def tokens(self) -> DrawnTokens:
        self.executor.wait(self.end)
        return self.flight.tokens()


@pytest.mark.parametrize("n_blocks", [38, 400])
@pytest.mark.parametrize("tenants", [1, 2])
def test_each_job_pays_for_its_own_time(tenants: int, n_blocks: int) -> None:
    """Prompts of one job are read behind the steps of another, alone and in company, with few blocks and with many."""
    stage, n_prompts, n_tokens = Stage(Never(), n_blocks, 64, executor=TimedExecutor), 30, 60
    assert isinstance(stage.executor, TimedExecutor)
    stage.turns.clock = lambda: stage.executor.now  # type: ignore[attr-defined]
    stage.ask(rows_of("a", 2, max_tokens=n_tokens))
    for tick in range(200):
        if tick % 2 == 0 and tick < 2 * n_prompts:
            request = rows_of(f"b{tick}", 3, max_tokens=1)
            stage.ask(replace(request, job="job 1", tenant=f"tenant {tenants - 1}"))
        before = stage.decoder.prefilled_tokens
        stage.decoder.tick()
        if stage.turns.company and stage.decoder.prefilled_tokens > before:
            assert not stage.cache.late, "a tick that steps nothing leaves nothing in flight"
    stage.finish()
    read = 1000 * 5
    assert stage.executor.launches == n_tokens - 1
    assert stage.decoder.spent["job 0"] == pytest.approx(read + 10000 * (n_tokens - 1), abs=100)
    assert stage.decoder.spent["job 1"] == pytest.approx(read * n_prompts, abs=100)


class CallingExecutor(LateExecutor):
    """Its third launch queues a call, which says whether steps are in flight."""

    device: Device

    def launch(self, step: DeviceStep) -> Any:
        if self.launches == 2:
            self.found = self.device.submit(lambda: len(self.cache.late))
        return super().launch(step)


def test_a_call_of_the_device_finds_no_step_in_flight() -> None:
    """It would wait for the step, and its job would be charged with it."""
    base, cache, device = tiny.base("llama"), PoisonedCache(20, BLOCK, 3), Device()
    engine = EmbeddedEngine(base, device, max_rows=2, kv_tokens=64, prefill_tokens=40)
    executor = CallingExecutor(cache, N_VOCAB, Never())
    executor.device = device
    engine.decoder = Decoder(base, cache, max_rows=2, prefill_tokens=40, turns=device.turns, executor=executor)

    async def generated() -> list[Chunk]:
        return [chunk async for chunk in engine.generate(rows_of("r", 1))]

    try:
        assert asyncio.run(generated())
        assert executor.found.result(timeout=PATIENCE) == 0
    finally:
        device.close()
    assert executor.faults == []


def ending(request: GenerateRequest) -> tuple[GenerateRequest, list[int]]:
    """The request with a stop token that the host cannot expect, and its completion."""
    [(tokens, *_)] = in_turn(request)
    last = next(place for place, token in enumerate(tokens) if place > 3 and token not in tokens[:place])
    return replace(request, sampling=replace(request.sampling, stop_token_ids=(tokens[last],))), tokens[: last + 1]


def test_a_turn_that_comes_at_once_finds_the_turn_before() -> None:
    """Its chunk is sent while a step that reads its blocks is in flight."""
    request, tokens = ending(replace(rows_of("r", 1), episodes=("e",), prompt_ids=np.arange(3, 35, dtype=np.int32)))
    stage = Stage(Never(), 64, 4)
    stage.ask(request)
    while not stage.chunks["r"]:
        stage.decoder.tick()
    assert stage.cache.late, "a step is in flight"
    read, before = np.array([*request.prompt_ids, *tokens, 7], np.int32), stage.decoder.prefilled_tokens
    stage.ask(replace(request, id="next", prompt_ids=read))
    stage.finish()
    assert stage.decoder.prefilled_tokens - before == 2


def test_what_is_kept_stays_if_a_row_in_flight_leaves_blocks() -> None:
    """The prompt finds the blocks of a row that has ended, which the host does not know yet."""
    request, tokens = ending(replace(rows_of("r", 1), prompt_ids=np.arange(3, 19, dtype=np.int32)))
    stage = Stage(Never(), 16, 4)
    stage.ask(replace(rows_of("kept", 1), episodes=("e",)))
    while not stage.decoder.idle:
        stage.decoder.tick()
    stage.ask(request)
    stage.decoder.tick()
    [row] = stage.decoder.rows.running
    while len(row.tokens) < len(tokens) - 1:
        stage.decoder.tick()
    assert row.in_flight
    assert len(stage.decoder.kept) == 1
    stage.ask(replace(rows_of("large", 1), prompt_ids=np.arange(3, 35, dtype=np.int32)))
    stage.decoder.tick()
    assert len(stage.decoder.rows.running) == 1, "it has begun"
    assert len(stage.decoder.kept) == 1


def test_weights_stay_until_the_last_step_that_reads_them_has_landed() -> None:
    """The completion is delivered, its version is gone, and a step that computes a token too many still reads it."""
    request, tokens = ending(replace(rows_of("r", 1), adapter=AdapterRef("a", 1)))
    stage = Stage(Never(), 20, 2)
    stage.ask(request)
    weights = weakref.ref(stage.versions.pop(AdapterRef("a", 1)))
    while not stage.chunks["r"]:
        stage.decoder.tick()
    assert stage.outcome(request)[0][0] == tokens
    assert stage.cache.late, "a step is in flight"
    assert weights() is not None
    stage.finish()
    assert weights() is None, "nobody holds them any more"


@pytest.mark.parametrize("ahead", [True, False])
def test_an_abort_of_everything_lets_go_of_versions(ahead: bool) -> None:
    stage = Stage(Never() if ahead else None, 20, 2)
    stage.ask(replace(rows_of("r", 2), adapter=AdapterRef("a", 1)))
    for _ in range(5):
        stage.decoder.tick()
    weights = weakref.ref(stage.versions[AdapterRef("a", 1)])
    stage.decoder.abort({"r"})
    stage.unload(AdapterRef("a", 1))
    assert weights() is None


def test_stop_tokens_of_rows_that_have_left_are_forgotten() -> None:
    request, stage = rows_of("short", 1), Stage(Never(), 100, 4)
    first = in_turn(request)[0][0][0]
    others = tuple(token for token in range(N_VOCAB) if token != first)
    stage.ask(replace(request, sampling=replace(request.sampling, stop_token_ids=others)))
    stage.ask(rows_of("long", 1, max_tokens=60))
    while not stage.chunks["short"]:
        stage.decoder.tick()
    for name in "ab":  # rows change
        stage.ask(rows_of(name, 1, max_tokens=4))
        while not stage.chunks[name]:
            stage.decoder.tick()
    landed = stage.decoder._steps.again()
    assert landed is not None
    assert not landed.touched, "a token that ends nothing is not looked at"


def test_a_step_that_changes_nothing_copies_nothing() -> None:
    """Rows join with their records, grow by an entry for each block, and else nothing is copied to the device."""
    stage, n_tokens = Stage(random.Random(1), 100, 8), 40
    sampling = SamplingParams(max_tokens=n_tokens)
    stage.ask(GenerateRequest("r", "job 0", np.arange(3, 7, dtype=np.int32), None, sampling, tuple(range(8))))
    stage.finish()
    executor = stage.executor
    assert isinstance(executor, LateExecutor)
    assert executor.launches == n_tokens - 1
    assert executor.changed_launches == n_tokens // BLOCK
    assert executor.changes == 8 * (8 + 2) + 8 + 8 * (n_tokens // BLOCK - 1)


def test_rows_with_a_grammar_get_a_token_in_every_tick() -> None:
    """As other rows do, which are one step ahead."""
    stage, n_tokens = Stage(Never(), 100, 4), 30
    stage.ask(rows_of("plain", 1, max_tokens=n_tokens))
    stage.ask(rows_of("masked", 2, max_tokens=n_tokens, grammar="third"))
    n_ticks = 0
    while not stage.chunks["masked"]:
        stage.decoder.tick()
        n_ticks += 1
    assert n_ticks <= n_tokens + 2
    stage.finish()


class BusyHost(TimedExecutor):
    """The host needs a while for each launch, during which the device should have something to do."""

    began: float | None = None
    idle = 0.0

    def launch(self, step: DeviceStep) -> Any:
        self.now += 0.004
        if self.began is None:
            self.began = self.now
        else:
            self.idle += max(0.0, self.now - self.free)
        return super().launch(step)


class Unending(EveryThird):
    """The mask after its first token never comes, and nobody may wait for it."""

    def compute(self) -> float:
        assert not self.pending
        return super().compute()

    def take(self, token: int) -> str:
        self.pending = True
        return super().take(token)


def plain_beside(masked: int, grammar: type[EveryThird], n_tokens: int) -> tuple[int, float, float]:
    """Ticks and seconds until a plain row has its tokens beside masked rows, and seconds that the device was idle."""
    stage = Stage(Never(), 100, 8, executor=BusyHost)
    executor = stage.executor
    assert isinstance(executor, BusyHost)
    if masked:
        stage.ask(rows_of("masked", masked, max_tokens=2 * n_tokens, grammar="third"))
        for sequence in stage.decoder.rows.waiting[0].waiting:
            sequence.grammar = grammar()
    stage.ask(rows_of("plain", 1, max_tokens=n_tokens))
    n_ticks = 0
    while not stage.chunks["plain"]:
        stage.decoder.tick()
        n_ticks += 1
    assert not masked or not stage.chunks["masked"]
    stage.decoder.abort({"masked"})
    stage.finish()
    assert executor.began is not None
    return n_ticks, executor.free - executor.began, executor.idle


def test_rows_of_a_mask_that_never_comes_take_nothing_from_others() -> None:
    """Ticks, time and the device's rest are those of the plain row alone."""
    assert plain_beside(3, Unending, 40) == pytest.approx(plain_beside(0, Unending, 40))


def test_the_device_never_waits_for_the_host_beside_rows_with_a_grammar() -> None:
    """Plain rows get a token in every tick, and their step runs while the host makes the next masks."""
    n_ticks, seconds, _ = plain_beside(0, EveryThird, 40)
    ticks, beside, idle = plain_beside(3, EveryThird, 40)
    assert idle < 0.01
    assert ticks == n_ticks
    assert beside == pytest.approx(2 * seconds, rel=0.05), "each tick has two steps"


def test_a_base_with_recurrent_states_does_not_run_ahead() -> None:
    """A step too many would change a state, which no block of a row keeps."""
    kinds = []
    for name in ("llama", "lfm2"):
        cache = PoisonedCache(20, BLOCK, 3)
        executor = LateExecutor(cache, N_VOCAB, Never())
        kinds.append(type(Decoder(tiny.base(name), cache, max_rows=2, prefill_tokens=40, executor=executor)._steps))
    assert kinds == [PipelinedSteps, SynchronousSteps]


def test_payers_whose_rows_have_left_are_forgotten_beside_a_row_that_stays() -> None:
    stage, n_jobs = Stage(Never(), 400, 4), 40
    stage.ask(rows_of("stays", 1, max_tokens=240))
    for index in range(n_jobs):
        stage.ask(replace(rows_of(f"r{index}", 1, max_tokens=2), job=f"short {index}"))
        while not stage.chunks[f"r{index}"]:
            stage.decoder.tick()
    assert not stage.chunks["stays"]
    assert len(stage.decoder._steps._payers) < n_jobs / 2  # type: ignore[attr-defined]
    assert {stage.turns.parts[f"short {index}"] for index in range(n_jobs)} == {stage.turns.parts["short 0"]}
    stage.finish()
