"""Continuous batching: whatever shares the batch, a request gets the tokens it would get alone, and gives its blocks back."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from motet.core.device import DECODES, Device
from motet.core.errors import DeviceError, DeviceLost, EngineError
from motet.core.tenant_turns import LEAD, Payer, TenantTurns
from motet.core.types import AdapterRef, Chunk, FinishReason, GenerateRequest
from motet.model.kv_cache import KVCache
from motet.model.lora_model import LoraModel
from motet.rollout.decoder import Decoder
from motet.rollout.embedded import EmbeddedEngine
from tests.support import inside
from tests.support import tiny_models as tiny
from tests.support.cases import few
from tests.support.decoding import (
    ASKS,
    BLOCK,
    CPU,
    ROOMY,
    Ask,
    Outcome,
    adapters,
    add,
    as_request,
    broken,
    finish,
    outcomes,
)
from tests.support.waiting import PATIENCE, until

pytestmark = [pytest.mark.tier1, pytest.mark.bits]


def make_decoder(
    n_blocks: int = 64,
    max_rows: int = 8,
    prefill: int = 64,
    dtype: str = "float32",
    name: str = "llama",
    host: int = 0,
) -> Decoder:
    """A decoder for which every piece of work takes as long, however busy the machine is."""
    cache, turns = KVCache(n_blocks, BLOCK, CPU, slots=max_rows + 1), TenantTurns(itertools.count(0, 0.001).__next__)
    base = tiny.base(name, dtype)
    return Decoder(base, cache, max_rows=max_rows, prefill_tokens=prefill, host_bytes=host, turns=turns)


@functools.cache
def alone(ask: Ask, seed: int, dtype: str, name: str = "llama") -> Outcome:
    decoder = make_decoder(dtype=dtype, name=name)
    weights = (*adapters(dtype, name), broken(dtype, name))[ask.adapter]
    chunks = add(decoder, as_request("alone", replace(ask, seeds=(seed,))), weights)
    finish(decoder)
    return outcomes(chunks, 1)[0]


def assert_as_alone(asks: Iterable[Ask], decoder: Decoder, dtype: str, name: str = "llama", tenants: int = 1) -> None:
    waiting = sorted(enumerate(asks), key=lambda pair: pair[1].tick)
    running: list[tuple[Ask, list[Chunk]]] = []
    for tick in range(1000):
        while waiting and waiting[0][1].tick <= tick:
            index, ask = waiting.pop(0)
            weights = (*adapters(dtype, name), broken(dtype, name))[ask.adapter]
            request = replace(
                as_request(f"r{index}", ask), tenant=f"tenant {index % tenants}", share=1.0 + index % tenants
            )
            running.append((ask, add(decoder, request, weights)))
        if not waiting and decoder.idle:
            break
        decoder.tick()
        assert len(decoder.rows.running) <= decoder.rows.most
    finish(decoder)
    for ask, chunks in running:
        for seed, outcome in zip(ask.seeds, outcomes(chunks, len(ask.seeds)), strict=True):
            assert outcome == alone(replace(ask, seeds=(), tick=0, stream=False), seed, dtype, name)


BASES = [("llama", "float32"), ("llama", "bfloat16"), ("qwen3_5", "bfloat16"), ("falcon_h1", "float32")]
"""The last two keep states: a slot for each row, and one more."""


HOSTS = [0, 30_000, ROOMY]
"""Bytes of host memory: for nothing, for some of what gives way, for all of it."""


FEW_ROWS = [
    [
        Ask(10, 3, 5, (3, 2), 4),
        Ask(85, 13, 1, (3, 2, 0), 5),
        Ask(93, 9, 3, (1, 0, 2), 4),
    ],
    [
        Ask(8, 7, 2, (1, 0), 12),
        Ask(16, 10, 2, (3,), 11),
        Ask(12, 5, 4, (3, 0, 1, 2), 8),
        Ask(24, 1, 2, (2, 3), 6),
        Ask(18, 6, 2, (2,), 3),
    ],
    [
        Ask(10, 6, 3, (1, 3, 2), 1),
        Ask(28, 1, 2, (0, 3, 2, 1), 11, stream=True),
        Ask(32, 4, 1, (2, 0, 3, 1), 2),
        Ask(30, 9, 0, (1,), 11),
        Ask(18, 9, 0, (1, 2, 0), 3, stream=True),
        Ask(36, 6, 2, (1, 3), 8),
    ],
]
"""Tenants take turns while their prompts are read in parts, and each gives way to another: here nobody went on once."""


@pytest.mark.parametrize("mixes", few((4, 20), 4))
@pytest.mark.slow
def test_any_mix_gives_each_request_what_it_gets_alone(mixes):
    """Small caches preempt, small budgets delay, tenants give way, one tenant's NaN stays in it: not one bit changes."""

    @settings(max_examples=mixes)
    @given(
        ASKS,
        st.integers(0, 10),
        st.integers(1, 9),
        st.integers(1, 20) | st.integers(1, 80),
        st.sampled_from(BASES),
        st.sampled_from(HOSTS),
        st.integers(1, 3),
    )
    @example(FEW_ROWS[0], 0, 1, 9, BASES[0], 0, 3)
    @example(FEW_ROWS[1], 0, 1, 1, BASES[2], 30_000, 3)
    @example(FEW_ROWS[2], 0, 3, 4, BASES[3], 30_000, 3)
    def mix(asks, more_blocks, max_rows, prefill, base, host, tenants):
        name, dtype = base
        decoder = make_decoder(max(ask.blocks for ask in asks) + more_blocks, max_rows, prefill, dtype, name, host)
        assert_as_alone(asks, decoder, dtype, name, tenants)

    mix()


