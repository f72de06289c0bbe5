"""Which columns of a source hold prompts and answers: those that the job names, or one choice from the first rows."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from motet.config import DataConfig
from motet.core.nested import MISSING, value_at
from motet.data.row_files import Row

FIRST_ROWS = 100
"""Rows from which the columns of a source are chosen."""
PROMPT_COLUMNS = ("prompt", "question", "messages", "conversations", "problem", "instruction", "query", "input")
ANSWER_COLUMNS = ("answer", "solution", "target", "output", "response", "label", "labels", "ground_truth")
_OF_VERL = "reward_model.ground_truth"
_CONVERSATIONS = ("messages", "conversations")
_LEARNED = {"chosen": "chosen and rejected", "completion": "completion", "token_ids": "token_ids"}
"""Columns with what is learned after the prompt, and how they are called together."""
_INPUTS = ("input", "context")
"""Columns whose text follows an instruction."""
_READ = ("history", "tools", "functions", "chat_template_kwargs", "rejected", "data_source", "ability", *_LEARNED)
"""Other columns that some part of Motet reads."""
_MEANT = {
    "reason|think|thought|rationale|cot$": "nothing learns the column {0!r}: if it has thoughts, write rows as messages "
    "whose last turn has them in reasoning_content",
    "system": "no prompt has the column {0!r}: if it has system prompts, write rows as messages that begin with a turn of "
    "the system, or set data.system to a text for all rows",
    "answer|expected|gold": "the answers are the column {1!r}; if those of {0!r} are meant, set data.answer to {0}",
}
"""What to do with a column that may be meant for the model, by what its name says."""
_MOST_NAMED = 20


@dataclass(frozen=True)
class Columns:
    """What the rows of a source are read from."""

    prompt: str | None
    """None for a template, and for preferences whose prompt is their common beginning."""
    answer: str | None
    layout: str = ""
    """Whose columns these are, if they are known as a whole."""
    joined: tuple[str, ...] = ()
    """Columns of further parts of the prompt, which rows may lack."""
    system: str | None = None
    """Column of the system prompt."""
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By `prompt` and `answer`: known columns that are filled too."""
    better: str = ""
    """Why another column may be meant; empty if none shows."""
    learned: str = ""
    """What rows are learned from, if it is not the answer."""
    unread: tuple[str, ...] = ()
    """Columns of texts that neither prompts nor answers have."""

    @classmethod
    def of(cls, config: DataConfig, rows: Sequence[Row]) -> Columns:
        """The columns that a job names, or the best known ones of the first rows."""
        filled = Counter({name: n for name in _candidates() if (n := sum(_fills(row, name) for row in rows))})
        prompt, named = config.prompt, config.prompt is not None or config.template is not None
        if not named:
            prompt = _prompt(filled, rows)
        answer, layout = config.answer, ""
        joined: tuple[str, ...] = ()
        if answer is None:
            answer = _answer({name: n for name, n in filled.items() if name != prompt}, rows, prompt)
        if filled[_OF_VERL] and prompt == "prompt" and answer == _OF_VERL:
            layout = "verl's"
        if not named and prompt == "instruction":
            layout, joined = "Alpaca's", _INPUTS
        turns = value_at(rows[0], prompt) if prompt is not None and rows else None
        if isinstance(turns, list) and turns and isinstance(turns[0], Mapping) and "from" in turns[0]:
            layout = "ShareGPT's"
        learned = next((said for name, said in _LEARNED.items() if filled[name]), "")
        if not learned and _ends_with_answer(turns):
            learned = "the last turn of the prompt"
        system = "system" if layout in ("Alpaca's", "ShareGPT's") and filled["system"] else None
        others = {
            "prompt": ()
            if named
            else tuple(column for column in PROMPT_COLUMNS if filled[column] and column not in (prompt, *joined)),
            "answer": tuple(column for column in _answers(filled, rows, prompt) if filled[column] and column != answer),
        }
        better = _better(rows, answer, others["answer"])
        used = {prompt, answer, system, *joined, *others["prompt"], *others["answer"], *_READ, config.order}
        used |= {config.pools.column} if config.pools else set()
        used |= {name for row in rows for name in row if config.template and f"{{{name}" in config.template}
        texts = {name: None for row in rows for name, value in row.items() if isinstance(value, str) and value.strip()}
        heads = {str(name).partition(".")[0] for name in used}
        unread = tuple(name for name in texts if name not in used | heads)
        return cls(prompt, answer, layout, joined, system, others, better, learned, unread)

    def notes(self) -> Iterator[str]:
        """What may be meant for the model and is lost, one sentence each."""
        if self.better:
            yield self.better
        for name in self.unread:
            yield from (
                said.format(name, self.answer) for means, said in _MEANT.items() if re.search(means, name.lower())
            )

    def text(self, config: DataConfig) -> str:
        """The columns, for a person."""
        prompt = self.prompt or "the common beginning of chosen and rejected"
        if self.joined:
            prompt += f" (then {' and '.join(self.joined)}, where a row has them)"
        parts = {"prompt": "data.template" if config.template is not None else prompt, "answer": self.answer or "none"}
        said = []
        for part, name in parts.items():
            others = self.beside.get(part, ())
            also = f" (also there: {', '.join(others)}; data.{part} names another)" if others else ""
            said.append(f"{part} = {name}{also}")
        if self.system:
            said.append(f"system prompt = {self.system}")
        if self.unread:
            said.append(f"read by own rewards and environments alone: {', '.join(self.unread[:_MOST_NAMED])}")
        if self.learned:
            said.append(f"rows are learned from {self.learned}")
        return (f"{self.layout} layout: " if self.layout else "") + ", ".join(said)


