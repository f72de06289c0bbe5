"""Loads a person's own code by name: `file.py:name` or `module:name`."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet.core.errors import MotetError
from motet.core.suggestions import close_matches

MOVED = {"motet.agents.": "motet.environments.", "motet.tasks.shipped.": "motet.environments.shipped."}
"""Where modules that job files name stood before, and where they stand now."""
_LOADED: dict[tuple[str, Path], tuple[bytes, Any]] = {}
"""Modules loaded from files, by kind and path, each with its source text."""
_HOUSE = f"{Path(__file__).parents[1]}{os.sep}"


@dataclass(frozen=True)
class OwnCode:
    """Finds code of one kind."""

    kind: str
    """`reward`, `algorithm` or `environment`, for messages."""
    error: type[MotetError]
    built_in: Sequence[str]
    """Built-in names, which need no file."""

    def find(self, name: str, text: str | None = None) -> Any:
        """The object at `file.py:name` or `module:name`; `text` is that of the file, if it is not on this machine.

        Raises MotetError if it is missing or does not load.
        """
        source, colon, attribute = name.rpartition(":")
        if not colon:
            near = close_matches(name, self.built_in, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise self.error(
                f"there is no {self.kind} {name!r}: {hint}Built in are {', '.join(self.built_in)}; "
                "your own is `file.py:name` or `module:name`"
            )
        if text is not None:
            module = self._loaded(source, Path(source), text, "one file is sent, and imports what is installed")
        else:
            module = self.load_file(source) if source.endswith(".py") else self._load_module(source)
        target = functools.reduce(lambda value, part: getattr(value, part, None), attribute.split("."), module)
        if target is None:
            names = [item for item, value in vars(module).items() if callable(value) and not item.startswith("_")]
            near = close_matches(attribute, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(names) or 'nothing to call'}"
            raise self.error(f"{self.kind} {name!r}: {source} has no {attribute!r}{hint}")
        return target

    def load_file(self, source: str) -> Any:
        """The module of a file, loaded once while its text is unchanged. Raises MotetError if it does not load."""
        path = Path(os.path.expanduser(source)).resolve()
        try:
            there = path.is_file()
            text = path.read_bytes() if there else b""
        except OSError as error:
            raise self.error(f"{self.kind} file {source!r} cannot be read: {error.strerror}") from error
        if not there:
            near = close_matches(path.name, [item.name for item in path.parent.glob("*.py")], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise self.error(
                f"{self.kind} file {source!r} does not exist{hint} (looked for {path}, from where motet was started)"
            )
        if (known := _LOADED.get((self.kind, path))) is not None and known[0] == text:
            sys.modules[known[1].__name__] = known[1]
            return known[1]
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))  # so that the file may import its neighbours
        module = self._loaded(source, path, text, f"install what has it beside Motet, for {sys.executable}")
        _LOADED[self.kind, path] = text, module
        return module

    def _loaded(self, source: str, path: Path, text: bytes | str, absent: str) -> Any:
        """The module of a file's text; `absent` says what to do about a module that it does not find."""
        spec = importlib.util.spec_from_file_location(f"motet_{self.kind}_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        try:
            # cached bytecode records the file's time only to the second
            code = compile(text, str(path), "exec", dont_inherit=True)
            exec(code, vars(module))  # noqa: S102
        except (Exception, SystemExit) as error:
            hint = f"; {absent}" if isinstance(error, ModuleNotFoundError) else ""
            hint = f"; raise memory_mb of the {self.kind}" if isinstance(error, MemoryError) else hint
            raise self.error(
                f"{self.kind} file {source!r} does not load: {describe(error, str(path))}{hint}"
            ) from error
        return module

    def _load_module(self, source: str) -> Any:
        if str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))
        for before, now in MOVED.items():
            source = now + source.removeprefix(before) if source.startswith(before) else source
        try:
            return importlib.import_module(source)
        except (Exception, SystemExit) as error:
            hint = "A module must be installed, or lie where motet was started"
            raise self.error(f"{self.kind} module {source!r} does not load: {describe(error)}. {hint}") from error


def directories() -> set[Path]:
    """Directories of the files that were loaded in this process."""
    return {path.parent for _, path in _LOADED}


def describe(error: BaseException, file: str = "") -> str:
    """One line for a person: the exception and, if known, the line of `file`. Halves of characters are `?`.

    Motet's own exceptions are sentences already, and need neither a class name nor a line.
    """
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    theirs = [frame for frame in frames if not frame[0].startswith((_HOUSE, "<"))]
    own = [frame for frame in frames if frame[0] == file] or theirs
    line = f" ({own[-1][0]}:{own[-1][1]})" if own and not isinstance(error, ImportError) else ""
    try:
        text = " ".join(str(error)[:500].split()).encode(errors="replace").decode()
    except Exception:  # the __str__ of a user's exception may fail
        text = ""
    if text and frames and frames[-1][0].startswith(_HOUSE) and isinstance(error, ValueError | TypeError | MotetError):
        return f"{text}{line}"
    return f"{type(error).__name__}{': ' if text else ''}{text}{line}"
