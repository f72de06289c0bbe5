"""One host, as seen by its owner: the process with a base that trains and answers.

A process that dies is restarted. If it dies right after its start, the restart is delayed, each time longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from motet.core.errors import ConfigError, EngineError, HostGone, MotetError
from motet.environments import episode_messages as e
from motet.hosts import messages as m
from motet.hosts.charged import Bill, Charged
from motet.process.channel import Alive, Child
from motet.process.heartbeat import LONG_SILENT, NO_MEMORY, SILENT, LifeSigns, Restarts

_log = logging.getLogger(__name__)

_OF_USE_SECONDS, _STOP_SECONDS = 10.0, 120.0
NO_ANSWER = "the engine does not answer"
CLOSE_SECONDS = 60.0
"""For a process whose jobs have stopped to unload versions and end servers; a machine that is cut off never ends it."""
HostChild = Child[m.FromHost]


async def _nobody_scores(request: m.ScoreRequest) -> m.ScoresAnswered:
    return m.ScoresAnswered(request.key, away=True)


async def _no_agents(host: HostLink, offer: e.OfferEpisode) -> e.EpisodeEnded:
    return e.EpisodeEnded(offer.episode, away=True)


OfJob = m.JobChanged | m.JobStepped | m.JobWorked


@dataclass(frozen=True)
class HostHandlers:
    """Callbacks for messages of hosts. `open_jobs`, events and usage are handled in one thread, in order."""

    open_jobs: Callable[[], list[m.AddJob]]
    """All jobs that have not ended, in order of submission; may omit those that a host has."""
    event: Callable[[OfJob], None]
    usage: Callable[[m.UsageWindow], None] = lambda usage: None
    score: Callable[[m.ScoreRequest], Awaitable[m.ScoresAnswered]] = _nobody_scores
    rest: Callable[[str, bool], None] = lambda job, wanted: None
    """Whether a job stops waiting as soon as no scorer is connected."""
    tokens: Callable[[str, str, int, int, str], None] = lambda tenant, base, read, sampled, account: None
    """(tenant, base, read, sampled, account): tokens of a tenant's completions."""
    obeyed: Callable[[str], None] = lambda job: None
    """A command of a job's client is done."""
    episode: Callable[[HostLink, e.OfferEpisode], Awaitable[e.EpisodeEnded]] = _no_agents
    """Runs an episode whose agent is remote; the host that offers it answers the agent."""
    reconcile: Callable[[Sequence[m.Held]], Mapping[str, Sequence[m.ToHost]]] = lambda held: {}
    """Messages for each job that a host already had under an earlier service. Runs in the thread of events."""

    def keep(self, message: OfJob | m.UsageWindow) -> None:
        """Handle an event; an error is logged."""
        try:
            if isinstance(message, m.UsageWindow):
                self.usage(message)
            else:
                self.event(message)
        except Exception:  # this process must continue to read messages
            _log.exception("an event was not kept: %s", message)


OfHost = m.HostReady | m.HostFailed | m.Progress | m.JobChanged | m.JobStepped | m.Released
"""Messages of a host about itself or a job."""
InOrder = OfJob | m.UsageWindow | m.Obeyed | m.Released | m.HostReady | m.HostFailed | m.Stopped
"""What is written down, and what is understood only after that; answers to questions do not wait for it."""
_MOST_UNWRITTEN = 256
"""Such messages of a host that may wait for the database. With more of them nothing else is read from it either."""
Heard = Callable[["HostLink", OfHost | None], None]
"""Called with it in the event loop; with `Progress` when servers left or returned, with None when the process ended."""


Launch = Callable[[m.StartHost, Path], Awaitable[HostChild]]
"""Starts the process of a host, before its first message; the process's output goes to the file."""


