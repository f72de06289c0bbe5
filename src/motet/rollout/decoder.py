"""Continuous batching on the embedded base: admission, prefill, decode, preemption. Synchronous; one tick at a time.

A tick prefills what can be admitted and then decodes one token for every running sequence. Which sequences share a tick changes
how fast they come, never which tokens they are.

Legend: T packed rows, N sampled rows, V vocabulary.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence

import torch

from motet.model.host_cache import HostCache
from motet.model.kv_cache import KVCache
from motet.model.lora_model import LoraModel
from motet.rollout.block_allocator import BlockAllocator
from motet.rollout.drafts import Drafts, can_draft
from motet.rollout.kept import KeptSequences
from motet.rollout.model_runner import ModelRunner, NewTokens
from motet.rollout.sequences import Prompt, SampledSequence
from motet.rollout.tick_turns import TickTurns
from motet.tenant_turns import TenantTurns
from motet.types import FinishReason


class Decoder:
    """Sequences of any mix of adapters and versions on one base and one KV cache."""

    def __init__(
        self,
        base: LoraModel,
        cache: KVCache,
        *,
        max_rows: int,
        prefill_tokens: int,
        kept_blocks: int = 0,
        host_bytes: int = 0,
        turns: TenantTurns | None = None,
        speculates: bool = False,
    ) -> None:
        """Between the turns of episodes at most `kept_blocks` stay with their sequences; 0 keeps none.

        What gives way to others is copied to host memory, at most so many bytes of it. `speculates`: see `Drafts`.
        """
        self.cache = cache
        self.host = HostCache(cache, host_bytes)
        self.kept = KeptSequences(cache, self.host, kept_blocks, stateful=bool(base.stateful))
        self.blocks = BlockAllocator(cache, self.host, self.kept)
        self.runner = ModelRunner(base, cache)
        self.drafts = Drafts() if speculates and can_draft(base) else None
        self.max_rows = max_rows
        self.prefill_tokens = prefill_tokens
        self.prefills = 0
        """Prompts prefilled so far; preempted sequences count again, unless they lay in host memory."""
        self.prefilled_tokens = 0
        """Tokens of these that were computed; those that were kept are not."""
        self.preemptions = 0
        self.spent: Counter[str] = Counter()
        """Microseconds by job since somebody took the count away."""
        self._turns = TickTurns(turns or TenantTurns(), max_rows, prefill_tokens)
        self._waiting: deque[Prompt] = deque()
        self._preempted: deque[SampledSequence] = deque()
        self._running: list[SampledSequence] = []
        self._no_blocks = False  # for the first prompt that waits

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._waiting or self._preempted or self._running)

    @property
    def n_running(self) -> int:
        """Sequences in the decode batch."""
        return len(self._running)

    def add(self, prompt: Prompt) -> None:
        """Queue a request; its completions are admitted in order of arrival."""
        self._waiting.append(prompt)

    def abort(self, matches: set[str]) -> None:
        """End the open completions of these requests (ids, or names of jobs); they keep their tokens.

        What was kept of these episodes is let go.
        """
        self.kept.forget(matches)
        for prompt in [prompt for prompt in self._waiting if _named(prompt, matches)]:
            self._waiting.remove(prompt)
            self._release_prompt(prompt)
            for sequence in prompt.waiting:
                self._end(sequence, FinishReason.ABORT)
            prompt.waiting.clear()
        for sequence in [item for item in self._preempted if _named(item.prompt, matches)]:
            self._preempted.remove(sequence)
            self._end(sequence, FinishReason.ABORT)
        for sequence in [item for item in self._running if _named(item.prompt, matches)]:
            self._end(sequence, FinishReason.ABORT)
        self._running = [item for item in self._running if item.finish is None]

    def fail_all(self) -> list[Prompt]:
        """Drop everything after a fault of the device; the prompts' callers have to be told."""
        prompts = {id(item.prompt): item.prompt for item in [*self._running, *self._preempted]}
        prompts |= {id(prompt): prompt for prompt in self._waiting}
        for item in [*self._running, *self._preempted]:
            self.blocks.give_back(item)
        for prompt in self._waiting:
            self._release_prompt(prompt)
        self.kept.clear()
        self._waiting.clear()
        self._preempted.clear()
        self._running.clear()
        return list(prompts.values())

    @torch.inference_mode()
    def tick(self) -> None:
        """Admit and prefill what fits, then decode one token for running sequences whose tenant's turn it is.

        While several tenants use the device a tick is short: it does one of the two, and only as much as takes a moment.
        """
        self._turns.come((*self._waiting, *self._preempted, *self._running))
        begun, before = time.perf_counter(), self.prefilled_tokens
        fresh, read = self._admit()
        self._settle(fresh)
        self.spent += self._turns.read(begun, read, self.prefilled_tokens - before)
        if self.prefilled_tokens == before or not self._turns.company:
            begun = time.perf_counter()
            running = self._grow_or_preempt(self._turns.chosen(self._running))
            rows = _decode(self, running, self._turns.spare(len(running)))
            self._settle(running)
            self.spent += self._turns.decoded(begun, running, rows)
        opens = not (self._no_blocks or self._preempted) and self._rows_left() > 0
        self._turns.can_go_on((*(self._waiting if opens else ()), *self._running))

    def _admit(self) -> tuple[list[SampledSequence], list[tuple[Prompt, int]]]:
        """Bring in preempted sequences, then new prompts, as far as there is room; sample their first token.

        Returns:
            The sequences, and how many tokens were read of each prompt.
        """
        budget = self._turns.tokens
        inputs: list[NewTokens] = []
        resumed: list[SampledSequence] = []
        read: list[tuple[Prompt, int]] = []
        if self._preempted:
            _reclaim_prompts(self._waiting, self.blocks)
        while self._preempted and self._rows_left():
            sequence = self._preempted[0]
            computes = sequence.copy is None
            if (computes and inputs and sequence.length > budget) or not self.blocks.resume(sequence):
                break
            if computes:
                weights = sequence.prompt.weights
                inputs.append(NewTokens(weights, sequence.read_ids(), 0, sequence.blocks, sequence.slot))
                budget -= sequence.length
                resumed.append(sequence)
                read.append((sequence.prompt, sequence.length))
            self._running.append(self._preempted.popleft())  # before anything can fail, so that `fail_all` finds it
        opened = [] if self._preempted else self._open_prompts(inputs, budget)
        if inputs:
            logits_NV = self.runner.logits(inputs)
            self.prefills += len(inputs)
            self.prefilled_tokens += sum(len(new.token_ids) for new in inputs)
            for offset, prompt in enumerate(opened):
                read.append((prompt, len(inputs[len(resumed) + offset].token_ids)))
                prompt.logits = logits_NV[len(resumed) + offset : len(resumed) + offset + 1].clone()
            self.runner.sample(resumed, logits_NV[: len(resumed)])
        born = [] if self._preempted else self._fork()
        read.extend((item.prompt, 1) for item in born)
        return [*resumed, *born], read

    def _rows_left(self) -> int:
        return self.max_rows - len(self._running)

    def _open_prompts(self, inputs: list[NewTokens], budget: int) -> list[Prompt]:
        """Give blocks to prompts that will be prefilled now; room for at least one completion of each is left free."""
        opened, self._no_blocks = [], False
        rows, reserved = self._rows_left(), 0
        self._waiting = deque(sorted(self._waiting, key=self._turns.had))
        due = self._turns.due((*self._running, *itertools.islice(self._waiting, 1)))
        for prompt in self._waiting:
            if rows <= 0:
                break
            if not (prompt.blocks or self._turns.is_due(prompt, due)):
                continue
            if not prompt.blocks:
                spare = 1 if inputs or self._running else 0
                known = self.blocks.begin(prompt, reserved + spare, budget if inputs else None)
                if known is None:
                    self._no_blocks = not inputs
                    break
                token_ids = prompt.request.prompt_ids[known:].tolist()
                if token_ids:
                    inputs.append(NewTokens(prompt.weights, token_ids, known, prompt.blocks, prompt.slot))
                    opened.append(prompt)
                budget -= len(token_ids)
            rows -= len(prompt.waiting)
            reserved += len(prompt.waiting)
        return opened

    def _fork(self) -> list[SampledSequence]:
        """Start completions of prefilled prompts and sample their first tokens."""
        born: list[SampledSequence] = []
        logits = []
        for prompt in [prompt for prompt in self._waiting if prompt.blocks]:
            while prompt.waiting and prompt.blocks and self._rows_left() > 0:
                last_logits = prompt.logits
                sequence = self.blocks.fork(prompt, alone=not self._running)
                if sequence is None:
                    break
                self._running.append(sequence)  # before the next can fail, so that `fail_all` finds it
                born.append(sequence)
                logits.append(last_logits)
            if prompt.waiting:
                break
            self._waiting.remove(prompt)
            self._release_prompt(prompt)
        if born:
            self.runner.sample(born, torch.cat(logits))
        return born

    def _release_prompt(self, prompt: Prompt) -> None:
        self.blocks.give_back(prompt)
        prompt.logits = None

    # --- decode ------------------------------------------------------------------------------------------------------

    def _grow_or_preempt(self, chosen: set[SampledSequence]) -> list[SampledSequence]:
        """Give some running sequences a block for their next tokens, oldest first; the youngest give way."""
        kept: list[SampledSequence] = []
        queue = deque(self._running)
        while queue:
            sequence = queue.popleft()
            if sequence not in chosen:
                kept.append(sequence)
                continue
            while not (grown := self.blocks.grow(sequence)) and queue:
                self._preempt(queue.pop())
            if not grown:
                _reclaim_prompts(self._waiting, self.blocks)
                grown = self.blocks.grow(sequence)
            if grown:
                kept.append(sequence)
            else:
                self._preempt(sequence)
        self._running = kept
        return sorted((item for item in kept if item in chosen), key=_adapter_order)

    def _preempt(self, sequence: SampledSequence) -> None:
        self.blocks.page_out(sequence)
        self._preempted.appendleft(sequence)
        self.preemptions += 1

    def _settle(self, touched: Sequence[SampledSequence]) -> None:
        """Deliver what is due of sequences that just got a token, and take finished ones out of the batch."""
        for sequence in touched:
            if sequence.finish is not None:
                self._end(sequence, sequence.finish)
            elif sequence.prompt.request.stream:
                sequence.prompt.emit(sequence.chunk(self.runner.text))
        self._running = [item for item in self._running if item.finish is None]

    def _end(self, sequence: SampledSequence, reason: FinishReason) -> None:
        sequence.finish = reason
        if self.drafts is not None and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.drafts.keep(sequence)
        if sequence.prompt.request.episodes and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.kept.keep(sequence)
        self.blocks.give_back(sequence)
        sequence.prompt.emit(sequence.chunk(self.runner.text))


