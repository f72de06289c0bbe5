"""Continuous batching on the embedded base: admission, prefill, decode, preemption. Synchronous; one tick at a time.

A tick prefills what can be admitted, then decodes one token for every running sequence. Sharing a tick affects speed,
never tokens.

Legend: T packed rows, N sampled rows, V vocabulary.
"""

from __future__ import annotations

import functools
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence

import torch

from motet.core.device import DECODES, WAITS
from motet.core.tenant_turns import Cost, Payer, TenantTurns
from motet.core.types import FinishReason
from motet.model.host_cache import HostCache
from motet.model.kv_cache import KVCache
from motet.model.lora_model import LoraModel
from motet.rollout.batch_rows import BatchRows
from motet.rollout.block_allocator import BlockAllocator
from motet.rollout.drafts import Drafts, can_draft
from motet.rollout.grammars import Grammars
from motet.rollout.kept import KeptSequences
from motet.rollout.model_runner import ModelRunner, NewTokens
from motet.rollout.sequences import Prompt, SampledSequence, payer_of, tenant_of, waits_for_grammar


class Decoder:
    """Decodes sequences of any adapters and versions on one base and one KV cache."""

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
        grammars: Grammars | None = None,
    ) -> None:
        """At most `kept_blocks` KV cache blocks stay allocated between turns of episodes; 0 keeps none.

        Preempted and evicted sequences are copied to host memory, up to `host_bytes`. `speculates`: see `Drafts`.
        """
        self.cache = cache
        self.host = HostCache(cache, host_bytes)
        self.kept = KeptSequences(cache, self.host, kept_blocks, stateful=bool(base.stateful))
        self.blocks = BlockAllocator(cache, self.host, self.kept)
        self.runner = ModelRunner(base, cache)
        self.drafts = Drafts() if speculates and can_draft(base) else None
        self.rows = BatchRows(cache, self.blocks, max_rows)
        self.prefills = 0
        """Prompts prefilled so far; preempted sequences count again unless they were restored from host memory."""
        self.prefilled_tokens = 0
        """Tokens computed in these prefills, without reused ones."""
        self.spent: Counter[str] = Counter()
        """Microseconds by job; the reader resets it."""
        self._turns = _TickTurns(turns or TenantTurns(), max_rows, prefill_tokens)
        self.grammars = grammars or Grammars(base.info)
        self._constrained = 0  # open sequences with a grammar
        self.stuck = False
        """Whether the last tick could do nothing because it waits for masks of grammars."""
        self._no_blocks = False  # whether a waiting prompt found no free blocks in the last tick

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.rows.waiting or self.rows.preempted or self.rows.running)

    def add(self, prompt: Prompt) -> None:
        """Queue a request; completions are admitted in order of arrival."""
        self._constrained += sum(item.grammar is not None for item in prompt.waiting)
        self.rows.waiting.append(prompt)

    def abort(self, matches: set[str]) -> None:
        """End the open completions of these requests (ids or job names); they keep their tokens.

        Kept sequences of these episodes are dropped.
        """
        self.kept.forget(matches)
        for prompt in [prompt for prompt in self.rows.waiting if _named(prompt, matches)]:
            self.rows.waiting.remove(prompt)
            self._release_prompt(prompt)
            for sequence in prompt.waiting:
                self._end(sequence, FinishReason.ABORT)
            prompt.waiting.clear()
        for sequence in [item for item in self.rows.preempted if _named(item.prompt, matches)]:
            self.rows.preempted.remove(sequence)
            self._end(sequence, FinishReason.ABORT)
        for sequence in [item for item in self.rows.running if _named(item.prompt, matches)]:
            self._end(sequence, FinishReason.ABORT)
        self.rows.drop_finished()

    def fail_all(self) -> list[Prompt]:
        """Drop everything after a device error; returns the prompts whose callers must be informed."""
        prompts = {id(item.prompt): item.prompt for item in [*self.rows.running, *self.rows.preempted]}
        prompts |= {id(prompt): prompt for prompt in self.rows.waiting}
        for item in [*self.rows.running, *self.rows.preempted]:
            self.blocks.give_back(item)
        for prompt in self.rows.waiting:
            self._release_prompt(prompt)
        self.kept.clear()
        self.rows.waiting.clear()
        self.rows.preempted.clear()
        self.rows.running.clear()
        self._constrained = 0
        return list(prompts.values())

    @torch.inference_mode()
    def tick(self) -> None:
        """Admit and prefill what fits, then decode one token for sequences of the tenants whose turn it is.

        While several tenants use the device, a tick is short: it prefills or decodes, and only for a limited time.
        """
        self._turns.come((*self.rows.waiting, *self.rows.preempted, *self.rows.running))
        self._begin_masks()
        begun, before = self._turns.now(), self.prefilled_tokens
        fresh, read = self._admit()
        self._settle(fresh)
        self.spent += self._turns.read(begun, read, self.prefilled_tokens - before)
        running: list[SampledSequence] = []
        if self.prefilled_tokens == before or not self._turns.company:
            begun = self._turns.now()
            running = sorted(self.rows.grow(self._turns.chosen(self._able())), key=_adapter_order)
            rows = _decode(self, running, self._turns.spare(len(running)))
            self._settle(running)
            self.spent += self._turns.decoded(begun, running, rows)
        self.stuck = self._begin_masks() and not (running or read)
        opens = set() if self._no_blocks or self.rows.free <= 0 else self.rows.may_begin()
        self._turns.can_go_on((*(item for item in self.rows.waiting if tenant_of(item) in opens), *self._able()))

    def _begin_masks(self) -> bool:
        """Charge and begin the masks of the next tokens; returns whether some are awaited."""
        for payer, seconds in self.grammars.spent():
            self.spent += self._turns.masked(payer, seconds)
        items = (*self.rows.running, *self.rows.preempted) if self._constrained else ()
        return self.grammars.begin((item.grammar, payer_of(item.prompt.request)) for item in items if item.grammar)

    def _able(self) -> list[SampledSequence]:
        """The running sequences that can get a token now."""
        running = self.rows.running
        return [item for item in running if not waits_for_grammar(item)] if self._constrained else running

    def _admit(self) -> tuple[list[SampledSequence], list[tuple[Prompt, int]]]:
        """Resume preempted sequences, then admit prompts while there is room; sample their first tokens.

        Returns:
            The sequences, and the number of tokens read for each prompt.
        """
        self.rows.share_out()
        inputs: list[NewTokens] = []
        read: list[tuple[Prompt, int]] = []
        resumed, budget = self._resume(inputs, self._turns.tokens)
        read.extend((sequence.prompt, sequence.length) for sequence in resumed)
        opened = self._open_prompts(inputs, budget)
        if inputs:
            logits_NV = self.runner.logits(inputs)
            self.prefills += len(inputs)
            self.prefilled_tokens += sum(len(new.token_ids) for new in inputs)
            for offset, prompt in enumerate(opened):
                read.append((prompt, len(inputs[len(resumed) + offset].token_ids)))
                prompt.logits = logits_NV[len(resumed) + offset : len(resumed) + offset + 1].clone()
            self.runner.sample(resumed, logits_NV[: len(resumed)])
        born = self._fork()
        read.extend((item.prompt, 1) for item in born)
        return [*resumed, *born], read

    def _resume(self, inputs: list[NewTokens], budget: int) -> tuple[list[SampledSequence], int]:
        """Resume preempted sequences of tenants with free rows; returns those to compute, and the remaining budget."""
        resumed: list[SampledSequence] = []
        for sequence in sorted(self.rows.preempted, key=self._turns.had):  # a stable sort keeps each tenant's order
            if not self.rows.may_resume(sequence) or waits_for_grammar(sequence):
                continue
            computes = sequence.copy is None
            if computes and inputs and sequence.length > budget:
                break
            if not self.rows.with_room(sequence, functools.partial(self.blocks.resume, sequence)):
                break
            if computes:
                weights = sequence.prompt.weights
                inputs.append(NewTokens(weights, sequence.read_ids(), 0, sequence.blocks, sequence.slot))
                budget -= sequence.length
                resumed.append(sequence)
            self.rows.preempted.remove(sequence)
            self.rows.start(sequence)  # before anything can fail, so that `fail_all` finds it
        return resumed, budget

    def _open_prompts(self, inputs: list[NewTokens], budget: int) -> list[Prompt]:
        """Allocate blocks for prompts to prefill now; leaves room for at least one completion of each."""
        opened, self._no_blocks = [], False
        rows, reserved, taken = self.rows.free, 0, Counter[str]()
        self.rows.waiting = deque(sorted(self.rows.waiting, key=self._turns.had))
        may_begin = self.rows.may_begin()
        waiting = [prompt for prompt in self.rows.waiting if tenant_of(prompt) in may_begin]
        due = self._turns.due((*self.rows.running, *waiting[:1]))
        for prompt in waiting:
            if rows <= 0:
                break
            left = min(rows, self.rows.left(prompt) - taken[tenant_of(prompt)])
            if left <= 0 or not (prompt.blocks or tenant_of(prompt) in due):
                continue
            if not prompt.blocks:
                more = reserved + bool(inputs or self.rows.running)
                begin = functools.partial(self.blocks.begin, prompt, more, budget if inputs else None)
                # exceeds this tick's token budget: preempting others would not help
                short = bool(inputs) and len(prompt.request.prompt_ids) > budget
                known = begin() if short else self.rows.with_room(prompt, begin, more)
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
        may_begin = self.rows.may_begin()
        able = [prompt for prompt in self.rows.waiting if prompt.blocks and tenant_of(prompt) in may_begin]
        due, most = self._turns.due(able), self._turns.rows
        for prompt in [prompt for prompt in able if tenant_of(prompt) in due]:
            while (
                prompt.waiting
                and prompt.blocks
                and self.rows.free > 0
                and self.rows.left(prompt) > 0
                and len(born) < most
            ):
                last_logits = prompt.logits
                fork = functools.partial(self.blocks.fork, prompt, alone=not self.rows.running)
                sequence = self.rows.with_room(prompt, fork)
                if sequence is None:
                    break
                self.rows.start(sequence)  # before the next call can fail, so that `fail_all` finds it
                born.append(sequence)
                logits.append(last_logits)
            if not prompt.waiting:
                self.rows.waiting.remove(prompt)
                self._release_prompt(prompt)
        if born:
            self.runner.sample(born, torch.cat(logits))
        return born

    def _release_prompt(self, prompt: Prompt) -> None:
        self.blocks.give_back(prompt)
        prompt.logits = None

    def _settle(self, touched: Sequence[SampledSequence]) -> None:
        """Deliver new tokens of streams, and remove finished sequences from the batch."""
        for sequence in touched:
            if sequence.finish is not None:
                self._end(sequence, sequence.finish)
            elif sequence.prompt.request.stream:
                sequence.prompt.emit(sequence.chunk(self.runner.text))
        self.rows.drop_finished()

    def _end(self, sequence: SampledSequence, reason: FinishReason) -> None:
        sequence.finish = reason
        self._constrained -= sequence.grammar is not None
        if self.drafts is not None and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.drafts.keep(sequence)
        if sequence.prompt.request.episodes and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.kept.keep(sequence)
        self.blocks.give_back(sequence)
        sequence.prompt.emit(sequence.chunk(self.runner.text))


