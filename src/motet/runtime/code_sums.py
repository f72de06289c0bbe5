"""Checksums of a job's own code: of the statements and objects that its functions reach.

Files: each statement of a named file, and of the project's modules that it imports, has a sum of its syntax tree, so
comments do not count; docstrings do, because a model reads those of tools. A function or class counts if code that
counts reads its name. Code that looks names up while it runs (`getattr`, `globals`) makes all count. Installed packages
are not followed.
Objects: a function given in Python counts by its source, closure, defaults and the globals it reads.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import enum
import functools
import hashlib
import inspect
import numbers
import os
import re
import site
import sys
import sysconfig
import textwrap
import types
from collections import deque
from collections.abc import Iterator, Sequence
from importlib import invalidate_caches, util
from importlib.machinery import PathFinder
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from motet.runtime.statements import UNREACHED, last_name, only_defines, short_sum, statement_sums, sums_in, walk

_MOST_FILES, _MOST_BYTES, _MOST_STATEMENTS, _MOST_NOTES, _MOST_OBJECTS = 500, 1 << 24, 20_000, 20, 2000
_SHORT, _LONG = 60, 200
_MOTET = Path(__file__).resolve().parents[1]
_IMPORTS = {"import_module", "__import__", "spec_from_file_location", "run_path", "run_module"}
_LOOKS_UP = {
    "getattr", "globals", "locals", "vars", "eval", "exec", "attrgetter", "methodcaller", "getmembers", "getattr_static",
    "__dict__", "__getattribute__", "__globals__", "__subclasses__", "f_globals", "f_locals", "run_path", "run_module",
}  # fmt: skip
_NAMED = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
    types.ClassMethodDescriptorType, np.ufunc,
)  # fmt: skip
_PLAIN = (
    numbers.Number, str, bytes, type(None), type(...), range, PurePath, datetime.date, datetime.time,
    datetime.timedelta, datetime.tzinfo, re.Pattern, np.generic,
)  # fmt: skip
Entry = dict[str, str]


class CodeSums:
    """The files and objects that a job's own code consists of."""

    def __init__(self) -> None:
        self.not_followed: list[str] = []
        """Why changes of some code may go unnoticed; one sentence each."""
        self._entries: dict[str, Entry] = {}
        self._files: dict[Path, tuple[str, str, Sequence[str] | None, dict[ast.stmt, list[str]]]] = {}
        """Label, package, search path, and the sums of each statement at the top."""
        self._read, self._bound, self._counted = set[str](), set[tuple[str, str]](), set[ast.stmt]()
        self._bytes, self._all = 0, False  # `_all`: which names the code reads cannot be decided
        self._seen: dict[int, Any] = {}  # keeps the objects alive, because Python reuses the id of a deleted object
        self._waiting = deque[tuple[str, Any]]()

    def add(self, name: str) -> None:
        """Add `file.py:name` or `module:name`, or all of `file.py:`; a missing one is ignored."""
        invalidate_caches()
        source, _, function = name.rpartition(":")
        if not source:
            return
        path = Path(os.path.expanduser(source)).resolve()
        if not source.endswith(".py"):
            self._add_module(source, [*sys.path, str(Path.cwd())])
        elif path.is_file():
            self._add_file(path, path.name, "", [*sys.path, str(path.parent)])
        self._read |= set(function.split("."))
        self._all |= not function

    def add_text(self, name: str, text: str) -> None:
        """Add `file.py:name` of a file that is not here; modules that it imports are not followed."""
        file, _, function = name.rpartition(":")
        label, path = Path(file).name, Path(short_sum(text)) / Path(file).name
        while label in self._entries and path not in self._files:  # another of that name
            label += "'"
        self._add_data(path, label, "", None, text)
        self._read |= set(function.split("."))

    def add_object(self, name: str, value: Any) -> None:
        """Add an object and everything that it reads; `name` is used in messages."""
        self._waiting.append((name, value))
        while self._waiting:
            self._add_next(*self._waiting.popleft())

    def entries(self) -> dict[str, Entry]:
        """What the code consists of, by path below the project or by name of an object.

        `statements` has `line:sum` of each statement of a file, with `-` before the line if nothing reaches it.
        """
        size = -1
        while size != (size := len(self._read) + len(self._bound) + len(self._files) + self._all):
            self._read |= {name for bound, name in self._bound if bound in self._read}
            for label, package, search, sums in list(self._files.values()):
                for part in [part for part in sums if part not in self._counted]:
                    name = str(getattr(part, "name", "__"))
                    if self._all or name in self._read or name.startswith("__") or not only_defines(part):
                        self._counted.add(part)
                        self._add_reads(part, label, package, search)
        for label, _, _, sums in self._files.values():
            marked = [f"{'' if part in self._counted else UNREACHED}{text}" for part in sums for text in sums[part]]
            if len(marked) > _MOST_STATEMENTS:
                self._entries[label].pop("statements", None)
            elif marked:
                self._entries[label] = {"statements": " ".join(marked)}
        return dict(sorted(self._entries.items()))

    def _note(self, text: str) -> None:
        if text not in self.not_followed and len(self.not_followed) <= _MOST_NOTES:
            last = len(self.not_followed) == _MOST_NOTES
            self.not_followed.append("changes of more than that are not noticed" if last else text)

    def _add_module(self, name: str, search: Sequence[str]) -> None:
        """Add a module of the project, and its parent packages."""
        parts, places = name.split("."), search
        for number in range(1, len(parts) + 1):
            try:
                spec = PathFinder.find_spec(".".join(parts[:number]), places)
                spec = util.find_spec(parts[0]) if spec is None and number == 1 else spec
            except (ImportError, ValueError):
                return
            inner = None if spec is None else spec.submodule_search_locations
            if spec is not None and spec.origin is not None and spec.has_location:
                path = Path(spec.origin).resolve()
                if not _of_project(path):
                    return
                label = "/".join(parts[:number]) + (f"/{path.name}" if inner else path.suffix)
                self._add_file(path, label, ".".join(parts[: number if inner else number - 1]), search)
            if inner is None:
                return
            places = list(inner)

    def _add_file(self, path: Path, label: str, package: str, search: Sequence[str]) -> None:
        if path in self._files:
            return
        if len(self._files) >= _MOST_FILES or self._bytes > _MOST_BYTES:
            self._note(f"the code imports more than {_MOST_FILES} files, or 16 MB: a change of {label} is not noticed")
            return
        try:
            self._add_data(path, label, package, search, path.read_bytes())
        except OSError as error:
            self._note(f"{label} cannot be read ({error.strerror}): a change of it is not noticed")
            self._files[path] = label, package, search, {}

    def _add_data(self, path: Path, label: str, package: str, search: Sequence[str] | None, data: bytes | str) -> None:
        """Add a file's content; `search` is where the modules are that it imports, None if they do not count."""
        sums = dict[ast.stmt, list[str]]()
        self._entries[label] = {"sha256": short_sum(data)}
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            tree = ast.parse(data if path.suffix == ".py" else b"?")
            sums = {part: list(statement_sums([part])) for part in tree.body}
            self._entries[label]["statements"] = ""
        self._bytes += len(data)
        self._files[path] = label, package, search, sums

    def _add_reads(self, tree: ast.AST, label: str, package: str, search: Sequence[str] | None) -> None:
        """Add the names that code reads, and the project's modules that it imports."""
        plain = set[int]()
        for node in walk(tree):
            modules: list[str] = []
            match node:
                case ast.Import():
                    modules = [alias.name for alias in node.names]
                case ast.ImportFrom():
                    above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
                    base = ".".join([*above, *([node.module] if node.module else [])])
                    modules = [base, *(f"{base}.{alias.name}" for alias in node.names)]
                case ast.alias():
                    self._bound.add((node.asname or node.name, node.name))
                case ast.Constant(value=str(text)) if len(text) <= _LONG and not re.search(r"\w \w", text):
                    self._read.update(re.findall(r"\w+", text))  # an annotation, or a name
                case ast.Call(args=[_, ast.Constant(), *_]) if last_name(node.func) == "getattr":
                    plain.add(id(node.func))
                case ast.Call(args=[ast.Constant(value=name)]) if last_name(node.func) in _IMPORTS:
                    modules = [str(name)]
                case ast.Call() if last_name(node.func) in _IMPORTS:
                    found = "loads code by a name that only the run knows: a change of it is not noticed"
                    self._note(f"{label}:{node.lineno} {found}")
                case ast.Name() | ast.Attribute():
                    self._read.add(last_name(node))
                    self._all |= last_name(node) in _LOOKS_UP and id(node) not in plain
            for module in filter(None, modules if search is not None else ()):
                self._add_module(module, search or ())

    def _put(self, name: str, entry: Entry) -> None:
        """Add an entry; a second object of the same name gets a name with `'`."""
        while self._entries.setdefault(name, entry) != entry:
            name += "'"

    def _add_next(self, name: str, value: Any) -> None:
        if len(self._seen) + len(self._entries) >= _MOST_OBJECTS:
            self._waiting.clear()
            self._note(f"the rewards read more than {_MOST_OBJECTS} objects: a change of others is not noticed")
        elif (plain := _plain(value)) is not None:
            self._put(name, plain)
        elif id(value) not in self._seen:
            self._seen[id(value)] = value
            parts = (
                self._add_code(name, value)
                if isinstance(value, types.FunctionType | type)
                else self._parts(name, value)
            )
            self._waiting += [(f"{name}{part}"[:_LONG], item) for part, item in parts.items()]

    def _parts(self, name: str, value: Any) -> dict[str, Any]:
        if isinstance(value, types.ModuleType):
            self._add_module(value.__name__, sys.path)
        elif isinstance(value, staticmethod | classmethod | types.MethodType):
            return {"": value.__func__, ".self": getattr(value, "__self__", None)}
        elif isinstance(value, property):
            return {"": value.fget, ".setter": value.fset}
        elif isinstance(value, functools.partial):
            return {"": value.func, ".args": value.args, ".keywords": value.keywords}
        elif isinstance(value, dict):
            items = enumerate(value.items())
            return {f"[{key!r}]" if isinstance(key, str | int) else f"[{at}]": item for at, (key, item) in items}
        elif isinstance(value, list | tuple):
            return {f"[{index}]": item for index, item in enumerate(value)}
        elif isinstance(value, functools._lru_cache_wrapper):
            return {"": value.__wrapped__}
        elif isinstance(value, _NAMED) and isinstance(getattr(value, "__self__", None), types.ModuleType | type | None):
            self._put(name, {"value": f"{getattr(value, '__module__', '')}.{value.__name__}"})
        elif isinstance(value, types.BuiltinMethodType):
            return {f" of {value.__name__}": value.__self__}
        elif isinstance(value, enum.Enum):
            self._put(name, {"value": str(value)})
            return {" class": type(value)}
        elif type(value).__module__ in ("typing", "types"):
            self._put(name, {"value": repr(value)[:_LONG]})
        elif _of_project(sys.modules.get(type(value).__module__)) and hasattr(value, "__dict__"):
            return {"": type(value), **{f".{key}": item for key, item in vars(value).items()}}
        else:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            self._put(name, {"value": f"a {kind}"})
            self._note(f"{name} is a {kind}, whose content cannot be compared: a change of it is not noticed")
        return {}

    def _add_code(self, name: str, value: Any) -> dict[str, Any]:
        """Add a function or class by its name in a module that can be imported, or else by source and parts."""
        module: Any = sys.modules.get(value.__module__ or "")
        there = functools.reduce(lambda where, part: getattr(where, part, None), value.__qualname__.split("."), module)
        if there is value and value.__module__ != "__main__":
            self._add_module(value.__module__, sys.path)
            self._read |= set(value.__qualname__.split("."))
            return {}
        tree, entry = _source(value)
        self._put(name, entry)
        if isinstance(value, types.FunctionType):
            self._add_function(name, value, tree)
            return {}
        made = types.GetSetDescriptorType | types.MemberDescriptorType  # by Python
        members = {f".{key}": item for key, item in vars(value).items() if callable(item) or not key.startswith("__")}
        bases = {f".base {base.__name__}": base for base in value.__bases__}
        return {key: item for key, item in (members | bases).items() if not isinstance(item, made)}

    def _add_function(self, name: str, value: types.FunctionType, tree: ast.Module | None) -> None:
        known, names = value.__globals__, set(_names_of(value.__code__))
        for what, given in (("defaults", value.__defaults__), ("keyword defaults", value.__kwdefaults__)):
            self._waiting += [(f"{name} {what}", given)] if given else []
        for key, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                self._waiting.append((key, cell.cell_contents))
            except ValueError:  # unassigned cell
                self._put(key, {"value": "nothing"})
        for key in sorted(names & known.keys()):
            self._waiting.append((key, known[key]))
            below = f"{known[key].__name__}." if isinstance(known[key], types.ModuleType) else "-"
            for module in [module for module in sys.modules if module.startswith(below)]:
                if names.issuperset(module.removeprefix(below).split(".")):  # `import package.module`
                    self._add_module(module, sys.path)
        others, self._all = self._all, tree is None and not names.isdisjoint(_LOOKS_UP)
        self._read |= names
        self._add_reads(tree or ast.Module([], []), name, str(known.get("__package__") or ""), sys.path)
        if self._all:  # each function and class beside it counts
            code = [item for item in known.values() if isinstance(item, types.FunctionType | type)]
            sums = [sums_in(_source(item)[1], reached=True) for item in code if item.__module__ == known["__name__"]]
            self._entries[f"the code of {known['__name__']}"] = {"all": short_sum(repr(sorted(sums)))}
        self._all |= others


