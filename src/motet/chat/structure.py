"""What a request's `response_format` asks of an answer, as a grammar that sampling keeps to."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

from motet.apart import Apart, TooMuchError
from motet.errors import ChatRefusal
from motet.types import JSON_GRAMMAR

_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to write JSON, so that no answer is spent on spaces."""
_LONGEST = 16_000
"""What a schema costs for each token grows faster than its length."""
_MEMORY_MB = 128
"""For compiling a grammar: an engine keeps some of them."""
_KEPT = 256
"""Grammars whose check is remembered."""


def grammar_of(asked: Any, *, tools: bool) -> str:
    """The grammar of llguidance for a `response_format` of chat or a `text.format` of responses; none for text.

    It is not compiled here: `check_grammar` does that.

    Where tools are offered, an answer may call them instead, from its beginning.

    Raises:
        ChatRefusal: it cannot be kept to; says why.
    """
    if asked is None:
        return ""
    if not isinstance(asked, dict):
        raise ChatRefusal(f"response_format must be an object with a `type`, not {asked!r:.80}")
    if (kind := asked.get("type")) == "text":
        return ""
    if kind == "json_object":
        schema: Any = {"type": "object"}
    elif kind == "json_schema":
        holder = asked.get("json_schema", asked)
        schema = holder.get("schema") if isinstance(holder, dict) else holder
    else:
        raise ChatRefusal(f"response_format: type {kind!r} is not known here; it is text, json_object or json_schema")
    if not isinstance(schema, dict):
        raise ChatRefusal(f"response_format: json_schema must have a `schema`, an object, not {schema!r:.80}")
    answer = json.dumps({"x-guidance": _SPACES, **schema})
    if len(answer) > _LONGEST:
        raise ChatRefusal(f"response_format: the schema has {len(answer)} characters; {_LONGEST} are the most")
    return (
        f'start: answer | CALL\nanswer: %json {answer}\nCALL: "<tool_call>" /(.|\\n)*/'
        if tools
        else f"{JSON_GRAMMAR}{answer}"
    )


async def check_grammar(grammar: str, apart: Apart, key: str) -> None:
    """Compile a grammar in a process with limits, in the turn of `key`. Do so before an engine compiles it.

    Raises:
        ChatRefusal: it cannot be kept to, or it takes too much; says why.
        LimitError: too much of this key's waits already.
    """
    if not grammar:
        return
    if (reason := _known.get(grammar)) is None:
        try:
            reason = (await apart.call(key, _wrong_with, grammar.encode("utf-8", "surrogatepass"), _MEMORY_MB)).decode()
        except TooMuchError as error:
            reason = f"the schema is too complex: {error}; use fewer or simpler patterns"
            if error.by_clock:
                raise ChatRefusal(f"response_format: {reason}, or try again later") from error
        _known[grammar] = reason
        while len(_known) > _KEPT:
            _known.popitem(last=False)
    if reason:
        raise ChatRefusal(f"response_format: {reason}")


_known: OrderedDict[str, str] = OrderedDict()
"""Why grammars that were checked cannot be kept to, empty where they can."""


def _wrong_with(grammar: bytes) -> bytes:
    """Runs in a separate process."""
    try:
        from llguidance import LLMatcher
    except ImportError:
        return b"this needs llguidance, which is not installed: pip install 'motet[serve]'"
    text = grammar.decode("utf-8", "replace")
    wrong, reasons = LLMatcher.validate_grammar_with_warnings(text)
    if not wrong:
        return b""
    reason = " ".join(" ".join(reasons).split())[:300]
    return f"the schema cannot be kept to: {reason}".encode()
