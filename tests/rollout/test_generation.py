"""One generation, interrupted where the test says: which version sampled which token, what is kept, and how it ends."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from motet.chat.template import Chat
from motet.core.types import Chunk, FinishReason, SamplingParams
from motet.runtime.generation import Draft, Generation, PutAside
from motet.runtime.versions import Versions
from tests.support.fake_base import END, FakeAdapter, FakePolicy, FakeTokenizer
from tests.support.fake_engine import FakeEngine, FakeSync
from tests.support.waiting import PATIENCE

CHAT = Chat(FakeTokenizer(), chat_template=False)
PROMPT = np.array(FakeTokenizer().encode("letter 7? "), np.int32)
KEYS = {0: 101, 1: 202, 2: 303}


@dataclass
class Told:
    """What came of one generation."""

    chunks: list[Chunk]
    engine: FakeEngine

    def seeds(self, n_prompt: int) -> list[tuple[int, ...]]:
        """The seeds of requests with a prompt of this length."""
        return [request.seeds for request in self.engine.requests if len(request.prompt_ids) == n_prompt]


def adapter(version: int) -> FakeAdapter:
    """Weights that differ from version to version."""
    fresh = FakeAdapter.fresh(4, 8.0, seed=1)
    return FakeAdapter(4, 8.0, fresh.a, np.linspace(-1, 1, len(fresh.b)) * (-1) ** version * version)


def generate(turns: Sequence[int], *, renew: bool = True, first: int = 0, capacity: int = 16, **sampling: Any) -> Told:
    """Complete a prompt from version `first` on; the next versions come after so many turns of the event loop each.

    Only the newest version is needed by others, so that each goes as soon as nobody holds it.
    """
    engine = FakeEngine(capacity=capacity)
    published = itertools.count(first)
    sync = FakeSync(engine, lambda name: adapter(next(published)))
    versions = Versions("a", "a.run.0", engine, sync)
    params = SamplingParams(**{"max_tokens": 12, **sampling})
    generation = Generation("a", "a/train/0/0", engine, versions, CHAT, params, renew, can_stop=False)

    async def scene() -> list[Chunk]:
        await versions.publish(first)
        await versions.announce(first, first)
        completing = asyncio.create_task(generation.complete(PROMPT, KEYS, 0, first))
        for version, pause in enumerate(turns, first + 1):
            for _ in range(pause):
                await asyncio.sleep(0)
            await versions.publish(version)
            await versions.announce(version, version)
        chunks = await completing
        await versions.drop_all()
        return chunks

    async def limited() -> list[Chunk]:
        async with asyncio.timeout(PATIENCE):
            return await scene()

    told = Told(asyncio.run(limited()), engine)
    assert engine.loads == engine.unloads
    return told


def check_logprobs(token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], first: int) -> None:
    """Each token from `first` on has the logprob that its version gives it, exactly."""
    policies = {version: FakePolicy(adapter(version)) for version in set(versions)}
    for place, (logprob, version) in enumerate(zip(logprobs, versions, strict=True), first):
        row = policies[version].row(int(token_ids[place - 1]), 1.0)
        assert np.float32(row[token_ids[place]]) == np.float32(logprob), place


@pytest.mark.parametrize("capacity", [16, 1])
def test_each_token_has_its_version_and_logprob_wherever_the_cut_falls(capacity: int) -> None:
    whole = generate([], capacity=capacity)
    mixtures = set()
    for pause in range(28 if capacity > 1 else 80):
        told = generate([pause, 10], capacity=capacity)
        for chunk, before in zip(told.chunks, whole.chunks, strict=True):
            tokens, versions = chunk.token_ids.tolist(), chunk.versions.tolist()
            n_first = versions.count(0)
            assert tokens[:n_first] == before.token_ids.tolist()[:n_first], "what was sampled before the cut is kept"
            assert (len(tokens), chunk.finish_reason) == (12, FinishReason.LENGTH), (
                "neither more nor fewer than max_tokens"
            )
            assert versions == sorted(versions)
            assert chunk.text == CHAT.completion_text(tokens)
            check_logprobs([*PROMPT.tolist(), *tokens], chunk.logprobs.tolist(), versions, len(PROMPT))
            mixtures.add(tuple(sorted(set(versions))))
    assert {(0,), (1, 2), (0, 1), (0, 1, 2)} <= mixtures, "the test of cuts never saw one"


def test_draws_after_a_cut_have_random_numbers_of_their_own() -> None:
    told = generate([9, 14, 14], max_tokens=40)
    continued = [request for request in told.engine.requests if len(request.prompt_ids) > len(PROMPT)]
    assert len(continued) >= 6
    used = [seed for request in told.engine.requests for seed in request.seeds]
    assert len(set(used)) == len(used), "numbers that were used before a cut come again after it"


def test_an_end_of_turn_under_a_newer_version_ends_the_completion() -> None:
    ended = 0
    for pause in range(4, 20):
        for chunk in generate([pause], stop_token_ids=(END,), max_tokens=40).chunks:
            tokens = chunk.token_ids.tolist()
            assert END not in tokens[:-1]
            assert (chunk.finish_reason is FinishReason.STOP) == (tokens[-1] == END)
            ended += tokens[-1] == END and set(chunk.versions.tolist()) == {0, 1}
    assert ended, "no completion ended after its cut"


def test_a_completion_without_a_token_goes_on_as_if_nothing_happened() -> None:
    """Also together with its siblings, so that their prompt is prefilled once."""
    later = generate([], first=1)
    early = [told for pause in range(4) if {1} == set((told := generate([pause])).chunks[0].versions.tolist())]
    assert early, "no interruption came before the first token"
    for told in early:
        for chunk, other in zip(told.chunks, later.chunks, strict=True):
            assert chunk.token_ids.tolist() == other.token_ids.tolist()
            assert chunk.logprobs.tolist() == other.logprobs.tolist()
            assert (chunk.text, chunk.finish_reason) == (other.text, other.finish_reason)
        assert told.seeds(len(PROMPT)) == [tuple(KEYS.values())] * len(told.engine.requests)
    narrow = generate([12], capacity=1)
    assert tuple(KEYS.values())[1:] in narrow.seeds(len(PROMPT)), "two that had not begun were asked for one by one"


def test_versions_that_came_while_nothing_was_asked_cost_no_request() -> None:
    """A group that waits long for its turn begins with the newest version."""
    engine = FakeEngine()
    published = itertools.count()
    versions = Versions("a", "a.run.0", engine, FakeSync(engine, lambda name: adapter(next(published))))
    params = SamplingParams(max_tokens=5)
    generation = Generation("a", "a/train/0/0", engine, versions, CHAT, params, renew=True, can_stop=False)

    async def scene() -> None:
        for version in range(3):
            await versions.publish(version)
            await versions.announce(version, 0)
        async with asyncio.timeout(PATIENCE):
            chunks = await generation.complete(PROMPT, KEYS, 0, 0)
        assert {version for chunk in chunks for version in chunk.versions.tolist()} == {2}

    asyncio.run(scene())
    assert len(engine.requests) == 1


def test_a_stop_string_across_the_cut_ends_tokens_and_text() -> None:
    straddled = 0
    for pause in range(6, 24):
        for index, chunk in enumerate(generate([pause]).chunks):
            tokens, n_first = chunk.token_ids.tolist(), chunk.versions.tolist().count(0)
            stop = CHAT.completion_text(tokens[n_first - 1 : n_first + 1])
            if not 0 < n_first < len(tokens) or len(stop) < 2:
                continue
            wanted = next(n for n in range(1, 13) if stop in CHAT.completion_text(tokens[:n]))
            cut = generate([pause], stop=(stop,)).chunks[index]
            assert cut.token_ids.tolist() == tokens[:wanted]
            assert len(cut.logprobs) == len(cut.versions) == wanted
            assert cut.text == CHAT.completion_text(tokens)[: CHAT.completion_text(tokens).index(stop)]
            assert cut.finish_reason is FinishReason.STOP
            straddled += cut.versions.tolist() == [0] * n_first + [1]
    assert straddled > 10


@pytest.mark.parametrize("asked", [{"renew": False}, {"renew": True, "grammar": "start: %json {}"}])
def test_finish_asks_once_and_never_interrupts(asked: dict[str, Any]) -> None:
    """Nor does an answer that keeps to a grammar go on under a newer version: another request would begin the grammar anew."""
    whole = generate([], renew=False)
    for pause in range(12):
        told = generate([pause, 3], **asked)
        assert [chunk.token_ids.tolist() for chunk in told.chunks] == [
            chunk.token_ids.tolist() for chunk in whole.chunks
        ]
        (request,) = told.engine.requests
        assert (request.seeds, request.stream) == (tuple(KEYS.values()), False)


@pytest.mark.parametrize("renew", [False, True])
def test_an_abort_by_somebody_else_is_final(renew: bool) -> None:
    engine = FakeEngine()
    versions = Versions("a", "a.run.0", engine, FakeSync(engine, lambda name: adapter(0)))
    generation = Generation("a", "a/train/0/0", engine, versions, CHAT, SamplingParams(max_tokens=50), renew, False)

    async def scene() -> list[Chunk]:
        await versions.publish(0)
        await versions.announce(0, 0)
        completing = asyncio.create_task(generation.complete(PROMPT, KEYS, 0, 0))
        for _ in range(8):
            await asyncio.sleep(0)
        await engine.abort("a")
        async with asyncio.timeout(PATIENCE):
            return await completing

    chunks = asyncio.run(scene())
    assert [chunk.finish_reason for chunk in chunks] == [FinishReason.ABORT] * 3
    assert all(0 < len(chunk.token_ids) < 50 for chunk in chunks)
    assert len(engine.requests) == 1


def test_whoever_is_stopped_keeps_every_token() -> None:
    """Put aside again and again, and complete in the end; each time with what it had."""
    engine = FakeEngine(jitter=3)
    versions = Versions("a", "a.run.0", engine, FakeSync(engine, lambda name: adapter(0)))
    generation = Generation("a", "a/train/0/0", engine, versions, CHAT, SamplingParams(max_tokens=30), False, True)
    held: list[list[int]] = [[], [], []]

    async def scene() -> list[Chunk]:
        await versions.publish(0)
        while True:
            generation.stop.clear()
            completing = asyncio.create_task(generation.complete(PROMPT, KEYS, 0, 0))
            for _ in range(40):
                await asyncio.sleep(0)
            generation.stop.set()
            try:
                return await completing
            except PutAside:
                for index, before in enumerate(held):
                    now = list(generation.drafts[0, index].tokens)
                    assert now[: len(before)] == before
                    held[index] = now

    chunks = asyncio.run(scene())
    assert all(held)
    for chunk, before in zip(chunks, held, strict=True):
        assert (len(chunk.token_ids), chunk.token_ids.tolist()[: len(before)]) == (30, before)
        check_logprobs([*PROMPT, *chunk.token_ids], chunk.logprobs.tolist(), chunk.versions.tolist(), len(PROMPT))
    assert generation.sampled(0, KEYS) == 90


def ended(text: str, params: SamplingParams, *, extra: Sequence[int] = (), pieces: int = 2) -> Draft:
    """A draft of this text whose engine was stopped before it told an end."""
    tokens = [*FakeTokenizer().encode(text), *extra]
    draft = Draft(pieces=pieces)
    none = np.zeros(0, np.int32)
    draft.take(
        Chunk(0, np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), "")
    )
    draft.take(Chunk(0, none, none.astype(np.float32), none, "", FinishReason.ABORT))
    draft.settle(params, CHAT)
    return draft


def test_of_several_stop_strings_the_first_that_is_complete_counts() -> None:
    draft = ended("xabcy", SamplingParams(stop=("abc", "b")))
    assert (CHAT.completion_text(draft.tokens), draft.text, draft.finish) == ("xab", "xa", FinishReason.STOP)


@pytest.mark.parametrize("pieces", [1, 2])
def test_an_engine_that_is_stopped_before_it_tells_the_end(pieces: int) -> None:
    """Tokens are whole and the finish reason was still on its way: nothing more may be sampled."""
    params = SamplingParams(max_tokens=5, stop=("zz",), stop_token_ids=(END,))
    assert ended("abcde", params, pieces=pieces).finish is FinishReason.LENGTH
    assert ended("abc", params, extra=[END], pieces=pieces).finish is FinishReason.STOP
    assert ended("azz", params, pieces=pieces).finish is FinishReason.STOP
    assert ended("abc", params, pieces=pieces).finish is None
