"""What a request's `response_format` asks of an answer, as a grammar that sampling keeps to."""

from __future__ import annotations

import json
from typing import Any

from motet.errors import EpisodeRefusal

_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to write JSON, so that no answer is spent on spaces."""
_LONGEST = 16_000
"""What a schema costs for each token grows faster than its length."""


def grammar_of(asked: Any, *, tools: bool) -> str:
    """The grammar of llguidance for a `response_format` of chat or a `text.format` of responses; none for text.

    Where tools are offered, an answer may call them instead, from its beginning.

    Raises:
        EpisodeRefusal: it cannot be kept to; says why.
    """
    if asked is None:
        return ""
    if not isinstance(asked, dict):
        raise EpisodeRefusal(f"response_format must be an object with a `type`, not {asked!r:.80}")
    if (kind := asked.get("type")) == "text":
        return ""
    if kind == "json_object":
        schema: Any = {"type": "object"}
    elif kind == "json_schema":
        holder = asked.get("json_schema", asked)
        schema = holder.get("schema") if isinstance(holder, dict) else holder
    else:
        raise EpisodeRefusal(
            f"response_format: type {kind!r} is not known here; it is text, json_object or json_schema"
        )
    if not isinstance(schema, dict):
        raise EpisodeRefusal(f"response_format: json_schema must have a `schema`, an object, not {schema!r:.80}")
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise EpisodeRefusal(
            "response_format needs llguidance, which is not installed: pip install 'motet[serve]'"
        ) from error
    answer = json.dumps({"x-guidance": _SPACES, **schema})
    if len(answer) > _LONGEST:
        raise EpisodeRefusal(f"response_format: the schema has {len(answer)} characters; {_LONGEST} are the most")
    grammar: str = LLMatcher.grammar_from_lark(
        f'start: answer | CALL\nanswer: %json {answer}\nCALL: "<tool_call>" /(.|\\n)*/'
        if tools
        else f"start: %json {answer}"
    )
    wrong, (reason, *_) = _checked(grammar)
    if wrong:
        raise EpisodeRefusal(f"response_format: the schema cannot be kept to: {' '.join(reason.split())[:300]}")
    return grammar


def _checked(grammar: str) -> tuple[bool, list[str]]:
    from llguidance import LLMatcher

    wrong, reasons = LLMatcher.validate_grammar_with_warnings(grammar)
    return wrong, [*reasons, ""]
