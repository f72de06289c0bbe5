"""The page about every limit, docs/table-of-limits.md, from docs/limits.toml. `make_reference.py` writes it.

[[limit]]
what = "what is limited"
most = "{service.http.json_size.MOST_VALUES} values"    # names below `motet` in braces, with a unit after a colon
pays = "tenant"                                               # whose account it is, or who alone has the loss
beyond = "413"
tests = ["service/test_service_doors.py::test_json_has_so_many_values"]
settings, routes, fields, steps = [...]                       # what it bounds, by the names of the functions below
"""

from __future__ import annotations

import copy
import fnmatch
import functools
import importlib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from http_reference import cell

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs" / "limits.toml"
PAYERS = ("address", "connection", "person", "tenant", "job", "rollout", "service")
UNITS = {"KB": 2**10, "MB": 2**20, "GB": 2**30}
HEAD = """# Table of limits

Every limit that a stranger or a tenant can reach. The table is made from `docs/limits.toml`. Its numbers come from the code.
Tests compare it with the OpenAPI document, the configuration and the kinds of steps. [Limits and usage](limits.md) explains
those of a tenant, [Operations](operations.md#limits-on-requests) those of requests.

- **Most**: the default. A name in brackets is the setting that changes it; other limits are fixed.
- **Pays**: whose account it is, or who alone has the loss: a `tenant` with all its keys, one `job` or `rollout`, an `address`
  without a good key, a `connection`, a `person` that signs in, or the whole `service`.
- **Beyond it**: a number is the status of the answer.

"""
ROUTES_HEAD = """
## Limits of each route

Each request also counts for the [rate](configuration.md#rate), for its connection, and with its head. **Body** and **values**
are the most of its body.

| Route | Body | Values | What bounds its work |
|---|---|---|---|
"""
_NAME = re.compile(r"\{([\w.]+)(?::(\w+))?\}")


@dataclass(frozen=True)
class Limit:
    """A row of the table."""

    what: str
    most: str
    pays: str
    beyond: str
    tests: tuple[str, ...]
    settings: tuple[str, ...] = ()
    """Fields of the file of `motet serve --config`."""
    routes: tuple[str, ...] = ()
    """`POST /v1/jobs`, without wildcards: a new route has a row when somebody has thought of it."""
    fields: tuple[str, ...] = ()
    """Of bodies and addresses; with wildcards."""
    steps: tuple[str, ...] = ()
    """Kinds of steps."""


def limits(file: Path = FILE) -> list[Limit]:
    """The rows. Raises TypeError if one lacks a field or has an unknown one."""
    rows: list[dict[str, Any]] = tomllib.loads(file.read_text(encoding="utf-8"))["limit"]
    plain: list[dict[str, Any]] = [
        {name: tuple(part) if isinstance(part, list) else part for name, part in row.items()} for row in rows
    ]
    return [Limit(**row) for row in plain]


def value_of(name: str) -> Any:
    """What a dotted name below `motet` stands for; of a model's field, its default.

    Raises:
        AttributeError: there is nothing of that name.
    """
    parts = ["motet", *name.split(".")]
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            is_model = isinstance(found, type) and issubclass(found, BaseModel)
            found = (
                found.model_fields[part].default if is_model and part in found.model_fields else getattr(found, part)
            )
        return found
    raise AttributeError(f"no module of {name}")


def shown(text: str) -> str:
    """A text with the values of the names in it."""

    def value(match: re.Match[str]) -> str:
        found, unit = value_of(match[1]), match[2]
        if isinstance(found, Mapping):
            return ", ".join(f"`{name}` {most:,}" for name, most in found.items())
        if unit:
            found = found / UNITS[unit]
        whole = isinstance(found, int | float) and float(found).is_integer()
        number = f"{found:,.0f}" if whole and found < 1e15 else "none" if found is None else f"{found}"
        return f"{number} {unit}" if unit else number

    return _NAME.sub(value, text)


# --- what needs a row -------------------------------------------------------------------------------------------------------


