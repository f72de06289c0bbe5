"""Sampling processes: the same tokens wherever they are sampled, and nothing lost or left behind when a process goes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.config import EngineConfig
from motet.core.device import BusyTime, Device
from motet.core.errors import DeviceError, EngineError
from motet.core.types import AdapterRef, Chunk, FinishReason, GenerateRequest, JobState, SamplingParams
from motet.hosts.launch import load
from motet.hosts.running import run_config
from motet.kernels.cpu.choice import of_machine
from motet.observe.results import RunResult
from motet.process.channel import ChannelMessage, decode, encode
from motet.rollout.embedded import EmbeddedEngine
from motet.rollout.sampler_link import SamplerLink
from motet.rollout.sampler_messages import Chunks, FromSampler, LoadSampler, SampleRequest, ToSampler
from motet.rollout.spread import SpreadEngine
from tests.support import tiny_models as tiny
from tests.support.cases import few
from tests.support.small_runs import REWARDS, config, fingerprint, job
from tests.support.waiting import PATIENCE

LIMITS = {"max_rows": 8, "kv_tokens": 4096, "prefill_tokens": 1024}
LOAD = LoadSampler(
    base="small",
    block_size=64,
    dtype="bfloat16",
    pack=True,
    base_format="auto",
    trust_remote_code=False,
    limits=LIMITS,
    kernels=of_machine().kernels,
)
LONG = 200
LONGEST = 5 * LONG
"""Tokens that take the process long enough to be met in the middle of them, also by a test that waits for a processor."""

KILLED = (
    "a sampling process was killed with SIGKILL, which Motet did not send (the system may be out of memory); sampling "
    "continues without it"
)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(round(PATIENCE / 0.01)):  # counted, not timed: the machine may stand still for a while
        if condition():
            return
        time.sleep(0.01)
    pytest.fail(what)


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one whose parent was killed may stay as a zombie until somebody reads its end."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def wait_for(link: SamplerLink) -> None:
    wait_until(lambda: link.ready or bool(link.note), "the process did not load")
    assert link.ready, link.note


@pytest.fixture(scope="module")
def base() -> Any:
    return load("small", EngineConfig(threads=1, dtype="bfloat16"))


@pytest.fixture(scope="module")
def here(base: Any) -> Iterator[EmbeddedEngine]:
    device = Device()
    yield EmbeddedEngine(base, device, **LIMITS)
    device.close()


@pytest.fixture
def links() -> Iterator[list[SamplerLink]]:
    """What a test starts; ended here, also where it fails."""
    started: list[SamplerLink] = []
    yield started
    for link in started:
        link.close()


@pytest.fixture(scope="module")
def busy() -> BusyTime:
    """What the process of `link` has done."""
    return BusyTime()


@dataclasses.dataclass(frozen=True)
class Begun:
    """A process that was held before it was ready."""

    link: SamplerLink
    adapter: AdapterRef
    """Installed before that, too."""
    rested: bool
    """Whether it sampled nothing until it was let go."""
    early: list[Any]
    """What it sampled then."""


@pytest.fixture(scope="module")
def begun(base: Any, here: EmbeddedEngine, busy: BusyTime) -> Iterator[Begun]:
    """One process for all tests: they leave it as it is, and the one that kills it comes last."""
    link = SamplerLink(LOAD, base.fingerprint(), busy, 0.5, None)
    adapter = new_version(base, here, link)
    link.hold(True)

    async def run() -> tuple[bool, list[Any]]:
        task = asyncio.create_task(collect(link, request("early", adapter)))
        await asyncio.sleep(0.3)
        rested = not task.done()
        link.hold(False)
        return rested, bits(await task)

    try:
        wait_for(link)
        yield Begun(link, adapter, *asyncio.run(run()))
    finally:
        link.close()


@pytest.fixture
def link(begun: Begun) -> SamplerLink:
    return begun.link


_versions = iter(range(10**6))


def new_version(base: Any, *engines: Any) -> AdapterRef:
    """Install an adapter of its own in each of these."""
    ref = AdapterRef("a", next(_versions))
    weights = tiny.adapter(base, seed=ref.version)
    for engine in engines:
        engine.install(ref, weights)
    return ref


def request(name: str, adapter: AdapterRef | None, seeds: Sequence[int] = (1, 2), **options: Any) -> GenerateRequest:
    sampling = SamplingParams(**{"temperature": 0.9, "max_tokens": 8, **options.pop("sampling", {})})
    prompt = np.array([5 + len(name), 9, 30, 200, 17], np.int32)
    return GenerateRequest(name, options.pop("job", "j"), prompt, adapter, sampling, tuple(seeds), **options)


async def collect(engine: Any, asked: GenerateRequest) -> dict[int, list[Chunk]]:
    """Chunks by index."""
    found: dict[int, list[Chunk]] = {}
    async with asyncio.timeout(PATIENCE):
        async for chunk in engine.generate(asked):
            found.setdefault(chunk.index, []).append(chunk)
    return dict(sorted(found.items()))


def bits(found: dict[int, list[Chunk]]) -> list[Any]:
    """All that must be the same wherever it was sampled, however many tokens a chunk has."""
    return [
        (index, encode(Chunks(0, one := joined(chunks))), one.logprobs.tobytes()) for index, chunks in found.items()
    ]


def joined(chunks: list[Chunk]) -> Chunk:
    whole = dataclasses.replace(chunks[-1], text="".join(one.text for one in chunks))
    for name in ("token_ids", "logprobs", "versions"):
        object.__setattr__(whole, name, np.concatenate([getattr(one, name) for one in chunks]))
    return whole


# --- what passes between them -----------------------------------------------------------------------------------------


def through(message: ChannelMessage, kinds: Any) -> Any:
    return decode(encode(message), kinds)


def assert_no_field_is_at_its_default(value: Any) -> None:
    """So that a field which is added later and forgotten on the way is noticed."""
    for field in dataclasses.fields(value):
        assert field.default is dataclasses.MISSING or getattr(value, field.name) != field.default, field.name


def assert_equal(ours: Any, theirs: Any) -> None:
    for field in dataclasses.fields(ours):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if isinstance(mine, np.ndarray):
            assert (mine.dtype, mine.shape, mine.tobytes()) == (other.dtype, other.shape, other.tobytes()), field.name
        else:
            assert (type(mine), mine) == (type(other), other), field.name


def test_requests_survive_the_way() -> None:
    sampling = SamplingParams(0.1 + 0.2, 7, ("\n\n", "ende€"), (3, 4), 0.9, 5, 0.01, 'start: "ü"')
    seeds = (0, 2**64 - 1, 2**53 + 1)
    prompt = np.array([1, 2**31 - 1], np.int32)
    ref, episodes = AdapterRef("x.y", 3), ("j/0", "j/1", "é")
    whole = GenerateRequest(
        "r/1",
        "jöb",
        prompt,
        ref,
        sampling,
        seeds,
        True,
        True,
        episodes,
        tenant="team-ä",
        share=2.5,
        interactive=True,
        chunk_tokens=3,
    )
    for value in (sampling, whole):
        assert_no_field_is_at_its_default(value)
    assert_equal(through(SampleRequest(1, whole), ToSampler).request, whole)
    plain = dataclasses.replace(whole, adapter=None, sampling=SamplingParams(), stream=False, episodes=())
    assert_equal(through(SampleRequest(1, plain), ToSampler).request, plain)


@given(
    st.lists(st.floats(width=32, allow_nan=False), max_size=8),
    st.sampled_from([None, *FinishReason]),
    st.text(max_size=8),
)
def test_chunks_survive_the_way_bit_for_bit(logprobs: list[float], reason: FinishReason | None, text: str) -> None:
    n = len(logprobs)
    tokens, versions = np.arange(n, dtype=np.int32), np.full(n, -1, np.int32)
    chunk = Chunk(2, tokens, np.array(logprobs, np.float32), versions, text, reason, f"why {text}")
    assert_equal(through(Chunks(1, chunk), FromSampler).chunk, chunk)


# --- one process --------------------------------------------------------------------------------------------------------


def test_the_process_samples_the_same_bits(base: Any, here: EmbeddedEngine, link: SamplerLink) -> None:
    ref = new_version(base, here, link)

    async def run() -> None:
        for options in ({}, {"stream": True}, {"sampling": {"temperature": 0.0, "stop": ("e",), "max_tokens": 40}}):
            for adapter in (ref, None):
                asked = request("same", adapter, (7, 2**64 - 1, 9), **options)
                ours = bits(await collect(here, asked))
                assert bits(await collect(link, asked)) == ours

    asyncio.run(run())


def test_equal_ids_of_two_jobs_are_kept_apart(base: Any, here: EmbeddedEngine, link: SamplerLink) -> None:
    ref = new_version(base, here, link)

    async def run() -> None:
        asked = [request("id", ref, seeds, job=name) for name, seeds in (("x", (1, 2, 3)), ("y", (4, 5)))]
        alone = [bits(await collect(here, each)) for each in asked]
        together = await asyncio.gather(*(collect(link, each) for each in asked))
        assert [bits(found) for found in together] == alone

    asyncio.run(run())


def test_what_the_process_did_is_told_by_job_and_once(
    base: Any, here: EmbeddedEngine, link: SamplerLink, busy: BusyTime
) -> None:
    ref = new_version(base, here, link)
    before, told = busy.take()[0], Counter[str]()

    async def tokens(engine: Any, job: str, *seeds: int) -> int:
        found = await collect(engine, request("told", ref, seeds, job=job))
        return sum(len(chunk.token_ids) for chunks in found.values() for chunk in chunks)

    def tell() -> float:
        seconds, parts, _ = busy.take()
        told.update({name: count for name, count in parts.items() if name in ("p", "q")})
        return seconds

    def is_told(names: set[str]) -> bool:
        tell()
        return told.keys() >= names

    for name, keys in (("p", (1, 2, 3)), ("q", (4,))):
        assert asyncio.run(tokens(link, name, *keys)) > 0
    wait_until(lambda: is_told({"p", "q"}), "whose the time was is not told")
    seconds = tell()
    assert seconds > before
    assert told.total() <= 1e6 * (seconds - before) / link._share
    first = told["p"]
    asyncio.run(tokens(link, "p", 9))
    wait_until(lambda: is_told({"p"}) and told["p"] > first, "it is not told again")
    assert told.total() <= 1e6 * (tell() - before) / link._share
    here._device.busy.take()
    asyncio.run(tokens(here, "p", 9))
    wait_until(lambda: here._device.busy.take()[1].get("p", 0) > 0, "the time of the process itself is not told")


def test_a_request_that_the_process_refuses(here: EmbeddedEngine, link: SamplerLink) -> None:
    with pytest.raises(EngineError, match="version 3 of 'nobody' is not loaded"):
        asyncio.run(collect(link, request("r", AdapterRef("nobody", 3))))


@pytest.mark.parametrize("name", ["the request", "the job"])
def test_abort_reaches_the_process(base: Any, here: EmbeddedEngine, link: SamplerLink, name: str) -> None:
    engine = SpreadEngine(here, [link])

    async def run() -> None:
        mine = request("mine", None, (1,), job="keeps", stream=True, sampling={"max_tokens": LONG})
        other = request("the request", None, (2, 3), job="the job", stream=True, sampling={"max_tokens": LONGEST})
        task = asyncio.create_task(collect(engine, mine))
        await asyncio.sleep(0)
        finished: dict[int, FinishReason] = {}
        async with asyncio.timeout(PATIENCE):
            async for chunk in engine.generate(other):
                if not finished:
                    assert engine._open[1].total() == 2, "it is not in the process"
                    await engine.abort(name)
                    finished[-1] = FinishReason.ABORT
                if chunk.finish_reason is not None:
                    finished[chunk.index] = chunk.finish_reason
        assert set(finished.values()) == {FinishReason.ABORT}
        assert finished.keys() == {-1, 0, 1}
        kept = await task
        assert sum(len(chunk.token_ids) for chunk in kept[0]) == LONG, "the wrong one was aborted"
        assert [place.total() for place in engine._open] == [0, 0]

    asyncio.run(run())


def test_a_caller_that_leaves_frees_the_process(link: SamplerLink) -> None:
    async def run() -> None:
        async with contextlib.aclosing(cast(Any, link.generate(request("leaves", None, stream=True)))) as chunks:
            async for _ in chunks:
                break
        assert not link._open

    asyncio.run(run())


def test_nothing_is_sampled_while_held_and_unloading_waits_for_nobody(
    base: Any, here: EmbeddedEngine, link: SamplerLink
) -> None:
    """The process reads on while it is held: the word that lets it go comes on the same way as all others."""
    engine = SpreadEngine(here, [link])
    old = new_version(base, engine)

    async def run() -> None:
        wanted = bits(await collect(link, request("before", old)))
        engine.turn(training=True)
        task = asyncio.create_task(collect(link, request("before", old)))
        await asyncio.sleep(0.3)
        assert not task.done(), "it was sampled while the process was held"
        await engine.unload_adapter(old)
        new = new_version(base, engine)
        await asyncio.sleep(0.1)
        engine.turn(training=False)
        assert bits(await task) == wanted, "a request keeps the version that it began with"
        assert bits(await collect(link, request("after", new))) == bits(await collect(here, request("after", new)))
        with pytest.raises(EngineError, match="is not loaded"):
            await collect(link, request("gone", old))

    asyncio.run(run())


def test_a_process_that_gets_ready_while_held_rests_at_once(begun: Begun, here: EmbeddedEngine) -> None:
    assert begun.rested, "it was sampled while the device trained"
    assert begun.early == bits(asyncio.run(collect(here, request("early", begun.adapter))))


def test_the_process_is_out_of_reach_of_the_terminal(link: SamplerLink) -> None:
    assert os.getsid(link.pid) == link.pid != os.getsid(0), "Ctrl-C would end it before the run has saved"


# --- when it goes ---------------------------------------------------------------------------------------------------------


def early_end(chunks: dict[int, list[Chunk]]) -> tuple[int, int]:
    """A token that ends one completion long before the others: (which, token)."""
    tokens = {index: [int(token) for chunk in found for token in chunk.token_ids] for index, found in chunks.items()}
    best = (0, 0, 0)
    for index, own in tokens.items():
        if index == 0:
            continue  # the first that ends must not be the first in order, or a wrong order would not show
        for place, token in enumerate(own[:50]):
            others = [seen.index(token) if token in seen else LONGEST for key, seen in tokens.items() if key != index]
            best = max(best, (min(others) - own.index(token), index, token))
            assert place < 50
    assert best[0] > LONGEST // 2, "choose other seeds"
    return best[1], best[2]


def test_kill_9_in_the_middle_of_requests(base: Any, here: EmbeddedEngine, link: SamplerLink) -> None:
    """The last test with the process that they share."""
    ref = new_version(base, here, link)
    engine = SpreadEngine(here, [link])
    occupied = request("here", ref, (8, 9, 10, 11), sampling={"max_tokens": 4})

    async def run() -> None:
        reference = request("there", ref, (1, 2, 3), sampling={"max_tokens": LONGEST})
        first, token = early_end(await collect(here, reference))
        asked = dataclasses.replace(
            reference, sampling=dataclasses.replace(reference.sampling, stop_token_ids=(token,))
        )
        wanted = bits(await collect(here, asked))
        waiting = asyncio.create_task(collect(engine, occupied))
        await asyncio.sleep(0)
        found: dict[int, list[Chunk]] = {}
        async with asyncio.timeout(PATIENCE):
            async for chunk in engine.generate(asked):
                if not found:
                    assert chunk.index == first
                    assert engine._open[1].total() == 2, "it is not in the process, or is over already"
                    os.kill(link.pid, signal.SIGKILL)
                found.setdefault(chunk.index, []).append(chunk)
        assert bits(dict(sorted(found.items()))) == wanted
        await waiting
        assert engine.notes() == [KILLED]
        assert not link.ready
        again = request("again", ref, (1, 2, 3), stream=True)
        assert bits(await collect(engine, again)) == bits(await collect(here, again)), "the engine goes on alone"
        new_version(base, engine)
        assert [place.total() for place in engine._open] == [0, 0]

    asyncio.run(run())
    assert is_gone(link.pid)


def stand_in(directory: Path, monkeypatch: pytest.MonkeyPatch, on_generate: str = "pass", says: str = "same") -> None:
    """A program in the place of the sampling process, for what the real one does only in distress."""
    script = directory / "stand_in.py"
    lines = [
        "import json, os, sys, time",
        "def say(**message): print(json.dumps(message), flush=True)",
        "json.loads(sys.stdin.readline())",
        f"say(type='SamplerReady', fingerprint={says!r})",
        "for line in sys.stdin:",
        "    message = json.loads(line)",
        "    if message['type'] == 'SampleRequest':",
        textwrap.indent(on_generate, " " * 8),
    ]
    script.write_text("\n".join(lines))
    program = directory / "python"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -S {script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


DISTRESS = {
    "its device fails": "say(type='Broken', key=message['key'], reason='RuntimeError: out of memory')",
    "half a message": 'os.write(1, b\'{"type":"Chunks","key":0,"chu\'); os._exit(1)',
    "it ends": "os._exit(0)",
}


@pytest.mark.parametrize("what", DISTRESS)
def test_what_goes_wrong_there_is_sampled_here(
    here: EmbeddedEngine, links: list[SamplerLink], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    stand_in(tmp_path, monkeypatch, DISTRESS[what])
    links.append(SamplerLink(LOAD, "same", BusyTime(), 0.5, None))
    wait_for(links[0])
    engine = SpreadEngine(here, links)

    async def run() -> None:
        wanted = bits(await collect(here, request("wanted", None)))
        engine._open[0]["somebody"] = 7
        assert engine._choose(request("wanted", None)) == 1
        assert bits(await collect(engine, request("wanted", None))) == wanted
        if links[0].ready:
            again = request("wanted", None, stream=True)
            assert bits(await collect(engine, again)) == bits(await collect(here, again))

    asyncio.run(run())


@pytest.mark.parametrize("n_chunks", [1, 5, 30])
def test_a_stream_goes_on_here_after_what_was_delivered(here: EmbeddedEngine, n_chunks: int) -> None:
    class Link:
        """A process that dies after some chunks."""

        ready, on_ready = True, None

        async def generate(self, asked: GenerateRequest) -> AsyncIterator[Chunk]:
            """What the process would sample."""
            left = n_chunks
            elsewhere = dataclasses.replace(asked, id="elsewhere")  # closed below, which aborts what has this id
            async for chunk in here.generate(elsewhere):
                yield chunk
                left -= 1
                if not left:
                    raise DeviceError("it died")

    async def run() -> None:
        asked = request("wanted", None, (1, 2), stream=True, sampling={"stop": ("e",), "max_tokens": 40})
        wanted = await collect(here, asked)
        engine = SpreadEngine(here, [cast(Any, Link())])
        engine._open[0]["somebody"] = 7
        assert bits(await collect(engine, asked)) == bits(wanted)

    asyncio.run(run())


def test_a_process_that_computes_other_bits_is_not_used(
    here: EmbeddedEngine, links: list[SamplerLink], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, says="other")
    links.append(SamplerLink(LOAD, "same", BusyTime(), 0.5, None))
    wait_until(lambda: is_gone(links[0].pid), "it stays, and so does its copy of the base")
    engine = SpreadEngine(here, links)
    assert engine.notes() == ["a sampling process computes different bits than this one, so it is not used"]
    assert engine._choose(request("r", None)) == 0
    with pytest.raises(DeviceError, match="different bits"):
        asyncio.run(collect(links[0], request("r", None)))


def test_a_process_that_cannot_load_the_base_is_not_used(
    base: Any, here: EmbeddedEngine, links: list[SamplerLink], tmp_path: Path
) -> None:
    log = tmp_path / "samplers.log"
    links.append(
        SamplerLink(msgspec.structs.replace(LOAD, base="/nowhere/base"), base.fingerprint(), BusyTime(), 0.5, log)
    )
    engine = SpreadEngine(here, links)
    wait_until(lambda: bool(engine.notes()), "nothing is told")
    (note,) = engine.notes()
    assert note.startswith("a sampling process could not load the base: there is no directory /nowhere/base;")
    assert asyncio.run(collect(engine, request("r", None)))
    assert log.exists()


def test_a_version_that_cannot_be_handed_over_harms_no_job(
    base: Any, here: EmbeddedEngine, links: list[SamplerLink], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that files are handed over in may be full."""
    stand_in(tmp_path, monkeypatch)
    links.append(SamplerLink(LOAD, "same", BusyTime(), 0.5, None))
    wait_for(links[0])
    engine = SpreadEngine(here, links)

    async def run() -> None:
        engine._open[0]["somebody"] = 7
        task = asyncio.create_task(collect(engine, request("r", None)))
        await asyncio.sleep(0)
        shutil.rmtree(links[0]._files.name)
        ref = new_version(base, engine)
        assert bits(await task) == bits(await collect(here, request("r", None)))
        assert await collect(engine, request("new", ref))

    asyncio.run(run())
    assert "cannot receive an adapter" in engine.notes()[0]


