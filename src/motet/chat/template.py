"""Conversion between messages and token ids.

Sampled tokens are never decoded and tokenised again: training uses exactly the sampled tokens, so a conversation is
continued by appending ids to ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from motet.chat.clock import with_clock
from motet.chat.special_tokens import TokenEscaper, plain
from motet.chat.template_parts import Wording, apply
from motet.chat.template_variables import ROW_VARIABLES, tools_shown, variables_of
from motet.chat.turn_formats.detect import ASKED
from motet.chat.turn_formats.turns import ReadsTurns
from motet.chat.turn_formats.turns import Tools as Tools  # noqa: PLC0414
from motet.config import DataConfig
from motet.core.errors import BaseModelError, ConfigError
from motet.core.types import IntArray, Message, Problem, ToolCall, TurnParts

# A placeholder for sampled text when a template is rendered; letters and digits only, so that no template trims or escapes it.
_PLACEHOLDER = "7sampled7text7"
_PART_OF_A_LETTER = "\ufffd"
_MOST_PAIRS = 2**15
_MOST_KINDS_OF_ROWS = 64
_ENDS_OF_CALLS = {"<|eot_id|>": "<|eom_id|>"}
"""By a token that a template writes: one that ends calls without being in the template (Llama 3)."""
_CHANCE = re.compile(r"\{[{%](?:(?![%}]\}).)*?(?P<by>\|\s*random\b|\blipsum\s*\()", re.DOTALL)
"""What jinja has that gives another text each time."""
_ASKED = Message("user", "a")
_AROUND = 8


@dataclass(frozen=True)
class Chat(ReadsTurns):
    """How one job talks to the model."""

    tokenizer: Any
    """A `transformers` tokenizer."""
    chat_template: bool = True
    """False: the text of the messages is the prompt, with the tokenizer's own special tokens (BOS)."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the template (`enable_thinking`, …)."""
    clock: str = ""
    """The time that its template sees, in ISO 8601 with its offset; empty for that of the call, and where none reads it."""
    tool_format: str | None = None
    """How the base writes calls; by default its template tells."""
    thoughts: tuple[str, str] | None = None
    """The tags around its thoughts; by default its template and its tokens tell."""
    _pairs: dict[tuple[int, int], str] = field(default_factory=dict, repr=False, compare=False)
    """Text that a token adds after another; a cache."""
    _of_rows: dict[str, Chat] = field(default_factory=dict, repr=False, compare=False)
    """By the variables of rows; a cache."""

    def __post_init__(self) -> None:
        """Check that the tokenizer has a chat template. Raises ConfigError if it has none."""
        if self.chat_template and not self.tokenizer.chat_template:
            raise ConfigError(
                "this base has no chat template (it is not an instruct model): set data.chat_template: false to feed "
                "prompts as they are, or choose the instruct version of the base"
            )

    @classmethod
    def of(cls, tokenizer: Any, config: DataConfig, clock: str = "") -> Chat:
        """The chat for the data section of a job with this clock. Raises ConfigError for a template that draws by chance."""
        chat = cls(
            tokenizer, config.chat_template, config.chat_template_kwargs, clock, config.tool_format, config.thoughts
        )
        return _checked(chat)

    @classmethod
    def plain(cls, tokenizer: Any) -> Chat:
        """A person's chat with a base, through its template if it has one."""
        return cls(tokenizer, bool(tokenizer.chat_template))

    def prompt_text(self, problem: Problem) -> str:
        """The prompt as text."""
        return plain(self._prompt(problem))

    def prompt_ids(self, problem: Problem) -> IntArray:
        """The prompt's token ids, [T]. Raises BaseModelError if the template rejects the conversation."""
        return self.prompt_encoded(self._prompt(problem))

    def _prompt(self, problem: Problem) -> str:
        chat, tools = self.of_row(problem), tools_shown(problem.metadata)
        return chat.rendered(chat.with_tools(problem.messages, tools), tools)

    @property
    def spellings(self) -> TokenEscaper:
        """Which letters are tokens in what the template writes, and letters in texts."""
        return TokenEscaper.of(self.tokenizer, self._source if self.chat_template else "", self.form.tags)

    @property
    def _source(self) -> str:
        return str(self.template_kwargs.get("chat_template") or self.tokenizer.chat_template)

    def of_row(self, problem: Problem) -> Chat:
        """The chat of a problem, whose row may have variables of the template of its own."""
        return _with_variables(self, self._of_rows, variables_of(problem.metadata))

    @cached_property
    def wording(self) -> Wording:
        """How the template takes thoughts, calls and results."""
        if not self.chat_template:
            return Wording(tool_role="user", form=self.form_as_text)
        kwargs = self._given(())
        return Wording.of(lambda turns: apply(self.tokenizer, turns, False, kwargs), self._source, self.form_as_text)

    @cached_property
    def end_of_turn(self) -> str:
        """The special token that ends an answer, as text; empty if the template writes none."""
        end = end_of_turn(self.tokenizer) if self.chat_template else None
        return "" if end is None else self._decode([end])

    @cached_property
    def ends(self) -> tuple[str, str]:
        """The special tokens, marked, that end a last answer and a last call; in GLM's, the next message begins with them."""
        return _ends_of(self)

    def longer_than(self, problem: Problem, most: int) -> bool:
        """Whether a prompt has more tokens than this."""
        text = _of_row(self._prompt, problem)
        return _most_tokens(text) > most and len(self.prompt_encoded(text)) > most

    def longest(self, problems: Sequence[Problem]) -> tuple[int, Problem]:
        """Number of tokens of the longest prompt, and its problem; among equals, the first."""
        most, longest = 0, 0
        for index, problem in enumerate(problems):
            text = _of_row(self._prompt, problem)
            if _most_tokens(text) > most and (length := len(self.prompt_encoded(text))) > most:
                most, longest = length, index
        return most, problems[longest]

    def follow_up_ids(
        self, spoken: Sequence[Message], sampled_ids: IntArray, replies: Sequence[Message], tools: Tools = ()
    ) -> IntArray | None:
        """Token ids between a sampled turn, the last of `spoken`, and the model's next turn, [T].

        None if the template rewrites what was read or sampled, as many drop earlier thoughts. Otherwise the sampled tokens
        stay, however the model spelled its turn. The token that ends the turn appears once: it is omitted here if
        `sampled_ids` ends with it. Raises BaseModelError if the template refuses it or leaves out the assistant's text.
        """
        if not self.chat_template:
            return self.between(replies)
        *before, turn = spoken
        prompt, alone = self.rendered(before, tools), self.rendered(spoken, tools, generation_prompt=False)
        whole = self.rendered((*spoken, *replies), tools)
        own, _ = self.spellings.ended(alone[len(prompt) :])
        if not alone.startswith(prompt) or not whole.startswith(prompt + own):
            return None
        if not own.strip() and turn.content.strip():
            raise BaseModelError("the chat template leaves out the assistant's text: set environment: single")
        ids = self.encoded(whole[len(prompt + own) :])
        last = int(sampled_ids[-1]) if len(sampled_ids) else -1
        if not _is_special(self.tokenizer, last) or self.is_shown_tag(last):
            return ids
        return ids[1:] if len(ids) and ids[0] == last else None

    def between(self, replies: Sequence[Message]) -> IntArray:
        """What is read between two turns without a template, [T]."""
        return self.encoded("\n\n" + "".join(f"{self.marked_text(reply)}\n\n" for reply in replies))

    def marked_text(self, message: Message) -> str:
        """A message as text without a template, with marks where a token is a token."""
        return _as_text(self, message)

    def prompt_of(self, messages: Sequence[Message], tools: Tools = ()) -> IntArray:
        """The token ids of a conversation up to the model's next turn, [T]."""
        return self.prompt_encoded(self.rendered(messages, tools))

    def with_roles(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Messages in roles that the template has."""
        return tuple(replace(turn, role=self.tool_role) if turn.role == "tool" else turn for turn in messages)

    def opening(self, messages: Sequence[Message], tools: Tools) -> tuple[Message, ...]:
        """A conversation with an introduction of its tools."""
        return self.with_tools(self.with_roles(messages), tools)

    def with_tools(self, messages: tuple[Message, ...], tools: Tools) -> tuple[Message, ...]:
        """A conversation with its tools, passed to the template if it supports them, otherwise in a system message."""
        if not tools or self._names(tools):
            return messages
        listed = "\n".join(json.dumps(tool) for tool in tools)
        system, *rest = messages if messages[0].role == "system" else (Message("system", ""), *messages)
        before = system.content and f"{system.content}\n\n"
        told = f"{before}You may call tools{ASKED[self.form.name]}. The tools, as JSON schemas:\n<tools>\n"
        listed = f"{listed}\n</tools>"
        return (replace(system, content=told + listed, letters=len(listed)), *rest)

    @property
    def tool_role(self) -> str:
        """The role of tool results: `user` if the template has no tool role."""
        return self.wording.tool_role

    def _names(self, tools: Tools) -> bool:
        try:
            return self.chat_template and self.rendered((_ASKED,)) != self.rendered((_ASKED,), tools)
        except BaseModelError:
            return False

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token, including special ones; their concatenation is the text of all.

        A character that spans several tokens belongs to the first; the others are empty.
        """
        texts: list[str] = []
        before = -1
        for token in map(int, token_ids):
            if (text := self._pairs.get((before, token))) is None:
                # Some tokenizers drop a leading space at the beginning of a text, but not after a token.
                head = "" if before < 0 else self._decode([before])
                text = self._decode([token] if before < 0 else [before, token])
                text = text[len(head) :] if text.startswith(head) else self._decode([token])
                if len(self._pairs) < _MOST_PAIRS:
                    self._pairs[before, token] = text
            texts.append(text)
            before = token
        index = 0
        while index < len(texts):
            if _PART_OF_A_LETTER in texts[index]:  # bytes of one letter, until they are whole
                for end in range(index + 2, min(index + 5, len(texts)) + 1):
                    whole = self._decode([int(token) for token in token_ids[index:end]])
                    if _PART_OF_A_LETTER not in whole:
                        texts[index:end] = [whole, *[""] * (end - index - 1)]
                        break
            index += 1
        return texts

    def rendered(self, messages: Sequence[Message], tools: Tools = (), *, generation_prompt: bool = True) -> str:
        """A conversation as text with marks, see `TokenEscaper`. Raises BaseModelError if the template refuses it."""
        if not self.chat_template:
            return "\n\n".join(map(self.marked_text, messages))
        try:
            messages, tools, seal = self.spellings.sealed(messages, tools)
        except RecursionError as error:
            raise BaseModelError("tools or the arguments of a call are nested too deep; make them flatter") from error
        in_parts = any(message.thought or message.tool_calls or message.role == "tool" for message in messages)
        given = (self.wording if in_parts else Wording()).given(messages)
        return self.spellings.marked(apply(self.tokenizer, given, generation_prompt, self._given(tools)), seal)

    def _given(self, tools: Tools) -> dict[str, Any]:
        """The template's variables besides the messages."""
        given = {**self.template_kwargs, **({"tools": list(tools)} if tools else {})}
        return with_clock(self.tokenizer, given, self.clock) if self.clock else given

    def encoded(self, text: str) -> IntArray:
        """Token ids of a text with marks, [T].

        Raises BaseModelError for half of a surrogate pair, which tokenizers do not accept.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            raise BaseModelError(f"a text has {half!r}, half of a character, which no tokenizer reads") from error
        return np.asarray(self.spellings.encode(text), np.int32)

    def prompt_encoded(self, text: str) -> IntArray:
        """Token ids of a prompt, [T]: with what the tokenizer puts before a text (BOS) once, and nothing behind it."""
        ids, before = self.encoded(text), np.asarray(self.spellings.before, np.int32)
        if self.chat_template:
            n_twice = len(before) if before.size and np.array_equal(ids[: 2 * len(before)], np.tile(before, 2)) else 0
            return ids[n_twice:]
        return ids if before.size and np.array_equal(ids[: len(before)], before) else np.concatenate([before, ids])

    def _decode(self, ids: Sequence[int] | IntArray) -> str:
        return str(self.tokenizer.decode([int(token) for token in ids], clean_up_tokenization_spaces=False))


def _as_text(chat: Chat, message: Message) -> str:
    spellings, form = chat.spellings, chat.form_as_text
    if message.role == "assistant" and (message.thought or message.tool_calls):
        (sealed,), _, seal = spellings.sealed([message], ())
        return spellings.marked(form.written(TurnParts(sealed.thought, sealed.content, sealed.tool_calls)), seal)
    if message.tool_calls:
        text = form.written(TurnParts("", message.content, message.tool_calls))
        message = replace(message, content=text, tool_calls=())
    return spellings.text_of(message)


def _checked(chat: Chat) -> Chat:
    if chat.chat_template and (found := _CHANCE.search(chat._source)):
        raise ConfigError(
            f"the chat template draws by chance ({found['by']}), so that a row has another prompt each time: give "
            "data.chat_template_kwargs a chat_template without it"
        )
    if chat.thoughts and chat.form.thought != chat.thoughts:
        raise ConfigError(
            "data.thoughts: this base thinks in channels (harmony), which have no such tags; leave it out"
        )
    return chat


def _with_variables(chat: Chat, known: dict[str, Chat], own: Mapping[str, Any]) -> Chat:
    """A chat with a row's variables of the template. Raises BaseModelError if one holds a special token."""
    if not own:
        return chat
    if (found := known.get(key := json.dumps(own, sort_keys=True))) is None:
        if any(chat.spellings.all.found(str(value)) for value in own.values()):
            raise BaseModelError(f"{ROW_VARIABLES} {key:.80} of a row has a special token; take it out")
        found = replace(chat, template_kwargs={**chat.template_kwargs, **own}, _pairs={}, _of_rows={})
        if len(known) < _MOST_KINDS_OF_ROWS:
            known[key] = found
    return found


def _ends_of(chat: Chat) -> tuple[str, str]:
    calls = (ToolCall("f", {}),) * chat.wording.calls
    result = chat.with_roles((Message("tool", "b", name="f"),))
    said, called = Message("assistant", _PLACEHOLDER), Message("assistant", "" if calls else _PLACEHOLDER, calls)
    return _end_before(chat, said, (_ASKED,)), _end_before(chat, called, result)


def _end_before(chat: Chat, turn: Message, replies: tuple[Message, ...]) -> str:
    try:
        alone = chat.rendered((_ASKED, turn), generation_prompt=False)
        whole = chat.rendered((_ASKED, turn, *replies), generation_prompt=False)
    except BaseModelError:  # some templates have no place for such a turn
        return ""
    _, end = chat.spellings.ended(alone)
    following = whole[len(alone) :] if whole.startswith(alone) else ""
    return end or chat.spellings.first(following.lstrip())


def _of_row(prompt: Callable[[Problem], str], problem: Problem) -> str:
    """The prompt. Raises BaseModelError, which names the row, if the template refuses it."""
    try:
        return prompt(problem)
    except BaseModelError as error:
        raise BaseModelError(f"row {problem.id + 1}: {error}") from error


def _most_tokens(text: str) -> int:
    """An upper limit on the tokens of a text, which avoids tokenising most texts: a token has at least one byte."""
    return len(text.encode("utf-8", "surrogatepass")) + _AROUND


def render(tokenizer: Any, messages: Sequence[Message], generation_prompt: bool, kwargs: Mapping[str, Any]) -> str:
    """Messages without calls through the tokenizer's chat template, as text. Raises BaseModelError as `apply`."""
    return apply(tokenizer, Wording().given(messages), generation_prompt, kwargs)


def stop_token_ids(tokenizer: Any, eos_token_ids: Sequence[int] = ()) -> tuple[int, ...]:
    """Ids that end a turn: EOS of the tokenizer and of the generation configuration, and those of the chat template.

    The template's ends of answers and calls are found by rendering them and looking at the special token behind: several
    models call a token EOS that their template never writes.
    """
    stops = {tokenizer.eos_token_id, *eos_token_ids}
    if tokenizer.chat_template:
        stops.add(end_of_turn(tokenizer))
        chat, source = Chat(tokenizer), str(tokenizer.chat_template)
        own = {end for tag, end in _ENDS_OF_CALLS.items() if tag in source} | {*map(plain, chat.ends)}
        stops |= {token for token, name in tokenizer.added_tokens_decoder.items() if str(name) in own}
    return tuple(sorted(int(token) for token in stops if token is not None))


def end_of_turn(tokenizer: Any) -> int | None:
    """The special token that the chat template writes after an answer, if any."""
    messages = (Message("user", "hi"), Message("assistant", _PLACEHOLDER))
    tail = render(tokenizer, messages, False, {}).rpartition(_PLACEHOLDER)[2]
    ids = tokenizer.encode(tail.lstrip(), add_special_tokens=False)
    return int(ids[0]) if ids and _is_special(tokenizer, ids[0]) else None


def _is_special(tokenizer: Any, token: int) -> bool:
    return token in tokenizer.all_special_ids or token in tokenizer.added_tokens_decoder
