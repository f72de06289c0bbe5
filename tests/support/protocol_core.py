"""What the servers of both protocols share: adapters from directories, and the answers of a `FakeEngine`.

A dialect (`protocol_vllm`, `protocol_sglang`) turns HTTP into an `Ask` and `Piece`s into HTTP; `protocol_server` is the server.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from starlette.responses import Response

from motet.core.types import ADAPTER_CONFIG, AdapterRef, FinishReason, GenerateRequest, SamplingParams
from tests.support.fake_base import END, VOCABULARY, FakeAdapter, FakePolicy, FakeTokenizer, read_adapter
from tests.support.fake_engine import FakeEngine
from tests.support.protocol_faults import ODD, Counts, Faults, Setup


class Refusal(Exception):
    """A request is answered with an error."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param = status, message, kind, param


class RankError(Exception):
    """An adapter's rank is higher than the server's limit."""


@dataclass(frozen=True)
class Call:
    """An HTTP request, read."""

    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]


class Route(NamedTuple):
    """What answers a path."""

    kind: str
    answer: Callable[[Call], Awaitable[Response]]


class Dialect(Protocol):
    """A protocol, over a backend."""

    @property
    def routes(self) -> Mapping[tuple[str, str], Route]:
        """By method and path."""
        ...

    @property
    def entries(self) -> tuple[str, ...]:
        """The adapters that are loaded, oldest first."""
        ...

    @property
    def dead(self) -> bool:
        """Whether the engine is lost and the server ends."""
        ...

    def guards(self, path: str) -> bool:
        """Whether this path wants the API key."""
        ...

    def error(self, refusal: Refusal) -> Response:
        """An error in the protocol's shape."""
        ...

    def lose(self) -> None:
        """Forget every adapter, as after a restart."""
        ...


