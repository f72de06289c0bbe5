"""Sampling on servers: vLLM or SGLang, one or several replicas, reached over HTTP.

A version is loaded where its job is at home before it is announced, and a request goes whole to the home with the fewest
outstanding tokens. When all homes are full it goes elsewhere: there, as to a replica that was away, the version is handed
over first and has to answer the probe as before. What a replica leaves undone is asked of another, or of the same one when it
is back.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import numpy as np

from motet.errors import EngineError, ServerFault, ServerGone, ServerRefused, ServerUnfit
from motet.protocols import Trainer
from motet.rollout.completion import Completion
from motet.rollout.fleet import Fleet
from motet.rollout.replica import Replica
from motet.rollout.served_versions import ServedVersions, copy_adapter
from motet.rollout.server_process import ServerProcess
from motet.rollout.version_files import VersionFiles
from motet.stops import Decode
from motet.types import (
    AdapterRef,
    Chunk,
    FinishReason,
    FloatArray,
    GenerateRequest,
    IntArray,
    ServerLoad,
    TopTokens,
    schema_of,
)

_log = logging.getLogger(__name__)

_ATTEMPTS = 5
"""How often a completion is asked for when answers fail; waiting for a replica that is away does not count."""
_BUSY = (408, 425, 429)
"""Refusals that pass."""
_NO_CALLS = (
    "asks for an answer that keeps to a schema or calls a tool (response_format with tools); servers keep to a schema alone: "
    "leave the tools or response_format out, or sample on the embedded engine"
)


@dataclass(frozen=True)
class Demand:
    """What jobs need of each server at a time."""

    adapters: int
    versions: int
    rank: int


@dataclass(frozen=True)
class ServerLimits:
    """What requests have to keep to, and how long they wait."""

    rows: int
    """Completions in flight on one replica."""
    vocabulary: int
    max_positions: int
    wanted: Demand
    tolerance: float
    """Largest mean difference between two replicas' logprobs of one probe."""
    wait_seconds: float
    """Seconds to wait for a replica when none is there."""


@dataclass(eq=False)
class _Open:
    """A request under way, with all its completions on one replica."""

    request: GenerateRequest
    replica: Replica | None = None
    tasks: tuple[asyncio.Task[None], ...] = ()
    limits: list[anyio.CancelScope] = field(default_factory=list)
    """End the tasks; anyio's, which a client that cleans up is shielded from (see `Replica`)."""
    aborted: bool = False
    failed: set[str] = field(default_factory=set)
    """Replicas that failed it: others come first."""


