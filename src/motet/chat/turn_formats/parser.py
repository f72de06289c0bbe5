"""What a turn of the model says, read from its tokens while they are sampled.

A form says which tags a base writes around its thoughts and calls. A reader of the form takes the tokens of one turn, in
any pieces, and gives what can be shown so far; at the end it gives the turn's parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from motet.chat.turn_formats.arguments import Schemas
from motet.chat.turn_formats.calls import CallsRead, CallStyle, Parting
from motet.chat.turn_formats.grammar_tokens import ONE_LAYOUT, SPACE, Marks
from motet.chat.turn_formats.token_text import Letters, Tag, TagScanner, Vocabulary, any_of, joined, merged
from motet.core.conversation import OPEN_THOUGHT
from motet.core.types import ToolCall, TurnParts

CALLS_CUT_OFF = "the turn was cut off at max_tokens, so its calls are not read"


@dataclass(frozen=True)
class Shown:
    """What can be shown of a turn: its new letters."""

    thought: str = ""
    speech: str = ""
    recalled: bool = False
    """Whether all speech that was shown before was a thought, which is here once more."""


class TurnReader(Protocol):
    """Reads one turn of the model."""

    def take(self, token_ids: Iterable[int]) -> Shown:
        """Read further tokens; returns what can be shown now."""
        ...

    def end(self, *, cut_off: bool) -> tuple[Shown, TurnParts]:
        """The rest that can be shown, and the parts of the turn; a turn that `max_tokens` cut off has no calls."""
        ...

    @property
    def opened(self) -> str:
        """What the prompt has written of the turn already: the mark of an open thought."""
        ...

    @property
    def text(self) -> str:
        """The turn as the template shows it: with the tags of its form, and with `opened`."""
        ...


@dataclass(frozen=True)
class TurnForm:
    """How a base writes a turn."""

    name: str
    thought: tuple[str, str] | None = None
    """The tags around a thought, if it thinks."""
    calls: CallStyle | None = None
    known: bool = True
    """Whether the base's template was recognised, so that its calls can be read."""
    in_template: bool = True
    """Whether the template writes it, if it writes calls; else calls are text to it."""
    writes_thoughts: bool = False
    """Whether `written` has the thoughts of a history, because the template does not write them so."""
    strange: tuple[str, ...] = ()
    """Tokens of the base whose names speak of thoughts, where it has no tags around thoughts that are known."""

    @property
    def told(self) -> str:
        """The form, for a person."""
        thought = f"thoughts between {self.thought[0]} and {self.thought[1]}" if self.thought else "no thoughts"
        if self.strange:
            thought = f"tokens whose meaning Motet does not know ({', '.join(self.strange)})"
        if not self.known:
            calls = "its template writes tool calls in a way that Motet does not know"
            return f"{thought}; {calls}" if self.thought or self.strange else calls  # nor may it know its thoughts
        return f"{thought}, tool calls as {self.name}"

    @property
    def plain(self) -> bool:
        """Whether all text is speech where no tools are offered."""
        return self.thought is None

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags."""
        return (*(self.thought or ()), *(self.calls.tags if self.calls else ()))

    def reader(self, vocabulary: Vocabulary, before: str, schemas: Schemas | None, stops: Sequence[str]) -> TurnReader:
        """A reader of one turn; `before` is the end of its prompt, and without `schemas` no call is read."""
        opened = ""
        if self.thought and (end := re.search(re.escape(self.thought[0]) + r"\s*\Z", before)):
            opened = end[0]
        return _TaggedReader(self, Letters(vocabulary, stops), vocabulary.spelled, opened, schemas)

    def written(self, turn: TurnParts) -> str:
        """A turn as text, which a reader of this form reads as the same parts."""
        calls = self.calls.written(turn.calls) if self.calls and turn.calls else ""
        if self.calls and self.calls.bare and calls and turn.speech:
            calls = next(iter(self.calls.around)) + calls
        text = "\n".join(filter(None, (turn.speech, readable(calls))))
        begins, ends = self.thought or ("", "")
        return f"{begins}\n{turn.thought}\n{ends}\n\n{text}" if begins and turn.thought else text

    def rules(self, marks: Marks, opened: str, tools: Sequence[str] | None) -> list[str]:
        """Rules of llguidance for a turn with the rule `answer`; none if it is the answer alone. See `bounds.in_form`."""
        calls = self.calls if tools is not None else None
        if not (self.thought or calls):
            return []
        begins, rules = "", list[str]()
        if self.thought:
            begins = "thought " if opened else f"SPACE ({marks.written(self.thought[0])} thought)? "
            rules += ["thought: inside SPACE", *marks.until("inside", self.thought[1]), f"SPACE: {SPACE}"]
        if calls:
            ways = [f"({' | '.join(map(marks.written, calls.around))}) {marks.but()}*"]
            if calls.bare:
                ways.append(f"%json {json.dumps(bare_call(tools or ()))}")
            rules.append(f"call: {' | '.join(ways)}")
        return [f"start: {begins}{'(answer | call)' if calls else 'answer'}", *rules]


class _TaggedReader:
    """Reads turns with tags around thoughts and calls."""

    def __init__(
        self, form: TurnForm, letters: Letters, spelled: Sequence[str], opened: str, schemas: Schemas | None
    ) -> None:
        """`spelled` are tags that are found in letters; for `opened`, see `TurnReader`."""
        self.opened = opened
        self._form, self._letters_of, self._schemas = form, letters, schemas
        self._begins, self._ends = form.thought or ("", "")
        self._calls = form.calls if schemas is not None else None
        self._bare = self._calls.bare if self._calls else ""
        self._spelled = frozenset(spelled)
        tags = {self._begins, self._ends}
        self._in_speech = any_of(self._spelled & {*tags, *(self._calls.around if self._calls else ())})
        self._in_thought = any_of(self._spelled & {self._ends})
        self._in_calls = any_of(self._spelled & {*tags, *(self._calls.tags if self._calls else ())})
        self._thinks, self._has_thought = bool(opened), False
        self._again = False
        """Whether a further thought has no letters yet."""
        self._text, self._thought, self._speech = [opened], list[str](), list[str]()
        self._shown = (0, 0)
        """How many pieces of thought and speech were given."""
        self._space: list[str] = []
        """Spaces that are shown if letters follow."""
        self._scanner = TagScanner(spelled, self._wanted)
        self._rest: list[str] = []
        """Everything from the first tag on of which only the end of the turn tells what it is, such as a call's."""

    @property
    def text(self) -> str:
        """See `TurnReader`."""
        return "".join(self._text)

    def take(self, token_ids: Iterable[int]) -> Shown:
        """See `TurnReader`."""
        for piece in self._letters_of.of(token_ids):
            self._read(piece)
        return self._said()

    def end(self, *, cut_off: bool) -> tuple[Shown, TurnParts]:
        """See `TurnReader`."""
        for piece in self._letters_of.end():
            self._read(piece)
        for letters in self._scanner.end():
            self._add(letters)
        calls: tuple[ToolCall, ...] = ()
        unread, recalled = "", False
        if self._thinks:
            unread = open_thought(cut_off=cut_off)
        elif self._rest:
            before = joined([*self._speech, *self._space])
            pieces, tags = list(merged(self._rest)), (self._begins, self._ends)
            rest = Parting(pieces, before, tags, self._calls, self._spelled).read()
            if recalled := rest.recalled:
                self._speech, self._space, self._shown = [], [], (self._shown[0], 0)
            for thought in rest.thoughts:
                self._thought += ["\n\n", thought] if self._thought and thought else [thought]
            self._has_thought |= bool(rest.thoughts)
            read = CallsRead(speech=joined(rest.calls))
            if rest.is_open:
                unread = open_thought(cut_off=cut_off)
            if rest.calls and cut_off:
                unread = unread or CALLS_CUT_OFF
            elif rest.calls and self._calls is not None:
                read = self._calls.read(rest.calls, self._schemas or {})
                unread = unread or read.unread
            calls, around = read.calls, joined([*self._space, *rest.speech, read.speech])
            around = around.rstrip() if calls else around
            self._speech.append(around if self._speech or not (calls or self._has_thought) else around.lstrip())
        elif self._speech or not self._has_thought:
            self._speech += self._space
        shown = replace(self._said(), recalled=recalled)
        return shown, TurnParts("".join(self._thought), "".join(self._speech), calls, unread)

    def _read(self, piece: str) -> None:
        """Read letters or a tag."""
        self._text.append(piece)
        for part in self._scanner.of(piece):
            if isinstance(part, Tag):
                self._tag(part)
            else:
                self._add(part)

    def _wanted(self) -> re.Pattern[str] | None:
        return self._in_thought if self._thinks else self._in_calls if self._rest else self._in_speech

    def _tag(self, tag: Tag) -> None:
        if self._rest:
            self._rest.append(tag)
        elif self._thinks and tag == self._ends:
            self._thinks, self._has_thought, self._space = False, True, []
        elif not self._thinks and tag == self._begins and not (tag in self._spelled and self._speech):
            self._thinks, self._again, self._space = True, bool(self._thought), []
        elif not self._thinks and (tag in (self._begins, self._ends) or (self._calls and tag in self._calls.around)):
            self._rest.append(tag)
        else:
            self._add(str(tag))

    def _add(self, letters: str) -> None:
        """Add letters to what they are in: a thought, speech, or everything from the first call on."""
        if self._rest or not letters.strip():
            (self._rest or self._space).append(letters)
            return
        end = len(letters.rstrip())
        start = end - len(letters[:end].lstrip())
        before = [*self._space, letters[:start]]
        said = self._thought if self._thinks else self._speech
        if self._bare and not said and letters.startswith(self._bare, start) and not self._thinks:
            self._rest.append(letters[start:])
            return
        if self._thinks and self._again:
            said.append("\n\n")
        elif said or not (self._thinks or self._has_thought):
            said += before
        self._again = False
        said.append(letters[start:end])
        self._space = [letters[end:]] if end < len(letters) else []

    def _said(self) -> Shown:
        thought, speech = self._shown
        self._shown = len(self._thought), len(self._speech)
        return Shown("".join(self._thought[thought:]), "".join(self._speech[speech:]))


def readable(calls: str) -> str:
    """Calls without half characters, which no tokenizer reads."""
    return calls.encode(errors="backslashreplace").decode()


def open_thought(*, cut_off: bool) -> str:
    """Why a turn without the end of its thought could not be read."""
    return OPEN_THOUGHT + (", because the turn was cut off at max_tokens" if cut_off else "")


def bare_call(tools: Sequence[str]) -> dict[str, Any]:
    """The JSON schema of a call without tags."""
    fields = {"name": {"enum": list(tools)}, "parameters": {"type": "object"}}
    needed = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    return {"x-guidance": ONE_LAYOUT, **needed}
