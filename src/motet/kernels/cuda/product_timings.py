"""Speeds of ways to multiply: measured once for a card, its driver and the versions of the software, and kept in a file."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
import triton  # type: ignore[import-untyped, unused-ignore]
from torch import Tensor

from motet.kernels.cuda import kernels
from motet.kernels.cuda.adapters import TILE, AdapterGroup, AdapterTables, Places
from motet.kernels.cuda.decoder_shape import pieces_of
from motet.kernels.cuda.product_backends import (
    A_COLUMNS,
    BUCKETS,
    Adapters,
    ProductShape,
    ProductWeight,
    Speeds,
    Way,
    WayTable,
)
from motet.model.accelerator import cuda_versions, kernel_failures, microseconds, multiprocessors, processor_of

_log = logging.getLogger(__name__)
_REPEATS = 5
"""Replays that are timed together."""
_TRIES = 3
"""Times that they are timed: the least counts, because other processes may use the card meanwhile."""
_DIFFERENT = 1 << 28
"""Bytes of weights that a repeat reads: more than any cache holds, as a decoding step does."""
_MEASURING = 30.0
"""Seconds after which a load begins to measure no other way."""

Stopwatch = Callable[[Callable[[], None]], float]
"""Microseconds that a run takes when it is replayed.

Raises:
    RuntimeError, TritonError: it does not run here.
"""


def software_and_card(device: torch.device) -> dict[str, str]:
    """What speeds hold for."""
    return {
        "card": processor_of(device),
        "processors": str(multiprocessors(device)),
        **cuda_versions(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "kernels": digest_of(Path(str(kernels.__file__)).parents[1]),
    }


def digest_of(room: Path) -> str:
    """Of all its sources: kernels, what launches them, and what measures them."""
    sources = sorted(room.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def file_of(identity: Mapping[str, str]) -> Path:
    """The file in the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()[:16]
    return Path(home) / "motet" / "cuda" / f"{name}.json"


def read(path: Path) -> Speeds:
    """The speeds in a file; none if it is missing or cannot be read, because they can be measured again."""
    try:
        lines = json.loads(path.read_text(encoding="utf-8"))["products"]
        return {
            (ProductShape(**line["shape"]), int(line["rows"])): {
                str(name): float(each) for name, each in line["microseconds"].items()
            }
            for line in lines
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def write(path: Path, identity: Mapping[str, str], speeds: Speeds) -> None:
    """Replace the file at once, with what other processes wrote to it since it was read.

    Without a directory that can be written, speeds are measured anew next time.
    """
    every = sorted({**read(path), **speeds}.items())
    lines = [{"shape": asdict(shape), "rows": rows, "microseconds": each} for (shape, rows), each in every]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump({**identity, "products": lines}, file, indent=1)
        Path(file.name).replace(path)
    except OSError:
        return


def seconds_to_measure() -> float:
    """Of a load. With `MOTET_MEASURE_PRODUCTS=0` none: what is measured beside others is wrong, and would be kept."""
    return 0.0 if os.environ.get("MOTET_MEASURE_PRODUCTS") == "0" else _MEASURING


def bring(
    table: WayTable,
    weights: Iterable[ProductWeight],
    library: Way | None,
    capture: Callable[..., Callable[[], Tensor]],
    device: torch.device,
    seconds: float,
) -> None:
    """Give the table the speeds that are kept for this card, and those of `weights`, measured now if there is time."""
    identity = software_and_card(device)
    path = file_of(identity)
    table.speeds = read(path)
    end = time.monotonic() + seconds
    stopwatch = stopwatch_of(capture, device)
    if seconds and measure(table, weights, library, stopwatch, lambda: time.monotonic() < end, back=True):
        write(path, identity, table.speeds)


def measure(
    table: WayTable,
    weights: Iterable[ProductWeight],
    library: Way | None,
    stopwatch: Stopwatch,
    in_time: Callable[[], bool],
    *,
    back: bool,
) -> bool:
    """Measure shapes that the table lacks; whether any were. First the library and the tiles that are used anyway, then others.

    Begins nothing more when time is up. Tiles that a shape lacks then stay unmeasured for good, so that later loads are quick.
    A shape for which memory was short is left to the next load: another process may have had it.
    """
    by_shape: dict[ProductShape, list[ProductWeight]] = {}
    for weight in weights:
        by_shape.setdefault(ProductShape.of(weight), []).append(weight)
        if back:
            by_shape.setdefault(ProductShape.of(weight, back=True), []).append(weight)
    keys = [(shape, bucket) for shape in sorted(by_shape) for bucket in (BUCKETS[-1:] if shape.back else BUCKETS)]
    new = [key for key in keys if key not in table.speeds]
    if new:
        _log.warning("the speed of products is measured on this card; it takes a while, and is done once for a base")
    found: Speeds = {}
    for shape, bucket in new:
        if in_time():
            ways = [table.start(shape, bucket), *([] if library is None else [library])]
            found[shape, bucket] = {way.name: timed(way, shape, by_shape[shape], bucket, stopwatch) for way in ways}
    for (shape, bucket), of_ways in found.items():
        for tile in table.others(shape, bucket):
            if in_time():
                of_ways[tile.name] = timed(tile, shape, by_shape[shape], bucket, stopwatch)
    whole = {key: of_ways for key, of_ways in found.items() if not any(map(math.isnan, of_ways.values()))}
    table.speeds.update(whole)
    return bool(whole)


def timed(way: Way, shape: ProductShape, same: list[ProductWeight], n_rows: int, stopwatch: Stopwatch) -> float:
    """Microseconds of one product; infinity where the way fails, NaN where memory is short.

    Motet's own ways by the machine code that multiplies A, too.
    """
    example = same[0].weight_NK
    few = same[: max(2, _DIFFERENT // (example.numel() * example.element_size()))]
    try:
        x_TK = example.new_ones(n_rows, shape.n_inputs)
        y_TN = example.new_empty(n_rows, shape.n_outputs)
        adapters = _no_adapters(x_TK) if way.any_rows and not shape.back else None

        def run() -> None:
            for weight in few:
                way.multiply(x_TK, weight, y_TN, adapters, back=shape.back)

        return stopwatch(run) / len(few)
    except kernel_failures() as error:
        return math.nan if "out of memory" in str(error) else math.inf  # so say torch, the driver and libraries


def _no_adapters(x_TK: Tensor) -> Adapters:
    """Tables in which no row has an adapter."""
    tiles = torch.full((1, 1 + TILE), -1, dtype=torch.int32, device=x_TK.device)
    n_tiles = torch.ones(1, dtype=torch.int32, device=x_TK.device)
    entries = torch.zeros(1, 5, dtype=torch.int64, device=x_TK.device)
    inner = torch.empty(pieces_of(x_TK.shape[1]), 1, A_COLUMNS, device=x_TK.device)
    tables = AdapterTables(Places([], x_TK.element_size()), tiles, n_tiles, len(x_TK), adapted=True)
    return tables, AdapterGroup(entries, A_COLUMNS, inner, (1,))


def stopwatch_of(capture: Callable[..., Callable[[], Tensor]], device: torch.device) -> Stopwatch:
    """Times replays of a recorded graph by the card's own clock."""

    def of_run(run: Callable[[], None]) -> float:
        def recorded() -> Tensor:
            run()
            return torch.empty(0, device=device)

        replay = capture(recorded, first=True)  # no other graph lives
        replay()
        return min(microseconds(replay, _REPEATS) for _ in range(_TRIES))

    return of_run