def test_short_ticks_beside_other_tenants_change_no_bit() -> None:
    """Each tick decodes the one row that waits longest, of the tenant that had least."""
    asks = [Ask(prompt=5 + index, max_tokens=6, adapter=index, seeds=(1, 2), tick=index) for index in range(4)]
    decoder = make_decoder(max_rows=8)
    for _ in range(20):
        decoder._turns._decoding.add(8, 80.0)  # a row takes ten seconds
        decoder._turns._decoding.add(4, 40.0)
    running = []
    for index, ask in enumerate(asks):
        request = replace(as_request(f"r{index}", ask), job=f"job {index}", tenant=f"tenant {index % 2}")
        running.append((ask, add(decoder, request, adapters("float32", "llama")[ask.adapter])))
    ticks = 0
    while not decoder.idle:
        decoder.tick()
        ticks += 1
    assert ticks > 8 * 5, "a tick decoded more than one row"
    for ask, chunks in running:
        for seed, outcome in zip(ask.seeds, outcomes(chunks, 2), strict=True):
            assert outcome == alone(replace(ask, seeds=(), tick=0), seed, "float32")


@pytest.mark.parametrize(
    ("name", "dtype", "extra"),
    few(
        [*((*base, 0) for base in BASES), *((*base, extra) for base in BASES[:2] for extra in (1, 3))],
        ("llama", "float32", 1),
        ("qwen3_5", "bfloat16", 0),
    ),
)
def test_preempted_equals_not_preempted(name, dtype, extra):
    asks = [Ask(19, 30 if extra == 3 else 14, adapter=i % 3, seeds=(1, 2, 3)) for i in range(4)]
    decoder = make_decoder(asks[0].blocks + extra, dtype=dtype, name=name)
    assert_as_alone(asks, decoder, dtype, name)
    assert decoder.rows.preemptions > 0
    assert decoder.prefills > len(asks)


@pytest.mark.parametrize(("name", "dtype"), few(BASES, BASES[3]))
@pytest.mark.slow
def test_what_gave_way_comes_back_without_being_computed_again(name, dtype):
    """With room in host memory every prompt is prefilled once; with too little some are again, and no bit differs."""
    asks = [Ask(19, 14, adapter=i % 3, seeds=(1, 2, 3)) for i in range(4)]
    prompts = sum(ask.prompt for ask in asks)
    roomy, none = (make_decoder(2 * asks[0].blocks, dtype=dtype, name=name, host=host) for host in (ROOMY, 0))
    assert_as_alone(asks, roomy, dtype, name)
    cache, host = roomy.cache, roomy.host
    assert (roomy.prefilled_tokens, host.tokens_in) == (prompts, host.tokens_out)
    assert roomy.rows.preemptions > 0
    assert host.prefills_saved >= roomy.rows.preemptions
    tight = make_decoder(
        2 * asks[0].blocks, dtype=dtype, name=name, host=4 * cache.bytes_per_block + cache.states.bytes_per_slot
    )
    for decoder in (tight, none):
        assert_as_alone(asks, decoder, dtype, name)
    assert prompts < tight.prefilled_tokens < none.prefilled_tokens
    assert (tight.host.prefills_saved > 0, none.host.prefills_saved) == (True, 0)


