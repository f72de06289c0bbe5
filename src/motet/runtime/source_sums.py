"""Checksums of a project's own code: one for each statement of a file and of the project's modules that it imports.

Sums are computed from the syntax tree, so comments, blank lines and formatting do not count. Docstrings do: an
environment's docstrings are tool descriptions that the model reads. Installed packages and the standard library are not
followed.
"""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

SHOWN = 16
"""Hex digits kept of a checksum."""
_MOST_FILES, _MOST_BYTES, _MOST_STATEMENTS, _MOST_LINES, _MOST_NOTES = 500, 1 << 24, 20_000, 5, 20
_BLOCKS = frozenset({"body", "orelse", "finalbody", "handlers", "cases"})
_BY_NAME = frozenset({"import_module", "__import__", "spec_from_file_location", "run_path", "run_module"})
_MOTET = Path(__file__).resolve().parents[1]


def statement_sums(tree: ast.AST, first_line: int = 1) -> str:
    """`line:sum` of each statement below a node, in order; `first_line` is the line where the tree's source begins."""
    return " ".join(f"{line + first_line - 1}:{digest}" for line, digest in _statements(tree, 0))


def _statements(node: ast.AST, depth: int) -> Iterator[tuple[int, str]]:
    for name, value in ast.iter_fields(node):
        for child in value if name in _BLOCKS and isinstance(value, list) else ():
            decorators = [one.lineno for one in getattr(child, "decorator_list", ())]
            line = min([getattr(child, "lineno", 1), *decorators])
            text = f"{depth} {name} {_canonical(child, head=True)}"
            yield line, hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
            yield from _statements(child, depth + 1)


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


def sum_of_code(*names: str) -> str:
    """A short checksum of the project's code behind `file.py:name`, `file.py` or `module:name`, without comments.

    Empty if there is no such code, as for a function object.
    """
    sums = CodeSums()
    for name in names:
        sums.add(name if ":" in name else f"{name}:")
    parts = [[label, _without_lines(entry.get("statements")) or entry["sha256"]] for label, entry in sums.code.items()]
    return hashlib.sha256(json.dumps(sorted(parts)).encode()).hexdigest()[:8] if parts else ""


def _without_lines(statements: str | None) -> list[str]:
    return [one.partition(":")[2] for one in (statements or "").split()]


