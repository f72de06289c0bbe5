"""The client of hosts' processes, message by message; the processes themselves are in test_service_engine.py."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from motet.config.jobfile import validate
from motet.config.service import ANY_SIZE
from motet.core.errors import EngineError
from motet.core.types import JobState, SamplingParams, Wanted
from motet.hosts.host_link import CLOSE_SECONDS, HostChild, HostHandlers, HostLink, OfHost
from motet.hosts.hosts import Hosts
from motet.hosts.messages import (
    AddJob,
    Answered,
    CancelScore,
    Complete,
    EventKept,
    FromHost,
    Held,
    HostFailed,
    HostReady,
    JobChanged,
    JobStanding,
    JobStepped,
    Progress,
    Released,
    ReleaseJob,
    ScoreRequest,
    ScoresAnswered,
    StartHost,
    SteerJob,
    Stop,
    Stopped,
    ToHost,
)
from motet.hosts.runs import HostedRun
from motet.process.channel import LONGEST_LINE, Alive, ChannelMessage, Child, encode
from motet.process.heartbeat import SILENT
from motet.runtime.rundir import RunDirectory
from motet.runtime.slots import Rule
from tests.support import hungry_host, inside
from tests.support.memory_limit import memory_limit
from tests.support.service_run import tiny
from tests.support.waiting import PATIENCE, until

START = StartHost("small", "", {}, {}, {}, [], 1.0, ANY_SIZE)


async def _no_machine(start: StartHost, log: Path) -> HostChild:
    await asyncio.Event().wait()
    raise AssertionError


def handlers(open_jobs: Callable[[], list[AddJob]]) -> HostHandlers:
    """They do nothing else."""
    return HostHandlers(open_jobs, lambda _: None)


def test_whoever_runs_a_service_reads_what_the_engine_notes_of_its_base(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    note = "sums of this base depend on the batch"

    async def started() -> HostLink:
        host = HostLink(0, START, tmp_path / "engine.log", ThreadPoolExecutor(1))
        host._handlers = handlers(list)
        await inside.handle(host, HostReady([note]))
        return host

    with caplog.at_level(logging.WARNING):
        host = asyncio.run(started())
    assert host.ready
    assert [one.getMessage() for one in caplog.records] == [note]


def test_a_job_that_was_kept_and_not_handed_over_is_found_though_nothing_changes(tmp_path: Path) -> None:
    """The database went away between the two."""
    kept: list[AddJob] = []

    async def go() -> None:
        client = Hosts([START], tmp_path, _no_machine, look=0.05)
        client.start(handlers(lambda: list(kept)))
        (host,) = client.hosts
        host.ready = True
        inside.hear(client, host, HostReady([]))
        await until(lambda: not client._unplaced)  # all that there was has been read
        kept.append(AddJob({"name": "late"}, Wanted.RUN, 0, "us", Rule(), 1, ""))
        await until(lambda: client.jobs.on(host) == 1, PATIENCE)
        await client.kill()

    asyncio.run(go())


class Played:
    """A host's process that a test plays."""

    over_network = False

    def __init__(self) -> None:
        self.sent, self.says = list[ChannelMessage](), asyncio.Queue[FromHost | None]()

    def send(self, message: ChannelMessage) -> None:
        """Remember it."""
        self.sent.append(message)

    async def messages(self) -> AsyncIterator[FromHost]:
        """What the test has it say."""
        while (message := await self.says.get()) is not None:
            yield message

    def close_input(self) -> None:
        """End."""
        self.says.put_nowait(None)

    async def kill(self) -> None:
        """End."""
        self.close_input()


def test_a_host_whose_process_cannot_be_ended_is_started_again(tmp_path: Path) -> None:
    class Away(Played):
        async def kill(self) -> None:
            """Fail, as Ray does without its head."""
            raise RuntimeError("the cluster is away")

    async def go() -> None:
        played: list[Played] = []

        async def launch(start: StartHost, log: Path) -> HostChild:
            played.append(Played() if played else Away())
            return cast("HostChild", played[-1])

        client = Hosts([START], tmp_path, launch)
        client.start(handlers(list))
        (host,) = client.hosts
        await until(lambda: bool(played))
        played[0].says.put_nowait(HostReady([]))
        await until(lambda: host.ready)
        played[0].close_input()
        await until(lambda: len(played) == 2 and not host.ready)
        await client.kill()

    asyncio.run(go())