def _candidates() -> set[str]:
    return {*PROMPT_COLUMNS, *ANSWER_COLUMNS, *_LEARNED, _OF_VERL, "system"}


def _fills(row: Row, name: str) -> bool:
    value = value_at(row, name)
    return value is not MISSING and value is not None and value != "" and value != []


def _best(names: Sequence[str], filled: Mapping[str, int], rows: Sequence[Row]) -> str | None:
    """The best known name with values in most of the rows that any has values in; if none has values, one that is there."""
    most = max((filled.get(name, 0) for name in names), default=0)
    if not most:
        return next((name for name in names if any(name in row for row in rows)), None)
    return next(name for name in names if 2 * filled.get(name, 0) > most)


def _prompt(filled: Mapping[str, int], rows: Sequence[Row]) -> str | None:
    best = _best(PROMPT_COLUMNS, filled, rows)
    if best in (None, *_CONVERSATIONS) or any(filled.get(name) for name in (*ANSWER_COLUMNS, *_LEARNED, _OF_VERL)):
        return best
    # conversations hold the answers, where nothing else does
    return next((name for name in _CONVERSATIONS if _ends_with_answer(value_at(rows[0], name))), best)


def _ends_with_answer(turns: Any) -> bool:
    last = turns[-1] if isinstance(turns, list) and turns else None
    return isinstance(last, Mapping) and last.get("role", last.get("from")) in ("assistant", "gpt")


def _answer(filled: Mapping[str, int], rows: Sequence[Row], prompt: str | None) -> str | None:
    names = _answers(filled, rows, prompt)
    return _OF_VERL if filled.get(_OF_VERL) else _best(names, filled, rows)


def _answers(filled: Mapping[str, int], rows: Sequence[Row], prompt: str | None) -> list[str]:
    """The names that answers may have in these rows."""
    names = [name for name in (*ANSWER_COLUMNS, _OF_VERL) if name != prompt]
    if filled.get("completion") and all(isinstance(row.get("label"), bool | None) for row in rows):
        names.remove("label")  # TRL's ratings: whether the completion was liked
    return names


def _better(rows: Sequence[Row], answer: str | None, others: Sequence[str]) -> str:
    """Whether another column looks more like answers: it has more than twice as many different values."""
    if answer is None:
        return ""
    kinds = {name: _different(rows, name) for name in (answer, *others)}
    name = max(others, key=lambda column: kinds[column], default=answer)
    if kinds[name] <= 2 * kinds[answer]:
        return ""
    return (
        f"the answers are the column {answer!r}, which has {kinds[answer]} different value{'' if kinds[answer] == 1 else 's'} "
        f"in the first {len(rows)} rows, and {name!r} has {kinds[name]}; if that is meant, set data.answer to {name}"
    )


def _different(rows: Sequence[Row], name: str) -> int:
    values = (value_at(row, name) for row in rows)
    return len({json.dumps(value, sort_keys=True) for value in values if value is not MISSING and value is not None})
