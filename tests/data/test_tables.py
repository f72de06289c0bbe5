"""The same rows give the same problems in every format, as the people who wrote them meant."""

from __future__ import annotations

import datetime
import decimal
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet.config import DataConfig
from motet.core.errors import DataError
from motet.core.types import Problem
from motet.data.dataset import Dataset, load_dataset
from motet.data.row_files import UPLOADED, RowLimits

pytestmark = pytest.mark.tier1

datasets, pandas, pyarrow = map(pytest.importorskip, ("datasets", "pandas", "pyarrow"))
parquet = pytest.importorskip("pyarrow.parquet")


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def conversation(name: str, **arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": name, "content": "ok"},
        {"role": "assistant", "content": "Done."},
    ]


ROWS: list[dict[str, Any]] = [
    {
        "messages": conversation("add", a=1, b=[1, 2]),
        "answer": {"parts": [{"x": 1}], "sum": 3},
        "tools": [tool("add", a={"type": "integer"}, b={"type": "array", "items": {"type": "integer"}})],
        "tests": [{"input": "1", "output": "2"}, {"output": "3"}],
        "level": 1,
        "kind": ["a", None],
    },
    {
        "messages": conversation("sell", place={"city": "Bonn"}, good="salt"),
        "answer": {"parts": [{"y": True}], "product": 2},
        "tools": [tool("sell", good={"type": "string", "enum": ["salt"]}), tool("buy")],
        "tests": [{"output": "4"}],
        "level": None,
        "kind": [],
    },
]


def read(source: Any, bounds: RowLimits | None = None, **fields: Any) -> Dataset:
    given = str(source) if isinstance(source, Path) else source
    config = DataConfig.model_validate({"source": given, "holdout": 0, "shuffle": False, **fields})
    return load_dataset(config, bounds)


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _parquet(path: Path, rows: list[Any]) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def _saved(path: Path, rows: list[Any]) -> Path:
    datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


def _folder(path: Path, rows: list[Any]) -> Path:
    path.mkdir()
    jsonl(path / "train.jsonl", rows)
    return path


FORMATS: dict[str, Any] = {
    "json": lambda path, rows: (path.with_suffix(".json").write_text(json.dumps(rows)), path.with_suffix(".json"))[1],
    "parquet": lambda path, rows: _parquet(path.with_suffix(".parquet"), rows),
    "saved": _saved,
    "folder": _folder,
    "list": lambda _, rows: rows,
    "table": lambda _, rows: pyarrow.Table.from_pylist(rows),
    "batch": lambda _, rows: pyarrow.RecordBatch.from_pylist(rows),
    "dataset": lambda _, rows: datasets.Dataset.from_list(rows),
    "indices": lambda _, rows: datasets.Dataset.from_list(rows[::-1]).select(range(len(rows) - 1, -1, -1)),
    "json_type": lambda _, rows: datasets.Dataset.from_list(rows, on_mixed_types="use_json"),
    "stream": lambda _, rows: datasets.Dataset.from_list(rows).to_iterable_dataset(),
    "generated": lambda _, rows: datasets.IterableDataset.from_generator(lambda: iter(rows)),
    "transformed": lambda _, rows: datasets.Dataset.from_list(rows).with_transform(lambda batch: batch),
    "frame": lambda _, rows: pandas.DataFrame(rows),
    "frame_of_arrow": lambda _, rows: pyarrow.Table.from_pylist(rows).to_pandas(),
}


def problems_of(data: Dataset) -> list[Problem]:
    return list(data.train)


@pytest.mark.parametrize("name", FORMATS)
def test_objects_have_the_fields_that_were_written(tmp_path: Path, name: str) -> None:
    wanted = problems_of(read(jsonl(tmp_path / "d.jsonl", ROWS)))
    assert wanted[0].metadata["tests"] == [{"input": "1", "output": "2"}, {"output": "3"}]
    assert wanted[1].answer == '{"parts": [{"y": true}], "product": 2}'
    source = FORMATS[name](tmp_path / "made", ROWS)
    assert problems_of(read(source)) == wanted
    if name == "parquet":
        assert problems_of(read(source, bounds=UPLOADED)) == wanted


