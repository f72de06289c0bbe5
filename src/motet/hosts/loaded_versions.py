"""Stored versions that are loaded for answers: every tenant has a share of the cache, and loads in its turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from weakref import WeakValueDictionary

from motet.core.types import ADAPTER_WEIGHTS, AdapterRef
from motet.protocols import RolloutEngine
from motet.runtime.shielded import uninterrupted

CACHED_VERSIONS = 8
"""Stored versions that stay loaded, and the most that one tenant uses at once."""
_MOST = 2 * CACHED_VERSIONS
"""Idle versions stay up to this number while the tenant that has the most loaded uses all of them."""


class LoadedVersions:
    """The versions that an engine has loaded for answers. Use it in one event loop.

    Where there are too many, the tenant that has the most gives up the one that it has not used for longest. A version that
    several tenants use stays until each of them has given it up.
    """

    def __init__(self, engine: RolloutEngine, name: str) -> None:
        """`name` is the engine's name of all of them."""
        self._engine, self._name, self._numbers = engine, name, 0
        self._refs: dict[str, AdapterRef] = {}
        """By `_contents`."""
        self._users: OrderedDict[tuple[str, str], None] = OrderedDict()
        """Each tenant with what it uses, the least recently used first."""
        self._held: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Answers that a tenant's versions give now."""
        self._freed: dict[str, asyncio.Event] = {}
        """Set when a tenant that waits uses a version less."""
        self._loading, self._own = asyncio.Lock(), WeakValueDictionary[str, asyncio.Lock]()

    @contextlib.asynccontextmanager
    async def hold(self, tenant: str, directory: Path) -> AsyncIterator[AdapterRef]:
        """A loaded version, for as long as the block runs."""
        contents = await asyncio.to_thread(_contents, directory)
        while contents not in self._held[tenant] and len(self._held[tenant]) >= CACHED_VERSIONS:
            await self._freed.setdefault(tenant, asyncio.Event()).wait()
        self._held[tenant][contents] += 1
        try:
            yield await self._loaded(tenant, contents, directory)
        finally:
            self._held[tenant] -= Counter((contents,))
            if not self._held[tenant]:
                del self._held[tenant]
            if (waiting := self._freed.pop(tenant, None)) is not None:
                waiting.set()
            await uninterrupted(self._shrink())

    async def _loaded(self, tenant: str, contents: str, directory: Path) -> AdapterRef:
        if contents not in self._refs:
            # one load of each tenant waits for the second lock, which is given in order
            async with self._own.setdefault(tenant, asyncio.Lock()), self._loading:
                if contents not in self._refs:  # another request has loaded it meanwhile
                    self._numbers += 1
                    ref = AdapterRef(self._name, self._numbers)
                    await self._engine.load_adapter(ref, directory)
                    self._refs[contents] = ref
        self._users[tenant, contents] = None
        self._users.move_to_end((tenant, contents))
        await uninterrupted(self._shrink())
        return self._refs[contents]

    async def _shrink(self) -> None:
        while len(self._refs) > CACHED_VERSIONS and (given_up := self._too_many()) is not None:
            del self._users[given_up]
            if all(contents != given_up[1] for _, contents in self._users):
                await self._engine.unload_adapter(self._refs.pop(given_up[1]))

    def _too_many(self) -> tuple[str, str] | None:
        """What a tenant gives up next; None while everything that should go is in use."""
        number = Counter(tenant for tenant, _ in self._users)
        used = {contents for held in self._held.values() for contents in held}
        free = [one for one in self._users if one[1] not in used]
        if not free:
            return None
        first = max(free, key=lambda one: number[one[0]])
        at_once = number[first[0]] == max(number.values()) or len(self._refs) > _MOST
        return first if at_once else None


def _contents(directory: Path) -> str:
    """A directory with the file of its weights: a client may save others under the same name."""
    try:
        weights = (directory / ADAPTER_WEIGHTS).stat()
    except OSError:  # the engine finds that out too, and reports it
        return str(directory)
    return f"{directory} {weights.st_ino} {weights.st_mtime_ns}"