@functools.cache
def settings() -> set[str]:
    """Fields with a number of the file of `motet serve --config`, of those that bound what others do."""
    from motet.config.service import HttpConfig, LimitsConfig, OidcConfig, RateConfig, ServiceConfig

    models: dict[str, type[BaseModel]] = {
        "limits": LimitsConfig,
        "rate": RateConfig,
        "http": HttpConfig,
        "oidc": OidcConfig,
        "": ServiceConfig,
    }
    return {
        f"{section}.{name}".lstrip(".")
        for section, model in models.items()
        for name, schema in model.model_json_schema()["properties"].items()
        if {"integer", "number"} & {part.get("type") for part in (schema, *schema.get("anyOf", ()))}
    }


@functools.cache
def document() -> Mapping[str, Any]:
    """The OpenAPI document of all routes, those included that the service's own leaves out."""
    from motet.service.app import ROUTES

    routes = []
    for route in (route for module in ROUTES for route in module.router.routes):
        routes.append(copy.copy(route))
        vars(routes[-1])["include_in_schema"] = True
    return get_openapi(title="", version="", routes=FastAPI(openapi_url=None, routes=routes).routes)


@functools.cache
def routes() -> set[str]:
    """`METHOD /path` of each route."""
    return {f"{method.upper()} {path}" for path, methods in document()["paths"].items() for method in methods}


@functools.cache
def fields() -> set[str]:
    """Numbers, texts, lists and mappings of requests and jobs that their schemas do not bound."""
    from motet.algorithms.registry import ALGORITHMS
    from motet.config import JobConfig
    from motet.service.tinker import requests

    whole = document()
    found = set[str]()
    for what in (route for methods in whole["paths"].values() for route in methods.values()):
        for parameter in what.get("parameters", ()):
            kind, name = parameter["in"], parameter["name"]
            found |= {f"{kind}:{name}" for _ in unbounded(parameter["schema"], name, whole["components"]["schemas"])}
        for body in what.get("requestBody", {}).get("content", {}).values():
            found |= set(unbounded(body["schema"], "body", whole["components"]["schemas"]))
    models: list[type[BaseModel]] = [JobConfig, *ALGORITHMS.values()]
    for model in (*models, *(model for model in vars(requests).values() if _is_request(model, requests.Request))):
        schema = model.model_json_schema()
        found |= set(unbounded(schema, model.__name__, schema.get("$defs", {})))
    return found


def unbounded(
    schema: Mapping[str, Any], name: str, schemas: Mapping[str, Any], above: tuple[str, ...] = ()
) -> Iterator[str]:
    """Names of what is not bounded in a schema: `Model.field`, with `[]` for items and `{}` for values."""
    if "$ref" in schema:
        of = schema["$ref"].rsplit("/", 1)[-1]
        if of not in above:
            yield from unbounded(schemas[of], of, schemas, (*above, of))
        return
    several = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key, ())]
    for part in several:
        yield from unbounded(part, name, schemas, above)
    for field, part in schema.get("properties", {}).items():
        yield from unbounded(part, f"{name}.{field}", schemas, above)
    kind = schema.get("type")
    if kind == "array":
        yield from unbounded(schema.get("items", schema.get("prefixItems", [{}])[0]), f"{name}[]", schemas, above)
    if isinstance(values := schema.get("additionalProperties"), Mapping):
        yield from unbounded(values, f"{name}{{}}", schemas, above)
    if not several and not _is_bounded(schema, kind):
        yield name


def _is_bounded(schema: Mapping[str, Any], kind: object) -> bool:
    if "const" in schema or "enum" in schema or kind in ("boolean", "null"):
        return True
    if kind in ("integer", "number"):
        lowest, highest = (any(word in schema for word in pair) for pair in (_LOWEST, _HIGHEST))
        return lowest and highest
    if kind == "string":
        pattern = re.sub(r"\\.|\[[^\]]*\]", "x", schema.get("pattern", "*"))
        return "maxLength" in schema or schema.get("format") == "date" or not re.search(r"[*+]|,\}|^[^^]", pattern)
    if kind == "object" and "properties" in schema:
        return schema.get("additionalProperties") is not True
    return {"array": "maxItems", "object": "maxProperties"}.get(str(kind), "type") in schema


_LOWEST, _HIGHEST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def _is_request(found: Any, base: type[BaseModel]) -> TypeGuard[type[BaseModel]]:
    return isinstance(found, type) and issubclass(found, base)


