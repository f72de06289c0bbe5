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
from typing import Any, cast

import msgspec
import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
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
from motet.rollout.sequences import aborted
from motet.rollout.spread import SpreadEngine
from tests.support import inside
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
SHARE = 0.5
"""Of the device's time that a second of the process counts for."""
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
def device_here() -> Iterator[Device]:
    with contextlib.closing(Device()) as found:
        yield found


@pytest.fixture(scope="module")
def here(base: Any, device_here: Device) -> EmbeddedEngine:
    return EmbeddedEngine(base, device_here, **LIMITS)


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
    link = SamplerLink(LOAD, base.fingerprint(), busy, SHARE, None)
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
    base: Any, here: EmbeddedEngine, device_here: Device, link: SamplerLink, busy: BusyTime
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
    assert told.total() <= 1e6 * (seconds - before) / SHARE
    first = told["p"]
    asyncio.run(tokens(link, "p", 9))
    wait_until(lambda: is_told({"p"}) and told["p"] > first, "it is not told again")
    assert told.total() <= 1e6 * (tell() - before) / SHARE
    device_here.busy.take()
    asyncio.run(tokens(here, "p", 9))
    wait_until(lambda: device_here.busy.take()[1].get("p", 0) > 0, "the time of the process itself is not told")


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
                    assert inside.open_rows(engine)[1].total() == 2, "it is not in the process"
                    await engine.abort(name)
                    finished[-1] = FinishReason.ABORT
                if chunk.finish_reason is not None:
                    finished[chunk.index] = chunk.finish_reason
        assert set(finished.values()) == {FinishReason.ABORT}
        assert finished.keys() == {-1, 0, 1}
        kept = await task
        assert sum(len(chunk.token_ids) for chunk in kept[0]) == LONG, "the wrong one was aborted"
        assert [place.total() for place in inside.open_rows(engine)] == [0, 0]

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
                    assert inside.open_rows(engine)[1].total() == 2, "it is not in the process, or is over already"
                    os.kill(link.pid, signal.SIGKILL)
                found.setdefault(chunk.index, []).append(chunk)
        assert bits(dict(sorted(found.items()))) == wanted
        await waiting
        assert engine.notes() == [KILLED]
        assert not link.ready
        again = request("again", ref, (1, 2, 3), stream=True)
        assert bits(await collect(engine, again)) == bits(await collect(here, again)), "the engine goes on alone"
        new_version(base, engine)
        assert [place.total() for place in inside.open_rows(engine)] == [0, 0]

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
    links.append(SamplerLink(LOAD, "same", BusyTime(), SHARE, None))
    wait_for(links[0])
    engine = SpreadEngine(here, links)

    async def run() -> None:
        wanted = bits(await collect(here, request("wanted", None)))
        inside.open_rows(engine)[0]["somebody"] = 7
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
        inside.open_rows(engine)[0]["somebody"] = 7
        assert bits(await collect(engine, asked)) == bits(wanted)

    asyncio.run(run())


def test_a_process_that_computes_other_bits_is_not_used(
    here: EmbeddedEngine, links: list[SamplerLink], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, says="other")
    links.append(SamplerLink(LOAD, "same", BusyTime(), SHARE, None))
    wait_until(lambda: is_gone(links[0].pid), "it stays, and so does its copy of the base")
    engine = SpreadEngine(here, links)
    assert engine.notes() == ["a sampling process computes different bits than this one, so it is not used"]
    asked = request("r", None)
    assert bits(asyncio.run(collect(engine, asked))) == bits(asyncio.run(collect(here, asked)))
    with pytest.raises(DeviceError, match="different bits"):
        asyncio.run(collect(links[0], request("r", None)))


