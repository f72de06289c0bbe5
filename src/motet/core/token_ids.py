"""The token ids of a base: rows of its head that its tokenizer has a token for."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from motet.core.types import IntArray


@dataclass(frozen=True)
class TokenIds:
    """The ids below `size`, apart from those `without` a token.

    Many heads are padded to a round number of rows. The rows beyond the tokenizer's tokens, and those between them, were
    never trained, and nothing reads the ids.
    """

    size: int
    """Rows of the head."""
    without: frozenset[int] = frozenset()

    @classmethod
    def of(cls, tokenizer: Any, size: int) -> TokenIds:
        """The vocabulary of a tokenizer and a head of `size` rows; whole where the tokenizer does not list its tokens."""
        known = set(getattr(tokenizer, "get_vocab", dict)().values())
        absent = [token for token in range(size) if token not in known] if known else []
        nameless = (None, "", getattr(tokenizer, "unk_token", None))  # what tokenizers call an id that they lack
        return cls(size, frozenset(token for token in absent if tokenizer.convert_ids_to_tokens(token) in nameless))

    def __contains__(self, token: int) -> bool:
        return 0 <= token < self.size and token not in self.without

    def unknown(self, token_ids: IntArray | Sequence[int]) -> int | None:
        """The first of these ids that is no token; None if all are."""
        ids = np.asarray(token_ids).ravel()
        lacking = (ids < 0) | (ids >= self.size)
        if self.without:
            lacking |= np.isin(ids, self._absent)
        return int(ids[lacking.argmax()]) if lacking.any() else None

    @functools.cached_property
    def _absent(self) -> IntArray:
        return np.array(sorted(self.without), np.int32)

    @functools.cached_property
    def bounds(self) -> str:
        """For messages: from which id to which they go."""
        last = next((token for token in range(self.size - 1, -1, -1) if token in self), -1)
        gaps = sum(token < last for token in self.without)
        return f"those of this base go from 0 to {last}" + (f", and {gaps} between have no token" if gaps else "")
