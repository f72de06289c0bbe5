"""How a base's chat template writes the parts of a turn: thoughts, calls of tools and their results."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from motet.chat.template_errors import let_go
from motet.chat.turn_formats.detect import CALL_STYLES, HERMES
from motet.chat.turn_formats.parser import TurnForm
from motet.chat.turn_formats.thoughts import GIVE_THOUGHT, THOUGHTS, Given, GiveThought
from motet.core.errors import BaseModelError
from motet.core.types import Message, ToolCall, TurnParts

Write = Callable[[Sequence[Given]], str]
"""Renders messages; raises BaseModelError where the template refuses them."""
NameCall = Callable[[int, str], str]
"""(number in the conversation, tool) → the id of a call."""
THOUGHT_TAGS = THOUGHTS[0]
"""Around the thoughts of bases whose template has no variable for them."""
PART_TAGS = frozenset((*itertools.chain(*THOUGHTS), *CALL_STYLES["hermes"].tags))
"""Tags of parts that an assistant's text may have."""
_NAME, _KEY, _TEXT, _OTHER = "name7of7tool", "key7of7tool", "text7of7turn", "other7name7of7tool"
"""Stand for parts when a template is tried; letters and digits only, so that no template trims or escapes them."""
_QUESTION = Message("user", "hi")
_CALL = ToolCall(_NAME, {_KEY: _TEXT})


def _in_tags(given: Given, thought: str) -> Given:
    opens, closes = THOUGHT_TAGS
    return {**given, "content": f"{opens}\n{thought}\n{closes}\n\n{given['content']}"}


_THOUGHTS: tuple[GiveThought, ...] = (*GIVE_THOUGHT, _in_tags)
"""Ways to give a thought to a template; the first that it writes is taken."""
_IDS: tuple[NameCall | None, ...] = (
    None,
    lambda number, _: f"call{number:05}",  # Mistral's nine letters
    lambda number, name: f"functions.{name}:{number}",  # Kimi's, which has the name in no other place
)
"""Ways to name a call: by its number in the conversation and its tool."""


@dataclass(frozen=True)
class Wording:
    """How one template takes the parts of a turn."""

    thought: GiveThought | None = None
    """None: the template leaves thoughts out."""
    calls: bool = False
    """Whether it writes calls; otherwise they are text, in the base's form."""
    form: TurnForm = HERMES
    several: bool = True
    """Whether it writes several calls of one turn; otherwise each gets a turn."""
    as_json: bool = False
    """Whether it takes the arguments of calls as JSON text."""
    id_of: NameCall | None = None
    """Ids of calls and of their results, if the template wants them."""
    tool_role: str = "tool"
    """The role of tool results: `user` if the template has no other."""

    @classmethod
    def of(cls, write: Write, source: str, form: TurnForm) -> Wording:
        """Try a template with this source; `form` is that of parts that it does not write."""
        found = cls(thought=None if form.writes_thoughts else _thought_of(write, source), form=form)
        asked = (_QUESTION, Message("assistant", "", (_CALL,)))
        twice = (_QUESTION, Message("assistant", "", (_CALL, ToolCall(_OTHER, {_KEY: _TEXT}))))
        ways = itertools.product(_IDS, (False, True)) if form.in_template else ()
        for id_of, as_json in ways:
            way = replace(found, calls=True, as_json=as_json, id_of=id_of)
            text = _tried(write, way.given(asked))
            if _NAME in text and _TEXT in text and f"'{_KEY}'" not in text:  # no mapping as Python prints it
                found = replace(way, several=_OTHER in _tried(write, way.given(twice)))
                break
        result = Message("tool", _TEXT, name=_NAME)
        answered = (_QUESTION, Message("assistant", "" if found.calls else "call", (_CALL,) * found.calls), result)
        written_once = _tried(write, found.given(answered[:-1])).count(_TEXT)
        if _tried(write, found.given(answered)).count(_TEXT) <= written_once:
            found = replace(found, tool_role="user")
        return found

    def turns(self, messages: Sequence[Message]) -> Sequence[Message]:
        """A conversation in which no turn has more calls than the template writes."""
        return messages if self.several or not self.calls else tuple(_one_by_one(messages))

    def given(self, messages: Sequence[Message]) -> list[Given]:
        """A conversation as the template takes it."""
        turns, called, ended = list[Given](), list[Given](), 0
        for message in self.turns(messages):
            role = self.tool_role if message.role == "tool" else message.role
            turn: Given = {"role": role, "content": message.content}
            if message.name:
                turn["name"] = message.name
            if message.tool_calls and self.calls:
                turn["tool_calls"] = [self._call(call, len(called) + at) for at, call in enumerate(message.tool_calls)]
                called += turn["tool_calls"]
            if message.role == "assistant":
                turn["content"] = self._text_of(message, () if "tool_calls" in turn else message.tool_calls)
            if message.thought and self.thought:
                turn = self.thought(turn, message.thought)
            if role == "tool" and self.id_of:
                answered = called[ended]["id"] if ended < len(called) else self.id_of(ended, message.name)
                turn["tool_call_id"] = answered  # the results of many rows do not name their tool
            ended += message.role == "tool"
            turns.append(turn)
        return turns

    def _text_of(self, message: Message, calls: tuple[ToolCall, ...]) -> str:
        """The text of a turn with what the template does not write."""
        thought = message.thought if self.form.writes_thoughts else ""
        return self.form.written(TurnParts(thought, message.content, calls))

    def _call(self, call: ToolCall, number: int) -> Given:
        arguments = dict(call.arguments)
        text = json.dumps(arguments, ensure_ascii=False) if self.as_json else arguments
        named = {"id": self.id_of(number, call.name)} if self.id_of else {}
        return {**named, "type": "function", "function": {"name": call.name, "arguments": text}}


