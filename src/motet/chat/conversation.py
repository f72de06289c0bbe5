"""Conversations of data as tokens. What is trained is what the chat template writes.

A turn is what the template writes behind its generation prompt where the turn is the last one, because that is what the
model samples: with headers, thoughts and spaces, up to the token that ends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from motet.chat.template import Chat, Tools
from motet.chat.template_parts import THOUGHT_TAGS
from motet.core.batch import Example
from motet.core.types import IntArray, Message, Problem, ToolCall

_OTHER = Message("assistant", "7other7text7", (ToolCall("7other7name7", {}),), thought="7other7thought7")
_ASKED = Message("user", "a")
_FIRST = 64
"""Prompts that are looked at for special tokens."""


@dataclass(frozen=True)
class WrittenTurn:
    """A turn of the assistant, and its prompt, as text."""

    prompt: str
    own: str
    """Without the token that ends it."""
    end: str
    """The token that ends it where it is the last turn, see `Chat.ends`."""

    @classmethod
    def of(cls, chat: Chat, before: Sequence[Message], turn: Message, tools: Tools) -> WrittenTurn:
        """How the template writes a turn. Raises BaseModelError if it refuses the conversation."""
        prompt = chat.rendered(before, tools)
        # Some templates write a history otherwise where another turn follows, and a single question in one way.
        text = _behind_prompt(chat, before, turn, tools, prompt)
        if text is None:
            text = _behind_prompt(chat, (_ASKED,), turn, tools, chat.rendered((_ASKED,), tools))
        if text is None:
            return cls(prompt, _put_together(chat, prompt, turn), chat.spellings.marked(chat.end_of_turn))
        own, end = chat.spellings.ended(text)
        return cls(prompt, _thought_ended(chat, prompt, turn, own), end or chat.ends[bool(turn.tool_calls)])


def examples_of(chat: Chat, messages: Sequence[Message], first: int, tools: Tools) -> Iterator[Example]:
    """A conversation whose turns of the assistant from message `first` on are trained, example by example.

    One example, unless the template rewrites earlier turns, as many drop thoughts: then a turn is trained in an example
    that ends where the next one no longer has it. Raises BaseModelError if the template refuses the conversation.
    """
    given, messages = len(messages), chat.with_tools(tuple(messages), tools)
    first += len(messages) - given
    if not chat.chat_template:
        yield _plain(chat, messages, first)
        return
    before, learned = (chat.wording.turns(part) for part in (messages[:first], messages[first:]))
    messages, first = (*before, *learned), len(before)
    example: _Growing | None = None
    for index in range(first, len(messages)):
        if messages[index].role == "assistant":
            turn = WrittenTurn.of(chat, messages[:index], messages[index], tools)
            if example is None or not example.read(turn.prompt):
                if example is not None:
                    yield example.example()
                example = _Growing(chat, turn.prompt, [(chat.prompt_encoded(turn.prompt), False)])
            example.say(turn, messages[index].learned)
    if example is not None:
        yield example.example()


@dataclass(eq=False)
class _Growing:
    """An example, turn by turn."""

    chat: Chat
    text: str
    pieces: list[tuple[IntArray, bool]]
    """Token ids, and whether they are trained."""
    end: str = ""
    learned: bool = False

    def say(self, turn: WrittenTurn, learned: bool) -> None:
        self.text, self.end, self.learned = turn.prompt + turn.own, turn.end, learned
        self.pieces.append((self.chat.encoded(turn.own), learned))

    def read(self, prompt: str) -> bool:
        """Go on with the prompt of a later turn; False if it does not have the text so far."""
        if not prompt.startswith(self.text):
            return False
        rest = prompt[len(self.text) :]
        end = self.chat.spellings.first(rest) if self.end else ""  # in the middle, some templates write another one
        self.pieces += [(self.chat.encoded(end), self.learned), (self.chat.encoded(rest[len(end) :]), False)]
        return True

    def example(self) -> Example:
        return _joined([*self.pieces, (self.chat.encoded(self.end), self.learned)])


def _joined(pieces: Sequence[tuple[IntArray, bool]]) -> Example:
    mask = [np.full(len(ids), learned) for ids, learned in pieces]
    return Example(np.concatenate([ids for ids, _ in pieces]).astype(np.int32), np.concatenate(mask))


def _plain(chat: Chat, messages: Sequence[Message], first: int) -> Example:
    """Without a template, an answer is its text and EOS."""
    pieces, replies = [(chat.prompt_of(messages[:first]), False)], list[Message]()
    for index in range(first, len(messages)):
        message = messages[index]
        if message.role != "assistant":
            replies.append(message)
            continue
        if index > first:
            pieces.append((chat.between(replies), False))
        text = chat.marked_text(message)
        if index == first:
            text = _opened_once(chat, chat.rendered(messages[:first]), text)
        pieces.append((_ended(chat.encoded(text), chat.tokenizer.eos_token_id), message.learned))
        replies = []
    return _joined(pieces)


def _ended(ids: IntArray, eos: int | None) -> IntArray:
    """An answer that ends with EOS, once."""
    return ids if eos is None or ids[-1:].tolist() == [eos] else np.append(ids, np.int32(eos))


def _behind_prompt(chat: Chat, before: Sequence[Message], turn: Message, tools: Tools, prompt: str) -> str | None:
    """What the template writes of a turn behind its prompt; None if it cannot be found.

    If its template writes the history otherwise than in the prompt, the turn is behind the header that a generation prompt
    adds, the last one before the first word of the turn. A thought that the prompt opens is a part of the turn.
    """
    whole = chat.rendered((*before, turn), tools, generation_prompt=False)
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    header = prompt.removeprefix(chat.rendered(before, tools, generation_prompt=False))
    if header == prompt or not (header := _unopened(chat, header)):
        return None
    said = Message(
        "assistant",
        _OTHER.content if turn.content else "",
        _OTHER.tool_calls if turn.tool_calls else (),
        thought=_OTHER.thought if turn.thought else "",
    )
    other = chat.rendered((*before, said), tools, generation_prompt=False)
    same = next((at for at, (left, right) in enumerate(zip(whole, other, strict=False)) if left != right), len(whole))
    start = whole.rfind(header, 0, same)
    return None if start < 0 else whole[start + len(header) :]


def _put_together(chat: Chat, prompt: str, turn: Message) -> str:
    """A turn behind a prompt that its template never writes before it."""
    text = _opened_once(chat, prompt, chat.marked_text(replace(turn, thought="")))
    if turn.thought and _opens(chat, prompt):
        return _with_thought(chat, prompt, turn, text)
    return _thought_ended(chat, prompt, turn, text)


def _thought_ended(chat: Chat, prompt: str, turn: Message, text: str) -> str:
    """A turn in which a thought that the prompt opens has one mark and an end."""
    if not _opens(chat, prompt):
        return text
    text = _opened_once(chat, prompt, text)
    if _tags(chat)[1] not in text:
        return _with_thought(chat, prompt, turn, text)
    return text


def _with_thought(chat: Chat, prompt: str, turn: Message, text: str) -> str:
    text = f"{chat.marked_text(Message('user', turn.thought))}\n{_tags(chat)[1]}\n\n{text}"
    return text if prompt.endswith("\n") or text.startswith("\n") else f"\n{text}"


def _tags(chat: Chat) -> tuple[str, str]:
    """The marks around a thought."""
    opens, closes = map(chat.spellings.marked, chat.form.thought or THOUGHT_TAGS)
    return opens, closes


def _opens(chat: Chat, prompt: str) -> bool:
    """Whether a prompt opens a thought."""
    return prompt.rstrip().endswith(_tags(chat)[0])


def _unopened(chat: Chat, header: str) -> str:
    """A header without the mark of an open thought."""
    return header.rstrip().removesuffix(_tags(chat)[0]) if _opens(chat, header) else header


def _opened_once(chat: Chat, prompt: str, text: str) -> str:
    """A turn without the mark of a thought that its prompt has opened."""
    opens, _ = _tags(chat)
    if _opens(chat, prompt) and text.lstrip().startswith(opens):
        return text.lstrip().removeprefix(opens).removeprefix("\n")
    return text


def rendered_already(chat: Chat, problems: Sequence[Problem]) -> str:
    """A note about prompts that somebody rendered through a template before; empty if none is."""
    some = problems[: min(len(problems), _FIRST)]
    found = [problem for problem in some if chat.spellings.special.begins(problem.messages[0].content.lstrip())]
    if not found:
        return ""
    has_tokens = any(problem.messages[0].special for problem in found)
    if has_tokens and not chat.chat_template:
        return ""
    name = found[0].messages[0].content.lstrip()[:40]
    again = (
        "the template renders them again"
        if chat.chat_template and has_tokens
        else "their special tokens are read as letters"
    )
    wanted = [] if has_tokens else ["data.special_tokens: true"]
    wanted += ["data.chat_template: false"] if chat.chat_template else []
    return (
        f"{len(found)} of the first {len(some)} prompts are rendered already, such as {name!r} in row {found[0].id + 1}, and "
        f"{again}: set {' and '.join(wanted)}, or give messages"
    )