def test_a_group_that_gives_way_leaves_its_prompt_once():
    """Eight completions share three full blocks; of the host's memory they take three, and one or two for each that waits."""
    decoder = make_decoder(3 + 6, max_rows=8, host=ROOMY)
    chunks = add(decoder, as_request("group", Ask(24, 14, seeds=tuple(range(8)))), None)
    waited = 0
    while not decoder.idle:
        decoder.tick()
        waited = max(waited, len(decoder.rows.preempted))
        assert decoder.host.used <= (3 + 2 * len(decoder.rows.preempted)) * decoder.cache.bytes_per_block
    finish(decoder)
    assert waited > 2
    assert decoder.prefills == 1
    for seed, outcome in enumerate(outcomes(chunks, 8)):
        assert outcome == alone(Ask(24, 14, seeds=()), seed, "float32")


@pytest.mark.parametrize(("name", "dtype"), few(BASES, BASES[0], BASES[2]))
@pytest.mark.slow
def test_non_finite_tenant_ends_with_error_and_its_blocks_do_no_harm(name, dtype):
    decoder = make_decoder(10, max_rows=3, dtype=dtype, name=name)
    first = add(decoder, as_request("nan", Ask(60, 9, seeds=(1, 2))), broken(dtype, name))
    finish(decoder)
    for tokens, _, _, reason in outcomes(first, 2):
        assert (tokens, reason) == ([], FinishReason.ERROR)
    assert all("not finite" in chunk.error for chunk in first)
    pools = inside.block_pools(decoder.cache), inside.state_pools(decoder.cache)
    for dirty in pools[: 2 if decoder.runner.base.stateful else 1]:
        assert any(states.isnan().any() for states in dirty), "the test has dirtied the cache"
    assert_as_alone([Ask(19, 9, adapter=i, seeds=(1, 2)) for i in (0, 1, 5, 3)], decoder, dtype, name)


def test_a_prompt_is_prefilled_once_for_its_group():
    decoder = make_decoder(max_rows=16)
    chunks = add(decoder, as_request("group", Ask(19, 6, seeds=tuple(range(12)))), None)
    finish(decoder)
    assert decoder.prefills == 1
    assert len({tuple(tokens) for tokens, *_ in outcomes(chunks, 12)}) > 1, "seeds give different tokens"


def test_prompt_blocks_are_shared():
    """Twelve completions of a prompt of three full blocks take one block each, not four."""
    decoder = make_decoder(3 + 12, max_rows=12)
    add(decoder, as_request("group", Ask(24, BLOCK, seeds=tuple(range(12)))), None)
    finish(decoder)
    assert (decoder.prefills, decoder.rows.preemptions) == (1, 0)


def test_every_token_has_its_version():
    decoder = make_decoder()
    base, adapted = (add(decoder, as_request(str(i), Ask(5, 6, adapter=i)), adapters()[i]) for i in (0, 1))
    finish(decoder)
    assert {version for chunk in base for version in chunk.versions.tolist()} == {-1}
    assert {version for chunk in adapted for version in chunk.versions.tolist()} == {7}


@pytest.mark.parametrize("ticks", [0, 1, 5])
def test_abort_ends_one_request_and_keeps_its_tokens(ticks):
    decoder = make_decoder(12, max_rows=3)
    ask = Ask(19, 12, seeds=(1, 2))
    gone = add(decoder, as_request("gone", ask), None)
    stays = add(decoder, as_request("stays", ask), None)
    for _ in range(ticks):
        decoder.tick()
    decoder.abort({"gone"})
    ended = outcomes(gone, 2)
    assert [reason for *_, reason in ended] == [FinishReason.ABORT] * 2
    for seed, (tokens, logprobs, *_) in zip(ask.seeds, ended, strict=True):
        whole = alone(replace(ask, seeds=()), seed, "float32")
        n = len(tokens)
        assert n == (ticks + 1 if ticks else 0)
        assert (tokens, logprobs) == (whole[0][:n], whole[1][:n])
    finish(decoder)
    for seed, outcome in zip(ask.seeds, outcomes(stays, 2), strict=True):
        assert outcome == alone(replace(ask, seeds=()), seed, "float32")


