"""A rollout engine without torch, for tests of races, orders and faults.

It suspends wherever a real engine suspends for a thread or the network. Its seeded `jitter` varies the length, so each
seed gives another, reproducible order of events. Results do not depend on it: tokens are a function of the seed keys,
the positions and the version's weights.

It is stricter than required: it refuses reused references and unloading a version that a request reads, and it counts
calls.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np

from motet.core import seeds
from motet.core.errors import ContextFull, EngineError
from motet.core.stops import ending, met
from motet.core.token_ids import TokenIds
from motet.core.types import (
    AdapterRef,
    Chunk,
    FinishReason,
    FloatArray,
    GenerateRequest,
    IntArray,
    SamplingParams,
    TopTokens,
)
from motet.rollout.completion import GrowingCompletion, check_request
from tests.support.fake_base import VOCABULARY, FakeAdapter, FakePolicy, FakeTokenizer, Vector, read_adapter

_DECODE = FakeTokenizer().decode


class FakeEngine:
    """A `RolloutEngine` over the fake base.

    Args:
        capacity: completions sampled at a time; others wait.
        jitter: seed of the length of each suspension, 1 to 7 turns of the event loop; None suspends exactly once.
        seconds: sleep in each turn of a suspension, for tests of time limits.
        max_positions: largest sum of prompt and completion tokens.
    """

    def __init__(
        self,
        *,
        capacity: int = 16,
        jitter: int | None = None,
        seconds: float = 0.0,
        max_positions: int = 4096,
    ) -> None:
        self.loads: Counter[AdapterRef] = Counter()
        self.unloads: Counter[AdapterRef] = Counter()
        self.requests: list[GenerateRequest] = []
        """Every accepted request, in order."""
        self.peak = 0
        """Most completions requested at one time."""
        self.capacity = capacity
        """Recommended number of concurrent completions."""
        self._random = None if jitter is None else random.Random(jitter)
        self._seconds = seconds
        self._max_positions = max_positions
        self._base = FakePolicy(None)
        self._policies: dict[AdapterRef, FakePolicy] = {}
        self._readers: Counter[AdapterRef] = Counter()
        self._rows = asyncio.Semaphore(capacity)
        self._open: dict[tuple[str, str], asyncio.Event] = {}
        self._asked = 0

    @property
    def loaded(self) -> frozenset[AdapterRef]:
        """The loaded versions."""
        return frozenset(self._policies)

    def install(self, ref: AdapterRef, adapter: FakeAdapter) -> None:
        """Make a version available from its weights.

        Raises:
            EngineError: the reference was used before; a reference always means the same weights.
        """
        if self.loads[ref]:
            raise EngineError(f"version {ref.version} of adapter {ref.name!r} was loaded before")
        self.loads[ref] += 1
        self._policies[ref] = FakePolicy(adapter)

    async def load_adapter(self, ref: AdapterRef, source: Path) -> None:
        """Make a version available from a directory written by `FakeTrainer`."""
        await self.suspend()
        self.install(ref, read_adapter(source))

    async def unload_adapter(self, ref: AdapterRef) -> None:
        """Unload a version.

        Raises:
            EngineError: it is not loaded, or a request reads it.
        """
        await self.suspend()
        self._policy(ref, "unload")
        if self._readers[ref]:
            raise EngineError(f"version {ref.version} of adapter {ref.name!r} is unloaded while a request reads it")
        del self._policies[ref]
        self.unloads[ref] += 1

    async def score(self, token_ids: IntArray, adapter: AdapterRef | None) -> FloatArray:
        """Logprobs [T] of each token given those before it, at temperature 1; the first is 0."""
        policy = self._policy(adapter, "score")
        await self.suspend()
        return policy.logprobs(token_ids)

    async def top_logprobs(self, token_ids: IntArray, adapter: AdapterRef | None, k: int) -> TopTokens:
        """The k most likely tokens [T, k] at each position, best first, and their logprobs."""
        policy = self._policy(adapter, "score")
        await self.suspend()
        ids, logprobs = np.zeros((len(token_ids), k), np.int32), np.zeros((len(token_ids), k), np.float32)
        for place in range(1, len(token_ids)):
            row = policy.row(int(token_ids[place - 1]), 1.0)
            ids[place] = np.argsort(-row, kind="stable")[:k]
            logprobs[place] = row[ids[place]]
        return ids, logprobs

    async def abort(self, name: str) -> None:
        """Abort one request, or every request of a job; open completions finish with `abort` and keep their tokens."""
        for (request, job), aborted in self._open.items():
            if name in (request, job):
                aborted.set()
        await self.suspend()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Complete a prompt once per seed; completions end in any order."""
        self._refuse(request)
        policy = self._policy(request.adapter, request.id)
        self.requests.append(request)
        aborted = self._open[request.id, request.job] = asyncio.Event()
        chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        self._hold(request, 1)
        rows = [
            asyncio.create_task(self._complete(policy, request, index, chunks.put_nowait, aborted))
            for index in range(len(request.seeds))
        ]
        try:
            left = len(rows)
            while left:
                chunk = await chunks.get()
                left -= chunk.finish_reason is not None
                yield chunk
        finally:
            for row in rows:
                row.cancel()
            self._hold(request, -1)
            del self._open[request.id, request.job]

    async def suspend(self) -> None:
        """Yield to other tasks, for a length set by the jitter."""
        turns = 1 if self._random is None else self._random.randint(1, 7)
        for _ in range(turns):
            await asyncio.sleep(self._seconds)

    def _hold(self, request: GenerateRequest, change: int) -> None:
        self._asked += change * len(request.seeds)
        self.peak = max(self.peak, self._asked)
        if request.adapter is not None:
            self._readers[request.adapter] += change

    def _policy(self, ref: AdapterRef | None, what: str) -> FakePolicy:
        if ref is None:
            return self._base
        if ref not in self._policies:
            raise EngineError(f"{what}: version {ref.version} of {ref.name!r} is not loaded")
        return self._policies[ref]

    def _refuse(self, request: GenerateRequest) -> None:
        where = check_request(request, self._policies, TokenIds(VOCABULARY))
        longest = len(request.prompt_ids) + request.sampling.max_tokens
        if (request.id, request.job) in self._open:
            raise EngineError(f"{where} has the id of a request that is still open")
        if longest > self._max_positions:
            n_prompt, cure = len(request.prompt_ids), "lower sampling.max_tokens"
            raise ContextFull(n_prompt, longest - n_prompt, self._max_positions, cure, f"{where}: ")

    async def _complete(
        self,
        policy: FakePolicy,
        request: GenerateRequest,
        index: int,
        emit: Callable[[Chunk], None],
        aborted: asyncio.Event,
    ) -> None:
        """Sample one completion and emit it, whole or token by token."""
        writing = GrowingCompletion()
        async with self._rows:
            await self.suspend()
            while writing.finish is None:
                if aborted.is_set():
                    writing.finish = FinishReason.ABORT
                else:
                    _sample(policy, request, request.seeds[index], writing)
                if request.stream or writing.finish is not None:
                    emit(writing.undelivered(request, index, _DECODE))
                await self.suspend()


