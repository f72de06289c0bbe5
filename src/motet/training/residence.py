"""Which adapters have their masters and moments on the device: those that were used last; the others wait elsewhere."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from motet.training.arena import AdapterArena

_log = logging.getLogger(__name__)


class Residence:
    """The arenas of a trainer. May be called from several threads: one saves what another does not train."""

    def __init__(self, room: int, parking: Path | None) -> None:
        """Nothing is there yet.

        Args:
            room: how many arenas stay on the device, apart from those in use; 0 is all.
            parking: a directory on a disk for the others; None is host memory.
        """
        self.room, self._parking = room, parking
        self.arenas: dict[str, AdapterArena] = {}
        self._in: OrderedDict[str, AdapterArena] = OrderedDict()  # on the device, used longest ago first
        self._users: Counter[str] = Counter()
        self._moving: dict[str, threading.Lock] = {}
        """Held while an arena comes or goes; others are used meanwhile."""
        self._changing = threading.Lock()  # taken inside of those, and never the other way around

    def add(self, name: str, arena: AdapterArena) -> None:
        """Take an arena in."""
        with self._changing:
            self.arenas[name] = self._in[name] = arena
            self._moving[name] = threading.Lock()
        self._park_others()

    def remove(self, name: str) -> None:
        """Let go of one."""
        with self._changing:
            del self.arenas[name], self._moving[name]
            self._in.pop(name, None)

    @contextlib.contextmanager
    def using(self, names: Sequence[str]) -> Iterator[list[AdapterArena]]:
        """Arenas that are on the device until the block ends."""
        with self._changing:
            self._users.update(names)
        try:
            for name in names:
                self._bring_in(name)
            self._park_others()
            yield [self.arenas[name] for name in names]
        finally:
            with self._changing:
                self._users.subtract(names)

    def bring_in(self, names: Sequence[str], beside: Sequence[str] = ()) -> None:
        """Have arenas on the device before they are used, where `beside` leaves room; names that are gone are left out."""
        if beside and len({*names, *beside}) > self.room:
            return
        for name in names:
            with contextlib.suppress(KeyError), self.using([name]):  # it may go meanwhile
                pass

    def _bring_in(self, name: str) -> None:
        arena = self.arenas[name]
        with self._moving[name]:
            arena.bring_in()
        with self._changing:
            if self.arenas.get(name) is arena:
                self._in[name] = arena
                self._in.move_to_end(name)

    def _park_others(self) -> None:
        with self._changing:
            many = len(self._in) - self.room if self.room else 0
            idle = [name for name in self._in if not self._users[name]][: max(0, many)]
            leaving = [(name, self._in.pop(name), self._moving[name]) for name in idle]
        for number, (name, arena, moving) in enumerate(leaving):
            with moving:
                with self._changing:
                    if self._users[name] or name in self._in:  # it was wanted again
                        continue
                try:
                    arena.park(self._parking)
                except OSError as error:  # more memory than was wanted is better than a step that is lost
                    _log.warning(
                        "adapters stay on the device because %s cannot take them: %s", self._parking, error.strerror
                    )
                    self._take_back(leaving[number:])
                    return

    def _take_back(self, arenas: Sequence[tuple[str, AdapterArena, threading.Lock]]) -> None:
        with self._changing:
            for name, arena, _ in arenas:
                if self.arenas.get(name) is arena:
                    self._in.setdefault(name, arena)
