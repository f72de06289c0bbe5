"""Drafts: tokens that are guessed and checked change how soon answers come, and not one bit of them."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.config import EngineConfig
from motet.core.device import Device
from motet.core.types import AdapterRef, FinishReason, GenerateRequest, SamplingParams
from motet.hosting.launch import load
from motet.model.kv_cache import KVCache
from motet.rollout.decoder import Decoder
from motet.rollout.drafts import Drafts, _Ticks
from motet.rollout.embedded import EmbeddedEngine
from motet.rollout.sequences import Prompt, SampledSequence
from tests.support import tiny_models as tiny
from tests.support.decoding import ASKS, Ask, Outcome, adapters, add, as_request, broken, finish, outcomes
from tests.support.small_runs import REWARDS, job, run
from tests.support.waiting import PATIENCE

OWN, DTYPE, BLOCK = "llama/native-dpbf16", "bfloat16", 16


class Eager(Drafts):
    """Checks every guess, however unlikely."""

    def of(self, running: Sequence[SampledSequence], spare: int) -> list[list[int]]:
        self._rest = 0
        self.checked(len(running), 0, 0, 1.0)
        return super().of(running, spare)

    def _worth(self, n_rows: int, likely: list[float]) -> int:
        return len(likely)


def make(drafts: Drafts | None, n_blocks: int = 64, max_rows: int = 8, prefill: int = 64, host: int = 0) -> Decoder:
    base = tiny.base(OWN, DTYPE)
    cache = KVCache(n_blocks, BLOCK, base.device, clean=base.attention.reads_past_end, slots=max_rows + 1)
    decoder = Decoder(base, cache, max_rows=max_rows, prefill_tokens=prefill, host_bytes=host, speculates=True)
    assert decoder.drafts is not None
    decoder.drafts = drafts
    return decoder


def answers(decoder: Decoder, ask: Ask, name: str = "r", **sampling: Any) -> list[Outcome]:
    weights = (*adapters(DTYPE, OWN), broken(DTYPE, OWN))[ask.adapter]
    chunks = add(decoder, as_request(name, ask, **sampling), weights)
    finish(decoder)
    return outcomes(chunks, len(ask.seeds))


@functools.cache
def alone(ask: Ask, seed: int) -> Outcome:
    return answers(make(None), replace(ask, seeds=(seed,)))[0]


@settings(max_examples=30)
@given(ASKS, st.integers(0, 10), st.integers(1, 9), st.integers(1, 80), st.sampled_from([0, 30_000, 1 << 30]))
def test_any_mix_gives_each_request_what_it_gets_without_drafts(asks, more_blocks, max_rows, prefill, host):
    """Twice, so that the second time nearly every guess is right; small caches preempt, a NaN stays with its tenant."""
    decoder = make(Eager(), max(ask.blocks for ask in asks) + more_blocks, max_rows, prefill, host)
    for _ in range(2):
        running = []
        for index, ask in enumerate(asks):
            weights = (*adapters(DTYPE, OWN), broken(DTYPE, OWN))[ask.adapter]
            running.append((ask, add(decoder, as_request(f"r{index}", ask), weights)))
            decoder.tick()
        finish(decoder)
        for ask, chunks in running:
            for seed, outcome in zip(ask.seeds, outcomes(chunks, len(ask.seeds)), strict=True):
                assert outcome == alone(replace(ask, seeds=(), tick=0, stream=False), seed)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_k": 5}, {"temperature": 0.5, "top_p": 0.9}])
def test_what_was_answered_before_is_answered_in_fewer_ticks(sampling: dict[str, Any]) -> None:
    ask = Ask(prompt=20, max_tokens=60, adapter=1, seeds=(1, 2, 3))
    plain = answers(make(None), ask, **sampling)
    decoder = make(drafts := Eager())
    ticks = []
    for _ in range(2):
        before = drafts.accepted
        assert answers(decoder, ask, **sampling) == plain
        ticks.append(sum(len(tokens) for tokens, *_ in plain) - (drafts.accepted - before))
    assert ticks[1] < 0.4 * ticks[0]


def test_an_answer_ends_where_it_would_without_drafts() -> None:
    """A token that ends it may be a draft; what was guessed after it is dropped."""
    ask = Ask(prompt=20, max_tokens=40, seeds=(5,))
    ((tokens, *_),) = answers(make(None), ask)
    stopped: dict[str, Any] = {"stop_token_ids": (tokens[21],)}
    plain = answers(make(None), ask, **stopped)
    decoder = make(drafts := Eager())
    answers(decoder, ask)
    assert answers(decoder, ask, **stopped) == plain
    assert plain[0][3] is FinishReason.STOP
    assert drafts.accepted > 15


def test_nobody_elses_answers_are_guessed_from() -> None:
    ask, found = Ask(prompt=20, max_tokens=40, seeds=(5,)), []
    changes: tuple[dict[str, Any], ...] = ({}, {"job": "another"}, {"tenant": "another"}, {})
    for changed in changes:
        decoder = make(drafts := Eager())
        answers(decoder, ask)
        chunks = add(decoder, replace(as_request("again", ask), **changed), None)
        finish(decoder)
        found.append((outcomes(chunks, 1), drafts.accepted))
    assert found[0] == found[3]
    assert all(one[0] == found[0][0] for one in found)
    assert found[0][1] > 30 > 10 > max(found[1][1], found[2][1])


def test_what_was_drafted_is_told_beside_the_time_of_the_device() -> None:
    base, device = tiny.base(OWN, DTYPE), Device()
    engine = EmbeddedEngine(base, device, max_rows=4, kv_tokens=1024, prefill_tokens=64, speculates=True)
    engine.decoder.drafts = drafts = Eager()
    request = as_request("r", Ask(prompt=20, max_tokens=40, seeds=(5,)))

    async def run() -> None:
        for _ in range(2):
            async for _ in engine.generate(request):
                pass
        await device.run(lambda: None)  # the tick that gave the last token has ended

    asyncio.run(run())
    device.close()
    assert (device.busy.drafted, device.busy.accepted) == (drafts.drafted, drafts.accepted)
    assert device.busy.drafted >= device.busy.accepted > 10


def test_the_last_version_of_an_adapter_takes_its_answers_along() -> None:
    base, device = tiny.base(OWN, DTYPE), Device()
    engine = EmbeddedEngine(base, device, max_rows=4, kv_tokens=1024, prefill_tokens=64, speculates=True)
    drafts = engine.decoder.drafts
    assert drafts is not None

    async def left(*unloaded: int) -> int:
        for version in unloaded:
            await engine.unload_adapter(AdapterRef("adapter-1", version))
        return drafts._tokens

    weights = adapters(DTYPE, OWN)[1]
    assert weights is not None
    for version in (7, 8):
        engine.install(AdapterRef("adapter-1", version), weights)
    try:
        answers(engine.decoder, Ask(prompt=20, max_tokens=40, adapter=1, seeds=(5, 6)))
        assert [asyncio.run(left()), asyncio.run(left(7)), asyncio.run(left(8))] == [80, 80, 0]
        assert not drafts._answers
    finally:
        device.close()


class _Looked(str):
    """A name that the device's thread compares slowly."""

    compared, goes_on = threading.Event(), threading.Event()

    def __ne__(self, other: object) -> bool:
        if threading.current_thread() is not threading.main_thread():
            self.compared.set()
            self.goes_on.wait(PATIENCE)
        return str.__ne__(self, other)

    __hash__ = str.__hash__


