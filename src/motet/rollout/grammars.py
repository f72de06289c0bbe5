"""Grammars that constrain completions, for the vocabulary of one base.

Legend: V vocabulary.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np

from motet.core.errors import EngineError
from motet.core.model_info import ModelInfo
from motet.core.types import BoolArray, SamplingParams

_KEPT = 16
"""Size of the cache of compiled grammars. Callers validate untrusted ones first (`chat.structure.check_grammar`)."""
_SLOW_SECONDS = 0.25
"""Limit of CPU time for one token's mask; all sampling waits for it."""


class Grammar:
    """The grammar state of one completion."""

    def __init__(self, matcher: Any, n_vocab: int) -> None:
        self._matcher, self._n_vocab = matcher, n_vocab
        self._slow = False

    def begun(self) -> Grammar:
        """A copy of this state for another completion."""
        return Grammar(self._matcher.deep_copy(), self._n_vocab)

    def allowed(self) -> BoolArray:
        """Mask of the allowed next tokens, [V]."""
        began = time.thread_time()
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._slow |= time.thread_time() - began > _SLOW_SECONDS
        return np.unpackbits(bits, count=self._n_vocab, bitorder="little").astype(np.bool_)

    def take(self, token: int) -> str:
        """Advance by a token; returns an error message, or an empty string."""
        if self._slow:
            return f"its grammar takes more than {_SLOW_SECONDS} s for one token, and delays other requests; make it simpler"
        whole = self._matcher.consume_token(token) and not self._matcher.is_error()
        return "" if whole else f"it left its grammar: {self._matcher.get_error()[:300]}"


class Grammars:
    """Compiles grammars for a base."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._tokenizer = functools.lru_cache(4)(self._make_tokenizer)
        self._grammar = functools.lru_cache(_KEPT)(self._make_grammar)

    def of(self, sampling: SamplingParams) -> Grammar:
        """The initial state of a request's grammar. May take seconds.

        Raises:
            EngineError: the grammar is invalid or does not work with this base.
        """
        return self._grammar(sampling.grammar, sampling.stop_token_ids)

    def _make_grammar(self, grammar: str, ends: tuple[int, ...]) -> Grammar:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer(ends), grammar)
        if matcher.is_error():
            raise EngineError(f"the grammar of the answer cannot be used: {matcher.get_error()[:300]}")
        return Grammar(matcher, self._info.vocab_size)

    def _make_tokenizer(self, ends: tuple[int, ...]) -> Any:
        from llguidance.hf import from_tokenizer

        tokenizer: Any = self._info.tokenizer
        try:
            return from_tokenizer(tokenizer, self._info.vocab_size, list(ends) or None)
        except ValueError as error:
            raise EngineError(f"this base's tokenizer does not support grammars: {error}") from error
