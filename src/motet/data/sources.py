"""Reads rows from a source: a generated task, a file, or a name for `datasets.load_dataset`. Rows are not interpreted."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from motet.config import GENERATED_ROWS, DataConfig
from motet.core import seeds
from motet.core.errors import DataError
from motet.core.plain_json import as_json
from motet.core.suggestions import close_matches
from motet.data import tables
from motet.data.reasoning import ScorerSpec, first_seed, make_entries
from motet.data.row_files import OF_A_JOB, READERS, Row, RowLimits, rows_of
from motet.process import pace

_HUB_SECONDS = 10
_ROW = '{"prompt": "2 + 2 =", "answer": "4"}'


def read_rows(
    config: DataConfig, bounds: RowLimits | None = None, first: int | None = None
) -> tuple[Iterator[tuple[int, Row]], ScorerSpec | None, str]:
    """Read `config.size` rows of a source: their places and JSON values, the data's own scorer if any, and a note.

    Rows are read lazily, within `bounds` if they are another person's; errors are raised during iteration. `first` is the seed
    of reasoning-gym's first row, by default `first_seed` of the data's.

    Raises:
        DataError: the source does not exist, cannot be read, or holds something other than rows.
    """
    source = config.source
    if source.startswith("reasoning-gym:"):
        seed = first_seed(config.seed) if first is None else first
        spec = ScorerSpec(source.partition(":")[2], as_json(config.config), config.size or GENERATED_ROWS, seed)
        return enumerate(make_entries(spec, bounds)), spec, ""
    if source.startswith("toy:"):
        return enumerate(_toy(config, source.partition(":")[2])), None, ""
    drawn, note = _drawn(config, bounds)
    rows = enumerate(_paced(config, bounds))
    return _plain(config, rows if drawn is None else itertools.compress(rows, drawn), bounds), None, note


def _drawn(config: DataConfig, bounds: RowLimits | None) -> tuple[bytes | None, str]:
    """For each row from the first on, 1 if `size` and `seed` draw it, and a note about it; None if all are read."""
    if config.size is None:
        return None, ""
    most, window = OF_A_JOB.rows, tables.window(config.size)
    stream = config.rows is not None and not hasattr(config.rows, "__len__")
    n = sum(1 for _ in itertools.islice(_paced(config, bounds), window if stream else max(window, most + 1)))
    of = "a stream" if stream and n == window else f"more than {most}" if n > most else ""
    n = min(n, window) if of else n
    if n <= config.size:
        return None, ""
    drawn = np.zeros(n, np.uint8)
    drawn[seeds.permutation(seeds.key(config.seed, "size"), n)[: config.size]] = 1
    if not of:
        return drawn.tobytes(), f"{config.size} of {n} rows are read, drawn by data.seed"
    note = f"{config.size} rows are read, drawn by data.seed from the first {n} of {of}; mix the rows first if they are sorted"
    return drawn.tobytes(), note


def has_splits(source: str) -> bool:
    """Whether `datasets` reads the source, which may have several splits."""
    place = Path(os.path.expanduser(source))
    generated = source.startswith(("reasoning-gym:", "toy:"))
    return not (generated or place.is_file() or (place / "state.json").is_file())


def is_elsewhere(source: str) -> bool:
    """Whether `datasets` reads the source from the Hub, where its owner may change it."""
    return has_splits(source) and not Path(os.path.expanduser(source)).exists()


def check_part(config: DataConfig) -> None:
    """Refuse a split or a subset where no source has one. Raises DataError."""
    if config.eval_source is not None and has_splits(config.eval_source):
        return
    for field, default in (("split", "train"), ("subset", None)):
        value = getattr(config, field)
        if value != default and (config.rows is not None or not has_splits(config.source)):
            raise DataError(f"data.{field} {value!r}: {config.source} has no {field}s; leave it out")


def _paced(config: DataConfig, bounds: RowLimits | None) -> Iterator[Row]:
    """All rows of a source, also those that are only counted or passed over."""
    for row in _rows(config, bounds):
        pace.step()
        yield row


def _plain(config: DataConfig, rows: Iterable[tuple[int, Row]], bounds: RowLimits | None) -> Iterator[tuple[int, Row]]:
    n = 0
    for place, row in rows:
        if bounds is not None and n >= bounds.rows:
            raise DataError(
                f"data.source {config.source!r} has more than {bounds.rows} rows; set data.size to use fewer"
            )
        try:
            yield place, as_json(row, infinite_as_text=True)
        except RecursionError as error:
            raise DataError(f"data.source {config.source!r} row {place + 1} is nested too deep") from error
        n += 1
    if not n:
        raise DataError(f"data.source {config.source!r} has no rows; a row is an object such as {_ROW}")


def _rows(config: DataConfig, bounds: RowLimits | None) -> Iterable[Row]:
    path = Path(os.path.expanduser(config.source))
    if config.rows is not None:
        return _of_python(config)
    if path.suffix.lower() in READERS:
        if path.is_file():
            return rows_of(path, bounds)
        if path.is_dir():
            raise DataError(_a_directory(config.source, path))
        near = _near(path.name, _siblings(path))
        also = "" if path.is_absolute() else ", and beside the job file if there is one"
        raise DataError(f"data.source {config.source!r} is not a file{near} (looked in {path.parent.resolve()}{also})")
    if path.is_file():
        raise DataError(
            f"data.source {config.source!r} is a file of another kind: its name must end with {', '.join(READERS)}"
        )
    return _datasets(config)


def _of_python(config: DataConfig) -> Iterator[Row]:
    try:
        for number, row in enumerate(tables.of_python(config.rows), 1):
            if not isinstance(row, Mapping):
                raise DataError(f"{config.source} row {number} must be a mapping of columns, got {type(row).__name__}")
            yield dict(row)
    except OverflowError as error:
        raise DataError(f"{config.source} has a value that Python cannot represent ({error}); leave it out") from error


def _near(name: str, known: list[str]) -> str:
    matches = close_matches(name, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(match) for match in matches)}?" if matches else ""


def _a_directory(source: str, path: Path) -> str:
    """The message about a directory that cannot be read as data."""
    inside = [str(path / name) for name in _siblings(path / "any") if Path(name).suffix.lower() in READERS]
    named = f"name one of its files: {', '.join(inside[:5])}" if inside else f"it holds no {', '.join(READERS)} file"
    return f"data.source {source!r} is a directory that cannot be read as a data set; {named}"


def _siblings(path: Path) -> list[str]:
    return sorted(item.name for item in path.parent.iterdir()) if path.parent.is_dir() else []


def check_toy(name: str) -> None:
    """Check that a toy task exists. Raises DataError with the names if it does not."""
    from motet.data.toys import FAMILIES

    if name not in FAMILIES:
        near = _near(name, list(FAMILIES)) or ";"
        raise DataError(f"there is no toy task {name!r}{near} there are {', '.join(FAMILIES)}")


def _toy(config: DataConfig, name: str) -> Iterator[Row]:
    from motet.data.toys import make_rows

    check_toy(name)
    return iter(make_rows(name, config.size or GENERATED_ROWS, config.seed))


def _ask_hub(source: str) -> None:
    """Ask once whether the hub answers, where it would be asked for half a minute. Raises DataError if it does not."""
    from datasets.config import HF_DATASETS_CACHE
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # the last is of the client that it uses
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        OfflineModeIsEnabled,
    )

    kept = (
        Path(HF_DATASETS_CACHE) / source.replace("/", "___"),
        Path(HF_HUB_CACHE) / f"datasets--{source.replace('/', '--')}",
    )
    if any(map(Path.is_dir, kept)):
        return
    instead = "use a file (.jsonl, .json, .csv, .parquet), a local directory, toy:NAME or reasoning-gym:NAME"
    try:
        HfApi().dataset_info(source, timeout=_HUB_SECONDS)
    except (HFValidationError, HfHubHTTPError):  # no name, or an answer: `datasets` says what is wrong
        return
    except OfflineModeIsEnabled as error:
        reason = "HF_HUB_OFFLINE forbids to ask the hub; unset it"
        raise DataError(f"it is not on this machine, and {reason}, or {instead}") from error
    except (HTTPError, OSError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(f"it is not on this machine, and the hub does not answer ({reason:.200}); {instead}") from error


def _datasets(config: DataConfig) -> Iterator[Row]:
    import datasets

    source, split = config.source, config.split
    saved = Path(os.path.expanduser(source))
    try:
        if (saved / "state.json").is_file() or (saved / "dataset_dict.json").is_file():  # `save_to_disk` wrote it
            loaded = datasets.load_from_disk(str(saved))
            if isinstance(loaded, datasets.DatasetDict) and split not in loaded:
                raise DataError(
                    f"it has no split {split!r}; its splits are {', '.join(loaded)}: name one in data.split"
                )
            table = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            if not saved.exists():
                _ask_hub(source)
            table = datasets.load_dataset(str(saved) if saved.is_dir() else source, name=config.subset, split=split)
        yield from tables.of_datasets(table)
    except DataError as error:
        raise DataError(f"data.source {source!r}: {error}") from error
    except (
        Exception
    ) as error:  # the libraries raise many kinds of exceptions, and all mean that the data is unavailable
        if saved.is_dir() and not (config.subset and "BuilderConfig" in str(error)):
            raise DataError(_a_directory(source, saved)) from error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"data.source {source!r} (subset {config.subset!r}, split {split!r}) cannot be loaded: "
            f"{type(error).__name__}: {reason}. Check the name, data.subset and data.split; without a network use "
            "a file (.jsonl, .json, .csv, .parquet), a local directory, toy:NAME or reasoning-gym:NAME"
        ) from error
