"""Packing: how a job's samples are cut into micro-batches, and which waiting cuts share a packed batch.

The first question is answered from the job's own samples alone, so that its gradient has the same bits in any company.
The second may depend on who else is there: whole cuts are put side by side, nothing of a job's arithmetic crosses.
Sequences lie end to end; there is no padding.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from motet.types import Sample


def cut(lengths: Sequence[int], budget: int) -> tuple[range, ...]:
    """Cut a job's samples, in order, greedily into micro-batches of at most `budget` tokens.

    A sample longer than the budget gets a cut of its own. Example: lengths [3, 4, 2, 9, 1] with a budget of 8 give
    range(0, 2), range(2, 3), range(3, 4), range(4, 5).

    Args:
        lengths: packed tokens of each sample, prompt included.
        budget: most tokens of a micro-batch.

    Returns:
        Ranges of sample indices; each sample lies in exactly one, in order.
    """
    if budget < 1:
        raise ValueError(f"a micro-batch needs a budget of at least one token, got {budget}")
    cuts: list[range] = []
    start = tokens = 0
    for index, length in enumerate(lengths):
        if index > start and tokens + length > budget:
            cuts.append(range(start, index))
            start, tokens = index, 0
        tokens += length
    if start < len(lengths):
        cuts.append(range(start, len(lengths)))
    return tuple(cuts)


def shared_prompts(samples: Sequence[Sample]) -> tuple[int, ...]:
    """For each sample the tokens that it need not bring, because the sample before it begins with the same prompt.

    A prompt is what lies before a sample's first trained token. The samples of a group follow one another, so all but the first
    leave their prompt out.
    """
    found = [0] * len(samples)
    for index in range(1, len(samples)):
        before, sample = samples[index - 1], samples[index]
        length = int(np.argmax(sample.loss_mask))
        same = length == int(np.argmax(before.loss_mask)) and length > 0
        if same and np.array_equal(before.token_ids[:length], sample.token_ids[:length]):
            found[index] = length
    return tuple(found)


@dataclass(frozen=True)
class Waiting:
    """A cut that waits to be trained."""

    job: str
    tokens: int
    """Packed tokens of the cut."""
    consumed: float = 0.0
    """What the job has consumed before this batch, in tokens."""
    weight: float = 1.0
    """The job's share; above 0."""


def merge(waiting: Sequence[Waiting], budget: int) -> tuple[int, ...]:
    """Choose the cuts of the next packed batch.

    Again and again the job that has consumed least for its weight, cuts already chosen included, gives its oldest
    waiting cut; ties go to the one that waits in front. A cut that does not fit makes its job sit out the rest of the
    batch (its later cuts must not overtake) while others fill the budget. No job starves: the least served goes first.

    Args:
        waiting: cuts of all jobs; those of one job in the order in which they must be trained.
        budget: most tokens of the batch; exceeded only by a single cut that is larger by itself.

    Returns:
        Indices into `waiting`, in the order chosen; at least one where anything waits.
    """
    queues: dict[str, list[int]] = {}
    for index, item in enumerate(waiting):
        queues.setdefault(item.job, []).append(index)
    # Heap entries: (consumed / weight, oldest cut of the job, its place in the job's queue, consumed).
    heap = [_entry(waiting, queue[0], 0, waiting[queue[0]].consumed) for queue in queues.values()]
    heapq.heapify(heap)
    chosen: list[int] = []
    room = budget
    while heap:
        _, index, position, consumed = heapq.heappop(heap)
        item, queue = waiting[index], queues[waiting[index].job]
        if chosen and item.tokens > room:
            continue
        chosen.append(index)
        room -= item.tokens
        if position + 1 < len(queue):
            following = _entry(waiting, queue[position + 1], position + 1, consumed + item.tokens)
            heapq.heappush(heap, following)
    return tuple(chosen)


def _entry(waiting: Sequence[Waiting], index: int, position: int, consumed: float) -> tuple[float, int, int, float]:
    return consumed / waiting[index].weight, index, position, consumed