def test_versions_that_are_published_meanwhile_do_not_end_an_unload() -> None:
    base, device = tiny.base(OWN, DTYPE), Device()
    engine = EmbeddedEngine(base, device, max_rows=4, kv_tokens=1024, prefill_tokens=64, speculates=True)
    weights = adapters(DTYPE, OWN)[1]
    assert weights is not None

    async def both() -> None:
        for name in ("gone", _Looked("other"), _Looked("third")):
            engine.install(AdapterRef(name, 1), weights)
        unloading = asyncio.create_task(engine.unload_adapter(AdapterRef("gone", 1)))
        await asyncio.to_thread(_Looked.compared.wait, 0.5)
        engine.install(AdapterRef("new", 1), weights)
        _Looked.goes_on.set()
        await unloading

    try:
        asyncio.run(both())
    finally:
        device.close()


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motet.rollout.drafts._KEPT_TOKENS", 100)
    drafts = Drafts()
    for index in range(30):
        request = GenerateRequest("r", "job", np.array([index % 3]), None, SamplingParams(max_tokens=50), (index,))
        sequence = SampledSequence(Prompt(request, None, lambda _: None), 0, index, tokens=[1] * 20)
        drafts.keep(sequence)
    assert sum(len(tokens) for each in drafts._answers.values() for _, tokens in each) < drafts._tokens <= 100