def _source(value: types.FunctionType | type) -> tuple[ast.Module | None, Entry]:
    """The syntax tree of a function or class, None without source, and its entry.

    A wrapper counts by its own source, not by that of what it wraps; a lambda by all lambdas that begin in its line.
    """
    code: Any = value.__code__ if isinstance(value, types.FunctionType) else value
    try:
        lines, first = inspect.getsourcelines(code)
        text = "".join(lines if value.__name__ != "<lambda>" else inspect.findsource(code)[0])
        tree = ast.parse(textwrap.dedent(text))
    except (OSError, TypeError, SyntaxError, ValueError):
        tree, first = ast.Module([], []), 0
    if value.__name__ == "<lambda>":
        lambdas = (node for node in ast.walk(tree) if isinstance(node, ast.Lambda) and node.lineno == first)
        tree.body = [ast.Expr(node, lineno=1) for node in lambdas]
    if tree.body:
        file = Path(inspect.getsourcefile(code) or "")
        shown = {"file": file.name} if file.is_file() else {}
        return tree, {**shown, "statements": " ".join(statement_sums(tree.body, max(first, 1)))}
    if isinstance(value, types.FunctionType):
        return None, {"sha256": short_sum(_instructions(value.__code__))}
    return None, {"value": "a class"}  # members are added separately


