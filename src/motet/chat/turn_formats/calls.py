"""How a base writes calls of tools, and where thoughts and speech stand among them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from motet.chat.turn_formats.arguments import MOST_CALLS, Schemas
from motet.chat.turn_formats.token_text import Tag, joined, merged
from motet.core.types import ToolCall

Following = Callable[[], Callable[[str], bool]]
"""Makes a function that is told each piece of a call, and says whether a tag behind it is one."""
_STRING_SIGN = re.compile(r'\\.|"|\n')


@dataclass(frozen=True)
class CallsRead:
    """What a turn says from its first call on."""

    calls: tuple[ToolCall, ...] = ()
    speech: str = ""
    """The text around the calls."""
    unread: str = ""
    """Why a call could not be read; empty if all were."""

    @classmethod
    def of(cls, calls: Sequence[tuple[ToolCall, str]], speech: str) -> CallsRead:
        """Calls, each with what is wrong with it, and the text around them."""
        unread = next((why for _, why in calls if why), "")
        if len(calls) > MOST_CALLS:
            unread = f"the turn has {len(calls)} calls, and only the first {MOST_CALLS} are read"
        return cls(tuple(call for call, _ in calls[:MOST_CALLS]), speech, unread)


class CallStyle(Protocol):
    """How a base writes calls of tools."""

    @property
    def around(self) -> Mapping[str, str]:
        """By the tag with which a call begins: the tag that ends it; empty if none does."""
        ...

    @property
    def tags(self) -> tuple[str, ...]:
        """All of its tags."""
        ...

    @property
    def bare(self) -> str:
        """The letter with which a call begins that has no tag and is all that the turn says; empty if there are none."""
        ...

    @property
    def following(self) -> Following:
        """Where a tag is none in a call, because it is in a string or a value."""
        ...

    def read(self, pieces: Sequence[str], schemas: Schemas) -> CallsRead:
        """Read a turn from its first call on, as letters and tags (`Tag`).

        A broken call becomes a call of a tool that does not exist: the model reads an error.
        """
        ...

    def written(self, calls: Sequence[ToolCall]) -> str:
        """Calls of one turn as text, which `read` reads as the same calls."""
        ...


@dataclass
class Parting:
    """Takes a turn apart from its first tag on of which only the end of the turn tells what it is.

    A thought begins between calls only: within a call, its tags are letters. The first end of a thought without a beginning
    ends one that is everything before it, calls too.
    """

    pieces: list[str]
    """Letters and tags, where no two are letters."""
    before: str
    """What was said before the pieces."""
    thought: tuple[str, str]
    """The tags around a thought; empty if the base has none."""
    style: CallStyle | None
    """None if no call is read."""
    spelled: Collection[str]
    """Tags that several tokens spell."""
    thoughts: list[str] = field(default_factory=list)
    speech: list[str] = field(default_factory=list)
    """Letters before the first call."""
    calls: list[str] = field(default_factory=list)
    """Everything from the first call on but thoughts."""
    is_open: bool = False
    """Whether the last thought has no end."""
    recalled: bool = False
    """Whether a lone end made all before it the first of the thoughts."""
    _careful: bool = True
    """See `between`."""

    def read(self) -> Parting:
        """Read all pieces."""
        some = {self.thought[1], *(self.style.around if self.style else ())}
        last = max((at for at, piece in enumerate(self.pieces) if isinstance(piece, Tag) and piece in some), default=-1)
        at, silent = 0, not self.before.strip()
        while at < len(self.pieces):
            piece, start = self.pieces[at], at
            tag, spelled = piece if isinstance(piece, Tag) else "", piece in self.spelled
            bare = self.style and not tag and silent and self.style.bare and piece.lstrip().startswith(self.style.bare)
            at += 1
            if self.style and (bare or tag in self.style.around):
                at, silent = self._call(self.style, start, at - bool(bare)), False
            elif tag == self.thought[0] != "" and (not spelled or start < last or not self._line_before(start)):
                end = _tag_after(self.pieces, at, self.thought[1:], None)
                self.thoughts.append(joined(self.pieces[at:end]).strip())
                self.is_open, at = end is None, len(self.pieces) if end is None else end + 1
            elif tag == self.thought[1] != "" and not self.recalled and not (spelled and self._beside(start)):
                self.thoughts, self.speech, self.calls = [(self.before + joined(self.pieces[:start])).strip()], [], []
                self.recalled = silent = True
            else:
                silent = silent and not piece.strip()
                (self.calls or self.speech).append(str(piece) if tag in self.thought else piece)
        return self

    def _call(self, style: CallStyle, at: int, first: int) -> int:
        """Keep a call whose inside begins at `first`; returns where it ends."""
        closes = style.around[self.pieces[at]] if first > at else ""
        tags = {closes, *style.around}
        end = _tag_after(self.pieces, first, tags, style.following() if self._careful else None)
        if end is None and self._careful:
            end = _tag_after(self.pieces, first, tags, None)
            self._careful = end is None
        closed = end is not None and self.pieces[end] == closes
        end = len(self.pieces) if end is None else end + closed
        cut = None if closed else _tag_after(self.pieces, first, self.thought, style.following(), end)
        end = end if cut is None else cut  # a call without its end goes up to a thought
        self.calls += [str(piece) if piece in self.thought else piece for piece in self.pieces[at:end]]
        self.calls += [Tag(closes)] if closes and cut is not None else []
        return end

    def _line_before(self, at: int) -> str:
        """What stands before a tag on its line."""
        return (self.pieces[at - 1] if at else self.before).rpartition("\n")[2].strip()

    def _beside(self, at: int) -> str:
        """What stands beside a tag on its line."""
        after = self.pieces[at + 1] if at + 1 < len(self.pieces) else ""
        return self._line_before(at) + (after if isinstance(after, Tag) else after.partition("\n")[0].strip())


def between(pieces: Iterable[str], opens: str, closes: str, following: Following) -> tuple[list[list[str]], str]:
    """The pieces between tags, those after a last tag without an end included; and the text around them.

    What would have no end because of `following` is ended by the next tag.
    """
    whole, at, careful = list(merged(pieces)), 0, True
    bodies: list[list[str]] = []
    around: list[str] = []
    while at < len(whole):
        piece, at = whole[at], at + 1
        if not (isinstance(piece, Tag) and piece == opens):
            around.append(piece)
            continue
        end = _tag_after(whole, at, (opens, closes), following() if careful else None)
        if end is None and careful:
            end = _tag_after(whole, at, (opens, closes), None)
            careful = end is None
        end = len(whole) if end is None else end
        bodies.append(whole[at:end])
        at = end + (end < len(whole) and whole[end] == closes)
    return bodies, joined(around)


def _tag_after(
    pieces: Sequence[str],
    at: int,
    tags: Collection[str],
    follow: Callable[[str], bool] | None,
    end: int | None = None,
) -> int | None:
    """The place of the first of some tags, from a place on and before an end; None if there is none."""
    is_one = True
    for index in range(at, len(pieces) if end is None else end):
        piece = pieces[index]
        if is_one and isinstance(piece, Tag) and piece in tags:
            return index
        is_one = follow is None or follow(piece)
    return None


def outside_strings() -> Callable[[str], bool]:
    """Follows JSON in pieces: whether each ends outside a string, so that a tag behind it is a tag."""
    inside = broken = False

    def outside(piece: str) -> bool:
        nonlocal inside, broken
        for sign in _STRING_SIGN.findall(piece):
            broken |= inside and sign == "\n"  # no string has a line's end
            inside ^= sign == '"'
        return broken or not inside

    return outside
