"""Prompts and sequences in the embedded engine: tokens, text and stopping."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from motet.core.stops import Decode, ending
from motet.core.tenant_turns import Payer
from motet.core.types import Chunk, FinishReason, GenerateRequest
from motet.model.host_cache import HostCopy
from motet.model.lora import AdapterWeights
from motet.rollout.completion import GrowingCompletion
from motet.rollout.grammars import Grammar

Emit = Callable[[Chunk | Exception], None]
Standing = tuple[str, bool]
"""A tenant, and whether somebody waits for the answer."""
_TAIL = 16
"""Number of last tokens, in addition to one per byte of a stop string, that are decoded to find it."""


@dataclass(eq=False)
class Prompt:
    """A request's prompt: prefilled once, then shared by its completions."""

    request: GenerateRequest
    weights: AdapterWeights | None
    emit: Emit
    waiting: list[SampledSequence] = field(default_factory=list)
    """Completions not yet admitted for the first time."""
    blocks: list[int] = field(default_factory=list)
    slot: int = 0
    """Slot of its states after the last token."""
    copy: HostCopy | None = None
    """Host copy of its cache, after it was preempted."""
    unread: int = field(init=False)
    """Its last tokens, which neither the cache nor the host copy has."""
    logits: Any = None
    """Logits of the last prompt token, [1, V], from the end of its prefill until the last completion is admitted."""

    def __post_init__(self) -> None:
        self.unread = self.whole

    @property
    def whole(self) -> int:
        """Tokens to read before a completion begins."""
        return len(self.request.prompt_ids)

    @property
    def known(self) -> int:
        """Tokens in the cache or the host copy."""
        return self.whole - self.unread

    @property
    def is_read(self) -> bool:
        """Whether completions can begin: all its tokens are in the cache."""
        return bool(self.blocks) and not self.unread

    def token_ids(self, start: int, end: int) -> list[int]:
        """Some of its tokens."""
        ids: list[int] = self.request.prompt_ids[start:end].tolist()
        return ids

    @functools.cached_property
    def standing(self) -> Standing:
        """What its turns depend on."""
        return self.request.tenant, self.request.interactive

    @functools.cached_property
    def tenant(self) -> str:
        """The request's tenant."""
        return self.request.tenant

    @functools.cached_property
    def payer(self) -> Payer:
        """Who pays for the request."""
        return payer_of(self.request)

    @functools.cached_property
    def adapter_order(self) -> tuple[str, int]:
        """Sort key that puts sequences of one version side by side."""
        adapter = self.request.adapter
        return ("", -1) if adapter is None else (adapter.name, adapter.version)


@dataclass(eq=False)
class SampledSequence(GrowingCompletion):
    """One completion of a request."""

    prompt: Prompt
    index: int
    key: int
    blocks: list[int] = field(default_factory=list)
    slot: int = 0
    copy: HostCopy | None = None
    """Host copy of its cache, after it was preempted."""
    unread: int = 0
    """Tokens before the last that neither the cache nor the host copy has: it was preempted, and is read again."""
    grammar: Grammar | None = None
    """Grammar state; None without a grammar."""
    tick: int = 0
    """The last tick that gave it a token."""
    in_flight: int = 0
    """Steps in flight that compute a token of it, which it does not have yet."""

    def __post_init__(self) -> None:
        # as plain attributes, because each tick looks at every row's
        self.tenant, self.standing, self.adapter_order = (
            self.prompt.tenant, self.prompt.standing, self.prompt.adapter_order
        )  # fmt: skip
        self.n_prompt = len(self.prompt.request.prompt_ids)
        self.most = self.n_prompt + self.prompt.request.sampling.max_tokens

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return self.n_prompt + len(self.tokens)

    @property
    def whole(self) -> int:
        """Tokens to read before its next step, which reads the last."""
        return self.length - 1

    @property
    def known(self) -> int:
        """Tokens in the cache or the host copy."""
        return self.whole - self.unread

    def token_ids(self, start: int, end: int) -> list[int]:
        """Some of the tokens of prompt and completion."""
        first, last = (max(0, place - self.n_prompt) for place in (start, end))
        return [*self.prompt.token_ids(start, end), *self.tokens[first:last]]

    def append(self, token: int, logprob: float, usable: bool, decode: Decode) -> None:
        """Append a drawn token and check whether the completion ends."""
        sampling = self.prompt.request.sampling
        if not usable:
            self.finish = FinishReason.ERROR
            self.error = "the model's logits were not finite; its weights or its adapter have overflowed"
            return
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.finish = ending(self.tokens, sampling)
        if self.grammar is not None and (error := self.grammar.take(token)):
            self.finish, self.error = FinishReason.ERROR, f"the answer was ended: {error}"
        if self.finish is not FinishReason.STOP and self._stopped(decode):
            self.finish = FinishReason.STOP

    def _stopped(self, decode: Decode) -> bool:
        stops = self.prompt.request.sampling.stop
        if not stops:
            return False
        tail = decode(self.tokens[-(_TAIL + max(len(stop.encode()) for stop in stops)) :])
        return any(stop in tail for stop in stops) and any(stop in decode(self.tokens) for stop in stops)

    def chunk(self, decode: Decode) -> Chunk:
        """See `undelivered`."""
        return self.undelivered(self.prompt.request, self.index, decode)


def payer_of(request: GenerateRequest) -> Payer:
    """Who pays for a request."""
    return Payer(request.job, request.tenant, request.share)


def can_step(items: Iterable[SampledSequence]) -> list[SampledSequence]:
    """Those of which the next step can compute a token: masks of a grammar need the tokens in flight."""
    return [
        item
        for item in items
        if not item.unread
        and item.n_prompt + len(item.tokens) + item.in_flight < item.most
        and (item.grammar is None or (item.grammar.ready and not item.in_flight))
    ]


def prompt_of(item: Prompt | SampledSequence) -> Prompt:
    """The item's prompt."""
    return item.prompt if isinstance(item, SampledSequence) else item


tenant_of: Callable[[Prompt | SampledSequence], str] = operator.attrgetter("tenant")
standing_of: Callable[[Prompt | SampledSequence], Standing] = operator.attrgetter("standing")
adapter_order_of: Callable[[SampledSequence], tuple[str, int]] = operator.attrgetter("adapter_order")


def aborted(index: int) -> Chunk:
    """The final chunk of a completion that never began."""
    nothing = np.empty(0, np.int32)
    return Chunk(index, nothing, np.empty(0, np.float32), nothing, "", FinishReason.ABORT)
