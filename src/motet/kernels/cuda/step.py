"""Decode steps as one graph, from tokens to tokens.

A graph reads its rows' records, computes them and the head, draws, and writes tokens, positions and numbers of drawn
tokens back. So the host only sends what changes otherwise: records of rows that join, blocks, adapters, masks.

Legend: N rows, V vocabulary, W words of 32 bits, L entries of a block table, C changed entries.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import triton  # type: ignore[import-untyped, unused-ignore]
from numpy.typing import NDArray
from torch import Tensor

from motet.core.types import BoolArray
from motet.kernels.cuda.adapters import AdapterTables, Places, most_tiles, widths_of
from motet.kernels.cuda.attention import PIECE, CudaAttention, CudaPass
from motet.kernels.cuda.kernels import step as kernels
from motet.kernels.cuda.launches import launch
from motet.kernels.cuda.layers import DecoderPlan
from motet.kernels.cuda.product_backends import ROWS_OF_DECODING
from motet.kernels.cuda.sampling import Drawn, Head, RowSettings, Truncation, draw
from motet.kernels.cuda.step_memory import AdapterSlots, Changes, StepMemory
from motet.model.accelerator import Recorder, WorkQueue, cause_of, device_of, kernel_failures, reason_of
from motet.model.arithmetic import round_up
from motet.model.attention import AttentionBackend
from motet.model.device_steps import BLOCKS, GROUPS, MASKED, DeviceStep, DrawnTokens, StepLayout
from motet.model.kv_cache import KVCache
from motet.model.lora import AdapterWeights
from motet.model.lora_model import LoraModel

_log = logging.getLogger(__name__)

_KEPT = 32
"""Most cached graphs; the least recently used is dropped first."""
_FEW = 8
"""Adapters up to which a graph has room for no more tiles, so that fewer programs are launched in vain."""
_CHANGE = 16
"""Bytes of a change."""
_LEAST = 1 << 14
"""Bytes of a buffer for changes and masks."""
_BYTES = 13
"""Of a row's result: token, logprob, usable."""


class StepPasses(Protocol):
    """What a step asks of a base's kernels (see `CudaBase`)."""

    base: LoraModel
    plan: DecoderPlan
    places: Places
    attention: AttentionBackend

    def decode(self, token_ids_T: Tensor, attention: CudaPass, tables: AdapterTables) -> Tensor:
        """Final hidden states, by launches only."""
        ...

    def raw_logits(self, hidden_ND: Tensor) -> Tensor:
        """Output of the head's product."""
        ...


@dataclass(frozen=True)
class _Shape:
    """What graphs differ by."""

    group: int
    n_rows: int
    n_tiles: int
    n_entries: int
    """Of a block table."""
    truncates: bool
    widths: tuple[int, ...] | None
    """Bounds for the products with A; None if no row has an adapter."""


