"""The embedded engine spread over processes: a request goes whole to the place that has least to do.

Which place that is depends on time; the tokens do not, because a row's bits never depend on its company.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

from motet.errors import DeviceError
from motet.model.lora import AdapterWeights
from motet.rollout.embedded import EmbeddedEngine
from motet.rollout.sampler_link import SamplerLink
from motet.types import AdapterRef, Chunk, FloatArray, GenerateRequest, IntArray


class SpreadEngine:
    """A `RolloutEngine` on the trainer's own base and on sampling processes with copies of it."""

    def __init__(self, here: EmbeddedEngine, links: Sequence[SamplerLink]) -> None:
        self.here = here
        self.links = tuple(links)
        self._open: tuple[Counter[str], ...] = tuple(Counter() for _ in range(1 + len(links)))
        """Completions under way in each place, by adapter."""

    @property
    def capacity(self) -> int:
        """Rows of all decode batches."""
        return self.here.capacity * (1 + len(self.links))

    def install(self, ref: AdapterRef, weights: AdapterWeights) -> None:
        """Make a version servable everywhere."""
        self.here.install(ref, weights)
        for link in self.links:
            link.install(ref, weights)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Complete a prompt once per seed; see `RolloutEngine.generate`."""
        self.here.refuse(request)
        place = self._choose(request)
        opened, adapter = self._open[place], "" if request.adapter is None else request.adapter.name
        opened[adapter] += len(request.seeds)
        left = set(range(len(request.seeds)))
        try:
            async for chunk in self.here.generate(request) if place == 0 else self._there(request, place):
                if chunk.finish_reason is not None:
                    left.discard(chunk.index)
                    opened[adapter] -= 1
                yield chunk
        finally:
            opened[adapter] -= len(left)

    async def _there(self, request: GenerateRequest, place: int) -> AsyncIterator[Chunk]:
        """Sample in a process; what it leaves undone when it dies is sampled here, with the same bits."""
        left = list(range(len(request.seeds)))
        try:
            async for chunk in self.links[place - 1].generate(request):
                if chunk.finish_reason is not None:
                    left.remove(chunk.index)
                yield chunk
            return
        except DeviceError:
            if request.stream:  # some of its tokens may be out already
                raise
        rest = replace(request, seeds=tuple(request.seeds[index] for index in left))
        async for chunk in self.here.generate(rest):
            yield replace(chunk, index=left[chunk.index])

    def _choose(self, request: GenerateRequest) -> int:
        """The place with the fewest open completions; near a tie one that has the adapter's weights at hand already."""
        places = [0, *(index + 1 for index, link in enumerate(self.links) if link.ready)]
        loads = {place: self._open[place].total() for place in places}
        least = min(loads.values())
        adapter = "" if request.adapter is None else request.adapter.name
        others = any(count for place in places for name, count in self._open[place].items() if name != adapter)
        slack = len(request.seeds) if others else 0
        near = [place for place in places if loads[place] <= least + slack and self._open[place][adapter]]
        return min(near or places, key=lambda place: (loads[place], place))

    async def score(self, token_ids: IntArray, adapter: AdapterRef | None) -> FloatArray:
        """Logprobs [T] of each token given those before it, at temperature 1; the first is 0."""
        return await self.here.score(token_ids, adapter)

    async def load_adapter(self, ref: AdapterRef, source: Path) -> None:
        """Make a version servable from a PEFT directory."""
        self.install(ref, self.here.read(source))

    async def unload_adapter(self, ref: AdapterRef) -> None:
        """Let go of a version."""
        await self.here.unload_adapter(ref)
        for link in self.links:
            link.unload(ref)

    async def abort(self, name: str) -> None:
        """End one request, or every request of a job."""
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
