"""Watches the replicas of an engine: drains failed ones, restarts those that Motet started, and takes them back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from motet.config.dialects import HttpRequest
from motet.core.errors import EngineError, ServerGone, ServerUnfit
from motet.rollout.replica import Replica
from motet.rollout.server_process import ServerProcess

_log = logging.getLogger(__name__)

_MISSES = 2
"""Health checks in a row that a busy server may miss."""


@dataclass(eq=False)
class SleepTurns:
    """Requests and the trainer take turns, so that servers on the GPU of the trainer can free its memory meanwhile.

    Servers sleep in `asleep`, after all contexts of `awake` have ended. Contexts of `awake` must not be nested.
    """

    replicas: Sequence[Replica]
    sleep: HttpRequest
    wake: HttpRequest
    end: Callable[[Replica], None]
    """Ends the process of a server that cannot be woken; it is started again."""
    _open: asyncio.Event = field(default_factory=asyncio.Event)
    _awake: asyncio.Event = field(default_factory=asyncio.Event)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _requests: int = 0

    def __post_init__(self) -> None:
        self._open.set()
        self._awake.set()

    @contextlib.asynccontextmanager
    async def awake(self, *, starting: bool = False) -> AsyncIterator[None]:
        """Context for requests. They wait while servers sleep or are about to.

        Only a server that starts goes on while servers are about to sleep, because running requests may wait for it.
        """
        ready = self._awake if starting else self._open
        while not ready.is_set():
            await ready.wait()
        self._requests += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._requests -= 1
            if not self._requests:
                self._idle.set()

    @contextlib.asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """Context for the trainer, one at a time."""
        self._open.clear()
        try:
            while self._requests:
                await self._idle.wait()
            self._awake.clear()
            try:
                await asyncio.gather(*(self._put_to_sleep(replica) for replica in self.replicas if replica.up))
                yield
            finally:
                await asyncio.gather(*(self._wake(replica) for replica in self.replicas if replica.up))
        finally:
            self._awake.set()
            self._open.set()

    async def _put_to_sleep(self, replica: Replica) -> None:
        try:
            await replica.server.request(self.sleep, replica.clocks.load)
        except EngineError as error:
            _log.warning("%s keeps its memory while the trainer works: %s", replica.url, error)

    async def _wake(self, replica: Replica) -> None:
        try:
            await replica.server.request(self.wake, replica.clocks.load)
        except EngineError as error:
            await asyncio.to_thread(self.end, replica)
            replica.leave(f"it did not wake up ({error})")


class Fleet:
    """The replicas of an engine."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        processes: Mapping[str, ServerProcess],
        wait_seconds: float,
        back: Callable[[Replica], Awaitable[None]],
        sleep: HttpRequest | None = None,
    ) -> None:
        """No replica is contacted before the first call of `wait`, which waits for `wait_seconds` if none is up.

        `processes` are servers started here, by URL. `back` is called with a replica that is up again, before it gets
        requests. Servers that sleep are asked `sleep`.
        """
        self.replicas = tuple(replicas)
        self._turns = sleep and SleepTurns(self.replicas, sleep, self.replicas[0].dialect.wake, self._end)
        self.processes = processes
        self._wait_seconds = wait_seconds
        self._back = back
        self._watches: list[asyncio.Task[None]] = []
        self._doubted: dict[str, asyncio.Event] = {}
        self._changed = asyncio.Condition()
        self._hopeless: dict[str, str] = {}

    @property
    def up(self) -> list[Replica]:
        """The replicas that answer now."""
        return [replica for replica in self.replicas if replica.up]

    def awake(self, *, starting: bool = False) -> contextlib.AbstractAsyncContextManager[None]:
        """Context for requests; see `SleepTurns.awake`."""
        return self._turns.awake(starting=starting) if self._turns else contextlib.nullcontext()

    def asleep(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Context for the trainer, in which servers sleep if they do at all."""
        return self._turns.asleep() if self._turns else contextlib.nullcontext()

    def notes(self) -> list[str]:
        """Warnings: replicas of an untested release, and replicas that read versions from files instead of fetching them."""
        told = (replica.from_files or replica.untried for replica in self.replicas)
        return [note for note in told if note]

    async def choose(self, order: Callable[[Replica], tuple[bool, ...]]) -> Replica:
        """The first replica by `order`; among equals, the one with the fewest outstanding tokens. Waits if none is up.

        Raises:
            ServerGone: none came up in time; the message has the last note of each.
        """
        await self.wait()
        return min(self.up, key=lambda replica: (order(replica), replica.tokens))

    async def wait(self) -> None:
        """Wait until a replica is up. Raises as `choose`."""
        self._watch_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._wait_seconds), self._changed:
                await self._changed.wait_for(lambda: self.up or len(self._hopeless) == len(self.replicas))
        if not self.up:
            said = "; ".join(
                replica.note if replica.url in replica.note else f"{replica.url}: {replica.note}"
                for replica in self.replicas
            )
            within = "" if self._hopeless else f" within rollout.patience_seconds={self._wait_seconds:g}"
            raise ServerGone(f"no server can be used{within}: {said}")

    def doubt(self, replica: Replica) -> None:
        """Check a replica's health now, after a failed request."""
        if replica.url in self._doubted:
            self._doubted[replica.url].set()

    async def close(self) -> None:
        """Stop watching, close connections, end the processes."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        self._watches.clear()
        for replica in self.replicas:
            replica.up = False
            await replica.close()
        await asyncio.gather(*(asyncio.to_thread(process.close) for process in self.processes.values()))

    def _watch_all(self) -> None:
        if not self._watches:
            self._doubted = {replica.url: asyncio.Event() for replica in self.replicas}
            self._watches = [asyncio.create_task(self._watch(replica)) for replica in self.replicas]

    async def _watch(self, replica: Replica) -> None:
        process, doubted = self.processes.get(replica.url), self._doubted[replica.url]
        while await self._start(replica, process):
            misses, rested = 0, 0.0
            while replica.up:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(replica.clocks.look):
                        await doubted.wait()
                rested += replica.clocks.look
                if process is not None and not process.alive:
                    replica.leave(f"its process {process.ending}")
                elif doubted.is_set() or misses or rested >= replica.clocks.health:
                    doubted.clear()
                    rested = 0.0
                    misses = await self._missed(replica, misses)
            _log.warning("%s is away: %s", replica.url, replica.note)

    async def _missed(self, replica: Replica, misses: int) -> int:
        try:
            await replica.healthy()
        except ServerGone as error:
            if misses + 1 >= _MISSES:
                replica.leave(str(error))
            return misses + 1
        return 0

    async def _start(self, replica: Replica, process: ServerProcess | None) -> bool:
        async with self.awake(starting=True):  # a server that starts takes memory
            return await self._take_back(replica, process)

    def _end(self, replica: Replica) -> None:
        if (process := self.processes.get(replica.url)) is not None:
            process.close()

    async def _take_back(self, replica: Replica, process: ServerProcess | None) -> bool:
        """Wait until the replica answers; False if it never will. A process that stays silent is started again."""
        silent_since = time.monotonic()
        while True:
            try:
                if process is not None and not process.alive:
                    process.start()
                    silent_since = time.monotonic()
                await replica.greet()
                if process is not None:
                    process.answered = True
                await self._back(replica)
                break
            except (EngineError, OSError) as error:
                starting = process is not None and process.alive and isinstance(error, ServerGone)
                replica.leave("starting" if starting else str(error))
                if isinstance(error, ServerUnfit) or (process is not None and process.hopeless):
                    await self._give_up(replica)
                    return False
                if process is not None and starting:
                    most = replica.clocks.hangs if process.answered else replica.clocks.loads
                    if time.monotonic() - silent_since > most:
                        await asyncio.to_thread(process.close)
                await asyncio.sleep(replica.clocks.look)
            except Exception as error:  # no request can be made: the URL is invalid, or the key has invalid characters
                _log.exception("no request can be sent to %s", replica.url)
                reason = f"{type(error).__name__}: {error}"
                replica.leave(f"{replica.url} cannot be reached ({reason}); check rollout.urls, its agent and its key")
                await self._give_up(replica)
                return False
        await self._notify_waiters()
        return True

    async def _give_up(self, replica: Replica) -> None:
        self._hopeless[replica.url] = replica.note
        await self._notify_waiters()

    async def _notify_waiters(self) -> None:
        async with self._changed:
            self._changed.notify_all()