class Hurried(asyncio.SelectorEventLoop):
    """A loop whose time passes as a test says, besides by itself."""

    passed = 0.0

    def time(self) -> float:
        return super().time() + self.passed

    def hurry(self, seconds: float) -> None:
        """Let so many seconds pass."""
        self.passed += seconds


def test_a_host_that_does_not_end_is_killed(tmp_path: Path) -> None:
    """Such as one on a machine that is cut off."""

    class Deaf(Played):
        def close_input(self) -> None:
            """Let time pass, and nothing else."""
            loop = asyncio.get_running_loop()
            assert isinstance(loop, Hurried)
            loop.call_soon(loop.hurry, CLOSE_SECONDS + 1)

        async def kill(self) -> None:
            self.sent.clear()
            self.says.put_nowait(None)

    async def go() -> list[ChannelMessage]:
        deaf = Deaf()

        async def launch(start: StartHost, log: Path) -> HostChild:
            return cast("HostChild", deaf)

        host = HostLink(0, START, tmp_path / "engine.log", ThreadPoolExecutor(1), launch)
        host.start(handlers(list), lambda *_: None)
        await until(lambda: bool(deaf.sent))
        await host.stop()
        return deaf.sent

    with asyncio.Runner(loop_factory=Hurried) as runner:
        assert runner.run(go()) == [], "it was not killed"


def test_an_answer_does_not_wait_until_events_are_written_down(tmp_path: Path) -> None:
    """A job of many short steps, or a database that is away, would hold up the chats of everybody."""
    free, heard = threading.Event(), list[OfHost | None]()
    steps = [JobStepped("small", {"step": number}) for number in range(1000)]

    async def go() -> None:
        played: Any = Played()

        async def launch(start: StartHost, log: Path) -> HostChild:
            return cast(HostChild, played)

        host = HostLink(0, START, tmp_path / "engine.log", ThreadPoolExecutor(1), launch)
        host.start(HostHandlers(list, lambda _: cast(None, free.wait())), lambda _, message: heard.append(message))
        played.says.put_nowait(HostReady([]))
        await until(lambda: host.ready)
        for step in steps[:3]:
            played.says.put_nowait(step)
        question = Complete("us", None, 1, 0, False, False, SamplingParams(), prompt="a")
        asked = asyncio.ensure_future(anext(host.ask(question), "answered"))
        await until(lambda: isinstance(played.sent[-1], Complete))
        played.says.put_nowait(Answered(played.sent[-1].key))
        async with asyncio.timeout(PATIENCE):
            assert await asked == "answered"
        assert EventKept() not in played.sent
        for step in steps[3:]:
            played.says.put_nowait(step)
        played.close_input()
        # one is being written, one waits for room, and the end is no step
        await until(lambda: played.says.qsize() <= len(steps) - 257)
        for _ in range(10):
            await asyncio.sleep(0)
        assert played.says.qsize() > len(steps) - 300, "any number of events is held in memory"
        free.set()
        await until(lambda: None in heard, PATIENCE)
        await host.kill()
        assert played.sent.count(EventKept()) == len(steps)

    try:
        asyncio.run(go())
    finally:
        free.set()
    assert heard[: len(steps) + 2] == [HostReady([]), *steps, None], "it ended before all that it said was written"


def test_messages_that_have_arrived_are_read_in_turns_and_the_pieces_of_a_request_are_one(tmp_path: Path) -> None:
    asked, turns, piece = list[ScoreRequest](), list[int](), ScoreRequest(1, "job", {}, {"id": 1}, ["a"], [])

    async def score(request: ScoreRequest) -> ScoresAnswered:
        asked.append(request)
        return ScoresAnswered(request.key, [1.0] * len(request.completions))

    async def go() -> None:
        played: Any = Played()

        async def launch(start: StartHost, log: Path) -> HostChild:
            return cast(HostChild, played)

        def turn() -> None:
            turns.append(played.says.qsize())
            asyncio.get_running_loop().call_soon(turn)

        host = HostLink(0, START, tmp_path / "engine.log", ThreadPoolExecutor(1), launch)
        host.start(HostHandlers(list, lambda _: None, score=score), lambda *_: None)
        more = [replace(piece, problem={}, completions=[f"{number}"], more=number < 49) for number in range(50)]
        for message in (HostReady([]), replace(piece, more=True), *more, replace(piece, key=2)):
            played.says.put_nowait(message)
        turn()
        await until(lambda: len(asked) == 2)
        answers = [ScoresAnswered(1, [1.0] * 51), ScoresAnswered(2, [1.0])]
        await until(lambda: played.sent[1:] == answers)
        for message in (replace(piece, key=3, more=True), CancelScore(3)):  # its job was cancelled while it was sent
            played.says.put_nowait(message)
        await until(lambda: played.says.qsize() == 0 and not host._unfinished)
        await host.kill()

    asyncio.run(go())
    assert max(before - after for before, after in pairwise(turns)) == 1
    assert asked == [replace(piece, completions=["a", *map(str, range(50))]), replace(piece, key=2)]


