"""Brings preempted sequences and waiting prompts into the batch: allocates their blocks, and reads what is not computed.

Legend: N sampled rows, V vocabulary.
"""

from __future__ import annotations

import functools
from collections import Counter, deque

import torch

from motet.core.stops import Decode
from motet.rollout.batch_rows import BatchRows
from motet.rollout.block_allocator import BlockAllocator
from motet.rollout.executor import Executor, NewTokens
from motet.rollout.sequences import Prompt, SampledSequence, tenant_of, waits_for_grammar
from motet.rollout.steps import sample
from motet.rollout.tick_turns import TickTurns


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

    def opens(self) -> set[str]:
        """Tenants whose prompts the next tick could start."""
        return set() if self._no_blocks or self._rows.free <= 0 else self._rows.may_begin()

    def release(self, prompt: Prompt) -> None:
        """Free what a prompt holds."""
        self._blocks.give_back(prompt)
        prompt.logits = None

    def admit(self, *, in_flight: bool) -> tuple[list[SampledSequence], list[tuple[Prompt, int]]]:
        """Resume preempted sequences, then admit prompts while there is room; sample their first tokens.

        With steps `in_flight`, these land before: prefills would wait for them and be charged with their time, and rows
        that end leave blocks.

        Returns:
            The sequences, and the number of tokens read for each prompt.
        """
        self._rows.share_out()
        if in_flight and self._may_start() and self._rows.land():
            self._rows.share_out()
        inputs: list[NewTokens] = []
        read: list[tuple[Prompt, int]] = []
        resumed, budget = self._resume(inputs, self._turns.tokens)
        read.extend((sequence.prompt, sequence.length) for sequence in resumed)
        opened = self._open_prompts(inputs, budget)
        if inputs:
            logits_NV = self._executor.logits(inputs)
            self.prefills += len(inputs)
            self.prefilled_tokens += sum(len(new.token_ids) for new in inputs)
            for offset, prompt in enumerate(opened):
                read.append((prompt, len(inputs[len(resumed) + offset].token_ids)))
                prompt.logits = logits_NV[len(resumed) + offset : len(resumed) + offset + 1].clone()
            sample(self._executor, resumed, logits_NV[: len(resumed)], self._text)
        born = self._fork()
        read.extend((item.prompt, 1) for item in born)
        return [*resumed, *born], read

    def _may_start(self) -> bool:
        """Whether this tick may resume a sequence or start a prompt, once masks are ready."""
        return any(map(self._rows.may_resume, self._rows.preempted)) or (self._rows.free > 0 and bool(self._due()))

    def _due(self) -> list[Prompt]:
        """The prompts that may start, of tenants whose turn it is; sorts those that wait by what their tenants had."""
        self._rows.waiting = deque(sorted(self._rows.waiting, key=self._turns.had))
        may_begin = self._rows.may_begin()
        waiting = [prompt for prompt in self._rows.waiting if tenant_of(prompt) in may_begin]
        due = self._turns.due((*self._rows.running, *waiting[:1]))
        return [prompt for prompt in waiting if prompt.blocks or tenant_of(prompt) in due]

    def _resume(self, inputs: list[NewTokens], budget: int) -> tuple[list[SampledSequence], int]:
        """Resume preempted sequences of tenants with free rows; returns those to compute, and the remaining budget."""
        resumed: list[SampledSequence] = []
        for sequence in sorted(self._rows.preempted, key=self._turns.had):  # a stable sort keeps each tenant's order
            if not self._rows.may_resume(sequence) or waits_for_grammar(sequence):
                continue
            computes = sequence.copy is None
            if computes and inputs and sequence.length > budget:
                break
            if not self._rows.with_room(sequence, functools.partial(self._blocks.resume, sequence)):
                break
            if computes:
                weights = sequence.prompt.weights
                inputs.append(NewTokens(weights, sequence.read_ids(), 0, sequence.blocks, sequence.slot))
                budget -= sequence.length
                resumed.append(sequence)
            self._rows.preempted.remove(sequence)
            self._rows.start(sequence)  # before anything can fail, so that `fail_all` finds it
        return resumed, budget

    def _open_prompts(self, inputs: list[NewTokens], budget: int) -> list[Prompt]:
        """Allocate blocks for prompts to prefill now; leaves room for at least one completion of each."""
        opened, self._no_blocks = [], False
        rows, reserved, taken = self._rows.free, 0, Counter[str]()
        for prompt in self._due():
            if rows <= 0:
                break
            left = min(rows, self._rows.left(prompt) - taken[tenant_of(prompt)])
            if left <= 0:
                continue
            if not prompt.blocks:
                more = reserved + bool(inputs or self._rows.running)
                begin = functools.partial(self._blocks.begin, prompt, more, budget if inputs else None)
                # exceeds this tick's token budget: preempting others would not help
                short = bool(inputs) and len(prompt.request.prompt_ids) > budget
                known = begin() if short else self._rows.with_room(prompt, begin, more)
                if known is None:
                    self._no_blocks = not inputs
                    break
                token_ids = prompt.request.prompt_ids[known:].tolist()
                if token_ids:
                    inputs.append(NewTokens(prompt.weights, token_ids, known, prompt.blocks, prompt.slot))
                    opened.append(prompt)
                budget -= len(token_ids)
            begins = min(left, len(prompt.waiting))
            taken[tenant_of(prompt)] += begins
            rows -= begins
            reserved += len(prompt.waiting)
        return opened

    def _fork(self) -> list[SampledSequence]:
        """Start completions of prefilled prompts and sample their first tokens."""
        born: list[SampledSequence] = []
        logits = []
        may_begin = self._rows.may_begin()
        able = [prompt for prompt in self._rows.waiting if prompt.blocks and tenant_of(prompt) in may_begin]
        due, most = self._turns.due(able), self._turns.rows
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