def test_closing_before_it_is_ready_waits_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    link = SamplerLink(LOAD, "same", BusyTime(), 0.5, None)
    files, started = Path(link._files.name), time.monotonic()
    link.close()
    assert time.monotonic() - started < PATIENCE
    assert is_gone(link.pid)
    assert not files.exists()
    assert not link.note


PARENT = """
import sys, time
from motet.process.channel import decode
from motet.core.device import BusyTime
from motet.rollout.sampler_link import SamplerLink
from motet.rollout.sampler_messages import ToSampler

link = SamplerLink(decode(sys.argv[1], ToSampler), sys.argv[2], BusyTime(), 0.5, None)
while not link.ready:
    assert not link.note, link.note
    time.sleep(0.02)
open(link._files.name + "/left", "w").close()
print(link.pid, link._files.name, flush=True)
time.sleep(600)
"""


def test_kill_9_of_the_parent_leaves_nothing() -> None:
    place = str(tiny.directory("llama"))
    fingerprint = load(place, EngineConfig(threads=1, dtype="bfloat16")).fingerprint()
    asked = encode(msgspec.structs.replace(LOAD, base=place)).decode()
    command = [sys.executable, "-c", PARENT, asked, fingerprint]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, files = parent.stdout.readline().split()
        try:
            assert Path(files, "left").exists()
            assert not is_gone(int(pid))
        finally:
            parent.kill()
    wait_until(lambda: is_gone(int(pid)), "the process lives on without its parent")
    assert not Path(files).exists()


