"""Rows become problems: prompts and answers are taken from the columns of a source, and what is odd in rows is noted."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from motet.chat.template_variables import ROW_VARIABLES, check_variables, variables_of
from motet.config import DataConfig
from motet.config.data import column_name
from motet.core.errors import DataError
from motet.core.nested import MISSING, answer_of, may_lead_on, names_of, text_of, value_at
from motet.core.types import Message, Problem
from motet.data.columns import FIRST_ROWS, PROMPT_COLUMNS, Columns
from motet.data.messages import (
    CONTINUATIONS,
    check_characters,
    check_end,
    check_text,
    check_turns,
    messages_of,
    plain_preference,
    with_special_tokens,
    without_prompt,
)
from motet.data.row_files import Row, RowLimits
from motet.process import pace

_FIRST_BYTES = 2**22
"""Bytes as JSON of the rows that columns are chosen from, and that are in memory together."""
_EXACT = 2**53
"""Whole numbers below this are exact as floats."""
_TEXTS_ALONE = (
    "as in a corpus for sft, set data.answer to their column, data.template to what every text follows, such as "
    "'Write a text.', and data.holdout to 0"
)
"""What rows need that have no prompts, and nothing else but the texts to learn."""
_WHOLE_TEXT = re.compile(r"-?\d{1,15}\.0")


class WholeNumbers:
    """Finds columns of whole numbers that their writer had to write as floats, because a value is missing (pandas)."""

    def __init__(self, source: str) -> None:
        self._texts = source.lower().endswith(".csv")
        self._whole, self._empty, self._other = set[str](), set[str](), set[str]()

    def see(self, row: Row) -> None:
        """Look at a row."""
        for name, value in row.items():
            if name in self._other:
                continue
            if value is None or (self._texts and value == ""):
                self._empty.add(name)
            elif self._texts:
                (self._whole if _WHOLE_TEXT.fullmatch(value) else self._other).add(name)
            else:
                whole = isinstance(value, float) and value.is_integer() and abs(value) < _EXACT
                (self._whole if whole else self._other).add(name)

    @property
    def columns(self) -> frozenset[str]:
        """The columns that hold such numbers in every row so far."""
        return frozenset(self._whole & self._empty - self._other)


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return value.removesuffix(".0")
    return None if value is None else int(value)


class Reading:
    """Makes problems of the rows of a source, which it sees once and in order."""

    def __init__(self, config: DataConfig, whole: frozenset[str] = frozenset()) -> None:
        """`whole`: columns whose floats are whole numbers."""
        self._config, self._whole = config, whole
        self._seen = WholeNumbers(config.source)
        self._parts = [] if config.template is None else parts_of(config.template)
        self._asked = {config.answer: "answer", **{column: "template" for _, column in self._parts}}
        self._found = set[str | None]()
        self._lacking, self._first_lacking = 0, ""
        self._rows, self._first = 0, Row()
        self.columns: Columns | None = None
        """Those of the source; None until its first rows are read."""

    @property
    def whole(self) -> frozenset[str]:
        """Columns of floats that are whole numbers; see `WholeNumbers`."""
        return self._seen.columns - self._whole

    def problems(self, rows: Iterator[tuple[int, Row]], bounds: RowLimits | None) -> Iterator[Problem]:
        """The problems of rows with their places. Raises DataError for a row that is none; it says where, and what to do."""
        size = 0
        for index, row in self._prepared(rows):
            self._first = self._first or row
            self._rows += 1
            self._seen.see(row)
            problem = self._problem(row, index)
            if bounds is not None and (self._config.template is not None or (self.columns and self.columns.joined)):
                size += sum(len(message.content) for message in problem.messages)
                if size > bounds.bytes:
                    raise DataError(
                        f"data.template makes prompts of more than {bounds.bytes / 2**20:g} MB together out of "
                        f"{self._config.source}; shorten it, or set data.size"
                    )
            yield problem
        for name in self._asked.keys() - self._found - {None}:
            raise DataError(
                f"{self._config.source}: no row has {name!r} (data.{self._asked[name]}). {_columns(self._first)}"
            )

    def notes(self) -> Iterator[str]:
        """What a person should know of the columns."""
        columns = self.columns
        if columns is None:
            return
        yield from columns.notes()
        if self._lacking and (self._lacking < self._rows or self._config.answer):
            yield (
                f"{self._lacking} of {self._rows} rows have no answer in the column {columns.answer!r}, the first of them "
                f"row {self._first_lacking}"
            )
        if used := sorted(self._whole & {columns.answer, columns.prompt, *(column for _, column in self._parts)}):
            yield (
                f"the column {used[0]!r} has whole numbers and empty values, as pandas writes them: they are read as "
                "2, not as 2.0"
            )

    def _prepared(self, rows: Iterator[tuple[int, Row]]) -> Iterator[tuple[int, Row]]:
        """Rows with whole numbers, in one form of preferences; the first ones decide the columns."""
        if self._whole:
            rows = ((n, {k: _whole(v) if k in self._whole else v for k, v in row.items()}) for n, row in rows)
        if self._config.template is None:
            rows = ((n, plain_preference(row)) for n, row in rows)
        first, size = list[tuple[int, Row]](), 0
        while len(first) < FIRST_ROWS and size < _FIRST_BYTES and (numbered := next(rows, None)) is not None:
            first.append(numbered)
            size += (more := len(json.dumps(numbered[1])))
            pace.step(more)
        self.columns = Columns.of(self._config, [row for _, row in first])
        return chain(first, rows)

    def _problem(self, row: Row, index: int) -> Problem:
        config, where = self._config, f"{self._config.source} row {index + 1}"
        columns = self.columns
        assert columns is not None  # the first rows are read
        own = self._asked_for(row, columns.answer, where) if columns.answer else ""
        answer = answer_of(own)
        value: Any
        if config.template is not None:
            value = self._filled(row, where)
        elif columns.prompt is None:
            value, row = without_prompt(row, where)
        else:
            value = self._prompt(row, columns, where)
        if not value and columns.prompt is None and config.template is None:
            texts = "; to learn texts as they are, " + _TEXTS_ALONE if columns.answer is None else ""
            raise DataError(
                f"{where} has no column named {', '.join(PROMPT_COLUMNS)}. {_columns(row)}. "
                f"Set data.prompt to one of them, or data.template to a text with {{column}} fields{texts}"
            )
        for name in filter(row.get, (columns.prompt or "", *CONTINUATIONS)):  # a template has no column
            check_text(row[name], name, where)
        for turns in (value, *map(row.get, CONTINUATIONS)):
            check_turns(turns, where)
        conversational = isinstance(value, list)
        messages = _with_more(messages_of(value, where, columns.prompt or "template"), row, columns, where)
        continuation: tuple[Message, ...] = ()
        if messages[-1].role == "assistant":  # a row for supervised training: its last turn is the reference answer
            messages, continuation = messages[:-1], messages[-1:]
            answer = answer or continuation[0].content
            if columns.prompt == "prompt":
                check_end(row, where)
        if not messages or messages[-1].role not in ("user", "tool"):
            raise DataError(f"{where}: messages must end with a user turn, or with the assistant's answer to one")
        if config.system is not None:
            messages = (Message("system", config.system), *(turn for turn in messages if turn.role != "system"))
        if config.special_tokens:
            messages, continuation = with_special_tokens(messages), with_special_tokens(continuation)
        check_characters((*messages, *continuation), where)
        check_variables(variables_of(row), f"{where}: {ROW_VARIABLES}")
        nothing = own is None or own is MISSING or (own == "" and self._config.source.lower().endswith(".csv"))
        if nothing and not answer and not row.keys() & {"completion", "chosen"}:
            self._note_lacking(row, columns, index)
        if not config.source.startswith("reasoning-gym:"):  # whose scorer finds a row by its question
            row = {name: value for name, value in row.items() if name != columns.prompt}
        return Problem(index, messages, answer, row, conversational, continuation)

    def _note_lacking(self, row: Row, columns: Columns, index: int) -> None:
        self._lacking += 1
        if self._lacking == 1:
            others = (name for name in columns.beside.get("answer", ()) if text_of(value_at(row, name)))
            other = next(others, None)
            self._first_lacking = f"{index + 1}" + (f", which has one in {other!r}" if other else "")

    def _prompt(self, row: Row, columns: Columns, where: str) -> Any:
        assert columns.prompt is not None
        value = value_at(row, columns.prompt)
        if value is MISSING:
            like = "" if self._config.prompt else ", where the first rows have their prompts"
            asked = " (data.prompt)" if self._config.prompt else ""
            cure = "" if asked else ". Leave such rows out, or name a column of all rows in data.prompt"
            raise DataError(f"{where} has no column {columns.prompt!r}{asked}{like}. {_columns(row)}{cure}")
        if isinstance(value, str) and columns.joined:
            more = (text_of(row.get(name)) for name in columns.joined)
            return "\n\n".join(filter(str.strip, (value, *more)))
        return value

    def _asked_for(self, row: Row, name: str, where: str) -> Any:
        """The value at a name; nothing where a row lacks a part of an object, which other rows have.

        Raises DataError where the job names a column that the row does not have.
        """
        value = value_at(row, name)
        if value is not MISSING:
            self._found.add(name)
        elif name in self._asked and not may_lead_on(row, name):
            field = self._asked[name]
            asked = f"that data.{field} asks for" if field == "template" else f"(data.{field})"
            raise DataError(f"{where} has no column {name!r} {asked}. {_columns(row)}")
        return value

    def _filled(self, row: Row, where: str) -> str:
        return "".join(
            text if column is None else text + text_of(self._asked_for(row, column, where))
            for text, column in self._parts
        )


def _with_more(messages: tuple[Message, ...], row: Row, columns: Columns, where: str) -> tuple[Message, ...]:
    """Messages after the turns and the system prompt that other columns of a known layout hold."""
    history = row.get("history") if columns.layout == "Alpaca's" else None
    if history:
        try:
            pairs = [({"role": "user", "content": a}, {"role": "assistant", "content": b}) for a, b in history]
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{where}: history must be pairs of a question and an answer, got {history!r:.80}"
            ) from error
        messages = (*messages_of([turn for pair in pairs for turn in pair], where, "history"), *messages)
    system = text_of(row.get(columns.system)) if columns.system else ""
    return (Message("system", system), *messages) if system and messages[0].role != "system" else messages


def _columns(row: Mapping[str, Any]) -> str:
    return f"Its columns: {', '.join(names_of(row)) or 'none'}"


def parts_of(template: str) -> list[tuple[str, str | None]]:
    """Split a template into plain texts, each with the column that follows it.

    Raises:
        DataError: a field is more than the name of a column; format expressions could use any amount of memory.
    """
    hint = "Write {column} for a column, {{ and }} for braces"
    try:
        pieces: Iterable[tuple[str, str | None, str | None, str | None]] = list(string.Formatter().parse(template))
    except ValueError as error:
        raise DataError(f"data.template cannot be filled: {error}. {hint}") from error
    for _, column, form, conversion in pieces:
        if column is not None and (form or conversion or not column or "[" in column):
            asked = f"{{{column}{'!' + conversion if conversion else ''}{':' + form if form else ''}}}"
            raise DataError(
                f"data.template cannot be filled: {asked:.80} is not the name of a column alone. {hint}; for anything else "
                "add a column"
            )
        try:
            column_name(column or "")
        except ValueError as error:
            raise DataError(f"data.template cannot be filled: {error}") from error
    return [(text, column) for text, column, _, _ in pieces]