def test_a_null_that_was_written_stays_where_a_format_can_tell(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": {"x": None, "y": [None, 1]}}, {"prompt": "b", "answer": {"y": []}}]
    told, left_out = ['{"x": null, "y": [null, 1]}', '{"y": []}'], ['{"y": [null, 1]}', '{"y": []}']
    mixed = pyarrow.array([json.dumps(row["answer"]) for row in rows], pyarrow.json_())
    pairs = pyarrow.array([[("x", None), ("y", 1)], []], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    for source, answers in (
        (jsonl(tmp_path / "d.jsonl", rows), told),
        (rows, told),
        (pyarrow.table({"prompt": ["a", "b"], "answer": mixed}), told),
        (pyarrow.table({"prompt": ["a", "b"], "answer": pairs}), ['{"x": null, "y": 1}', "{}"]),
        (datasets.Dataset(pyarrow.table({"prompt": ["a", "b"], "answer": mixed})), told),
        (datasets.Dataset(pyarrow.table({"prompt": ["a", "b"], "answer": mixed})).to_iterable_dataset(), told),
        (pyarrow.Table.from_pylist(rows), left_out),
        (pandas.DataFrame(rows), left_out),
    ):
        assert [problem.answer for problem in read(source).train] == answers
    path = tmp_path / "json.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "answer": mixed}), path)
    assert [problem.answer for problem in read(path, bounds=UPLOADED).train] == told


def test_a_stream_of_unknown_types_has_no_nulls_of_arrow() -> None:
    rows = [
        {"prompt": "a", "answer": {"a": 1, "in": [{"x": "1"}, None]}},
        {"prompt": "b", "answer": {"b": 2, "in": [{"y": None}]}},
    ]
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
    mapped = stream.map(lambda row: {**row, "more": {"c": None}})
    assert mapped.features is None
    answers = [problem.answer for problem in read(stream).train]
    assert answers == ['{"a": 1, "in": [{"x": "1"}, null]}', '{"in": [{}], "b": 2}']
    data = read(mapped)
    assert [problem.answer for problem in data.train] == answers
    assert data.train[0].metadata["more"] == {}


JSON_CELLS = {
    "4": "4", "007": "007", "1.50": "1.50", "2.0": "2.0", "1e5": "100000.0", "-": "-", "NaN": "NaN", "-Infinity": "-Infinity",
    " 7": "7", "0.0000001": "1e-07", '"x y"': "x y", "true": "true", "[1, null]": "[1, null]", '{"a": null}': '{"a": null}',
    "9" * 5000: "9" * 5000, "null": "",
}  # fmt: skip


@pytest.mark.parametrize("form", ["table", "dataset", "stream", "parquet", "saved", "frame", "lists"])
def test_json_columns_hold_what_was_written(tmp_path: Path, form: str) -> None:
    cells = pyarrow.array(JSON_CELLS, pyarrow.json_())
    wanted = list(JSON_CELLS.values())
    if form == "lists":
        twice = pyarrow.array([cell for cell in JSON_CELLS for _ in range(2)], pyarrow.json_())
        cells = pyarrow.ListArray.from_arrays(range(0, len(twice) + 1, 2), twice)
        texts = {"007", "1.50", "-", "NaN", "-Infinity", "9" * 5000}
        wanted = [json.dumps([cell if cell in texts else json.loads(cell)] * 2) for cell in JSON_CELLS]
    table = pyarrow.table({"prompt": list(map(str, range(len(JSON_CELLS)))), "answer": cells})
    source: Any = tmp_path / "rows.parquet"
    if form == "parquet":
        parquet.write_table(table, source)
    elif form == "saved":
        datasets.Dataset(table).save_to_disk(source := tmp_path / "saved")
    else:
        source = {
            "dataset": datasets.Dataset(table), "stream": datasets.Dataset(table).to_iterable_dataset(),
            "frame": table.to_pandas(types_mapper=pandas.ArrowDtype),
        }.get(form, table)  # fmt: skip
    for bounds in (None, UPLOADED) if form == "parquet" else (None,):
        assert [problem.answer for problem in read(source, bounds=bounds).train] == wanted


def test_numbers_and_texts_of_a_column_of_datasets_are_both_read() -> None:
    rows = [{"prompt": "a", "answer": 4}, {"prompt": "b", "answer": "007"}, {"prompt": "c", "answer": None}]
    mixed = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    assert [problem.answer for problem in read(mixed).train] == ["4", "007", ""]


def test_a_row_that_cannot_be_read_is_named_with_its_column(tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": ["a"] * 400, "image": [b"text"] * 300 + [b"\xff"] * 100})
    parquet.write_table(table, tmp_path / "rows.parquet")
    for source in (tmp_path / "rows.parquet", table, table.to_pandas(), table.to_pylist(), datasets.Dataset(table)):
        with pytest.raises(DataError, match=r"row 301: the column 'image' holds bytes"):
            read(source)
    deep = pyarrow.array(["1", "[" * 100_000 + "]" * 100_000], pyarrow.json_())
    with pytest.raises(DataError, match=r"row 2: the column.*is nested too deep"):
        read(pyarrow.table({"prompt": ["a", "b"], "answer": deep}))


MOMENT = 3_723_000_000_000
"""01:02:03 in nanoseconds."""
TIMES = pyarrow.array([MOMENT, MOMENT + 1, MOMENT + 120_000_000, None], pyarrow.time64("ns"))
TIME_TEXTS = ["01:02:03", "01:02:03.000000001", "01:02:03.120000", ""]
VALUES = [
    (pyarrow.array(["x", None], pyarrow.large_string()), ["x", ""]),
    (pyarrow.array(["x", None], pyarrow.string_view()), ["x", ""]),
    (pyarrow.array(["x", None]).dictionary_encode(), ["x", ""]),
    (pyarrow.array([b"caf\xc3\xa9", None]), ["café", ""]),
    (pyarrow.array([decimal.Decimal("2.50"), None]), ["2.50", ""]),
    (pyarrow.array([decimal.Decimal("12"), None]), ["12", ""]),
    (pyarrow.array([decimal.Decimal("1E-9"), None]), ["0.000000001", ""]),
    (pyarrow.array([datetime.date(2024, 1, 2), None]), ["2024-01-02", ""]),
    (pyarrow.array([datetime.datetime(2024, 1, 2, 3, 4), None]), ["2024-01-02T03:04:00", ""]),
    (pyarrow.array([10**18 + 1], pyarrow.timestamp("ns")), ["2001-09-09T01:46:40.000000001"]),
    (pyarrow.array([datetime.timedelta(days=1, seconds=1), None]), ["86401", ""]),
    (pyarrow.array([datetime.time(1, 2, 3), None]), ["01:02:03", ""]),
    (TIMES, TIME_TEXTS),
    (TIMES.dictionary_encode(), TIME_TEXTS),
    (TIMES.cast(pyarrow.time64("us"), safe=False), ["01:02:03", "01:02:03", "01:02:03.120000", ""]),
    (pyarrow.array([[MOMENT + 1] * 2], pyarrow.list_(TIMES.type)), ['["01:02:03.000000001", "01:02:03.000000001"]']),
    (pyarrow.array([[10**18 + 1, 10**18]], pyarrow.list_(pyarrow.timestamp("ns"))),
     ['["2001-09-09T01:46:40.000000001", "2001-09-09T01:46:40"]']),
    (pyarrow.array([{"a": 10**18 + 1}], pyarrow.struct({"a": pyarrow.timestamp("ns", "UTC")})),
     ['{"a": "2001-09-09T01:46:40.000000001+00:00"}']),
    (pyarrow.array([[10**9 + 1, 10**9]], pyarrow.list_(pyarrow.duration("ns"))), ["[1.000000001, 1]"]),
    (pyarrow.array([[MOMENT + 1] * 2], pyarrow.list_(TIMES.type, 2)), ['["01:02:03.000000001", "01:02:03.000000001"]']),
    (pyarrow.array(
        [{"a": [MOMENT + 1]}, {"b": MOMENT}], pyarrow.struct({"a": pyarrow.large_list(TIMES.type), "b": TIMES.type})),
     ['{"a": ["01:02:03.000000001"]}', '{"b": "01:02:03"}']),
    (pyarrow.array([[1, 2], [3, None]], pyarrow.list_(pyarrow.int8(), 2)), ["[1, 2]", "[3, null]"]),
    (pyarrow.array([["x", "y"], None], pyarrow.large_list(pyarrow.string())), ['["x", "y"]', ""]),
    (pyarrow.array([[1.5, math.nan]], pyarrow.list_view(pyarrow.float32())), ["[1.5, null]"]),
    (pyarrow.array(np.array([1.5, 2.0], np.float16)), ["1.5", "2.0"]),
    (pyarrow.array([math.nan, 1.5]), ["", "1.5"]),
    (pyarrow.array([math.inf, -math.inf, 2.0, None]), ["inf", "-inf", "2.0", ""]),
    (pyarrow.array([{"a": [math.inf, None]}]), ['{"a": ["inf", null]}']),
    (pyarrow.array([0.1, 1 / 3, 2.0], pyarrow.float32()), ["0.1", "0.33333334", "2.0"]),
    (pyarrow.array([{"a": [0.1]}], pyarrow.struct({"a": pyarrow.list_(pyarrow.float32())})), ['{"a": [0.1]}']),
    (pyarrow.array([True, None, False]), ["true", "", "false"]),
    (pyarrow.array([2**63], pyarrow.uint64()), [str(2**63)]),
    (pyarrow.array([{}, {}], pyarrow.struct([])), ["{}", "{}"]),
    (pyarrow.array([{"a": {"b": None}}, {"a": {"b": [{"c": 1}, None]}}]), ['{"a": {}}', '{"a": {"b": [{"c": 1}, null]}}']),
    (pyarrow.array([{"at": datetime.date(2024, 1, 2)}]), ['{"at": "2024-01-02"}']),
]  # fmt: skip


@pytest.mark.parametrize(("column", "texts"), VALUES, ids=lambda value: str(getattr(value, "type", "")))
def test_every_type_has_one_text_in_answers_and_templates(column: Any, texts: list[str]) -> None:
    table = pyarrow.table({"prompt": [f"{number}" for number in range(len(column))], "answer": column})
    sources = [table, table.to_pandas(types_mapper=pandas.ArrowDtype)]
    if "view" not in str(column.type):  # which datasets does not have
        sources += [datasets.Dataset(table), datasets.Dataset(table).to_iterable_dataset()]
    for source in sources:
        assert [problem.answer for problem in read(source).train] == texts
    filled = read(table, template="<{answer}>").train
    assert [problem.messages[0].content for problem in filled] == [f"<{text}>" for text in texts]


def test_times_in_maps_keep_their_nanoseconds() -> None:
    column = pyarrow.array([[("x", MOMENT + 1), ("y", None)]], pyarrow.map_(pyarrow.string(), TIMES.type))
    table = pyarrow.table({"prompt": ["a"], "answer": column})
    frame = table.to_pandas(types_mapper=pandas.ArrowDtype)
    for source in (table, frame):
        (problem,) = read(source).train
        assert problem.answer == '{"x": "01:02:03.000000001", "y": null}'


def test_lists_of_times_in_a_frame_are_those_of_the_file() -> None:
    """pandas has them as arrays of numpy."""
    for values, texts in (
        (pyarrow.array([[10**18 + 1, 10**18, None]], pyarrow.list_(pyarrow.timestamp("ns"))),
         ["2001-09-09T01:46:40.000000001", "2001-09-09T01:46:40", None]),
        (pyarrow.array([[120, 1000]], pyarrow.list_(pyarrow.timestamp("ms"))),
         ["1970-01-01T00:00:00.120000", "1970-01-01T00:00:01"]),
        (pyarrow.array([[10**9 + 1, 10**9, None]], pyarrow.list_(pyarrow.duration("ns"))), [1.000000001, 1, None]),
    ):  # fmt: skip
        table = pyarrow.table({"prompt": ["a"], "answer": values})
        for source in (table, table.to_pandas()):
            assert [problem.answer for problem in read(source).train] == [json.dumps(texts)]


def test_bytes_that_are_no_text_and_doubled_columns_are_refused(tmp_path: Path) -> None:
    for value in (b"\xff\xd8", {"bytes": b"\xff\xd8", "path": "x.jpg"}, [b"\xff"]):
        table = pyarrow.table({"prompt": ["a"], "image": [value]})
        parquet.write_table(table, tmp_path / "d.parquet")
        for source, bounds in (
            (table, None),
            (table.to_pylist(), None),
            (table.to_pandas(), None),
            (tmp_path / "d.parquet", None),
            (tmp_path / "d.parquet", UPLOADED),
        ):
            with pytest.raises(DataError, match=r"the column 'image'.*that are not text"):
                read(source, bounds=bounds)
    doubled = pyarrow.Table.from_arrays([pyarrow.array(["x"])] * 2, ["prompt", "prompt"])
    for source in (doubled, doubled.to_pandas()):
        with pytest.raises(DataError, match="the column 'prompt' is there twice"):
            read(source)


def _csv(path: Path, frame: Any) -> Path:
    frame.to_csv(path.with_suffix(".csv"), index=False)
    return path.with_suffix(".csv")


def _of_frame(suffix: str, write: str, **options: Any) -> Any:
    def made(path: Path, frame: Any) -> Path:
        getattr(frame, write)(path.with_suffix(suffix), **options)
        return path.with_suffix(suffix)

    return made


WRITERS = {
    "frame": lambda _, frame: frame,
    "records": lambda _, frame: frame.to_dict("records"),
    "table": lambda _, frame: pyarrow.Table.from_pandas(frame),
    "dataset": lambda _, frame: datasets.Dataset.from_pandas(frame),
    "csv": _of_frame(".csv", "to_csv", index=False),
    "jsonl": _of_frame(".jsonl", "to_json", orient="records", lines=True),
    "json": _of_frame(".json", "to_json", orient="records"),
    "parquet": _of_frame(".parquet", "to_parquet"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_whole_numbers_stay_whole_where_pandas_has_a_missing_value(tmp_path: Path, name: str) -> None:
    columns = {"question": ["a", "b", "c"], "answer": [2, 0, None], "level": [1.5, None, 3], "year": [2.0, 3.0, 4.0]}
    source = WRITERS[name](tmp_path / "d", pandas.DataFrame(columns))
    data = read(source, template="{question} {year}|{level}|{answer}")
    assert [problem.answer for problem in data.train] == ["2", "0", ""]
    texts = [problem.messages[0].content for problem in data.train]
    assert texts == ["a 2.0|1.5|2", "b 3.0||0", "c 4.0|3.0|"]
    assert any("the column 'answer' has whole numbers" in note for note in data.notes)
    if name == "parquet":
        assert [problem.answer for problem in read(source, bounds=UPLOADED).train] == ["2", "0", ""]


def test_numbers_stay_as_a_file_says_where_no_value_is_missing(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": 2.0}, {"prompt": "b", "answer": 3.0}]
    assert [problem.answer for problem in read(jsonl(tmp_path / "d.jsonl", rows)).train] == ["2.0", "3.0"]
    mixed = [{"prompt": "a", "answer": 2.0}, {"prompt": "b", "answer": None}, {"prompt": "c", "answer": 3}]
    assert [problem.answer for problem in read(mixed).train] == ["2.0", "", "3"]
    large = [{"prompt": "a", "answer": 1e300}, {"prompt": "b", "answer": None}]
    assert [problem.answer for problem in read(large).train] == ["1e+300", ""]
    (tmp_path / "d.csv").write_text("prompt,answer\na,2.0\nb,\nc,07.0\nd,1.50\n")
    assert [problem.answer for problem in read(tmp_path / "d.csv").train] == ["2.0", "", "07.0", "1.50"]


@pytest.mark.parametrize("name", [name for name in WRITERS if not name.startswith("json")])  # pandas writes null there
def test_infinite_and_short_numbers_are_what_the_file_says(tmp_path: Path, name: str) -> None:
    columns = {"prompt": ["a", "b", "c"], "answer": [math.inf, -math.inf, 2.0]}
    source = WRITERS[name](tmp_path / "d", pandas.DataFrame(columns))
    for bounds in (None, UPLOADED):
        assert [problem.answer for problem in read(source, bounds=bounds).train] == ["inf", "-inf", "2.0"]
    narrow = pandas.DataFrame({"prompt": ["a", "b"], "answer": np.array([0.1, 3.3], np.float32)})
    if name != "records":  # where pandas has made floats of Python of them
        assert [problem.answer for problem in read(WRITERS[name](tmp_path / "n", narrow)).train] == ["0.1", "3.3"]


def test_infinite_and_short_numbers_of_python_and_json(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": math.inf}, {"prompt": "b", "answer": {"x": [-math.inf, math.nan]}}]
    for source in (rows, jsonl(tmp_path / "d.jsonl", rows)):
        assert [problem.answer for problem in read(source).train] == ["inf", '{"x": ["-inf", null]}']
    odd = [{"prompt": "a", "answer": np.array([0.1, np.inf], np.float32)}, {"prompt": "b", "answer": np.float16(0.1)},
           {"prompt": "c", "answer": decimal.Decimal("-Infinity")}]  # fmt: skip
    assert [problem.answer for problem in read(odd).train] == ['[0.1, "inf"]', "0.1", "-inf"]


def test_a_value_that_python_does_not_have_is_refused(tmp_path: Path) -> None:
    table = pyarrow.table(
        {"prompt": ["a"], "answer": pyarrow.array([29328970], pyarrow.int32()).cast(pyarrow.date32())}
    )
    parquet.write_table(table, tmp_path / "d.parquet")
    given = datasets.Dataset(table)
    for source in (table, given, given.to_iterable_dataset(), tmp_path / "d.parquet"):
        with pytest.raises(DataError, match="has a value that Python cannot represent"):
            read(source)


def test_missing_values_of_pandas_are_nothing() -> None:
    frame = pandas.DataFrame(
        {
            "prompt": ["a", "b"],
            "answer": pandas.array([2, None], "Int64"),
            "at": pandas.to_datetime(["2024-01-02", None]),
            "took": pandas.to_timedelta([1.5, None], unit="s"),
            "kind": pandas.Categorical(["x", None]),
        }
    )
    for source in (frame, frame.to_dict("records"), datasets.Dataset.from_pandas(frame)):
        first, second = read(source).train
        assert first.metadata == {"answer": 2, "at": "2024-01-02T00:00:00", "took": 1.5, "kind": "x"}
        assert second.metadata == {"answer": None, "at": None, "took": None, "kind": None}


def test_a_stream_is_read_as_far_as_it_is_asked_for() -> None:
    def endless() -> Any:
        number = 0
        while True:
            yield {"prompt": f"{number}", "answer": number}
            number += 1

    stream = datasets.IterableDataset.from_generator(endless)
    drawn = [int(problem.answer) for problem in read(stream, size=3).train]
    assert drawn == sorted(drawn)
    assert 3 < drawn[-1] < 10_000
    with pytest.raises(DataError, match="has more than 5 rows"):
        read(stream, bounds=RowLimits(rows=5))
