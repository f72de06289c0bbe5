"""Grammars that constrain completions, for the vocabulary of one base.

A mask takes microseconds or a quarter of a second, as a stranger's schema wants. Quick ones are computed where they are
needed; beyond a tenant's credit they are computed in a thread beside the device, where tenants take turns. A completion
whose mask is not ready misses that tick.

Legend: V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from motet.core.errors import EngineError, ServerFault
from motet.core.model_info import ModelInfo
from motet.core.tenant_cache import TenantCache
from motet.core.tenant_turns import Payer
from motet.core.types import BoolArray, SamplingParams
from motet.process.thread_turns import ThreadTurns

_KEPT = 32
"""Size of the cache of compiled grammars. Callers validate untrusted ones first (`chat.structure.check_grammar`)."""
_SLOW_SECONDS = 0.25
"""Limit of CPU time for one token's mask."""
_CREDIT, _CREDIT_RATE = 0.02, 0.05
"""CPU seconds of masks that hold the device, at once and per second of each tenant; further ones are computed beside it."""
_RATE = 0.25
"""CPU seconds per second that a tenant's masks take beside the device while others use it."""
_THREADS = 1
_MOST_WAITING = 10**6
"""The rows of a decode batch limit it before."""


class Grammar:
    """The grammar state of one completion. Its mask is computed by one thread at a time."""

    def __init__(self, matcher: Any, n_vocab: int) -> None:
        self._matcher, self._n_vocab = matcher, n_vocab
        self._mask: BoolArray | None = None
        self._fault = ""
        self.pending = False
        """Whether another thread computes the mask of the next token."""

    def begun(self) -> Grammar:
        """A copy of this state for another completion."""
        copy = Grammar(self._matcher.deep_copy(), self._n_vocab)
        copy._mask, copy._fault = self._mask, self._fault
        return copy

    @property
    def ready(self) -> bool:
        """Whether the mask of the next token is known."""
        return self._mask is not None

    def compute(self) -> float:
        """Compute the mask of the next token; returns the CPU seconds of this thread."""
        began = time.thread_time()
        try:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            mask = np.unpackbits(bits, count=self._n_vocab, bitorder="little").astype(np.bool_)
        except Exception as error:  # of the library: it ends this answer, and no other
            self._fault = f"its grammar failed: {error!r:.300}"
            mask = np.ones(self._n_vocab, np.bool_)
        spent = time.thread_time() - began
        if spent > _SLOW_SECONDS:
            self._fault = f"its grammar takes more than {_SLOW_SECONDS} s for one token; make it simpler"
        self._mask = mask
        return spent

    def allowed(self) -> BoolArray:
        """Mask of the allowed next tokens, [V]."""
        if self._mask is None:
            self.compute()
        assert self._mask is not None
        return self._mask

    def take(self, token: int) -> str:
        """Advance by a token; returns an error message, or an empty string."""
        self._mask = None
        if self._fault:
            return self._fault
        whole = self._matcher.consume_token(token) and not self._matcher.is_error()
        return "" if whole else f"it left its grammar: {self._matcher.get_error()[:300]}"


@dataclass
class _Account:
    """What a tenant's masks may still take."""

    credit: float = _CREDIT
    counted: float = 0.0
    """When `credit` was last counted up."""
    rests: float = 0.0
    """Until when no mask of it is begun beside the device."""
    last: Grammar | None = None
    """The last one that was begun there."""

    def may_begin(self, now: float) -> bool:
        """Whether a mask may be begun beside the device while others use it: one at a time."""
        return self.rests <= now and (self.last is None or not self.last.pending)


def check_answer(grammar: str, text: str) -> None:
    """Check the whole answer of a server, in its own layout or in that of the grammar.

    Raises:
        ServerFault: the answer does not keep to the grammar; the message names the setting.
    """
    from llguidance import LLMatcher, LLTokenizer

    layouts = [text.strip()]
    with contextlib.suppress(ValueError, RecursionError):
        layouts.append(json.dumps(json.loads(text), ensure_ascii=False))
    for layout in map(str.encode, layouts):
        matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
        if matcher.try_consume_tokens([*layout]) == len(layout) and matcher.is_accepting():
            return
    raise ServerFault(
        f"the server's answer {text!r:.80} does not keep to the JSON schema of its request: start vLLM with "
        """--structured-outputs-config '{"backend": "guidance"}'"""
    )


