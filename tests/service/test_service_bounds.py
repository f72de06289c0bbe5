"""What a stranger sends is bounded before it takes memory or time: files of rows, bodies, jobs, graders, templates."""

from __future__ import annotations

import asyncio
import datetime
import gc
import inspect
import json
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pyarrow
import pyarrow.parquet
import pytest
import sqlalchemy
import transformers

from motet.chat.template_variables import TEMPLATE_PARAMETERS
from motet.config import DataConfig
from motet.core.errors import ChatRefusal, DataError
from motet.core.plain_json import as_json
from motet.core.types import Message, Problem
from motet.data.dataset import load_dataset
from motet.data.reasoning import ScorerSpec, make_entries
from motet.data.row_files import OF_A_JOB, UPLOADED, RowLimits, count_rows, rows_of
from motet.rewards.graders.shapes import parse
from motet.rewards.judging import _OF_ONE_OWNER
from motet.rewards.reward_answers import NO_CONTEXT, AnswerContext, ScoreOutcome
from motet.rewards.reward_pool import RewardPool
from motet.service.adapters.adapters import Adapters
from motet.service.answers import Asks
from motet.service.database.tenants import Principal
from motet.service.http.bodies import MOST, MOST_OF_NOBODY
from motet.service.rewards import Grading
from tests.support.house import House, error_of, open_house
from tests.support.service_run import ROWS, Json, tiny
from tests.support.waiting import PATIENCE

