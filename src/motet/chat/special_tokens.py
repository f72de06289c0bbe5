"""Whose letters: a token that a chat template writes is a token, the same letters in somebody's text are letters.

Texts that are put into a conversation are sealed before the template sees them: a sign parts the letters of each token.
What the template then writes unparted is its own. It is marked, and the seal is taken out. A text with marks is
tokenised by a copy of the tokenizer that has its tokens under marked names, and so reads nothing else as a token.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer

from motet.chat.template_parts import PART_TAGS
from motet.core.types import Message, ToolCall

_TAG = re.compile(r"[<\[]\S*\w\S*[>\]]")
_MARK = f"\ue000{secrets.token_hex(8)}\ue001"
"""No text has it by chance. It is in no prompt, and no token depends on it."""
_SEAL = "7026170548063217"
"""Digits, which no template trims, escapes or writes otherwise."""


class TokenEscaper:
    """The special tokens of a tokenizer, and the tags that its template writes around the parts of a turn."""

    def __init__(self, tokenizer: Any, source: str, form_tags: tuple[str, ...] = ()) -> None:
        """`source` is the chat template's, empty for none; `form_tags` are tags that it may lack, of a form named by hand."""
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        tags = {token.content for token in added if token.content in PART_TAGS or token.content in source}
        parts = {name for name in tags if name in PART_TAGS or (name not in special and _TAG.fullmatch(name))}
        parts |= {token.content for token in added if token.content in form_tags and token.content not in special}
        self.all = _Names(special | parts)
        """Everything that is a token in the template's text and letters in a user's."""
        self.special = _Names(special - parts)
        """What is no token in the text of an assistant or a system message either; tags of parts are."""
        names = special | parts
        self._normalizer = (
            tokenizer.backend_tokenizer.normalizer
            if any(token.content in names and token.normalized for token in added)
            else None
        )
        self._copy: Tokenizer | None = None

    @classmethod
    def of(cls, tokenizer: Any, source: str, form_tags: tuple[str, ...] = ()) -> TokenEscaper:
        """Those of a tokenizer, kept with it."""
        known, key = _KNOWN.setdefault(tokenizer, {}), (source, form_tags)
        if key not in known:
            known[key] = cls(tokenizer, source, form_tags)
        return known[key]

    def sealed(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]], str]:
        """A conversation and its tools, sealed, and the seal; it is empty where no text has a token's letters.

        Raises RecursionError for tools or arguments that are nested too deep.
        """
        calls = ([[call.name, call.arguments] for call in turn.tool_calls] for turn in messages)
        own = [[turn.content, turn.thought, turn.name, made] for turn, made in zip(messages, calls, strict=True)]
        texts = "\n".join(_texts([own, tools]))
        if not self.all.found(texts):
            return messages, tools, ""
        seal = _SEAL
        if seal in texts:  # no text has the digits of its own sum
            seal = str(int.from_bytes(hashlib.blake2b(texts.encode(errors="replace"), digest_size=16).digest()))
        return [self._message(turn, seal) for turn in messages], [self._value(tool, seal) for tool in tools], seal

    def _message(self, message: Message, seal: str) -> Message:
        names = self.special if message.role in ("assistant", "system") else self.all
        given, rest, theirs = _owned(message)
        calls = tuple(ToolCall(*self._value([call.name, call.arguments], seal)) for call in message.tool_calls)
        return Message(
            message.role,
            given + names.parted(rest, seal) + self.all.parted(theirs, seal),
            calls,
            self.all.parted(message.name, seal),
            message.learned,
            self.all.parted(message.thought, seal),
        )

    def _value(self, value: Any, seal: str) -> Any:
        if isinstance(value, str):
            return self.all.parted(value, seal)
        if isinstance(value, Mapping):
            return {self._value(name, seal): self._value(item, seal) for name, item in value.items()}
        return [self._value(item, seal) for item in value] if isinstance(value, list | tuple) else value

    def marked(self, text: str, seal: str = "") -> str:
        """What a template wrote, with its tokens marked and without the seal."""
        text = self.all.parted(text, _MARK)
        return text.replace(seal, "") if seal else text

    def text_of(self, message: Message) -> str:
        """The text of a message alone, with the tokens marked that are tokens in it."""
        names = self.all if message.role not in ("assistant", "system") else self.special
        given, rest, theirs = _owned(message)
        own = (piece if at % 2 else self.all.parted(piece, _MARK) for at, piece in enumerate(names.pieces(rest)))
        return self.all.parted(given, _MARK) + "".join(own) + theirs

    def encode(self, marked: str) -> list[int]:
        """Token ids of a text with marks."""
        text, n_marks = plain(marked), marked.count(_MARK)
        seen = self._normalizer.normalize_str(text) if self._normalizer else text
        if self.all.count(seen) == n_marks:  # all tokens are marked ones
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        if self._copy is None:
            self._copy = _renamed(self._tokenizer, self.all.names)
        return self._copy.encode_batch([marked], add_special_tokens=False)[0].ids  # lets other threads run

    def first(self, marked: str) -> str:
        """The special token with which a text with marks begins, marked; empty if none does."""
        found = self.special.marked.match(marked)
        return found[0] if found else ""

    def ended(self, marked: str) -> tuple[str, str]:
        """A turn's text without its end, and the special token that ends it, marked; empty if none does."""
        text = marked.rstrip()
        found = self.special.marked.search(text, max(0, len(text) - self.special.longest))
        while found and found.end() < len(text):
            found = self.special.marked.search(text, found.start() + 1)
        return (text[: found.start()], found[0]) if found else (marked, "")

    @cached_property
    def before(self) -> list[int]:
        """What the tokenizer puts before a text by itself (BOS)."""
        bare, whole = (self._tokenizer.encode("a", add_special_tokens=adds) for adds in (False, True))
        starts = (at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
        return list(whole[: next(starts, 0)])


_KNOWN: WeakKeyDictionary[Any, dict[tuple[str, tuple[str, ...]], TokenEscaper]] = WeakKeyDictionary()


def plain(marked: str) -> str:
    """A text with marks as a person reads it."""
    return marked.replace(_MARK, "")


class _Names:
    """Names of tokens, found in texts."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = sorted(name for name in names if len(name) > 1)
        self._pattern = _any_of(self.names)
        self.marked = _any_of([_parted(name, _MARK) for name in self.names])
        """The marked tokens in a text with marks."""
        self.longest = max(map(len, self.names), default=0) + len(_MARK)

    def found(self, text: str) -> bool:
        return self._pattern.search(text) is not None

    def begins(self, text: str) -> bool:
        return self._pattern.match(text) is not None

    def count(self, text: str) -> int:
        return sum(1 for _ in self._pattern.finditer(text))

    def pieces(self, text: str) -> list[str]:
        """A text in pieces, of which every second is a name."""
        return re.split(f"({self._pattern.pattern})", text)

    def parted(self, text: str, sign: str) -> str:
        """A text with a sign behind the first letter of each name."""
        return self._pattern.sub(lambda match: _parted(match[0], sign), text)


def _owned(message: Message) -> tuple[str, str, str]:
    """A message's text: where names are tokens, where its role decides, and where they are letters."""
    text = message.content
    end = len(text) - message.letters
    return text[: message.special], text[message.special : end], text[max(end, message.special) :]


def _parted(name: str, sign: str) -> str:
    return f"{name[0]}{sign}{name[1:]}"


def _any_of(names: Sequence[str]) -> re.Pattern[str]:
    """Finds the longest of sorted names at each place, in a time that does not grow with their number."""
    return re.compile(_branches(names, 0) if names else "(?!)")


def _branches(names: Sequence[str], start: int) -> str:
    """A pattern of what follows the common beginning of sorted names, which ends at `start`."""
    low, high = names[0], names[-1]
    same = next((at for at, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    head, ends = re.escape(names[0][start:same]), len(names[0]) == same
    groups = itertools.groupby(names[ends:], key=lambda name: name[same])
    tails = "|".join(_branches(list(group), same) for _, group in groups)
    if not tails:
        return head
    return f"{head}(?:{tails}){'?' if ends else ''}"


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(name)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _renamed(tokenizer: Any, names: Sequence[str]) -> Tokenizer:
    """A copy of a tokenizer that has its tokens under marked names, so that their letters are letters."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    new = {name: _parted(name, _MARK) for name in names}
    for token in parts["added_tokens"]:
        token["content"] = new.get(token["content"], token["content"])
    model = parts["model"]
    if isinstance(vocabulary := model.get("vocab"), dict):
        model["vocab"] = {new.get(name, name): number for name, number in vocabulary.items()}
    elif vocabulary:
        model["vocab"] = [[new.get(name, name), score] for name, score in vocabulary]
    if merges := model.get("merges"):
        pairs = (merge if isinstance(merge, list) else merge.split(" ", 1) for merge in merges)
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & new.keys()]
    if model.get("unk_token") in new:
        model["unk_token"] = new[model["unk_token"]]
    return Tokenizer.from_str(json.dumps({**parts, "truncation": None, "padding": None}))
