"""Keeps masters and moments of recently used adapters on the device; parks the others in host memory or on disk."""

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
    """The arenas of a trainer. Thread-safe: one thread may save an adapter while another trains others."""

    def __init__(self, room: int, parking: Path | None) -> None:
        """Start without arenas.

        Args:
            room: arenas to keep on the device, exceeded only by arenas in use; 0 keeps all.
            parking: a directory for parked arenas; None uses host memory.
        """
        self.room, self._parking = room, parking
        self.arenas: dict[str, AdapterArena] = {}
        self._in: OrderedDict[str, AdapterArena] = OrderedDict()  # on the device, least recently used first
        self._users: Counter[str] = Counter()
        self._moving: dict[str, threading.Lock] = {}
        """Held while an arena moves; other arenas remain usable."""
        self._changing = threading.Lock()  # taken while holding a lock of `_moving`, never the reverse

    def add(self, name: str, arena: AdapterArena) -> None:
        """Add an arena."""
        with self._changing:
            self.arenas[name] = self._in[name] = arena
            self._moving[name] = threading.Lock()
        self._park_others()

    def remove(self, name: str) -> None:
        """Remove an arena."""
        with self._changing:
            del self.arenas[name], self._moving[name]
            self._in.pop(name, None)

    @contextlib.contextmanager
    def using(self, names: Sequence[str]) -> Iterator[list[AdapterArena]]:
        """Keep arenas on the device during the block."""
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
        """Load arenas before they are used, if `beside` leaves room; unknown names are ignored."""
        if beside and len({*names, *beside}) > self.room:
            return
        for name in names:
            with contextlib.suppress(KeyError), self.using([name]):  # it may be removed meanwhile
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
                    if self._users[name] or name in self._in:  # it is in use again
                        continue
                try:
                    arena.park(self._parking)
                except OSError as error:  # using more memory is better than losing a step
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
