"""Continuous batching on the embedded base: admission, prefill, decode, preemption. Synchronous; one tick at a time.

A tick prefills a part of what can be admitted, then decodes one token for every running sequence. Sharing a tick affects
speed, never tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from motet.core.tenant_turns import TenantTurns
from motet.core.types import AdapterRef, FinishReason
from motet.model.host_cache import HostCache
from motet.model.kv_cache import KVCache
from motet.model.lora_model import LoraModel
from motet.rollout.admission import Admission
from motet.rollout.batch_rows import BatchRows
from motet.rollout.block_allocator import BlockAllocator
from motet.rollout.decode_steps import AheadExecutor, Executor, Steps, SynchronousSteps
from motet.rollout.grammars import Grammars
from motet.rollout.model_runner import runner_for
from motet.rollout.pipelined_steps import PipelinedSteps
from motet.rollout.prefix_cache import PrefixCache
from motet.rollout.sequences import Prompt, SampledSequence, adapter_order_of, can_step
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
        grammars: Grammars | None = None,
        executor: Executor | None = None,
    ) -> None:
        """At most `kept_blocks` KV cache blocks stay allocated between turns of episodes; 0 keeps none.

        Preempted and evicted sequences are copied to host memory, up to `host_bytes`.
        `executor` computes instead of the base's modules; it may run one step ahead, if the base has no states.
        """
        self.cache = cache
        self.host = HostCache(cache, host_bytes)
        self.kept = PrefixCache(cache, self.host, kept_blocks, stateful=bool(base.stateful))
        self.blocks = BlockAllocator(cache, self.host, self.kept)
        self.runner = runner_for(base, cache)
        computes, text = executor or self.runner, self.runner.text
        self._steps: Steps
        if isinstance(computes, AheadExecutor) and not base.stateful:
            self._steps = PipelinedSteps(computes, base.info, cache, self.blocks, text, max_rows=max_rows)
        else:
            self._steps = SynchronousSteps(computes, text)
        self.rows = BatchRows(cache, self.blocks, max_rows, self.land)
        self.spent: Counter[str] = Counter()
        """Microseconds by job; the reader resets it."""
        self._turns = TickTurns(turns or TenantTurns(), max_rows, prefill_tokens)
        self._admission = Admission(computes, self.rows, self.blocks, self._turns, text)
        self.grammars = grammars or Grammars(base.info)
        self._constrained = 0  # open sequences with a grammar
        self.stuck = False
        """Whether the last tick could do nothing because it waits for masks of grammars."""
        self._leaving: list[SampledSequence] = []  # ended, with a token in flight that is dropped
        self._settled = False  # whether the next tick can only step the same rows again

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
        return not (self.rows.waiting or self.rows.preempted or self.rows.running or self._steps.in_flight)

    def add(self, prompt: Prompt) -> None:
        """Queue a request; completions are admitted in order of arrival."""
        self._constrained += sum(item.grammar is not None for item in prompt.waiting)
        self.rows.waiting.append(prompt)
        self._settled &= self.rows.free <= 0 and self._turns.has_work(prompt.tenant)

    def abort(self, matches: set[str]) -> None:
        """End the open completions of these requests (ids or job names); they keep their tokens.

        Kept sequences of these episodes are dropped.
        """
        self.pause()
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
        self._steps.land()

    def forget_version(self, adapter: AdapterRef) -> None:
        """Drop the kept sequences of a version that nobody asks for any more."""
        self.pause()
        self.kept.forget_version(adapter)

    def pause(self) -> None:
        """Wait for the steps in flight, between ticks."""
        self._turns.begin()
        self.land()

    @torch.inference_mode()
    def land(self) -> bool:
        """Wait for the steps in flight and settle what they give; returns whether there were any."""
        self._settled = False
        if not self._steps.in_flight:
            return False
        landed = self._steps.land()
        self._settle(landed.touched)
        self.spent += self._turns.decoded(landed.parts)
        return True

    def fail_all(self) -> list[Prompt]:
        """Drop everything after a device error; returns the prompts whose callers must be informed."""
        prompts = {id(item.prompt): item.prompt for item in [*self.rows.running, *self.rows.preempted]}
        prompts |= {id(prompt): prompt for prompt in self.rows.waiting}
        self._steps.drop()
        for item in [*self.rows.running, *self.rows.preempted, *self._leaving]:
            self.blocks.give_back(item)
        for prompt in self.rows.waiting:
            self._admission.release(prompt)
        self.kept.clear()
        self.rows.clear()
        self._leaving.clear()
        self._constrained, self._settled = 0, False
        return list(prompts.values())

    @torch.inference_mode()
    def tick(self) -> None:
        """Admit what fits, prefill a part of it, then decode one token for sequences of the tenants whose turn it is.

        While several tenants use the device, a tick is short: it prefills or decodes, and only for a limited time.
        """
        if self._settled and not self._turns.company and self._again():
            return
        self._turns.come((*self.rows.waiting, *self.rows.preempted, *self.rows.running))
        self._begin_masks()
        before = self.prefilled_tokens
        self._turns.begin()
        born, read = self._admission.admit(in_flight=self._steps.in_flight)
        self._settle(born)
        self.spent += self._turns.read(read, self.prefilled_tokens - before)
        running: list[SampledSequence] = []
        if self.prefilled_tokens == before or not self._turns.company:
            self._turns.begin()
            running = sorted(self.rows.grow(self._turns.chosen(can_step(self.rows.running))), key=adapter_order_of)
            landed = self._steps.step(running)
            self._admission.stepped(running)
            self._settle(landed.touched)
            self.spent += self._turns.decoded(landed.parts)
        self.stuck = self._begin_masks() and not (running or read or self._steps.in_flight)
        self._turns.can_go_on((*self._admission.able(), *can_step(self.rows.running)))
        all_run = len(running) == len(self.rows.running) and not (self._constrained or self.rows.preempted)
        self._settled = all_run and not (self.rows.waiting and self.rows.free > 0)

    def _again(self) -> bool:
        """Step the rows of the last tick again, which is all that there is to do; False if they need more."""
        self._turns.begin()
        if (landed := self._steps.again()) is None:
            return False
        self._turns.stay()
        if landed.touched or self._leaving:
            self._settle(landed.touched)
        self.spent += self._turns.decoded(landed.parts)
        self._settled &= not any(item.finish for item in landed.touched)
        return True

    def _begin_masks(self) -> bool:
        """Charge and begin the masks of the next tokens; returns whether some are awaited."""
        for payer, seconds in self.grammars.spent():
            self.spent += self._turns.masked(payer, seconds)
        items = (*self.rows.running, *self.rows.preempted) if self._constrained else ()
        return self.grammars.begin((item.grammar, item.prompt.payer) for item in items if item.grammar)

    def _settle(self, touched: Sequence[SampledSequence]) -> None:
        """Deliver new tokens of streams, remove finished sequences from the batch, and free what no step writes."""
        landed = [item for item in self._leaving if not item.in_flight]
        self._leaving = [item for item in self._leaving if item.in_flight]
        for sequence in landed:
            self._free(sequence)
        for sequence in touched:
            if sequence.finish is not None:
                self._end(sequence, sequence.finish)
            elif (request := sequence.prompt.request).stream and sequence.due(request.chunk_tokens):
                sequence.prompt.emit(sequence.chunk(self.runner.text))
        if any(item.finish for item in touched):
            self.rows.drop_finished()

    def _end(self, sequence: SampledSequence, reason: FinishReason) -> None:
        sequence.finish = reason
        self._constrained -= sequence.grammar is not None
        if sequence.in_flight:
            self._leaving.append(sequence)
        else:
            self._free(sequence)
        sequence.prompt.emit(sequence.chunk(self.runner.text))

    def _free(self, sequence: SampledSequence) -> None:
        """Keep or free the blocks of a sequence that has ended, and that no step in flight reads or writes."""
        if sequence.prompt.request.episodes and sequence.finish in (FinishReason.STOP, FinishReason.LENGTH):
            self.blocks.trim(sequence, sequence.length - 1)
            self.kept.keep(sequence)
        self.blocks.give_back(sequence)


def _named(prompt: Prompt, names: set[str]) -> bool:
    return prompt.request.id in names or prompt.request.job in names
