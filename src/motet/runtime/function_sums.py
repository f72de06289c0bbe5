"""Checksums of a Python function: of its source, and of the functions, classes and constants that it reads.

This mirrors how functions are sent to reward processes. Importable code is imported there from its file. Functions of
the script or notebook, and nested functions, are sent with their closure and the globals that they read.
"""

from __future__ import annotations

import ast
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import inspect
import re
import sys
import textwrap
import types
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from motet.runtime.source_sums import SHOWN, CodeSums, of_project, statement_sums

_MOST_OBJECTS, _SHORT, _LONG = 2000, 60, 200
_NAMED = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
    types.ClassMethodDescriptorType, np.ufunc,
)  # fmt: skip
_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type(...), range, PurePath, decimal.Decimal, fractions.Fraction,
    datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, re.Pattern, np.generic,
)  # fmt: skip


class FunctionSums:
    """Adds the content of functions to `CodeSums`."""

    def __init__(self, sources: CodeSums) -> None:
        self._sources = sources
        self._seen: dict[int, Any] = {}  # keeps the objects alive, because Python reuses the id of a deleted object
        self._waiting = deque[tuple[str, Any]]()

    def add(self, name: str, value: Any) -> None:
        """Add an object and everything that it reads; `name` is used in messages."""
        self._later(name, value)
        while self._waiting:
            self._add(*self._waiting.popleft())

    def _later(self, name: str, value: Any) -> None:
        self._waiting.append((name, value))

    def _add(self, name: str, value: Any) -> None:
        if len(self._seen) + len(self._sources.code) >= _MOST_OBJECTS:
            self._waiting.clear()
            self._sources.note(f"the rewards read more than {_MOST_OBJECTS} objects: a change of others is not noticed")
            return
        if (plain := _plain(value)) is not None:
            self._put(name, plain)
            return
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, types.ModuleType):
            self._sources.add_module(value.__name__, sys.path)
        elif isinstance(value, types.FunctionType | type):
            self._add_code(name, value)
        else:
            self._add_object(name, value)

    def _add_object(self, name: str, value: Any) -> None:
        parts: Mapping[str, Any]
        if isinstance(value, staticmethod | classmethod | types.MethodType):
            parts = {"": value.__func__, ".self": getattr(value, "__self__", None)}
        elif isinstance(value, property):
            parts = {"": value.fget, ".setter": value.fset}
        elif isinstance(value, functools.partial):
            parts = {"": value.func, ".args": value.args, ".keywords": value.keywords}
        elif isinstance(value, dict):
            keys = (f"[{key!r}]" if isinstance(key, str | int) else f"[{index}]" for index, key in enumerate(value))
            parts = dict(zip(keys, value.values(), strict=True))
        elif isinstance(value, list | tuple):
            parts = {f"[{index}]": item for index, item in enumerate(value)}
        elif isinstance(value, functools._lru_cache_wrapper):
            parts = {"": value.__wrapped__}
        elif isinstance(value, _NAMED) and isinstance(getattr(value, "__self__", None), types.ModuleType | type | None):
            return self._put(name, {"value": f"{getattr(value, '__module__', '')}.{value.__name__}"})
        elif isinstance(value, types.BuiltinMethodType):
            parts = {f" of {value.__name__}": value.__self__}
        elif isinstance(value, enum.Enum):
            self._put(name, {"value": str(value)})
            parts = {" class": type(value)}
        elif type(value).__module__ in ("typing", "types"):
            return self._put(name, {"value": repr(value)[:_LONG]})
        elif _is_own(type(value)) and hasattr(value, "__dict__"):
            parts = {"": type(value), **{f".{key}": item for key, item in vars(value).items()}}
        else:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            self._put(name, {"value": f"a {kind}"})
            return self._sources.note(
                f"{name} is a {kind}, whose content cannot be compared: a change of it is not noticed"
            )
        for part, item in parts.items():
            self._later(f"{name}{part}"[:_LONG], item)
        return None

    def _put(self, name: str, entry: dict[str, str]) -> None:
        """Add an entry; a second object of the same name gets a name with `'`."""
        while self._sources.code.setdefault(name, entry) != entry:
            name += "'"

    def _add_code(self, name: str, value: Any) -> None:
        """Add a function or class."""
        module = sys.modules.get(value.__module__ or "")
        parts = value.__qualname__.split(".")
        there = functools.reduce(lambda where, part: getattr(where, part, None), parts, module)
        if there is value and value.__module__ != "__main__":
            self._sources.add_module(value.__module__, sys.path)
            return
        self._put(name, _entry(value))
        if isinstance(value, type):
            members = {**vars(value), **{f"base {base.__name__}": base for base in value.__bases__}}
            for key, item in members.items():
                made = isinstance(item, types.GetSetDescriptorType | types.MemberDescriptorType)  # by Python
                if not made and (callable(item) or not key.startswith("__")):
                    self._later(f"{name}.{key}", item)
            return
        self._add_function(name, value)

    def _add_function(self, name: str, value: types.FunctionType) -> None:
        for what, given in (("defaults", value.__defaults__), ("keyword defaults", value.__kwdefaults__)):
            if given:
                self._later(f"{name} {what}", given)
        for key, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                self._later(key, cell.cell_contents)
            except ValueError:  # unassigned cell
                self._put(key, {"value": "nothing"})
        names = set(_names_of(value.__code__))
        for key in sorted(names & value.__globals__.keys()):
            one = value.__globals__[key]
            self._later(key, one)
            below = f"{one.__name__}." if isinstance(one, types.ModuleType) else ""
            for module in [module for module in sys.modules if below and module.startswith(below)]:
                if names.issuperset(module.removeprefix(below).split(".")):  # `import package.module`
                    self._sources.add_module(module, sys.path)
        package = str(value.__globals__.get("__package__") or "")
        self._sources.add_imports(_tree(value) or ast.Module([], []), name, package, sys.path)


