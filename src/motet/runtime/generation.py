"""Completions of one group across versions: requested, continued under a newer version, or put aside.

A draft is an unfinished completion. After an interruption it keeps its tokens, each with the version that sampled it.
The next request sends prompt and draft, with a new random seed for the remaining draws.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from array import array
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from motet.chat.template import Chat
from motet.core import seeds
from motet.core.stops import certain, ending, until_stop
from motet.core.types import AdapterRef, Chunk, FinishReason, GenerateRequest, IntArray, SamplingParams
from motet.protocols import RolloutEngine
from motet.runtime.shielded import uninterrupted
from motet.runtime.versions import Versions

Result = TypeVar("Result")

_GIVE_UP_SECONDS = 5.0
"""How long an engine may take to end aborted requests."""
_numbers = itertools.count()


class PutAside(Exception):
    """The group was told to stop; its completions so far stay in its drafts."""


@dataclass
class Draft:
    """One unfinished completion, sampled by one or several versions."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    versions: array[int] = field(default_factory=lambda: array("i"))
    text: str = ""
    pieces: int = 0
    """Number of requests that it took so far."""
    sampled: int = 0
    """Sampled tokens, including those after a stop string."""
    finish: FinishReason | None = None
    error: str = ""

    def take(self, chunk: Chunk) -> None:
        """Append an engine's tokens; an abort does not finish the draft."""
        self.tokens.extend(chunk.token_ids.tolist())
        self.logprobs.extend(chunk.logprobs.tolist())
        self.versions.extend(chunk.versions.tolist())
        self.sampled += len(chunk.token_ids)
        self.text += chunk.text
        self.error = chunk.error
        if chunk.finish_reason is not FinishReason.ABORT:
            self.finish = chunk.finish_reason

    def settle(self, sampling: SamplingParams, chat: Chat) -> None:
        """Finish a draft at its end: an engine sees only its own tokens, and may abort before it reports the end."""
        if self.finish is None and self.tokens:
            self.finish = ending(self.tokens, sampling)
        elif self.pieces < 2:
            return
        self.text = chat.completion_text(self.tokens)
        n_tokens = until_stop(self.tokens.tolist(), sampling.stop, chat.completion_text)
        if n_tokens is not None:
            del self.tokens[n_tokens:], self.logprobs[n_tokens:], self.versions[n_tokens:]
            self.text = certain(chat.completion_text(self.tokens), sampling.stop, ended=True)
            self.finish = FinishReason.STOP

    def chunk(self, index: int) -> Chunk:
        """The whole completion as one chunk."""
        return Chunk(
            index,
            np.array(self.tokens, np.int32),
            np.array(self.logprobs, np.float32),
            np.array(self.versions, np.int32),
            self.text,
            self.finish,
            self.error,
        )


