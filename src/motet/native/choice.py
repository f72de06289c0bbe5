"""What `engine.kernels: auto` means on a machine, and for jobs that have begun."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from motet.config.engine import NamedKernels
from motet.errors import ConfigError
from motet.native import library

FASTER = 1.5
"""How many times as fast as `exact` the arithmetic of `vdpbf16ps` must be: processors have about half of it, the same or twice,
so a busy machine does not change the answer."""
_BEGAN = "torch's kernels compute this base: jobs began with them, and engine.kernels is auto"
_NOT_COMPILED = "torch's kernels compute this base: Motet's own are not compiled here, run motet doctor --build"


@dataclass(frozen=True)
class Choice:
    """What computes a base that own kernels cover; torch computes any other."""

    kernels: NamedKernels
    why: str = ""
    """Why torch, for a person."""


def kernels_of(processor: str) -> NamedKernels:
    """What gave a `ModelInfo.processor`."""
    names: dict[str, NamedKernels] = {"motet exact": "native", "motet exact-dpbf16": "native-dpbf16"}
    return names.get(processor, "torch")


@functools.cache
def of_machine() -> Choice:
    """The fastest on this machine."""
    try:
        native = library.load()
    except ConfigError:
        return Choice("torch", _NOT_COMPILED)
    pairs = native.multiplies_pairs and native.ceiling("exact-dpbf16") > FASTER * native.ceiling("exact")
    return Choice("native-dpbf16" if pairs else "native")


def of_jobs(begun: Iterable[tuple[str, str]]) -> Choice:
    """For jobs that have begun, what most of them began with; the machine's own for others.

    `begun` has `ModelInfo.processor` and the type of numbers of each.
    """
    machine, counts = of_machine(), dict[NamedKernels, int]()
    for processor, dtype in begun:
        kernels = kernels_of(processor)
        if kernels == "native" and dtype == "float32" and machine.kernels != "torch":
            kernels = machine.kernels  # both names mean the same there
        counts[kernels] = counts.get(kernels, 0) + 1
    most = max(counts, key=lambda kernels: (counts[kernels], kernels), default=machine.kernels)
    return machine if most == machine.kernels else Choice(most, _BEGAN if most == "torch" else "")
