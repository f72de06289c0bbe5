"""Converts a request's `response_format` to a grammar that constrains sampling."""

from __future__ import annotations

import json
import re
import time
from typing import Any

from motet.chat.turn_formats.grammar_tokens import ONE_LAYOUT
from motet.core.errors import ChatRefusal
from motet.core.tenant_cache import TenantCache
from motet.core.types import JSON_GRAMMAR
from motet.process.isolated_calls import IsolatedPool, TooMuchError

_LONGEST = 16_000
"""The cost per token grows faster than a schema's length."""
_MEMORY_MB, _SECONDS = 32, 0.5
"""Memory and CPU time to compile one grammar, ten times what large ones in use take; an engine keeps several of them."""
_FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
"""Formats that are kept to; others, such as pydantic's `path`, only describe."""
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_PLAINER = {
    "Unimplemented keys:": "these keywords are not supported:",
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf":
        "oneOf is not supported where a value may match two of its choices; write anyOf",
}  # fmt: skip
_KEPT = 256
"""Cached results of checks."""


def grammar_of(asked: Any) -> str:
    """Return the llguidance grammar for a chat's `response_format` or a response's `text.format`; empty for plain text.

    It is not compiled here; see `check_grammar`. Where the answer is sampled, thoughts and tool calls are let through, in
    the form of the base (`chat.turn_formats.turn_grammar`). Raises ChatRefusal, with the reason, for other formats.
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
    answer = json.dumps({"x-guidance": ONE_LAYOUT, **_kept_to(schema)})
    if len(answer) > _LONGEST:
        raise ChatRefusal(f"response_format: the schema has {len(answer)} characters; the limit is {_LONGEST}")
    return f"{JSON_GRAMMAR}{answer}"


def _kept_to(schema: Any) -> Any:
    """A schema without the formats that only describe."""
    if isinstance(schema, list):
        return [_kept_to(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    told = schema.get("format")
    named = {
        name: part for name, part in schema.items() if name != "format" or not isinstance(told, str) or told in _FORMATS
    }
    for name, part in named.items():
        if name in _BY_NAME and isinstance(part, dict):
            named[name] = {key: _kept_to(value) for key, value in part.items()}
        elif name not in ("const", "enum", "default", "examples"):
            named[name] = _kept_to(part)
    return named


async def check_grammar(grammar: str, pool: IsolatedPool, key: str) -> None:
    """Compile a grammar in a process with limits, in the turn of `key`, a tenant. Call this before an engine compiles it.

    Raises ChatRefusal if it is invalid or too expensive, and LimitError if too many requests of this key are waiting.
    """
    if not grammar:
        return
    if (reason := _known.get(key, grammar)) is None:
        try:
            reason = (await pool.call(key, _wrong_with, grammar.encode("utf-8", "surrogatepass"), _MEMORY_MB)).decode()
        except TooMuchError as error:
            reason = f"the schema is too complex: {error}; use fewer or simpler patterns"
            if error.by_clock:
                raise ChatRefusal(f"response_format: {reason}, or try again later") from error
        _known.put(key, grammar, reason)
    if reason:
        raise ChatRefusal(f"response_format: {reason}")


_known = TenantCache[str, str](_KEPT)
"""Reasons why checked grammars are invalid, by key; empty for valid ones."""


def _wrong_with(grammar: bytes) -> bytes:
    """Runs in a separate process."""
    try:
        from llguidance import LLMatcher, LLTokenizer
    except ImportError:
        return b"this needs llguidance, which is not installed: pip install 'motet[serve]'"
    text = grammar.decode("utf-8", "replace")
    wrong, reasons = LLMatcher.validate_grammar_with_warnings(text)
    if wrong:
        told = re.split(r"\n\s*\d+ \|", " ".join(reasons))[0].rpartition("failed to compile JSON schema: ")[2]
        reason = " ".join(told.split())[:300]
        for inner, plain in _PLAINER.items():
            reason = reason.replace(inner, plain)
        return f"the schema cannot be kept to: {reason}".encode()
    schema, _ = json.JSONDecoder().raw_decode(text.partition("%json ")[2])
    if _is_endless(schema):
        return b"the schema refers to itself without an end, so no answer can keep to it; let a property on the way be left out"
    began = time.thread_time()
    matcher = LLMatcher(LLTokenizer("byte"), text, log_level=0)
    matcher.compute_bitmask()
    if (spent := time.thread_time() - began) > _SECONDS:
        return f"the schema is too complex: it takes {spent:.1f} s to compile, and {_SECONDS} are the most".encode()
    return b"the schema cannot be kept to: no answer can begin" if matcher.is_error() else b""


def _is_endless(schema: Any) -> bool:
    """Whether a value would have to contain itself. Keywords that are not known here count as ending."""
    ends: dict[str, bool] = {}

    def is_finite(part: Any) -> bool:
        if not isinstance(part, dict):
            return part is not False
        if isinstance(ref := part.get("$ref"), str) and not ends.setdefault(ref, False):
            return False
        fields, required = part.get("properties"), part.get("required")
        needed = [*_listed(part.get("allOf"))]
        if isinstance(fields, dict):
            needed += [fields[name] for name in _listed(required) if isinstance(name, str) and name in fields]
        if (fewest := part.get("minItems")) and isinstance(fewest, int):
            first = _listed(part.get("prefixItems"))
            needed += [*first[:fewest], *([part.get("items")] if fewest > len(first) else [])]
        choices = [found for name in ("anyOf", "oneOf") if (found := _listed(part.get(name)))]
        return all(map(is_finite, needed)) and all(any(map(is_finite, choice)) for choice in choices)

    while True:
        before, finite = dict(ends), is_finite(schema)
        ends.update({ref: is_finite(_referred(schema, ref)) for ref in list(ends)})
        if ends == before:
            return not finite


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(schema: Any, ref: str) -> Any:
    """What a reference names; True, which allows everything, if it is not in this schema."""
    if not ref.startswith("#"):
        return True
    for name in ref[1:].split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        else:
            schema = schema.get(name, True) if isinstance(schema, dict) else True
    return schema
