"""The embedded engine: the training base also samples, in one process, on one device.

Publishing a version passes a pointer (`install`). Requests may name any installed version, in any mix.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from motet.core.device import DECODES, Device
from motet.core.errors import ContextFull, DeviceError, DeviceLost, EngineError
from motet.core.types import AdapterRef, Chunk, FloatArray, GenerateRequest, IntArray, TopTokens
from motet.model.distribution import Distribution
from motet.model.kv_cache import KVCache
from motet.model.lora import AdapterWeights
from motet.model.lora_model import LoraModel
from motet.model.peft_io import flatten, read_adapter
from motet.protocols import RolloutEngine, Trainer
from motet.rollout.completion import check_request
from motet.rollout.decoder import Decoder
from motet.rollout.grammars import Grammars
from motet.rollout.sequences import Prompt, SampledSequence, aborted, payer_of

_SCORED_ROWS = 256
"""Positions whose logits are in memory at a time."""


class EmbeddedEngine:
    """A `RolloutEngine` on the trainer's own base."""

    def __init__(
        self,
        base: LoraModel,
        device: Device,
        *,
        max_rows: int,
        kv_tokens: int,
        prefill_tokens: int,
        kept_tokens: int = 0,
        host_kv_bytes: int = 0,
        share: float = 1.0,
    ) -> None:
        """At most `kept_tokens` tokens of the KV cache are kept between turns of episodes.

        `host_kv_bytes` of host memory hold preempted sequences. `share` scales the measured decoding time if other
        processes sample too.
        """
        self.base = base
        self.cache = KVCache(
            max(1, kv_tokens // base.block_size),
            base.block_size,
            base.device,
            clean=base.attention.reads_past_end,
            slots=max_rows + 1,
        )
        self._grammars = Grammars(base.info, device.wake, lambda: device.turns.company)
        self.decoder = Decoder(
            base,
            self.cache,
            max_rows=max_rows,
            prefill_tokens=prefill_tokens,
            kept_blocks=kept_tokens // base.block_size,
            host_bytes=host_kv_bytes,
            turns=device.turns,
            grammars=self._grammars,
        )
        self._preparing: dict[str, str] = {}
        """Requests whose grammars are being compiled, with their jobs; aborted ones are removed."""
        self._device = device
        self._share = share
        self._versions: dict[AdapterRef, AdapterWeights] = {}
        self._arrivals: list[Prompt] = []
        self._aborts: set[str] = set()
        device.add_tick(self._tick, self._land)

    @property
    def capacity(self) -> int:
        """Rows of the decode batch."""
        return self.decoder.rows.most

    def install(self, ref: AdapterRef, weights: AdapterWeights) -> None:
        """Make a version available from tensors.

        Raises:
            EngineError: the reference is in use; a reference always means the same weights.
        """
        if ref in self._versions:
            raise EngineError(f"version {ref.version} of adapter {ref.name!r} is loaded already")
        self._versions[ref] = weights

    async def load_adapter(self, ref: AdapterRef, source: Path) -> None:
        """Make a version available from a PEFT directory."""
        self.install(ref, await asyncio.to_thread(self.read, source))

    def read(self, source: Path) -> AdapterWeights:
        """Read weights from a PEFT directory.

        Raises:
            AdapterError: the files do not fit the base; the message names the mismatch.
        """
        peft = read_adapter(source)
        layout = self.base.adapter_layout(peft.target_modules, peft.rank)
        masters = flatten(peft, self.base, layout, source).to(self.base.device)
        return AdapterWeights.from_masters(layout, peft.scale, masters, self.base.dtype)

    async def unload_adapter(self, ref: AdapterRef) -> None:
        """Drop a version; running requests keep a reference to its weights."""
        if self._versions.pop(ref, None) is not None:
            await self._device.run(lambda: self._forget(ref), light=True)

    def _forget(self, ref: AdapterRef) -> None:
        self.decoder.runner.stacks.forget()
        self.decoder.forget_version(ref)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Complete a prompt once per seed; see `RolloutEngine.generate`."""
        self.refuse(request)
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        weights = None if request.adapter is None else self._versions[request.adapter]
        prompt = Prompt(request, weights, lambda item: _deliver(loop, chunks, item))
        prompt.waiting = [SampledSequence(prompt, index, key) for index, key in enumerate(request.seeds)]
        if request.sampling.grammar:
            self._preparing[request.id] = request.job
            try:
                grammar = await self._grammars.of(request.sampling, payer_of(request))
            finally:
                gone = self._preparing.pop(request.id, None) is None
            if gone:
                for index in range(len(request.seeds)):
                    yield aborted(index)
                return
            for sequence in prompt.waiting:
                sequence.grammar = grammar.begun()
        self._arrivals.append(prompt)
        self._device.require()  # behind it: whoever loses the device tells all that have arrived
        self._device.wake()
        left = len(request.seeds)
        try:
            while left:
                chunk = await chunks.get()
                if isinstance(chunk, Exception):
                    left = 0
                    if isinstance(chunk, DeviceLost):
                        raise chunk
                    raise DeviceError(f"the device failed while sampling: {chunk!r}") from chunk
                left -= chunk.finish_reason is not None
                yield chunk
        finally:
            if left:
                await self.abort(request.id)

    async def abort(self, name: str) -> None:
        """Abort one request, or every request of a job, or drop the kept sequences of an episode."""
        self._preparing = {request: job for request, job in self._preparing.items() if name not in (request, job)}
        self._aborts.add(name)
        self._device.wake()

    async def score(self, token_ids: IntArray, adapter: AdapterRef | None) -> FloatArray:
        """Logprobs [T] of each token given those before it, at temperature 1; the first is 0."""
        weights = self._weights(adapter)
        return await self._device.run(lambda: self._score(token_ids, weights), light=True)

    async def top_logprobs(self, token_ids: IntArray, adapter: AdapterRef | None, k: int) -> TopTokens:
        """The k most likely tokens [T, k] at each position, best first, and their logprobs at temperature 1."""
        weights = self._weights(adapter)
        return await self._device.run(lambda: self._top_logprobs(token_ids, weights, k), light=True)

    def _weights(self, adapter: AdapterRef | None) -> AdapterWeights | None:
        if adapter is not None and adapter not in self._versions:
            raise EngineError(f"version {adapter.version} of adapter {adapter.name!r} is not loaded")
        return None if adapter is None else self._versions[adapter]

    @torch.no_grad()
    def _score(self, token_ids: IntArray, weights: AdapterWeights | None) -> FloatArray:
        scored = [next_N.logprobs(wanted_N).cpu().numpy() for next_N, wanted_N in self._following(token_ids, weights)]
        return np.concatenate([np.zeros(1, np.float32), *scored])[: len(token_ids)]

    @torch.no_grad()
    def _top_logprobs(self, token_ids: IntArray, weights: AdapterWeights | None, k: int) -> TopTokens:
        ids, logprobs = [np.zeros((1, k), np.int32)], [np.zeros((1, k), np.float32)]
        for following, _ in self._following(token_ids, weights):
            top_NK = torch.topk(following.logits_NV, k, dim=-1).indices
            ids.append(top_NK.cpu().numpy().astype(np.int32))
            ranks = [following.logprobs(top_NK[:, rank]).cpu().numpy() for rank in range(k)]
            logprobs.append(np.stack(ranks, axis=1))
        return np.concatenate(ids)[: len(token_ids)], np.concatenate(logprobs)[: len(token_ids)]

    def _following(
        self, token_ids: IntArray, weights: AdapterWeights | None
    ) -> Iterator[tuple[Distribution, torch.Tensor]]:
        """Yield the distribution after each token of a prompt, and the token that follows, in blocks of padded rows."""
        base, n_tokens = self.base, len(token_ids)
        tokens_T = base.pad(torch.from_numpy(token_ids.astype(np.int64)).to(base.device))
        positions_T = base.pad(torch.arange(n_tokens, device=base.device))
        pad = len(tokens_T) - n_tokens
        attention = base.attention.packed([n_tokens, *([pad] if pad else [])])
        routing = self.decoder.runner.stacks.routing([(weights, 0, n_tokens)], base.device)
        with base.routed(routing):
            hidden_TD = base.hidden(tokens_T, positions_T, attention)
        wanted_T = torch.cat([tokens_T[1:], tokens_T[:1]])
        for hidden_ND, wanted_N in zip(hidden_TD.split(_SCORED_ROWS), wanted_T.split(_SCORED_ROWS), strict=True):
            # leave the context before yielding: the consumer may never resume this generator
            with base.routed(routing):
                logits_NV = base.logits(hidden_ND)
            yield Distribution.of(logits_NV, [1.0], base.math), wanted_N

    def refuse(self, request: GenerateRequest) -> None:
        """Raise if a request can never be served.

        Raises:
            EngineError: see `check_request`; ContextFull if it is too long.
        """
        where = check_request(request, self._versions, self.base.info.vocabulary)
        n_prompt, n_new = len(request.prompt_ids), request.sampling.max_tokens
        longest = min(self.base.info.max_positions, self.cache.n_blocks * self.cache.block_size)
        if n_prompt + n_new > longest:
            of_cache = longest < self.base.info.max_positions
            cure = f"lower sampling.max_tokens, shorten the prompt{', raise engine.kv_tokens' if of_cache else ''} or drop it"
            raise ContextFull(n_prompt, n_new, longest, f"{cure} with data.max_prompt_tokens", f"{where}: ")

    def _tick(self) -> bool:
        started = time.perf_counter()
        full = False
        try:
            # Taken first: what is aborted from now on may not have been added.
            aborts = {self._aborts.pop() for _ in range(len(self._aborts))}
            while self._arrivals:
                self.decoder.add(self._arrivals.pop(0))
            if aborts:
                self.decoder.abort(aborts)
            if self.decoder.idle:
                self._device.turns.come((), DECODES)
                return False
            full = self.decoder.rows.free <= 0
            self.decoder.tick()
        except Exception as error:
            self._fail(error)
        self._report(started, full=full)
        return not (self.decoder.idle or self.decoder.stuck)

    def _land(self) -> None:
        started, full = time.perf_counter(), self.decoder.rows.free <= 0
        try:
            self.decoder.pause()
        except Exception as error:
            self._fail(error)
        self._report(started, full=full)

    def _fail(self, error: Exception) -> None:
        """Inform all callers, which wait in other threads."""
        error = self._device.examine(error)
        waiting = self.decoder.fail_all()
        if isinstance(error, DeviceLost):  # no tick takes them any more
            waiting += self._arrivals
        for prompt in waiting:
            prompt.emit(error)

    def _report(self, started: float, *, full: bool) -> None:
        spent = (time.perf_counter() - started) * self._share
        by_job, self.decoder.spent = self.decoder.spent, Counter()
        self._device.busy.decoded(spent, spent * full, by_job)


class SameTensors:
    """A `WeightSync` for the embedded engine: a version is a pointer to the trainer's tensors."""

    def __init__(
        self, install: Callable[[AdapterRef, AdapterWeights], None], weights: Callable[[str], AdapterWeights]
    ) -> None:
        self._install, self._weights = install, weights

    async def publish(self, name: str, ref: AdapterRef) -> None:
        """Make the trainer's current weights of adapter `name` available under this reference."""
        self._install(ref, self._weights(name))


class SavedFiles:
    """A `WeightSync` for a local engine and a remote trainer: a version passes through a temporary PEFT directory."""

    def __init__(self, engine: RolloutEngine, trainer: Trainer) -> None:
        self._engine, self._trainer = engine, trainer

    async def publish(self, name: str, ref: AdapterRef) -> None:
        """Make the trainer's current weights of adapter `name` available under this reference.

        Raises:
            EngineError: they could not be written.
        """
        with contextlib.ExitStack() as stack:
            try:
                made = tempfile.TemporaryDirectory(prefix="motet-version-", ignore_cleanup_errors=True)  # it may stay
                place = Path(stack.enter_context(made))
                await asyncio.to_thread(self._trainer.save_adapter, name, place, optimizer=False)
            except OSError as error:  # not on the run's disk: fail instead of waiting for space
                raise EngineError(
                    f"version {ref.version} of adapter {ref.name!r} could not be written to {tempfile.gettempdir()}: {error}; "
                    "free space there, or set TMPDIR to another directory"
                ) from error
            await self._engine.load_adapter(ref, place)


def _deliver(
    loop: asyncio.AbstractEventLoop, chunks: asyncio.Queue[Chunk | Exception], item: Chunk | Exception
) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(chunks.put_nowait, item)