@dataclass
class CodeSums:
    """The project's files that a piece of code consists of."""

    code: dict[str, dict[str, str]] = field(default_factory=dict)
    """By path below the project: `sha256` of the bytes, and `statements` for valid Python."""
    not_followed: list[str] = field(default_factory=list)
    """Why changes of some code may go unnoticed; one sentence each."""
    _seen: set[Path] = field(default_factory=set)
    _bytes: int = 0

    def add(self, name: str) -> None:
        """Add the file or module of `file.py:name` or `module:name`; a missing one is ignored."""
        importlib.invalidate_caches()
        source = name.rpartition(":")[0]
        if source.endswith(".py"):
            path = Path(os.path.expanduser(source)).resolve()
            if path.is_file():
                self._add_file(path, path.name, "", [*sys.path, str(path.parent)])
        elif source:
            self.add_module(source, [*sys.path, str(Path.cwd())])

    def add_module(self, name: str, search: Sequence[str]) -> None:
        """Add a module of the project, and its parent packages."""
        parts, places = name.split("."), search
        for number in range(1, len(parts) + 1):
            spec = _find(".".join(parts[:number]), places)
            if spec is None:
                return
            if spec.origin is not None and spec.has_location:
                path = Path(spec.origin).resolve()
                if not of_project(path):
                    return
                label = "/".join(parts[:number]) + (f"/{path.name}" if spec.submodule_search_locations else path.suffix)
                inside = ".".join(parts[: number if spec.submodule_search_locations else number - 1])
                self._add_file(path, label, inside, search)
            if number < len(parts) and spec.submodule_search_locations is None:
                return
            places = list(spec.submodule_search_locations or ())

    def _add_file(self, path: Path, label: str, package: str, search: Sequence[str]) -> None:
        if path in self._seen:
            return
        if len(self._seen) >= _MOST_FILES or self._bytes > _MOST_BYTES:
            self.note(f"the code imports more than {_MOST_FILES} files, or 16 MB: a change of {label} is not noticed")
            return
        self._seen.add(path)
        try:
            data = path.read_bytes()
        except OSError as error:
            self.note(f"{label} cannot be read ({error.strerror}): a change of it is not noticed")
            return
        self._bytes += len(data)
        entry = self.code[label] = {"sha256": hashlib.sha256(data).hexdigest()[:SHOWN]}
        try:
            tree = ast.parse(data) if path.suffix == ".py" else None
            sums = "" if tree is None else statement_sums(tree)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return
        if tree is not None:
            if sums.count(" ") < _MOST_STATEMENTS:
                entry["statements"] = sums
            self.add_imports(tree, label, package, search)

    def add_imports(self, tree: ast.AST, label: str, package: str, search: Sequence[str]) -> None:
        """Add the project's modules that a syntax tree imports."""
        for node in _imports(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = _absolute(node.module or "", node.level, package)
                names = [name for name in (base, *(f"{base}.{alias.name}" for alias in node.names)) if name]
            elif node.args and isinstance(node.args[0], ast.Constant) and len(node.args) == 1:
                names = [str(node.args[0].value)]
            else:
                self.note(
                    f"{label}:{node.lineno} loads code by a name that only the run knows: a change of it is not noticed"
                )
                continue
            for name in names:
                self.add_module(name, search)

    def note(self, text: str) -> None:
        """Record why some code is not followed."""
        if text not in self.not_followed and len(self.not_followed) <= _MOST_NOTES:
            more = "changes of more than that are not noticed"
            self.not_followed.append(text if len(self.not_followed) < _MOST_NOTES else more)


def _absolute(module: str, level: int, package: str) -> str:
    if not level:
        return module
    parts = package.split(".")
    return ".".join([*parts[: len(parts) - level + 1], *([module] if module else [])])


def _imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom | ast.Call]:
    """Import statements, also in functions, and calls that import; `TYPE_CHECKING` blocks are skipped."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and _last_name(node.test) == "TYPE_CHECKING":
            for other in node.orelse:
                yield from _imports(ast.Module([other], []))
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        if isinstance(node, ast.Call) and _last_name(node.func) in _BY_NAME:
            yield node
        yield from _imports(node)


def _last_name(node: ast.AST) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _find(name: str, places: Sequence[str]) -> ModuleSpec | None:
    try:
        spec = PathFinder.find_spec(name, places)
        return importlib.util.find_spec(name) if spec is None and "." not in name else spec
    except (ImportError, ValueError):
        return None


@functools.cache
def of_project(path: Path) -> bool:
    """Whether a file belongs to the user: not to Motet, Python or an installed package."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    installed = [Path(folder).resolve() for folder in {*folders, *site.getsitepackages(), site.getusersitepackages()}]
    names = {"site-packages", "dist-packages"}
    return not names & set(path.parts) and not any(path.is_relative_to(folder) for folder in (_MOTET, *installed))


def code_changes(before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """The differences between two records of `CodeSums.code`, by file and line."""
    for label in [*before, *(label for label in now if label not in before)]:
        old, new = before.get(label), now.get(label)
        if label in before and not isinstance(old, Mapping):  # edited by hand
            yield f"{label} was edited"
        elif old is None:
            yield f"{label} is new: the code did not use it before"
        elif new is None:
            yield f"{label} is gone: the code does not use it any more"
        elif "value" in new and "value" in old:
            if old["value"] != new["value"]:
                yield f"{label}: was {old['value']}, is {new['value']}"
        elif "statements" in old and "statements" in new:
            yield from _line_changes(new.get("file", label), old["statements"].split(), new["statements"].split())
        elif old.get("sha256") != new.get("sha256") or old.keys() != new.keys():
            yield f"{label} was edited" if label.endswith((".py", ".so")) else f"{label} has another value"


def _line_changes(file: str, before: Sequence[str], now: Sequence[str]) -> Iterator[str]:
    old, new = ([one.partition(":")[::2] for one in sums] for sums in (before, now))
    matcher = difflib.SequenceMatcher(None, [one[1] for one in old], [one[1] for one in new], autojunk=False)
    changes = [change for change in matcher.get_opcodes() if change[0] != "equal"]
    for kind, first, _, at, _ in changes[:_MOST_LINES]:
        if kind == "delete":
            yield f"{file}:{old[first][0]} was removed (a line of the earlier file)"
        else:
            yield f"{file}:{new[at][0]} was {'added' if kind == 'insert' else 'edited'}"
    if len(changes) > _MOST_LINES:
        yield f"{file} was edited in {len(changes) - _MOST_LINES} more places"