def test_what_is_learned_from_a_long_answer_is_bounded() -> None:
    drafts = Drafts()
    for rows in (1, 16):
        drafts._ticks.add(rows, 1.0)
    request = GenerateRequest("r", "job", np.array([1]), None, SamplingParams(max_tokens=10**6), (0,))
    prompt = Prompt(request, None, lambda _: None)
    drafts.of([SampledSequence(prompt, 0, 0, tokens=np.arange(60_000).tolist())], 8)
    assert len(drafts._continuations[prompt]._predictions) <= 100_000


@pytest.mark.parametrize(("name", "dtype"), [("llama", "float32"), ("qwen3_5", "bfloat16")])
def test_a_base_whose_rows_see_what_lies_beyond_them_has_no_drafts(name: str, dtype: str) -> None:
    base = tiny.base(name, dtype)
    cache = KVCache(16, BLOCK, base.device)
    assert Decoder(base, cache, max_rows=4, prefill_tokens=64, speculates=True).drafts is None


@pytest.mark.parametrize(("per_row", "same", "pays"), [(0.0, 1.0, True), (0.2, 1.0, True), (1.0, 0.1, False)])
def test_drafts_are_checked_where_rows_are_cheap(per_row: float, same: float, pays: bool) -> None:
    """`same` seconds of every tick and so many for each row; half of the drafts are right."""
    drafts = Drafts()
    drafts._trial = 1
    for rows in (4, 6, 8, 12, 16):
        drafts._ticks.add(rows, same + per_row * rows)
    assert bool(drafts._worth(4, [0.5] * 8)) == pays


def test_where_drafts_do_not_pay_hardly_any_are_guessed() -> None:
    asked = []

    class Asked(Drafts):
        def checked(self, n_rows: int, drafted: int, accepted: int, seconds: float) -> None:
            """Nothing is learned."""

        def _draft(self, sequence: SampledSequence) -> list[tuple[int, float]]:
            asked.append(sequence)
            return []

    decoder = make(drafts := Asked(least=0.0))
    for rows in range(1, 200):
        drafts._ticks.add(rows, float(rows))
    drafts._trial = 1
    answers(decoder, Ask(prompt=20, max_tokens=100, seeds=(5,)))
    assert 0 < len(asked) < 15


def test_the_time_of_a_tick_is_that_of_others_like_it() -> None:
    ticks = _Ticks()
    ticks.add(4, 1.0)
    ticks.add(8, 2.0)
    assert (ticks.of(3), ticks.of(4), ticks.of(6), ticks.of(8)) == (1.0, 1.0, 1.5, 2.0)
    assert (ticks.of(16), ticks.of(32)) == (2.0, 4.0), "twice the most is worth a try"
    ticks.add(8, 100.0)
    assert ticks.of(8) == pytest.approx(2.4), "one that was disturbed counts little"


def test_blocks_of_drafts_that_were_wrong_are_given_back() -> None:
    class Wrong(Eager):
        def _draft(self, sequence: SampledSequence) -> list[tuple[int, float]]:
            return [(token, 0.9) for token in range(30)]

    decoder = make(Wrong())
    add(decoder, as_request("r", Ask(prompt=20, max_tokens=60, seeds=(5,))), None)
    while not decoder.idle:
        decoder.tick()
        assert all(len(item.blocks) == -(-item.length // BLOCK) for item in decoder.rows.running)


@pytest.mark.parametrize("common", [True, False])
def test_evaluations_with_common_random_numbers_differ_only_where_the_adapter_does(
    common: bool, tmp_path: Path
) -> None:
    base = load("small", EngineConfig(threads=1, kernels="native"))
    (tmp_path / "rewards.py").write_text(REWARDS)
    evaluation = {"every": 1, "n": 4, "common_random_numbers": common}
    still = job("still", tmp_path / "rewards.py", optimizer={"lr": 1e-30}, eval=evaluation, steps=1)
    run(base, tmp_path / "run", [still], kernels="native")
    first, second = (
        [json.loads(line)["completion"] for line in path.read_text().splitlines()]
        for path in sorted((tmp_path / "run/still/rollouts").glob("eval-*.jsonl"))
    )
    assert (first == second) == common
