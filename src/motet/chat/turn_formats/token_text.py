"""The letters of tokens, one token after another."""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from motet.core.stops import met

_PART_OF_A_LETTER = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A token of one byte in vocabularies of letters."""
_PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))
_SHOWN_BYTES = {
    **{chr(byte): byte for byte in _PRINTED},
    **{chr(256 + number): byte for number, byte in enumerate(sorted({*range(256)} - {*_PRINTED}))},
}
"""The bytes of the letters in which vocabularies of bytes write their tokens (GPT-2)."""
_MOST_KNOWN = 2**15


class Tag(str):
    """A tag of a form: in the vocabulary it is one token, or the form spells it with several."""

    __slots__ = ()


def joined(pieces: Iterable[str]) -> str:
    """Pieces as one text."""
    return "".join(map(str, pieces))


def merged(pieces: Iterable[str]) -> Iterator[str]:
    """Pieces with the letters between two tags as one."""
    letters: list[str] = []
    for piece in pieces:
        if isinstance(piece, Tag):
            yield from ["".join(letters)] if letters else []
            letters = []
            yield piece
        else:
            letters.append(piece)
    yield from ["".join(letters)] if letters else []


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """The bytes that a token adds to a text; none if it is special. A letter may span several tokens."""
    once, twice = (str(tokenizer.decode([token] * n, skip_special_tokens=True)) for n in (1, 2))
    if _PART_OF_A_LETTER not in once:
        return twice[len(once) :].encode()  # at the beginning of a text, some tokenizers drop a leading space
    piece = tokenizer.convert_ids_to_tokens(token)
    if code := _BYTE.fullmatch(piece):
        return bytes([int(code[1], 16)])
    return bytes(_SHOWN_BYTES[letter] for letter in piece) if _SHOWN_BYTES.keys() >= {*piece} else once.encode()


class Vocabulary:
    """The letters of each token, kept; and which tokens are tags."""

    def __init__(self, tokenizer: Any, tags: Iterable[str] = (), ends: Iterable[int] = ()) -> None:
        """`ends` are tokens that end a turn: they are no text, even if the tokenizer does not call them special."""
        self._tokenizer = tokenizer
        tags, ends = tuple(tags), tuple(ends)
        self.shown_ends = any(token_bytes(tokenizer, token) for token in ends)
        """Whether engines show such a token as text."""
        self._known: dict[int, bytes] = dict.fromkeys(ends, b"")
        encoded = {tag: tokenizer.encode(tag, add_special_tokens=False) for tag in tags}
        self.marks: Mapping[int, Tag] = {int(ids[0]): Tag(tag) for tag, ids in encoded.items() if len(ids) == 1}
        """Tags that are one token: no other tokens are this tag."""
        self.spelled = tuple(tag for tag, ids in encoded.items() if len(ids) > 1)
        """Tags that several tokens spell."""
        self.silent = {tag for token, tag in self.marks.items() if not token_bytes(tokenizer, token)}
        """Special tokens, which are in no engine's text."""

    @property
    def is_text(self) -> bool:
        """Whether the text of engines is what the template shows."""
        return not (self.silent or self.shown_ends)

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token adds to a text."""
        if (known := self._known.get(token)) is None:
            known = token_bytes(self._tokenizer, token)
            if len(self._known) < _MOST_KNOWN:
                self._known[token] = known
        return known

    def at_start(self, token: int) -> bytes:
        """The bytes of a text's first token: some tokenizers drop a leading space."""
        if self.bytes_of(token) == b"":
            return b""
        text = str(self._tokenizer.decode([token], skip_special_tokens=True))
        return self.bytes_of(token) if _PART_OF_A_LETTER in text else text.encode()