# --- whole runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Three jobs of two steps, one of them with a lag."""
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(REWARDS)
    return [
        job("one", path, steps=2),
        job("two", path, steps=2, algorithm={"group_size": 3, "groups_per_step": 3}, adapter={"rank": 8}),
        job("three", path, steps=2, reward=f"{path}:vowels", algorithm={"max_off_policy_steps": 1}),
    ]


def run(base: Any, directory: Path, jobs: Any, samplers: int, kill: bool = False) -> tuple[RunResult, Any]:
    """Run the jobs, the process ready before they begin; kill it as soon as it has sampled something."""
    used: list[SamplerLink] = []

    def kill_it() -> None:
        wait_until(lambda: used[0].seconds > 0, "the process sampled nothing")
        os.kill(used[0].pid, signal.SIGKILL)

    def started(host: Any) -> None:
        used.extend(getattr(host.workshop.engine, "links", ()))
        for link in used:
            wait_for(link)
        if kill:
            threading.Thread(target=kill_it, daemon=True).start()

    asked = config(directory, jobs, samplers=samplers, threads=1)
    return run_config(asked, base=base, started=started), used


@pytest.fixture(scope="module")
def alone(base: Any, jobs: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Digests of every job's files, sampled in one process."""
    directory = tmp_path_factory.mktemp("alone")
    result, used = run(base, directory, jobs, 0)
    assert result.ok
    assert not used
    found = {name: fingerprint(directory / name) for name in result.jobs}
    assert len({digests["metrics.jsonl"] for digests in found.values()}) == 3
    return found


@pytest.mark.parametrize("kill", few([False, True], True))
def test_a_run_gives_the_same_bytes(base: Any, tmp_path: Path, jobs: Any, alone: Any, kill: bool) -> None:
    result, (link,) = run(base, tmp_path, jobs, 1, kill)
    assert result.ok, result
    assert link.seconds > 0, "the process sampled nothing"
    ended = KILLED
    assert (ended in result.notes) == kill, result.notes
    for name in result.jobs:
        assert fingerprint(tmp_path / name) == alone[name], name
    assert is_gone(link.pid)
    assert not Path(link._files.name).exists()


JOB_FILE = """
base: small
engine: {threads: 1, samplers: 1, max_rows: 8}
jobs:
  - name: add
    data: {source: "toy:add", size: 64, holdout: 2}
    reward: numeric
    steps: 400
    sampling: {max_tokens: 3}
    adapter: {rank: 4}
    algorithm: {group_size: 2, groups_per_step: 2}
    eval: {every: 0}
"""


@pytest.mark.parametrize("number", few([signal.SIGINT, signal.SIGTERM], signal.SIGINT))
def test_an_interrupted_run_saves_and_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C goes to every process of the terminal's group, SIGTERM to one."""
    (tmp_path / "jobs.yaml").write_text(JOB_FILE)
    command = [sys.executable, "-c", "from motet.commands.cli import main; main()", "run", "jobs.yaml"]
    environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        metrics = tmp_path / "runs" / "jobs" / "add" / "metrics.jsonl"
        try:
            wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, "no step was done")
            children = psutil.Process(process.pid).children(recursive=True)
            assert any("motet.rollout.sampler_process" in child.cmdline() for child in children), children
            (os.killpg if number is signal.SIGINT else os.kill)(process.pid, number)
            out, err = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert process.returncode == 130, out + err
    assert "resume with: motet run jobs.yaml" in out
    assert "Traceback" not in out + err
    assert "sampling process" not in out
    assert json.loads((metrics.parent / "status.json").read_text())["state"] == JobState.PAUSED
    assert all(is_gone(child.pid) for child in children)