def apply(tokenizer: Any, turns: Sequence[Given], generation_prompt: bool, kwargs: Mapping[str, Any]) -> str:
    """Write messages as text by the tokenizer's chat template. Raises BaseModelError, with the reason, if it refuses."""
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=generation_prompt, **kwargs)
    except Exception as error:  # templates are programs: jinja2's errors and plain Python's alike
        let_go(error)
        roles = ", ".join(turn["role"] for turn in turns)
        raise BaseModelError(
            f"the base's chat template refuses a conversation of {roles}: {error}. Check data.system and "
            "data.chat_template_kwargs, or set data.chat_template: false"
        ) from error
    return str(text)


def _thought_of(write: Write, source: str) -> GiveThought | None:
    """The first way that the template writes and does not refuse beside content and a call; else the first it writes."""
    asked: Given = {"role": "user", "content": "hi"}
    said: Given = {"role": "assistant", "content": _NAME}
    call = {"type": "function", "function": {"name": _OTHER, "arguments": {}}}
    found = None
    for way in _THOUGHTS:
        text = _tried(write, [asked, way(said, _TEXT)])
        if _TEXT in text and f"'{_TEXT}'" not in text and (way is not _in_tags or THOUGHT_TAGS[0] in source):
            found = found or way
            if _tried(write, [asked, way({**said, "tool_calls": [call]}, _TEXT)]):
                return way
    return found


def _tried(write: Write, turns: Sequence[Given]) -> str:
    """A conversation as the template writes it; nothing if it refuses it."""
    try:
        return write(turns)
    except BaseModelError:
        return ""


def _one_by_one(messages: Sequence[Message]) -> Iterator[Message]:
    """A conversation in which each call has a turn of its own, before its result."""
    waiting: list[Message] = []
    for message in messages:
        first, *others = [replace(message, tool_calls=(call,)) for call in message.tool_calls] or [message]
        if message.role != "tool":
            yield from waiting
            waiting = []
        yield first
        if message.role == "tool" and waiting:
            yield waiting.pop(0)
        waiting += [replace(other, content="", thought="") for other in others]
    yield from waiting