class ServerEngine:
    """A `RolloutEngine` on servers."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        processes: Mapping[str, ServerProcess],
        files: VersionFiles,
        decode: Decode,
        bounds: ServerLimits,
        run: str,
    ) -> None:
        """Nothing is asked of a server before `ready`.

        Args:
            replicas: the servers.
            processes: those that are started here, by URL.
            files: where versions are written for them.
            decode: text of completion tokens.
            bounds: what requests have to keep to.
            run: the part of served names that says whose they are.
        """
        self.fleet = Fleet(replicas, processes, bounds.wait_seconds, self._welcome)
        self._versions = ServedVersions(files, bounds.tolerance, run)
        self._decode, self._bounds = decode, bounds
        self._owner = f"{run}.{secrets.token_hex(4)}"
        self._open: set[_Open] = set()

    @property
    def capacity(self) -> int:
        """Completions in flight on all replicas."""
        return self._bounds.rows * len(self.fleet.replicas)

    def loads(self) -> list[ServerLoad]:
        """The load of each replica, for metrics and views."""
        return [replica.load_now() for replica in self.fleet.replicas]

    async def ready(self) -> None:
        """Wait until a server answers.

        Raises:
            EngineError: none does, or none has room for the jobs; with what to change.
        """
        await self.fleet.wait()

    async def _welcome(self, replica: Replica) -> None:
        """Refuse a server that has no room for the jobs; unload what an earlier attempt of this run left there."""
        facts, wanted, settings = replica.facts, self._bounds.wanted, replica.dialect.settings
        for needed, has, setting, what in (
            (wanted.adapters, facts.max_loras, settings.max_loras, "adapters in one batch"),
            (wanted.versions, facts.max_cpu_loras, settings.max_cpu_loras, "versions of adapters in memory"),
            (wanted.rank, facts.max_rank, settings.max_rank, "as the largest rank"),
        ):
            if has is not None and has < needed:
                raise ServerUnfit(
                    f"{replica.url} has room for {has} {what}, and these jobs need {needed}: raise its {setting}"
                )
        try:
            await self._versions.tidy(replica)
        except EngineError as error:
            _log.warning("something of an earlier attempt stays loaded: %s", error)

    # --- versions ---------------------------------------------------------------------------------------------------------

    async def load_adapter(self, ref: AdapterRef, source: Path) -> None:
        """Make a version servable from a PEFT directory, which may go afterwards."""
        await self.take(ref, lambda staged: copy_adapter(source, staged))

    async def take(self, ref: AdapterRef, write: Callable[[Path], None]) -> None:
        """Make a version servable that is written into a directory of its own."""
        await self._versions.take(ref, write, self.fleet)

    async def unload_adapter(self, ref: AdapterRef) -> None:
        """Let go of a version."""
        self._versions.drop(ref, self.fleet)

    # --- requests ---------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Complete a prompt once per seed; see `RolloutEngine.generate`."""
        _refuse(request, self._versions, self._bounds, self.fleet)
        opened, chunks = _Open(request), asyncio.Queue[Chunk | BaseException]()
        self._open.add(opened)
        left = len(request.seeds)
        opened.tasks = tuple(self._begin(opened, index, chunks) for index in range(left))
        try:
            while left:
                item = await chunks.get()
                if isinstance(item, BaseException):
                    raise item
                left -= item.finish_reason is not None
                yield item
        finally:
            self._open.discard(opened)
            for limit in opened.limits:
                limit.cancel()
            await asyncio.gather(*opened.tasks, return_exceptions=True)

    def _begin(self, opened: _Open, index: int, chunks: asyncio.Queue[Chunk | BaseException]) -> asyncio.Task[None]:
        """Sample one completion; however that ends, its last chunk or the reason comes."""
        completion = Completion(opened.request, index, self._decode, self._bounds.vocabulary, self._owner)

        limit = anyio.CancelScope()
        opened.limits.append(limit)

        async def sampled() -> None:
            with limit:
                await self._sample(opened, completion, chunks)

        def ended(task: asyncio.Task[None]) -> None:
            if limit.cancelled_caught or task.cancelled():
                if not opened.aborted:
                    return
                completion.finish = completion.finish or FinishReason.ABORT
            elif (error := task.exception()) is not None:
                chunks.put_nowait(error)
                return
            chunks.put_nowait(completion.chunk())

        task = asyncio.create_task(sampled())
        task.add_done_callback(ended)
        return task

    async def _sample(
        self, opened: _Open, completion: Completion, chunks: asyncio.Queue[Chunk | BaseException]
    ) -> None:
        """Ask until the completion is whole."""
        request, failures = opened.request, 0
        while completion.finish is None:
            replica, mark = await self._choose_replica(opened), completion.mark()
            failure: EngineError
            try:
                await self._read(replica, completion, failures, chunks)
                continue
            except (ServerGone, ServerRefused) as error:  # what came is good
                self._trouble(replica, request.adapter, error)
                completion.settle()
                failure = error
            except ServerFault as error:
                if not completion.back(mark):
                    raise
                failure = error
            failures += 1
            if failures >= _ATTEMPTS and completion.finish is None:
                raise EngineError(f"request {request.id} failed {failures} times: {failure}") from failure
            opened.failed.add(replica.url)
            if opened.replica is replica:
                opened.replica = None
            if completion.finish is None:
                await asyncio.sleep(replica.clocks.retry * 2 ** (failures - 1))

    async def _read(
        self, replica: Replica, completion: Completion, failures: int, chunks: asyncio.Queue[Chunk | BaseException]
    ) -> None:
        """Ask a replica for what is wanted, and tell what comes where that is streamed."""
        request = completion.request
        if request.adapter is not None:
            await self._versions.hand(replica, request.adapter)
        async with aclosing(replica.complete(completion.ask(failures))) as pieces:
            async for piece in pieces:
                completion.take(piece)
                if completion.finish is not None and piece.finish is None:
                    return  # the server does not know that this is the end
                if request.stream and completion.finish is None and not request.sampling.grammar:
                    chunks.put_nowait(completion.chunk())

    def _trouble(self, replica: Replica, adapter: AdapterRef | None, error: ServerGone | ServerRefused) -> None:
        """Do what a failed request asks for; raises what will not get better."""
        if isinstance(error, ServerRefused) and error.status < 500 and error.status not in _BUSY:
            if adapter is None or not replica.dialect.unknown(error.status, error.detail):
                raise error
            replica.loaded.discard(adapter.served_name)  # it is handed over again
        else:
            self.fleet.doubt(replica)

    async def _choose_replica(self, opened: _Open) -> Replica:
        if opened.replica is None or not opened.replica.up:
            chosen = await self.fleet.choose(partial(_order, opened, self._versions, self._bounds.rows))
            if opened.replica is None or not opened.replica.up:  # another completion of the request may have chosen
                opened.replica = chosen
        return opened.replica

    async def score(self, token_ids: IntArray, adapter: AdapterRef | None) -> FloatArray:
        """Logprobs [T] of each token at temperature 1, the first 0; all homes answer, of the base all replicas, and agree."""
        name = None if adapter is None else adapter.served_name
        answers: dict[str, FloatArray] = {}
        for attempt in range(_ATTEMPTS):
            await self.fleet.wait()
            for replica in self.fleet.up if adapter is None else self._versions.places(adapter, self.fleet):
                try:
                    if adapter is not None:
                        await self._versions.hand(replica, adapter)
                    answers[replica.url] = await replica.logprobs(token_ids, name)
                except (ServerGone, ServerRefused) as error:
                    if attempt == _ATTEMPTS - 1:
                        raise
                    self._trouble(replica, adapter, error)
            if answers:
                break
            await asyncio.sleep(self.fleet.replicas[0].clocks.retry * 2**attempt)
        first = next(iter(answers.values()))
        for url, answer in answers.items():
            if not (gap := float(np.abs(answer - first).mean())) <= self._bounds.tolerance:
                raise ServerFault(
                    f"servers disagree on {name or 'the base'}: {url} differs by {gap:.3g} in the mean of a logprob"
                )
        if adapter is not None:
            self._versions.probed(adapter, token_ids, first)
        return first

    async def top_logprobs(self, token_ids: IntArray, adapter: AdapterRef | None, k: int) -> TopTokens:
        """The k likeliest tokens [T, k] of each place, best first, and their logprobs at temperature 1; one server answers."""
        name = None if adapter is None else adapter.served_name
        for attempt in range(_ATTEMPTS):
            replica = await self.fleet.choose(
                lambda one: (adapter is not None and not self._versions.near(adapter, one),)
            )
            try:
                if adapter is not None:
                    await self._versions.hand(replica, adapter)
                return await replica.top_logprobs(token_ids, name, k)
            except (ServerGone, ServerRefused) as error:
                self._trouble(replica, adapter, error)
                if attempt == _ATTEMPTS - 1:
                    raise
            await asyncio.sleep(replica.clocks.retry * 2**attempt)
        raise AssertionError

    async def abort(self, name: str) -> None:
        """End one request, or every request of a job; open completions finish with `abort` and keep their tokens."""
        for opened in self._open:
            if name in (opened.request.id, opened.request.job):
                opened.aborted = True
                for limit in opened.limits:
                    limit.cancel()

    async def close(self) -> None:
        """Finish unloading, let go of the servers, and end those that were started here."""
        await self._versions.close()
        await self.fleet.close()