# --- which place ----------------------------------------------------------------------------------------------------------


def places(n: int, ready: Sequence[bool] = (), rows: int = 1000) -> SpreadEngine:
    """An engine whose places only count."""

    async def nothing(_: object) -> None:
        """Nobody is there to be told."""

    links = [SimpleNamespace(ready=ready[index] if ready else True, abort=str) for index in range(n - 1)]
    here = SimpleNamespace(capacity=rows, refuse=str, abort=nothing, unload_adapter=nothing)
    return SpreadEngine(cast(Any, here), cast(Any, links))


def ask(adapter: str, n: int) -> GenerateRequest:
    return request("r", AdapterRef(adapter, 0), range(n))


Events = list[tuple[str, int]]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 8)), max_size=40), st.integers(1, 4), st.data())
def test_no_place_is_more_than_a_request_ahead(events: Events, n: int, data: st.DataObject) -> None:
    engine = places(n)
    one = len({adapter for adapter, _ in events}) == 1
    for adapter, size in events:
        if data.draw(st.booleans()):  # somebody ends
            full = [(place, name) for place in range(n) for name, count in engine._open[place].items() if count]
            if full:
                place, name = data.draw(st.sampled_from(full))
                engine._open[place][name] -= 1
        loads = [place.total() for place in engine._open]
        chosen = engine._choose(ask(adapter, size))
        at_hand = [place for place in range(n) if engine._open[place][adapter] and loads[place] <= min(loads) + size]
        assert loads[chosen] <= min(loads) + (0 if one else size)
        if not one and any(name != adapter and count for place in engine._open for name, count in place.items()):
            assert chosen in at_hand or not at_hand, "its weights are at hand elsewhere, near a tie"
        engine._open[chosen][adapter] += size


