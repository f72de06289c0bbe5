"""The engine's process goes on while somebody's prompt is tokenised and somebody's adapter is read."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from motet.config import EngineConfig
from motet.core.device import Device
from motet.core.errors import AdapterError
from motet.core.types import AdapterRef, Chunk, FinishReason, GenerateRequest, Message, SamplingParams
from motet.hosts.answers import Answers
from motet.hosts.launch import load
from motet.hosts.loaded_versions import CACHED_VERSIONS, LoadedVersions
from motet.hosts.messages import (
    AdapterExamined,
    Answered,
    Complete,
    ExamineAdapter,
    FromHost,
    QuestionRefused,
    Tokens,
)
from motet.model.lora import AdapterWeights
from motet.rollout.embedded import EmbeddedEngine
from motet.runtime.device_usage import COMPLETIONS
from motet.runtime.scheduler import FairScheduler
from tests.support.fake_engine import FakeEngine
from tests.support.scheduling_policy import rows_between_turns
from tests.support.waiting import PATIENCE


@pytest.fixture(scope="module")
def base() -> Any:
    return load("small", EngineConfig(threads=1))


class SlowDisk(EmbeddedEngine):
    """Its files come when they may."""

    begun, may = threading.Event(), threading.Event()

    def read(self, source: Path) -> AdapterWeights:
        """Wait, then read."""
        self.begun.set()
        assert self.may.wait(PATIENCE), "nothing else went on meanwhile"
        return super().read(source)


def test_an_adapter_is_read_beside_everything_else(base: Any, tmp_path: Path) -> None:
    device = Device()
    engine = SlowDisk(base, device, max_rows=2, kv_tokens=1024, prefill_tokens=64)

    async def scenario() -> None:
        loading = asyncio.create_task(engine.load_adapter(AdapterRef("a", 0), tmp_path))
        while not engine.begun.is_set():
            await asyncio.sleep(0.01)
        engine.may.set()
        with pytest.raises(AdapterError, match="adapter_config"):
            await loading

    try:
        asyncio.run(scenario())
    finally:
        device.close()


class Crowded:
    """A base that counts who looks at it at the same time."""

    def __init__(self, base: Any) -> None:
        self._base, self.here, self.most = base, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def adapter_layout(self, *given: Any) -> Any:
        """Slowly."""
        self.here += 1
        self.most = max(self.most, self.here)
        time.sleep(0.05)
        self.here -= 1
        return self._base.adapter_layout(*given)


def answers(base: Any, sent: list[FromHost]) -> Answers:
    """Without an engine."""
    shared: Any = SimpleNamespace(engine=None, scheduler=None, engine_suffix="x")
    return Answers(base, shared, 64, sent.append)


def test_adapters_are_looked_at_one_at_a_time(base: Any, trained_adapter: Path) -> None:
    crowded, sent = Crowded(base), list[FromHost]()
    examiner = answers(crowded, sent)

    async def scenario() -> None:
        await asyncio.gather(*(examiner.examine(ExamineAdapter(str(trained_adapter), key)) for key in range(4)))

    asyncio.run(scenario())
    assert [message.key for message in sent if isinstance(message, AdapterExamined)] == [0, 1, 2, 3]
    assert crowded.most == 1


def test_a_prompt_that_no_room_could_hold_is_refused_before_it_is_tokenised(base: Any) -> None:
    sent: list[FromHost] = []
    asked = answers(base, sent)
    text = "a" * (2 * base.info.max_positions * max(map(len, base.info.tokenizer.get_vocab())))
    question = Complete("", None, 1, 0, False, False, SamplingParams())

    async def scenario() -> None:
        await asked.answer(replace(question, prompt=text, key=0))
        await asked.answer(replace(question, messages=[Message("user", text[::2])] * 2, key=1))

    asyncio.run(scenario())
    refused = [message for message in sent if isinstance(message, QuestionRefused)]
    assert [message.key for message in refused] == [0, 1]
    assert all(f"{len(text)} characters" in message.reason and message.never for message in refused)


@pytest.mark.parametrize("prompt", [[], ""])
def test_a_prompt_without_tokens_is_refused_for_good(base: Any, prompt: Any) -> None:
    sent: list[FromHost] = []
    asyncio.run(answers(base, sent).answer(Complete("", None, 1, 0, False, False, SamplingParams(), prompt=prompt)))
    assert sent == [QuestionRefused(0, "the prompt has no tokens; give it one at least", never=True)]


def test_what_is_answered_to_a_service_that_is_gone_ends(base: Any) -> None:
    ended = list[int]()

    class Engine:
        """Answers without an end."""

        async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
            """One token, and then nothing."""
            try:
                yield Chunk(0, np.array([5]), np.array([-1.0]), np.array([-1]), "x", FinishReason.STOP)
                await asyncio.Event().wait()
            finally:
                ended.append(len(request.prompt_ids))

    scheduler, sent = FairScheduler(1), list[FromHost]()
    shared: Any = SimpleNamespace(engine=Engine(), scheduler=scheduler, engine_suffix="x")
    asked = Answers(base, shared, 64, sent.append)
    question = Complete("us", None, 1, 0, False, False, SamplingParams(max_tokens=1), prompt=[1], key=7)

    async def scenario() -> None:
        task = asyncio.create_task(asked.answer(question))
        asked.hold(7, task)
        while len(sent) < 2:
            await asyncio.sleep(0.01)
        asked.abandon_all()
        await asyncio.gather(task, return_exceptions=True)
        assert scheduler.idle(f"{COMPLETIONS}us")

    asyncio.run(scenario())
    assert ended == [1]
    assert not [message for message in sent if isinstance(message, Answered | QuestionRefused)]


@pytest.mark.parametrize("begun", [True, False])
def test_an_abandoned_answer_sends_the_tokens_that_it_has(base: Any, begun: bool) -> None:
    engine, sent = FakeEngine(seconds=0.001, max_positions=2**20), list[FromHost]()
    shared: Any = SimpleNamespace(engine=engine, scheduler=FairScheduler(1), engine_suffix="x")
    asked = Answers(base, shared, 2**20, sent.append)
    sampling = SamplingParams(max_tokens=2**19)
    question = Complete("us", None, 1, 0, False, False, sampling, prompt=[1], stop_token_ids=[], key=7)

    async def scenario() -> None:
        task = asyncio.create_task(asked.answer(question))
        asked.hold(7, task)
        async with asyncio.timeout(PATIENCE):
            while begun and not engine.requests:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1 if begun else 0)
            await asked.abandon(7)
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())
    count = sum(len(message.chunk.token_ids) for message in sent if isinstance(message, Tokens))
    assert (count > 0, type(sent[-1])) == (begun, Answered)


@pytest.mark.parametrize("stream", [False, True])
def test_an_open_answer_has_sent_all_but_its_last_tokens(base: Any, stream: bool) -> None:
    """They are charged as they arrive, so that a host that dies loses no more; the answer is the same."""
    given, most = [50, 100, 100, 47], 1 if stream else 64

    class Engine:
        """Tells, before each token, how many have been sent of those before."""

        async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
            """Tokens of four completions, by turns."""
            for place in range(max(given)):
                for index, n_tokens in enumerate(given):
                    held = min(place, n_tokens) - tokens().get(index, 0)
                    assert held < (most if request.stream else 100), "these would not be charged"
                    if place < n_tokens:
                        reason = FinishReason.LENGTH if place == n_tokens - 1 else None
                        yield Chunk(
                            index, np.array([5 + index]), np.array([-float(place)]), np.array([-1]), "x", reason
                        )
            assert request.stream

    sent = list[FromHost]()

    def tokens() -> dict[int, int]:
        counts: dict[int, int] = {}
        for message in sent:
            if isinstance(message, Tokens):
                counts[message.chunk.index] = counts.get(message.chunk.index, 0) + len(message.chunk.token_ids)
        return counts

    shared: Any = SimpleNamespace(engine=Engine(), scheduler=FairScheduler(4), engine_suffix="x")
    sampling = SamplingParams(max_tokens=100)
    question = Complete("us", None, 4, 0, stream, False, sampling, prompt=[1], key=7)
    asyncio.run(Answers(base, shared, 200, sent.append).answer(question))
    assert sent[-1] == Answered(7)
    assert tokens() == dict(enumerate(given))
    chunks = [message.chunk for message in sent if isinstance(message, Tokens)]
    assert len(chunks) == (sum(given) if stream else 1 + 2 + 2 + 1)
    for index, n_tokens in enumerate(given):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert np.concatenate([chunk.logprobs for chunk in own]).tolist() == [
            -float(place) for place in range(n_tokens)
        ]
        assert "".join(chunk.text for chunk in own) == "x" * n_tokens
        assert [chunk.finish_reason for chunk in own][-1] is FinishReason.LENGTH


def test_a_prompt_without_room_is_refused_before_it_is_scored(base: Any) -> None:
    scored = list[int]()

    class Engine:
        """Counts what it is asked for."""

        async def score(self, token_ids: Any, adapter: AdapterRef | None) -> Any:
            """How much each token would take is no matter here."""
            scored.append(len(token_ids))
            return np.zeros(len(token_ids), np.float32)

        async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
            """One token."""
            yield Chunk(0, np.array([5]), np.array([-1.0]), np.array([-1]), "x", FinishReason.STOP)

    scheduler, sent = FairScheduler(1), list[FromHost]()
    shared: Any = SimpleNamespace(engine=Engine(), scheduler=scheduler, engine_suffix="x")
    asked = Answers(base, shared, 64, sent.append)
    question = Complete("", None, 1, 0, False, False, SamplingParams(max_tokens=1), prompt_logprobs=True)

    async def scenario() -> None:
        for key, (length, within_room) in enumerate(((65, True), (65, False), (64, True), (64, False), (63, True))):
            await asked.answer(replace(question, prompt=[1] * length, within_room=within_room, key=key))

    asyncio.run(scenario())
    refused = [message for message in sent if isinstance(message, QuestionRefused)]
    assert ([message.key for message in refused], scored) == ([0, 1, 2, 3], [63])
    assert all("maximum context length is 64 tokens" in message.reason and message.never for message in refused)
    assert {message.code for message in refused} == {"context_length_exceeded"}


@pytest.mark.parametrize("n", [1, 20])
@pytest.mark.parametrize(("logprobs", "top"), [(False, 0), (True, 0), (True, 5)])
def test_a_prompt_is_charged_as_often_as_the_engine_reads_it(base: Any, n: int, logprobs: bool, top: int) -> None:
    read, spent = list[int](), list[float]()

    class Engine(FakeEngine):
        """Notes each pass over a prompt."""

        async def score(self, token_ids: Any, adapter: AdapterRef | None) -> Any:
            """One pass."""
            read.append(len(token_ids))
            return await super().score(token_ids, adapter)

        async def top_logprobs(self, token_ids: Any, adapter: AdapterRef | None, k: int) -> Any:
            """One pass."""
            read.append(len(token_ids))
            return await super().top_logprobs(token_ids, adapter, k)

        async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
            """One pass, whose sampled tokens are charged apart."""
            read.append(len(request.prompt_ids))
            async for chunk in super().generate(request):
                spent.append(-len(chunk.token_ids))
                yield chunk

    class Scheduler(FairScheduler):
        """Notes what is charged."""

        def spend(self, job: str, tokens: float) -> None:
            """Note it."""
            spent.append(tokens)
            super().spend(job, tokens)

    sent = list[FromHost]()
    shared: Any = SimpleNamespace(engine=Engine(max_positions=1024), scheduler=Scheduler(1), engine_suffix="x")
    question = Complete("us", None, n, 0, False, False, SamplingParams(max_tokens=2), prompt=[1] * 9, key=7)
    question = replace(question, prompt_logprobs=logprobs, prompt_top=top, stop_token_ids=[])
    asyncio.run(Answers(base, shared, 1024, sent.append).answer(question))
    assert sent[-1] == Answered(7)
    assert sum(spent) == sum(read)


def test_completions_wait_for_their_tenants_share_and_prompts_count(base: Any) -> None:
    """One row at a time: whoever has read a long prompt comes after the neighbour who has had nothing."""
    scheduler, order = FairScheduler(1), list[str]()

    class Engine:
        """Answers with a token when it may."""

        may = asyncio.Event()

        async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
            """One token."""
            order.append(request.job)
            await self.may.wait()
            yield Chunk(0, np.array([5]), np.array([-1.0]), np.array([-1]), "x", FinishReason.STOP)

    shared: Any = SimpleNamespace(engine=Engine(), scheduler=scheduler, engine_suffix="x")
    sent: list[FromHost] = []
    asked = Answers(base, shared, 1024, sent.append)
    question = Complete("greedy", None, 1, 0, False, False, SamplingParams(max_tokens=1), prompt="abc" * 40)

    async def neighbour() -> None:
        async with scheduler.permit("neighbour", 1):
            order.append("neighbour")
            scheduler.spend("neighbour", 2)

    async def scenario() -> None:
        scheduler.join("neighbour", 1.0, "other")
        await neighbour()
        answers = [asyncio.create_task(asked.answer(replace(question, key=key))) for key in range(3)]
        while len(order) < 2:
            await asyncio.sleep(0.01)
        steps = [asyncio.create_task(neighbour()) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert len(order) == 2, "there is room for one"
        Engine.may.set()
        await asyncio.gather(*answers, *steps)

    asyncio.run(scenario())
    assert sum(isinstance(message, Answered) for message in sent) == 3, sent
    greedy = f"{COMPLETIONS}greedy"
    assert order == ["neighbour", greedy, *["neighbour"] * 3, greedy, greedy]


def test_others_have_their_turn_between_the_parts_of_a_large_request(base: Any) -> None:
    engine, scheduler, sent = FakeEngine(capacity=64, jitter=1), FairScheduler(64), list[FromHost]()
    shared: Any = SimpleNamespace(engine=engine, scheduler=scheduler, engine_suffix="x")
    asked = Answers(base, shared, 64, sent.append)
    sampling = SamplingParams(max_tokens=6)
    question = Complete("greedy", None, 1024, 0, False, False, sampling, prompt=[1], stop_token_ids=[])

    async def scenario() -> int:
        answer = asyncio.create_task(asked.answer(question))
        return await rows_between_turns(scheduler, engine, answer.done)

    assert asyncio.run(scenario()) <= scheduler.capacity
    ended = [message.chunk.index for message in sent if isinstance(message, Tokens) and message.chunk.finish_reason]
    assert sorted(ended) == list(range(1024))


def test_weights_that_are_saved_again_under_a_name_are_those_that_answer(base: Any, tmp_path: Path) -> None:
    place, loaded = tmp_path / "latest", dict[AdapterRef, str]()

    class Engine:
        """Says with which weights it answers."""

        async def load_adapter(self, ref: AdapterRef, source: Path) -> None:
            """Read them."""
            loaded[ref] = (source / "adapter_model.safetensors").read_text()

        async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
            """One token."""
            assert request.adapter is not None
            yield Chunk(0, np.array([5]), np.array([-1.0]), np.array([-1]), loaded[request.adapter], FinishReason.STOP)

    shared: Any = SimpleNamespace(engine=Engine(), scheduler=FairScheduler(1), engine_suffix="x")
    sent: list[FromHost] = []
    asked = Answers(base, shared, 64, sent.append)
    question = Complete("us", str(place), 1, 0, False, False, SamplingParams(max_tokens=1), prompt=[1])

    def save(weights: str) -> None:
        """As a session does: a draft takes the place of what is there."""
        (draft := tmp_path / ".part-latest").mkdir()
        (draft / "adapter_model.safetensors").write_text(weights)
        shutil.rmtree(place, ignore_errors=True)
        draft.rename(place)

    async def scenario() -> None:
        for weights in ("first", "second"):
            save(weights)
            for _ in range(2):
                await asked.answer(question)

    asyncio.run(scenario())
    said = [message.chunk.text for message in sent if isinstance(message, Tokens)]
    assert (said, len(loaded)) == (["first", "first", "second", "second"], 2)


def test_as_many_versions_stay_loaded_as_there_is_room_for(base: Any, tmp_path: Path) -> None:
    """Also if an answer is abandoned while an older version goes."""
    loaded, unloading = set[AdapterRef](), asyncio.Event()

    class Engine:
        """Takes a while to unload: the device trains, or other processes have to be told."""

        async def load_adapter(self, ref: AdapterRef, source: Path) -> None:
            """Take it."""
            loaded.add(ref)

        async def unload_adapter(self, ref: AdapterRef) -> None:
            """Let it go."""
            unloading.set()
            await asyncio.sleep(0.1)
            loaded.remove(ref)

        async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
            """One token."""
            yield Chunk(0, np.array([5]), np.array([-1.0]), np.array([-1]), "x", FinishReason.STOP)

    shared: Any = SimpleNamespace(engine=Engine(), scheduler=FairScheduler(1), engine_suffix="x")
    asked = Answers(base, shared, 64, lambda _: None)
    question = Complete("us", "", 1, 0, False, False, SamplingParams(max_tokens=1), prompt=[1])

    async def scenario() -> None:
        for number in range(CACHED_VERSIONS):
            await asked.answer(replace(question, adapter=str(tmp_path / str(number))))
        assert len(loaded) == CACHED_VERSIONS
        one_more = replace(question, key=99, adapter=str(tmp_path / "more"))
        asked.hold(99, answering := asyncio.create_task(asked.answer(one_more)))
        await unloading.wait()
        await asked.abandon(99)
        await asyncio.gather(answering, return_exceptions=True)

    asyncio.run(scenario())
    assert len(loaded) == CACHED_VERSIONS


@pytest.fixture(scope="module")
def trained_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT directory that fits the small base."""
    from tests.support.adapter_files import run_alone
    from tests.support.service_run import tiny

    result = run_alone(tmp_path_factory.mktemp("run"), tiny("sort", 1))
    return result.jobs["sort"].adapter