class HostLink:
    """The process, which is started again when it dies. Lives in one event loop."""

    def __init__(
        self, number: int, start: m.StartHost, log: Path, handling: Executor, launch: Launch | None = None
    ) -> None:
        """`start` is the first message. The output of the process goes to `log`; `handling` handles events."""
        self.number, self.log, self._start, self._handling = number, log, start, handling
        self._launch: Launch = launch or (lambda start, log: start_host(log))
        self.base = start.serves
        """Name of its base in a service."""
        self.slots = int(start.engine.get("slots", 1))
        self._handlers: HostHandlers | None = None
        self._heard: Heard = lambda host, message: None
        self._child: HostChild | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._scoring: dict[int, asyncio.Task[None]] = {}
        self._unfinished: dict[int, m.ScoreRequest] = {}
        self._episodes: dict[int, asyncio.Task[None]] = {}
        self._open: dict[int, asyncio.Queue[m.Answer]] = {}
        self._payers: dict[int, Bill] = {}  # of completions by key, also of abandoned ones, until they are answered
        self._keys = itertools.count(secrets.randbits(32) << 20)  # different from keys of an earlier service
        self._stopped, self._closing, self._readied = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._ready_since, self.ready = math.inf, False
        self._signs, self._restarts = LifeSigns(), Restarts()
        self.heard_at = -math.inf
        """Monotonic time of the last message; a loading process sends none until it is ready."""
        self.failure = ""
        """Why it is not available, for a person."""
        self.away = ""  # why it answers no questions although it runs: its servers are away
        self.hopeless = False
        """Whether it could not be started the last time, or ended again and again before it was of use."""
        self.progress: dict[str, m.JobStanding] = {}
        self.prepared: Mapping[str, int] = {}  # bytes of rows, by tenant
        self.device: dict[str, float] = {}
        self.speed = ("", 0.0)  # its device, and tokens a second as it measured them at its start
        self.step_tokens = 0  # most tokens of a step there by default; 0 before they are known
        self.starts, self.told = 0, m.HostReady([])
        """The latter is what it said when it was ready the last time."""

    def start(self, handlers: HostHandlers, heard: Heard) -> None:
        """Start the process and keep it running."""
        self._handlers, self._heard = handlers, heard
        self._keeping = asyncio.create_task(self._keep())

    def send(self, *messages: m.ToHost) -> None:
        """Send messages; dropped if the process is not running."""
        if self._child is not None:
            for message in messages:
                self._child.send(message)

    @property
    def asked(self) -> int:
        """Questions that it answers now."""
        return len(self._open)

    async def ask(self, question: m.Question, charged: Charged | None = None) -> AsyncGenerator[m.Answer, None]:
        """Yield the answers to a question; `charged` is what earlier hosts charged for it.

        Raises:
            HostGone: it is not running, or ended meanwhile.
            EngineError: it cannot answer now; the message says why.
            ConfigError: it can never answer; the message says why.
        """
        if not self.ready:
            raise HostGone(self.failure)
        key, answers = next(self._keys), asyncio.Queue[m.Answer]()
        self._open[key] = answers
        if isinstance(question, m.Complete):
            self._payers[key] = Bill(question.tenant, charged or Charged(), account=question.account)
        done = False
        try:
            self.send(replace(question, key=key))
            while not done:
                answer = await answers.get()
                done = isinstance(answer, m.Answered | m.QuestionRefused)
                if isinstance(answer, m.QuestionRefused):
                    raise _refusal(answer, gone=not self.ready)
                if not done:
                    yield answer
        finally:
            del self._open[key]
            if not done:
                self.send(m.Abandon(key))

    def hear(self, answer: m.Answer) -> None:
        """Charge an answer's tokens, and pass it on unless its question is abandoned."""
        if self._handlers is not None and (payer := self._payers.get(answer.key)) is not None:
            self._handlers.tokens(payer.tenant, self.base, *payer.hear(answer), payer.account)
        if isinstance(answer, m.Answered | m.QuestionRefused):
            self._payers.pop(answer.key, None)
        if (answers := self._open.get(answer.key)) is not None:
            answers.put_nowait(answer)

    def refuse(self, reason: str) -> None:
        """Give up the questions that are open."""
        for key, answers in self._open.items():
            answers.put_nowait(m.QuestionRefused(key, reason))

    async def stop(self) -> None:
        """Let every job finish its step and save, then end the process; kill it if it takes long to end."""
        self._closing.set()
        self.send(m.Stop())
        # one that loads has nothing to save; one that runs since an earlier process may send much before it is ready
        if self.ready or self.heard_at > -math.inf:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), _STOP_SECONDS)
        if self._child is not None:
            self._child.close_input()
        elif self._keeping is not None:
            self._keeping.cancel()  # it may wait for a machine
        if self._keeping is not None:
            if (await asyncio.wait((self._keeping,), timeout=CLOSE_SECONDS))[1]:
                self._keeping.cancel()  # which kills it
            await asyncio.gather(self._keeping, return_exceptions=True)

    async def kill(self) -> None:
        """End the process at once."""
        self._closing.set()
        if self._child is not None:
            await self._child.kill()
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)

    async def _keep(self) -> None:
        while not self._closing.is_set():
            self._ready_since = math.inf
            try:
                await self._run_once()
            except MotetError as error:
                self.failure, self.hopeless = str(error), True
            except Exception:  # it could not be started, or it sent nonsense
                _log.exception("the engine could not be kept")
            finally:
                await self._clean_up()
            if not self._closing.is_set():
                await self._back_off(time.monotonic() - self._ready_since)

    async def _back_off(self, worked: float) -> None:
        """Before it is started again, after it worked for so many seconds."""
        seconds = self._restarts.seconds_after(worked)
        self.hopeless = self.hopeless or (self._restarts.quick > 1 and worked < _OF_USE_SECONDS)
        if seconds and not self.failure:
            self.failure = f"the engine ended {self._restarts.quick} times, each within a minute; see {self.log.name}"
        _log.warning("%s; it is started again in %g s", self.failure or f"the engine {self._how}", seconds)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)

    async def _run_once(self) -> None:
        self.starts, self._how, self.heard_at = self.starts + 1, "ended", -math.inf
        self._stopped.clear()
        self._child = await self._launch(self._start, self.log)
        self._child.send(self._start)
        self._signs = LifeSigns(LONG_SILENT if self._child.over_network else SILENT)
        watching = asyncio.create_task(self._end_silent(self._child, self._signs))
        try:
            await _answers_first(self._child.messages(), self._handle, self._hearing)
            self._how = await self._child.how_it_ended()
            if not self._child.over_network and self._signs.out_of_memory():
                self._heard(self, m.HostFailed(NO_MEMORY, job=self._signs.alive.job))
        finally:
            watching.cancel()

    def _hearing(self) -> contextlib.AbstractContextManager[None]:
        self.heard_at = time.monotonic()
        return self._signs.heard()

    async def _end_silent(self, child: HostChild, signs: LifeSigns) -> None:
        """End the process when it does not answer; the next one resumes its jobs from their last commits."""
        _log.error("the process of host %d %s: it is ended", self.number, await signs.lost())
        self.ready, self.failure = False, NO_ANSWER
        if signs.alive.loop >= SILENT:
            self._heard(self, m.HostFailed(NO_ANSWER, job=signs.alive.job))
        await child.kill()

    async def _clean_up(self) -> None:
        """Remove all state of an ended process, and inform waiting callers."""
        if self._child is not None:
            try:
                await self._child.kill()
            except Exception:  # a job that it still has notices its next owner
                _log.exception("the process of the engine could not be ended")
            self._child = None
        self.ready, self.away = False, ""
        self._readied.clear()
        self._stopped.set()
        self.progress, self._payers, self.prepared = {}, {}, {}
        self._unfinished.clear()
        for task in [*self._scoring.values(), *self._episodes.values()]:  # the next process asks again
            task.cancel()
        self.refuse("the engine ended while it answered; try again in a moment")
        self._heard(self, None)

    async def _handle(self, message: m.FromHost) -> None:
        handlers, loop = self._handlers, asyncio.get_running_loop()
        assert handlers is not None
        match message:
            case m.HostReady():
                for note in message.notes:
                    _log.warning("%s", note)
                self.failure, self.hopeless, self._signs.ready = "", False, True
                self._ready_since = time.monotonic()
                self.speed = (message.device, message.tokens_per_second)
                self.told, self.ready = message, True
                self._readied.set()
                self._heard(self, message)
            case m.HostFailed():
                self.failure, self.hopeless = message.reason, not self.ready
                self._heard(self, message)
            case m.Stopped():
                self._stopped.set()
            case m.Progress():
                self.progress, self.device = message.jobs, message.device
                self.prepared, self.step_tokens = message.prepared, message.step_tokens
                before, self.away = self.away, message.away
                if bool(before) != bool(self.away):
                    self._heard(self, message)
            case m.ScoreRequest():
                earlier = self._unfinished.pop(message.key, None)
                request = message if earlier is None else earlier.with_more(message)
                if request.more:
                    self._unfinished[request.key] = request
                else:
                    _begin(self, self._scoring, request.key, lambda: handlers.score(request))
            case m.CancelScore():
                self._unfinished.pop(message.key, None)
                _cancel(self._scoring, message.key)
            case e.OfferEpisode():
                _begin(self, self._episodes, message.episode, lambda: handlers.episode(self, message))
            case e.WithdrawEpisode():
                _cancel(self._episodes, message.episode)
            case m.Obeyed():
                handlers.obeyed(message.job)
            case Alive():
                self._signs.take(message)
            case m.Rest():
                handlers.rest(message.job, message.wanted)
            case m.JobChanged() | m.JobStepped() | m.JobWorked() | m.UsageWindow():
                await loop.run_in_executor(self._handling, handlers.keep, message)
                self.send(m.EventKept())
                if not isinstance(message, m.UsageWindow | m.JobWorked):
                    self._heard(self, message)
            case m.Released():
                self._heard(self, message)
            case _:
                self.hear(message)