MANY = 1_000_000


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One for the whole file."""
    with open_house(tmp_path_factory.mktemp("house")) as found:
        yield found


# --- files of rows ----------------------------------------------------------------------------------------------------------


def repeated(path: Path, text: str, rows: int, **options: Any) -> Path:
    """A file whose dictionary has the text once."""
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), pyarrow.array([text]))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column}), path, compression="zstd", **options)
    return path


def test_rows_are_the_same_within_bounds_and_without(tmp_path: Path) -> None:
    texts = pyarrow.map_(pyarrow.string(), pyarrow.string())
    table = pyarrow.table(
        {
            "prompt": ["a", None, "é"],
            "messages": [[{"role": "user", "content": "x"}], [], None],
            "map": pyarrow.array([[("a", "b")], [], None], texts),
            "deep": [[["q"]], [[None]], []],
            "bytes": [b"x", None, b"y"],
            "number": [1.5, None, 2.0],
            "time": [datetime.datetime(2020, 1, 1)] * 3,
            "coded": pyarrow.array(["c", "c", "d"]).dictionary_encode(),
        }
    )
    path = tmp_path / "rows.parquet"
    config = DataConfig(source=str(path), prompt="prompt", holdout=0, size=1)
    for options in ({}, {"use_dictionary": False}, {"row_group_size": 1}):
        pyarrow.parquet.write_table(table, path, **options)
        assert list(rows_of(path, UPLOADED)) == [as_json(row) for row in rows_of(path)]
        plain: Any = ({"map": {"a": "b"}, "bytes": "x"}, {"map": {}, "bytes": None}, {"map": None, "bytes": "y"})
        assert list(rows_of(path)) == [{**row, **own} for row, own in zip(table.to_pylist(), plain, strict=True)]
        assert load_dataset(config, UPLOADED) == load_dataset(config)


def test_a_process_that_cannot_even_begin_to_read_is_told_with_its_last_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = repeated(tmp_path / "rows.parquet", "x", 1)
    with pytest.raises(DataError, match=r"is: ImportError:.*failed to map segment"):
        count_rows(path, RowLimits(memory_mb=16))  # less than Arrow's library takes
    assert "Traceback" in caplog.text


def test_a_small_file_that_stands_for_very_much_is_refused(tmp_path: Path) -> None:
    path = repeated(tmp_path / "rows.parquet", "x" * 900_000, MANY)
    assert path.stat().st_size < 10_000
    with pytest.raises(DataError, match="more than 100 MB"):
        count_rows(path, RowLimits(bytes=100 * 2**20))
    with pytest.raises(DataError, match=r"cannot be read: it.*0\.2 s by the clock"):
        count_rows(path, RowLimits(seconds=0.01))
    small = RowLimits(memory_mb=400)
    assert count_rows(repeated(path, "x" * 900, 1000), small) == 1000
    with pytest.raises(DataError, match="cannot be read"):
        count_rows(repeated(path, "x" * 900_000, 1000), small)
    bounds = RowLimits(rows=100, row_bytes=1000, bytes=20_000, values=500)
    for text, rows, words in (
        ("x", 101, "more than 100 rows"),
        ("x" * 1001, 1, "row 1 has more than"),
        ("x" * 900, 100, "more than"),
    ):
        with pytest.raises(DataError, match=words):
            count_rows(repeated(path, text, rows), bounds)
    wide = pyarrow.table({"prompt": [[0] * 30] * 20})
    pyarrow.parquet.write_table(wide, path)
    with pytest.raises(DataError, match="more than 500 values"):
        count_rows(path, bounds)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", '{"p": "x"}\n' * 101, "more than 100 rows"),
        ("a.jsonl", '{"p": "x"}\n{"p": "' + "x" * 1000 + '"}\n', "line 2 has more than"),
        ("a.jsonl", '{"p": [' + "[]," * 300 + "[]]}\n", "more than 500 values"),
        ("a.jsonl", ('{"p": "x", "q": [' + "0," * 100 + "0]}\n") * 6, "more than 500 values"),
        ("a.json", json.dumps([{"p": "x"}] * 101), "more than 100 rows"),
        ("a.json", json.dumps([{"p": "x" * 1000}]), "row 1 has more than"),
        ("a.json", json.dumps([{"p": [0] * 600}]), "more than 500 values"),
        ("a.json", "[]", "no rows"),
        ("a.csv", "p\n" + "x\n" * 101, "more than 100 rows"),
        ("a.csv", "p\nx\n" + "x" * 1000 + "\n", "line 3 has more than"),
        ("a.csv", 'p\nx\n"' + "xxxxx\n" * 200 + '"\n', "row 2 has more than"),
        ("a.csv", "p,a,b,c,d,e\n" + "x,a,b,c,d,e\n" * 90, "more than 500 values"),
    ],
)
def test_rows_of_json_are_bounded(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    bounds = RowLimits(rows=100, row_bytes=1000, values=500)
    with pytest.raises(DataError, match=words):
        count_rows(path, bounds)
    if text != "[]":
        assert list(rows_of(path))  # one's own data has no such bounds
        with pytest.raises(DataError, match=words):
            load_dataset(DataConfig(source=str(path), prompt="p", holdout=0), bounds)


def test_a_row_of_an_uploaded_file_has_so_many_values(tmp_path: Path) -> None:
    """A job that has begun on an older file goes on."""
    most = UPLOADED.row_values
    for name in ("a.jsonl", "a.json", "a.parquet", "a.csv"):
        for more in (-3, 3):
            path, numbers = tmp_path / name, [7] * (most + more)
            if name == "a.csv":
                path.write_text("".join(",".join(map(str, line)) + "\n" for line in (range(len(numbers)), numbers)))
            elif name == "a.parquet":
                pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"], "numbers": [numbers]}), path)
            else:
                row = json.dumps({"prompt": "a, [b], {c}" * 100, "numbers": numbers})
                path.write_text(f"[{row}]" if name == "a.json" else f"{row}\n")
            if more < 0:
                assert count_rows(path, UPLOADED) == 1
                continue
            with pytest.raises(DataError, match=f"{most}.* the limit here; leave columns out"):
                count_rows(path, UPLOADED)
            assert count_rows(path, OF_A_JOB) == 1


def test_a_file_that_cannot_become_rows_is_a_400_and_leaves_nothing(house: House, tmp_path: Path) -> None:
    far = pyarrow.table({"prompt": ["a"], "when": pyarrow.array([2**61], pyarrow.timestamp("us"))})
    broken = pyarrow.StringArray.from_buffers(
        1, pyarrow.array([0, 2], pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"\xff\xfe")
    )
    folder = house.storage.directory / "files"
    before = sorted(folder.iterdir())
    for table in (far, pyarrow.table({"prompt": broken})):
        pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
        data = (tmp_path / "rows.parquet").read_bytes()
        error = house.refused(400, "POST", "/v1/files", files={"file": ("rows.parquet", data)})
        assert "has a value that Python cannot represent" in error["message"]
        assert sorted(folder.iterdir()) == before


def test_a_file_that_cannot_be_listed_leaves_nothing(tmp_path: Path) -> None:
    with open_house(tmp_path) as house:
        folder = tmp_path / "files"
        before = sorted(folder.iterdir())
        with house.store.transaction() as session:
            session.execute(sqlalchemy.text("DROP TABLE files"))
        house.refused(503, "POST", "/v1/files", files={"file": ("rows.jsonl", ROWS)})
        assert sorted(folder.iterdir()) == before


def test_rows_that_are_nested_too_deep_are_an_error_of_the_data(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "deep": ' + "[" * 950 + "]" * 950 + "}\n")
    with pytest.raises(DataError, match=r"nested too deep|not valid JSON"):
        load_dataset(DataConfig(source=str(path), holdout=0))


@pytest.mark.parametrize("path", ["/v1/files", "/v1/adapters"])
@pytest.mark.parametrize(
    "form",
    [
        {"files": [("file", ("a.jsonl", ROWS)), ("more", ("b.jsonl", ROWS))]},
        {"files": {"file": ("a.jsonl", ROWS)}, "data": {f"field{number}": "x" for number in range(20)}},
        {"files": {"file": ("a.jsonl", ROWS)}, "data": {"purpose": "x" * 10_000}},
        {"data": {"purpose": "x" * 10_000}},
    ],
)
def test_the_form_of_an_upload_has_one_file_and_little_else(house: House, path: str, form: Json) -> None:
    # each file takes a megabyte of memory, and only one is counted
    words = house.refused(400, "POST", path, **form)["message"]
    assert any(told in words for told in ("Too many", "exceeded maximum size", "multipart/form-data")), words


# --- bodies -----------------------------------------------------------------------------------------------------------------


def sent(house: House, head: str, *pieces: bytes, path: str = "/v1/chat/completions") -> bytes:
    """What is answered to a request that is never finished."""
    with socket.create_connection((house.http.base_url.host, house.http.base_url.port or 80), timeout=PATIENCE) as line:
        line.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{head}\r\n".encode())
        for piece in pieces:
            line.sendall(piece)
        return line.recv(65536)


def test_nothing_large_of_a_stranger_is_read(house: House) -> None:
    for key in ("wrong", "none", "revoked"):
        told = f"Authorization: Bearer {house.keys[key]}\r\n" if house.keys[key] else ""
        assert b" 401 " in sent(house, f"{told}Content-Length: {MOST_OF_NOBODY + 1}\r\n", b"[")
        assert b" 401 " in sent(
            house, f"{told}Content-Length: {MOST_OF_NOBODY + 1}\r\n", b"[", path="/v1/login/device/key"
        )
        assert b" 401 " in sent(house, f"{told}Transfer-Encoding: chunked\r\n", b"1\r\n[\r\n")
        large = json.dumps({"model": "x" * MOST_OF_NOBODY})
        assert error_of(
            house.http.post("/v1/jobs", content=large, headers={"Authorization": f"Bearer {house.keys[key]}x"})
        )
    house.refused(422, "POST", "/v1/jobs", content=b" " * (MOST_OF_NOBODY + 1))
    house.refused(413, "POST", "/v1/jobs", content=b" " * (MOST + 1))
    house.refused(400, "POST", "/v1/chat/completions", content=b" " * (MOST + 1))  # a long prompt is of use there


def test_mistakes_are_found_until_the_first(house: House) -> None:
    """Each mistake is an object with what was given in it."""
    from pydantic import ValidationError

    from motet.service.routes.completions import ChatCompletion, CompletionRequest, Messages, Responses
    from motet.service.schemas.workers import Results

    for model, body in (
        (Results, {"results": [{"id": "a", "scores": [{}] * 1000}] * 10}),
        (ChatCompletion, {"model": "a", "messages": [{"role": "user", "content": [1] * 1000}] * 10}),
        (ChatCompletion, {"model": "a", "messages": [{"role": "user", "tool_calls": [{}] * 1000}] * 10}),
        (ChatCompletion, {"model": "a", "messages": [{"role": "user"}], "tools": [1] * 1000}),
        (Responses, {"model": "a", "input": [1] * 1000}),
        (Messages, {"model": "a", "max_tokens": 1, "messages": [{"role": "user", "content": [1] * 1000}] * 10}),
        (CompletionRequest, {"model": "a", "prompt": [{}] * 1000}),
        (CompletionRequest, {"model": "a", "prompt": [["x"] * 1000] * 10}),
    ):
        with pytest.raises(ValidationError) as wrong:
            model.model_validate(body)
        assert wrong.value.error_count() <= 5


# --- jobs -------------------------------------------------------------------------------------------------------------------


def test_a_template_has_its_own_variables(house: House) -> None:
    kwargs = {"enable_thinking": False, "effort": "low", "budget": 100, "none": None}
    job = {**tiny("thinks"), "data": {"source": "toy:add", "chat_template_kwargs": kwargs}}
    answer = house.ask("POST", "/v1/jobs", json=job)
    assert answer.status_code == 201, answer.text
    taken = inspect.signature(transformers.PreTrainedTokenizerBase.apply_chat_template).parameters
    assert set(taken) - {"kwargs"} <= TEMPLATE_PARAMETERS


def test_prompts_that_a_template_makes_are_bounded_together(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n' * 100)
    config = DataConfig(source=str(path), template="x" * 999 + "{prompt}", holdout=0)
    assert len(load_dataset(config).train) == 100
    assert len(load_dataset(config, RowLimits(bytes=100_000)).train) == 100
    with pytest.raises(DataError, match=r"data\.template makes prompts"):
        load_dataset(config, RowLimits(bytes=99_999))


def test_rows_are_no_objects_until_they_are_needed(tmp_path: Path) -> None:
    path, rows = tmp_path / "rows.jsonl", 30_000
    path.write_text("".join(f'{{"prompt": "{row} é", "answer": "{row}", "also": [{row}]}}\n' for row in range(rows)))
    config = DataConfig(source=str(path), holdout=3)
    gc.collect()
    before = len(gc.get_objects())
    data = load_dataset(config, OF_A_JOB)
    gc.collect()
    assert len(gc.get_objects()) - before < 1000
    assert len(data.train) == rows - 3
    for problem in (*data.train[:5], data.train[-1], *data.holdout):
        number = str(problem.id)
        expected = Problem(
            problem.id, (Message("user", f"{number} é"),), number, {"answer": number, "also": [problem.id]}
        )
        assert problem == expected
    assert data.train[100:200:3].only([1])[0] == data.train[103]
    few = replace(OF_A_JOB, rows=rows - 1)
    with pytest.raises(DataError, match=r"more than 29999 rows.* set data\.size"):
        load_dataset(config, few)
    assert len(load_dataset(config.model_copy(update={"size": rows - 1}), few).train) == rows - 4


def test_generated_rows_take_bounded_time_and_memory() -> None:
    pytest.importorskip("reasoning_gym")
    spec = ScorerSpec("chain_sum", {}, 3, 1)
    assert make_entries(spec, UPLOADED) == make_entries(spec)
    with pytest.raises(DataError, match=r"more than 0\.01 s by.*lower data\.size"):
        make_entries(spec, RowLimits(seconds=0.01))
    small = RowLimits(seconds=900, memory_mb=250)
    assert make_entries(spec, small) == make_entries(spec)
    with pytest.raises(DataError, match=r"more than 250 MB of memory"):
        make_entries(ScorerSpec("chain_sum", {}, 10**6, 1), small)


# --- graders ----------------------------------------------------------------------------------------------------------------


class Busy(RewardPool):
    """Scores when it may."""

    may: asyncio.Event

    def __init__(self) -> None:
        super().__init__(1)
        self.open, self.owners = Counter[str](), dict[str, str]()

    async def register(self, job: str, *known: Any, **named: Any) -> None:
        """Remember who pays."""
        self.owners[job] = named["payer"]
        await super().register(job, *known, **named)

    async def score(
        self, job: str, problem: Problem, completions: Sequence[str], context: AnswerContext = NO_CONTEXT
    ) -> list[ScoreOutcome]:
        """Wait, then score."""
        owner = self.owners[job]
        self.open[owner] += 1
        await self.may.wait()
        try:
            return await super().score(job, problem, completions, context)
        finally:
            self.open[owner] -= 1


def test_graders_of_many_have_one_process_and_one_owner_has_few_rows_in_work(house: House) -> None:
    grading: Any = Grading(house.part(Asks), house.part(Adapters))
    grading._pool = pool = Busy()

    async def one(number: int) -> Any:
        spec = {"type": "string_check", "name": "c", "input": "a", "reference": f"{number}", "operation": "eq"}
        (found,) = await grading.grade(Principal.member_of(f"{number % 3}"), parse(spec), {}, ["a"])
        return found

    async def all_of_them() -> None:
        pool.may = asyncio.Event()
        before = set(psutil.Process().children())
        try:
            asked = [asyncio.create_task(one(number)) for number in range(8 * 3)]
            while pool.open.total() < _OF_ONE_OWNER * 3:
                await asyncio.sleep(0.01)
            await asyncio.sleep(1)  # enough for others to begin
            assert set(pool.open.values()) == {_OF_ONE_OWNER}
            pool.may.set()
            found = await asyncio.gather(*asked)
            started = [child.cmdline() for child in set(psutil.Process().children()) - before]
            assert sum("motet.workers.worker" in command for command in started) == 1
        finally:
            await grading.close()
        assert [(each.reward, each.faults) for each in found] == [(0.0, {})] * len(found)

    asyncio.run(all_of_them())


def test_a_conversation_of_messages_has_few_blocks() -> None:
    """Each result of a tool is a message for the template: the bound on messages is theirs, too."""
    from motet.service.routes.completions import Messages

    for block in (
        {"type": "tool_result"},
        {"type": "tool_use", "name": "f", "input": {}},
        {"type": "text", "text": ""},
    ):
        said = [{"role": "user", "content": [block] * 4097}, {"role": "user", "content": "x"}]
        few = Messages.model_validate({"model": "a", "max_tokens": 1, "messages": said})
        assert len(few.conversation().messages) <= 4098
        many = Messages.model_validate({"model": "a", "max_tokens": 1, "messages": [*said, *said]})
        with pytest.raises(ChatRefusal, match="8194 blocks; the limit is 8192"):
            many.conversation()