def test_a_question_that_is_too_long_for_a_host_leaves_nothing_open(tmp_path: Path) -> None:
    class Strict(Played):
        def send(self, message: ChannelMessage) -> None:
            """Remember it if a host could read it."""
            encode(message)
            super().send(message)

    async def go() -> int:
        host = HostLink(0, START, tmp_path / "engine.log", ThreadPoolExecutor(1))
        host._child, host.ready = cast("HostChild", Strict()), True
        question = Complete("us", None, 1, 0, False, False, SamplingParams(), prompt="x" * LONGEST_LINE)
        with pytest.raises(EngineError, match="the limit is 64 MB"):
            async for _ in host.ask(question):
                pass
        return host.asked

    assert asyncio.run(go()) == 0


def test_a_host_keeps_its_jobs_under_the_next_http_process_and_hears_what_was_asked_meanwhile(tmp_path: Path) -> None:
    open_jobs = [AddJob({"name": name}, Wanted.RUN, 0, "us", Rule(), 1, "") for name in ("kept", "new")]
    meanwhile: dict[str, list[ToHost]] = {"kept": [SteerJob("kept", Wanted.PAUSE)], "unknown": [ReleaseJob("unknown")]}

    async def go() -> None:
        played: Any = Played()

        async def launch(start: StartHost, log: Path) -> HostChild:
            return cast(HostChild, played)

        client = Hosts([START], tmp_path, launch)
        client.start(
            dataclasses.replace(
                handlers(lambda: [job for job in open_jobs if not client.has(str(job.job["name"]))]),
                reconcile=lambda held: {one.job: meanwhile[one.job] for one in held},
            )
        )
        (host,) = client.hosts
        for number, name in enumerate(("kept", "unknown")):
            played.says.put_nowait(JobStepped(name, {"step": number}))
        jobs = [Held(name, "us", 1, JobState.RUNNING, Wanted.RUN) for name in ("kept", "unknown")]
        played.says.put_nowait(HostReady([], jobs=jobs))
        await until(lambda: client.jobs.on(host) == 3)
        await until(lambda: any(isinstance(one, AddJob) for one in played.sent))
        assert played.sent[:3] == [START, EventKept(), EventKept()]
        assert {*meanwhile["kept"], *meanwhile["unknown"]} <= {
            one for one in played.sent if not isinstance(one, AddJob | StartHost)
        }
        assert [one for one in played.sent if isinstance(one, AddJob)] == open_jobs[1:]
        played.says.put_nowait(Released("unknown"))
        played.says.put_nowait(JobChanged("kept", JobState.SUCCEEDED, ""))
        await until(lambda: client.jobs.on(host) == 1)
        await client.kill()

    asyncio.run(go())


def _started_again(tmp_path: Path, *names: str) -> tuple[Hosts, list[Played], list[JobChanged]]:
    """A host whose process is started again whenever it ends, with jobs; its processes, and the ends of jobs."""
    played, ended = list[Played](), list[JobChanged]()

    async def launch(start: StartHost, log: Path) -> HostChild:
        played.append(Played())
        return cast("HostChild", played[-1])

    def open_jobs() -> list[AddJob]:
        missing = set(names) - {one.job for one in ended} - set(client.jobs.all())
        return [AddJob({"name": name}, Wanted.RUN, 0, "us", Rule(), 1, "") for name in missing]

    def event(one: Any) -> None:
        if isinstance(one, JobChanged) and one.state.final:
            ended.append(one)

    client = Hosts([START], tmp_path, launch)
    client.start(HostHandlers(open_jobs, event))
    return client, played, ended


