"""A job's problems, stored as bytes and decoded on access, because objects of a large file take gigabytes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import mmap
import tempfile
import weakref
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from motet.core.types import IntArray, Message, Problem, ToolCall
from motet.process import pace

Result = TypeVar("Result")
_IN_MEMORY = 2**22
"""Largest data kept in memory, in bytes; larger data is in an unlinked file, which disappears with the process."""


class Problems(Sequence[Problem]):
    """Problems in the order of their rows."""

    def __init__(self, text: bytes | mmap.mmap, places: IntArray, prompts: IntArray) -> None:
        """See `of`; `places` are the first and last bytes of each, [N, 2], and `prompts` hashes of their messages, [N]."""
        self._text, self._places, self._prompts = text, places, prompts

    @classmethod
    def of(cls, problems: Iterable[Problem]) -> Problems:
        """Store problems; only one at a time exists as an object."""
        ends, prompts = array("q", [0]), array("q")
        with tempfile.SpooledTemporaryFile(_IN_MEMORY) as file:
            for problem in problems:
                pace.step(file.write(_line(problem)))
                ends.append(file.tell())
                prompts.append(hash(problem.messages))
            if ends[-1] > _IN_MEMORY:
                file.flush()
                text: bytes | mmap.mmap = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            else:
                file.seek(0)
                text = file.read()
        bounds = np.array(ends)
        return cls(text, np.stack([bounds[:-1], bounds[1:]], axis=1), np.array(prompts))

    def only(self, rows: Iterable[int]) -> Problems:
        """The problems at these places."""
        chosen = np.fromiter(rows, np.int64)
        return Problems(self._text, self._places[chosen], self._prompts[chosen])

    def without(self, others: Sequence[Problem]) -> Problems:
        """The problems without those whose prompts also occur in `others`."""
        prompts = {problem.messages for problem in others}
        like = np.isin(self._prompts, [hash(prompt) for prompt in prompts])
        return self.only(row for row in range(len(self)) if not like[row] or self[row].messages not in prompts)

    def prompts_in(self, hashes: Collection[int]) -> set[int]:
        """Those of these hashes of messages that are among the problems'."""
        return set(np.intersect1d(self._prompts, np.fromiter(hashes, np.int64)).tolist())

    def sum(self) -> str:
        """sha256 of all of them, in order."""
        digest = hashlib.sha256()
        for first, last in self._places:
            digest.update(self._text[first:last])
        return digest.hexdigest()

    @property
    def sizes(self) -> NDArray[np.integer]:
        """Bytes of each problem, [N]."""
        return self._places[:, 1] - self._places[:, 0]

    @property
    def size(self) -> int:
        """Bytes of the data that these are a part of."""
        return len(self._text)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Problem]:
        return map(self._problem, range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> Problems: ...
    def __getitem__(self, index: int | slice) -> Problem | Problems:
        rows = range(len(self))[index]
        return self.only(rows) if isinstance(rows, range) else self._problem(rows)

    def __eq__(self, other: object) -> bool:
        """Whether they are the same problems in the same order."""
        return isinstance(other, Problems) and len(self) == len(other) and all(map(Problem.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def _problem(self, row: int) -> Problem:
        pace.step()
        first, last = self._places[row]
        number, messages, answer, metadata, conversational, continuation = json.loads(self._text[first:last])
        return Problem(number, _read(messages), answer, metadata, conversational, _read(continuation))


class RowTurns:
    """Reads and writes rows in threads, so that the event loop turns: one after the other of each tenant, or of each job."""

    def __init__(self) -> None:
        self._turns = weakref.WeakValueDictionary[str, asyncio.Lock]()

    async def run(self, whose: str, work: Callable[[], Result]) -> Result:
        """The result of some work on rows."""
        async with self._turns.setdefault(whose, asyncio.Lock()):
            return await asyncio.to_thread(work)


def _line(problem: Problem) -> bytes:
    parts = [problem.answer, problem.metadata, problem.conversational, _written(problem.continuation)]
    return json.dumps([problem.id, _written(problem.messages), *parts]).encode()


def _written(messages: Sequence[Message]) -> list[list[Any]]:
    """What a message has, in the order of its fields; the last ones only if it has them, so that earlier sums stay."""
    calls = ([[call.name, call.arguments] for call in message.tool_calls] for message in messages)
    return [
        [message.role, message.content, made, message.name, message.learned, *_rest(message)]
        for message, made in zip(messages, calls, strict=True)
    ]


def _rest(message: Message) -> list[Any]:
    return [message.thought, message.special] if message.special else [message.thought] * bool(message.thought)


def _read(messages: Sequence[Sequence[Any]]) -> tuple[Message, ...]:
    return tuple(
        Message(role, content, tuple(ToolCall(*call) for call in calls), *rest)
        for role, content, calls, *rest in messages
    )