@dataclass
class Generation:
    """The requests of one group to an engine, from admission to the last token."""

    job: str
    name: str
    """Name of the group in request ids."""
    engine: RolloutEngine
    versions: Versions
    chat: Chat
    sampling: SamplingParams
    renew: bool
    """Whether running completions continue under a newer version as soon as it is published."""
    can_stop: bool
    """Whether the group may be put aside."""
    turns: bool = False
    """Whether episodes may have several turns, so that the engine should keep the KV cache."""
    payer: tuple[str, float] = ("", 1.0)
    """The tenant and its share (`FairScheduler.payer`)."""
    drafts: dict[tuple[int, int], Draft] = field(default_factory=dict)
    """By turn and index; finished ones are not sampled again."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tokens(self) -> int:
        """Tokens sampled so far."""
        return sum(draft.sampled for draft in self.drafts.values())

    def sampled(self, turn: int, indices: Iterable[int]) -> int:
        """Tokens sampled so far for the given completions."""
        return sum(self.drafts[turn, index].sampled for index in indices if (turn, index) in self.drafts)

    async def unless_stopped(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Wait for something that the group needs before it can continue.

        Raises:
            PutAside: the group was stopped meanwhile.
        """
        working, stopped = asyncio.create_task(work), asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait((working, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise PutAside
            return working.result()
        finally:
            await ended((working, stopped))

    async def result_of(self, call: asyncio.Task[Result]) -> Result:
        """Wait for a call of `complete`. It is cancelled with its caller, unless the group is stopped: it keeps its drafts."""
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if not self.stop.is_set():
                call.cancel()
            raise

    async def complete(
        self,
        prompt_ids: IntArray,
        keys: dict[int, int],
        turn: int,
        version: int,
        sampling: SamplingParams | None = None,
        role: str = "",
    ) -> list[Chunk]:
        """Complete a prompt once for each index of `keys`, whose values seed the draws. `sampling` overrides the group's.

        `role` chooses the adapter of a team.

        Raises:
            PutAside: the group was stopped before all completions were finished.
            EngineError: the engine cannot serve the request.
        """
        sampling = sampling or self.sampling
        drafts = {index: self.drafts.setdefault((turn, index), Draft()) for index in keys}
        renew = self._renews(sampling)
        while open_ := {index: draft for index, draft in drafts.items() if draft.finish is None}:
            if self.stop.is_set():
                raise PutAside
            version = max(version, self.versions.latest) if renew else version
            fresh = {index: draft for index, draft in open_.items() if not draft.tokens}
            asked = [{index: draft} for index, draft in open_.items() if draft.tokens] + ([fresh] if fresh else [])
            with self.versions.hold(version, role) as ref:
                requests = [self._request(prompt_ids, some, keys, turn, ref, sampling, role) for some in asked]
                reading = [
                    self._read(request, list(some.values())) for request, some in zip(requests, asked, strict=True)
                ]
                await self._interruptibly(reading, [request.id for request in requests], version + 1 if renew else None)
            interrupted = self.stop.is_set() or (renew and self.versions.latest > version)
            for draft in open_.values():
                draft.settle(sampling, self.chat)
                if draft.finish is None and not interrupted:  # aborted by someone else; a retry may be aborted again
                    draft.finish = FinishReason.ABORT
        return [drafts[index].chunk(index) for index in keys]

    def _request(
        self,
        prompt_ids: IntArray,
        drafts: dict[int, Draft],
        keys: dict[int, int],
        turn: int,
        ref: AdapterRef | None,
        sampling: SamplingParams,
        role: str,
    ) -> GenerateRequest:
        """A request for new completions of one prompt together, or for the rest of one draft."""
        so_far = next(iter(drafts.values())).tokens
        return GenerateRequest(
            id=f"{self.name}/{turn}/{next(_numbers)}",
            job=self.job,
            prompt_ids=np.concatenate([prompt_ids, np.array(so_far, np.int32)]),
            adapter=ref,
            sampling=replace(sampling, max_tokens=sampling.max_tokens - len(so_far)),
            seeds=tuple(
                seeds.key(keys[index], "continued", len(so_far)) if so_far else keys[index] for index in drafts
            ),
            stream=self._renews(sampling) or self.can_stop,
            keep_aborted=bool(self.payer[0]),  # an answer that is given up is charged
            episodes=tuple(self._episode(index, role) for index in drafts) if self.turns else (),
            tenant=self.payer[0],
            share=self.payer[1],
        )

    def _renews(self, sampling: SamplingParams) -> bool:
        """Whether to renew: not with a grammar, because only one request knows the grammar's state."""
        return self.renew and not sampling.grammar

    async def release(self, *indices: int) -> None:
        """Tell the engine that these episodes have ended."""
        for index in indices if self.turns else ():
            for role in self.versions.roles:
                await self.engine.abort(self._episode(index, role))

    def _episode(self, index: int, role: str) -> str:
        """The name of a conversation; what an engine keeps of it is of one adapter."""
        return f"{self.name}/{index}/{role}" if role else f"{self.name}/{index}"

    async def _read(self, request: GenerateRequest, drafts: list[Draft]) -> None:
        for draft in drafts:
            draft.pieces += 1
        async for chunk in self.engine.generate(request):
            drafts[chunk.index].take(chunk)

    async def _interruptibly(self, reading: list[Coroutine[Any, Any, None]], ids: list[str], until: int | None) -> None:
        """Read to the end, or abort the requests at version `until` or at the stop event."""
        tasks = [asyncio.create_task(reader) for reader in reading]
        events: list[Coroutine[Any, Any, Any]] = [] if until is None else [self.versions.wait_for(until)]
        events += [self.stop.wait()] if self.can_stop else []
        watching = [asyncio.create_task(self._abort_when(event, ids)) for event in events]
        try:
            await asyncio.gather(*map(asyncio.shield, tasks))
        except asyncio.CancelledError:
            await uninterrupted(self._give_up(tasks, ids))
            raise
        finally:
            await ended((*tasks, *watching))

    async def _give_up(self, tasks: list[asyncio.Task[None]], ids: list[str]) -> None:
        """Abort requests that nobody waits for, and take the tokens that were sampled for them, because they are charged."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GIVE_UP_SECONDS):
                for name in ids:
                    await self.engine.abort(name)
                await asyncio.wait(tasks)

    async def _abort_when(self, event: Coroutine[Any, Any, Any], ids: list[str]) -> None:
        await event
        for name in ids:
            await self.engine.abort(name)


async def ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for them."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def together(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Wait for all works at once, then raise the first error of any."""
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]
