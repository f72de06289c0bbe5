"""Sampling on servers: vLLM or SGLang, one or several replicas, over HTTP.

A version is loaded on its job's home replicas before it is announced. A request goes to the home with the fewest
outstanding tokens. If all homes are full it goes to another replica, which first loads the version and must answer the
probe as before. Work that a replica leaves undone goes to another replica, or to the same one when it is back.
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

from motet.config.dialects import HttpRequest
from motet.core.errors import ContextFull, EngineError, ServerFault, ServerGone, ServerRefused, ServerUnfit
from motet.core.stops import Decode, met
from motet.core.token_ids import TokenIds
from motet.core.types import (
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
from motet.rollout.completion import Completion, check_request
from motet.rollout.fleet import Fleet
from motet.rollout.grammars import check_answer
from motet.rollout.replica import Replica
from motet.rollout.served_versions import ServedVersions, copy_adapter
from motet.rollout.server_process import ServerProcess
from motet.rollout.version_files import VersionFiles

_log = logging.getLogger(__name__)

_ATTEMPTS = 5
"""Attempts for a completion when answers fail; waiting for a replica that is away does not count."""
_BUSY = (408, 425, 429)
"""Status codes of temporary refusals."""
_NO_CALLS = (
    "asks for an answer that follows a schema after an open thought, or for one or a call (response_format with tools); "
    "servers support a schema only: remove the tools or response_format, or sample on the embedded engine"
)


@dataclass(frozen=True)
class Demand:
    """Capacity that the jobs need on each server."""

    adapters: int
    versions: int
    rank: int


@dataclass(frozen=True)
class ServerLimits:
    """Limits for requests, and wait times."""

    rows: int
    """Concurrent completions per replica."""
    vocabulary: TokenIds
    max_positions: int
    wanted: Demand
    tolerance: float
    """Largest mean difference between two replicas' logprobs of one probe."""
    wait_seconds: float
    """Longest wait for a replica if none is up."""


