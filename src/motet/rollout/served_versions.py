"""Versions on servers: written once, loaded on their job's home servers, and elsewhere when a request needs them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import shutil
from collections import Counter
from collections.abc import Callable, Container, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from motet.core.errors import EngineError, ServerFault, ServerGone, ServerRefused
from motet.core.types import ADAPTER_FILES, AdapterRef, FloatArray, IntArray
from motet.rollout.fleet import Fleet
from motet.rollout.replica import Replica, again
from motet.rollout.version_files import VersionFiles

_log = logging.getLogger(__name__)

_ATTEMPTS = 3
"""Attempts to load or unload a version on a server that refuses."""
_LOSSES = 5
"""Attempts after lost connections; waiting for a server that is away does not count."""


class Homes:
    """Home servers of each adapter: enough to keep all servers busy, those with the fewest other adapters first.

    They are chosen again at each publish, so that the load stays balanced as adapters and servers come and go.
    """

    def __init__(self) -> None:
        self._of: dict[str, frozenset[str]] = {}
        self._adapters: Counter[str] = Counter()
        """Number of adapters at home on each server, by URL."""

    def find(self, adapter: str, urls: Sequence[str], away: Container[str] = ()) -> frozenset[str]:
        """The home servers for an adapter's next version.

        With fewer adapters than servers, the servers are divided among them; with more, each adapter has one home.
        Servers that are away come last and receive the version when they are back.
        """
        before = self._of.get(adapter, frozenset())
        self.leave(adapter)
        count = math.ceil(len(urls) / (len(self._of) + 1))
        ranked = sorted(urls, key=lambda url: (url in away, self._adapters[url], url not in before))
        homes = self._of[adapter] = frozenset(ranked[:count])
        self._adapters.update(homes)
        return homes

    def leave(self, adapter: str) -> None:
        """Remove an adapter that has no version left."""
        self._adapters.subtract(self._of.pop(adapter, ()))


@dataclass
class _Version:
    """A loaded version and its homes."""

    path: Path
    homes: frozenset[str] = frozenset()
    """URLs of the replicas that load the version before it is announced."""
    probe: tuple[IntArray, FloatArray] | None = None
    """Token ids and logprobs of its first probe; a replica that loads the version later must agree."""


class ServedVersions:
    """The versions of a run on its servers."""

    def __init__(self, files: VersionFiles, tolerance: float, run_id: str) -> None:
        """`tolerance` is the largest mean difference between two replicas' logprobs of one probe.

        `run_id` marks this run's names on servers; unknown names with it are unloaded.
        """
        self._files, self._tolerance, self._run_id = files, tolerance, run_id
        self._versions: dict[AdapterRef, _Version] = {}
        self._homes = Homes()
        self._loading: dict[tuple[str, str], asyncio.Lock] = {}
        self._unloading: set[asyncio.Task[None]] = set()

    def __contains__(self, ref: object) -> bool:
        """Whether requests may use this version."""
        return ref in self._versions

    async def take(self, ref: AdapterRef, write: Callable[[Path], None], fleet: Fleet) -> None:
        """Write a version to its directory and load it on all home replicas.

        Raises:
            EngineError: writing failed, no replica loaded it, or one refused it; the message says why.
        """
        if ref in self._versions:
            raise EngineError(f"version {ref.version} of adapter {ref.name!r} is loaded already")

        def staged() -> None:
            try:
                with self._files.write_draft(ref.served_name) as directory:
                    write(directory)
            except OSError as error:  # not on the run's disk: fail instead of waiting for space
                raise EngineError(
                    f"version {ref.version} of adapter {ref.name!r} could not be written to {self._files.directory} "
                    f"(rollout.directory): {error}; free space there, or name another directory"
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
        """Load a version on its homes. One success is enough; the other homes load it before their first request."""
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
        """Replicas that must answer with a version: its homes that are up, otherwise any one replica."""
        return [replica for replica in fleet.up if self.near(ref, replica)] or fleet.up[:1]

    def near(self, ref: AdapterRef, replica: Replica) -> bool:
        """Whether a request needs no load on this replica: it is a home, or the version is loaded."""
        version = self._versions.get(ref)
        return ref.served_name in replica.loaded or (version is not None and replica.url in version.homes)

    async def hand(self, replica: Replica, ref: AdapterRef) -> None:
        """Ensure that a replica has a version and answers its probe like the others.

        Raises:
            EngineError: it cannot be loaded there; the message says why.
        """
        name, version = ref.served_name, self._versions.get(ref)
        if version is None:
            raise EngineError(f"version {ref.version} of adapter {ref.name!r} is not loaded")
        async with self._loading.setdefault((replica.url, name), asyncio.Lock()):
            if name in replica.loaded:
                return
            await self._load(replica, name, version.path)
            if version.probe is not None:
                try:
                    await self._check(replica, ref, *version.probe)
                except BaseException:  # not known to be this version: whoever comes next loads and checks it again
                    replica.loaded.discard(name)
                    raise

    async def unmoved(self, ref: AdapterRef, token_ids: IntArray, fleet: Fleet) -> list[str]:
        """The servers that answer with a strong adapter as they answer with the base."""
        found = []
        for replica in fleet.up:
            with contextlib.suppress(ServerGone):  # whatever it loads later must answer as the others do
                async with fleet.awake():
                    await self.hand(replica, ref)
                    shown = await replica.logprobs(token_ids, ref.served_name)
                    gap = np.abs(shown - await replica.logprobs(token_ids, None)).mean()
                found += [replica.url] if gap <= self._tolerance else []
        return found

    async def _check(self, replica: Replica, ref: AdapterRef, token_ids: IntArray, expected: FloatArray) -> None:
        gap = float(np.abs(await replica.logprobs(token_ids, ref.served_name) - expected).mean())
        if not gap <= self._tolerance:
            raise ServerFault(
                f"{replica.url} answers version {ref.version} of {ref.name!r} differently than when it was published: "
                f"logprobs of the probe differ by {gap:.3g} on average"
            )

    async def _load(self, replica: Replica, name: str, path: Path) -> None:
        """Load a version; retry while its path may not have reached the server through a network file system."""
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
        """Store the first probe of a version."""
        version = self._versions.get(ref)
        if version is not None and version.probe is None:
            version.probe = (token_ids, logprobs)

    def drop(self, ref: AdapterRef, fleet: Fleet) -> None:
        """Unload a version in the background; a server that fails to is not an error."""
        if self._versions.pop(ref, None) is not None:
            if all(other.name != ref.name for other in self._versions):
                self._homes.leave(ref.name)
            self._later(self._unload(ref, fleet))

    async def tidy(self, replica: Replica, *perhaps: str) -> None:
        """Unload unneeded versions of this run, including those of earlier attempts and failed unloads.

        Args:
            replica: where.
            perhaps: names that may be loaded there because a load got no answer.

        Raises:
            EngineError: something stays loaded; the message says why. A name that the server refuses keeps no other there.
        """
        current, refused = {ref.served_name for ref in self._versions}, None
        for name in sorted(replica.loaded.union(perhaps) - current):
            if f".{self._run_id}." in name or name in perhaps:
                try:
                    await again(lambda name=name: replica.unload(name), _ATTEMPTS, replica.clocks.retry)  # type: ignore[misc]
                except ServerRefused as error:
                    refused = refused or error
        if refused is not None:
            raise refused

    async def close(self) -> None:
        """Finish unloading and delete the files that are not kept."""
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
        """Delete the files of a cancelled publish after its thread, which cannot be cancelled, has written them."""
        await asyncio.gather(writing, return_exceptions=True)
        self._files.retire(ref.served_name)

    async def _unload(self, ref: AdapterRef, fleet: Fleet) -> None:
        try:
            for replica in fleet.up:
                if self._loading.pop((replica.url, ref.served_name), None) is None:
                    continue  # never loaded there
                try:
                    async with fleet.awake():
                        await self.tidy(replica, ref.served_name)
                except EngineError as error:
                    _log.warning("%s stays loaded for now: %s", ref.served_name, error)
        finally:  # also if a server hangs while this process ends
            self._files.retire(ref.served_name)


def copy_adapter(source: Path, target: Path) -> None:
    """Copy the files of a PEFT directory that servers read."""
    for file in ADAPTER_FILES:
        shutil.copyfile(source / file, target / file)
