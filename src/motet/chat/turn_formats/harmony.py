"""Turns of messages in channels: `<|channel|>analysis<|message|>…<|end|><|start|>assistant…` (harmony, gpt-oss)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from motet.chat.turn_formats.arguments import UNREADABLE, Schemas, broken, plain_arguments, written_json
from motet.chat.turn_formats.calls import CallsRead
from motet.chat.turn_formats.grammar_tokens import Marks
from motet.chat.turn_formats.parser import CALLS_CUT_OFF, Shown, TurnForm, TurnReader, open_thought, readable
from motet.chat.turn_formats.token_text import Letters, Tag, TagScanner, Vocabulary, any_of, joined
from motet.core.types import ToolCall, TurnParts

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_TAGS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
_TAG = re.compile("(" + "|".join(map(re.escape, _TAGS)) + ")")
_TO = re.compile(r"to=([^\s<]+)")
_NO_TOOL = ("assistant", "user", "system", "developer")


@dataclass(frozen=True)
class Harmony(TurnForm):
    """The form of gpt-oss: a thought is in the channel `analysis`, a call is a message to a function."""

    name: str = "harmony"

    @property
    def told(self) -> str:
        """See `TurnForm`."""
        return "thoughts, answers and tool calls in channels (harmony)"

    @property
    def plain(self) -> bool:
        """See `TurnForm`."""
        return False

    @property
    def tags(self) -> tuple[str, ...]:
        """See `TurnForm`."""
        return _TAGS

    def reader(self, vocabulary: Vocabulary, before: str, schemas: Schemas | None, stops: Sequence[str]) -> TurnReader:
        """See `TurnForm`."""
        _, start, head = before.rpartition(_START)
        opened = head.removeprefix("assistant") if start else _MESSAGE
        return _ChannelReader(Letters(vocabulary, stops), vocabulary, opened, schemas)

    def written(self, turn: TurnParts) -> str:
        """See `TurnForm`. The prompt has begun a message; nothing ends the last one."""
        if not (turn.thought or turn.calls):
            return turn.speech
        said = [f"analysis{_MESSAGE}{turn.thought}<|end|>"] if turn.thought else []
        said += [f"{'commentary' if turn.calls else 'final'}{_MESSAGE}{turn.speech}<|end|>"] if turn.speech else []
        for call in turn.calls:
            arguments = readable(written_json(dict(call.arguments), _TAGS))
            said.append(f"commentary to=functions.{call.name} {_CONSTRAIN}json{_MESSAGE}{arguments}<|call|>")
        text = _CHANNEL + f"{_START}assistant{_CHANNEL}".join(said)
        return text.removesuffix("<|call|>" if turn.calls else "<|end|>" if turn.speech else "")

    def rules(self, marks: Marks, opened: str, tools: Sequence[str] | None) -> list[str]:
        """See `TurnForm`. Only a message in the channel `final` is bound; thoughts may come before it."""
        final = f'{marks.written(_CHANNEL)} "final" as_json? {marks.written(_MESSAGE)} answer'
        ends = f'{marks.written("<|end|>")} {marks.written(_START)} "assistant"'
        last = "(final | call)" if tools is not None else "final"
        if not opened.endswith(_MESSAGE):
            begins = f"note* {last}"
        else:
            begins = "answer" if "final" in opened else f"inside {ends} note* {last}"
        rules = [
            f"start: {begins}",
            f'note: {marks.written(_CHANNEL)} ("analysis" | "commentary") {marks.written(_MESSAGE)} inside {ends}',
            f"inside: {marks.but(*_TAGS)}*",
            f"final: {final}",
            f'as_json: " "? {marks.written(_CONSTRAIN)}? "json"',
        ]
        if tools is not None:
            rules.append(f'call: ({marks.written(_CHANNEL)} "commentary to=" | " to=") {marks.but()}*')
        return rules


class _ChannelReader:
    """Reads the messages of one turn."""

    def __init__(self, letters: Letters, vocabulary: Vocabulary, opened: str, schemas: Schemas | None) -> None:
        """For `opened`, see `TurnReader`."""
        self.opened = "" if opened == _MESSAGE else opened
        spelled = any_of(vocabulary.spelled)
        self._letters, self._schemas = letters, schemas
        self._scanner = TagScanner(vocabulary.spelled, lambda: spelled)
        self._header: list[str] | None = []
        """Of the message that begins; None in a message and after its end."""
        self._kind = ""
        """`thought`, `speech` or `call`: what the open message is."""
        self._said: dict[str, list[str]] = {"thought": [], "speech": []}
        self._given = {"thought": 0, "speech": 0}
        self._calls: list[tuple[str, list[str]]] = []
        self._strange = ""
        for piece in filter(None, _TAG.split(opened)):
            self._piece(Tag(piece) if piece in _TAGS else piece)
        self._text: list[str] = [self.opened]

    @property
    def text(self) -> str:
        """See `TurnReader`."""
        last = self._text[-1]
        return joined(self._text[:-1] if isinstance(last, Tag) and last in _ENDS else self._text)

    def take(self, token_ids: Iterable[int]) -> Shown:
        """See `TurnReader`."""
        self._read(self._letters.of(token_ids))
        return self._shown()

    def end(self, *, cut_off: bool) -> tuple[Shown, TurnParts]:
        """See `TurnReader`."""
        self._read(self._letters.end())
        for piece in self._scanner.end():
            self._piece(piece)
        read, unread = CallsRead(), self._strange
        if self._kind == "thought":
            unread = open_thought(cut_off=cut_off)
        elif self._calls and cut_off:
            unread = CALLS_CUT_OFF
        elif self._calls and self._schemas is None:
            unread = "the turn calls a tool, and none is offered"
        elif self._calls:
            read = CallsRead.of([_call(to, joined(body)) for to, body in self._calls], "")
            unread = read.unread or unread
        elif self._header and joined(self._header).strip():
            unread = unread or f"a message has no {_MESSAGE}"
        thought, speech = (joined(self._said[kind]) for kind in ("thought", "speech"))
        return self._shown(), TurnParts(thought, speech, read.calls, unread)

    def _read(self, pieces: Iterable[str]) -> None:
        for piece in pieces:
            self._text.append(piece)
            for part in self._scanner.of(piece):
                self._piece(part)

    def _piece(self, piece: str) -> None:
        tag = piece if isinstance(piece, Tag) else ""
        if tag in _ENDS:
            self._kind, self._header = "", None
        elif tag == _START or (tag == _CHANNEL and self._header is None):
            self._kind, self._header = "", [piece]
        elif self._header is None:
            self._add(piece)
        elif tag == _MESSAGE:
            self._open(joined(self._header))
        else:
            self._header.append(piece)

    def _open(self, header: str) -> None:
        """Begin a message."""
        self._header = None
        channel = header.partition(_CHANNEL)[2].split(maxsplit=1)
        named = channel[0].partition("<")[0] if channel else ""
        to = _TO.search(header)
        if to and to[1] not in _NO_TOOL:
            self._kind = "call"
            self._calls.append((to[1].removeprefix("functions."), []))
            return
        self._kind = "thought" if named == "analysis" else "speech"
        if named not in ("analysis", "commentary", "final", ""):
            self._strange = f"a message is in the channel {named:.40}, which no form has"
        if said := self._said[self._kind]:
            said.append("\n\n")

    def _add(self, piece: str) -> None:
        """Add letters to the open message; tags have no meaning there, and letters behind its end are none of it."""
        if self._kind == "call":
            self._calls[-1][1].append(piece)
        elif self._kind and not isinstance(piece, Tag):
            self._said[self._kind].append(piece)

    def _shown(self) -> Shown:
        thought, speech = (joined(said[self._given[kind] :]) for kind, said in self._said.items())
        self._given = {kind: len(said) for kind, said in self._said.items()}
        return Shown(thought, speech)


def _call(name: str, body: str) -> tuple[ToolCall, str]:
    try:
        return ToolCall(name, plain_arguments(json.loads(body) if body.strip() else {})), ""
    except UNREADABLE as error:
        return broken(body, error)
