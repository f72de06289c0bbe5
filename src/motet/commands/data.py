"""`motet data`: shows the rows of a source, and writes selected rows to files."""

from __future__ import annotations

import itertools
import json
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from motet.chat.template import Chat
from motet.commands.answers import check_place, say, table
from motet.commands.forecast import answer_tokens
from motet.config import DataConfig
from motet.core import seeds
from motet.core.checksums import replace_file
from motet.core.errors import ConfigError, DataError
from motet.core.suggestions import close_matches
from motet.data.dataset import read_source
from motet.data.problems import Problems
from motet.data.row_files import Row
from motet.data.sources import read_rows

_COMPARISON = re.compile(r"\s*([^\s=!<>~]+)\s*(==|!=|<=|>=|<|>|~)\s*(.*?)\s*", re.DOTALL)
_WORD = re.compile(r"\w+|[^\w\s.,;:!?\"'’“”…]")
_SHOWN = 40
_EXAMPLES = 3
_MOST_COMPARED, _MOST_LETTERS = 20_000, 20_000_000
"""Most rows for `--near`, whose time grows with the square of their number."""
_MOST_COUNTED = 2000
"""Most rows whose tokens are counted."""
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "~": lambda text, part: str(part) in str(text),
}


@dataclass(frozen=True)
class Selection:
    """The wanted rows, and the number to split off."""

    filters: tuple[str, ...] = ()
    dedupe: bool = False
    near: float | None = None
    """Share of common word triples above which two prompts are near duplicates; None keeps near duplicates."""
    held_out: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Comparison:
    """A column compared with a constant."""

    column: str
    sign: str
    value: Any
    """The text as JSON, such as a number, or the text itself where it is none."""
    text: str

    @classmethod
    def of(cls, text: str) -> Comparison:
        """Read `level >= 3`.

        Raises:
            ConfigError: it is something else.
        """
        match = _COMPARISON.fullmatch(text)
        if match is None or not match[3]:
            raise ConfigError(f"--filter {text!r}: write COLUMN SIGN VALUE, with one of the signs {' '.join(_COMPARE)}")
        try:
            value = json.loads(match[3])
        except ValueError:
            value = match[3]
        return cls(match[1], match[2], value, match[3])

    def holds(self, row: Row) -> bool:
        """Whether a row fits; a row without the column, or with a value of another type, does not."""
        if self.column not in row:
            return False
        found, value = row[self.column], self.value
        if isinstance(found, str) and not isinstance(value, str):
            value = self.text  # in a .csv, every value is text: 1.10 is not 1.1
            if self.sign not in ("==", "!=", "~"):
                try:
                    found, value = float(found), float(self.value)
                except (TypeError, ValueError):
                    return False
        try:
            return _COMPARE[self.sign](found, value)
        except TypeError:
            return False


def look_at(source: str, base: str, prompt: str | None, answer: str | None, wanted: Selection, to: Path | None) -> None:
    """Show a source, and write the wanted rows.

    Raises:
        DataError, ConfigError: it cannot be read, or nothing is left.
    """
    if wanted.held_out and to is None:
        raise ConfigError("--split writes two files: name the first with --to FILE.jsonl")
    if to is not None and to.suffix != ".jsonl":
        raise ConfigError(f"--to {to}: rows are written as JSON lines, to a file whose name ends with .jsonl")
    check_place("--to", to)
    for path in () if to is None else (to, _held_out(to)) if wanted.held_out else (to,):
        if path.exists() and Path(source).exists() and path.samefile(source):
            raise ConfigError(f"--to {to}: {path} is the source, and its other rows would be lost; give another file")
    kept = selected([row for _, row in read_rows(DataConfig(source=source))[0]], wanted)
    read = read_source(DataConfig.model_validate({"source": kept, "prompt": prompt, "answer": answer}))
    problems = read.problems
    if wanted.dedupe:
        first = {_plain(problem.messages): place for place, problem in reversed(list(enumerate(problems)))}
        places = sorted(first.values())
        say(f"{len(kept) - len(places)} of {len(kept)} rows repeat an earlier prompt and are left out")
        kept, problems = [kept[place] for place in places], problems.only(places)
    if wanted.near is not None:
        texts = [" ".join(one.content for one in problem.messages if one.role != "system") for problem in problems]
        places, pairs = far_apart(texts, wanted.near)
        say(f"{len(kept) - len(places)} of {len(kept)} rows are near an earlier prompt and are left out")
        for share, left, earlier in pairs[:_EXAMPLES]:
            say(f"  {share:.0%} alike: {texts[left][:_SHOWN]!r} and the earlier {texts[earlier][:_SHOWN]!r}")
        kept, problems = [kept[place] for place in places], problems.only(places)
    _show(kept, problems, base, [f"columns: {read.columns}", *read.notes])
    if to is not None:
        _write(kept, wanted, to)


