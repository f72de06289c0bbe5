"""YAML as plain values, read strictly: a repeated key is an error, and nesting is limited."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import yaml

from motet.core.errors import ConfigError

DEEPEST = 32
"""Deepest nesting of lists and mappings: the time of a YAML scanner grows with its square, and readers are recursive."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C is ten times as fast; a host opens all its jobs when it resumes."""


def read(text: str, *, aliases: bool = True) -> Any:
    """The values of one document.

    Args:
        text: YAML, or JSON.
        aliases: whether aliases (`*name` for `&name`) are allowed; a few lines of them can expand to gigabytes.

    Raises:
        ConfigError: it is not YAML (the message says where), is nested too deeply, repeats a key, or has an alias.
    """
    depth = 0
    try:
        for event in yaml.parse(text, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise ConfigError(f"it is nested more than {DEEPEST} deep, which nothing here needs; write it flatter")
            if isinstance(event, yaml.AliasEvent) and not aliases:
                raise ConfigError("aliases (*name) cannot be used here; write the value where it is needed")
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            _check_keys(root)
            return None if root is None else loader.construct_document(root)
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError) as error:
        tab = re.search(r"(?m)^ *\t", text)
        hint = "; YAML is indented with spaces, not with tabs" if tab else ""
        raise ConfigError(f"it is not YAML: {_why(error)}{hint}") from error
    except (LookupError, AttributeError, OverflowError) as error:  # raised by yaml's constructors of scalars
        raise ConfigError(
            "it is not YAML: a value is none of the type that is written before it (!!int, !!bool, …); leave that out"
        ) from error


def values_of(text: str) -> Any:
    """The values of a text that Motet wrote."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def mapping_in(file: Path) -> dict[str, Any]:
    """The mapping in a file that Motet wrote; empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, LookupError, AttributeError, OverflowError, yaml.YAMLError):
        values = values_of(file.read_text("utf-8"))
        return values if isinstance(values, dict) else {}
    return {}


def _why(error: Exception) -> str:
    """The error in one line, with its place."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    began = error.context_mark
    since = f" that begins on line {began.line + 1}" if began and began.line < error.problem_mark.line else ""
    said = " ".join(part for part in (error.context and f"{error.context}{since}", error.problem) if part)
    return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {said}"


def _check_keys(root: yaml.Node | None) -> None:
    """Refuse repeated keys, of which YAML silently takes the last.

    Keys merged by `<<` may be overridden; here they are not merged yet.
    """
    left, seen = [root], set()
    while left:
        node = left.pop()
        if id(node) in seen:  # an alias refers to it
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            left += node.value
        elif isinstance(node, yaml.MappingNode):
            left += [value for _, value in node.value]
            keys = set()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if key.value in keys:
                    line = key.start_mark.line + 1
                    raise ConfigError(f"line {line}: {key.value!r} is given twice; leave one of them out")
                keys.add(key.value)
