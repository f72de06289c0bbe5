"""Grammars of answers in a base's form: what is bound begins after the thought, and calls stay possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from motet.chat.turn_formats.arguments import schemas_of
from motet.chat.turn_formats.grammar_tokens import Marks
from motet.chat.turn_formats.parser import TurnForm
from motet.chat.turn_formats.turns import ReadsTurns, Tools
from motet.core.types import IntArray, SamplingParams, schema_of


def turn_grammar(chat: ReadsTurns, sampling: SamplingParams, prompt_ids: IntArray, tools: Tools) -> str:
    """The grammar of a turn after a prompt, whose answer keeps to the grammar of `sampling`."""
    opened, names = chat.reader(prompt_ids).opened, [*schemas_of(tools)] if tools else None
    return in_form(sampling.grammar, chat.form, chat.tokenizer, sampling.stop_token_ids, opened=opened, tools=names)


def in_form(
    grammar: str,
    form: TurnForm,
    tokenizer: Any,
    ends: Sequence[int],
    *,
    opened: str = "",
    tools: Sequence[str] | None = None,
) -> str:
    """The grammar of a turn whose answer keeps to a grammar of JSON.

    Args:
        grammar: `JSON_GRAMMAR` with a schema.
        form: How the base writes a turn.
        tokenizer: The base's.
        ends: The ids that end a turn.
        opened: What the prompt has written of the turn: the mark of an open thought, which then must end.
        tools: The names of the tools that the turn may call instead of an answer; None if none are offered.
    """
    rules = form.rules(Marks(tokenizer, ends), opened, tools)
    return "\n".join([*rules, f"answer: %json {schema_of(grammar)}"]) if rules else grammar