def test_a_single_job_is_balanced_and_several_stay_together() -> None:
    engine = places(3)
    chosen = []
    for _ in range(6):
        chosen.append(engine._choose(ask("a", 4)))
        engine._open[chosen[-1]]["a"] += 4
    assert chosen == [0, 1, 2, 0, 1, 2]
    engine = places(2)
    homes: dict[str, Counter[int]] = {"a": Counter(), "b": Counter()}
    for turn in range(12):
        adapter = "ab"[turn % 2]
        place = engine._choose(ask(adapter, 4))
        homes[adapter][place] += 1
        engine._open[place][adapter] += 4
    assert homes == {"a": Counter({0: 6}), "b": Counter({1: 6})}


def test_a_place_that_is_not_ready_is_left_out() -> None:
    engine = places(3, ready=(False, True))
    engine._open[0]["a"] = 9
    engine._open[2]["a"] = 5
    assert engine._choose(ask("a", 4)) == 2


def test_an_episode_returns_to_where_it_was_while_there_is_a_row() -> None:
    engine = places(2, rows=4)
    first, second = (dataclasses.replace(ask("a", 1), episodes=(name,)) for name in ("e0", "e1"))

    async def run() -> None:
        assert [await engine._turn(one) for one in (first, second)] == [0, 1]
        engine._open[1].clear()
        assert [await engine._turn(one) for one in (first, first, first)] == [0, 0, 0]
        assert await engine._turn(first) == 1, "its rows are taken"
        await engine.abort("e1")
        await engine.abort("e0")
        assert not engine._kept

    asyncio.run(run())