def _decode(decoder: Decoder, running: list[SampledSequence], spare: int) -> list[int]:
    """Decode a token for each sequence, plus accepted drafts; returns the rows that each used.

    At most `spare` rows are drafts.
    """
    drafts: list[list[int]] = [[] for _ in running]
    begun = time.thread_time()  # CPU time, independent of other processes
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


def _next_tokens(item: SampledSequence, draft: Sequence[int]) -> NewTokens:
    ids = [item.tokens[-1], *draft]
    return NewTokens(item.prompt.weights, ids, item.length - 1, item.blocks, item.slot, len(ids))


def _named(prompt: Prompt, names: set[str]) -> bool:
    return prompt.request.id in names or prompt.request.job in names


def _adapter_order(sequence: SampledSequence) -> tuple[str, int]:
    adapter = sequence.prompt.request.adapter
    return ("", -1) if adapter is None else (adapter.name, adapter.version)


class _TickTurns:
    """Chooses the tenants that a tick works for, and limits its time while several are active."""

    def __init__(self, turns: TenantTurns, rows: int, tokens: int) -> None:
        """A tick decodes at most `rows` rows and prefills at most `tokens` tokens."""
        self._turns, self._rows, self._tokens = turns, rows, tokens
        self._reading, self._decoding, self._ticks = Cost(), Cost(), 0

    def now(self) -> float:
        """Seconds, by the clock of the turns."""
        return self._turns.clock()

    @property
    def company(self) -> bool:
        """Whether several tenants use the device."""
        return self._turns.company

    @property
    def tokens(self) -> int:
        """Most tokens to prefill in this tick."""
        return self._reading.most(self._tokens) if self.company else self._tokens

    @property
    def rows(self) -> int:
        """Most rows to decode, or completions to begin, in this tick."""
        return self._decoding.most(self._rows) if self.company else self._rows

    def come(self, there: Iterable[Prompt | SampledSequence]) -> None:
        """Report the tenants that have work."""
        self._turns.come(map(tenant_of, there), WAITS)

    def can_go_on(self, items: Iterable[Prompt | SampledSequence]) -> None:
        """Report the tenants of items that the next tick could serve."""
        self._turns.come(map(tenant_of, items), DECODES)

    def had(self, item: Prompt | SampledSequence) -> float:
        """Device seconds that the item's tenant has used, divided by its share; tenants with less come first."""
        return self._turns.had(tenant_of(item))

    def due(self, items: Iterable[Prompt | SampledSequence]) -> set[str]:
        """The tenants among these whose turn it is."""
        return self._turns.due(map(tenant_of, items))

    def chosen(self, running: Sequence[SampledSequence]) -> set[SampledSequence]:
        """The sequences that get a token in this tick: those of tenants whose turn it is, the longest waiting first."""
        due = self.due(running)
        chosen = [item for item in running if tenant_of(item) in due]
        if self.company:
            chosen.sort(key=lambda item: (self.had(item), item.tick))
            del chosen[self.rows :]
        self._ticks += 1
        for item in chosen:
            item.tick = self._ticks
        return set(chosen)

    def read(self, begun: float, parts: Iterable[tuple[Prompt, int]], tokens: int) -> Counter[str]:
        """Charge a prefill of `tokens` tokens by its parts; returns microseconds by job."""
        spent = self.now() - begun
        if tokens:
            self._reading.add(tokens, spent)
        return self._turns.charge(spent, [(payer_of(prompt.request), part) for prompt, part in parts])

    def masked(self, payer: Payer, seconds: float) -> Counter[str]:
        """Charge a mask of a grammar; returns microseconds by job."""
        return self._turns.charge(seconds, [(payer, 1)])

    def spare(self, n_rows: int) -> int:
        """Number of rows that a tick may have in addition to `n_rows`."""
        return max(0, (self.rows if self.company else 2 * self._rows + 32) - n_rows)

    def decoded(self, begun: float, running: Sequence[SampledSequence], rows: Sequence[int]) -> Counter[str]:
        """Charge sequences by their rows; returns microseconds by job."""
        spent = self.now() - begun
        if running:
            self._decoding.add(sum(rows), spent)
        return self._turns.charge(
            spent, [(payer_of(item.prompt.request), n) for item, n in zip(running, rows, strict=True)]
        )
