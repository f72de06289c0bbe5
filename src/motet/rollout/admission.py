"""Brings preempted sequences and waiting prompts into the batch: allocates their blocks, and reads what is not computed.

What a tick reads is limited, so that rows that run wait for one pass at most: long prompts are read in parts, each behind
the one before. Legend: N items that are read, V vocabulary.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Iterator, Sequence

import torch

from motet.core.stops import Decode
from motet.rollout.batch_rows import BatchRows
from motet.rollout.block_allocator import BlockAllocator
from motet.rollout.decode_steps import Executor, NewTokens, sample
from motet.rollout.sequences import Prompt, SampledSequence, prompt_of, tenant_of
from motet.rollout.tick_turns import TickTurns

Item = Prompt | SampledSequence
Parts = dict[Item, NewTokens]


class Admission:
    """Starts the prompts and sequences of one decoder."""

    def __init__(
        self, executor: Executor, rows: BatchRows, blocks: BlockAllocator, turns: TickTurns, text: Decode
    ) -> None:
        self._executor, self._rows, self._blocks, self._turns, self._text = executor, rows, blocks, turns, text
        self.prefills = 0
        """Prompts prefilled so far; preempted sequences count again unless they were restored from host memory."""
        self.prefilled_tokens = 0
        """Tokens computed in these prefills, without reused ones."""
        self._no_blocks = False  # whether a waiting prompt found no free blocks in the last tick
        self._held_up: set[str] = set()  # tenants with rows that had no step since a part was read

    def able(self) -> list[Item]:
        """What the next tick could start or read."""
        prompts = self._rows.startable() if self._rows.free > 0 else []
        return [*self._rows_to_read(), *(prompt for prompt in prompts if prompt.blocks or not self._no_blocks)]

    def release(self, prompt: Prompt) -> None:
        """Free what a prompt holds."""
        self._blocks.give_back(prompt)
        prompt.logits = None

    def admit(self, *, in_flight: bool) -> tuple[list[SampledSequence], list[tuple[Prompt, int]]]:
        """Resume preempted sequences, read prompts while there is room, and sample the first tokens of completions.

        With steps `in_flight`, these land before: prefills would wait for them and be charged with their time, and rows
        that end leave blocks.

        Returns:
            The completions that begin, and the number of tokens read for each prompt.
        """
        self._rows.share_out()
        if in_flight and self._may_start() and self._rows.land():
            self._rows.share_out()
        self._resume()
        parts = self._choose()
        self._read(parts)
        born = self._fork()
        read = [(prompt_of(item), len(new.token_ids)) for item, new in parts.items()]
        return born, [*read, *((item.prompt, 1) for item in born)]

    def _may_start(self) -> bool:
        """Whether this tick may resume a sequence, or read or start a prompt."""
        if self._rows_to_read() or any(map(self._rows.may_resume, self._rows.preempted)):
            return True
        waiting = self._startable()
        due = self._due(waiting)
        return any(prompt.is_read or tenant_of(prompt) in due for prompt in waiting)

    def _rows_to_read(self) -> list[SampledSequence]:
        """Rows that were preempted, and are not wholly read again."""
        return [item for item in self._rows.running if item.unread]

    def _startable(self) -> list[Prompt]:
        """The prompts that may start or go on; sorts those that wait by what their tenants had."""
        if self._rows.free <= 0:
            return []
        self._rows.waiting = deque(sorted(self._rows.waiting, key=self._turns.had))
        return self._rows.startable()

    def _due(self, waiting: Sequence[Prompt]) -> set[str]:
        """The tenants that may read: whose turn it is, of those with rows that can go on and the first prompt to be read.

        In company a tick reads or decodes: nobody reads while it is the turn of rows that waited for a part before.
        """
        first = [prompt for prompt in waiting if not prompt.is_read][:1]
        if not (first or self._rows_to_read()):
            return set()
        rows = [row for row in self._rows.running if row.unread or row.grammar is None or row.grammar.ready]
        readers: list[Item] = [*rows, *first]
        due = self._turns.due(readers)
        if self._held_up and self._turns.company and not self._held_up.isdisjoint(_steppers(due)):
            return set()
        return set(map(tenant_of, due))

    def stepped(self, rows: Sequence[SampledSequence]) -> None:
        """Report the rows that had a step."""
        self._held_up.difference_update(map(tenant_of, rows))

    def _resume(self) -> None:
        """Resume preempted sequences of tenants with free rows, as long as less than a tick reads is unread."""
        unread = sum(item.unread for item in self._rows_to_read())
        for sequence in sorted(self._rows.preempted, key=self._turns.had):  # a stable sort keeps each tenant's order
            if not self._rows.may_resume(sequence):
                continue
            if sequence.unread and unread >= self._turns.tokens:
                break
            if not self._rows.with_room(sequence, functools.partial(self._blocks.resume, sequence)):
                break
            unread += sequence.unread
            self._rows.preempted.remove(sequence)
            self._rows.start(sequence)  # before anything can fail, so that `fail_all` finds it

    def _choose(self) -> Parts:
        """Choose what to read, at most a tick's tokens: of rows and prompts partly read, and of prompts that begin.

        Those begin only while there are rows, and blocks for at least one completion of each.
        """
        parts: Parts = {}
        self._rows.reading, budget = parts, self._turns.tokens
        self._no_blocks, full = False, False
        rows, reserved, taken = self._rows.free, 0, Counter[str]()
        waiting = self._startable()
        due = self._due(waiting)
        items: list[Item] = [*self._rows_to_read(), *waiting]
        for item in sorted(items, key=self._turns.had):
            if budget <= 0:
                break
            if isinstance(item, Prompt):
                left = min(rows, self._rows.left(item) - taken[tenant_of(item)])
                if left <= 0 or not (item.is_read or tenant_of(item) in due):
                    continue
                more = reserved + bool(parts or self._rows.running)
                if not item.blocks and (full or not self._begin(item, more, waiting)):
                    if not full:  # what cannot begin lets others go on
                        full, due = True, self._due([prompt for prompt in waiting if prompt.blocks])
                    continue
                begins = min(left, len(item.waiting))
                taken[tenant_of(item)] += begins
                rows -= begins
                reserved += len(item.waiting)
            elif tenant_of(item) not in due or not item.blocks:  # it may have given way
                continue
            if item.unread:
                ids = item.token_ids(item.known, min(item.whole, item.known + budget))
                parts[item] = NewTokens(prompt_of(item).weights, ids, item.known, item.blocks, item.slot)
                budget -= len(ids)
        self._no_blocks = full and not parts
        return parts

    def _begin(self, prompt: Prompt, more: int, waiting: Sequence[Prompt]) -> bool:
        """Allocate a prompt's blocks; leaves `more` free, and a row for each of those `waiting` that has begun."""
        if sum(bool(other.blocks) for other in waiting) >= self._rows.free:
            return False
        return self._rows.with_room(prompt, functools.partial(self._blocks.begin, prompt, more), more)

    def _read(self, parts: Parts) -> None:
        """Compute these parts, and the logits of prompts of which they are the last."""
        if parts:
            logits_NV = self._executor.logits(list(parts.values()))
            for place, (item, new) in enumerate(parts.items()):
                item.unread -= len(new.token_ids)
                self.prefilled_tokens += len(new.token_ids)
                self.prefills += not item.unread
                if isinstance(item, Prompt) and not item.unread:
                    item.logits = logits_NV[place : place + 1].clone()
            if any(item.unread for item in parts):
                self._held_up = set(_steppers(self._rows.running))
        self._rows.reading = {}

    def _fork(self) -> list[SampledSequence]:
        """Start completions of prefilled prompts and sample their first tokens."""
        born: list[SampledSequence] = []
        logits = []
        able = [prompt for prompt in self._rows.startable() if prompt.is_read]
        due, most = set(map(tenant_of, self._turns.due(able))), self._turns.rows
        for prompt in [prompt for prompt in able if tenant_of(prompt) in due]:
            while (
                prompt.waiting
                and prompt.blocks
                and self._rows.free > 0
                and self._rows.left(prompt) > 0
                and len(born) < most
            ):
                last_logits = prompt.logits
                fork = functools.partial(self._blocks.fork, prompt, alone=not self._rows.running)
                sequence = self._rows.with_room(prompt, fork)
                if sequence is None:
                    break
                self._rows.start(sequence)  # before the next call can fail, so that `fail_all` finds it
                born.append(sequence)
                logits.append(last_logits)
            if not prompt.waiting:
                self._rows.waiting.remove(prompt)
                self.release(prompt)
        if born:
            sample(self._executor, born, torch.cat(logits), self._text)
        return born


def _steppers(items: Sequence[Item]) -> Iterator[str]:
    """The tenants of rows that can step."""
    rows = (item for item in items if isinstance(item, SampledSequence) and not item.unread)
    return (item.tenant for item in rows if item.grammar is None or item.grammar.ready)