class TagScanner:
    """Finds tags in letters that come in pieces; letters that may begin a tag wait."""

    def __init__(self, spelled: Iterable[str], wanted: Callable[[], re.Pattern[str] | None]) -> None:
        """`spelled` are the tags that several tokens spell, `wanted` matches those that count now."""
        self._spelled, self._wanted = tuple(spelled), wanted
        self._longest = max(map(len, self._spelled), default=1)
        self._waiting = ""

    def of(self, piece: str) -> Iterator[str]:
        """The letters and tags that are certain. Each must be used before the next is asked for."""
        if isinstance(piece, Tag):
            yield from self.end()
            yield piece
            return
        left, at, self._waiting = self._waiting + piece, 0, ""
        while (wanted := self._wanted()) and (found := wanted.search(left, at)):
            if found.start() > at:
                yield left[at : found.start()]
            at = found.end()
            yield Tag(found[0])
        end = len(left) - (self._begun(left[at:]) if self._wanted() else 0)
        self._waiting = left[end:]
        if end > at:
            yield left[at:end]

    def end(self) -> Iterator[str]:
        """The letters that waited."""
        waiting, self._waiting = self._waiting, ""
        yield from [waiting] if waiting else []

    def _begun(self, letters: str) -> int:
        """How many letters at the end may begin a tag."""
        lengths = range(min(len(letters), self._longest - 1), 0, -1)
        return next((n for n in lengths if any(tag.startswith(letters[-n:]) for tag in self._spelled)), 0)


def any_of(tags: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern of tags; None if there are none."""
    ordered = sorted(filter(None, tags), key=lambda tag: (-len(tag), tag))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


class Letters:
    """The letters and tags of one turn while it is sampled. Letters that may begin a stop string are held back."""

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str]) -> None:
        self._vocabulary, self._stops = vocabulary, tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._keep = max(map(len, self._stops), default=1) - 1
        self._held: deque[str] = deque()
        self._text = ""
        """What is held, in the text of engines."""
        self._begun = self._stopped = False

    def of(self, tokens: Iterable[int]) -> list[str]:
        """The pieces of further tokens that are certain."""
        marks, given = self._vocabulary.marks, list[str]()
        for token in map(int, tokens):
            if self._stopped:
                break
            if token in marks:
                self._hold(self._decoder.decode(b"", True))
                self._hold(marks[token])
                self._decoder.reset()
            else:
                known = self._vocabulary.bytes_of if self._begun else self._vocabulary.at_start
                self._hold(self._decoder.decode(known(token)))
            self._begun = True
            given += self._certain()
        return given

    def end(self) -> list[str]:
        """The pieces that were held back."""
        if not self._stopped:
            self._hold(self._decoder.decode(b"", True))
        given, self._keep = self._certain(), 0
        return given + self._certain()

    def _hold(self, piece: str) -> None:
        if piece:
            self._held.append(piece)
            self._text += self._letters(piece)

    def _certain(self) -> list[str]:
        """Take the pieces before the last `_keep` letters, or before a stop string."""
        if self._stops and not self._stopped and (stop := met(self._text, self._stops)):
            self._stopped, self._keep = True, 0
            self._held = deque(_first(self._held, self._text.index(stop), self._letters))
        given, at, end = list[str](), 0, max(0, len(self._text) - self._keep)
        while self._held:
            piece = self._held[0]
            size = len(self._letters(piece))
            if size > end - at:
                if at < end and not isinstance(piece, Tag):
                    given.append(piece[: end - at])
                    self._held[0], at = piece[end - at :], end
                break
            given.append(self._held.popleft())
            at += size
        self._text = self._text[at:]
        return given

    def _letters(self, piece: str) -> str:
        """A piece in the text of engines, which has no special tokens."""
        return "" if piece in self._vocabulary.silent and isinstance(piece, Tag) else piece


def _first(pieces: Iterable[str], n_letters: int, letters: Callable[[str], str]) -> Iterator[str]:
    """The pieces with the first letters."""
    for piece in pieces:
        size = len(letters(piece))
        if size > n_letters:
            if n_letters and not isinstance(piece, Tag):
                yield piece[:n_letters]
            return
        yield piece
        n_letters -= size
