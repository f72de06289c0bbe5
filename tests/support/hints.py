"""The texts of messages in a module, so that a test can ask whether it has met all of them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterator
from types import ModuleType

_LEAST = 12
"""Characters of a text that tells one message from the others."""


def texts_of(module: ModuleType) -> list[str]:
    """The texts of more than a word in a module's code, and the parts of those with fields; no docstrings."""
    return list(dict.fromkeys(_texts(ast.parse(inspect.getsource(module)))))


def never_said(module: ModuleType, said: Collection[str]) -> list[str]:
    """The texts of a module that none of these messages has: each may be a hint that nobody has followed."""
    return [text for text in texts_of(module) if not any(text in message for message in said)]


def _texts(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        if len(text := node.value.strip()) >= _LEAST and " " in text:
            yield text
        return
    for below in ast.iter_child_nodes(node):
        yield from _texts(below)
