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
        self._room, self._parking = room, parking
        self.arenas: dict[str, AdapterArena] = {}
        self._in: OrderedDict[str, AdapterArena] = OrderedDict()  # on the device, used longest ago first
        self._users: Counter[str] = Counter()
        self._changing = threading.Lock()

    def add(self, name: str, arena: AdapterArena) -> None:
        """Take an arena in."""
        with self._changing:
            self.arenas[name] = self._in[name] = arena
            self._park_others()

    def remove(self, name: str) -> None:
        """Let go of one."""
        with self._changing:
            del self.arenas[name]
            self._in.pop(name, None)

    @contextlib.contextmanager
    def using(self, names: Sequence[str]) -> Iterator[list[AdapterArena]]:
        """Arenas that are on the device until the block ends."""
        with self._changing:
            self._users.update(names)
            for name in names:
                self.arenas[name].bring_in()
                self._in[name] = self.arenas[name]
                self._in.move_to_end(name)
        try:
            with self._changing:
                self._park_others()
            yield [self.arenas[name] for name in names]
        finally:
            with self._changing:
                self._users.subtract(names)

    def _park_others(self) -> None:
        idle = [name for name in self._in if not self._users[name]] if self._room and len(self._in) > self._room else []
        for name in idle[: len(self._in) - self._room]:
            try:
                self._in[name].park(self._parking)
            except OSError as error:  # more memory than was wanted is better than a step that is lost
                _log.warning(
                    "adapters stay on the device because %s cannot take them: %s", self._parking, error.strerror
                )
                return
            del self._in[name]