@dataclass(eq=False)
class _Open:
    """A running request, with all its completions on one replica."""

    request: GenerateRequest
    replica: Replica | None = None
    tasks: tuple[asyncio.Task[None], ...] = ()
    limits: list[anyio.CancelScope] = field(default_factory=list)
    """Cancel the tasks. These are anyio scopes because httpx shields its cleanup from them (see `ServerConnection`)."""
    aborted: bool = False
    failed: set[str] = field(default_factory=set)
    """Replicas that failed it; others are preferred."""


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
        sleep: HttpRequest | None = None,
    ) -> None:
        """Nothing is sent to a server before `ready`.

        `processes` are servers started here, by URL, and `files` are where versions are written. `run` marks this run's
        names on servers. Servers that sleep are asked `sleep`.
        """
        self.fleet = Fleet(replicas, processes, bounds.wait_seconds, self._welcome, sleep)
        self.versions = ServedVersions(files, bounds.tolerance, run)
        self._decode, self._bounds = decode, bounds
        self._owner = f"{run}.{secrets.token_hex(4)}"
        self._open: set[_Open] = set()

    @property
    def capacity(self) -> int:
        """Concurrent completions on all replicas."""
        return self._bounds.rows * len(self.fleet.replicas)

    def loads(self) -> list[ServerLoad]:
        """The load of each replica, for metrics and views."""
        return [replica.load_now() for replica in self.fleet.replicas]

    async def ready(self) -> None:
        """Wait until a server answers.

        Raises:
            EngineError: none answers, or none has room for the jobs; the message says what to change.
        """
        await self.fleet.wait()

    async def _welcome(self, replica: Replica) -> None:
        """Reject a server without room for the jobs; unload versions of earlier attempts of this run."""
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
            await self.versions.tidy(replica)
        except EngineError as error:
            _log.warning("a version of an earlier attempt stays loaded: %s", error)

    # --- versions ---------------------------------------------------------------------------------------------------------

    async def load_adapter(self, ref: AdapterRef, source: Path) -> None:
        """Make a version available from a PEFT directory, which may be deleted afterwards."""
        await self.take(ref, lambda staged: copy_adapter(source, staged))

    async def take(self, ref: AdapterRef, write: Callable[[Path], None]) -> None:
        """Make a version available that `write` writes into a given directory."""
        async with self.fleet.awake():
            await self.versions.take(ref, write, self.fleet)

    async def unload_adapter(self, ref: AdapterRef) -> None:
        """Drop a version."""
        self.versions.drop(ref, self.fleet)

    # --- requests ---------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Complete a prompt once per seed; see `RolloutEngine.generate`."""
        _refuse(request, self.versions, self._bounds, self.fleet)
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
        """Sample one completion; its last chunk or its error always arrives in `chunks`."""
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
        """Request until the completion is finished."""
        request, failures = opened.request, 0
        while completion.finish is None:
            replica, n_tokens = await self._choose_replica(opened), len(completion.tokens)
            failure: EngineError
            try:
                await self._read(replica, completion, failures, chunks)
                continue
            except (ServerGone, ServerRefused) as error:  # received tokens are valid
                self._trouble(replica, request.adapter, error)
                completion.settle()
                failure = error
            except ServerFault as error:
                if not completion.back(n_tokens):
                    raise
                failure = error
            failures += 1
            if failures >= _ATTEMPTS and completion.finish is None:
                raise ServerGone(f"request {request.id} failed {failures} times: {failure}") from failure
            opened.failed.add(replica.url)
            if opened.replica is replica:
                opened.replica = None
            if completion.finish is None:
                await asyncio.sleep(replica.clocks.retry * 2 ** (failures - 1))
        text, sampling = self._decode(completion.tokens) if request.sampling.grammar else "", request.sampling
        if sampling.grammar and completion.finish is FinishReason.STOP and not met(text, sampling.stop):
            await asyncio.to_thread(check_answer, sampling.grammar, text)

    async def _read(
        self, replica: Replica, completion: Completion, failures: int, chunks: asyncio.Queue[Chunk | BaseException]
    ) -> None:
        """Request the remaining tokens from a replica, and deliver them as they arrive for streams."""
        request = completion.request
        async with self.fleet.awake():
            if request.adapter is not None:
                await self.versions.hand(replica, request.adapter)
            async with aclosing(replica.complete(completion.ask(failures))) as pieces:
                async for piece in pieces:
                    completion.take(piece)
                    if completion.finish is not None and piece.finish is None:
                        return  # the server does not know that this is the end
                    if request.stream and completion.finish is None and not request.sampling.grammar:
                        chunks.put_nowait(completion.chunk())

    def _trouble(self, replica: Replica, adapter: AdapterRef | None, error: ServerGone | ServerRefused) -> None:
        """React to a failed request. Raises errors that a retry cannot fix."""
        if isinstance(error, ServerRefused) and error.status < 500 and error.status not in _BUSY:
            if adapter is None or not replica.dialect.unknown(error.status, error.detail):
                raise error
            replica.loaded.discard(adapter.served_name)  # the next attempt loads it again
        else:
            self.fleet.doubt(replica)

    async def _choose_replica(self, opened: _Open) -> Replica:
        if opened.replica is None or not opened.replica.up:
            chosen = await self.fleet.choose(partial(_order, opened, self.versions, self._bounds.rows))
            if opened.replica is None or not opened.replica.up:  # another completion of the request may have chosen one
                opened.replica = chosen
        return opened.replica

    async def score(self, token_ids: IntArray, adapter: AdapterRef | None) -> FloatArray:
        """Logprobs [T] of each token at temperature 1, the first 0.

        All homes (for the base: all replicas) answer and must agree.
        """
        name = None if adapter is None else adapter.served_name
        answers: dict[str, FloatArray] = {}
        for attempt in range(_ATTEMPTS):
            await self.fleet.wait()
            for replica in self.fleet.up if adapter is None else self.versions.places(adapter, self.fleet):
                try:
                    async with self.fleet.awake():
                        if adapter is not None:
                            await self.versions.hand(replica, adapter)
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
            self.versions.probed(adapter, token_ids, first)
        return first

    async def top_logprobs(self, token_ids: IntArray, adapter: AdapterRef | None, k: int) -> TopTokens:
        """The k most likely tokens [T, k] and their logprobs at temperature 1, best first; one server answers."""
        name = None if adapter is None else adapter.served_name
        for attempt in range(_ATTEMPTS):
            replica = await self.fleet.choose(
                lambda candidate: (adapter is not None and not self.versions.near(adapter, candidate),)
            )
            try:
                async with self.fleet.awake():
                    if adapter is not None:
                        await self.versions.hand(replica, adapter)
                    ids, logprobs = await replica.top_logprobs(token_ids, name, k)
                if (token := self._bounds.vocabulary.unknown(ids)) is not None:
                    raise ServerFault(f"{replica.url} finds the id {token} likely, which has no token")
                return ids, logprobs
            except (ServerGone, ServerRefused) as error:
                self._trouble(replica, adapter, error)
                if attempt == _ATTEMPTS - 1:
                    raise
            await asyncio.sleep(replica.clocks.retry * 2**attempt)
        raise AssertionError

    async def abort(self, name: str) -> None:
        """Abort one request, or every request of a job; open completions finish with `abort` and keep their tokens."""
        for opened in self._open:
            if name in (opened.request.id, opened.request.job):
                opened.aborted = True
                for limit in opened.limits:
                    limit.cancel()

    async def close(self) -> None:
        """Finish unloading, disconnect, and end the servers that were started here."""
        await self.versions.close()
        await self.fleet.close()


def _refuse(request: GenerateRequest, versions: ServedVersions, bounds: ServerLimits, fleet: Fleet) -> None:
    where = check_request(request, versions, bounds.vocabulary)
    if request.sampling.grammar and not schema_of(request.sampling.grammar):
        raise EngineError(f"{where} {_NO_CALLS}")
    n_prompt, n_new = len(request.prompt_ids), request.sampling.max_tokens
    limits = [replica.facts.max_positions for replica in fleet.replicas]
    longest = min(bounds.max_positions, *(positions for positions in limits if positions is not None), 1 << 30)
    if n_prompt + n_new > longest:
        cure = "lower sampling.max_tokens, shorten the prompt, or start the server with a longer context"
        raise ContextFull(n_prompt, n_new, longest, cure, f"{where}: ")


def _order(opened: _Open, versions: ServedVersions, rows: int, replica: Replica) -> tuple[bool, ...]:
    """Sort key: replicas that failed the request last, then full ones, then those that must load the version."""
    adapter = opened.request.adapter
    far = adapter is not None and not versions.near(adapter, replica)
    return replica.url in opened.failed, replica.requests >= rows, far
