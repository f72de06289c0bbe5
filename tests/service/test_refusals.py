"""Each request of `tests/refusals.toml` is refused with its status and a sentence that names the field, and nothing is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.house import House, error_of
from tests.support.openai_requests import GRADER, JUDGE, WORDS, method, rows
from tests.support.service_run import tiny
from tests.support.tables import Reader, read, table, written

pytestmark = pytest.mark.tier1

HI = [{"role": "user", "content": "hi"}]
CHATS: dict[str, Any] = {
    "chat/completions": {"messages": HI},
    "responses": {"input": "hi"},
    "messages": {"messages": HI, "max_tokens": 9},
}


GRADERS: dict[str, Callable[[Any, Any], Any]] = {
    "!grader": lambda loader, node: method({**GRADER, **loader.construct_mapping(node)}),
    "!judge": lambda loader, node: method({**JUDGE, **loader.construct_mapping(node)}),
    "!hyper": lambda loader, node: method(**loader.construct_mapping(node)),
}
for tag, make in GRADERS.items():
    Reader.add_constructor(tag, make)


@pytest.fixture(scope="module")
def training_file(house: House) -> str:
    """The id of rows that a job of the fine-tuning routes can learn from."""
    return str(house.ask("POST", "/v1/files", files={"file": ("train.jsonl", rows(*WORDS))}).json()["id"])


def request(kind: str, cells: list[str], house: House, training_file: str) -> tuple[str, str, str, dict[str, Any]]:
    """Give key, method, path and what is sent."""
    key, http_method, path = "ours", "POST", f"/v1/{kind}"
    if kind == "any":
        *keys, http_method, path = cells[0].split(" ")
        key = (keys or [key])[0]
    if kind == "check":
        given: Any = {"text": written(cells[0])}
    else:
        given = read(cells[-1])
    if kind == "files":
        return key, http_method, path, {"files": {"file": (given[0], given[1].encode())}}
    if kind == "fine_tuning/jobs":
        given = {"model": "small", "training_file": training_file, "method": method(), **given}
    elif kind == "jobs":
        given = {**tiny("odd"), **given}
    elif kind in CHATS:
        given = {"model": "small", **CHATS[kind], **given}
    sent = {} if given is None else {"content": json.dumps(given), "headers": {"Content-Type": "application/json"}}
    return key, http_method, path.replace("FILE", training_file), sent


ROWS = [(kind, *row) for kind, found in table("refusals").items() for row in found]
ROWS = [(path, *row) for kind, *row in ROWS for path in (CHATS if kind == "chat" else [kind])]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1][:60]}")
def test_request_is_refused_with_status_field_and_words(house: House, training_file: str, row: list[Any]) -> None:
    kind, *cells, status, field, words = row
    key, http_method, path, sent = request(kind, cells, house, training_file)
    folder = house.storage.directory / "files"
    before = house.store.counts(), sorted(folder.iterdir())
    answer = house.ask(http_method, path, key, **sent)
    error = error_of(answer)
    assert answer.status_code == status, error
    assert (error["param"] or "").startswith(field) or field in error["message"], error
    assert [word for word in words.split() if word not in error["message"]] == [], error
    assert len(answer.content) < 11_000, "of what was given, only the beginning is quoted"
    assert str(house.storage.directory) not in error["message"]
    assert (house.store.counts(), sorted(folder.iterdir())) == before
