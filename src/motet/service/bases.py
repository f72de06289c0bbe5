"""The bases of a service: what each is, and how jobs, adapters and clients name it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from motet.errors import ConfigError

SMALL_BASE = Path(__file__).parents[1] / "assets" / "small-base"


class Bases:
    """One or several bases by name; a single one has what it is (`small`, a hub id, a path) as its name."""

    def __init__(self, places: Mapping[str, str]) -> None:
        """`places` says what each base is; the first is meant where none is named."""
        self._places = self.places = dict(places)
        self.known: Mapping[str, str] = {}
        """What the bases of this service are or were, by name, the first ever first; none where it never had several."""

    @property
    def first(self) -> str:
        """The name of the base that is meant where none is named."""
        return next(iter(self._places))

    @property
    def names(self) -> list[str]:
        """All names, the first base's first."""
        return list(self._places)

    @property
    def several(self) -> bool:
        """Whether it has to be said which."""
        return len(self._places) > 1

    def place(self, name: str) -> str:
        """What a base is: `small`, a hub id, a directory or a file."""
        return self._places[name]

    def tokenizer(self, name: str) -> str:
        """What `transformers.AutoTokenizer` finds its tokenizer under."""
        return str(SMALL_BASE) if self.place(name) == "small" else self.place(name)

    def find(self, given: str | None) -> str | None:
        """The name of the base that somebody means by its name, by what it is, or by naming none; None where it is not here."""
        if given is None or given == "base":
            return self.first
        if given in self._places:
            return given
        return next((name for name, place in self._places.items() if place == given), None)

    def named(self, given: object) -> str:
        """The same.

        Raises:
            ConfigError: there is no such base here, and which there are.
        """
        name = self.find(given) if given is None or isinstance(given, str) else None
        if name is None:
            raise ConfigError(f"base: {given!r:.200} is not served here; there {self.listed}")
        return name

    def of(self, stored: str | None) -> str:
        """The base of a job or an adapter that was stored under a name; a base that was always alone is that of all.

        Raises:
            ConfigError: it is not served any more.
        """
        if (missing := self.missing(stored)) is not None:
            raise ConfigError(missing)
        return self._now(stored) or self.first

    def missing(self, stored: str | None) -> str | None:
        """That, and what to do, where what was stored is of a base that is not served now."""
        if self._now(stored) is not None or not (self.several or self._former(stored)):
            return None
        name = self._former(stored) or stored
        return f"its base {name!r} is no longer served; the service's operator can put it back under `bases`"

    def _former(self, stored: str | None) -> str | None:
        """The name of one of several that were served once, as something was stored under it, or under what that base is."""
        if stored is None or stored in self.known:
            return stored or next(iter(self.known), None)
        return next((name for name, place in self.known.items() if place == stored), None)

    def _now(self, stored: str | None) -> str | None:
        """The name under which the base is served now that something was stored under."""
        if (former := self._former(stored)) is None:
            return self.find(stored)
        return (stored and self.find(stored)) or self.find(former) or self.find(self.known[former])

    def hides(self, name: str) -> bool:
        """Whether a model of this name would be taken for a base; a single base has had its name from the start."""
        return self.several and self.find(name) is not None

    def shown(self, stored: str | None) -> str | None:
        """What people are told of where something stored belongs; None where there is one base alone."""
        return self.called(stored) if self.several else None

    def called(self, stored: str | None) -> str:
        """The name of the base that something was stored under, as it is served now, or as it was."""
        stored = stored or None
        if self.missing(stored) is None:
            return self._now(stored) or self.first
        return self._former(stored) or str(stored)

    def alike(self, given: str) -> str | None:
        """The base that a client means by a path of its own machine, or by the last part of a name, where it is one alone."""
        alike = [name for name in self._places if given in self._called(name)]
        if not alike and Path(given).is_absolute():
            last = Path(given).name
            alike = [name for name in self._places if last in {Path(one).name for one in self._called(name)}]
        return alike[0] if len(alike) == 1 else None

    def _called(self, name: str) -> set[str]:
        place = self._places[name]
        return {name, place, self.tokenizer(name), Path(place).name}

    def public(self, name: str) -> str:
        """The name of a base for somebody without a key, to whom it is no business where things lie on this machine."""
        return Path(name).name if Path(name).is_absolute() or Path(name).exists() else name

    @property
    def listed(self) -> str:
        """All names, for a person."""
        return ("are " if self.several else "is ") + ", ".join(map(repr, self._places))