async def _answers_first(
    messages: AsyncIterator[m.FromHost],
    handle: Callable[[m.FromHost], Awaitable[None]],
    hearing: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    """Handle messages as they come; what is `InOrder` waits for the one before it, which waits for the database."""
    unwritten = asyncio.Queue[m.FromHost | None](_MOST_UNWRITTEN)

    async def in_order() -> None:
        while (message := await unwritten.get()) is not None:
            await handle(message)

    async with asyncio.TaskGroup() as both:
        both.create_task(in_order())
        async for message in messages:
            with hearing():  # none is waited for: the database may be away, which is not its fault
                await (unwritten.put(message) if isinstance(message, InOrder) else handle(message))
            await asyncio.sleep(0)  # each is read in its own turn, though the next has arrived
        await unwritten.put(None)


def _begin(
    host: HostLink, tasks: dict[int, asyncio.Task[None]], key: int, answer: Callable[[], Awaitable[m.ToHost]]
) -> None:
    """Send an answer when it is ready; nothing of a host that is not ready, and answers nobody, is leased."""

    async def answered() -> None:
        await host._readied.wait()
        host.send(await answer())

    def forget(task: asyncio.Task[None]) -> None:
        if tasks.get(key) is task:
            del tasks[key]

    _cancel(tasks, key)  # requested again
    task = tasks[key] = asyncio.create_task(answered())
    task.add_done_callback(forget)


def _cancel(tasks: dict[int, asyncio.Task[None]], key: int) -> None:
    if (unwanted := tasks.get(key)) is not None:
        unwanted.cancel()


def _refusal(answer: m.QuestionRefused, *, gone: bool) -> EngineError | ConfigError:
    if gone:
        return HostGone(answer.reason)
    error = (ConfigError if answer.never else EngineError)(answer.reason)
    error.code = answer.code
    return error


async def start_host(log: Path) -> HostChild:
    """Start the process of a host, which waits for its first message; its output goes to a file."""
    return await Child.start("motet.hosts", m.FromHost, log)
