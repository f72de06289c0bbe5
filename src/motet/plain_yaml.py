"""YAML as plain values, read strictly: a key that is given twice is an error, and nesting has an end."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from motet.errors import ConfigError

DEEPEST = 50
"""Lists and mappings within each other: scanners of YAML take time that grows with its square."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _StrictLoader(_Loader):  # type: ignore[misc]  # one of two classes, as the system has it
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise ConfigError(
                    f"line {key.start_mark.line + 1}: {key.value!r} is given twice; leave one of them out"
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        found: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return found


def read(text: str, *, aliases: bool = True) -> Any:
    """The values of one document.

    Args:
        text: YAML, or JSON.
        aliases: whether `*name` may stand for what `&name` marked; a few lines of that can mean gigabytes.

    Raises:
        ConfigError: it is no YAML, and where; or it is nested too deeply, has a key twice, or an alias.
    """
    depth = 0
    try:
        for event in yaml.parse(text, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise ConfigError(f"more than {DEEPEST} lists and mappings lie in each other")
            if isinstance(event, yaml.AliasEvent) and not aliases:
                raise ConfigError("aliases (*name) cannot be used here; write the value where it is needed")
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 -- a safe loader's child
    except (yaml.YAMLError, ValueError) as error:
        tab = re.search(r"(?m)^ *\t", text)
        hint = "; YAML is indented with spaces, not with tabs" if tab else ""
        raise ConfigError(f"it is not YAML: {error}{hint}") from error