def test_a_request_waits_for_a_free_row_wherever_it_comes_first() -> None:
    engine = places(2, ready=[False], rows=4)

    async def run() -> None:
        turns = [asyncio.create_task(engine._turn(ask("a", 4))) for _ in range(5)]
        await asyncio.sleep(0)
        assert await turns[0] == 0
        assert engine._open[0].total() == 4
        cast(Any, engine.links[0]).ready = True
        await asyncio.to_thread(engine.links[0].on_ready)
        assert await asyncio.wait_for(turns[1], PATIENCE) == 1, "the process that has become ready gets nothing"
        await asyncio.sleep(0)
        assert not any(turn.done() for turn in turns[2:])
        turns[2].cancel()
        engine._open[1]["a"] -= 1
        engine._start_waiting()
        assert await asyncio.wait_for(turns[3], PATIENCE) == 1, "who left is still in the way"
        assert not turns[4].done()
        engine._open[0].clear()
        engine._start_waiting()
        turns[4].cancel()  # it has got a place, and has not begun
        await asyncio.gather(turns[2], turns[4], return_exceptions=True)
        assert [place.total() for place in engine._open] == [0, 7]

    asyncio.run(run())


def test_a_tenant_within_its_share_waits_for_no_row_of_another() -> None:
    engine = places(2, rows=4)

    async def run() -> None:
        greedy = [
            asyncio.create_task(engine._turn(dataclasses.replace(ask("a", 4), tenant="greedy"))) for _ in range(4)
        ]
        await asyncio.sleep(0)
        assert [turn.done() for turn in greedy] == [True, True, False, False]
        small = [asyncio.create_task(engine._turn(dataclasses.replace(ask("b", 3), tenant="small"))) for _ in range(2)]
        await asyncio.sleep(0)
        assert [turn.done() for turn in small] == [True, False], "a tenant has more than half of eight rows"
        for turn in (*greedy[2:], small[1]):
            turn.cancel()
        await asyncio.gather(*greedy, *small, return_exceptions=True)

    asyncio.run(run())