@dataclass
class _Graph:
    """A step of one shape, and the memory that it writes."""

    own: StepPasses
    memory: StepMemory
    shape: _Shape
    attention: CudaPass
    tables: AdapterTables
    settings: RowSettings
    truncation: Truncation
    """Of each row; read if the shape says so."""
    token_N: Tensor
    """int64; the rows' last tokens."""
    result: Tensor
    """uint8: tokens int64 [N], logprobs fp32 [N], usable bool [N]."""
    replay: Callable[[], Tensor] = field(init=False)
    """Runs the step; returns the result."""

    def __post_init__(self) -> None:
        self.replay = self.compute

    @classmethod
    def of(
        cls, own: StepPasses, cache: KVCache, memory: StepMemory, head: Head, shape: _Shape, allowed_NW: Tensor | None
    ) -> _Graph:
        """Allocate its memory."""
        n_rows, backend, device = shape.n_rows, own.attention, own.base.device
        assert isinstance(backend, CudaAttention)
        integers, longs, floats = (
            functools.partial(torch.zeros, dtype=dtype, device=device)
            for dtype in (torch.int32, torch.int64, torch.float32)
        )
        spans = np.stack([np.arange(n_rows), np.ones(n_rows), np.zeros(n_rows)], 1).astype(np.int64)
        table = integers(n_rows, shape.n_entries)
        truncation = Truncation(integers(n_rows), floats(n_rows), floats(n_rows))
        settings = RowSettings(
            head, floats(n_rows), longs(n_rows), longs(n_rows), allowed_NW, truncation if shape.truncates else None
        )
        return cls(
            own, memory, shape, CudaPass(backend, spans, integers(n_rows), longs(n_rows), table, cache),
            memory.tables(shape.group, n_rows, shape.n_tiles, shape.widths),
            settings, truncation, longs(n_rows), torch.zeros(n_rows * _BYTES, dtype=torch.uint8, device=device),
        )  # fmt: skip

    def compute(self) -> Tensor:
        """The step, by launches only."""
        own, shape, attention, settings = self.own, self.shape, self.attention, self.settings
        memory, cut = self.memory, self.truncation
        rows = memory.numbers, memory.count(shape.group), memory.layout.order_at(shape.group), memory.layout.width
        assert attention.cache is not None and settings.position_N is not None
        with device_of(self.token_N):
            launch(
                kernels.read_rows, [shape.n_rows], *rows, self.token_N, attention.positions_T, settings.position_N,
                settings.key_N, settings.temperature_N, cut.top_k_N, cut.top_p_N, cut.min_p_N, attention.tables_SL,
                shape.n_entries, attention.cache.scrap_block,
                KV_BLOCK=attention.backend.block_size, ENTRIES=16, num_warps=1,
            )  # fmt: skip
            attention.calls.clear()
            attention.place_rows()
            raw_NV = own.raw_logits(own.decode(self.token_N, attention, self.tables))
            drawn = Drawn(*_parts(self.result))
            draw(raw_NV, settings, drawn)
            launch(kernels.write_rows, [triton.cdiv(shape.n_rows, 128)], *rows, drawn.token_N, ROWS=128)
        return self.result


@dataclass
class _Route:
    """The adapters of a group's rows."""

    weights: Sequence[AdapterWeights | None] | None = None
    """As the last step had them; None if nothing is in flight."""
    slots: frozenset[int] = frozenset()


@dataclass
class _Buffer:
    """Memory that is being copied to the device."""

    host: Tensor = field(default_factory=functools.partial(torch.empty, 0, dtype=torch.uint8))
    wait: Callable[[], None] | None = None
    """Waits for the step that reads it."""


@dataclass
class _Flight:
    """A step that was begun."""

    steps: CudaSteps
    n_rows: int
    host: Tensor
    """The step's result."""
    wait: Callable[[], None]

    def tokens(self) -> DrawnTokens:
        """See `Flight`."""
        try:
            self.wait()
            return DrawnTokens(*(part[: self.n_rows].numpy().copy() for part in _parts(self.host)))
        finally:
            self.steps.landed(self.host)


