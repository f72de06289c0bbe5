"""What a statement of Python says, from its syntax tree: its sum, what it reads, and whether it only defines a name."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SHOWN = 16
"""Hex digits kept of a short sum."""
UNREACHED = "-"
"""Before the line of a statement that no function of the job reaches."""
_BLOCKS = {"body", "orelse", "finalbody", "handlers", "cases"}


def short_sum(content: str | bytes) -> str:
    """The first digits of the sha256 of a text or of bytes."""
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()[:SHOWN]


def sums_in(entry: Mapping[str, str], *, reached: bool) -> list[str]:
    """The sums of an entry's statements in order, without lines: of all, or of those that the job's functions reach."""
    statements = entry.get("statements", "").split()
    return [text.partition(":")[2] for text in statements if not (reached and text.startswith(UNREACHED))]


def statement_sums(nodes: Sequence[ast.AST], first_line: int = 1, name: str = "body", depth: int = 0) -> Iterator[str]:
    """`line:sum` of each statement of a block and below; `first_line` is the line where the source begins."""
    for node in nodes:
        line = min(getattr(part, "lineno", 1) for part in (node, *getattr(node, "decorator_list", ())))
        text = f"{depth} {name} {_canonical(node, head=True)}"
        yield f"{line + first_line - 1}:{short_sum(text)[:8]}"
        for block, inner in ast.iter_fields(node):
            if block in _BLOCKS and isinstance(inner, list):
                yield from statement_sums(inner, first_line, block, depth + 1)


def _canonical(node: Any, *, head: bool = False) -> str:
    """A node without its position and its empty fields, which Python versions add; with `head`, without its blocks."""
    if isinstance(node, list):
        return f"[{', '.join(map(_canonical, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = (
        f"{name}={_canonical(value)}"
        for name, value in ast.iter_fields(node)
        if value is not None and value != [] and not (head and name in _BLOCKS and isinstance(value, list))
    )
    return f"{type(node).__name__}({', '.join(fields)})"


def only_defines(node: ast.AST) -> bool:
    """Whether Python runs nothing where it meets a function or class: no decorator, base class, call or other statement."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return not node.decorator_list and only_defines(node.args)
    if isinstance(node, ast.ClassDef):
        return not (node.decorator_list or node.bases or node.keywords) and all(map(only_defines, node.body))
    if isinstance(node, ast.Assign | ast.AnnAssign):  # an object may be told where it is kept
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        read = [part for part in ast.walk(node.value or ast.Pass()) if isinstance(part, ast.Name)]
        return not read and all(isinstance(target, ast.Name) for target in targets)
    runs = any(isinstance(part, ast.Call | ast.NamedExpr) for part in ast.walk(node))
    return isinstance(node, ast.arguments | ast.Expr | ast.Pass) and not runs


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """A tree from above, without what is for type checkers."""
    yield tree
    typed = isinstance(tree, ast.If) and last_name(tree.test) == "TYPE_CHECKING"
    for node in tree.orelse if typed and isinstance(tree, ast.If) else ast.iter_child_nodes(tree):
        yield from walk(node)


def last_name(node: ast.AST) -> str:
    """The name, or the last attribute, that an expression reads; empty for others."""
    return str(getattr(node, "attr", getattr(node, "id", "")))