def far_apart(texts: Sequence[str], near: float) -> tuple[list[int], list[tuple[float, int, int]]]:
    """Places of the texts that are not near an earlier one, and (share, place, earlier place) of the others.

    The share is the Jaccard index of word triples: those in both, divided by those in either. Case and punctuation do
    not count; signs such as + do.

    Raises:
        DataError: there are too many words to compare.
    """
    postings, sizes = defaultdict[tuple[str, ...], list[int]](list), list[int]()
    kept, pairs = list[int](), list[tuple[float, int, int]]()
    if len(texts) > _MOST_COMPARED or sum(map(len, texts)) > _MOST_LETTERS:
        raise DataError(
            f"--near compares at most {_MOST_COMPARED:,} rows with {_MOST_LETTERS:,} letters: take fewer with --filter first"
        )
    for place, text in enumerate(texts):
        words = _WORD.findall(text.casefold())
        triples = {tuple(words[at : at + 3]) for at in range(max(1, len(words) - 2))}
        found = [postings[one] for one in triples if one in postings]
        common = np.bincount(np.fromiter(itertools.chain(*found), np.int64), minlength=len(kept))
        shares = common / (len(triples) + np.asarray(sizes) - common) if kept else np.zeros(1)
        if kept and shares.max() >= near:
            pairs.append((float(shares.max()), place, kept[int(shares.argmax())]))
            continue
        for one in triples:
            postings[one].append(len(kept))
        kept.append(place)
        sizes.append(len(triples))
    return kept, pairs


def selected(rows: Sequence[Row], wanted: Selection) -> list[Row]:
    """The rows that fit all comparisons.

    Raises:
        ConfigError: a comparison is invalid, or no row has its column.
        DataError: no row fits.
    """
    columns = {name for row in rows for name in row}
    comparisons = [Comparison.of(text) for text in wanted.filters]
    for one in comparisons:
        if one.column not in columns:
            near = close_matches(one.column, sorted(columns), 1)
            meant = f"; did you mean {near[0]!r}?" if near else "."
            raise ConfigError(
                f"--filter: no row has a column {one.column!r}{meant} The columns are {', '.join(sorted(columns))}"
            )
    kept = [row for row in rows if all(one.holds(row) for one in comparisons)]
    if not kept:
        raise DataError(
            f"--filter: none of the {len(rows)} rows matches {' and '.join(wanted.filters)}; change a filter"
        )
    return kept


def _plain(messages: Iterable[Any]) -> tuple[tuple[str, str], ...]:
    return tuple((one.role, " ".join(one.content.split()).casefold()) for one in messages)


def _show(rows: Sequence[Row], problems: Problems, base: str, taken: Sequence[str]) -> None:
    from motet.model.load import load_tokenizer

    try:
        chat = Chat.plain(load_tokenizer(base))
    except OSError as error:
        raise ConfigError(f"--base {base}: its tokenizer cannot be loaded: {error}") from error
    say(f"{len(rows)} rows")
    say(table(_columns(rows), "column,kind,rows,first value", empty=""))
    say("\n".join(taken))
    some = range(0, len(problems), max(1, len(problems) // _MOST_COUNTED))
    prompts = sorted(len(chat.prompt_ids(problems[place])) for place in some)
    answers = sorted(answer_tokens(chat, problems[place].answer) for place in some if problems[place].answer)
    lengths = [(name, *_quantiles(counts)) for name, counts in (("prompt", prompts), ("answer", answers)) if counts]
    say(table(lengths, "tokens,smallest,median,95 %,largest", empty=""))
    say("the first prompt as the model reads it:")
    say(chat.prompt_text(problems[0]))
    if problems[0].answer:
        say(f"reference answer: {problems[0].answer!r}")


def _columns(rows: Sequence[Row]) -> Iterator[tuple[str, str, str, str]]:
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if row.get(name) is not None]
        kinds = sorted({type(value).__name__ for value in values})
        first = json.dumps(values[0], ensure_ascii=False, default=repr)[:_SHOWN] if values else ""
        yield name, ", ".join(kinds), f"{len(values)}", first


def _quantiles(counts: Sequence[int]) -> tuple[str, str, str, str]:
    at = [0, len(counts) // 2, int(0.95 * (len(counts) - 1)), -1]
    smallest, median, high, largest = (f"{counts[place]:,}" for place in at)
    return smallest, median, high, largest


def _held_out(to: Path) -> Path:
    """The file for the rows that are split off."""
    return to.with_stem(f"{to.stem}-held-out")


def _write(rows: Sequence[Row], wanted: Selection, to: Path) -> None:
    """Write rows in order; the choice of the rows to split off depends only on the seed and the number of rows."""
    if wanted.held_out >= len(rows):
        raise ConfigError(f"--split {wanted.held_out} leaves nothing: there are {len(rows)} rows")
    order = seeds.permutation(seeds.key(wanted.seed, "split"), len(rows)).tolist()
    apart = set(order[: wanted.held_out])
    parts = {to: [row for place, row in enumerate(rows) if place not in apart]}
    if apart:
        parts[_held_out(to)] = [rows[place] for place in sorted(apart)]
    for path, some in parts.items():
        try:
            lines = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in some)
        except TypeError as error:
            raise DataError(f"--to {path}: a column holds a value that JSON has not: {error}") from error
        replace_file(path, lines.encode(errors="backslashreplace"))
        say(f"wrote {len(some)} rows to {path}")