def _entry(value: types.FunctionType | type) -> dict[str, str]:
    tree = _tree(value)
    if tree is not None:
        _, first = inspect.getsourcelines(_code_of(value))
        file = Path(inspect.getsourcefile(_code_of(value)) or "")
        shown = {"file": file.name} if file.is_file() else {}
        return {**shown, "statements": statement_sums(tree, max(first, 1))}
    if isinstance(value, types.FunctionType):
        return {"sha256": hashlib.sha256(_instructions(value.__code__).encode()).hexdigest()[:SHOWN]}
    return {"value": "a class"}  # members are added separately


def _code_of(value: types.FunctionType | type) -> Any:
    """The argument for `inspect`: a wrapper's own code, not that of the wrapped function."""
    return value.__code__ if isinstance(value, types.FunctionType) else value


def _plain(value: Any) -> dict[str, str] | None:
    """The value of a number; for text and containers, which may be secret, their checksum. None for other types."""
    try:
        text = _text(value, 0)
    except (TypeError, RecursionError):
        return None
    if isinstance(value, int | float | None) and len(text) <= _SHORT:
        return {"value": text}
    return {
        "sha256": hashlib.sha256(f"{type(value).__name__} {text}".encode("utf-8", "surrogatepass")).hexdigest()[:SHOWN]
    }


def _text(value: Any, depth: int) -> str:
    """A text that is equal in every process.

    Raises:
        TypeError: the value contains another type.
    """
    if isinstance(value, enum.Enum):
        raise TypeError
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"array {value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if depth > 50:
        raise TypeError
    if type(value) in (list, tuple):
        return f"{type(value).__name__}({', '.join(_text(item, depth + 1) for item in value)})"
    if type(value) in (set, frozenset):
        return f"{type(value).__name__}({', '.join(sorted(_text(item, depth + 1) for item in value))})"
    if type(value) is dict:
        pairs = (f"{_text(key, depth + 1)}: {_text(item, depth + 1)}" for key, item in value.items())
        return f"dict({', '.join(pairs)})"
    raise TypeError


def _is_own(kind: type) -> bool:
    """Whether a class is defined in the script or the project."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and of_project(Path(file).resolve()))


def _names_of(code: types.CodeType) -> Iterator[str]:
    """Names of globals and attributes in a function's code, including nested functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_of(constant)


def _instructions(code: types.CodeType) -> str:
    """Bytecode, names and constants of a function without source, independent of its location."""
    inner = (
        _instructions(one) if isinstance(one, types.CodeType) else str(_plain(one) or repr(one))
        for one in code.co_consts
    )
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars} {list(inner)}"


def _tree(value: types.FunctionType | type) -> ast.AST | None:
    """The syntax tree of a function or class; for a lambda, of all lambdas that begin in its line. None without source."""
    code = _code_of(value)
    try:
        if value.__name__ != "<lambda>":
            return ast.parse(textwrap.dedent("".join(inspect.getsourcelines(code)[0])))
        whole = ast.parse("".join(inspect.findsource(code)[0]))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    first = code.co_firstlineno
    lambdas = [node for node in ast.walk(whole) if isinstance(node, ast.Lambda) and node.lineno == first]
    return ast.Module([ast.Expr(node, lineno=1) for node in lambdas], []) if lambdas else None
