"""Data that several jobs share: it is read once, and worded once for a base."""

from __future__ import annotations

from dataclasses import dataclass, replace

from motet.chat.conversation import rendered_already
from motet.chat.template import Chat
from motet.config import OF_CLIENT, DataConfig
from motet.core.errors import DataError
from motet.core.model_info import ModelInfo
from motet.core.types import Problem
from motet.data.dataset import Dataset, Longer, Source, read_source, split
from motet.data.problems import Problems
from motet.data.read_back import read_back
from motet.data.row_files import RowLimits
from motet.data.rows import check_rows, longest_row


class Sources:
    """Data that was read, by its section: jobs with the same section share it, and its mistakes."""

    def __init__(self, bounds: RowLimits | None = None) -> None:
        """`bounds` are those of somebody else's data."""
        self._bounds = bounds
        self._read: dict[str, Source | DataError] = {}
        self._whole: dict[str, Dataset] = {}
        self._learned = set[str]()

    def split(self, config: DataConfig, longer: Longer | None = None) -> Dataset:
        """The data of a section; without `longer`, with long prompts too. Raises DataError if it cannot be used."""
        key = key_of(config)
        if longer is not None and config.max_prompt_tokens is not None:
            return split(config, self._source(config), longer)
        if key not in self._whole:
            self._whole[key] = split(config, self._source(config))
        return self._whole[key]

    def check_rows(self, config: DataConfig, kind: str) -> None:
        """Look at the rows of a section that are learned from; see `data.rows.check_rows`."""
        data, key = self.split(config), f"{kind} {key_of(config)}"
        if key not in self._learned:
            for part in (data.train, data.holdout):
                check_rows(part, kind, config.source)
            self._learned.add(key)

    def _source(self, config: DataConfig) -> Source:
        if (key := key_of(config)) not in self._read:
            try:
                self._read[key] = read_source(config, self._bounds)
            except DataError as error:
                self._read[key] = error
        if isinstance(known := self._read[key], DataError):
            raise known
        return known


def key_of(config: DataConfig) -> str:
    """The same for data sections that mean the same rows."""
    return f"{config.model_dump_json()} {id(config.rows)}"


@dataclass(frozen=True)
class ReadData:
    """A job's data and how it is worded; jobs with the same data section share one."""

    data: Dataset
    chat: Chat
    longest: tuple[int, Problem] | None
    """None where a client brings the data."""
    trained: int = 0
    """Tokens of the longest that is not held out."""
    row: int = 0
    """Most tokens of a row in all its examples; 0 where rows are prompts."""

    @classmethod
    def of(cls, config: DataConfig, info: ModelInfo, sources: Sources, clock: str, kind: str | None) -> ReadData:
        """`kind` says what rows are read for, where rows are learned."""
        chat = Chat.of(info.tokenizer, config, clock)
        if config.source == OF_CLIENT:
            return cls(Dataset(Problems.of(()), Problems.of(()), None), chat, None)
        data = sources.split(config, chat.longer_than)
        again = "" if kind is None else read_back(chat, data.train, kind)
        if notes := list(filter(None, (rendered_already(chat, data.train), again))):
            data = replace(data, notes=(*data.notes, *(f"{config.source}: {note}" for note in notes)))
        parts = [part for part in (data.train, data.holdout) if part]
        longest = [
            (*chat.longest(part), 0) if kind is None else longest_row(part, kind, chat, config.source, info.vocabulary)
            for part in parts
        ]
        length, problem, _ = max(longest, key=lambda entry: entry[0])
        row = max(row for _, _, row in longest)
        return cls(data, chat, (length, problem), longest[0][0] if data.train else 0, row)