class CudaSteps:
    """Implements `DeviceSteps`."""

    def __init__(
        self, own: StepPasses, cache: KVCache, queue: WorkQueue | None = None, recorder: Recorder | None = None
    ) -> None:
        self._own, self._cache, self._device = own, cache, own.base.device
        self._queue = queue or WorkQueue(self._device)
        self._recorder = recorder or Recorder(self._device)
        self._records = True
        self._graphs: dict[_Shape, _Graph] = {}
        self._routes = [_Route() for _ in range(GROUPS)]
        self._widths: tuple[int, ...] = ()
        """Bounds for the adapters so far."""
        self._unsent: list[Changes] = []
        self._buffers = _Buffer(), _Buffer()
        self._results: list[Tensor] = []
        """Host memory of results that were read."""
        self._n_flying = 0

    def hold(self, layout: StepLayout) -> None:
        """See `DeviceSteps`."""
        own = self._own
        self._memory = StepMemory(layout, own.places, _rows_of(layout.n_rows), self._device)
        self._slots = AdapterSlots(layout.n_rows)
        self._head = Head(own.base.changes, len(own.plan.head.weight_NK), self._device)

    @functools.cached_property
    def _allowed_NW(self) -> Tensor:
        """Bits of ids that grammars allow, of the rows of a masked step."""
        n_rows, n_words = _rows_of(self._memory.layout.n_rows), -(-self._head.n_ids // 32)
        return torch.zeros(n_rows, n_words, dtype=torch.int32, device=self._device)

    @torch.inference_mode()
    def launch(self, step: DeviceStep) -> _Flight:
        """See `DeviceSteps`. What failed is sent again with the next step."""
        if len(step.changes_C2):
            self._unsent.append(step.changes_C2.copy())
        try:
            if step.weights is not self._routes[step.group].weights:
                self._route(step.group, step.weights)
            graph = self._graph(self._shape(step))
            changes_C2, words_NW = self._changes(), None if step.masks_NV is None else _words(step.masks_NV)
            sent, buffer = self._written(changes_C2, words_NW)
            host = self._result_memory(len(graph.result))
            wait = self._queue.begin(functools.partial(self._run, graph, sent, len(changes_C2), host))
        except BaseException:
            self._slots.forget()
            self._routes = [_Route() for _ in range(GROUPS)]
            self._buffers = _Buffer(), _Buffer()  # a copy may have begun, and nobody can wait for it
            raise
        if buffer is not None:
            buffer.wait = wait
        self._unsent.clear()
        self._n_flying += 1
        return _Flight(self, step.n_rows, host, wait)

    def landed(self, host: Tensor) -> None:
        """Take back the memory of a result. What is in no step any more is not kept."""
        self._results.append(host)
        self._n_flying -= 1
        if not self._n_flying:
            self._routes = [_Route() for _ in range(GROUPS)]

    def _route(self, group: int, weights: Sequence[AdapterWeights | None]) -> None:
        """Give the rows' adapters slots, and the rows tiles."""
        self._routes[group] = _Route()
        wanted = {id(each): each for each in weights if each is not None and each.layout.fused}
        kept = frozenset().union(*(route.slots for route in self._routes))
        slots, new = self._slots.place(wanted, kept)
        self._unsent += [self._memory.adapter(slot, each) for slot, each in new]
        slots_N = np.full(_rows_of(len(weights)), -1, np.int32)
        slots_N[: len(weights)] = [slots.get(id(each), -1) for each in weights]
        self._unsent.append(self._memory.rows(group, len(weights), slots_N))
        if new:
            bounds = zip(widths_of(self._own.places, wanted.values()), self._widths or (0,) * 4, strict=True)
            self._widths = tuple(max(bound) for bound in bounds)
            self._graphs = {
                shape: graph for shape, graph in self._graphs.items() if shape.widths in (None, self._widths)
            }
        self._routes[group] = _Route(weights, frozenset(slots.values()))

    def _shape(self, step: DeviceStep) -> _Shape:
        route, n_rows = self._routes[step.group], _rows_of(step.n_rows)
        n_slots = len(route.slots)
        room = 0 if not n_slots else _FEW if n_slots <= _FEW else n_rows
        few = min(PIECE // self._cache.block_size, self._most_blocks)
        n_entries = few if step.n_blocks <= few else self._most_blocks
        widths = self._widths if n_slots else None
        return _Shape(step.group, n_rows, most_tiles(n_rows, room), n_entries, step.truncates, widths)

    @property
    def _most_blocks(self) -> int:
        return self._memory.layout.width - BLOCKS

    # --- copies to the device -----------------------------------------------------------------------------------------

    def _changes(self) -> Changes:
        """What is to be sent, every index once."""
        if not self._unsent:
            return np.empty((0, 2), np.int64)
        changes_C2 = np.concatenate(self._unsent)[::-1]
        _, firsts = np.unique(changes_C2[:, 0], return_index=True)
        self._unsent = [changes_C2[firsts]]
        return self._unsent[0]

    def _written(self, changes_C2: Changes, words_NW: NDArray[np.int32] | None) -> tuple[Tensor | None, _Buffer | None]:
        """Changes, then masks, as bytes, in the buffer that was not used last, once the step that used it is done."""
        parts = [changes_C2.ravel().view(np.uint8), *([] if words_NW is None else [words_NW.ravel().view(np.uint8)])]
        n_bytes = sum(map(len, parts))
        if not n_bytes:
            return None, None
        self._buffers = self._buffers[::-1]
        buffer = self._buffers[0]
        if buffer.wait is not None:
            buffer.wait()
            buffer.wait = None
        if n_bytes > len(buffer.host):
            buffer.host = self._queue.host_memory(max(_LEAST, 2 * n_bytes))
        sent = buffer.host[:n_bytes]
        np.concatenate(parts, out=sent.numpy())
        return sent, buffer

    def _run(self, graph: _Graph, sent: Tensor | None, n_changes: int, host: Tensor) -> None:
        if sent is not None:
            received, end = self._queue.send(sent), n_changes * _CHANGE
            if n_changes:
                with device_of(received):
                    launch(
                        kernels.write_changes, [triton.cdiv(n_changes, 256)],
                        self._memory.numbers, received[:end].view(torch.int64), n_changes, CHANGES=256,
                    )  # fmt: skip
            if end < len(received):
                words_NW = received[end:].view(torch.int32).view(-1, self._allowed_NW.shape[1])
                self._allowed_NW[: len(words_NW)].copy_(words_NW)
        self._queue.fetch(graph.replay(), host)

    def _result_memory(self, n_bytes: int) -> Tensor:
        for place, host in enumerate(self._results):
            if len(host) == n_bytes:
                return self._results.pop(place)
        self._results.clear()
        return self._queue.host_memory(n_bytes)

    # --- graphs -------------------------------------------------------------------------------------------------------

    def _graph(self, shape: _Shape) -> _Graph:
        graph = self._graphs.pop(shape, None)
        if graph is None:
            graph = _Graph.of(self._own, self._cache, self._memory, self._head, shape, self._allowed_of(shape))
            if self._records and not self._record(graph):
                return graph
        self._graphs[shape] = graph
        while len(self._graphs) > _KEPT:
            del self._graphs[next(iter(self._graphs))]
        return graph

    def _allowed_of(self, shape: _Shape) -> Tensor | None:
        return self._allowed_NW[: shape.n_rows] if shape.group == MASKED else None

    def _record(self, graph: _Graph) -> bool:
        """Record a graph; returns whether it may be kept. A step that cannot be recorded is launched kernel by kernel."""
        head = self._memory.head(graph.shape.group)
        self._unsent.append(self._memory.resend_head(graph.shape.group))
        self._queue.begin(functools.partial(_clear, head))  # the recorder runs the step, of no rows
        try:
            graph.replay = self._recorder.capture(graph.compute, first=not self._graphs)
        except kernel_failures() as error:
            cause = cause_of(error)
            if isinstance(cause, torch.OutOfMemoryError):
                return False
            why = f"decoding steps are not recorded as graphs: {reason_of(cause)}"
            self._own.base.revise(f"slower than it could be: {why}")
            _log.warning("%s", self._own.base.info.notes[-1])
            self._records = False
            self._graphs.clear()
        return True


def _clear(number: Tensor) -> None:
    number.zero_()


def _rows_of(n_rows: int) -> int:
    """Rows of the graph for this many."""
    return next((most for most in ROWS_OF_DECODING if n_rows <= most), round_up(n_rows, 64))


def _words(masks_NV: BoolArray) -> NDArray[np.int32]:
    """Bit i % 32 of word i // 32 stands for id i."""
    packed = np.packbits(masks_NV, axis=1, bitorder="little")
    return np.ascontiguousarray(np.pad(packed, ((0, 0), (0, -packed.shape[1] % 4)))).view(np.int32)


def _parts(result: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, logprobs and usable of a result."""
    n_rows = len(result) // _BYTES
    ends = 8 * n_rows, 12 * n_rows
    dtypes = torch.int64, torch.float32, torch.bool
    parts = result[: ends[0]], result[ends[0] : ends[1]], result[ends[1] :]
    tokens, logprobs, usable = (part.view(dtype) for part, dtype in zip(parts, dtypes, strict=True))
    return tokens, logprobs, usable
