"""The versions of an adapter that an engine holds, freed by reference count, never by a timer.

A version is dropped when no request holds it and no admission can ask for it any more. A reference always names the
same weights: engine-side names contain the run and the attempt, so a version trained again after a crash has another
name.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from motet.core.types import AdapterRef
from motet.protocols import RolloutEngine, WeightSync
from motet.runtime.shielded import uninterrupted


def adapter_name(job: str, role: str = "") -> str:
    """What the trainer calls a job's adapter, or that of a role of its team."""
    return f"{job}#{role}" if role else job


class Versions:
    """The published versions of one job's adapter."""

    def __init__(
        self,
        job: str,
        engine_name: str,
        engine: RolloutEngine,
        sync: WeightSync,
        roles: Sequence[str] = ("",),
    ) -> None:
        """A version of a team has an adapter of each role."""
        self._job, self.roles = job, tuple(roles)
        self._engine_name = engine_name
        self._engine = engine
        self._sync = sync
        self._holds: dict[int, int] = {}
        self._oldest = 0
        self._arrived = asyncio.Condition()
        self.latest = -1

    def ref(self, version: int, role: str = "") -> AdapterRef:
        """The engine's reference to a version, of a team to a role's adapter in it."""
        return AdapterRef(f"{self._engine_name}.{role}" if role else self._engine_name, version)

    async def restore(self, version: int, directory: Path) -> None:
        """Load an older version that admissions may still ask for after a restart."""
        await self._load(version, lambda role, ref: self._engine.load_adapter(ref, directory / role))

    async def publish(self, version: int) -> None:
        """Load the trainer's weights as this version. It is not sampled from before `announce`."""
        await self._load(version, lambda role, ref: self._sync.publish(adapter_name(self._job, role), ref))

    async def _load(self, version: int, load: Callable[[str, AdapterRef], Awaitable[None]]) -> None:
        """Load the adapters of all roles, or of none if one fails."""
        loaded: list[AdapterRef] = []
        try:
            for role in self.roles:
                await load(role, ref := self.ref(version, role))
                loaded.append(ref)
        except BaseException:
            await uninterrupted(self._unload_all(loaded))
            raise
        self._holds[version] = 0

    async def announce(self, version: int, oldest_needed: int) -> None:
        """Allow sampling from the version, and drop versions older than `oldest_needed` that nothing holds."""
        async with self._arrived:
            self.latest = version
            self._oldest = oldest_needed
            self._arrived.notify_all()
        await self.collect()

    async def wait_for(self, version: int) -> None:
        """Wait until a version is announced."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: self.latest >= version)

    @contextlib.contextmanager
    def hold(self, version: int, role: str = "") -> Iterator[AdapterRef | None]:
        """Keep a version loaded while sampling from it."""
        self._holds[version] += 1
        try:
            yield self.ref(version, role)
        finally:
            self._holds[version] -= 1

    async def collect(self) -> None:
        """Unload versions that nothing holds and no admission can ask for."""
        gone = [version for version, holds in self._holds.items() if holds == 0 and version < self._oldest]
        await self._unload(gone)

    async def drop_all(self) -> None:
        """Unload all versions when the job leaves."""
        await self._unload(list(self._holds))

    async def _unload(self, gone: Sequence[int]) -> None:
        for version in gone:  # remove them first: another collection may run while this one waits for the engine
            del self._holds[version]
        await uninterrupted(self._unload_all([self.ref(version, role) for version in gone for role in self.roles]))

    async def _unload_all(self, gone: Sequence[AdapterRef]) -> None:
        for ref in gone:
            await self._engine.unload_adapter(ref)
