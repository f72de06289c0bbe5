"""Where a completion ends, and which part of its text is final; all engines use this definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from motet.core.types import FinishReason, SamplingParams

Decode = Callable[[list[int]], str]
"""Text of completion tokens, without special tokens."""
MOST_TEXTS, LONGEST_TEXT, MOST_IDS = 64, 500, 1024
_BEFORE, _BETWEEN = 16, 32
"""Tokens decoded before the last boundary, and the least between two boundaries."""


def few(stops: Any) -> Any:
    """Check and return stop strings or token ids from a client: every token is compared with all of them.

    Raises ValueError if there are too many, or one is too long or empty.
    """
    given = stops if isinstance(stops, list) else [stops]
    texts = [stop for stop in given if isinstance(stop, str)]
    if len(texts) > MOST_TEXTS or len(given) > MOST_IDS:
        raise ValueError(f"{len(given)} are too many; give at most {MOST_TEXTS} texts or {MOST_IDS} token ids")
    if (longest := max(map(len, texts), default=0)) > LONGEST_TEXT:
        raise ValueError(f"a text has {longest} characters; give at most {LONGEST_TEXT}")
    if "" in texts:
        raise ValueError("a text is empty, and every answer would end before its first token; leave it out")
    return stops


def ending(tokens: Sequence[int], sampling: SamplingParams) -> FinishReason | None:
    """Why these tokens are a complete completion, apart from stop strings; None if they are not."""
    if tokens and tokens[-1] in sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(tokens) >= sampling.max_tokens else None


def until_stop(tokens: list[int], stops: Sequence[str], decode: Decode) -> int | None:
    """The number of tokens up to the one that completes a stop string; None if the text contains none."""

    def stopped(n_tokens: int) -> bool:
        text = decode(tokens[:n_tokens])
        return any(stop in text for stop in stops)

    n_tokens = len(tokens)
    if not stops or not stopped(n_tokens):
        return None
    while n_tokens > 1 and stopped(n_tokens - 1):
        n_tokens -= 1
    return n_tokens


def met(text: str, stops: Sequence[str]) -> str:
    """The stop string before which a text is cut; empty if it contains none."""
    return min((stop for stop in stops if stop in text), key=text.index, default="")


def certain(text: str, stops: Sequence[str], *, ended: bool) -> str:
    """The final part of a completion's text: it ends before a stop string, or before text that may become one."""
    if ended:
        stop = met(text, stops)
        return text.partition(stop)[0] if stop else text
    missing = len(text) - len(text.rstrip("�"))  # one for each byte of an unfinished character with some tokenizers
    held = max((len(stop) for stop in stops), default=1) - 1 + missing
    return text[: max(0, len(text) - held)]


class GrowingText:
    """The text of a growing list of tokens, equal to `decode` of all, of which only the last are decoded again.

    Its boundaries are behind tokens that are no single byte: with some tokenizers, a byte changes the text of those
    directly before it.
    """

    def __init__(self) -> None:
        self._known, self._text = 0, ""  # number and text of the tokens before the last boundary
        self._start, self._before = 0, ""  # the last of them from here on, and their text

    def of(self, tokens: list[int], decode: Decode) -> str:
        """The text of tokens that begin with those of the last call."""
        text = decode(tokens[self._start :])
        whole = text.startswith(self._before)  # some tokenizers remove spaces before punctuation
        text = self._text + text[len(self._before) :] if whole else decode(tokens)
        if len(tokens) - self._known >= _BETWEEN and _is_no_byte(decode(tokens[-1:])):
            self._known, self._text, self._start = len(tokens), text, len(tokens) - _BEFORE
            self._before = decode(tokens[self._start :])
        return text


def _is_no_byte(text: str) -> bool:
    """Whether a token of this text has whole characters, and is not one byte."""
    return "\ufffd" not in text and (len(text) > 1 or not text.isascii())
