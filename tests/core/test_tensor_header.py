"""What describes the tensors of an adapter from elsewhere is bounded."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from motet.core.errors import AdapterError, DataError
from motet.core.safetensors_header import MOST_HEADER, MOST_TENSORS, check_header, count_tensors
from motet.core.types import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from motet.service.adapters.archive import unpack_isolated
from tests.support.adapter_files import tarred

pytestmark = pytest.mark.tier1

ONE = {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}


def file_of(header: Any, data: bytes = bytes(8)) -> bytes:
    """A safetensors file with this header, also as text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def empty(n: int, **fields: Any) -> bytes:
    """A file of many tensors without a number, as small as it can be."""
    entry = json.dumps({"dtype": "F32", "shape": [0], "data_offsets": [0, 0], **fields})
    return file_of(("{" + ",".join(f'"{number:x}":{entry}' for number in range(n)) + "}").encode(), b"")


BAD: dict[str, Callable[[], bytes]] = {
    "no file of tensors": lambda: b"hello",
    "nothing": lambda: b"",
    "a header longer than the file": lambda: (2**20).to_bytes(8, "little") + b"{}",
    "a header that is too long": lambda: (MOST_HEADER + 1).to_bytes(8, "little") + b"{" + b" " * MOST_HEADER,
    "a header of the largest length": lambda: (2**64 - 1).to_bytes(8, "little") + b"{",
    "one empty tensor": lambda: empty(1),
    "many empty tensors": lambda: empty(30_000),
    "more tensors than an adapter has": lambda: empty(MOST_TENSORS + 1),
    "many values": lambda: file_of(b'{"a": [' + b"1," * (20 * MOST_TENSORS) + b"1]}"),
    "no JSON": lambda: file_of(b"{x}"),
    "JSON that is nested deep": lambda: file_of(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a list": lambda: file_of([ONE]),
    "another type": lambda: file_of({"a": {**ONE, "dtype": "I64", "shape": [1]}}),
    "an unknown type": lambda: file_of({"a": {**ONE, "dtype": "X" * 10**6}}),
    "no dimensions": lambda: file_of({"a": {**ONE, "shape": []}}, bytes(8)),
    "many dimensions": lambda: file_of({"a": {**ONE, "shape": [1] * 100_000}}),
    "a negative dimension": lambda: file_of({"a": {**ONE, "shape": [-1, -2]}}),
    "a large dimension": lambda: file_of({"a": {**ONE, "shape": [2**62, 2**62]}}),
    "a dimension that is no number": lambda: file_of({"a": {**ONE, "shape": [True, 2]}}),
    "a long name": lambda: file_of({"a" * 501: ONE}),
    "overlaps": lambda: file_of({"a": ONE, "b": ONE}),
    "a hole": lambda: file_of({"a": {**ONE, "data_offsets": [8, 16]}}, bytes(16)),
    "more than it names": lambda: file_of({"a": ONE}, bytes(9)),
    "less than it names": lambda: file_of({"a": ONE}, bytes(7)),
    "no offsets": lambda: file_of({"a": {"dtype": "F32", "shape": [1, 2]}}),
    "offsets backwards": lambda: file_of({"a": {**ONE, "data_offsets": [8, 0]}}),
}

COUNTED = {
    "a header that is too long": "at most",
    "more tensors than an adapter has": "names more than",
    "many values": "names more than",
}
"""What is refused by a count of its bytes, before it is parsed."""
assert COUNTED.keys() <= BAD.keys()


@pytest.mark.parametrize("what", BAD)
def test_a_file_of_tensors_that_is_no_adapters_is_refused(tmp_path: Path, what: str) -> None:
    (tmp_path / "file").write_bytes(BAD[what]())
    before = time.thread_time()
    with pytest.raises(AdapterError) as refused:
        check_header(tmp_path / "file")
    assert time.thread_time() - before < 5
    assert COUNTED.get(what, "") in str(refused.value)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_an_adapters_file_is_taken(tmp_path: Path, dtype: Any) -> None:
    tensors = {f"layer.{number}.lora_A.weight": np.ones((2, 3), dtype) for number in range(9)}
    save_file(tensors, tmp_path / "file", {"format": "pt"})
    check_header(tmp_path / "file")
    assert count_tensors(tmp_path / "file") == 9


def test_the_tensors_of_a_file_are_counted_without_parsing_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(empty(400_000))
    before = time.thread_time()
    assert count_tensors(tmp_path / "file") == 400_000
    assert time.thread_time() - before < 0.5  # of the reader's processor, where parsing takes seconds


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({ADAPTER_CONFIG: b"{}", ADAPTER_WEIGHTS: empty(1)}, "no matrix of an adapter"),
        ({ADAPTER_CONFIG: b"{}", ADAPTER_WEIGHTS: empty(200_000)}, "more than 131072 tensors"),
        ({ADAPTER_CONFIG: b"[]", ADAPTER_WEIGHTS: file_of({"a": ONE})}, "not a JSON object"),
        ({ADAPTER_CONFIG: b"[" * 10**6, ADAPTER_WEIGHTS: file_of({"a": ONE})}, "values"),
        ({ADAPTER_CONFIG: b"[" * 19_000, ADAPTER_WEIGHTS: file_of({"a": ONE})}, "not JSON"),
    ],
    ids=["empty", "many", "list", "values", "deep"],
)  # fmt: skip
def test_what_is_wrong_with_an_archive_is_told_without_the_servers_paths(
    tmp_path: Path, files: dict[str, bytes], words: str
) -> None:
    (tmp_path / "archive").write_bytes(tarred(files))
    (tmp_path / "inside").mkdir()
    with pytest.raises(DataError, match=words) as refused:
        unpack_isolated(tmp_path / "archive", tmp_path / "inside", 2**26)
    assert str(tmp_path) not in str(refused.value)
