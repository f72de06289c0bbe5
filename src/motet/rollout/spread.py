"""Spreads the embedded engine over processes: each request goes to the least loaded one as soon as a row is free.

The choice depends on timing; the tokens do not, because a row's bits never depend on other rows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from motet.core.errors import DeviceError
from motet.core.types import AdapterRef, Chunk, FloatArray, GenerateRequest, IntArray, TopTokens
from motet.model.lora import AdapterWeights
from motet.rollout.embedded import EmbeddedEngine
from motet.rollout.sampler_link import SamplerLink
from motet.rollout.sequences import aborted


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A request that waits for a free row."""

    request: GenerateRequest
    turn: asyncio.Future[int | None]
    """Index of its process; None if it was aborted."""


class SpreadEngine:
    """A `RolloutEngine` on the trainer's own base and on sampling processes with copies of it."""

    def __init__(self, here: EmbeddedEngine, links: Sequence[SamplerLink]) -> None:
        self.here = here
        self.links = tuple(links)
        self._open: tuple[Counter[str], ...] = tuple(Counter() for _ in range(1 + len(links)))
        """Open completions in each process, by adapter."""
        self._rows = Counter[str]()
        """Open completions in all processes, by tenant."""
        self._shares: dict[str, float] = {}
        """Shares of the tenants that have open completions."""
        self._waiting: deque[_Waiting] = deque()
        self._kept: dict[str, int] = {}
        """Index of the process that sampled each episode's last turn, and may have kept its sequence."""
        for link in links:
            link.on_ready = self._start_waiting_soon

    @property
    def capacity(self) -> int:
        """Rows of the decode batches of all processes."""
        return self.here.capacity * (1 + len(self.links))

    def _samplers(self) -> list[int]:
        return [0, *(index + 1 for index, link in enumerate(self.links) if link.ready)]

    def install(self, ref: AdapterRef, weights: AdapterWeights) -> None:
        """Make a version available in all processes."""
        self.here.install(ref, weights)
        for link in self.links:
            link.install(ref, weights)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Complete a prompt once per seed; see `RolloutEngine.generate`."""
        self.here.refuse(request)
        sampler = await self._turn(request)
        if sampler is None:
            for index in range(len(request.seeds)):
                yield aborted(index)
            return
        left = set(range(len(request.seeds)))
        try:
            async for chunk in self.here.generate(request) if sampler == 0 else self._there(request, sampler):
                if chunk.finish_reason is not None:
                    left.discard(chunk.index)
                    self._opened(sampler, request, -1)
                    self._start_waiting()
                yield chunk
        finally:
            self._opened(sampler, request, -len(left))
            self._start_waiting()

    async def _turn(self, request: GenerateRequest) -> int | None:
        """Wait for a process with a free row, after the tenant's earlier requests; counts the request's rows there."""
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._start_waiting()
        try:
            return await waiting.turn
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif not waiting.turn.cancelled() and (sampler := waiting.turn.result()) is not None:
                self._opened(sampler, request, -len(request.seeds))
                self._start_waiting()
            raise

    def _opened(self, sampler: int, request: GenerateRequest, completions: int) -> None:
        self._open[sampler][_adapter(request)] += completions
        self._rows[request.tenant] += completions
        self._shares[request.tenant] = request.share
        if not self._rows[request.tenant]:
            del self._rows[request.tenant], self._shares[request.tenant]

    def _start_waiting(self) -> None:
        """Assign processes to waiting requests while rows are free; tenants with the fewest rows per share come first.

        Without a free row, only tenants within their share start; the process then preempts rows of other tenants.
        """
        while self._waiting:
            waiting = min(self._waiting, key=lambda item: self._rows[item.request.tenant] / item.request.share)
            if not (self._with_free_rows() or self._within_share(waiting.request)):
                return
            self._waiting.remove(waiting)
            if waiting.turn.done():
                continue
            sampler = self._choose(waiting.request)
            self._opened(sampler, waiting.request, len(waiting.request.seeds))
            self._kept.update(dict.fromkeys(waiting.request.episodes, sampler))
            waiting.turn.set_result(sampler)

    def _within_share(self, request: GenerateRequest) -> bool:
        shares = {item.request.tenant: item.request.share for item in self._waiting}
        shares = self._shares | shares
        most = len(self._samplers()) * self.here.capacity * request.share / sum(shares.values())
        return len(shares) > 1 and self._rows[request.tenant] + len(request.seeds) <= most

    def _start_waiting_soon(self) -> None:
        """`_start_waiting` from another thread, after a process became ready."""
        with contextlib.suppress(IndexError, RuntimeError):  # nothing waits, or the loop has ended
            self._waiting[0].turn.get_loop().call_soon_threadsafe(self._start_waiting)

    async def _there(self, request: GenerateRequest, sampler: int) -> AsyncIterator[Chunk]:
        """Sample in another process; if it dies, this process samples the remaining completions, with the same bits."""
        left = list(range(len(request.seeds)))
        n_tokens, n_letters = Counter[int](), Counter[int]()
        try:
            async for chunk in self.links[sampler - 1].generate(request):
                if chunk.finish_reason is not None:
                    left.remove(chunk.index)
                n_tokens[chunk.index] += len(chunk.token_ids)
                n_letters[chunk.index] += len(chunk.text)
                yield chunk
            return
        except DeviceError:
            pass
        rest = replace(
            request,
            seeds=tuple(request.seeds[index] for index in left),
            episodes=tuple(request.episodes[index] for index in left if request.episodes),
        )
        async for again in self.here.generate(rest):
            chunk = _after(replace(again, index=left[again.index]), n_tokens, n_letters)
            if len(chunk.token_ids) or chunk.finish_reason is not None:
                yield chunk

    def _with_free_rows(self) -> list[int]:
        return [sampler for sampler in self._samplers() if self._open[sampler].total() < self.here.capacity]

    def _choose(self, request: GenerateRequest) -> int:
        """Of the processes with a free row, or else of all: that of the episode's last turn, or the least loaded one.

        If loads are almost equal, prefer a process that is sampling with the adapter already.
        """
        samplers = self._with_free_rows() or self._samplers()
        if (before := self._kept.get(request.episodes[0]) if request.episodes else None) in samplers:
            return before
        loads = {sampler: self._open[sampler].total() for sampler in samplers}
        least = min(loads.values())
        adapter = _adapter(request)
        others = any(count for sampler in samplers for name, count in self._open[sampler].items() if name != adapter)
        slack = len(request.seeds) if others else 0
        near = [sampler for sampler in samplers if loads[sampler] <= least + slack and self._open[sampler][adapter]]
        return min(near or samplers, key=lambda sampler: (loads[sampler], sampler))

    async def score(self, token_ids: IntArray, adapter: AdapterRef | None) -> FloatArray:
        """Logprobs [T] of each token given those before it, at temperature 1; the first is 0."""
        return await self.here.score(token_ids, adapter)

    async def top_logprobs(self, token_ids: IntArray, adapter: AdapterRef | None, k: int) -> TopTokens:
        """The k most likely tokens [T, k] at each position, best first, and their logprobs."""
        return await self.here.top_logprobs(token_ids, adapter, k)

    async def load_adapter(self, ref: AdapterRef, source: Path) -> None:
        """Make a version available from a PEFT directory."""
        self.install(ref, await asyncio.to_thread(self.here.read, source))

    async def unload_adapter(self, ref: AdapterRef) -> None:
        """Drop a version once no waiting request needs it."""
        while turns := [waiting.turn for waiting in self._waiting if waiting.request.adapter == ref]:
            await asyncio.wait(turns)
        await self.here.unload_adapter(ref)
        for link in self.links:
            link.unload(ref)

    async def abort(self, name: str) -> None:
        """Abort one request, or every request of a job, or drop the kept sequences of an episode."""
        self._kept.pop(name, None)
        for waiting in [item for item in self._waiting if name in (item.request.id, item.request.job)]:
            self._waiting.remove(waiting)
            if not waiting.turn.done():
                waiting.turn.set_result(None)
        await self.here.abort(name)
        for link in self.links:
            link.abort(name)

    def turn(self, training: bool) -> None:
        """Called when the device turns to training, which uses every core, or back to sampling."""
        for link in self.links:
            link.hold(training)

    def notes(self) -> list[str]:
        """Why processes do not take part; one message each."""
        return [link.note for link in self.links if link.note]

    def close(self) -> None:
        """End the processes."""
        for link in self.links:
            link.close()


def _after(chunk: Chunk, n_tokens: Counter[int], n_letters: Counter[int]) -> Chunk:
    """What a chunk has beyond tokens and letters that were delivered before; takes off those that it has."""
    known, read = min(n_tokens[chunk.index], len(chunk.token_ids)), min(n_letters[chunk.index], len(chunk.text))
    n_tokens[chunk.index] -= known
    n_letters[chunk.index] -= read
    return replace(
        chunk,
        token_ids=chunk.token_ids[known:],
        logprobs=chunk.logprobs[known:],
        versions=chunk.versions[known:],
        text=chunk.text[read:],
    )


def _adapter(request: GenerateRequest) -> str:
    return "" if request.adapter is None else request.adapter.name