def _reclaim_prompts(waiting: Iterable[Prompt], blocks: BlockAllocator) -> None:
    """Take back the blocks of prompts that wait for a row; those that left no copy are prefilled again later."""
    for prompt in waiting:
        if prompt.blocks:
            blocks.page_out(prompt)
        if prompt.copy is None:
            prompt.logits = None


def _decode(decoder: Decoder, running: list[SampledSequence], spare: int) -> list[int]:
    """A token for each, and those that were drafted right; returns how many rows each took. At most `spare` are drafts."""
    drafts: list[list[int]] = [[] for _ in running]
    begun = time.thread_time()  # others on the machine do not count
    if decoder.drafts is not None:
        drafts = decoder.drafts.of(running, spare)
    for item, draft in zip(running, drafts, strict=True):
        if draft:
            del draft[decoder.blocks.reach(item, len(draft)) :]
    inputs = [_next_tokens(item, draft) for item, draft in zip(running, drafts, strict=True)]
    accepted = decoder.runner.sample(running, decoder.runner.logits(inputs), drafts) if running else 0
    for item, draft in zip(running, drafts, strict=True):
        if draft:
            decoder.blocks.trim(item)
    if decoder.drafts is not None and running:
        decoder.drafts.checked(len(running), sum(map(len, drafts)), accepted, time.thread_time() - begun)
    return [1 + len(draft) for draft in drafts]


def _next_tokens(item: SampledSequence, draft: Sequence[int] = ()) -> NewTokens:
    ids = [item.tokens[-1], *draft]
    return NewTokens(item.prompt.weights, ids, item.length - 1, item.blocks, item.slot, len(ids))


def _named(prompt: Prompt, names: set[str]) -> bool:
    return prompt.request.id in names or prompt.request.job in names


def _adapter_order(sequence: SampledSequence) -> tuple[str, int]:
    adapter = sequence.prompt.request.adapter
    return ("", -1) if adapter is None else (adapter.name, adapter.version)
