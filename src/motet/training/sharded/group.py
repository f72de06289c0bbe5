"""The processes that train together, as seen by their parent. They start and end together.

A rank that dies ends the group, because the others would wait for it forever; later calls raise `RankGone`.
"""

from __future__ import annotations

import contextlib
import select
import socket
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from msgspec.structs import replace

from motet.core import errors
from motet.core.errors import BaseModelError, MotetError, RankGone
from motet.process.channel import END_SECONDS, StartedChild, ThreadChild
from motet.training.sharded import messages as m

_MODULE = "motet.training.sharded.process"


class Connected(ThreadChild):
    """A rank that was started elsewhere, perhaps on another machine."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        super().__init__(connection.makefile("rb"), connection.makefile("wb"))

    def how_it_ended(self) -> str:
        """The reason is known only to the launcher."""
        return "disconnected; see the output of its launcher"

    def kill(self) -> None:
        """Disconnect; the rank then exits at once."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):  # unsent data is discarded
            self.out.close()
        self._connection.close()

    def hang_up(self, seconds: float) -> None:
        """Ask it to leave, and disconnect after so many seconds."""
        with contextlib.suppress(OSError, ValueError):  # it has disconnected itself
            self.send(m.Leave())
            hung_up = select.poll()
            hung_up.register(self._connection, getattr(select, "POLLRDHUP", 0))
            hung_up.poll(1000 * seconds)
        self.kill()


Link = StartedChild | Connected


class _Rank:
    """One process. Answers arrive in the order of the messages."""

    def __init__(self, rank: int, link: Link, ended: Callable[[int, str], None]) -> None:
        """`ended` is called once, in another thread, with the rank and how it ended."""
        self._rank, self.link, self._ended = rank, link, ended
        self._waiting: deque[Future[m.FromRank]] = deque()
        self._lock = threading.Lock()
        self._gone: MotetError | None = None
        self._reader = threading.Thread(target=self._read, name=f"motet-rank-{rank}", daemon=True)

    def start(self) -> None:
        """Read its answers from now on."""
        self._reader.start()

    def send(self, message: m.ToRank) -> Future[m.FromRank]:
        """Send a message; the future receives the answer."""
        future: Future[m.FromRank] = Future()
        with self._lock:
            if self._gone is not None:
                future.set_exception(self._gone)
                return future
            self._waiting.append(future)
        self.link.send(message)
        return future

    def fail(self, error: MotetError) -> None:
        """Fail waiting and later requests."""
        with self._lock:
            self._gone = self._gone or error
            waiting = [*self._waiting]
            self._waiting.clear()
        for future in waiting:
            future.set_exception(error)

    def close(self) -> None:
        """End the process."""
        self.link.hang_up(END_SECONDS)
        self._reader.join()
        self.link.close()

    def _read(self) -> None:
        for answer in self.link.messages(m.FromRank):
            with self._lock:
                future = self._waiting.popleft() if self._waiting else None
            if future is not None:
                future.set_result(answer)
        self._ended(self._rank, self.link.how_it_ended())


class RankGroup:
    """All ranks of one base."""

    def __init__(
        self, join: m.Join, log: Path | None = None, others: Callable[[int], Sequence[Link]] | None = None
    ) -> None:
        """Start the ranks and wait until they have loaded and proved the base together.

        Args:
            join: common message; each rank gets its own `rank`, and all get the same `meeting` if none is set.
            log: file for the ranks' errors; discarded if None.
            others: returns links to all ranks but the first, if they were started elsewhere; gets the number of ranks.

        Raises:
            BaseModelError: the base cannot be used.
            RankGone: a rank ended.
        """
        self.n_ranks = join.config.n_ranks
        self._on_death: Callable[[RankGone], object] = lambda error: None
        self.death: RankGone | None = None
        self._closing = False
        self._lock = threading.Lock()
        self._files = tempfile.TemporaryDirectory(prefix="motet-ranks-")
        links: list[Link] = [] if others is None else list(others(self.n_ranks))
        links = [*(StartedChild(_MODULE, log) for _ in range(self.n_ranks - len(links))), *links]
        self._ranks = [_Rank(rank, link, self._ended) for rank, link in enumerate(links)]
        for rank in self._ranks:  # all are known before one can end
            rank.start()
        meeting = join.meeting or str(Path(self._files.name) / "meeting")
        try:
            answers = self.ask({rank: replace(join, rank=rank, meeting=meeting) for rank in range(self.n_ranks)})
            self.joined = [answer for answer in answers.values() if isinstance(answer, m.Joined)]
            if len({answer.fingerprint for answer in self.joined}) != 1:
                raise BaseModelError(
                    f"the {self.n_ranks} ranks of {join.base} compute different bits; set engine.ranks and engine.shard to 1"
                )
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the processes that were started here."""
        return tuple(rank.link.pid for rank in self._ranks if isinstance(rank.link, StartedChild))

    def ask(self, messages: Mapping[int, m.ToRank]) -> dict[int, m.FromRank]:
        """Send each rank its message and wait for all answers. Thread-safe: all ranks see the same order.

        Raises:
            RankGone: a rank ended.
            Exception: the error that a rank reported.
        """
        with self._lock:
            futures = {rank: self._ranks[rank].send(message) for rank, message in messages.items()}
        answers: dict[int, m.FromRank] = {}
        gone: RankGone | None = None
        for rank, future in futures.items():
            try:
                answers[rank] = future.result()
            except RankGone as error:
                gone = error
        refused = [answer for answer in answers.values() if isinstance(answer, m.RankRefused)]
        if refused:  # even if other ranks ended because of this one
            raise _error(next((refusal for refusal in refused if refusal.kind), refused[0]))
        if gone is not None:
            raise gone
        return answers

    def ask_all(self, message: m.ToRank) -> dict[int, m.FromRank]:
        """`ask` with one message for all ranks."""
        return self.ask(dict.fromkeys(range(self.n_ranks), message))

    def watch(self, on_death: Callable[[RankGone], object]) -> None:
        """Call `on_death` as soon as a rank has ended; in another thread, before waiting callers are informed."""
        self._on_death = on_death
        if self.death is not None:
            on_death(self.death)

    def close(self) -> None:
        """End all processes."""
        self._closing = True
        for rank in self._ranks:
            rank.close()
        self._files.cleanup()

    def _ended(self, rank: int, how: str) -> None:
        """End the whole group after one rank ended."""
        if not self._closing and self.death is None:
            self.death = RankGone(f"rank {rank} of {self.n_ranks} {how}")
            self._on_death(self.death)
            for other in self._ranks:
                other.fail(self.death)
                other.link.kill()
        if self.death is not None:
            self._ranks[rank].fail(self.death)


def _error(refused: m.RankRefused) -> Exception:
    """The exception that a rank reported."""
    if refused.kind == "OSError":
        return OSError(refused.number, refused.reason, refused.path)
    kind = getattr(errors, refused.kind, None)
    if isinstance(kind, type) and issubclass(kind, MotetError) and kind.__init__ is MotetError.__init__:
        return kind(refused.reason)
    return RuntimeError(f"{refused.kind}: {refused.reason}")
