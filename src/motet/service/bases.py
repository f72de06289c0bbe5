"""The bases of a service: their locations, and the names used by jobs, adapters and clients."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from motet.core.errors import ConfigError

SMALL_BASE = Path(__file__).parents[1] / "assets" / "small-base"


class Bases:
    """One or several bases by name; a single one is named after its location (`small`, a hub id, a path)."""

    def __init__(self, places: Mapping[str, str]) -> None:
        """`places` maps names to locations (`small`, a hub id, a directory or a file); the first is the default."""
        self.places = dict(places)
        self.known: Mapping[str, str] = {}
        """Current and former bases by name, oldest first; empty if the service never had several."""

    @property
    def first(self) -> str:
        """Name of the default base."""
        return next(iter(self.places))

    @property
    def names(self) -> list[str]:
        """All names, default first."""
        return list(self.places)

    @property
    def several(self) -> bool:
        """Whether there are several bases."""
        return len(self.places) > 1

    def tokenizer(self, name: str) -> str:
        """The name or path for `transformers.AutoTokenizer`."""
        return str(SMALL_BASE) if self.places[name] == "small" else self.places[name]

    def find(self, given: str | None) -> str | None:
        """Resolve a base's name or location, with None for the default; returns None if it is not served."""
        if given is None or given == "base":
            return self.first
        if given in self.places:
            return given
        return next((name for name, place in self.places.items() if place == given), None)

    def named(self, given: object) -> str:
        """As `find`. Raises ConfigError if it is not served; the message lists the bases."""
        name = self.find(given) if given is None or isinstance(given, str) else None
        if name is None:
            raise ConfigError(f"base: {given!r:.200} is not served here; there {self.listed}")
        return name

    def of(self, stored: str | None) -> str:
        """The current base of an object stored under a name. A base that was always the only one matches every name.

        Raises:
            ConfigError: it is not served any more.
        """
        if (missing := self.missing(stored)) is not None:
            raise ConfigError(missing)
        return self._now(stored) or self.first

    def missing(self, stored: str | None) -> str | None:
        """A message if the base of a stored object is not served now; otherwise None."""
        if self._now(stored) is not None or not (self.several or self._recorded_name(stored)):
            return None
        name = self._recorded_name(stored) or stored
        return f"its base {name!r} is no longer served; the service's operator can put it back under `bases`"

    def _recorded_name(self, stored: str | None) -> str | None:
        """The base, by its name among several current and former ones, that a stored name or location refers to."""
        if stored is None or stored in self.known:
            return stored or next(iter(self.known), None)
        return next((name for name, place in self.known.items() if place == stored), None)

    def _now(self, stored: str | None) -> str | None:
        """The current name of the base of a stored object."""
        if (recorded := self._recorded_name(stored)) is None:
            return self.find(stored)
        return (stored and self.find(stored)) or self.find(recorded) or self.find(self.known[recorded])

    def hides(self, name: str) -> bool:
        """Whether a model of this name would be confused with a base; a single base reserves no name."""
        return self.several and self.find(name) is not None

    def shown(self, stored: str | None) -> str | None:
        """The base to show for a stored object; None if there is only one base."""
        return self.called(stored) if self.several else None

    def called(self, stored: str | None) -> str:
        """The current name of a stored object's base, or its former name if it is not served."""
        stored = stored or None
        if self.missing(stored) is None:
            return self._now(stored) or self.first
        return self._recorded_name(stored) or str(stored)

    def alike(self, given: str) -> str | None:
        """The base for a client's local path or the last part of a name; None if several match."""
        alike = [name for name in self.places if given in self._called(name)]
        if not alike and Path(given).is_absolute():
            last = Path(given).name
            alike = [name for name in self.places if last in {Path(one).name for one in self._called(name)}]
        return alike[0] if len(alike) == 1 else None

    def _called(self, name: str) -> set[str]:
        place = self.places[name]
        return {name, place, self.tokenizer(name), Path(place).name}

    def public(self, name: str) -> str:
        """The name of a base without this machine's paths, for requests without a key."""
        return Path(name).name if Path(name).is_absolute() or Path(name).exists() else name

    @property
    def listed(self) -> str:
        """All names, as text for messages."""
        return ("are " if self.several else "is ") + ", ".join(map(repr, self.places))
