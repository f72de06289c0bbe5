"""Continuous batching on the embedded base: admission, prefill, decode, preemption. Synchronous; one tick at a time.

A tick prefills what can be admitted, then decodes one token for every running sequence. Sharing a tick affects speed,
never tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from motet.core.tenant_turns import TenantTurns
from motet.core.types import FinishReason
from motet.model.host_cache import HostCache
from motet.model.kv_cache import KVCache
from motet.model.lora_model import LoraModel
from motet.rollout.admission import Admission
from motet.rollout.batch_rows import BatchRows
from motet.rollout.block_allocator import BlockAllocator
from motet.rollout.drafts import Drafts, can_draft
from motet.rollout.grammars import Grammars
from motet.rollout.kept import KeptSequences
from motet.rollout.model_runner import ModelRunner
from motet.rollout.sequences import Prompt, SampledSequence, payer_of, tenant_of, waits_for_grammar
from motet.rollout.steps import Steps, SynchronousSteps
from motet.rollout.tick_turns import TickTurns


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
        self._steps: Steps = SynchronousSteps(self.runner, self.blocks, self.runner.text)
        self.rows = BatchRows(cache, self.blocks, max_rows)
        self.spent: Counter[str] = Counter()
        """Microseconds by job; the reader resets it."""
        self._turns = TickTurns(turns or TenantTurns(), max_rows, prefill_tokens)
        self._admission = Admission(self.runner, self.rows, self.blocks, self._turns, self.runner.text)
        self.grammars = grammars or Grammars(base.info)
        self._constrained = 0  # open sequences with a grammar
        self.stuck = False
        """Whether the last tick could do nothing because it waits for masks of grammars."""

    @property
    def prefills(self) -> int:
        """See `Admission`."""
        return self._admission.prefills

    @property
    def prefilled_tokens(self) -> int:
        """See `Admission`."""
        return self._admission.prefilled_tokens

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
            self._admission.release(prompt)
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
            self._admission.release(prompt)
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
        before = self.prefilled_tokens
        self._turns.begin()
        fresh, read = self._admission.admit()
        self._settle(fresh)
        self.spent += self._turns.read(read, self.prefilled_tokens - before)
        running: list[SampledSequence] = []
        if self.prefilled_tokens == before or not self._turns.company:
            self._turns.begin()
            running = sorted(self.rows.grow(self._turns.chosen(self._able())), key=_adapter_order)
            landed = self._steps.step(running, self.drafts, self._turns.spare(len(running)))
            self._settle(landed.sequences)
            self.spent += self._turns.decoded(landed.sequences, landed.rows)
        self.stuck = self._begin_masks() and not (running or read)
        opens = self._admission.opens()
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


def _named(prompt: Prompt, names: set[str]) -> bool:
    return prompt.request.id in names or prompt.request.job in names


def _adapter_order(sequence: SampledSequence) -> tuple[str, int]:
    adapter = sequence.prompt.request.adapter
    return ("", -1) if adapter is None else (adapter.name, adapter.version)
