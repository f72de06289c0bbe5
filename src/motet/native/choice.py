"""What `engine.kernels: auto` means on a machine, and for jobs that have begun."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from motet.config.engine import NamedKernels
from motet.errors import ConfigError
from motet.native import library

FASTER = 1.5
"""How many times as fast as `exact` the arithmetic of `vdpbf16ps` must be: processors have about half of it, the same or twice,
so a busy machine does not change the answer."""
_BEGAN = "torch's kernels compute this base: jobs began with them, and engine.kernels is auto"
_SLOW = "torch's kernels compute this base: Motet's own have only their portable form for this processor, which is slow"
_NOT_COMPILED = "torch's kernels compute this base: Motet's own are not compiled here, run motet doctor --build"


@dataclass(frozen=True)
class Choice:
    """What computes a base that own kernels cover; torch computes any other."""

    kernels: NamedKernels
    why: str = ""
    """Why torch, for a person."""
    kept: bool = False
    """Whether jobs that have begun ask for it."""


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
    if native.form == "portable" and not os.environ.get(library.FORM):
        return Choice("torch", _SLOW)
    pairs = native.multiplies_pairs and native.ceiling("exact-dpbf16") > FASTER * native.ceiling("exact")
    return Choice("native-dpbf16" if pairs else "native")


def of_jobs(processors: Iterable[str]) -> Choice:
    """What most jobs that have begun began with, by their `ModelInfo.processor`; the fastest here where there are none."""
    return of_tenants([processors])


def of_tenants(processors: Iterable[Iterable[str]]) -> Choice:
    """What the jobs of most tenants began with: each tenant counts once, by most of its jobs, however many it has."""
    votes = [most for counts in map(_counts, processors) if (most := _most(counts)) is not None]
    most = _most(Counter(votes))
    return of_machine() if most is None else Choice(most, _BEGAN if most == "torch" else "", kept=True)


def _counts(processors: Iterable[str]) -> Counter[NamedKernels]:
    return Counter(map(kernels_of, processors))


def _most(counts: Counter[NamedKernels]) -> NamedKernels | None:
    return max(counts, key=lambda kernels: (counts[kernels], kernels), default=None)