@functools.cache
def steps() -> set[str]:
    """Kinds of what a step may need: its algorithm, where its episodes are, what scores them, and work beside it."""
    from motet.algorithms.registry import ALGORITHMS
    from motet.config import EnvironmentConfig
    from motet.environments.episode import ENVIRONMENTS
    from motet.rewards.reward_elsewhere import ELSEWHERE
    from motet.rewards.reward_loading import SCORER
    from motet.rewards.rewards import BUILTIN
    from motet.service.jobs.validation import MOST

    return {
        *(f"algorithm {name}" for name in ALGORITHMS),
        *(f"environment {name}" for name in (*ENVIRONMENTS, EnvironmentConfig.AGENT)),
        *(f"reward {name}" for name in (*BUILTIN, SCORER, *ELSEWHERE)),
        *MOST,
    }


def gaps(rows: Iterable[Limit]) -> list[str]:
    """What has no row, and what rows name that is not there."""
    rows, wrong = list(rows), list[str]()
    for kind, there in (("settings", settings()), ("routes", routes()), ("fields", fields()), ("steps", steps())):
        named = {name for row in rows for name in getattr(row, kind)}
        pattern = {name: re.compile(_pattern(name) if kind == "fields" else re.escape(name)) for name in named}
        covered = {name: {field for field in there if form.fullmatch(field)} for name, form in pattern.items()}
        wrong += [f"{kind}: {name!r} has no row" for name in sorted(there.difference(*covered.values()))]
        wrong += [
            f"{kind}: a row names {name!r}, which is not there" for name, found in sorted(covered.items()) if not found
        ]
    return wrong


def _pattern(name: str) -> str:
    return fnmatch.translate(name.replace("[", "[[]"))


def missing_tests(rows: Iterable[Limit]) -> list[str]:
    """Tests that rows name and that are not there, and rows without one."""
    wrong = []
    for row in rows:
        wrong += [] if row.tests else [f"{row.what}: no test"]
        for test in row.tests:
            file, _, name = test.partition("::")
            text = (ROOT / "tests" / file).read_text(encoding="utf-8") if (ROOT / "tests" / file).is_file() else ""
            if not re.search(rf"^(?:async )?def {name}\(", text, re.M):
                wrong.append(f"{row.what}: no {test}")
    return wrong


# --- the page ---------------------------------------------------------------------------------------------------------------


def table() -> str:
    """The page, without the notice that it is generated."""
    rows = limits()
    lines = ["| What | Most | Pays | Beyond it | Test |", "|---|---|---|---|---|"]
    for row in rows:
        most = shown(row.most) + (f" ({', '.join(f'`{name}`' for name in row.settings)})" if row.settings else "")
        tests = ", ".join(f"`{test.rpartition('/')[2].replace('.py', '')}`" for test in row.tests)
        lines.append(f"| {' | '.join(map(cell, (row.what, most, row.pays, row.beyond, tests)))} |")
    bounds = {route: [row.what for row in rows if route in row.routes] for route in routes()}
    parts = [HEAD, "\n".join(lines), "\n", ROUTES_HEAD]
    for route, words in sorted(bounds.items(), key=lambda item: item[0].split()[::-1]):
        parts.append(f"| `{route}` | {' | '.join((*_body(route), cell('; '.join(words))))} |\n")
    return "".join(parts)


def _body(route: str) -> tuple[str, str]:
    """The most of a route's body: its bytes, and its values of JSON."""
    from motet.config.service import ServiceConfig
    from motet.service.http import bodies

    method, _, path = route.partition(" ")
    uploads = {"/v1/files": "max_upload_mb", "/v1/adapters": "max_adapter_mb"}
    if method in ("GET", "DELETE"):
        return "none", ""
    if path in uploads:
        return f"{ServiceConfig.model_fields[uploads[path]].default:g} MB", ""
    most, usual = bodies._limit(path, 0) / 2**20, bodies._limit(path, 2) - bodies._limit(path, 1)
    of_base = f", or 64 KB and {usual} bytes for each position of the base" if usual else ""
    values = "" if path == bodies._GRADIENT else f"{bodies.most_values(path, 'tenant')[0]:,}"
    return f"{most:g} MB{of_base}", values
