"""Decode steps that run one step ahead of the host.

The device goes from tokens to tokens, so the host launches a step before it reads the tokens of the one before. It sees
an end one step late: a row that has ended computes one token more, which is dropped, and its blocks and adapter stay as
they are until that step has landed. Rows with grammars go in steps of their own, which are launched before those of other
rows and read behind them, so that the next masks are computed while other rows' step runs.

Legend: N rows of a step, R rows of the table, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from motet.core.model_info import ModelInfo
from motet.core.stops import Decode
from motet.core.tenant_turns import Payer
from motet.core.types import BoolArray
from motet.model.device_steps import GROUPS, MASKED, PLAIN, DeviceStep, DrawnTokens, Flight
from motet.model.kv_cache import KVCache
from motet.model.lora import AdapterWeights
from motet.rollout.block_allocator import BlockAllocator
from motet.rollout.decode_steps import AheadExecutor, Landed
from motet.rollout.sequences import SampledSequence
from motet.rollout.step_table import StepTable


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows of a group's steps, as long as they stay the same."""

    sequences: Sequence[SampledSequence]
    rows_N: NDArray[np.int64]
    weights: Sequence[AdapterWeights | None]
    looked_at_N: BoolArray
    """Whether every token is looked at: for stop strings, a grammar, or a stream."""
    append_tokens: Sequence[Callable[[int], None]]
    append_logprobs: Sequence[Callable[[float], None]]
    truncates: bool
    """Whether some row asks for top-k, top-p or min-p."""


_NEVER = 2**40
_NOBODY = _Rows((), np.empty(0, np.int64), (), np.empty(0, np.bool_), (), (), truncates=False)


