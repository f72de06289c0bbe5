"""Resolves `engine.kernels: auto`: the fastest kernels on a machine, or those that existing jobs began with."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from motet.config.engine import NamedKernels
from motet.core.errors import ConfigError
from motet.core.model_info import TRITON
from motet.kernels.cpu import library

FASTER = 1.5
"""Least speed of `exact-dpbf16` relative to `exact` at which `auto` chooses it. Processors have about 0.5, 1 or 2, so a
busy machine does not change the choice."""
_BEGAN = "torch's kernels compute this base: jobs began with them, and engine.kernels is auto"
_SLOW = "torch's kernels compute this base: Motet's own have only their portable form for this processor, which is slow"
_NOT_COMPILED = "torch's kernels compute this base: Motet's own are not compiled here, run motet doctor --build"


@dataclass(frozen=True)
class Choice:
    """The kernels for a base that Motet's kernels cover; torch computes any other."""

    kernels: NamedKernels
    why: str = ""
    """Why torch was chosen, for people."""
    kept: bool = False
    """Whether jobs have begun with these kernels."""


def kernels_of(processor: str) -> NamedKernels:
    """The kernels that a `ModelInfo.processor` stands for."""
    names: dict[str, NamedKernels] = {"motet exact": "native", "motet exact-dpbf16": "native-dpbf16"}
    return "triton" if processor.startswith(TRITON) else names.get(processor, "torch")


@functools.cache
def of_machine() -> Choice:
    """The fastest kernels on this machine."""
    try:
        native = library.load()
    except ConfigError:
        return Choice("torch", _NOT_COMPILED)
    if native.form == "portable" and not os.environ.get(library.FORM):
        return Choice("torch", _SLOW)
    pairs = native.multiplies_pairs and native.ceiling("exact-dpbf16") > FASTER * native.ceiling("exact")
    return Choice("native-dpbf16" if pairs else "native")


def for_device(kind: str, own: Choice | None) -> Choice:
    """The choice for a kind of device: `own`, if its kernels run there; by default the fastest on this machine."""
    if kind == "cpu":
        return of_machine() if own is None or own.kernels == "triton" else own
    if own is not None and own.kept and own.kernels in ("torch", "triton"):
        return own
    return Choice("triton")


def of_jobs(processors: Iterable[str]) -> Choice:
    """The kernels that most jobs began with, given their `ModelInfo.processor`; the fastest here if there are none."""
    return of_tenants([processors])


def of_tenants(processors: Iterable[Iterable[str]]) -> Choice:
    """The kernels of most tenants: each tenant has one vote, for the kernels that most of its jobs began with."""
    votes = [most for own in processors if (most := _most(map(kernels_of, own))) is not None]
    most = _most(votes)
    return of_machine() if most is None else Choice(most, _BEGAN if most == "torch" else "", kept=True)


def _most(votes: Iterable[NamedKernels]) -> NamedKernels | None:
    """The kernels with the most votes; of several, the last by name."""
    counts = Counter(votes)
    return max(counts, key=lambda kernels: (counts[kernels], kernels), default=None)