class Grammars:
    """Compiles grammars for a base, and computes their masks."""

    def __init__(
        self,
        info: ModelInfo,
        wake: Callable[[], object] = lambda: None,
        company: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wake` is called when a mask is ready or may be begun; `company` says whether several tenants use the device."""
        self._info, self._wake, self._company, self._clock = info, wake, company, clock
        self._tokenizer = functools.lru_cache(4)(self._make_tokenizer)
        self._compiled = TenantCache[tuple[str, tuple[int, ...]], Grammar](_KEPT, _KEPT // 4)
        self._threads = ThreadTurns(_THREADS, _MOST_WAITING, "motet-grammars")
        self._accounts: dict[str, _Account] = {}
        self._spent = deque[tuple[Payer, float]]()

    async def of(self, sampling: SamplingParams, payer: Payer) -> Grammar:
        """The initial state of a request's grammar, with its first mask, made in the turn of its tenant. May take seconds.

        A tenant's own grammars are kept: how long it takes does not tell what others use.

        Raises:
            EngineError: the grammar is invalid or does not work with this base.
        """
        known = (sampling.grammar, sampling.stop_token_ids)
        if (grammar := self._compiled.get(payer.tenant, known)) is None:
            grammar = await self._threads.run(payer.tenant, lambda: self._make(*known, payer))
            self._compiled.put(payer.tenant, known, grammar)
        return grammar

    def begin(self, wanted: Iterable[tuple[Grammar, Payer]]) -> bool:
        """Compute masks that are missing, or have them computed beside the device; returns whether one is awaited.

        Call it in the device's thread only, as `spent`.
        """
        awaited = False
        for grammar, payer in wanted:
            if not (grammar.ready or grammar.pending):
                self._begin(grammar, payer)
            awaited |= not grammar.ready
        return awaited

    def spent(self) -> list[tuple[Payer, float]]:
        """CPU seconds of masks and compilations since the last call, to charge them."""
        return [self._spent.popleft() for _ in range(len(self._spent))]

    def _begin(self, grammar: Grammar, payer: Payer) -> None:
        account, now = self._accounts.setdefault(payer.tenant, _Account()), self._clock()
        account.credit = min(_CREDIT, account.credit + (now - account.counted) * _CREDIT_RATE)
        account.counted = now
        if account.credit > 0:
            spent = grammar.compute()
            account.credit -= spent
            self._spent.append((payer, spent))
        elif account.may_begin(now) or not self._company():
            grammar.pending, account.last = True, grammar
            self._threads.begin(payer.tenant, lambda: self._compute(grammar, payer, account))

    def _compute(self, grammar: Grammar, payer: Payer, account: _Account) -> None:
        """Runs beside the device."""
        spent = grammar.compute()
        self._spent.append((payer, spent))
        if self._company():
            rest = spent * (1 / _RATE - 1)
            account.rests = self._clock() + rest
            timer = threading.Timer(rest, self._wake)
            timer.daemon = True
            timer.start()
        grammar.pending = False
        self._wake()

    def _make(self, grammar: str, ends: tuple[int, ...], payer: Payer) -> Grammar:
        from llguidance import LLMatcher

        tokenizer, began = self._tokenizer(ends), time.thread_time()
        matcher = LLMatcher(tokenizer, grammar)
        if matcher.is_error():
            raise EngineError(f"the grammar of the answer cannot be used: {matcher.get_error()[:300]}")
        made = Grammar(matcher, self._info.vocab_size)
        made.compute()
        self._spent.append((payer, time.thread_time() - began))
        return made

    def _make_tokenizer(self, ends: tuple[int, ...]) -> Any:
        from llguidance.hf import from_tokenizer

        tokenizer: Any = self._info.tokenizer
        try:
            own = [end for end in ends if end in self._info.vocabulary]
            return from_tokenizer(tokenizer, self._info.vocab_size, own or None)
        except ValueError as error:
            raise EngineError(f"this base's tokenizer does not support grammars: {error}") from error
