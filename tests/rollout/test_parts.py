"""Long prompts are read in parts: rows that run wait for one part at most, and no bit differs from a prompt read at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from torch import Tensor

from motet.core.tenant_turns import SLACK, TenantTurns
from motet.core.types import Chunk, FinishReason, GenerateRequest
from motet.model.kv_cache import KVCache
from motet.rollout.decode_steps import NewTokens
from motet.rollout.decoder import Decoder
from motet.rollout.model_runner import ModelRunner
from motet.rollout.sequences import SampledSequence
from tests.support import tiny_models as tiny
from tests.support.cases import few
from tests.support.decoding import BLOCK, CPU, ROOMY, Ask, adapters, add, as_request, finish, outcomes

PART = 10
ROWS = 4
BASES = [
    ("llama", "float32"), ("llama", "bfloat16"), ("gemma3", "bfloat16"), ("qwen3_5", "bfloat16"), ("falcon_h1", "float32"),
]  # fmt: skip
"""Full attention, a sliding window, and two that keep states."""


class Counting(ModelRunner):
    """Counts the tokens of each pass, which take a millisecond each; of rows that run there are fewer than a part has."""

    now = 0.0
    largest = 0

    def logits(self, inputs: Sequence[NewTokens]) -> Tensor:
        n_tokens = sum(len(new.token_ids) for new in inputs)
        self.largest, self.now = max(self.largest, n_tokens), self.now + 0.001 * n_tokens
        return super().logits(inputs)


class Stage:
    """A decoder whose passes are counted."""

    def __init__(
        self,
        base: tuple[str, str] = BASES[0],
        *,
        n_blocks: int = 100,
        rows: int = ROWS,
        part: int = PART,
        host: int = 0,
    ) -> None:
        self.base, model = base, tiny.base(*base)
        cache = KVCache(n_blocks, BLOCK, CPU, slots=rows + 1)
        self.runner = Counting(model, cache)
        self.turns = TenantTurns(lambda: self.runner.now)
        self.decoder = Decoder(
            model, cache, max_rows=rows, prefill_tokens=part, kept_blocks=n_blocks // 3, host_bytes=host,
            turns=self.turns, executor=self.runner,
        )  # fmt: skip

    def add(self, name: str, ask: Ask, **changes: object) -> list[Chunk]:
        request: GenerateRequest = replace(as_request(name, ask), job=name, **changes)  # type: ignore[arg-type]
        return add(self.decoder, request, adapters(self.base[1], self.base[0])[ask.adapter])

    def row(self, name: str) -> SampledSequence:
        """The oldest row of this request."""
        return next(item for item in self.decoder.rows.running if item.prompt.request.id == name)

    def run_beside(self, row: SampledSequence, chunks: list[Chunk], n: int = 1) -> int:
        """Tick until n completions have ended; the row has a token of each tick. Returns the ticks before the first ends."""
        ticks = 0
        while sum(chunk.finish_reason is not None for chunk in chunks) < n:
            before = len(row.tokens)
            self.decoder.tick()
            assert len(row.tokens) == before + 1
            ticks += not chunks
        return ticks

    def finish(self) -> None:
        finish(self.decoder, 0 if self.decoder.idle else 1000)


@functools.cache
def at_once(base: tuple[str, str], ask: Ask) -> list[object]:
    """What a request gets alone, its prompt read in one pass."""
    stage = Stage(base, part=1000)
    chunks = stage.add("alone", ask)
    stage.finish()
    return list(outcomes(chunks, len(ask.seeds)))


BESIDE = Ask(5, 90)
LONG = Ask(97, 4, adapter=1, seeds=(1, 2, 3))


@pytest.mark.parametrize(("name", "dtype"), few(BASES, BASES[0], BASES[3]))
@pytest.mark.parametrize("seeds", [(1,), (1, 2, 3)])
def test_a_row_has_a_token_beside_each_part_of_a_prompt(name: str, dtype: str, seeds: tuple[int, ...]) -> None:
    base = (name, dtype)
    stage, ask = Stage(base), replace(LONG, seeds=seeds)
    beside = stage.add("beside", BESIDE)
    stage.decoder.tick()
    long, short = stage.add("long", ask), stage.add("short", Ask(8, 3))
    ticks = stage.run_beside(stage.row("beside"), long, len(seeds))
    assert stage.runner.largest <= PART
    assert ticks >= ask.prompt // PART
    assert outcomes(long, len(seeds)) == at_once(base, ask)
    stage.finish()
    assert outcomes(short, 1) == at_once(base, Ask(8, 3))
    assert outcomes(beside, 1) == at_once(base, BESIDE)
    assert (stage.decoder.prefills, stage.decoder.prefilled_tokens) == (3, 5 + 97 + 8)


@pytest.mark.parametrize(("name", "dtype"), few(BASES, BASES[0], BASES[3]))
def test_a_kept_turn_goes_on_in_parts(name: str, dtype: str) -> None:
    base = (name, dtype)
    whole, parts = (Stage(base, part=part) for part in (1000, PART))
    found = []
    for stage in (whole, parts):
        stage.add("beside", BESIDE)
        first = stage.add("first", Ask(20, 6, adapter=1), episodes=("e",))
        while not first:
            stage.decoder.tick()
        said = tiny.tokens(55, seed=3).numpy()
        ids = np.concatenate([as_request("first", Ask(20, 6, adapter=1)).prompt_ids, first[0].token_ids, said])
        before = stage.decoder.prefilled_tokens
        turn = stage.add("turn", LONG, prompt_ids=ids.astype(np.int32), seeds=(1,), episodes=("e",))
        ticks = stage.run_beside(stage.row("beside"), turn)
        assert stage.decoder.prefilled_tokens - before == 56, "what was kept is not read again"
        found.append(outcomes(turn, 1))
        assert ticks >= (1 if stage is whole else 6)
    assert parts.runner.largest <= PART
    assert found[0] == found[1]


@pytest.mark.parametrize(("name", "dtype"), few(BASES, BASES[0], BASES[3]))
def test_a_preempted_row_is_read_again_in_parts(name: str, dtype: str) -> None:
    """Another tenant takes its row for a while, and no host memory has its keys."""
    base = (name, dtype)
    stage = Stage(base, rows=2)
    stage.add("beside", BESIDE)
    long = stage.add("long", replace(LONG, max_tokens=9, seeds=(1,)))
    while len(stage.decoder.rows.running) < 2:
        stage.decoder.tick()
    short = stage.add("short", Ask(4, 1), tenant="another")
    while not short:
        stage.decoder.tick()
    assert [item.prompt.request.id for item in stage.decoder.rows.preempted] == ["long"]
    before, stage.runner.now = stage.decoder.prefilled_tokens, stage.runner.now + 10  # the other tenant is gone
    stage.run_beside(stage.row("beside"), long)
    assert stage.decoder.prefilled_tokens > before + 90
    assert stage.runner.largest <= PART
    assert outcomes(long, 1) == at_once(base, replace(LONG, max_tokens=9, seeds=(1,)))


@pytest.mark.parametrize("lead", [0.0, 0.05])
def test_beside_another_tenant_no_turn_is_longer_than_a_part(lead: float) -> None:
    """Their seconds stay level while a prompt of one is read, and rows have a step between two parts.

    Somebody who waits for an answer may be ahead, but the other's rows have their steps all the same.
    """
    stage = Stage()
    for name in ("other", "own"):
        stage.add(name, Ask(5, 200), tenant=name)
    while len(stage.decoder.rows.running) < 2:
        stage.decoder.tick()
    long = stage.add("long", replace(LONG, seeds=(1,)), tenant="own", interactive=lead > 0)
    own, other, parts = stage.row("own"), stage.row("other"), 0
    waits = other if lead else own
    while not long:
        tokens, read = len(waits.tokens), stage.decoder.prefilled_tokens
        stage.decoder.tick()
        parts = 0 if len(waits.tokens) > tokens else parts + (stage.decoder.prefilled_tokens > read)
        assert parts <= 1
        ahead = stage.turns.had("own") - stage.turns.had("other")
        assert -SLACK - 0.002 <= ahead <= SLACK + 0.001 * PART + (0.1 if lead else 0.0)
    assert stage.runner.largest <= PART
    assert len(other.tokens) > 30
    stage.finish()
    assert outcomes(long, 1) == at_once(BASES[0], replace(LONG, seeds=(1,)))


@pytest.mark.parametrize("host", [0, ROOMY])
@pytest.mark.parametrize(("name", "dtype"), few(BASES, BASES[0], BASES[4]))
def test_a_prompt_partly_read_gives_way_to_rows_that_grow(name: str, dtype: str, host: int) -> None:
    """With room on the host, no part is read twice."""
    base = (name, dtype)
    stage = Stage(base, n_blocks=20, host=host)
    beside = [stage.add(f"beside {n}", BESIDE) for n in range(3)]
    while len(stage.decoder.rows.running) < 3 or stage.decoder.cache.n_free > 15:
        stage.decoder.tick()
    long = stage.add("long", replace(LONG, seeds=(1,)), interactive=True)
    while not any(beside):
        stage.decoder.tick()
        assert not stage.decoder.rows.preempted or not any(one.blocks for one in stage.decoder.rows.waiting)
    stage.finish()
    assert outcomes(long, 1) == at_once(base, replace(LONG, seeds=(1,)))
    assert all(outcomes(one, 1) == at_once(base, BESIDE) for one in beside)


@pytest.mark.parametrize("ends", ["abort", "fail"])
@pytest.mark.parametrize("ticks", [1, 4])
def test_a_prompt_that_ends_partly_read_frees_its_blocks(ends: str, ticks: int) -> None:
    stage = Stage(BASES[3])
    beside, long = stage.add("beside", BESIDE), stage.add("long", LONG)
    for _ in range(ticks):
        stage.decoder.tick()
    (prompt,) = stage.decoder.rows.waiting
    assert prompt.blocks
    assert prompt.unread
    if ends == "fail":
        assert {one.request.id for one in stage.decoder.fail_all()} == {"beside", "long"}
        finish(stage.decoder, 0)
    else:
        stage.decoder.abort({"long"})
        assert [chunk.finish_reason for chunk in long] == [FinishReason.ABORT] * 3
        stage.finish()
        assert outcomes(beside, 1) == at_once(BASES[3], BESIDE)
    again = stage.add("again", LONG)
    stage.finish()
    assert outcomes(again, 3) == at_once(BASES[3], LONG)


class AskedTurns(TenantTurns):
    """Counts how often somebody asks what a tenant had."""

    asked = 0

    def had(self, tenant: str) -> float:
        self.asked += 1
        return super().had(tenant)


def test_a_step_beside_another_tenant_asks_once_what_each_tenant_had() -> None:
    model, cache, turns = tiny.base(*BASES[0]), KVCache(100, BLOCK, CPU), AskedTurns(lambda: 0.0)
    decoder = Decoder(model, cache, max_rows=6, prefill_tokens=64, turns=turns)
    for name in ("one", "other"):
        add(decoder, replace(as_request(name, Ask(5, 90, seeds=(1, 2, 3))), tenant=name), None)
    while len(decoder.rows.running) < 6:
        decoder.tick()
    turns.asked = 0
    decoder.tick()
    assert turns.asked == 2
