"""The typed channel between a process and its child: what survives the way, and what happens when either is gone."""

from __future__ import annotations

import asyncio
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet.core.errors import EngineError
from motet.core.types import FloatArray, IntArray
from motet.process.channel import LONGEST_LINE, ChannelMessage, Child, decode, encode

pytestmark = pytest.mark.tier1

ECHO = """
import asyncio, os, sys
from motet.process.channel import Parent
from tests.process.test_channel import Half, Kinds, Text

async def serve():
    parent = Parent(Kinds)
    parent.send(parent.first())
    print("not a message")
    messages = parent.queue()
    while (message := await messages.get()) is not None:
        if isinstance(message, Half):
            os.write(parent._out.fileno(), b'{"type":"Text","te')
            os._exit(1)
        parent.send(message)
    parent.send(Text("the input has ended"))

asyncio.run(serve())
"""


class Text(ChannelMessage, frozen=True):
    """Some text."""

    text: str


class Values(ChannelMessage, frozen=True):
    """What JSON holds, and what it does not."""

    values: dict[str, Any]


class Arrays(ChannelMessage, frozen=True):
    """Many numbers."""

    ids: IntArray
    scores: FloatArray


class Half(ChannelMessage, frozen=True):
    """Asks for half a message, and the end."""


Kinds = Text | Values | Arrays | Half


def test_values_survive_the_way() -> None:
    values = {"huge": 2**80, "odd": "a\ud800\u2028", "exact": 0.1 + 0.2, "below": [{"none": None}], "least": -math.inf}
    assert decode(encode(Values(values)), Kinds) == Values(values)
    nan = decode(encode(Values({"nan": math.nan})), Kinds)
    assert math.isnan(nan.values["nan"])


def test_arrays_survive_the_way_and_take_six_bytes_a_number() -> None:
    floats = np.random.default_rng(5).standard_normal((1000, 3)).astype(np.float32)
    floats[0] = math.nan, -math.inf, -0.0
    for ids, scores in ((np.arange(1000, 4000, dtype=np.int32), floats), (np.empty(0, np.int32), floats[:0])):
        line = encode(Arrays(ids, scores))
        found = decode(line, Kinds)
        assert (found.ids.dtype, found.ids.tolist()) == (np.int32, ids.tolist())
        assert (found.scores.dtype, found.scores.shape) == (np.float32, scores.shape)
        assert found.scores.tobytes() == scores.tobytes()
        assert found.scores.flags.writeable
        assert len(line) <= 200 + 6 * (scores.size + ids.size)


@pytest.mark.parametrize("line", [b"{}", b'{"type":"Other"}', b'{"type":"Text","text":7}', b"[]", b'{"type":"Te'])
def test_nonsense_is_no_message(line: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 -- of json or of msgspec
        decode(line, Kinds)


def test_what_no_reader_takes_is_not_sent() -> None:
    with pytest.raises(EngineError, match="64 MB"):
        encode(Text("x" * LONGEST_LINE))


def test_a_child_answers_until_its_input_ends_or_it_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo_child.py").write_text(ECHO)
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", paths)

    async def talk(last: ChannelMessage | None) -> list[Any]:
        child: Child[Any] = await Child.start("echo_child", Kinds, tmp_path / "log")
        child.send(Text("first"))
        answers = []
        async for message in child.messages():
            answers.append(message)
            if len(answers) == 1:
                child.send(Values({"a": 1}))
                child.close_input() if last is None else child.send(last)
        await child.kill()
        child.send(Text("to nobody"))
        return answers

    begun = [Text("first"), Values({"a": 1})]
    assert asyncio.run(talk(None)) == [*begun, Text("the input has ended")]
    assert asyncio.run(talk(Half())) == begun
    assert "not a message" in (tmp_path / "log").read_text()