def test_a_job_whose_device_is_lost_again_and_again_fails_unless_it_makes_steps(tmp_path: Path) -> None:
    async def go() -> list[JobChanged]:
        client, played, ended = _started_again(tmp_path, "kills", "works", "waits")
        for times in range(4):
            await until(lambda times=times: len(played) > times)  # type: ignore[misc]
            host, jobs = played[times], {"kills": JobStanding("sampling", 7, 0, 4, 0, 0.0, None)}
            host.says.put_nowait(HostReady([]))
            await until(lambda: client.jobs.on(client.hosts[0]) == 3 - len(ended))
            if times:  # the first time it dies at once
                jobs["works"] = JobStanding("sampling", times, 0, 4, 0, 0.0, None)
                host.says.put_nowait(Progress(jobs, {}))
            for name in ("kills", "works"):
                host.says.put_nowait(JobChanged(name, JobState.RUNNING, ""))
            host.says.put_nowait(HostFailed("an illegal memory access", device=True))
            host.close_input()
        await until(lambda: bool(ended))
        await client.kill()
        return ended

    (failed,) = asyncio.run(go())
    assert (failed.job, failed.state) == ("kills", JobState.FAILED)
    assert "lost 3 times in a row while the job ran and made no step (an illegal memory access)" in failed.message


def test_a_job_in_whose_turn_the_engine_was_ended_twice_fails_and_no_other(tmp_path: Path) -> None:
    async def go() -> list[JobChanged]:
        client, played, ended = _started_again(tmp_path, "stands", "neighbour")
        for times, job in enumerate(("neighbour", "stands", "", "stands")):
            await until(lambda times=times: len(played) > times)  # type: ignore[misc]
            played[times].says.put_nowait(HostReady([]))
            await until(lambda: client.jobs.on(client.hosts[0]) == 2)
            played[times].says.put_nowait(Alive(SILENT, 0, job))
        await until(lambda: bool(ended))
        await client.kill()
        return ended

    (failed,) = asyncio.run(go())
    assert (failed.job, failed.state) == ("stands", JobState.FAILED)
    assert "did not turn its event loop for 9 s in a turn of this job, 2 times" in failed.message


