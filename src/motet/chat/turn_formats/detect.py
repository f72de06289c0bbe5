"""The forms in which bases write their turns, and how the form of a base is found.

The template is asked to write a thought, and a call with its result. The form is the one that reads the same call back.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from motet.chat.template_errors import let_go
from motet.chat.turn_formats.arguments import schemas_of
from motet.chat.turn_formats.calls import CallStyle
from motet.chat.turn_formats.glm import Glm
from motet.chat.turn_formats.harmony import Harmony
from motet.chat.turn_formats.json_in_tags import JsonInTags
from motet.chat.turn_formats.lfm import Lfm
from motet.chat.turn_formats.llama import Llama
from motet.chat.turn_formats.mistral import Mistral
from motet.chat.turn_formats.parser import TurnForm
from motet.chat.turn_formats.sections import DEEPSEEK, KIMI
from motet.chat.turn_formats.thoughts import GIVE_THOUGHT, THOUGHTS
from motet.chat.turn_formats.token_text import Vocabulary
from motet.chat.turn_formats.xml_in_tags import XmlInTags
from motet.core.types import ToolCall

CALL_STYLES: Mapping[str, CallStyle] = {
    "hermes": JsonInTags(),
    "qwen3_coder": XmlInTags(),
    "glm": Glm(),
    "mistral": Mistral(),
    "llama3_json": Llama(),
    "deepseek_v3": DEEPSEEK,
    "kimi_k2": KIMI,
    "lfm2": Lfm(),
}
"""How calls are written, by the name that `tool_format` has."""
HARMONY = Harmony()
ASKED: Mapping[str, str] = {
    "hermes": ', by <tool_call>{"name": …, "arguments": {…}}</tool_call>',
    "qwen3_coder": ", by <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>",
    "glm": ", by <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>",
    "mistral": ', by [TOOL_CALLS][{"name": …, "arguments": {…}}]',
    "llama3_json": ', by {"name": …, "parameters": {…}} as your whole answer',
    "deepseek_v3": ", by <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "kimi_k2": ", by <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>{…}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "lfm2": ", by <|tool_call_start|>[NAME(KEY=VALUE)]<|tool_call_end|>",
    HARMONY.name: ", by a message to=functions.NAME in the channel commentary, with the arguments as JSON",
    "none": "",
}
"""How a message that introduces tools asks for calls, by form."""
HERMES = TurnForm("hermes", None, CALL_STYLES["hermes"])
"""The most common form: all of a turn but its calls is speech, and these are JSON in tags."""

_ASKED, _THOUGHT, _SAID = "7asked7text7", "7thought7text7", "7said7text7"
"""Letters and digits only, so that no template trims or escapes them."""
_CALL = ToolCall("probed_tool", {"probed_key": "7value7text7"})
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _CALL.name,
            "description": "Probes",
            "parameters": {
                "type": "object",
                "properties": {"probed_key": {"type": "string", "description": "A text"}},
                "required": ["probed_key"],
            },
        },
    }
]
_AROUND = re.compile(rf"(<[^<>\s]+>|\[[A-Z_]+\])\s*{_THOUGHT}\s*(<[^<>\s]+>|\[/[A-Z_]+\])")
_OUTER = re.compile(r"(<[^<>\s/]+>|\[[^\[\]\s/]+\])\s*(?:<function=|\{\s*\"name\")")
"""A tag before a call of XML or JSON."""
_OF_THOUGHTS = re.compile("(?!no).*(think|thought|reasoning|inner(pre|suf)fix|scratchpad|monologue)")
_OF_CALLS = re.compile(".*(toolcall|callstool|toolsprefix|tooluse|functioncall|startaction)")
"""Names of tokens around thoughts and calls."""


def find_form(
    tokenizer: Any,
    template_kwargs: Mapping[str, Any],
    tool_format: str = "",
    *,
    templated: bool = True,
    thoughts: tuple[str, str] | None = None,
) -> TurnForm:
    """How a base writes its turns, by what its template writes and by its tokens.

    `tool_format` names how it calls tools, `thoughts` the tags around its thoughts. Without its template (not `templated`),
    it is asked for calls in the most common form, or in channels if it has them.
    """
    template = _Template(tokenizer, template_kwargs)
    if tool_format == HARMONY.name:
        channels = template.has_channels()
        return replace(HARMONY, in_template=channels, writes_thoughts=not channels)
    if not tool_format and template.has_channels():
        return HARMONY
    found = template.thought()
    thought = thoughts or found
    form = _form_of(template, tool_format, thought, templated=templated)
    strange = template.named(_OF_THOUGHTS) if thought is None else ()
    return replace(form, writes_thoughts=thought != found, strange=strange)


def _form_of(template: _Template, tool_format: str, thought: tuple[str, str] | None, *, templated: bool) -> TurnForm:
    if not (templated or tool_format):
        return replace(HERMES, thought=thought)
    if tool_format:
        style = CALL_STYLES.get(tool_format)
        return TurnForm(tool_format, thought, style, in_template=style is None or template.writes(style, thought))
    for name, style in CALL_STYLES.items() if template.calls else ():
        for wrapped in (*template.in_own_tags(style), style):
            if template.writes(wrapped, thought):
                return TurnForm(name, thought, wrapped)
    if not template.calls and (name := template.introduces()):
        return TurnForm(name, thought, CALL_STYLES[name])
    others = set(template.named(_OF_CALLS)) - {*HERMES.tags}
    return replace(HERMES, thought=thought, known=not (template.calls or template.lists_tools or others))


class _Template:
    """A base's chat template, asked what it writes."""

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any]) -> None:
        self._tokenizer, self._kwargs = tokenizer, kwargs

    def has_channels(self) -> bool:
        """Whether it writes messages in channels."""
        answer = self._rendered([_user(), {"role": "assistant", "content": _SAID}])
        return "<|channel|>" in answer and "<|message|>" in answer

    def thought(self) -> tuple[str, str] | None:
        """The tags around a thought: those that it writes, those that end a prompt, or those that are tokens."""
        for way in GIVE_THOUGHT:
            answer = self._rendered([_user(), way({"role": "assistant", "content": _SAID}, _THOUGHT)])
            if found := _AROUND.search(answer):
                return found[1], found[2]
        prompt = self._rendered([_user()], add_generation_prompt=True)
        added = {str(token) for token in self._tokenizer.added_tokens_decoder.values()}
        for begins, ends in THOUGHTS:
            thought = {"role": "assistant", "content": f"{begins}\n{_THOUGHT}\n{ends}\n\n{_SAID}"}
            history = self._rendered([_user(), thought, _user()])
            dropped = _SAID in history and _THOUGHT not in history
            if dropped or prompt.rstrip().endswith((begins, ends)) or {begins, ends} <= added:
                return begins, ends
        return None

    @cached_property
    def calls(self) -> list[str]:
        """Turns with one call as it writes them, in the ways in which templates take calls; none if it writes no calls."""
        written = []
        for arguments, own in itertools.product(
            (dict(_CALL.arguments), '{"probed_key": "7value7text7"}'), ("call12345", f"functions.{_CALL.name}:0", "")
        ):
            function = {"name": _CALL.name, "arguments": arguments}
            call = {"id": own, "type": "function", "function": function} if own else function
            answer = {"role": "assistant", "content": "", "tool_calls": [call]}
            result = {"role": "tool", "name": _CALL.name, "tool_call_id": own, "content": _SAID}
            for after in ([], [result]):
                text = self._rendered([_user(), answer, *after], tools=_TOOLS).rpartition(_ASKED)[2]
                if _CALL.name in text and "7value7text7" in text:
                    written.append(text)
        return written

    def writes(self, style: CallStyle, thought: tuple[str, str] | None) -> bool:
        """Whether a style reads the call that it writes, and leaves no letters."""
        form = TurnForm("", thought, style)
        added = self._tokenizer.added_tokens_decoder.items()
        vocabulary = Vocabulary(
            self._tokenizer, form.tags, [token for token, name in added if str(name) not in form.tags]
        )
        prompt = self._rendered([_user()], tools=_TOOLS, add_generation_prompt=True)
        for text in self.calls:
            for turn, before in itertools.product(self._turns(text), ("", prompt)):
                reader = form.reader(vocabulary, before, schemas_of(_TOOLS), ())
                reader.take(self._tokenizer.encode(turn, add_special_tokens=False))
                _, parts = reader.end(cut_off=False)
                if parts.calls == (_CALL,) and not parts.speech.strip():
                    return True
        return False

    def _turns(self, text: str) -> Iterator[str]:
        """A turn, with the header before it and, where that can be told, without."""
        header = self._rendered([_user()], tools=_TOOLS, add_generation_prompt=True).rpartition(_ASKED)[2]
        for begins, _ in THOUGHTS:
            header = header.partition(begins)[0]
        yield text
        if text.startswith(header):
            yield text[len(header) :]

    def in_own_tags(self, style: CallStyle) -> Iterator[CallStyle]:
        """A style with the tags that the template writes around its call, where they are a pair."""
        for text in self.calls if isinstance(style, JsonInTags | XmlInTags) else ():
            for tag in _OUTER.findall(text):
                for end in (f"{tag[0]}/{tag[1:]}", f"{tag[:2]}/{tag[2:]}"):
                    if end in text:
                        yield replace(style, outer=(tag, end))  # type: ignore[type-var]

    def named(self, names: re.Pattern[str]) -> tuple[str, ...]:
        """The added tokens in brackets whose names, their letters alone, match."""
        added = (str(token) for token in self._tokenizer.added_tokens_decoder.values())
        return tuple(tag for tag in added if tag[:1] in "<[" and names.match("".join(filter(str.isalpha, tag.lower()))))

    def introduces(self) -> str:
        """The style whose tags it names where it lists tools; empty if it lists none, or names none."""
        if not self.lists_tools:
            return ""
        named = {name: sum(tag in self._told for tag in style.around) for name, style in CALL_STYLES.items()}
        return max(named, key=lambda name: named[name]) if any(named.values()) else ""

    @property
    def lists_tools(self) -> bool:
        """Whether it tells the model which tools there are."""
        return _CALL.name in self._told

    @cached_property
    def _told(self) -> str:
        return self._rendered([_user()], tools=_TOOLS)

    def _rendered(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        """Messages as text; empty if it refuses them, or there is no template."""
        if not self._tokenizer.chat_template:
            return ""
        given = {"tokenize": False, "add_generation_prompt": False, **self._kwargs, **kwargs}
        try:
            return str(self._tokenizer.apply_chat_template(list(messages), **given))
        except Exception as error:  # templates are programs, and refuse in many ways
            let_go(error)
            return ""


def _user() -> dict[str, str]:
    return {"role": "user", "content": _ASKED}
