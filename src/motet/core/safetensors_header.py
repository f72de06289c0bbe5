"""The header of a safetensors file: what it costs to read, before it is read, and whether it is an adapter's.

A header of two megabytes can name a million empty tensors, each of which costs its reader microseconds and a kilobyte.
`count_tensors` looks only at bytes, so any process may call it; `check_header` parses, and runs behind the wall.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from motet.core.errors import AdapterError
from motet.core.model_info import ALL_LINEAR
from motet.core.types import ADAPTER_WEIGHTS

MOST_TENSORS = 2**17
"""Tensors of one file: more than any adapter with matrices for each expert has."""
MOST_HEADER = 2**25
"""Bytes of a header."""
_LONGEST_NAME = 500
_MOST_DIMENSIONS = 4
_LENGTH = 8
_EXCEPTIONS = ("layers_to_transform", "layers_pattern", "exclude_modules")
"""Settings of PEFT by which names of modules hold for some layers only."""
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}


def count_tensors(path: Path) -> int:
    """At most how many tensors a file has, without parsing its header.

    Raises:
        AdapterError: it is no safetensors file, or its header is too long.
        OSError: it cannot be read.
    """
    return _header(path).count(b'"data_offsets"')


def check_header(path: Path) -> None:
    """Raise AdapterError unless all tensors are matrices of floats with names of a usual length, and fill the file."""
    text = _header(path)
    if text.count(b'"data_offsets"') > MOST_TENSORS or text.count(b",") + text.count(b"[") > 16 * MOST_TENSORS:
        raise AdapterError(f"{path} names more than {MOST_TENSORS} tensors, which no adapter has")
    try:
        header: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path} is damaged: its header is not JSON") from error
    if not isinstance(header, dict):
        raise AdapterError(f"{path} is damaged: its header is not an object")
    spans = [_span(path, name, entry) for name, entry in header.items() if name != "__metadata__"]
    end = 0
    for first, last in sorted(spans):
        if first != end:
            raise AdapterError(f"{path} is damaged: its tensors overlap, or leave holes")
        end = last
    if _LENGTH + len(text) + end != path.stat().st_size:
        raise AdapterError(f"{path} is damaged: its tensors do not fill it")


def saved_targets(config: Mapping[str, Any], directory: Path) -> Any:
    """The `target_modules` of a PEFT directory with this configuration.

    A pattern, or names that hold for some layers only, are read as the paths of the layers that the file has.

    Raises:
        AdapterError: the file is damaged.
        OSError, ValueError: it cannot be read.
    """
    targets = config.get("target_modules", ALL_LINEAR)
    pattern = isinstance(targets, str) and targets != ALL_LINEAR
    if not pattern and not any(map(config.get, _EXCEPTIONS)):
        return targets
    names = (
        name.partition(".lora_")[0] for name in json.loads(_header(directory / ADAPTER_WEIGHTS)) if ".lora_" in name
    )
    return sorted({name.removeprefix("base_model.model.").replace(".base_layer", "") for name in names})


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH), "little")
        if length > MOST_HEADER:
            raise AdapterError(
                f"{path} is no adapter: its header has {length} bytes, and an adapter's at most {MOST_HEADER}"
            )
        text = file.read(length)
    if len(text) < length or not text.startswith(b"{"):
        raise AdapterError(f"{path} is damaged: it is not a safetensors file, or was cut off")
    return text


def _span(path: Path, name: str, entry: Any) -> tuple[int, int]:
    """The first byte of a tensor, and the one after its last."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(first), int(last)]}:
            whole = all(type(size) is int and size > 0 for size in shape) and 0 < len(shape) <= _MOST_DIMENSIONS
            if len(name) > _LONGEST_NAME or not whole or dtype not in _BYTES:
                raise AdapterError(
                    f"{path}: {name!r:.100} is no matrix of an adapter: it has the type {dtype:.20} and {len(shape)} "
                    f"dimensions; supported are {', '.join(_BYTES)}, without empty tensors"
                )
            if 0 <= first < last and last - first == math.prod(shape) * _BYTES[dtype]:
                return first, last
    raise AdapterError(f"{path} is damaged: it describes {name!r:.100} wrongly")
