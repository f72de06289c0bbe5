"""The marks of a form in grammars of llguidance: those that are one token as this token, others as their letters."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

SPACE = "/\\s{0,8}/"
"""Between a thought and what follows it; more would let a model write spaces to the end."""

ONE_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""A single layout of JSON for llguidance, so that no tokens are spent on spaces."""


@dataclass(frozen=True)
class Marks:
    """How grammars for one tokenizer write marks."""

    tokenizer: Any
    ends: Sequence[int]
    """The ids that end a turn."""

    def token(self, mark: str) -> int | None:
        """The token that is a mark, if it was added to the vocabulary as one."""
        ids = self.tokenizer.encode(mark, add_special_tokens=False)
        return int(ids[0]) if len(ids) == 1 and int(ids[0]) in self.tokenizer.added_tokens_decoder else None

    def written(self, text: str) -> str:
        """A text with marks."""
        pieces = filter(None, self._added.split(text) if self._added else [text])
        tokens = ((piece, self.token(piece)) for piece in pieces)
        return " ".join(json.dumps(piece) if token is None else f"<[{token}]>" for piece, token in tokens)

    def but(self, *marks: str) -> str:
        """Any token but these, and those that end a turn."""
        others = {token for mark in marks if (token := self.token(mark)) is not None}
        none = sorted({*others, *self.ends})
        return f"<[^{','.join(map(str, none))}]>" if none else "<[*]>"

    def until(self, name: str, mark: str) -> list[str]:
        """A rule for everything up to a mark, and the mark; `name` is in lower case."""
        if self.token(mark) is not None:
            return [f"{name}: {self.but(mark)}* {self.written(mark)}"]
        letters = re.escape(mark).replace("/", "\\/")
        return [f"{name}[lazy]: /(?s:.*){letters}/"]

    @cached_property
    def _added(self) -> re.Pattern[str] | None:
        added = sorted(map(str, self.tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, added)) + ")") if added else None
