"""Rows of tables (Arrow, `datasets`, pandas, polars) with JSON values, as the people who wrote them meant.

Arrow gives every object of a column the fields of all of them, with nulls. These are left out. A null that a person
wrote in an object is the same there, and is left out too; a null in a column, a list or a map stays, as in .jsonl.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from motet.core.errors import DataError
from motet.core.suggestions import doubled_in

if TYPE_CHECKING:
    import pyarrow

_BATCH = 256
_MISSING = frozenset({"NAType", "NaTType"})
"""Types of pandas' values that stand for nothing; pandas itself is not loaded to know them."""

_NARROW = frozenset({"float16", "float32"})
"""Types whose numbers have fewer digits than a float of Python."""

_DOUBLED = "the column {!r} is there twice; give each column its own name"

Reader = Callable[[Any], Any]


def of_arrow(batches: Iterable[pyarrow.RecordBatch | pyarrow.Table]) -> Iterator[dict[str, Any]]:
    """The rows of parts of a table.

    Raises DataError for two columns of one name, and bytes that are not text.
    """
    before = 0
    for batch in batches:
        if doubled := doubled_in(batch.schema.names):
            raise DataError(_DOUBLED.format(doubled[0]))
        columns = []
        for field, column in zip(batch.schema, batch.columns, strict=True):
            reader = _reader(field.type)
            columns.append(_read(field.name, reader, _values(field.name, column), before))
        for values in zip(*columns, strict=True):
            yield dict(zip(batch.schema.names, values, strict=True))
        before += batch.num_rows


def _values(name: str, column: pyarrow.Array) -> list[Any]:
    if (kind := _with_times_as_text(column.type)) != column.type:
        column = column.cast(kind)  # times of Python have no nanoseconds
    try:
        values: list[Any] = column.to_pylist()
    except (OverflowError, ValueError) as error:
        raise DataError(
            f"the column {name!r} has a value that Python cannot represent ({error}); leave it out"
        ) from error
    return values


def _read(column: str, reader: Reader | None, values: list[Any], before: int) -> list[Any]:
    """The JSON values of a column that follow `before` others."""
    if reader is None:
        return values
    read = list[Any]()
    try:
        for value in values:
            read.append(None if value is None else reader(value))
    except RecursionError as error:
        raise DataError(f"row {before + len(read) + 1}: the column {column!r} is nested too deep") from error
    except _BytesError as error:
        raise DataError(
            f"row {before + len(read) + 1}: the column {column!r} holds bytes that are not text, which no base reads; write "
            f"the rows without it, as by remove_columns({column!r}) of datasets"
        ) from error
    return read


def of_python(rows: Any) -> Iterator[Any]:
    """The rows of what was given as a job's data: a list, a `datasets.Dataset`, or a table of pandas, polars or pyarrow.

    Raises DataError as `of_arrow`.
    """
    if hasattr(rows, "with_format"):
        yield from of_datasets(rows)
    elif hasattr(rows, "iterrows"):
        yield from _of_frame(rows)
    elif (table := _arrow(rows)) is not None:
        yield from of_arrow(table.to_batches(_BATCH))
    else:
        for n, row in enumerate(as_written(rows)):
            yield {k: _cell(str(k), value, n) for k, value in row.items()} if isinstance(row, Mapping) else row


def _of_frame(frame: Any) -> Iterator[dict[str, Any]]:
    """The rows of a pandas DataFrame."""
    if doubled := doubled_in(map(str, frame.columns)):
        raise DataError(_DOUBLED.format(doubled[0]))
    numbers = _NestedNumbers()
    arrow = _arrow_types(frame)
    narrow = {name: str(kind).lower() for name, kind in frame.dtypes.items() if str(kind).lower() in _NARROW}
    rows = [
        {
            name: _cell(str(name), _narrow(narrow[name])(value) if name in narrow else value, n)
            for name, value in row.items()
        }
        for n, row in enumerate(as_written(_with_values_of_arrow(frame, arrow)))
    ]
    others = [[value for name, value in row.items() if name not in arrow] for row in rows]
    for values in others:
        numbers.see(values)
    for row, values in zip(rows, others, strict=True):
        mended = iter(numbers.mended(values))
        yield {name: value if name in arrow else next(mended) for name, value in row.items()}


def _arrow_types(frame: Any) -> dict[Any, pyarrow.DataType]:
    """The types of a DataFrame's columns of Arrow."""
    return {name: kind.pyarrow_dtype for name, kind in frame.dtypes.items() if hasattr(kind, "pyarrow_dtype")}