def _sample(policy: FakePolicy, request: GenerateRequest, key: int, writing: GrowingCompletion) -> None:
    """Draw the next token; its random number depends on the key and the position only."""
    sampling = request.sampling
    row = policy.row(writing.tokens[-1] if writing.tokens else int(request.prompt_ids[-1]), sampling.temperature)
    if not np.isfinite(row).all():
        writing.finish, writing.error = FinishReason.ERROR, "the logits are not finite; lower optimizer.lr"
        return
    token = int(row.argmax())
    if sampling.temperature > 0:
        draw = seeds.uniforms(np.array([key], np.uint64), np.array([len(writing.tokens)], np.uint64))[0]
        cumulated = np.cumsum(_truncated(np.exp(row), sampling))
        token = int(np.searchsorted(cumulated, draw * cumulated[-1], side="right"))
    writing.tokens.append(token)
    writing.logprobs.append(float(row[token]))
    stopped = met(_DECODE(writing.tokens), sampling.stop)
    writing.finish = FinishReason.STOP if stopped else ending(writing.tokens, sampling)


def _truncated(probabilities: Vector, sampling: SamplingParams) -> Vector:
    """Set the probabilities of tokens excluded by top-k, top-p or min-p to zero."""
    if not sampling.truncates:
        return probabilities
    order = np.argsort(-probabilities, kind="stable")
    before = np.cumsum(probabilities[order]) - probabilities[order]
    kept = (before < sampling.top_p) & (probabilities[order] >= sampling.min_p * probabilities.max())
    kept[sampling.top_k or len(kept) :] = False
    kept[0] = True
    truncated = np.zeros_like(probabilities)
    truncated[order[kept]] = probabilities[order[kept]]
    return truncated


class FakeSync:
    """A `WeightSync` from a `FakeTrainer` to a `FakeEngine`: passes the weights after a suspension."""

    def __init__(self, engine: FakeEngine, weights: Callable[[str], FakeAdapter]) -> None:
        self._engine = engine
        self._weights = weights

    async def publish(self, name: str, ref: AdapterRef) -> None:
        """Make the trainer's current weights of adapter `name` available under this reference."""
        weights = self._weights(name)
        await self._engine.suspend()
        self._engine.install(ref, weights)
