"""Stored answers of judges, in a job's directory: each question is asked once, and a resumed job gets the same scores.

The file also counts the spending, which survives a crash.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet.core.errors import EngineError

FILE = "judge.sqlite"
"""File name in a job's directory."""
MOST_KEPT = 50_000
"""Most answers kept; the oldest are deleted first."""
_WAIT_SECONDS = 30.0
_TABLES = (
    "CREATE TABLE IF NOT EXISTS answers (id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE, text TEXT)",
    "CREATE TABLE IF NOT EXISTS spend (questions INT, read INT, written INT, cost REAL)",
    "INSERT INTO spend SELECT 0, 0, 0, 0.0 WHERE NOT EXISTS (SELECT 1 FROM spend)",
    "PRAGMA user_version = 1",
)
_SPENT = "SELECT questions, read, written, cost FROM spend"


@dataclass(frozen=True)
class Said:
    """An answer of a judge."""

    text: str | None
    """None if there is none that can be used; it is paid all the same."""
    read: int
    """Tokens of the question, as counted by the server; its bytes if the server counts none."""
    written: int
    """Tokens of the answer."""


@dataclass(frozen=True)
class Spend:
    """A job's spending on judges so far."""

    questions: int = 0
    read: int = 0
    written: int = 0
    """Tokens, as in `Said`."""
    cost: float = 0.0
    """In the currency of `prices`; 0 without prices."""

    @property
    def tokens(self) -> int:
        """Tokens read and written."""
        return self.read + self.written


def key_of(url: str, body: Mapping[str, Any]) -> str:
    """A digest that identifies a question."""
    return hashlib.sha256(json.dumps([url, body], sort_keys=True).encode()).hexdigest()


class JudgeAnswers:
    """The answers of one job's judges. Each call opens and closes the file."""

    def __init__(self, path: Path, most: int = MOST_KEPT) -> None:
        self._path, self._most = path, most

    def find(self, key: str) -> str | None:
        """The stored answer to a question, if any."""
        if not self._path.exists():
            return None
        with self._open() as file:
            row = file.execute("SELECT text FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def keep(self, key: str, said: Said, cost: float) -> Spend:
        """Write an answer and its cost in one transaction, on disk when this returns; returns the total so far."""
        with self._open() as file:
            if said.text is not None:
                file.execute("INSERT OR IGNORE INTO answers (key, text) VALUES (?, ?)", (key, said.text))
            file.execute(
                "UPDATE spend SET questions = questions + 1, read = read + ?, written = written + ?, cost = cost + ?",
                (said.read, said.written, cost),
            )
            file.execute("DELETE FROM answers WHERE id <= (SELECT max(id) FROM answers) - ?", (self._most,))
            return Spend(*file.execute(_SPENT).fetchone())

    def copy(self, path: Path) -> None:
        """Give another job the answers, for which it has spent nothing."""
        if not self._path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._open() as file, JudgeAnswers(path)._open() as other:
            found = file.execute("SELECT id, key, text FROM answers")
            other.executemany("INSERT INTO answers VALUES (?, ?, ?)", found)

    def spend(self) -> Spend:
        """The total of the answers so far."""
        if not self._path.exists():
            return Spend()
        with self._open() as file:
            return Spend(*file.execute(_SPENT).fetchone())

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            # one transaction
            with contextlib.closing(sqlite3.connect(self._path, timeout=_WAIT_SECONDS)) as file, file:
                if file.execute("PRAGMA user_version").fetchone() == (0,):
                    file.execute("BEGIN IMMEDIATE")  # another thread may be making the file too
                    for statement in _TABLES:
                        file.execute(statement)
                yield file
        except sqlite3.Error as error:
            raise EngineError(f"answers of judges cannot be kept in {self._path}: {error}") from error