@dataclass(frozen=True)
class Ask:
    """One generate call, as both protocols mean it."""

    id: str
    model: str
    turn: str | None
    """Whose turn must come, None where that does not matter."""
    resolve: Callable[[], AdapterRef | None]
    """Finds the weights when the turn has come; raises `Refusal`."""
    prompt: tuple[int, ...]
    sampling: SamplingParams
    seeds: tuple[int, ...]
    biases: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of sampled tokens, of which probabilities are told."""


class Entry(NamedTuple):
    """A sampled token."""

    token: int
    logprob: float | None
    rank: int


@dataclass
class Piece:
    """Tokens of one completion."""

    index: int
    tokens: list[int]
    entries: list[Entry]
    reason: FinishReason | None


class PacedEngine(FakeEngine):
    """A fake engine that takes `faults.token_seconds` for a token."""

    def __init__(self, faults: Faults, max_positions: int) -> None:
        super().__init__(capacity=1024, max_positions=max_positions)
        self.turns = 0
        """Suspensions that began: one before each token of a completion."""
        self._faults = faults

    async def suspend(self) -> None:
        """Let others run."""
        self.turns += 1
        await super().suspend()
        while self.turns > self._faults.most_turns:
            await asyncio.sleep(0.001)
        if self._faults.token_seconds:
            await asyncio.sleep(self._faults.token_seconds)


class Turns:
    """At most `limit` distinct adapters run at a time; whoever asks for a further one waits."""

    def __init__(self, limit: int) -> None:
        self.running: Counter[str] = Counter()
        self.waiting: Counter[str] = Counter()
        self._limit = limit
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def turn(self, name: str | None, aborted: asyncio.Event) -> AsyncIterator[None]:
        """Wait until this adapter may run, or until the request is aborted."""
        if name is None:
            yield
            return
        self.waiting[name] += 1
        try:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: aborted.is_set() or name in self.running or len(self.running) < self._limit
                )
        finally:
            _count_down(self.waiting, name)
        self.running[name] += 1
        try:
            yield
        finally:
            _count_down(self.running, name)
            await self.look_again()

    async def look_again(self) -> None:
        """Something changed."""
        async with self._changed:
            self._changed.notify_all()


def _count_down(counter: Counter[str], name: str) -> None:
    counter[name] -= 1
    if not counter[name]:
        del counter[name]


class Backend:
    """The engine behind either protocol."""

    def __init__(self, setup: Setup, faults: Faults, counts: Counts) -> None:
        self.setup, self.faults, self.counts = setup, faults, counts
        self.engine = PacedEngine(faults, setup.max_model_len)
        self.turns = Turns(setup.max_loras)
        self.asleep = False
        self.open: dict[str, asyncio.Event] = {}
        """Generate requests that are being answered, and whether they were aborted."""
        self._policies: dict[AdapterRef | None, FakePolicy] = {None: FakePolicy(None)}
        self._serial = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    def read(self, name: str, path: str) -> AdapterRef:
        """Read an adapter from its directory, under a reference of its own.

        Raises:
            FileNotFoundError: there is none.
            AdapterError: it is damaged.
            RankError: its rank is too high.
        """
        if not (Path(path) / ADAPTER_CONFIG).is_file():
            raise FileNotFoundError(path)
        adapter = read_adapter(Path(path))
        if adapter.rank > self.setup.max_lora_rank:
            raise RankError(str(adapter.rank))
        ref = AdapterRef(name, next(self._serial))
        self.engine.install(ref, adapter)
        self._policies[ref] = FakePolicy(adapter)
        return ref

    def token_logprob(self, ref: AdapterRef | None, previous: int, token: int, temperature: float) -> Entry:
        """The logprob and rank of a token after another."""
        row = self._policies[None if self.faults.lies else ref].row(previous, temperature)
        return Entry(token, float(np.float32(row[token])), int((row > row[token]).sum()) + 1)

    def prompt_entries(self, ask: Ask) -> list[Entry]:
        """Logprobs of the prompt's tokens but the first, at temperature 1 whatever the request says."""
        ref = ask.resolve()
        found = [self.token_logprob(ref, *pair, 1.0) for pair in itertools.pairwise(ask.prompt)]
        if found and self.faults.logprobs:
            found[-1] = found[-1]._replace(logprob=self.faults.logprobs[0])
        return found

    def prompt_tops(self, ask: Ask, k: int) -> list[list[Entry]]:
        """The k likeliest tokens of each place of the prompt but the first, best first."""
        ref, places = ask.resolve(), ask.prompt[:-1]
        rows = ([self.token_logprob(ref, before, token, 1.0) for token in range(VOCABULARY)] for before in places)
        return [sorted(row, key=lambda entry: entry.rank)[:k] for row in rows]

    def sleep(self) -> None:
        """Free memory; requests that run would be lost."""
        assert not self.open, "a server is put to sleep while it answers"
        self.asleep = True

    def abort(self, ids: Iterable[str]) -> None:
        """End requests; they answer with what they have."""
        for id in ids:
            if id in self.open and not self.open[id].is_set():
                self.counts.aborts += 1
                self.open[id].set()
                self._later(self.engine.abort(id))
        self._later(self.turns.look_again())

    async def pieces(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        """Answer, token by token; close this generator to give up."""
        aborted = self.open[ask.id] = asyncio.Event()
        self.counts.open[ask.model] += 1
        try:
            async with self.turns.turn(ask.turn, aborted):
                if aborted.is_set():
                    for index in range(len(ask.seeds)):
                        yield Piece(index, [], [], FinishReason.ABORT)
                    return
                ref = self._biased(ask.resolve(), ask.biases)
                async with aclosing(self._sampled(ask, ref)) as pieces:
                    async for piece in pieces:
                        yield piece
        finally:
            _count_down(self.counts.open, ask.model)
            del self.open[ask.id]

    async def whole(self, ask: Ask) -> list[Piece]:
        """Answer with complete completions."""
        found = [Piece(index, [], [], None) for index in range(len(ask.seeds))]
        async with aclosing(self.pieces(ask)) as pieces:
            async for piece in pieces:
                place = found[piece.index]
                place.tokens += piece.tokens
                place.entries += piece.entries
                place.reason = piece.reason
        return found

    def _biased(self, ref: AdapterRef | None, biases: Mapping[int, float]) -> AdapterRef | None:
        """A version of these weights whose tokens are likelier by their biases."""
        if not biases:
            return ref
        shift = self._policies[ref].shift.copy()
        shift[list(biases)] += list(biases.values())
        biased, adapter = AdapterRef("biased", next(self._serial)), FakeAdapter(1, 1.0, np.ones(VOCABULARY), shift)
        self.engine.install(biased, adapter)
        self._policies[biased] = FakePolicy(adapter)
        return biased

    def _later(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _sampled(self, ask: Ask, ref: AdapterRef | None) -> AsyncGenerator[Piece, None]:
        used = None if self.faults.lies else ref
        request = GenerateRequest(
            ask.id, "", np.array(ask.prompt, np.int32), used, ask.sampling, ask.seeds, stream=True
        )
        previous, begun = dict.fromkeys(range(len(ask.seeds)), ask.prompt[-1]), set[int]()
        last, why = self.faults.ends.pop(0) if self.faults.ends else (-1, "")
        n_tokens = 0
        async with aclosing(self.engine.generate(request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                tokens, entries = [int(token) for token in chunk.token_ids], []
                for token in tokens:
                    entry = self.token_logprob(ref, previous[chunk.index], token, ask.sampling.temperature)
                    if chunk.index not in begun and self.faults.logprobs:
                        entry = entry._replace(logprob=self.faults.logprobs[0])
                    begun.add(chunk.index)
                    entries.append(entry)
                    previous[chunk.index] = token
                reason = chunk.finish_reason
                if reason is FinishReason.ERROR:  # logits that are not finite: a real server samples on
                    tokens, entries, reason = [END], [Entry(END, None, 0)], FinishReason.STOP
                if reason is not None and self.faults.length:
                    more = self.faults.length
                    tokens = tokens + [END] * more if more > 0 else tokens[:more]
                n_tokens += len(tokens)
                if n_tokens == last:
                    reason = FinishReason(why)
                yield Piece(chunk.index, tokens, entries, reason)
                if n_tokens == last:
                    return


def whole_number(value: Any, fallback: int) -> int:
    """A number that a request may leave out."""
    return fallback if value is None else int(value)


def biases_of(body: Mapping[str, Any]) -> dict[int, float]:
    """The biases of a request, by token; vLLM cuts them at 100."""
    return {int(token): min(100.0, max(-100.0, float(bias))) for token, bias in (body.get("logit_bias") or {}).items()}


def strings(value: Any) -> tuple[str, ...]:
    """Stop strings: none, one or several."""
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def stop_cause(sampling: SamplingParams, tokens: list[int]) -> int | str | None:
    """Which token or string ended a completion."""
    if tokens and tokens[-1] in sampling.stop_token_ids:
        return tokens[-1]
    text = FakeTokenizer().decode(tokens)
    return next((stop for stop in sampling.stop if stop in text), None)


def outside(prompt: Iterable[int]) -> int | None:
    """The first token that the fake base does not know."""
    return next((token for token in prompt if not 0 <= token < VOCABULARY), None)


def event(value: Mapping[str, Any]) -> str:
    """One of a stream."""
    text = json.dumps({**value, "odd": ODD}, ensure_ascii=False)  # as the real ones write it
    return f"data: {text}\n\n"