@pytest.mark.parametrize("name", ["r", "j"])
def test_who_waits_for_a_row_can_be_aborted_and_keeps_the_adapter(name: str) -> None:
    engine = places(1, rows=4)
    waits = dataclasses.replace(ask("a", 2), job="j")

    async def run() -> None:
        assert await engine._turn(ask("b", 4)) == 0
        task = asyncio.create_task(collect(engine, waits))
        await asyncio.sleep(0)
        assert waits.adapter is not None
        unloading = asyncio.create_task(engine.unload_adapter(waits.adapter))
        await asyncio.sleep(0.02)
        assert not unloading.done()
        await engine.abort("others")
        assert not task.done()
        await engine.abort(name)
        found = await asyncio.wait_for(task, PATIENCE)
        await asyncio.wait_for(unloading, PATIENCE)
        reasons = {index: [chunk.finish_reason for chunk in chunks] for index, chunks in found.items()}
        assert reasons == {0: [FinishReason.ABORT], 1: [FinishReason.ABORT]}
        assert engine._open[0].total() == 4

    asyncio.run(run())


def test_an_adapter_is_read_while_other_requests_go_on(tmp_path: Path) -> None:
    went_on = threading.Event()
    engine, seen = places(1), dict[Path, bool]()
    engine.here.read = lambda source: seen.update({source: went_on.wait(PATIENCE)})  # type: ignore[assignment, method-assign, return-value]
    engine.here.install = lambda ref, weights: None  # type: ignore[method-assign]

    async def run() -> None:
        loading = asyncio.create_task(engine.load_adapter(AdapterRef("a", 0), tmp_path))
        await asyncio.sleep(0)
        went_on.set()
        await loading

    asyncio.run(run())
    assert seen == {tmp_path: True}