def _refuse(request: GenerateRequest, versions: ServedVersions, bounds: ServerLimits, fleet: Fleet) -> None:
    n_prompt, n_new = len(request.prompt_ids), request.sampling.max_tokens
    where = f"request {request.id} of job {request.job!r}"
    if request.adapter is not None and request.adapter not in versions:
        raise EngineError(f"{where}: version {request.adapter.version} of {request.adapter.name!r} is not loaded")
    if n_prompt == 0 or not request.seeds:
        raise EngineError(f"{where} has an empty prompt or no seeds")
    if request.sampling.grammar and not schema_of(request.sampling.grammar):
        raise EngineError(f"{where} {_NO_CALLS}")
    if not 0 <= request.prompt_ids.min() <= request.prompt_ids.max() < bounds.vocabulary:
        raise EngineError(f"{where} has a token id outside the base's vocabulary of {bounds.vocabulary}")
    limits = [replica.facts.max_positions for replica in fleet.replicas]
    longest = min(bounds.max_positions, *(positions for positions in limits if positions is not None), 1 << 30)
    if n_prompt + n_new > longest:
        raise EngineError(
            f"{where}: a prompt of {n_prompt} tokens and {n_new} new ones exceed the {longest} positions of the server; "
            "lower sampling.max_tokens, shorten the prompt, or start the server with a longer context"
        )


def _order(opened: _Open, versions: ServedVersions, rows: int, replica: Replica) -> tuple[bool, ...]:
    """One that failed it comes last, for it would be idle; before it who is full; before these who had to load first."""
    adapter = opened.request.adapter
    far = adapter is not None and not versions.near(adapter, replica)
    return replica.url in opened.failed, replica.requests >= rows, far


class FileSync:
    """A `WeightSync` for servers: a new version is a PEFT directory that they are told to load."""

    def __init__(self, engine: ServerEngine, trainer: Trainer) -> None:
        self._engine, self._trainer = engine, trainer

    async def publish(self, name: str, ref: AdapterRef) -> None:
        """Make the trainer's current weights of adapter `name` servable under this reference."""
        await self._engine.take(ref, lambda staged: self._trainer.save_adapter(name, staged, optimizer=False))