def test_a_job_in_whose_turn_the_engine_died_twice_above_its_memory_limit_fails_and_no_other(tmp_path: Path) -> None:
    """Real processes with a real limit; one that is killed in the same turn at an ordinary size does not count."""
    ended, lives = list[JobChanged](), list[int]()

    async def go(limit: Path) -> None:
        (tmp_path / "limit").write_text(str(limit))

        async def launch(start: StartHost, log: Path) -> HostChild:
            path = {"PYTHONPATH": str(Path(__file__).parents[2])}
            return await Child.start("tests.support.hungry_host", FromHost, log, **path)

        def open_jobs() -> list[AddJob]:
            missing = {"hungry", "neighbour"} - {one.job for one in ended} - set(client.jobs.all())
            return [AddJob({"name": name}, Wanted.RUN, 0, "us", Rule(), 1, "") for name in missing]

        def event(one: Any) -> None:
            if isinstance(one, JobChanged) and one.state.final:
                ended.append(one)
                lives.append(len((tmp_path / "lives").read_text().split()))

        client = Hosts([replace(START, run=str(tmp_path))], tmp_path, launch)
        client.start(HostHandlers(open_jobs, event))
        await until(lambda: bool(ended))
        await until(lambda: client.jobs.on(client.hosts[0]) == 1)
        await client.kill()

    with memory_limit(hungry_host.MEGABYTES // 2) as limit:
        asyncio.run(go(limit))
    (failed,) = ended
    assert (failed.job, failed.state) == ("hungry", JobState.FAILED)
    assert failed.message.startswith("the engine was ended for want of memory in a turn of this job, 2 times; make its")
    assert lives == [3]


def _two(tmp_path: Path, gather: float) -> tuple[Hosts, list[Any]]:
    """Two hosts of one base that work since an earlier HTTP process, and a job that neither has named yet."""
    played: list[Any] = [Played(), Played()]

    async def launch(start: StartHost, log: Path) -> HostChild:
        return cast(HostChild, played[start.host or 0])

    starts = [replace(START, host=number) for number in range(2)]
    client = Hosts(starts, tmp_path, launch)
    client.gather_seconds = gather
    job = AddJob({"name": "kept"}, Wanted.RUN, 0, "us", Rule(), 1, "")
    client.start(
        dataclasses.replace(
            handlers(lambda: [] if client.has("kept") else [job]), reconcile=lambda held: {one.job: [] for one in held}
        )
    )
    return client, played


def test_a_host_with_much_to_tell_keeps_its_jobs_though_another_is_ready_long_before(tmp_path: Path) -> None:
    async def go() -> None:
        client, (quick, slow) = _two(tmp_path, gather=0.05)
        host = client.hosts[1]
        slow.says.put_nowait(JobStepped("kept", {"step": 1}))
        await until(lambda: host.heard_at > 0)
        host.heard_at += 3600  # as if it went on, however busy this machine is
        quick.says.put_nowait(HostReady([]))
        await asyncio.sleep(0.3)
        slow.says.put_nowait(HostReady([], jobs=[Held("kept", "us", 1, JobState.RUNNING, Wanted.RUN)]))
        await until(lambda: client.jobs.on(host) == 1)
        assert not [one for one in quick.sent if isinstance(one, AddJob)]
        await client.kill()

    asyncio.run(go())


def test_a_host_that_says_nothing_is_not_waited_for(tmp_path: Path) -> None:
    async def go() -> None:
        client, (quick, _) = _two(tmp_path, gather=0.2)
        quick.says.put_nowait(HostReady([]))
        await until(lambda: any(isinstance(one, AddJob) for one in quick.sent))
        await client.kill()

    asyncio.run(go())


def test_a_host_that_is_stopped_while_it_tells_what_it_did_saves_before_it_ends(tmp_path: Path) -> None:
    async def go() -> None:
        played: Any = Played()

        async def launch(start: StartHost, log: Path) -> HostChild:
            return cast(HostChild, played)

        client = Hosts([START], tmp_path, launch)
        client.start(handlers(list))
        played.says.put_nowait(JobStepped("kept", {"step": 1}))
        await until(lambda: EventKept() in played.sent)
        stopping = asyncio.create_task(client.stop())
        await until(lambda: Stop() in played.sent)
        await asyncio.sleep(0.1)
        assert not stopping.done()
        assert played.says.empty(), "its input was closed before it had saved"
        played.says.put_nowait(Stopped())
        await stopping

    asyncio.run(go())


def test_a_run_on_hosts_counts_the_tokens_since_the_last_report(tmp_path: Path) -> None:
    """Reports come twice a second: without the last event, those of a short job would count for nothing."""
    tree = {"base": "small", "run": str(tmp_path), "engine": {"hosts": 2}, "jobs": [tiny("quick")]}
    played = [cast(Any, Played()) for _ in range(2)]

    async def launch(start: StartHost, log: Path) -> HostChild:
        return cast(HostChild, played[start.host or 0])

    async def play(run: HostedRun) -> None:
        first, second = played
        for one in played:
            one.says.put_nowait(HostReady([]))
        await until(lambda: any(isinstance(one, AddJob) for one in (*first.sent, *second.sent)))
        before, after = played if any(isinstance(one, AddJob) for one in first.sent) else (second, first)
        standing = JobStanding("sampling", 0, 0, 0, 50, 1.0, None)
        before.says.put_nowait(JobChanged("quick", JobState.RUNNING, ""))
        await until(lambda: run.progress()[0].state is JobState.RUNNING)
        before.says.put_nowait(Progress({"quick": standing}, {}))
        await until(lambda: run.progress()[0].tokens == 50)
        before.says.put_nowait(None)  # it dies, and its job goes on there
        await until(lambda: any(isinstance(one, AddJob) for one in after.sent))
        after.says.put_nowait(JobChanged("quick", JobState.RUNNING, ""))
        after.says.put_nowait(JobChanged("quick", JobState.SUCCEEDED, "", tokens=60))

    async def go() -> int:
        with contextlib.closing(RunDirectory(tmp_path, "run")) as directory:
            run = HostedRun(validate(tree, "the test"), directory, None, launch=launch)
            playing = asyncio.create_task(play(run))
            running = asyncio.create_task(run.run())
            await playing
            await until(lambda: run.progress()[0].state is JobState.SUCCEEDED)
            for one in played:
                one.says.put_nowait(Stopped())
            await running
            return run.progress()[0].tokens

    assert asyncio.run(go()) == 110