def _plain(value: Any) -> Entry | None:
    """The value of a number; for text and containers, which may be secret, their checksum. None for other types."""
    try:
        text = _text(value)
    except (TypeError, RecursionError):
        return None
    short = isinstance(value, int | float | None) and len(text) <= _SHORT
    return {"value": text} if short else {"sha256": short_sum(f"{type(value).__name__} {text}")}


def _text(value: Any, depth: int = 0) -> str:
    """A text that is equal in every process; TypeError if the value contains another type."""
    if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):
        return repr(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"array {value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if type(value) not in (list, tuple, set, frozenset, dict) or depth > 50:
        raise TypeError
    items = [_text(item, depth + 1) for item in value]
    if isinstance(value, dict):
        items = [f"{key}: {_text(item, depth + 1)}" for key, item in zip(items, value.values(), strict=True)]
    return f"{type(value).__name__}({', '.join(sorted(items) if isinstance(value, set | frozenset) else items)})"


def _names_of(code: types.CodeType) -> Iterator[str]:
    """Names of globals and attributes in a function's code, including nested functions."""
    yield from code.co_names
    for constant in code.co_consts:
        yield from _names_of(constant) if isinstance(constant, types.CodeType) else ()


def _instructions(code: types.CodeType) -> str:
    """Bytecode, names and constants of a function without source, independent of its location."""
    parts = [_instructions(x) if isinstance(x, types.CodeType) else str(_plain(x) or repr(x)) for x in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars} {parts}"


@functools.cache
def _of_project(code: Path | types.ModuleType | None) -> bool:
    """Whether a file or module belongs to the user: not to Motet, Python or an installed package."""
    path = Path(code if isinstance(code, Path) else getattr(code, "__file__", None) or _MOTET).resolve()
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {str(_MOTET), *site.getsitepackages(), site.getusersitepackages()}
    installed = any(path.is_relative_to(Path(folder).resolve()) for folder in folders)
    installed = installed or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    return not installed or getattr(code, "__name__", "") == "__main__"