def test_a_process_that_cannot_load_the_base_is_not_used(
    base: Any, here: EmbeddedEngine, links: list[SamplerLink], tmp_path: Path
) -> None:
    log = tmp_path / "samplers.log"
    links.append(
        SamplerLink(msgspec.structs.replace(LOAD, base="/nowhere/base"), base.fingerprint(), BusyTime(), SHARE, log)
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
    links.append(SamplerLink(LOAD, "same", BusyTime(), SHARE, None))
    wait_for(links[0])
    engine = SpreadEngine(here, links)

    async def run() -> None:
        inside.open_rows(engine)[0]["somebody"] = 7
        task = asyncio.create_task(collect(engine, request("r", None)))
        await asyncio.sleep(0)
        shutil.rmtree(inside.files(links[0]))
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
    link = SamplerLink(LOAD, "same", BusyTime(), SHARE, None)
    files, started = Path(inside.files(link)), time.monotonic()
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
    assert not Path(inside.files(link)).exists()


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


class Place:
    """A place that ends the completions of a request when a test says so."""

    def __init__(self, rows: int, ready: bool = True) -> None:
        self.capacity, self.ready = rows, ready
        self.on_ready: Callable[[], None] = lambda: None
        self.open: list[tuple[GenerateRequest, asyncio.Event]] = []

    def refuse(self, asked: GenerateRequest) -> None:
        """Refuse nothing."""

    async def generate(self, asked: GenerateRequest) -> AsyncIterator[Chunk]:
        """Wait, then end all completions."""
        entry = asked, asyncio.Event()
        self.open.append(entry)
        try:
            await entry[1].wait()
            for index in range(len(asked.seeds)):
                yield aborted(index)
        finally:
            self.open = [other for other in self.open if other is not entry]

    def abort(self, name: str) -> asyncio.Future[None]:
        """End nothing: a link is told, and the engine of this process is waited for."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    async def unload_adapter(self, ref: AdapterRef) -> None:
        """Unload nothing."""

    def rows(self) -> Counter[str]:
        """Count the open completions by adapter."""
        found = Counter[str]()
        for asked, _ in self.open:
            found[asked.adapter.name if asked.adapter else ""] += len(asked.seeds)
        return found


async def settled() -> None:
    """Let what can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


class Sending:
    """Requests that are open, and where each of them is."""

    def __init__(self, n: int, ready: Sequence[bool] = (), rows: int = 1000) -> None:
        here, *links = self.places = [Place(rows, ready[index - 1] if ready and index else True) for index in range(n)]
        self.engine = SpreadEngine(cast(Any, here), cast(Any, links))
        self.tasks: list[asyncio.Task[Any]] = []

    async def send(self, asked: GenerateRequest) -> int | None:
        """Send a request; give the index of its place, or None while it waits."""
        self.tasks.append(asyncio.create_task(collect(self.engine, asked)))
        await settled()
        return self.place_of(asked)

    def place_of(self, asked: GenerateRequest) -> int | None:
        """Find where a request is."""
        found = [index for index, place in enumerate(self.places) if any(one is asked for one, _ in place.open)]
        return found[0] if found else None

    async def end(self, place: int, which: int = 0) -> None:
        """End one of the requests of a place."""
        self.places[place].open[which][1].set()
        await settled()

    async def close(self) -> None:
        """Leave all of them."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def ask(adapter: str, n: int, **fields: Any) -> GenerateRequest:
    return dataclasses.replace(request("r", AdapterRef(adapter, 0), range(n)), **fields)


Events = list[tuple[str, int]]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 8)), max_size=40), st.integers(1, 4), st.data())
@settings(deadline=None)
def test_no_place_is_more_than_a_request_ahead(events: Events, n: int, data: st.DataObject) -> None:
    one = len({adapter for adapter, _ in events}) == 1

    async def run() -> None:
        sending = Sending(n)
        for adapter, size in events:
            full = [index for index, place in enumerate(sending.places) if place.open]
            if data.draw(st.booleans()) and full:
                place = data.draw(st.sampled_from(full))
                await sending.end(place, data.draw(st.integers(0, len(sending.places[place].open) - 1)))
            rows = [place.rows() for place in sending.places]
            loads = [counts.total() for counts in rows]
            chosen = await sending.send(ask(adapter, size))
            assert chosen is not None
            near = [index for index in range(n) if rows[index][adapter] and loads[index] <= min(loads) + size]
            assert loads[chosen] <= min(loads) + (0 if one else size)
            if not one and any(name != adapter for counts in rows for name in counts):
                assert chosen in near or not near, "its weights are at hand elsewhere, near a tie"
        await sending.close()

    asyncio.run(run())


def test_a_single_job_is_balanced_and_several_stay_together() -> None:
    async def run() -> None:
        sending = Sending(3)
        assert [await sending.send(ask("a", 4)) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
        await sending.close()
        sending = Sending(2)
        assert [await sending.send(ask("ab"[turn % 2], 4)) for turn in range(12)] == [0, 1] * 6
        await sending.close()

    asyncio.run(run())


def test_a_place_that_is_not_ready_is_left_out() -> None:
    async def run() -> None:
        sending = Sending(3, ready=(False, True))
        assert [await sending.send(ask("a", n)) for n in (9, 5, 4)] == [0, 2, 2]
        await sending.close()

    asyncio.run(run())


def test_an_episode_returns_to_where_it_was_while_there_is_a_row() -> None:
    async def run() -> None:
        sending = Sending(2, rows=4)

        async def turn(episode: str) -> int | None:
            return await sending.send(ask("a", 1, episodes=(episode,)))

        assert [await turn("e0"), await turn("e1")] == [0, 1]
        await sending.end(1)
        assert [await turn("e0") for _ in range(3)] == [0, 0, 0]
        assert await turn("e0") == 1, "its rows are taken"
        for _ in range(4):
            await sending.end(0)
        assert await turn("e0") == 1
        await sending.engine.abort("e0")
        assert await turn("e0") == 0, "it is over, and returns nowhere"
        await sending.close()

    asyncio.run(run())


def test_a_request_waits_for_a_free_row_wherever_it_comes_first() -> None:
    async def run() -> None:
        sending = Sending(2, ready=[False], rows=4)
        first, second, left, third, late = (ask("a", 4) for _ in range(5))
        begun: Any = sending.engine.generate(first)

        async def leave() -> None:
            await anext(begun)
            sending.tasks[3].cancel()  # it has got a place, and has not begun

        leaving = asyncio.create_task(leave())
        await settled()
        assert [await sending.send(asked) for asked in (second, left, third, late)] == [None] * 4
        sending.places[1].ready = True
        await asyncio.to_thread(sending.places[1].on_ready)
        await settled()
        assert sending.place_of(second) == 1, "the process that has become ready gets nothing"
        assert [sending.place_of(asked) for asked in (left, third, late)] == [None] * 3
        sending.tasks[1].cancel()
        await sending.end(1)
        assert sending.place_of(third) == 1, "who left is still in the way"
        assert sending.place_of(late) is None
        sending.places[0].open[0][1].set()
        await leaving
        await begun.aclose()
        await settled()
        assert sending.tasks[3].cancelled()
        assert await sending.send(ask("a", 4)) == 0, "the place of who left is kept"
        await sending.close()

    asyncio.run(run())


def test_a_tenant_within_its_share_waits_for_no_row_of_another() -> None:
    async def run() -> None:
        sending = Sending(2, rows=4)
        assert [await sending.send(ask("a", 4, tenant="greedy")) for _ in range(4)] == [0, 1, None, None]
        small = [await sending.send(ask("b", 3, tenant="small")) is not None for _ in range(2)]
        assert small == [True, False], "a tenant has more than half of eight rows"
        await sending.close()

    asyncio.run(run())


@pytest.mark.parametrize("name", ["r", "j"])
def test_who_waits_for_a_row_can_be_aborted_and_keeps_the_adapter(name: str) -> None:
    waits = ask("a", 2, job="j")

    async def run() -> None:
        sending = Sending(1, rows=4)
        engine = sending.engine
        assert await sending.send(ask("b", 4, job="others'")) == 0
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
        assert await sending.send(ask("b", 1)) is None, "the row was free before"
        await sending.close()

    asyncio.run(run())


def test_an_adapter_is_read_while_other_requests_go_on(tmp_path: Path) -> None:
    went_on = threading.Event()
    engine, seen = Sending(1).engine, dict[Path, bool]()
    engine.here.read = lambda source: seen.update({source: went_on.wait(PATIENCE)})  # type: ignore[assignment, method-assign, return-value]
    engine.here.install = lambda ref, weights: None  # type: ignore[method-assign]

    async def run() -> None:
        loading = asyncio.create_task(engine.load_adapter(AdapterRef("a", 0), tmp_path))
        await asyncio.sleep(0)
        went_on.set()
        await loading

    asyncio.run(run())
    assert seen == {tmp_path: True}
