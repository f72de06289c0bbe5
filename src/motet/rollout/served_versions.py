"""Which versions servers hold: written once, loaded where their job is at home, handed to others before they are asked."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
from collections import Counter
from collections.abc import Callable, Container, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from motet.errors import EngineError, ServerFault, ServerGone, ServerRefused
from motet.rollout.fleet import Fleet
from motet.rollout.replica import Replica, again
from motet.rollout.version_files import VersionFiles
from motet.types import ADAPTER_FILES, AdapterRef, FloatArray, IntArray

_log = logging.getLogger(__name__)

_ATTEMPTS = 3
"""How often a server that refuses is asked to load or unload a version."""
_LOSSES = 5
"""How often a version is handed over when connections are lost; waiting for a server that is away does not count."""


class Homes:
    """The servers that each adapter is at home on: so many that all have work, those with the fewest other adapters.

    They are found again at each publish, so that they spread as adapters and servers come and go.
    """

    def __init__(self) -> None:
        self._of: dict[str, frozenset[str]] = {}
        self._adapters: Counter[str] = Counter()
        """By URL: how many adapters are at home there."""

    def find(self, adapter: str, urls: Sequence[str], away: Container[str] = ()) -> frozenset[str]:
        """Those of these servers where the next version of an adapter is at home.

        Fewer adapters than servers share the servers out among them; of more, each has one. Servers that are away come last,
        and are handed the version when they are back.
        """
        before = self._of.get(adapter, frozenset())
        self.leave(adapter)
        count = math.ceil(len(urls) / (len(self._of) + 1))
        ranked = sorted(urls, key=lambda url: (url in away, self._adapters[url], url not in before))
        homes = self._of[adapter] = frozenset(ranked[:count])
        self._adapters.update(homes)
        return homes

    def leave(self, adapter: str) -> None:
        """An adapter has no version any more."""
        self._adapters.subtract(self._of.pop(adapter, ()))


@dataclass
class _Version:
    """A version as this engine knows it."""

    path: Path
    homes: frozenset[str] = frozenset()
    """URLs of the replicas that it is loaded on before it is announced."""
    probe: tuple[IntArray, FloatArray] | None = None
    """What was answered first; a replica that gets the version later has to agree."""


class ServedVersions:
    """The versions of a run on its servers."""

    def __init__(self, files: VersionFiles, tolerance: float, run_id: str) -> None:
        """Nothing is on a server yet.

        Args:
            files: where versions are written.
            tolerance: largest mean difference between two replicas' logprobs of one probe.
            run_id: the part of served names that says whose they are; those that nobody knows are unloaded.
        """
        self._files, self._tolerance, self._run_id = files, tolerance, run_id
        self._versions: dict[AdapterRef, _Version] = {}
        self._homes = Homes()
        self._loading: dict[tuple[str, str], asyncio.Lock] = {}
        self._unloading: set[asyncio.Task[None]] = set()

    def __contains__(self, ref: object) -> bool:
        """Whether requests may ask for it."""
        return ref in self._versions

    async def take(self, ref: AdapterRef, write: Callable[[Path], None], fleet: Fleet) -> None:
        """Write a version into a directory of its own and load it on every replica where its job is at home.

        Raises:
            EngineError: it could not be written, no replica took it, or one refused it, and why.
        """
        if ref in self._versions:
            raise EngineError(f"version {ref.version} of adapter {ref.name!r} is loaded already")

        def staged() -> None:
            try:
                with self._files.write_draft(ref.served_name) as directory:
                    write(directory)
            except OSError as error:  # of another disk than the run's: nobody is to wait for room there
                raise EngineError(
                    f"version {ref.version} of adapter {ref.name!r} could not be written to {self._files.directory} "
                    f"(rollout.directory): {error}; make room there, or name another directory"
                ) from error

        writing = asyncio.create_task(asyncio.to_thread(staged))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            self._later(self._forget(ref, writing))
            raise
        self._versions[ref] = _Version(self._files.path(ref.served_name))
        try:
            await self._hand_to_all(ref, fleet)
        except BaseException:
            self.drop(ref, fleet)
            raise

    async def _hand_to_all(self, ref: AdapterRef, fleet: Fleet) -> None:
        """One server that has it is enough: the others are handed it before their first request for it."""
        clock = asyncio.get_running_loop().time
        for loss in range(_LOSSES):
            await fleet.wait()
            away = {replica.url for replica in fleet.replicas if not replica.up}
            self._versions[ref].homes = self._homes.find(ref.name, [replica.url for replica in fleet.replicas], away)
            replicas, begun = self.places(ref, fleet), clock()
            handed = (self.hand(replica, ref) for replica in replicas)
            outcomes = await asyncio.gather(*handed, return_exceptions=True)
            failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
            refused = [error for error in failed if not isinstance(error, ServerGone)]
            if refused:
                raise refused[0]
            for replica, outcome in zip(replicas, outcomes, strict=True):
                if isinstance(outcome, ServerGone):
                    fleet.doubt(replica)
            if len(failed) < len(outcomes):
                return
            clocks = replicas[0].clocks
            if loss == _LOSSES - 1 or clock() - begun >= clocks.load:
                raise failed[0]
            await asyncio.sleep(clocks.retry * 2**loss)

    def places(self, ref: AdapterRef, fleet: Fleet) -> list[Replica]:
        """Where a version has to answer: those of its homes that are up; of the others only one, where no home is."""
        return [replica for replica in fleet.up if self.near(ref, replica)] or fleet.up[:1]

    def near(self, ref: AdapterRef, replica: Replica) -> bool:
        """Whether a request for a version costs a replica no load: its job is at home there, or it was handed it before."""
        version = self._versions.get(ref)
        return ref.served_name in replica.loaded or (version is not None and replica.url in version.homes)

    async def hand(self, replica: Replica, ref: AdapterRef) -> None:
        """See that a replica has a version, and answers it as the others did, before it is asked for it.

        Raises:
            EngineError: it cannot be loaded there, and why.
        """
        name, version = ref.served_name, self._versions.get(ref)
        if version is None:
            raise EngineError(f"version {ref.version} of adapter {ref.name!r} is not loaded")
        async with self._loading.setdefault((replica.url, name), asyncio.Lock()):
            if name in replica.loaded:
                return
            await self._load(replica, name, version.path)
            if version.probe is not None:
                token_ids, expected = version.probe
                gap = float(np.abs(await replica.logprobs(token_ids, name) - expected).mean())
                if not gap <= self._tolerance:
                    replica.loaded.discard(name)
                    raise ServerFault(
                        f"{replica.url} answers version {ref.version} of {ref.name!r} otherwise than when it was "
                        f"published: logprobs of the probe differ by {gap:.3g} on average"
                    )

    async def _load(self, replica: Replica, name: str, path: Path) -> None:
        """A path that a server does not see yet may be on its way there, through a file system of the network."""
        clock = asyncio.get_running_loop().time
        late = clock() + replica.clocks.load
        while True:
            try:
                await again(lambda: replica.load(name, str(path)), _ATTEMPTS, replica.clocks.retry, (ServerGone,))
                return
            except ServerRefused as error:
                if not replica.dialect.missing(error.status, error.detail) or clock() >= late:
                    raise
                await asyncio.sleep(replica.clocks.look)

    def probed(self, ref: AdapterRef, token_ids: IntArray, logprobs: FloatArray) -> None:
        """Remember what servers answered first."""
        version = self._versions.get(ref)
        if version is not None and version.probe is None:
            version.probe = (token_ids, logprobs)

    def drop(self, ref: AdapterRef, fleet: Fleet) -> None:
        """Let go of a version: in the background, and a server that does not is no reason to stop."""
        if self._versions.pop(ref, None) is not None:
            if all(other.name != ref.name for other in self._versions):
                self._homes.leave(ref.name)
            self._later(self._unload(ref, fleet))

    async def tidy(self, replica: Replica, *perhaps: str) -> None:
        """Unload what of this run nobody asks for any more: also what an earlier attempt left, or what would not go before.

        Args:
            replica: where.
            perhaps: names that may be there although nobody knows, because a load was not answered.

        Raises:
            EngineError: something stays, and why.
        """
        current = {ref.served_name for ref in self._versions}
        for name in sorted(replica.loaded.union(replica.left, perhaps) - current):
            if f".{self._run_id}." in name or name in perhaps:
                await again(lambda name=name: replica.unload(name), _ATTEMPTS, replica.clocks.retry)  # type: ignore[misc]

    async def close(self) -> None:
        """Finish unloading and remove the files that are not kept."""
        if self._unloading:
            _, late = await asyncio.wait(self._unloading, timeout=10.0)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await asyncio.to_thread(self._files.close)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._unloading.add(task)
        task.add_done_callback(self._unloading.discard)

    async def _forget(self, ref: AdapterRef, writing: asyncio.Task[None]) -> None:
        """A publish was cancelled, but its thread cannot be: what it writes goes when it is there."""
        await asyncio.gather(writing, return_exceptions=True)
        self._files.retire(ref.served_name)

    async def _unload(self, ref: AdapterRef, fleet: Fleet) -> None:
        for replica in fleet.up:
            if self._loading.pop((replica.url, ref.served_name), None) is None:
                continue  # nobody has asked it to load this
            try:
                await self.tidy(replica, ref.served_name)
            except EngineError as error:
                _log.warning("%s stays loaded for now: %s", ref.served_name, error)
        self._files.retire(ref.served_name)


def copy_adapter(source: Path, target: Path) -> None:
    """Copy the files of a PEFT directory that servers read."""
    for file in ADAPTER_FILES:
        shutil.copyfile(source / file, target / file)
