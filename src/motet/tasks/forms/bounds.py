"""Grammars of answers in a base's form: what is bound begins after the thought, and calls stay possible.

Marks that are one token are written as this token (`<[5]>`), others as their letters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from motet.core.types import IntArray, SamplingParams, schema_of
from motet.tasks.forms.reading import TurnForm
from motet.tasks.forms.turns import ReadsTurns, Tools

_SPACE = "/\\s{0,8}/"
"""Between a thought and what follows it; more would let a model write spaces to the end."""


def turn_grammar(chat: ReadsTurns, sampling: SamplingParams, prompt_ids: IntArray, tools: Tools) -> str:
    """The grammar of a turn after a prompt, whose answer keeps to the grammar of `sampling`."""
    opened = bool(chat.reader(prompt_ids).opened)
    return in_form(
        sampling.grammar, chat.form, chat.tokenizer, sampling.stop_token_ids, opened=opened, tools=bool(tools)
    )


def in_form(
    grammar: str, form: TurnForm, tokenizer: Any, ends: Sequence[int], *, opened: bool = False, tools: bool = False
) -> str:
    """The grammar of a turn whose answer keeps to a grammar of JSON.

    Args:
        grammar: `JSON_GRAMMAR` with a schema.
        form: How the base writes a turn.
        tokenizer: The base's.
        ends: The ids that end a turn.
        opened: Whether the prompt has opened a thought, which then must end.
        tools: Whether the turn may call tools instead of an answer.
    """
    calls = form.calls.opens if tools and form.calls is not None else ()
    if not (form.thought or calls):
        return grammar
    rules = []
    if form.thought:
        _, closes = form.thought
        token = _token(tokenizer, closes)
        if token is None:
            letters = re.escape(closes).replace("/", "\\/")
            rules += ["thought: inside SPACE", f"inside[lazy]: /(?s:.*){letters}/"]
        else:
            rules += [f"thought: {_but(token, *ends)}* {_mark(tokenizer, closes)} SPACE"]
        rules.append(f"SPACE: {_SPACE}")
    begins = "" if not form.thought else "thought " if opened else f"({_mark(tokenizer, form.thought[0])} thought)? "
    if calls:
        marks = " | ".join(_mark(tokenizer, mark) for mark in calls)
        rules.append(f"call: ({marks}) {_but(*ends)}*")
    start = f"start: {begins}{'(answer | call)' if calls else 'answer'}"
    return "\n".join([start, *rules, f"answer: %json {schema_of(grammar)}"])


def _token(tokenizer: Any, mark: str) -> int | None:
    """The token that is a mark, if it was added to the vocabulary as one."""
    ids = tokenizer.encode(mark, add_special_tokens=False)
    return int(ids[0]) if len(ids) == 1 and int(ids[0]) in tokenizer.added_tokens_decoder else None


def _mark(tokenizer: Any, mark: str) -> str:
    token = _token(tokenizer, mark)
    return json.dumps(mark) if token is None else f"<[{token}]>"


def _but(*tokens: int) -> str:
    """Any token but these."""
    return f"<[^{','.join(map(str, sorted(set(tokens))))}]>" if tokens else "<[*]>"