def _with_values_of_arrow(frame: Any, columns: Collection[Any]) -> Any:
    """The DataFrame with the JSON values of some of its columns of Arrow."""
    import pyarrow

    frame = frame.copy(deep=False)
    for name in columns:
        column = pyarrow.array(frame[name])
        values = _read(str(name), _reader(column.type), _values(str(name), column), 0)
        frame[name] = type(frame[name])(values, index=frame.index, dtype=object)
    return frame


def of_datasets(table: Any) -> Iterator[dict[str, Any]]:
    """The rows of a `datasets.Dataset` or an `IterableDataset`."""
    features = getattr(table, "features", None)
    if hasattr(table, "select") and table.format["type"] != "custom":
        arrow = table.with_format("arrow", columns=table.format["columns"])
        yield from of_arrow(arrow.iter(_BATCH))
        return
    # a stream, or a table with a person's own transform: values of Python, with nulls where Arrow has read them
    kinds = {} if features is None else {field.name: field.type for field in features.arrow_schema}
    as_arrow = any(_with_times_as_text(kind) != kind or "arrow.json" in str(kind) for kind in kinds.values())
    if as_arrow and getattr(getattr(table, "_ex_iterable", None), "iter_arrow", None):
        yield from of_arrow(table.with_format("arrow").iter(_BATCH))
        return
    readers = {name: _reader(kind, decoded=True) for name, kind in kinds.items()}
    for n, row in enumerate(table):
        yield {name: _read(name, readers.get(name, _without_nulls), [value], n)[0] for name, value in row.items()}


def window(size: int) -> int:
    """The first rows of a stream, from which `size` rows are drawn."""
    return max(10 * size, 10_000)


def as_written(rows: Any, size: int | None = None) -> Iterable[Any]:
    """The rows of what was given as a job's data, with each null of Arrow; of a stream, those that `size` are drawn from."""
    if not hasattr(rows, "__len__"):
        return itertools.islice(rows, size and window(size))
    if hasattr(rows, "iterrows"):  # pandas, which has NaN, NaT and NA for missing values
        fine = [name for name, kind in _arrow_types(rows).items() if _with_times_as_text(kind) != kind]
        rows = _with_values_of_arrow(rows, fine) if fine else rows
        found: list[Any] = rows.astype(object).where(rows.notna(), None).to_dict(orient="records")
        return found
    method = next((name for name in ("to_dicts", "to_pylist") if hasattr(rows, name)), None)  # polars, pyarrow
    given: Iterable[Any] = rows if method is None else getattr(rows, method)()
    return given


def _arrow(rows: Any) -> Any:
    """A table of pyarrow or polars as Arrow's; None for anything else."""
    if hasattr(rows, "to_arrow"):
        return rows.to_arrow()
    if hasattr(rows, "to_pylist"):
        import pyarrow

        return pyarrow.Table.from_batches([rows]) if isinstance(rows, pyarrow.RecordBatch) else rows
    return None


# --- values -----------------------------------------------------------------------------------------------------------------


class _BytesError(ValueError):
    """Bytes that are not UTF-8 text."""


class _NestedNumbers:
    """Numbers in the lists and objects of a DataFrame: whole ones are floats there if another one is missing, as NaN."""

    def __init__(self) -> None:
        self._whole, self._missing, self._other = (set[tuple[Any, ...]]() for _ in range(3))

    def see(self, value: Any, path: tuple[Any, ...] = ()) -> None:
        """Look at the values of a row, or at what is nested in them, under the names on the way to it."""
        if isinstance(value, Mapping):
            for name, item in value.items():
                self.see(item, (*path, name))
        elif isinstance(value, list):
            for place, item in enumerate(value):
                self.see(item, (*path, place if not path else list))
        elif len(path) > 1:
            missing, whole = value is None or value != value, isinstance(value, float) and value.is_integer()
            (self._missing if missing else self._whole if whole else self._other).add(path)

    def mended(self, value: Any, path: tuple[Any, ...] = ()) -> Any:
        """The same with whole numbers, and without fields of objects that are missing."""
        if isinstance(value, Mapping):
            there = ((name, item) for name, item in value.items() if item is not None and item == item)
            return {name: self.mended(item, (*path, name)) for name, item in there}
        if isinstance(value, list):
            return [self.mended(item, (*path, place if not path else list)) for place, item in enumerate(value)]
        whole = isinstance(value, float) and path in self._whole & self._missing - self._other and value == value
        return int(value) if whole else value


def _cell(column: str, value: Any, row: int) -> Any:
    [cell] = _read(column, _plain, [value], row)
    return cell


def _json(cell: str) -> Any:
    """The value of a cell of type JSON, where `datasets` writes texts such as 007, 1.50, - and NaN without quotes."""
    try:
        value = json.loads(cell)
    except ValueError:
        return cell
    digits = isinstance(value, float) and (not math.isfinite(value) or (cell.endswith("0") and cell[-2:] != ".0"))
    return cell if digits else value


