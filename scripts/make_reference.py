"""Write the pages that are made from what they describe: in docs/ and, for its hints, in the dashboard.

    python scripts/make_reference.py           # write (make docs)
    python scripts/make_reference.py --check   # fail when a page is stale

Configuration comes from the pydantic models of `motet.config`, the command line from the typer app in `motet.commands.cli`,
HTTP from the service's OpenAPI document (`http_reference.py`), doors and engines from the marks of the tests (`doors_page.py`),
limits from docs/limits.toml (`limits_page.py`), the dashboard's page from docs/not-learning.md (`help_page.py`).
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from doors_page import doors
from help_page import help_page
from http_reference import cell, http
from limits_page import table
from motet.algorithms.algorithm import Algorithm
from motet.algorithms.policy_gradient import PolicyGradient
from motet.algorithms.registry import ALGORITHMS
from motet.config import Config, EngineConfig, RunConfig
from motet.config.service import (
    HttpConfig,
    InstalledReward,
    LimitsConfig,
    OidcConfig,
    RateConfig,
    ServedBase,
    ServiceConfig,
)
from motet.core.settings import described

DOCS = Path(__file__).resolve().parents[1] / "docs"
NOTICE = "<!-- Written by scripts/make_reference.py: change what it describes, then run `make docs`. -->\n\n"
PLAIN = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null", Any: "anything"}
OF_A_SERVICE: tuple[tuple[str, str, type[Config]], ...] = (
    ("service", "", ServiceConfig),
    ("bases", "bases.NAME", ServedBase),
    ("limits", "limits", LimitsConfig),
    ("rate", "rate", RateConfig),
    ("http", "http", HttpConfig),
    ("oidc", "oidc", OidcConfig),
    ("installed rewards", "rewards.NAME", InstalledReward),
)
"""Of the file of `motet serve --config`; what it has as a job file does is not repeated."""
HEADINGS = {model: name for name, _, model in OF_A_SERVICE}
"""Where a field's name is not that of its section."""
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "at least"}  # attributes of annotated-types


def model_of(annotation: Any) -> type[Config] | None:
    """The configuration model inside an annotation, if there is one (`list[JobConfig]` → `JobConfig`)."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return annotation
    return next((model for part in get_args(annotation) if (model := model_of(part)) is not None), None)


def sections(model: type[Config], name: str, path: str) -> Iterator[tuple[str, str, type[Config]]]:
    """Every model reachable from this one, in the order of fields: heading, where it stands in a job file, model."""
    yield name, path, model
    for field_name, field in model.model_fields.items():
        inner = model_of(field.annotation)
        if inner is Algorithm:
            yield from algorithms(field_name, f"{path}.{field_name}".lstrip("."))
        elif inner is not None:
            many = "[]" if "list" in str(field.annotation) else ""
            yield from sections(inner, field_name, f"{path}.{field_name}{many}".lstrip("."))


def algorithms(name: str, path: str) -> Iterator[tuple[str, str, type[Config]]]:
    """The settings that algorithms share, with those of the default, and a section for each of the others."""
    yield from sections(ALGORITHMS["grpo"], name, path)
    for kind, model in ALGORITHMS.items():
        if kind != "grpo":
            yield f"{name} {kind}", path, model
            for field_name in sorted(model.model_fields.keys() - ALGORITHMS["grpo"].model_fields.keys()):
                if (inner := model_of(model.model_fields[field_name].annotation)) is not None:
                    yield from sections(inner, field_name, f"{path}.{field_name}")


def type_text(annotation: Any, section: str) -> str:
    """An annotation in words; configuration models become links to their section."""
    if annotation in PLAIN:
        return PLAIN[annotation]
    if isinstance(annotation, type) and issubclass(annotation, Config):
        section = HEADINGS.get(annotation, section)
        return f"[{section}](#{section.replace(' ', '-')})"
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(args[0], section)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(arg, section) for arg in args)
    if origin is list:
        return f"list of {type_text(args[0], section)}"
    if origin is tuple:
        return f"list of {len(args)}: {', '.join(type_text(arg, section) for arg in args)}"
    if origin is dict:
        return "mapping"
    raise TypeError(f"no words for the type {annotation!r}: add them to type_text")


def bounds_text(field: FieldInfo) -> str:
    """Limits of a field, as ` (≥ 1, ≤ 512)`."""
    limits = [
        f"{sign} {getattr(constraint, name):g}"
        for constraint in field.metadata
        for name, sign in BOUNDS.items()
        if hasattr(constraint, name)
    ]
    return f" ({', '.join(limits)})" if limits else ""


def default_text(field: FieldInfo) -> str:
    """The default as it would be written in a job file."""
    if field.is_required():
        return "**required**"
    default = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, Config):
        return "as listed there"
    return f"`{json.dumps(default, ensure_ascii=False)}`"


def section_text(name: str, path: str, model: type[Config]) -> str:
    """One model: heading, docstring, table of fields.

    Raises:
        ValueError: a field has no docstring.
    """
    lines = [f"## {name}", "", *([f"At `{path}`."] if path else []), inspect.getdoc(model) or "", ""]
    lines += ["| Field | Type | Default | Meaning |", "|---|---|---|---|"]
    texts = described(model)
    for field_name, field in model.model_fields.items():
        if name.startswith("algorithm ") and _is_shared(model, field_name, field):
            continue
        if model is ServedBase and field_name in EngineConfig.model_fields:
            continue
        text = field.description or texts.get(field_name)
        if not (text or name.startswith("algorithm")):
            raise ValueError(f"{model.__name__}.{field_name} has no docstring")
        description = text or _inherited(model, field_name)
        kind = type_text(field.annotation, field_name) + bounds_text(field)
        lines.append(f"| `{field_name}` | {cell(kind)} | {cell(default_text(field))} | {cell(description)} |")
    return "\n".join(lines) + "\n"


def _inherited(model: type[Config], name: str) -> str:
    """What a class above says of a field."""
    above = (config for config in model.__mro__ if issubclass(config, Config))
    return next((text for config in above if (text := described(config).get(name))), "")


def _is_shared(model: type[Config], name: str, field: FieldInfo) -> bool:
    """Whether an algorithm's field is that of `algorithm`, with its default."""
    shared = ALGORITHMS["grpo"].model_fields.get(name) if issubclass(model, PolicyGradient) else None
    return shared is not None and shared.default == field.default


