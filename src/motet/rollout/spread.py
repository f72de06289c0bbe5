"""The embedded engine spread over processes: a request goes whole to the place that has least to do, once one has a free row.

Which place that is depends on time; the tokens do not, because a row's bits never depend on its company.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from motet.errors import DeviceError
from motet.model.lora import AdapterWeights
from motet.rollout.embedded import EmbeddedEngine
from motet.rollout.sampler_link import SamplerLink
from motet.rollout.sequences import aborted
from motet.types import AdapterRef, Chunk, FloatArray, GenerateRequest, IntArray, TopTokens


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A request that no place has a row for."""

    request: GenerateRequest
    turn: asyncio.Future[int | None]
    """Its place; None if it was aborted."""


class SpreadEngine:
    """A `RolloutEngine` on the trainer's own base and on sampling processes with copies of it."""

    def __init__(self, here: EmbeddedEngine, links: Sequence[SamplerLink]) -> None:
        self.here = here
        self.links = tuple(links)
        self._open: tuple[Counter[str], ...] = tuple(Counter() for _ in range(1 + len(links)))
        """Completions under way in each place, by adapter."""
        self._rows = Counter[str]()
        """The same of all places, by tenant."""
        self._shares: dict[str, float] = {}
        """Of tenants with rows."""
        self._waiting: deque[_Waiting] = deque()
        self._kept: dict[str, int] = {}
        """Where each episode had its last turn, which may be kept there."""
        for link in links:
            link.on_ready = self._start_waiting_soon

    @property
    def capacity(self) -> int:
        """Rows of all decode batches."""
        return self.here.capacity * (1 + len(self.links))

    def _samplers(self) -> list[int]:
        return [0, *(index + 1 for index, link in enumerate(self.links) if link.ready)]

    def install(self, ref: AdapterRef, weights: AdapterWeights) -> None:
        """Make a version servable everywhere."""
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
        """Wait for a place with a free row, behind those of its tenant; its rows are counted there from then on."""
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
        """Give those who wait a place, as far as there are free rows: first those of the tenant that has the fewest.

        Without a free row only those begin whose tenants stay within their shares: others' rows give way to them there.
        """
        while self._waiting:
            waiting = min(self._waiting, key=lambda one: self._rows[one.request.tenant] / one.request.share)
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
        shares = {one.request.tenant: one.request.share for one in self._waiting}
        shares = self._shares | shares
        most = len(self._samplers()) * self.here.capacity * request.share / sum(shares.values())
        return len(shares) > 1 and self._rows[request.tenant] + len(request.seeds) <= most

    def _start_waiting_soon(self) -> None:
        """The same from another thread: a process has become ready."""
        with contextlib.suppress(IndexError, RuntimeError):  # nobody waits, or their loop has ended
            self._waiting[0].turn.get_loop().call_soon_threadsafe(self._start_waiting)

    async def _there(self, request: GenerateRequest, sampler: int) -> AsyncIterator[Chunk]:
        """Sample in a process; what it leaves undone when it dies is sampled here, with the same bits."""
        left = list(range(len(request.seeds)))
        try:
            async for chunk in self.links[sampler - 1].generate(request):
                if chunk.finish_reason is not None:
                    left.remove(chunk.index)
                yield chunk
            return
        except DeviceError:
            if request.stream:  # some of its tokens may be out already
                raise
        rest = replace(
            request,
            seeds=tuple(request.seeds[index] for index in left),
            episodes=tuple(request.episodes[index] for index in left if request.episodes),
        )
        async for chunk in self.here.generate(rest):
            yield replace(chunk, index=left[chunk.index])

    def _with_free_rows(self) -> list[int]:
        return [sampler for sampler in self._samplers() if self._open[sampler].total() < self.here.capacity]

    def _choose(self, request: GenerateRequest) -> int:
        """The place where the episode was before, or the one with the fewest open completions; with a free row if any has.

        Near a tie it is one that has the adapter's weights at hand already.
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
        """The k likeliest tokens [T, k] at each place, best first, and their logprobs."""
        return await self.here.top_logprobs(token_ids, adapter, k)

    async def load_adapter(self, ref: AdapterRef, source: Path) -> None:
        """Make a version servable from a PEFT directory."""
        self.install(ref, self.here.read(source))

    async def unload_adapter(self, ref: AdapterRef) -> None:
        """Let go of a version, once nobody waits to begin with it."""
        while turns := [waiting.turn for waiting in self._waiting if waiting.request.adapter == ref]:
            await asyncio.wait(turns)
        await self.here.unload_adapter(ref)
        for link in self.links:
            link.unload(ref)

    async def abort(self, name: str) -> None:
        """End one request, or every request of a job; or let go of what is kept of an episode."""
        self._kept.pop(name, None)
        for waiting in [one for one in self._waiting if name in (one.request.id, one.request.job)]:
            self._waiting.remove(waiting)
            if not waiting.turn.done():
                waiting.turn.set_result(None)
        await self.here.abort(name)
        for link in self.links:
            link.abort(name)

    def turn(self, training: bool) -> None:
        """The device turns to training, which wants every core, or back to sampling."""
        for link in self.links:
            link.hold() if training else link.go()

    def notes(self) -> list[str]:
        """Places that do not take part, and why."""
        return [link.note for link in self.links if link.note]

    def close(self) -> None:
        """End the processes."""
        for link in self.links:
            link.close()


def _adapter(request: GenerateRequest) -> str:
    return "" if request.adapter is None else request.adapter.name