def _plain(value: Any) -> Any:
    """A value of Python."""
    if isinstance(value, str | bool | int | float | None):
        return value
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if kind == "f" and str(value.dtype) in _NARROW:
        return _plain(list(value)) if value.ndim else _narrow(str(value.dtype))(value)
    if kind in ("M", "m"):  # times of numpy, whose lists are numbers of nanoseconds
        return _plain(list(value)) if value.ndim else _time(value)
    if kind and getattr(value, "ndim", 0):  # pandas has lists of parquet as arrays
        return _plain(value.tolist())
    return _scalar(value)


def _time(value: Any) -> Any:
    """A date of numpy as text, or a span of time in seconds."""
    import numpy as np

    if np.isnat(value):
        return None
    if value.dtype.kind == "M":
        return _short_time(value)
    seconds = float(value / np.timedelta64(1, "s"))
    return int(seconds) if seconds.is_integer() else seconds


def _without_nulls(value: Any) -> Any:
    """A value of Arrow as Python's, whose type is not known: nulls of objects may be Arrow's, and are left out."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else _plain(value)


def _scalar(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError as error:
            raise _BytesError from error
    if isinstance(value, Decimal):
        whole = value.is_finite() and value.as_tuple().exponent == 0
        return int(value) if whole else f"{value:f}" if value.is_finite() else float(value)
    if type(value).__name__ in _MISSING:
        return None
    if hasattr(value, "total_seconds"):
        seconds = value.total_seconds()
        return int(seconds) if seconds.is_integer() else seconds
    return value


def _reader(kind: pyarrow.DataType, decoded: bool = False) -> Reader | None:
    """What makes JSON of a value of this type, which is not null; None where it is JSON already, or `as_json` makes it so.

    `decoded`: the values come from `datasets`, which has read texts of JSON.
    """
    from pyarrow import types

    if getattr(kind, "extension_name", "") == "arrow.json":
        return None if decoded else _json
    if hasattr(kind, "storage_type"):
        return _reader(kind.storage_type, decoded)
    if types.is_dictionary(kind):
        return _reader(kind.value_type, decoded)
    if types.is_struct(kind):
        fields = [(field.name, _reader(field.type, decoded) or _same) for field in kind]
        return lambda value: (
            {name: read(value[name]) for name, read in fields if value.get(name) is not None}
            if isinstance(value, Mapping)
            else _plain(value)
        )
    if types.is_map(kind):
        key, item = _reader(kind.key_type, decoded) or _same, _reader(kind.item_type, decoded) or _same
        return lambda value: {
            str(key(name)): None if entry is None else item(entry)
            for name, entry in (value.items() if isinstance(value, Mapping) else value)
        }
    if hasattr(kind, "value_type"):  # lists of any kind
        if (item_reader := _reader(kind.value_type, decoded)) is None:
            return None
        return lambda value: [None if item is None else item_reader(item) for item in value]
    if _is_fine_time(kind):
        return _short_time
    if types.is_float32(kind) or types.is_float16(kind):
        return _narrow("float32" if types.is_float32(kind) else "float16")
    plain = types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_null(kind)
    text = types.is_string(kind) or types.is_large_string(kind) or str(kind) == "string_view"
    return None if plain or text else _plain


def _is_fine_time(kind: pyarrow.DataType) -> bool:
    return str(kind) == "time64[ns]"


def _with_times_as_text(kind: pyarrow.DataType) -> pyarrow.DataType:
    """A type of Arrow with text in place of times of nanoseconds."""
    import pyarrow
    from pyarrow import types

    if _is_fine_time(kind):
        return pyarrow.string()
    if types.is_dictionary(kind):
        value = _with_times_as_text(kind.value_type)
        return kind if value == kind.value_type else value
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(_with_times_as_text(field.type)) for field in kind])
    if types.is_map(kind):
        key, item = _with_times_as_text(kind.key_type), _with_times_as_text(kind.item_type)
        return kind if (key, item) == (kind.key_type, kind.item_type) else pyarrow.map_(key, item)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        value = _with_times_as_text(kind.value_type)
        return kind if value == kind.value_type else pyarrow.list_(value)
    return kind


def _short_time(time: Any) -> str:
    """A time as Python writes it, with nine digits where it has nanoseconds."""
    whole, _, digits = str(time).partition(".")
    micro, nano = digits[:6], digits[6:].rstrip("0")
    return f"{whole}.{micro:0<6}{nano and digits[6:]}" if digits.strip("0") else whole


def _narrow(kind: str) -> Reader:
    """What makes a number of such a type the float with the same digits: 0.1 and not 0.10000000149011612."""
    import numpy as np

    number = np.dtype(kind).type
    return lambda value: None if value is None else float(str(number(value)))


def _same(value: Any) -> Any:
    return value
