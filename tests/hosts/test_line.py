"""The end of a service's connection in its engine: one HTTP process after another, and none between them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from motet.config import EngineConfig, HostConfig, RewardConfig
from motet.config.service import ANY_SIZE
from motet.core.errors import DeviceLost, ScorerAway
from motet.core.types import JobState, Wanted
from motet.hosts import line as lines
from motet.hosts import messages as m
from motet.hosts.line import Gone, ServiceLine
from motet.hosts.process import HostProcess
from motet.hosts.scores import AskedOfService
from motet.process.channel import ChannelMessage, decode, encode
from motet.process.heartbeat import Pulse
from motet.rewards.reward_elsewhere import AnswerDetails
from motet.runtime.rundir import RunDirectory
from motet.runtime.slots import Rule
from tests.support.sending import sending
from tests.support.service_run import tiny
from tests.support.waiting import PATIENCE, until

START = m.StartHost("small", "", {}, {}, {}, [], 1.0, ANY_SIZE)


class OneService:
    """An HTTP process of a service, as the engine sees it."""

    def __init__(self, line: Line) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(PATIENCE)
        with theirs:
            socket.send_fds(line.owner, [b" "], [theirs.fileno()])
        self.lines = self.socket.makefile("rb")

    def send(self, *messages: ChannelMessage) -> OneService:
        self.socket.sendall(b"".join(map(encode, messages)))
        return self

    def hears(self, count: int) -> list[Any]:
        """The next messages."""
        return [decode(self.lines.readline(), m.FromHost) for _ in range(count)]

    def dies(self) -> None:
        self.lines.close()
        self.socket.close()


class Line:
    """A line in this process, what it delivers, and whether it ended its process."""

    def __init__(self) -> None:
        self.said, self.ended = list[str](), threading.Event()
        self.owner, self.channel = socket.socketpair()
        self.line = ServiceLine(self.channel, self.said.append, self.ended.set)

    def close(self) -> None:
        """Die as the parent of the service."""
        self.owner.close()
        assert self.ended.wait(PATIENCE)
        self.channel.close()


@contextlib.asynccontextmanager
async def begun() -> AsyncIterator[tuple[Line, OneService, asyncio.Queue[Any]]]:
    """A line with its first HTTP process."""
    with contextlib.closing(Line()) as made:
        first = OneService(made).send(START)
        assert await asyncio.to_thread(made.line.first) == START
        yield made, first, made.line.queue()


def step(number: int) -> m.JobStepped:
    return m.JobStepped("job", {"step": number})


def test_what_was_not_written_down_comes_again_and_nothing_else() -> None:
    async def work() -> None:
        async with begun() as (made, first, messages):
            for number in range(3):
                made.line.send(step(number))
            assert first.hears(3) == [step(0), step(1), step(2)]
            first.send(m.EventKept(), m.Nudge("a"))
            assert await messages.get() == m.Nudge("a")
            first.dies()
            assert await messages.get() == Gone()
            made.line.send(m.Progress({}, {}))
            made.line.send(m.JobChanged("job", JobState.SUCCEEDED, "", key="a.1"))
            second = OneService(made).send(START)
            assert await messages.get() == START
            made.line.send(step(3))  # before the engine has resumed: in its turn
            made.line.resume()
            made.line.send(m.Stopped())
            heard = await asyncio.to_thread(second.hears, 5)
            assert heard == [
                step(1),
                step(2),
                m.JobChanged("job", JobState.SUCCEEDED, "", key="a.1"),
                step(3),
                m.Stopped(),
            ]
            second.send(*[m.EventKept()] * 4, m.Nudge("b"))
            assert await messages.get() == m.Nudge("b")
            assert not made.line._kept
            assert not made.line._waiting
            assert not made.ended.is_set()
            second.dies()

    asyncio.run(work())


def test_a_host_outlives_an_http_process_that_said_nothing_and_ends_with_the_parent() -> None:
    with contextlib.closing(Line()) as made:
        OneService(made).dies()
        second = OneService(made).send(START)
        assert made.line.first() == START
        assert not made.ended.is_set()
        second.dies()


def test_a_host_that_is_stopped_hears_that_its_input_ended() -> None:
    async def work() -> None:
        async with begun() as (made, first, messages):
            first.send(m.Stop())
            assert await messages.get() == m.Stop()
            made.line.send(m.Stopped())
            assert await asyncio.to_thread(first.hears, 1) == [m.Stopped()]
            first.dies()
            assert await messages.get() is None
            made.ended.set()  # it reads no more

    asyncio.run(work())


def test_a_host_ends_when_more_events_wait_for_the_service_than_it_keeps() -> None:
    async def work() -> None:
        async with begun() as (made, first, messages):
            first.dies()
            assert await messages.get() == Gone()
            text = "x" * (lines.MOST_KEPT // 3)
            for number in range(4):
                assert not made.ended.is_set()
                made.line.send(m.JobStepped("job", {"step": number, "text": text}))
                if made.ended.is_set():
                    break
            assert (number, made.ended.is_set()) == (2, True)
            assert "64 MB of events wait: jobs go on from their last commits" in made.said[-1]

    asyncio.run(work())


def test_a_host_whose_device_breaks_down_ends(tmp_path: Path) -> None:
    """The service starts it again; it would fail every job."""

    def tick() -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    async def work() -> None:
        config = HostConfig(base="small", engine=EngineConfig(threads=1))
        async with begun() as (made, first, _):
            host = HostProcess(config, RunDirectory(tmp_path / "run"), START, made.line)
            with contextlib.closing(host):
                serving = asyncio.create_task(host.serve(Pulse(lambda still: None)))
                (ready,) = await asyncio.to_thread(first.hears, 1)
                assert isinstance(ready, m.HostReady)
                host.workshop.device.add_tick(tick)
                host.workshop.device.wake()
                with pytest.raises(DeviceLost, match="illegal memory access"):
                    await asyncio.wait_for(serving, PATIENCE)
            first.dies()

    asyncio.run(work())


def test_a_later_job_whose_rows_cannot_be_trained_fails_before_it_begins(tmp_path: Path) -> None:
    """In the memory of a small card; its neighbour is taken."""

    async def work() -> None:
        config = HostConfig(base="small", engine=EngineConfig(threads=1))
        async with begun() as (made, first, _):
            host = HostProcess(config, RunDirectory(tmp_path / "run"), START, made.line)
            assert host.workshop.samples is not None
            host.workshop.samples = dataclasses.replace(host.workshop.samples, longest=30, recomputed=100)
            with contextlib.closing(host):
                serving = asyncio.create_task(host.serve(Pulse(lambda still: None)))
                for name, words in (("short", "add 1 and 2"), ("long", "add " * 34)):
                    rows = tmp_path / f"{name}.jsonl"
                    rows.write_text(json.dumps({"prompt": words, "answer": "3"}) + "\n")
                    job = tiny(name, data={"source": str(rows), "holdout": 0}, steps=1)
                    host.handle(m.AddJob(job, Wanted.RUN, 0, "", Rule()))
                changed = list[m.JobChanged]()
                while {one.job for one in changed if one.state.final} != {"short", "long"}:
                    (heard,) = await asyncio.to_thread(first.hears, 1)
                    changed += [heard] if isinstance(heard, m.JobChanged) else []
                ends = {one.job: one for one in changed if one.state.final}
                assert ends["short"].state is JobState.SUCCEEDED
                assert ends["long"].state is JobState.FAILED
                assert "a sample of at least 78 tokens" in ends["long"].message
                assert "set engine.recompute to true, with which 100 fit" in ends["long"].message
                assert [one.job for one in changed if one.state is JobState.RUNNING] == ["short"]
                serving.cancel()
                await asyncio.wait([serving])
            first.dies()

    asyncio.run(work())


def test_scores_are_asked_again() -> None:
    sent: list[Any] = []

    async def work() -> None:
        scores, reward = AskedOfService(sending(sent.append)), RewardConfig(name="judge")
        first, second = (asyncio.create_task(scores("job", reward, {"id": n}, ["a"])) for n in range(2))
        await until(lambda: len(sent) == 2)
        scores.hear(m.ScoresAnswered(sent[0].key, [0.5]))
        assert await first == [0.5]
        assert list(scores.pending) == [sent[1]]
        scores.hear(m.ScoresAnswered(sent[1].key, away=True))
        with pytest.raises(ScorerAway):
            await second

    asyncio.run(work())


def test_the_event_loop_does_not_wait_for_who_reads_its_messages(tmp_path: Path) -> None:
    """Neither while the service reads nothing, nor when all that it has not stored is sent to the next one."""
    text, most = "x" * 2**20, 16

    async def work() -> None:
        config = HostConfig(base="small", engine=EngineConfig(threads=1))
        async with begun() as (made, first, _):
            host = HostProcess(config, RunDirectory(tmp_path / "run"), START, made.line)
            with contextlib.closing(host):
                serving = asyncio.create_task(host.serve(Pulse(lambda still: None)))
                (ready,) = await asyncio.to_thread(first.hears, 1)
                for number in range(most):  # a connection holds less
                    host._send(m.JobStepped("job", {"step": number, "text": text}))
                assert not host._send().done(), "it is sent in one turn"
                first.dies()
                second = OneService(made).send(START)
                await until(lambda: made.line._next is None and made.line._peer is not None)
                heard = await asyncio.to_thread(second.hears, most + 1)
                assert [one.line["step"] for one in heard[:-1]] == [*range(most)]
                assert heard[-1] == ready
                serving.cancel()
                await asyncio.wait([serving])
                second.dies()

    asyncio.run(work())


def test_a_request_for_scores_is_sent_in_messages_of_few_bytes() -> None:
    sent = list[Any]()
    texts = [f"{n}" * size for n, size in enumerate((10, 2**19, 2**19, 2**21, 10, 10))]
    seen = AnswerDetails([[{"role": "user", "content": text}] for text in texts], state={"step": 3})
    problem = {"id": 1, "metadata": {"page": "p"}}

    async def work() -> None:
        scores, reward = AskedOfService(sending(sent.append)), RewardConfig(name="judge")
        asking = asyncio.create_task(scores("job", reward, problem, texts, seen))
        await until(lambda: bool(sent))
        assert [one.completions for one in sent] == [texts[:1], texts[1:2], texts[2:3], texts[3:4], texts[4:]]
        assert [one.more for one in sent] == [True] * 4 + [False]
        assert [one.problem for one in sent] == [problem, {}, {}, {}, {}]
        assert list(scores.pending) == sent
        scores.hear(m.ScoresAnswered(sent[0].key, [0.5] * 6))
        assert await asking == [0.5] * 6

    asyncio.run(work())
    joined = sent[0]
    for later in sent[1:]:
        joined = joined.with_more(later)
    found = joined.completions, joined.transcripts, joined.parts, joined.state, joined.more
    assert found == (texts, seen.transcripts, [], seen.state, False)
