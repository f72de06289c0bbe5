"""Turns that rows teach, read back by the base's own reader: what the model will say is what the row means."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from motet.chat.conversation import examples_of
from motet.chat.template import Chat, Tools
from motet.chat.template_variables import tools_shown
from motet.chat.turn_formats.detect import CALL_STYLES
from motet.chat.turn_formats.thoughts import THOUGHTS
from motet.core.batch import Example
from motet.core.errors import BaseModelError, DataError
from motet.core.types import Message, Problem, TurnParts
from motet.data.rows import continuations_of, first_learned

_FIRST = 64
"""Rows that are looked at."""
_LONG = 64
"""Messages of a row that is looked at."""
_TAGS = (*itertools.chain(*THOUGHTS), *(tag for style in CALL_STYLES.values() for tag in style.around))


def read_back(chat: Chat, problems: Sequence[Problem], kind: str) -> str:
    """A note about the first rows whose learned turns are read otherwise than the rows say; empty if none is."""
    found = dict[str, list[int]]()
    rows = [problems[at] for at in range(min(len(problems), _FIRST))]
    for row in rows:
        for why in set(_of_row(chat.of_row(row), row, kind)):
            found.setdefault(why, []).append(row.id + 1)
    said = [
        f"{why} ({len(where)} of the first {len(rows)} rows, such as row {where[0]})" for why, where in found.items()
    ]
    return "turns are learned that the base's reader reads otherwise: " + "; ".join(said) if said else ""


def _of_row(chat: Chat, row: Problem, kind: str) -> Iterator[str]:
    tools, where = tools_shown(row.metadata), f"row {row.id + 1}"
    for continuation in continuations_of(row, kind, where) if kind != "soft" else ():
        messages = (*row.messages, *continuation)
        if len(messages) > _LONG:
            continue
        first = first_learned(messages) if kind == "answer" else len(row.messages)
        turns = chat.wording.turns(messages[first:]) if chat.chat_template else messages[first:]
        taught = [turn for turn in turns if turn.role == "assistant" and turn.learned]
        try:
            read = [part for own in examples_of(chat, messages, first, tools) for part in _turns(chat, own, tools)]
        except (BaseModelError, DataError):
            continue  # told where all rows are read
        if len(read) == len(taught):
            yield from itertools.chain.from_iterable(map(_differ, taught, read, itertools.repeat(chat)))


def _turns(chat: Chat, example: Example, tools: Tools) -> Iterator[TurnParts]:
    """The turns of an example that are learned."""
    at = 0
    for learned, run in itertools.groupby(example.loss_mask.tolist()):
        end = at + len(list(run))
        if learned:
            yield chat.parts(example.token_ids[:at], example.token_ids[at:end], tools, cut_off=False)
        at = end


def _differ(said: Message, read: TurnParts, chat: Chat) -> Iterator[str]:
    """How a turn of a row differs from what is read of it."""
    if said.tool_calls and read.calls != said.tool_calls:
        yield f"a call is not read ({read.unread or 'the row shows no tools'}): give the row's tools as tools"
    elif tag := next((tag for tag in _TAGS if tag in read.speech), ""):
        known = f", and this base has {chat.form.told}"
        yield (
            f"{tag} is learned as a text of the answer{known}: give thoughts as reasoning_content of a message, calls as its "
            "tool_calls, and a row's tools as tools"
        )
    elif read.unread:
        yield read.unread
    elif _letters(said.thought) not in _letters(read.thought):
        yield "a thought (reasoning_content) is not learned: this base has no place for it; name its tags in data.thoughts"
    elif _letters(read.speech) not in _letters(said.content) or (said.content.strip() and read == TurnParts()):
        yield f"the text {said.content!r:.60} is learned as {read.speech!r:.60}"


def _letters(text: str) -> str:
    return "".join(text.split())