@pytest.mark.parametrize("host", [0, ROOMY])
def test_abort_of_preempted_and_waiting_completions(host):
    decoder = make_decoder(7, max_rows=2, host=host)
    chunks = [add(decoder, as_request(f"r{i}", Ask(19, 30, seeds=(1, 2))), None) for i in range(3)]
    while not decoder.rows.preemptions:
        decoder.tick()
    assert (decoder.host.used > 0) == (host > 0)
    decoder.abort({"r0", "r1", "r2"})
    finish(decoder, 0)
    assert {reason for each in chunks for *_, reason in outcomes(each, 2)} == {FinishReason.ABORT}


# --- the engine around it -----------------------------------------------------------------------------------------------


def make_engine(device: Device, base: LoraModel, kv_tokens: int = 64, host: int = 0) -> EmbeddedEngine:
    return EmbeddedEngine(base, device, max_rows=4, kv_tokens=kv_tokens, prefill_tokens=64, host_kv_bytes=host)


async def collect(engine: EmbeddedEngine, request: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request)]


@pytest.mark.parametrize(
    ("ask", "kv_tokens", "message"),
    [
        (
            Ask(40, 25),
            64,
            r"context length is 64 .* 65 tokens \(40 in the prompt, 25 in the completion\), .* raise engine\.kv_tokens or",
        ),
        (
            Ask(200, 57),
            1024,
            "context length is 256 tokens.*; lower sampling.max_tokens, shorten the prompt or drop it with data",
        ),
        (Ask(3, 3, adapter=1), 64, "version 7 of 'adapter-1' is not loaded"),
        (Ask(0, 3), 64, "empty prompt or no seeds"),
        (Ask(3, 3, seeds=()), 64, "empty prompt or no seeds"),
    ],
)
def test_requests_that_can_never_be_served_are_refused(ask, kv_tokens, message, device):
    engine = make_engine(device, tiny.base("llama"), kv_tokens)
    with pytest.raises(EngineError, match=f"request r1 of job 'job'.*{message}"):
        asyncio.run(collect(engine, as_request("r1", ask)))


def test_longest_request_is_served_and_scored_with_the_same_bits(device):
    engine, ask = make_engine(device, tiny.base("llama")), Ask(40, 24, adapter=1, seeds=(1, 2))
    weights = adapters()[1]
    assert weights is not None
    engine.install(AdapterRef("adapter-1", 7), weights)

    async def run() -> None:
        request = as_request("r1", ask)
        for chunk in await collect(engine, request):
            assert chunk.finish_reason is FinishReason.LENGTH
            scores = await engine.score(np.concatenate([request.prompt_ids, chunk.token_ids]), request.adapter)
            assert np.array_equal(scores[40:], chunk.logprobs)
        with pytest.raises(EngineError, match="is not loaded"):
            await engine.score(request.prompt_ids, AdapterRef("adapter-1", 8))

    asyncio.run(run())


def test_versions_are_never_replaced_and_leave(device):
    engine, ref = make_engine(device, tiny.base("llama")), AdapterRef("adapter-1", 7)
    weights = adapters()[1]
    assert weights is not None
    engine.install(ref, weights)
    with pytest.raises(EngineError, match=r"version 7 of adapter.*is loaded already"):
        engine.install(ref, weights)
    asyncio.run(engine.unload_adapter(ref))
    with pytest.raises(EngineError, match="is not loaded"):
        asyncio.run(collect(engine, as_request("r", Ask(3, 3, adapter=1))))


def test_a_caller_that_leaves_aborts_its_request(device):
    engine = make_engine(device, tiny.base("llama"))

    async def run() -> None:
        stream: Any = engine.generate(as_request("r", Ask(9, 50, seeds=(1, 2), stream=True)))
        first = await anext(stream)
        assert first.finish_reason is None
        await stream.aclose()
        await collect(engine, as_request("next", Ask(9, 50)))  # served after the abort was seen

    asyncio.run(run())
    assert engine.cache.n_free == engine.cache.n_blocks


