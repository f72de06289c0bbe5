"""Rows from files, one by one. Untrusted files are limited: a few kilobytes may expand to a million rows."""

from __future__ import annotations

import codecs
import contextlib
import csv
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from motet.core.errors import DataError, EngineError
from motet.core.suggestions import doubled_in
from motet.data import parquet_rows
from motet.data.parquet_rows import too_much
from motet.process.isolated_calls import TooMuchError, call
from motet.process.isolated_process import WorkLimits

Row = dict[str, Any]
_MARK = re.compile(r"[ \t\n\r]*([\[,\]])[ \t\n\r]*")
SMALL = 2**18
"""Largest file that is read in this process, in bytes."""


@dataclass(frozen=True)
class RowLimits:
    """Limits on untrusted rows."""

    rows: int = 2_000_000
    row_bytes: int = 2**20
    """Bytes of one row as JSON."""
    row_values: int = 20_000_000
    """Values of one row; reading or writing them keeps the interpreter."""
    bytes: int = 2**30
    """Bytes of all rows, and of all prompts made of them."""
    values: int = 20_000_000
    """Values in all rows (numbers, texts, lists and so on), each of which becomes a Python object."""
    seconds: float = 120.0
    """Time for generating rows, or for reading parquet."""
    memory_mb: int = 4096
    """Memory of the process that generates rows or reads parquet."""


UPLOADED = RowLimits(row_values=10_000)
"""Limits of a service per file."""
OF_A_JOB = RowLimits(rows=200_000)
"""Limits of a service per job; every row is checked before the job begins."""


def rows_of(path: Path, bounds: RowLimits | None = None) -> Iterator[Row]:
    """The rows of a .jsonl, .json, .csv or .parquet file, in order; without `bounds`, only memory limits them.

    Raises DataError if it cannot be read, contains something other than rows, or exceeds the bounds but that on rows.
    """
    return READERS[path.suffix.lower()](path, bounds)


def count_rows(path: Path, bounds: RowLimits) -> int:
    """The number of rows in a file; reads every row and keeps none.

    Raises DataError as `rows_of`, and for a file without rows, with too many, or of another kind.
    """
    if path.suffix.lower() not in READERS:
        raise DataError(f"{path} is not a file of rows: its name must end with {', '.join(READERS)}")
    count = 0
    for count, _ in enumerate(rows_of(path, bounds), 1):
        if count > bounds.rows:
            raise DataError(f"{path} has more than {bounds.rows} rows, the limit here; split it")
    if not count:
        raise DataError(f"{path} has no rows")
    return count


