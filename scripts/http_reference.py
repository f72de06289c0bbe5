"""The page about every HTTP route, docs/http.md, from the service's OpenAPI document. `make_reference.py` writes it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HEAD = """# HTTP

Every route of `motet serve`. The service describes itself too: `/docs` in a browser, `/openapi.json` for programs.

A key goes into the header `Authorization: Bearer mk-…`. Bodies are JSON unless a route says otherwise. An answer that is not a
success is `{"error": {"message", "type", "param", "code"}}`; the message says what to do. Where an object belongs to another
tenant, the answer is 404, as if it were not there.

"""
SPARE = {"HTTPValidationError", "ValidationError", "Error", "ErrorDetail"}

Document = Mapping[str, Any]


def http() -> str:
    """The page, without the notice that it is generated."""
    document = openapi()
    schemas: Document = document["components"]["schemas"]
    routes = list(_routes(document))
    tags = list(dict.fromkeys(tag for tag, *_ in routes))
    contents = "".join(f"- [{tag}](#{tag.replace(' ', '-')}-routes)\n" for tag in tags)
    parts = [HEAD + contents + "- [What is sent and answered](#what-is-sent-and-answered)\n"]
    for tag in tags:
        parts.append(f"## {tag}: routes\n")
        parts += [_route(method, path, what) for own, method, path, what in routes if own == tag]
    parts.append("## What is sent and answered\n")
    parts += [_schema(name, schemas[name]) for name in _used(routes, schemas)]
    return "\n".join(parts)


def openapi() -> Document:
    """The document of a service that is never started."""
    from motet.service.app import create_app
    from motet.service.settings import Settings

    with tempfile.TemporaryDirectory() as scratch:
        app = create_app(Settings("small", Path(scratch)))
        document: Document = app.openapi()
        app.state.service.store.close()
    return document


def _routes(document: Document) -> Iterator[tuple[str, str, str, Document]]:
    for path, methods in document["paths"].items():
        for method, what in methods.items():
            yield (what.get("tags") or ["other"])[0], method.upper(), path, what


def _route(method: str, path: str, what: Document) -> str:
    lines = [f"### {method} {path}", "", what.get("description") or what.get("summary", ""), ""]
    rows = []
    for field in what.get("parameters", []):
        default = "**required**" if field.get("required") else _default(field["schema"])
        rows.append(
            f"| `{field['name']}` | {field['in']} | {_type(field['schema'])} | {default} | {cell(_about(field))} |"
        )
    if rows:
        lines += ["| Parameter | In | Type | Default | Meaning |", "|---|---|---|---|---|", *rows, ""]
    for kind, body in what.get("requestBody", {}).get("content", {}).items():
        about = f"; {body['schema']['description']}" if body["schema"].get("description") else ""
        lines.append(f"Body, `{kind}`: {_type(body['schema'])}{about}\n")
    for status, answer in what["responses"].items():
        if status.startswith("2"):
            kinds = answer.get("content", {})
            shown = ", ".join(f"{_type(content.get('schema', {}))} as `{kind}`" for kind, content in kinds.items())
            lines.append(f"Answers {status}{f': {shown}' if shown else ''}.\n")
    return "\n".join(lines)


def _about(parameter: Document) -> str:
    return str(parameter.get("description") or parameter["schema"].get("description") or "")


def _default(schema: Document) -> str:
    default = schema.get("default")
    return "" if default is None else f"`{default}`"


def _type(schema: Document) -> str:
    """A schema in words; named ones are links."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(_type(part) for part in schema[key]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "object":
        inner = schema.get("additionalProperties")
        return f"mapping to {_type(inner)}" if isinstance(inner, Mapping) and inner else "mapping"
    words = {"string": "text", "number": "number", "integer": "integer", "boolean": "true or false", "null": "null"}
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<", "maxLength": "at most"}
    limits = ", ".join(f"{sign} {schema[name]:g}" for name, sign in bounds.items() if name in schema)
    return words.get(str(kind), "anything") + (f" ({limits})" if limits else "")


def _schema(name: str, schema: Document) -> str:
    lines = [f"### {name}", "", schema.get("description", ""), ""]
    required = schema.get("required", ())
    rows = []
    for field, part in schema.get("properties", {}).items():
        default = "" if field in required else _default(part)
        rows.append(f"| `{field}` | {cell(_type(part))} | {default} | {cell(part.get('description', ''))} |")
    if rows:
        lines += ["| Field | Type | Default | Meaning |", "|---|---|---|---|", *rows]
    elif "enum" in schema:
        lines.append(_type(schema))
    return "\n".join(lines) + "\n"


def _used(routes: Sequence[tuple[str, str, str, Document]], schemas: Document) -> list[str]:
    """Names of schemas that bodies and successes mention, and of those that these mention."""
    found: dict[str, None] = {}

    def look(part: Any) -> None:
        if isinstance(part, Mapping):
            for key, value in part.items():
                if key == "$ref" and (name := value.rsplit("/", 1)[-1]) not in found and name not in SPARE:
                    found[name] = None
                    look(schemas[name])
                else:
                    look(value)
        elif isinstance(part, list):
            for item in part:
                look(item)

    for _, _, _, what in routes:
        look(what.get("parameters"))
        look(what.get("requestBody"))
        look({status: answer for status, answer in what["responses"].items() if status.startswith("2")})
    return sorted(found)


def cell(text: str) -> str:
    """Text that stays inside one cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")
