"""What a step trained on, exactly, in the rollout logs of runs whose rollouts servers sampled.

Such rollouts cannot be sampled again bit for bit. A row therefore also has `trained_on`, the rollout as the trainer had
it, and `sums`, one of each field.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from motet.core.types import Branch, Message, Rollout, Turn
from motet.runtime.checkpoint import dump_line
from motet.runtime.step_records import SampledStep

_DIGITS = 8
"""Of the sum of a field, which tells where a file was edited; that it was, the receipt's sum of the file tells."""


class RecordedBranch(msgspec.Struct, frozen=True, omit_defaults=True):
    """A `Branch`."""

    token_ids: str
    """int32, little-endian, in base64."""
    logprobs: str
    """float32 of the sampled tokens alone, in the same way."""
    sampled: tuple[tuple[int, int, int], ...]
    """Stretches of sampled tokens: first, last + 1, and the version that sampled them."""
    turn: int = 0
    after: int | None = None

    @classmethod
    def of(cls, branch: Branch) -> RecordedBranch:
        """Record a branch."""
        mask_T, versions_T = branch.loss_mask, branch.versions
        changes = np.diff(mask_T, prepend=False) | np.diff(versions_T, prepend=-1).astype(bool)
        edges = [*np.flatnonzero(changes).tolist(), len(mask_T)]
        stretches = ((first, last) for first, last in itertools.pairwise(edges) if mask_T[first])
        return cls(
            _text(branch.token_ids, "<i4"),
            _text(branch.logprobs[mask_T], "<f4"),
            tuple((first, last, int(versions_T[first])) for first, last in stretches),
            branch.turn,
            branch.after,
        )


class RecordedRollout(msgspec.Struct, frozen=True, omit_defaults=True):
    """A `Rollout` without its problem; numbers that are not finite are null."""

    branches: tuple[RecordedBranch, ...]
    turns: tuple[Turn, ...]
    reward: float | None
    reward_parts: dict[str, float | None]
    error: str = ""
    opening: tuple[Message, ...] = ()
    roles: dict[str, RecordedRollout] = {}
    metrics: dict[str, float] = {}
    extra: dict[str, str] = {}

    @classmethod
    def of(cls, rollout: Rollout) -> RecordedRollout:
        """Record a rollout."""
        return cls(
            tuple(map(RecordedBranch.of, rollout.branches)),
            rollout.turns,
            rollout.reward,
            dict(rollout.reward_parts),
            rollout.error,
            rollout.opening,
            {role: cls.of(own) for role, own in rollout.roles.items()},
            dict(rollout.metrics),
            dict(rollout.extra),
        )


def exact_rows(sampled: SampledStep, rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of a step's log (`rollout_records`), each with what was trained on and the sums of its fields."""
    rollouts = (rollout for group in sampled.groups for rollout in group.rollouts)
    for rollout, row in zip(rollouts, rows, strict=True):
        whole = {**row, "trained_on": msgspec.to_builtins(RecordedRollout.of(rollout))}
        yield {**whole, "sums": {name: _sum(value) for name, value in whole.items()}}


def _sum(value: Any) -> str:
    return hashlib.sha256(dump_line({"": value})).hexdigest()[:_DIGITS]


def _text(array: np.ndarray[Any, Any], kind: str) -> str:
    return base64.b64encode(array.astype(kind).tobytes()).decode()