def configuration() -> str:
    """The page about every field that a job file or a service's file may hold.

    Raises:
        ValueError: two sections would share a heading.
    """
    found = [*sections(RunConfig, "run", ""), *OF_A_SERVICE]
    names = [name for name, _, _ in found]
    if len(set(names)) < len(names):
        raise ValueError(f"two sections of the configuration share a heading: {names}")
    head = (
        "# Configuration\n\nEvery field with its default. Sections up to `checkpoint` are for job files, and those from "
        "[service](#service) for `motet serve --config`. An unknown field is an error.\n\n"
    )
    contents = "".join(
        f"- [{name}](#{name.replace(' ', '-')}){f': `{path}`' if path else ''}\n" for name, path, _ in found
    )
    return head + contents + "\n" + "\n".join(section_text(*section) for section in found)


def command_line() -> str:
    """The page about every command, by typer's own generator.

    Raises:
        RuntimeError: the app cannot be loaded.
    """
    generator = ["typer", "motet.commands.cli", "utils", "docs", "--name", "motet", "--title", "Command line"]
    plain = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "120"}
    done = subprocess.run([sys.executable, "-m", *generator], capture_output=True, text=True, check=False, env=plain)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(generator)} failed:\n{done.stderr}")
    lines = (line.rstrip() for line in done.stdout.strip().splitlines())
    return "\n".join(lines) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration,
    "cli.md": command_line,
    "http.md": http,
    "doors.md": doors,
    "table-of-limits.md": table,
    "../src/motet/service/dashboard/not-learning.html": help_page,
}
"""Each without the notice that it is generated."""


def stale_pages(docs: Path = DOCS) -> list[str]:
    """Names of pages that are not what they would be if written now."""

    def text(path: Path) -> str:
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    return [name for name, page in PAGES.items() if text(docs / name) != NOTICE + page()]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write the reference pages of docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page is stale")
    if parser.parse_args().check:
        stale = stale_pages()
        if stale:
            raise SystemExit(f"stale: {', '.join(stale)}; run `make docs`")
        return
    DOCS.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (DOCS / name).write_text(NOTICE + page(), encoding="utf-8")
        print(f"docs/{name}", flush=True)


if __name__ == "__main__":
    main()