# --- several tenants --------------------------------------------------------------------------------------------------------


class Loading:
    """An engine that knows which versions it has, and how often each was loaded."""

    def __init__(self) -> None:
        self.names: dict[AdapterRef, str] = {}
        self.loads: list[str] = []

    async def load_adapter(self, ref: AdapterRef, source: Path) -> None:
        """Take it."""
        self.loads.append(source.name)
        await asyncio.sleep(0)
        self.names[ref] = source.name

    async def unload_adapter(self, ref: AdapterRef) -> None:
        """Let it go."""
        del self.names[ref]


def versions_of(engine: Loading) -> LoadedVersions:
    """A cache of this engine's."""
    anything: Any = engine
    return LoadedVersions(anything, "stored")


async def use(versions: LoadedVersions, tenant: str, *names: str) -> None:
    """A tenant uses these, one after the other."""
    for name in names:
        async with versions.hold(tenant, Path(name)):
            pass


@pytest.mark.parametrize("shared", [False, True])
def test_a_tenant_with_many_versions_leaves_those_of_others_loaded(shared: bool) -> None:
    async def scenario() -> None:
        versions = versions_of(engine := Loading())
        await use(versions, "us", "ours")
        await use(versions, "them", "theirs")
        for number in range(30):
            await use(versions, "greedy", f"greedy-{number}", *(["ours"] if shared else ()))
        assert len(engine.names) == CACHED_VERSIONS
        before = list(engine.loads)
        await use(versions, "us", "ours")
        await use(versions, "them", "theirs")
        assert engine.loads == before, "both are there still"

    asyncio.run(scenario())