class FailingTokenizer:
    """Fails once, when it is time, as a device may."""

    def __init__(self, tokenizer: Any, due: Callable[[int], bool]) -> None:
        self.tokenizer = tokenizer
        self.due = due
        self.calls = 0
        self.failed = False

    def decode(self, *args: Any, **options: Any) -> str:
        self.calls += 1
        if self.due(self.calls) and not self.failed:
            self.failed = True
            raise RuntimeError("out of memory")
        text: str = self.tokenizer.decode(*args, **options)
        return text


class FullDevice(KVCache):
    """Has no memory for the copy of one block."""

    copies = 0
    fails = 0
    """Which one; the first is 1."""

    def copy(self, source: int) -> int:
        self.copies += 1
        if self.copies == self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().copy(source)


@pytest.mark.parametrize("fails", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
@pytest.mark.slow
def test_a_fault_at_the_start_of_completions_loses_none_of_them(name: str, fails: int) -> None:
    """Nor of an earlier prompt, which waits for nothing any more: their callers are told, and their blocks come back."""
    cache = FullDevice(64, BLOCK, CPU, slots=9)
    decoder = Decoder(tiny.base(name), cache, max_rows=8, prefill_tokens=64)
    cache.fails = fails
    asks = [Ask(BLOCK + 3, 4, seeds=(1, 2, 3), adapter=1), Ask(2 * BLOCK + 1, 4, seeds=(4, 5, 6))]
    for number, ask in enumerate(asks):
        add(decoder, as_request(f"r{number}", ask), adapters("float32", name)[ask.adapter])
    with pytest.raises(torch.OutOfMemoryError):
        finish(decoder)
    assert {prompt.request.id for prompt in decoder.fail_all()} == {"r0", "r1"}
    finish(decoder)
    assert_as_alone(asks, decoder, "float32", name)


def assert_all_are_told(device: Device, requests: list[GenerateRequest], due: Callable[[int, Decoder], bool]) -> None:
    """Nobody waits for ever, no block is lost, and the next request is served."""
    base = tiny.base("llama")
    tokenizer: Any = FailingTokenizer(base.info.tokenizer, lambda calls: due(calls, engine.decoder))
    engine = make_engine(
        device, replace(base, info=replace(base.info, tokenizer=tokenizer), block_size=BLOCK), kv_tokens=56
    )  # small enough to preempt

    async def run() -> None:
        jobs = [asyncio.wait_for(collect(engine, request), PATIENCE) for request in requests]
        results = await asyncio.gather(*jobs, return_exceptions=True)
        told = [result for result in results if isinstance(result, DeviceError)]
        assert told, results
        assert all("out of memory" in str(error) for error in told)
        assert not any(isinstance(result, TimeoutError) for result in results)
        assert engine.cache.n_free == engine.cache.n_blocks
        again = await asyncio.wait_for(collect(engine, requests[0]), PATIENCE)
        assert {chunk.finish_reason for chunk in again} == {FinishReason.LENGTH}

    asyncio.run(run())


STOP = ("no such text",)  # makes the decoder look at the text of every token


@pytest.mark.parametrize("after", few([1, 2, 3, 4, 9, 40, 93], 1, 4, 40))
def test_every_caller_is_told_of_a_fault_and_the_engine_goes_on(after, device):
    requests = [as_request(f"r{i}", Ask(19, 30, seeds=(1, 2, 3)), stop=STOP) for i in range(3)]
    assert_all_are_told(device, requests, lambda calls, _: calls == after)


def test_a_completion_that_comes_back_is_told_too(device):
    """The fault comes while a preempted completion, the only one of its request, is brought in again."""
    requests = [as_request(f"r{i}", Ask(19, 30), stop=STOP) for i in range(2)]
    assert_all_are_told(device, requests, lambda _, decoder: decoder.prefills > len(requests))


def test_at_a_lost_device_nobody_waits() -> None:
    """Nor who comes while it is examined."""
    failing, asked = threading.Event(), threading.Event()

    def check() -> None:
        failing.set()
        assert asked.wait(PATIENCE)
        raise OSError("an illegal memory access was encountered")

    base = tiny.base("llama")
    tokenizer: Any = FailingTokenizer(base.info.tokenizer, lambda calls: calls == 4)
    with contextlib.closing(Device(check=check)) as device:
        engine = make_engine(device, replace(base, info=replace(base.info, tokenizer=tokenizer)))
        requests = [as_request(f"r{i}", Ask(19, 30, seeds=(1, 2)), stop=STOP) for i in range(3)]

        async def run() -> None:
            jobs = [asyncio.create_task(collect(engine, request)) for request in requests]
            await until(failing.is_set)
            jobs.append(asyncio.create_task(collect(engine, as_request("late", Ask(19, 30)))))
            await asyncio.sleep(0)  # it has arrived
            asked.set()
            async with asyncio.timeout(PATIENCE):
                results = await asyncio.gather(*jobs, return_exceptions=True)
            assert {type(result) for result in results} == {DeviceLost}, results
            with pytest.raises(DeviceLost, match="an illegal memory access"):
                await asyncio.wait_for(collect(engine, requests[0]), PATIENCE)

        asyncio.run(run())


@pytest.mark.parametrize("host", few([0, ROOMY], ROOMY))
@pytest.mark.parametrize(
    ("max_rows", "n_blocks", "greedy"),
    [(4, 64, Ask(5, 60, seeds=(1, 2, 3, 4, 5, 6))), (8, 16, Ask(5, 90, seeds=(1, 2, 3)))],
    ids=["of rows", "of cache"],
)
@pytest.mark.slow
def test_a_tenant_that_has_everything_keeps_nobody_waiting(
    max_rows: int, n_blocks: int, greedy: Ask, host: int
) -> None:
    """Another's two tokens come within a few ticks, again and again, and no bit of either changes."""
    decoder = make_decoder(n_blocks, max_rows, host=host)
    long = add(decoder, replace(as_request("long", greedy), job="long", tenant="greedy"), None)
    decoder.tick()
    while decoder.rows.free and decoder.cache.n_free:
        decoder.tick()
    chat, answers = Ask(5, 2, adapter=1), []
    for asked in range(3):
        answer = add(decoder, replace(as_request(f"chat {asked}", chat), job="chat", tenant="small"), adapters()[1])
        for _ in range(12):
            decoder.tick()
        answers.append(answer)
        assert answer, f"chat {asked} waits"
        assert not long, "the other tenant has not ended"
    finish(decoder)
    assert decoder.rows.preemptions > 0
    for answer in answers:
        assert outcomes(answer, 1)[0] == alone(chat, 1, "float32")
    for seed, outcome in zip(greedy.seeds, outcomes(long, len(greedy.seeds)), strict=True):
        assert outcome == alone(replace(greedy, seeds=()), seed, "float32")


def test_who_waits_for_a_row_holds_up_nobodys_calls() -> None:
    """It is served no sooner by it: every tenant has one row, and there are no more."""
    base, turns = tiny.base("llama"), TenantTurns()
    decoder = Decoder(base, KVCache(64, BLOCK, CPU, slots=2), max_rows=1, prefill_tokens=64, turns=turns)
    add(decoder, replace(as_request("long", Ask(5, 30)), tenant="long"), None)
    for _ in range(3):
        decoder.tick()
    add(decoder, replace(as_request("waits", Ask(5, 3)), tenant="waits"), None)
    decoder.tick()
    turns.come(["caller"], "calls")
    turns.charge(1.0, [(Payer("one", "caller"), 1.0)])
    turns.charge(2.0, [(Payer("other", "long"), 1.0)])
    decoder.tick()
    assert turns.ahead("caller", DECODES) <= 0


@pytest.mark.parametrize(("ahead", "answered"), [(LEAD / 2, True), (2 * LEAD, False)])
def test_an_answer_comes_though_its_tenants_job_has_used_the_device(ahead: float, answered: bool) -> None:
    """By no more than the lead; rows of the job itself wait for their turn, and the other's rows go on beside it."""
    turns = TenantTurns(itertools.count(0, 1e-6).__next__)
    decoder = Decoder(tiny.base("llama"), KVCache(64, BLOCK, CPU, slots=9), max_rows=8, prefill_tokens=64, turns=turns)
    for name in ("other", "job"):
        add(decoder, replace(as_request(name, Ask(5, 30)), tenant=name), None)
    for _ in range(4):
        decoder.tick()
    turns.charge(ahead, [(Payer("job", "job"), 1.0)])
    add(decoder, replace(as_request("asked", Ask(5, 30)), tenant="job", interactive=True), None)
    before = {item.prompt.request.id: len(item.tokens) for item in decoder.rows.running}
    for _ in range(4):
        decoder.tick()
    more = {
        one.prompt.request.id: len(one.tokens) - before.get(one.prompt.request.id, 0) for one in decoder.rows.running
    }
    assert more == ({"other": 3, "job": 0, "asked": 4} if answered else {"other": 4, "job": 0})


class Busy:
    """A tenant that asks for more rows than there are, however many requests end; each has its blocks from the start."""

    def __init__(self, decoder: Decoder, ask: Ask = Ask(2 * BLOCK + 1, 7), name: str = "busy") -> None:  # noqa: B008
        self.decoder, self.ask, self.name, self.chunks = decoder, ask, name, list[list[Chunk]]()

    @property
    def ended(self) -> int:
        return sum(bool(chunks) for chunks in self.chunks)

    def come(self) -> None:
        while len(self.chunks) < self.ended + self.decoder.rows.most:
            request = replace(as_request(f"{self.name} {len(self.chunks)}", self.ask), job=self.name, tenant=self.name)
            self.chunks.append(add(self.decoder, request, None))

    def tick(self) -> None:
        self.come()
        self.decoder.tick()


@pytest.mark.parametrize("host", [0, ROOMY])
@pytest.mark.parametrize("seeds", [(1,), (1, 2, 3)])
@pytest.mark.slow
def test_a_prompt_that_needs_most_of_the_cache_makes_nobody_give_way_in_vain(seeds: tuple[int, ...], host: int) -> None:
    """Its tenant's part is 10 of 20 blocks, it needs 15: it waits until others have ended, and then begins and ends."""
    decoder, ask = make_decoder(20, 7, host=host), Ask(14 * BLOCK, 6, seeds=seeds)
    busy = Busy(decoder)
    for _ in range(3):
        busy.tick()
    assert len(decoder.rows.running) == 6
    for asked in range(3):
        preempted, ended, ticks = decoder.rows.preemptions, busy.ended, 0
        large = add(decoder, replace(as_request(f"large {asked}", ask), tenant="large"), None)
        while len(large) < len(seeds) and ticks < 1000:
            busy.tick()
            ticks += 1
        assert decoder.rows.preemptions - preempted <= (10 * len(seeds) if asked or len(seeds) > 1 else 0)
        for seed, outcome in zip(seeds, outcomes(large, len(seeds)), strict=True):
            assert outcome == alone(replace(ask, seeds=()), seed, "float32")
        while busy.ended == ended and ticks < 1000:
            busy.tick()
            ticks += 1
        assert busy.ended > ended, "the other tenant is served"
    finish(decoder)
    assert {len(outcomes(chunks, 1)[0][0]) for chunks in busy.chunks} == {7}


@pytest.mark.parametrize("host", [0, ROOMY])
def test_a_long_sequence_that_gave_way_comes_back_and_ends(host: int) -> None:
    """It had more than its tenant's part while nobody else was there; the others are served at once, and it is later."""
    decoder, ask = make_decoder(20, 7, host=host), Ask(14 * BLOCK, 5 * BLOCK)
    large = add(decoder, replace(as_request("large", ask), tenant="large"), None)
    decoder.tick()
    busy, ticks = Busy(decoder), 0
    while not large and ticks < 1000:
        busy.tick()
        ticks += 1
    assert decoder.rows.preemptions <= 1 + 6, "it gave way once, and as it grew others did"
    assert busy.ended > 0
    assert outcomes(large, 1)[0] == alone(ask, 1, "float32")
    finish(decoder)


@pytest.mark.parametrize("host", [0, ROOMY])
def test_tenants_whose_sequences_do_not_divide_their_parts_do_not_take_turns_to_give_way(host: int) -> None:
    """Of 20 blocks one has 5 for each sequence, and one 3: two of one and three of the other fit, and nobody's fourth."""
    decoder = make_decoder(20, 7, host=host)
    fives, threes = Busy(decoder, Ask(4 * BLOCK + 1, 7), "fives"), Busy(decoder, name="threes")
    ticks = 0
    while min(fives.ended, threes.ended) < 8 and ticks < 1000:
        fives.come()
        threes.tick()
        ticks += 1
    assert min(fives.ended, threes.ended) >= 8
    assert decoder.rows.preemptions <= 8
    finish(decoder)
