"""Speeds of ways to multiply: measured once for a card, its driver and the versions of the software, and kept in a file."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton  # type: ignore[import-untyped, unused-ignore]
from torch import Tensor
from triton.errors import TritonError  # type: ignore[import-untyped, unused-ignore]

from motet.cuda import kernels
from motet.cuda.ways import BUCKETS, ProductShape, ProductWeight, Speeds, Way, WayTable, tiles_to_measure

_REPEATS = 5
"""Replays that are timed together."""
_DIFFERENT = 1 << 28
"""Bytes of weights that a repeat reads: more than any cache holds, as a decoding step does."""

Stopwatch = Callable[[Callable[[], None]], float]
"""Microseconds that a run takes when it is replayed.

Raises:
    RuntimeError, TritonError: it does not run here.
"""


def software_and_card(device: torch.device) -> dict[str, str]:
    """What speeds hold for."""
    properties: Any = torch.cuda.get_device_properties(device)
    sources = sorted(Path(str(kernels.__file__)).parent.glob("*.py"))
    return {
        "card": properties.name,
        "processors": str(properties.multi_processor_count),
        "driver": str(getattr(torch._C, "_cuda_getDriverVersion", int)()),
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "kernels": hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16],
    }


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
    """Replace the file at once; without a directory that can be written, speeds are measured anew next time."""
    lines = [
        {"shape": asdict(shape), "rows": rows, "microseconds": each} for (shape, rows), each in sorted(speeds.items())
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump({**identity, "products": lines}, file, indent=1)
        Path(file.name).replace(path)
    except OSError:
        return


def measure(
    table: WayTable,
    weights: Iterable[ProductWeight],
    library: Way | None,
    stopwatch: Stopwatch,
    seconds: float,
    *,
    back: bool,
) -> bool:
    """Measure what the table lacks; whether anything was. Stops after so many seconds, and goes on in another process."""
    by_shape: dict[ProductShape, list[ProductWeight]] = {}
    for weight in weights:
        by_shape.setdefault(ProductShape.of(weight), []).append(weight)
        if back:
            by_shape.setdefault(ProductShape.of(weight, back=True), []).append(weight)
    end, found = time.monotonic() + seconds, False
    for shape, same in sorted(by_shape.items(), key=lambda item: item[0]):
        for bucket in BUCKETS[-1:] if shape.back else BUCKETS:
            ways: list[Way] = [tile for tile in tiles_to_measure(shape, bucket, table.capability) if table.runs(tile)]
            if library is not None:
                ways.append(library)
            known = table.speeds.setdefault((shape, bucket), {})
            for way in ways:
                if way.name not in known and time.monotonic() < end:
                    known[way.name] = _timed(way, shape, same, bucket, stopwatch)
                    found = True
    return found


def _timed(way: Way, shape: ProductShape, same: list[ProductWeight], n_rows: int, stopwatch: Stopwatch) -> float:
    """Microseconds of one product; infinity where the way fails."""
    example = same[0].weight_NK
    few = same[: max(2, _DIFFERENT // (example.numel() * example.element_size()))]
    x_TK = example.new_ones(n_rows, shape.n_inputs)
    y_TN = example.new_empty(n_rows, shape.n_outputs)

    def run() -> None:
        for weight in few:
            way.multiply(x_TK, weight, y_TN, None, back=shape.back)

    try:
        return stopwatch(run) / len(few)
    except (RuntimeError, AttributeError, TritonError):
        return float("inf")


def stopwatch_of(capture: Callable[..., Callable[[], Tensor]], device: torch.device) -> Stopwatch:
    """Times replays of a recorded graph by the card's own clock."""

    def microseconds(run: Callable[[], None]) -> float:
        def recorded() -> Tensor:
            run()
            return torch.empty(0, device=device)

        replay = capture(recorded, first=False)
        replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_REPEATS):
            replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / _REPEATS * 1000

    return microseconds