class PipelinedSteps:
    """`Steps` of an executor that runs ahead."""

    def __init__(
        self,
        executor: AheadExecutor,
        info: ModelInfo,
        cache: KVCache,
        blocks: BlockAllocator,
        text: Decode,
        *,
        max_rows: int,
    ) -> None:
        """At most `max_rows` sequences run."""
        self._executor, self._blocks, self._text, self._block_size = executor, blocks, text, cache.block_size
        n_rows = 2 * max_rows  # as many may have ended in the step in flight
        self._table = StepTable(n_rows, min(cache.n_blocks, -(-info.max_positions // cache.block_size)))
        executor.hold(self._table)
        self._row: dict[SampledSequence, int] = {}
        self._free = list(range(n_rows))[::-1]
        self._held: list[list[int]] = [[] for _ in range(n_rows)]
        """The list of blocks of each row: a sequence that was preempted has another."""
        self._reached_R = np.zeros(n_rows, np.int64)
        """Tokens of prompt and completion, those in flight included."""
        self._last_R = np.zeros(n_rows, np.int64)
        """Tokens of prompt and completion after which a row is full."""
        self._room_R = np.zeros(n_rows, np.int64)
        """Tokens that a row's blocks hold."""
        self._known_R = np.zeros(n_rows, np.int64)
        """Tokens of prompt and completion that the host knows."""
        self._gone_R = np.zeros(n_rows, np.bool_)
        """Whether a row has ended and its token in flight is dropped."""
        self._looked_at_R = np.zeros(n_rows, np.bool_)
        self._truncates_R = np.zeros(n_rows, np.bool_)
        self._begun_R = np.zeros(n_rows, np.int64)
        """Tokens of the prompt."""
        self._chunk_R = np.full(n_rows, _NEVER)
        """Tokens of a chunk of a stream; at its end, a row is looked at."""
        self._payer_R = np.zeros(n_rows, np.int64)
        """Index in `_payers`."""
        self._payers: dict[Payer, int] = {}
        """Those of rows, and some whose rows have left (see `_forget_payers`)."""
        self._stops_V = np.zeros(info.vocab_size, np.int32)
        """How many rows' completions each token ends."""
        self._groups = [_NOBODY] * GROUPS
        self._flights: list[tuple[Flight, _Rows]] = []

    @property
    def in_flight(self) -> bool:
        """Whether tokens of a step were not read."""
        return bool(self._flights)

    def step(self, running: Sequence[SampledSequence]) -> Landed:
        """Launch a step of these sequences; returns what the steps before have given."""
        n_landing = len(self._flights)
        for sequence in [item for item in self._row if not item.blocks]:
            self._leave(sequence)
        if len(self._payers) > 2 * len(self._held):
            self._forget_payers()
        for group in (MASKED, PLAIN):
            chosen = [item for item in running if (item.grammar is not None) == (group == MASKED)]
            if chosen:
                self._take_rows(group, chosen)
                self._launch(group)
                n_landing += group == MASKED
            else:
                self._groups[group] = _NOBODY
        return self._land(n_landing)

    def again(self) -> Landed | None:
        """Launch a step of the same rows; None if some find no block for it, or have all their tokens."""
        if len(self._flights) != 1 or not self._have_room(self._groups[PLAIN]):
            return None
        self._launch(PLAIN)
        return self._land(1)

    def land(self) -> Landed:
        """Wait for all steps, and forget rows that have ended; returns what the steps have given."""
        return self._land(len(self._flights))

    def drop(self) -> None:
        """After a device error: wait for what is in flight, whatever becomes of it, and forget all rows."""
        while self._flights:
            with contextlib.suppress(Exception):  # the error that was reported already
                self._wait()
        for sequence in list(self._row):
            self._leave(sequence)
        self._groups = [_NOBODY] * GROUPS
        self._table.forget()  # changes of a launch that failed may not have arrived

    def _wait(self) -> tuple[DrawnTokens, _Rows]:
        """Wait for the first flight, which is gone whatever becomes of it."""
        flight, rows = self._flights.pop(0)
        for item in rows.sequences:
            item.in_flight -= 1
        return flight.tokens(), rows

    def _take_rows(self, group: int, chosen: list[SampledSequence]) -> None:
        """Make these sequences the rows of the group's next steps."""
        rows, same = self._row, self._groups[group].sequences == chosen
        for sequence in chosen:
            if (row := rows.get(sequence)) is None or self._held[row] is not sequence.blocks:
                if row is not None:  # it was preempted, and came back
                    self._leave(sequence)
                self._join(sequence)
                same = False
        if not same:
            self._groups[group] = self._compose(chosen)
            self._table.order(group, self._groups[group].rows_N)
        n_blocks_N = np.array([len(item.blocks) for item in chosen])
        room_N = self._room_R[self._groups[group].rows_N]
        self._grow(self._groups[group], np.nonzero(n_blocks_N * self._block_size > room_N)[0].tolist())

    def _compose(self, chosen: list[SampledSequence]) -> _Rows:
        rows_N = np.array([self._row[item] for item in chosen], np.int64)
        return _Rows(
            chosen,
            rows_N,
            tuple(item.prompt.weights for item in chosen),
            self._looked_at_R[rows_N],
            [item.tokens.append for item in chosen],
            [item.logprobs.append for item in chosen],
            bool(self._truncates_R[rows_N].any()),
        )

    def _join(self, sequence: SampledSequence) -> None:
        row, sampling = self._free.pop(), sequence.prompt.request.sampling
        self._row[sequence], self._held[row] = row, sequence.blocks
        self._reached_R[row] = self._known_R[row] = sequence.length
        self._last_R[row] = sequence.most
        self._room_R[row] = len(sequence.blocks) * self._block_size
        self._gone_R[row], self._looked_at_R[row] = False, _is_looked_at(sequence)
        self._begun_R[row], self._truncates_R[row] = sequence.n_prompt, sampling.truncates
        self._chunk_R[row] = sequence.prompt.request.chunk_tokens if sequence.prompt.request.stream else _NEVER
        self._payer_R[row] = self._payers.setdefault(sequence.prompt.payer, len(self._payers))
        self._stops_V[self._stop_ids(sequence)] += 1
        self._table.join(row, sequence)

    def _grow(self, rows: _Rows, places: Sequence[int]) -> None:
        """Tell the table of new blocks of some rows."""
        for place in places:
            row, blocks = int(rows.rows_N[place]), rows.sequences[place].blocks
            self._table.grow(row, blocks, int(self._room_R[row]) // self._block_size)
            self._room_R[row] = len(blocks) * self._block_size

    def _leave(self, sequence: SampledSequence) -> None:
        self._free.append(self._row.pop(sequence))
        self._stops_V[self._stop_ids(sequence)] -= 1

    def _forget_payers(self) -> None:
        """Forget payers that no row and no flight has."""
        sequences = [*self._row, *(item for _, rows in self._flights for item in rows.sequences)]
        new = {payer: index for index, payer in enumerate(dict.fromkeys(item.prompt.payer for item in sequences))}
        self._payer_R = np.array([new.get(payer, 0) for payer in self._payers], np.int64)[self._payer_R]
        self._payers = new

    def _stop_ids(self, sequence: SampledSequence) -> list[int]:
        return [id_ for id_ in set(sequence.prompt.request.sampling.stop_token_ids) if 0 <= id_ < len(self._stops_V)]

    def _have_room(self, rows: _Rows) -> bool:
        """Give rows blocks for the next step; False if some find none, or have all their tokens."""
        reached_N = self._reached_R[rows.rows_N]
        if (reached_N >= self._last_R[rows.rows_N]).any():
            return False
        full = np.nonzero(reached_N > self._room_R[rows.rows_N])[0].tolist()
        if full and not self._blocks.grow([rows.sequences[place] for place in full]):
            return False
        self._grow(rows, full)
        return True

    def _launch(self, group: int) -> None:
        rows = self._groups[group]
        masks_NV = None
        if group == MASKED:
            masks_NV = np.stack([item.grammar.allowed() for item in rows.sequences if item.grammar is not None])
        n_blocks = int(self._room_R[rows.rows_N].max()) // self._block_size
        changes_C2 = self._table.take_changes()
        step = DeviceStep(group, len(rows.sequences), changes_C2, rows.weights, n_blocks, rows.truncates, masks_NV)
        self._flights.append((self._executor.launch(step), rows))
        self._reached_R[rows.rows_N] += 1
        for item in rows.sequences:
            item.in_flight += 1

    def _land(self, n_flights: int) -> Landed:
        """Wait for the first flights, and append the tokens of rows that had not ended."""
        touched: list[SampledSequence] = []
        parts: list[tuple[Payer, int]] = []
        for _ in range(n_flights):
            drawn, rows = self._wait()
            counts_N = ~self._gone_R[rows.rows_N]
            counted = rows.rows_N[counts_N]
            self._known_R[counted] += 1
            looked_at_N = rows.looked_at_N | ~drawn.usable_N | (self._known_R[rows.rows_N] >= self._last_R[rows.rows_N])
            looked_at_N |= (self._known_R - self._begun_R)[rows.rows_N] % self._chunk_R[rows.rows_N] == 0
            looked_at_N |= self._stops_V[np.where(drawn.usable_N, drawn.tokens_N, 0)] > 0
            tokens, logprobs = drawn.tokens_N.tolist(), drawn.logprobs_N.tolist()
            for place in np.nonzero(counts_N & ~looked_at_N)[0].tolist():
                rows.append_tokens[place](tokens[place])
                rows.append_logprobs[place](logprobs[place])
            for place in np.nonzero(counts_N & looked_at_N)[0].tolist():
                sequence = rows.sequences[place]
                sequence.append(tokens[place], logprobs[place], bool(drawn.usable_N[place]), self._text)
                touched.append(sequence)
                self._gone_R[rows.rows_N[place]] = sequence.finish is not None
            n_rows = np.bincount(self._payer_R[counted], minlength=len(self._payers)).tolist()
            parts += [(payer, n) for payer, n in zip(self._payers, n_rows, strict=True) if n]
        if not self._flights:  # nothing is held for a step
            for sequence in [item for item in self._row if item.finish is not None]:
                self._leave(sequence)
            self._groups = [_NOBODY] * GROUPS
        return Landed(touched, parts)


def _is_looked_at(item: SampledSequence) -> bool:
    request = item.prompt.request
    each = request.stream and request.chunk_tokens == 1
    return item.grammar is not None or each or bool(request.sampling.stop)