def count_isolated(path: Path, bounds: RowLimits) -> int:
    """As `count_rows`; large files are read in a separate process with limits on time and memory."""
    if path.suffix.lower() == ".parquet" or path.stat().st_size <= SMALL:  # parquet has a process already
        return count_rows(path, bounds)
    limits = WorkLimits(bounds.seconds, bounds.memory_mb, clock=1.0, readable=(place := str(path.resolve()),))
    try:
        answer = json.loads(call(_counted, json.dumps([place, asdict(bounds)]).encode(), limits))
    except TooMuchError as error:
        raise too_much(path, error) from error
    except (EngineError, RuntimeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if isinstance(answer, str):
        raise DataError(answer)
    return int(answer)


def _too_large(where: str, limit: int) -> DataError:
    return DataError(f"{where} has more than {limit / 2**20:g} MB; shorten it")


def _too_many_values(path: Path, bounds: RowLimits) -> DataError:
    return DataError(f"{path} has more than {bounds.values} values, the limit here; leave columns out, or split it")


# --- lines ------------------------------------------------------------------------------------------------------------------


def _lines(path: Path, bounds: RowLimits | None) -> Iterator[bytes]:
    longest = -1 if bounds is None else bounds.row_bytes + 1
    with path.open("rb") as lines:
        yield from iter(lambda: lines.readline(longest), b"")


def _within(lines: Iterable[bytes], path: Path, unit: str, bounds: RowLimits | None) -> Iterator[tuple[str, bytes]]:
    """Yield lines with their places; each line is checked against the bounds before it is yielded."""
    size = values = 0
    for number, line in enumerate(lines, 1):
        where = f"{path} {unit} {number}"
        if bounds is not None:
            size, values = size + len(line), values + _values(line)
            if len(line) > bounds.row_bytes:
                raise _too_large(where, bounds.row_bytes)
            if size > bounds.bytes:
                raise _too_large(str(path), bounds.bytes)
            if values > bounds.values:
                raise _too_many_values(path, bounds)
        yield where, line


# --- JSON -------------------------------------------------------------------------------------------------------------------


def _json_lines(path: Path, bounds: RowLimits | None) -> Iterator[Row]:
    yield from _objects(_lines(path, bounds), path, "line", bounds)


def _objects(lines: Iterable[bytes], path: Path, unit: str, bounds: RowLimits | None) -> Iterator[Row]:
    for where, line in _within(lines, path, unit, bounds):
        if line.removeprefix(codecs.BOM_UTF8).strip():
            yield _few_values(_object(_parse(line, where), where), _values(line), where, bounds)


def _json_list(path: Path, bounds: RowLimits | None) -> Iterator[Row]:
    text = path.read_bytes()
    most = _values(text)
    if bounds is not None and most > bounds.values:
        raise _too_many_values(path, bounds)
    for number, row in enumerate(_listed(text, path), 1):
        where = f"{path} row {number}"
        if bounds is not None and len(json.dumps(row)) > bounds.row_bytes:
            raise _too_large(where, bounds.row_bytes)
        yield _few_values(_object(row, where), most, where, bounds)


def _listed(text: bytes, path: Path) -> Iterator[Any]:
    """The values of a list, parsed one by one: all at once, they keep the interpreter for a second."""
    decode, at, mark = json.JSONDecoder(object_pairs_hook=_once).raw_decode, 0, "["
    letters = _decoded(text, str(path)).rstrip()
    try:
        while (found := _MARK.match(letters, at)) is not None and found[1] in mark:
            if found[1] == "]" and found.end() == len(letters):
                return
            value, at = decode(letters, found.end())
            yield value
            mark = ",]"
    except (ValueError, RecursionError):
        pass
    value = _parse(text, str(path))  # tells what is wrong
    if value != []:
        raise DataError(f"{path} must hold a list of rows, got {type(value).__name__}; for one row a line use .jsonl")


def _values(text: bytes) -> int:
    """An upper limit on the number of values in a JSON text, without parsing it."""
    return 1 + text.count(b",") + text.count(b"[") + text.count(b"{")


def _few_values(row: Row, most: int, where: str, bounds: RowLimits | None) -> Row:
    """The row, which has at most `most` values; raises DataError if it has too many."""
    if bounds is not None and most > bounds.row_values:
        count, left = 0, list[Any](row.values())
        while left:
            value, count = left.pop(), count + 1
            left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if count > bounds.row_values:
            told = f"{count} values, and {bounds.row_values} is the limit here"
            raise DataError(f"{where} has {told}; leave columns out, or write long lists as one text")
    return row


def _parse(text: bytes, where: str) -> Any:
    try:
        return json.loads(_decoded(text, where).rstrip(), object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        if error.pos >= len(error.doc) or error.msg.startswith("Unterminated string"):
            raise DataError(
                f"{where} is not valid JSON: it ends in the middle of a value. The file was cut off, or a text in it has a "
                "line break, which is written \\n"
            ) from error
        line = f"line {error.lineno}, " if error.lineno > 1 and error.pos < len(error.doc.rstrip()) else ""
        hint = "; with a row a line, name it .jsonl" if line and error.msg == "Extra data" else ""
        raise DataError(f"{where} is not valid JSON: {error.msg} ({line}character {error.colno}){hint}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON: {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, whose names JSON allows twice; most readers then take the last value. Raises ValueError for such a one."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError(
            f"an object has {doubled_in(name for name, _ in pairs)[0]!r} twice; give each value its own name"
        )
    return made


def _decoded(text: bytes, where: str) -> str:
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 text; save the file as UTF-8") from error


def _object(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        example = '{"prompt": "...", "answer": "..."}'
        raise DataError(f"{where} must be an object such as {example}, got {type(value).__name__}")
    return value


# --- CSV --------------------------------------------------------------------------------------------------------------------


def _csv(path: Path, bounds: RowLimits | None) -> Iterator[Row]:
    """All fields stay texts: `007` may be a code, not the number 7."""
    csv.field_size_limit(sys.maxsize)  # a limit of the whole process; rows have their own bounds
    reader = csv.reader(_texts(path, bounds), strict=True)
    try:
        names = next(reader, [])
        if len(names) == 1 and (separator := next((mark for mark in ";\t|" if mark in names[0]), None)):
            raise DataError(
                f"{path} has fields that {separator!r} separates; save it with commas, or with the ending .jsonl as a JSON "
                "object a line"
            )
        if doubled := doubled_in(names):
            raise DataError(f"{path} names the column {doubled[0]!r} twice; give each column its own name")
        for number, fields in enumerate(filter(None, reader), 1):
            if bounds is not None and sum(map(len, fields)) > bounds.row_bytes:
                raise _too_large(f"{path} row {number}", bounds.row_bytes)
            if bounds is not None and len(fields) > bounds.row_values:
                raise DataError(f"{path} has more than {bounds.row_values} columns, the limit here; leave columns out")
            if len(fields) != len(names):
                odd = "more" if len(fields) > len(names) else "fewer"
                raise DataError(f"{path} line {reader.line_num} has {odd} fields than the first line has names")
            yield dict(zip(names, fields, strict=True))
    except csv.Error as error:
        if "new-line character" in str(error):
            raise DataError(f"{path} has the line ends of old Macs; save it with line feeds") from error
        raise DataError(f"{path} line {reader.line_num} is not CSV: {error}") from error


def _texts(path: Path, bounds: RowLimits | None) -> Iterator[str]:
    for where, line in _within(_lines(path, bounds), path, "line", bounds):
        yield _decoded(line, where)


# --- parquet ----------------------------------------------------------------------------------------------------------------


def _parquet(path: Path, bounds: RowLimits | None) -> Iterator[Row]:
    if bounds is None:
        yield from parquet_rows.read(path)
        return
    lines = parquet_rows.read_limited(path, bounds.seconds, bounds.memory_mb, bounds.row_bytes + 1)
    with contextlib.closing(lines):
        yield from _objects(lines, path, "row", bounds)


READERS: dict[str, Callable[[Path, RowLimits | None], Iterator[Row]]] = {
    ".jsonl": _json_lines, ".json": _json_list, ".csv": _csv, ".parquet": _parquet,
}  # fmt: skip


def _counted(given: bytes) -> bytes:
    """Runs in a separate process: the number of rows in a file, or what is wrong with it."""
    path, bounds = json.loads(given)
    try:
        return json.dumps(count_rows(Path(path), RowLimits(**bounds))).encode()
    except DataError as error:
        return json.dumps(str(error)).encode()