def test_versions_in_use_are_bounded_for_each_tenant_and_push_out_nobody_elses() -> None:
    async def scenario() -> None:
        versions, until = versions_of(engine := Loading()), asyncio.Event()

        async def talk(name: str) -> None:
            async with versions.hold("greedy", Path(name)):
                await until.wait()

        await use(versions, "us", "ours")
        talking = [asyncio.create_task(talk(f"greedy-{number}")) for number in range(3 * CACHED_VERSIONS)]
        while len(engine.names) < CACHED_VERSIONS + 1:
            await asyncio.sleep(0.001)
        for number in range(3 * CACHED_VERSIONS):
            await use(versions, f"guest-{number}", f"guest-{number}")
        assert len(engine.names) == 2 * CACHED_VERSIONS, "also beside one that uses all that it may"
        until.set()
        await asyncio.gather(*talking)
        assert len(engine.names) == CACHED_VERSIONS
        assert len(set(engine.loads)) == len(engine.loads) == 6 * CACHED_VERSIONS + 1

    asyncio.run(scenario())


def test_tenants_take_turns_at_loading_and_a_loaded_version_waits_for_no_turn() -> None:
    gate = asyncio.Semaphore(1)

    class Slow(Loading):
        """Loads when it may."""

        async def load_adapter(self, ref: AdapterRef, source: Path) -> None:
            """Wait, then load."""
            await gate.acquire()
            await super().load_adapter(ref, source)

    async def scenario() -> None:
        versions = versions_of(engine := Slow())
        await use(versions, "us", "ours")
        queue = [asyncio.create_task(use(versions, "greedy", f"greedy-{number}")) for number in range(6)]
        while not versions._loading.locked():
            await asyncio.sleep(0.001)
        queue.append(asyncio.create_task(use(versions, "us", "our second")))
        while "us" not in versions._own:
            await asyncio.sleep(0.001)
        await use(versions, "us", "ours")
        for _ in range(7):
            gate.release()
        await asyncio.gather(*queue)
        assert engine.loads[2] == "our second", engine.loads

    asyncio.run(scenario())


def test_tenants_take_turns_at_the_examination_of_their_uploads(base: Any, trained_adapter: Path) -> None:
    sent = list[FromHost]()
    examiner = answers(Crowded(base), sent)
    asked = [ExamineAdapter(str(trained_adapter), key, tenant="greedy") for key in range(6)]
    ours = ExamineAdapter(str(trained_adapter), 99, tenant="us")

    async def scenario() -> None:
        await asyncio.gather(*(examiner.examine(one) for one in (*asked, ours)))

    asyncio.run(scenario())
    order = [message.key for message in sent if isinstance(message, AdapterExamined)]
    assert order.index(99) <= 2, order  # behind the one that ran, and perhaps the next, which was asked for before
