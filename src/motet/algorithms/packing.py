"""Packing: how a job's samples are cut into micro-batches, and which waiting cuts share a packed batch.

The first depends on the job's own samples only, so its gradient has the same bits beside any other jobs. The second may
depend on other jobs: whole cuts are put side by side, and no arithmetic crosses between jobs. Sequences are packed end
to end, without padding.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

TARGETS = 128
"""Most targets of a micro-batch for each token of its budget, because the head needs memory and time for each."""


def cut(
    lengths: Sequence[int], budget: int, shared: Sequence[int] = (), targets: Sequence[int] = ()
) -> tuple[range, ...]:
    """Cut a job's samples, in order, greedily into micro-batches of at most `budget` tokens.

    Its targets are at most `TARGETS` times as many. A sample longer than the budget gets its own cut. Samples that
    share a prompt stay together if they fit into one cut. Example: lengths [3, 4, 2, 9, 1] with a budget of 8 give
    range(0, 2), range(2, 3), range(3, 4), range(4, 5).

    Args:
        lengths: tokens of each sample, prompt included.
        budget: most packed tokens of a micro-batch.
        shared: for each sample, the prompt tokens that it shares with the sample before it (`Segment.shared`).
        targets: number of targets of each sample; by default not counted.

    Returns:
        Ranges of sample indices; each sample is in exactly one, in order.
    """
    saved = tuple(shared) or (0,) * len(lengths)
    wide = tuple(targets) or (0,) * len(lengths)
    cuts: list[range] = []
    start = tokens = predicted = 0
    for index, length in enumerate(lengths):
        together = budget + 1 if saved[index] else _together(lengths, saved, index)
        wanted = together if together <= budget else length - saved[index]
        too_wide = predicted + wide[index] > TARGETS * budget
        if index > start and (tokens + wanted > budget or too_wide):
            cuts.append(range(start, index))
            start, tokens, predicted = index, 0, 0
        predicted += wide[index]
        tokens += length - (saved[index] if index > start else 0)
    if start < len(lengths):
        cuts.append(range(start, len(lengths)))
    return tuple(cuts)


def _together(lengths: Sequence[int], saved: Sequence[int], first: int) -> int:
    """Packed tokens of a sample and of the following ones that share its prompt."""
    tokens = lengths[first]
    for index in range(first + 1, len(lengths)):
        if not saved[index]:
            break
        tokens += lengths[index] - saved[index]
    return tokens


@dataclass(frozen=True)
class Standing:
    """The consumption of a job and of its tenant."""

    consumed: float = 0.0
    """Tokens sampled and trained by the job."""
    weight: float = 1.0
    """The job's share among those of its tenant."""
    tenant: str = ""
    tenant_consumed: float = 0.0
    """Tokens of all jobs of the tenant, each divided by the weight of its job."""
    share: float = 1.0
    """The tenant's share among tenants."""


@dataclass(frozen=True)
class Waiting:
    """A cut that waits to be trained."""

    job: str
    tokens: int
    """Packed tokens of the cut."""
    standing: Standing = Standing()
    """The job's standing before this batch."""


def merge(waiting: Sequence[Waiting], budget: int) -> tuple[int, ...]:
    """Choose the cuts of the next packed batch.

    Repeatedly, the tenant with the least consumption for its share is next, including the cuts already chosen. Among
    its jobs, the one with the least consumption for its weight gives its oldest cut; ties go to the first in the queue.
    If a cut does not fit, its job leaves the rest of the batch to others, because its later cuts must not overtake. No
    job starves: the least served goes first.

    Args:
        waiting: cuts of all jobs; those of one job in the order in which they must be trained.
        budget: most tokens of the batch; exceeded only by a single cut that is larger by itself.

    Returns:
        Indices into `waiting`, in the order chosen; at least one if anything waits.
    """
    queues: dict[str, deque[int]] = {}
    for index, item in enumerate(waiting):
        queues.setdefault(item.job, deque()).append(index)
    jobs = {job: waiting[queue[0]].standing.consumed for job, queue in queues.items()}
    tenants = {item.standing.tenant: item.standing.tenant_consumed for item in waiting}

    def place(job: str) -> tuple[float, float, int]:
        had = waiting[queues[job][0]].standing
        return tenants[had.tenant] / had.share, jobs[job] / had.weight, queues[job][0]

    heap = [(place(job), job) for job in queues]
    heapq.heapify(heap)
    chosen: list[int] = []
    room, least = budget, min((item.tokens for item in waiting), default=0)
    while heap and not (chosen and room < least):
        before, job = heap[0]
        if (now := place(job)) != before:  # places only move back: one that is out of date stands too far in front
            heapq.heapreplace(heap, (now, job))
            continue
        item = waiting[queues[job][0]]
        if chosen and item.tokens > room:
            heapq.heappop(heap)
            continue
        chosen.append(queues[job].popleft())
        room -= item.tokens
        jobs[job] += item.tokens
        tenants[item.standing.tenant] += item.tokens / item.standing.weight
        if queues[job]:
            heapq.heapreplace(heap, (place(job), job))
        else:
            heapq.heappop(heap)
    return tuple(chosen)
