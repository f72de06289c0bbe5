"""Decoding with CUDA graphs, which are recorded once and replayed: one launch per decoding step instead of thousands.

Values that change from token to token (tokens, positions, cache positions, adapters of rows) are written into fixed
tensors that a graph reads. There is one graph per shape: number of rows, blocks of the longest sequence, and layouts of
the adapters, which are in tables. Unused rows decode a token into a scratch block.

Legend: T rows, N real rows or outputs, V vocabulary, S slots of a table, K inputs, W width of fused layers' A side by
side, R rank.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from motet.model.accelerator import Recorder, cause_of, kernel_failures
from motet.model.arithmetic import round_up
from motet.model.attention import ReplayablePass, Span
from motet.model.kv_cache import KVCache
from motet.model.lora import AdapterLayout, AdapterWeights, FusedLinears
from motet.model.lora_model import LoraModel
from motet.model.lora_products import LoraProducts
from motet.model.routing import SamplerRouting

_log = logging.getLogger(__name__)

_KEPT = 16
"""Most cached graphs; the least recently used is dropped first."""

_STEP = 64
"""Row counts are rounded up to powers of two up to this number, and to its multiples above."""


class AdapterTable:
    """Slots for adapters of one layout. Slot 0 is all zeros: the base alone."""

    def __init__(
        self, layout: AdapterLayout, slots: int, device: torch.device, dtype: torch.dtype, products: LoraProducts
    ) -> None:
        """Allocate memory for `slots` adapters, including slot 0; the layout fits (`LoraProducts.fits_table`)."""
        self.layout = layout
        self.slots = slots
        self.products = products
        self._flat = torch.zeros(slots, layout.size, device=device, dtype=dtype)
        self.matrices = layout.matrices(self._flat)
        """[S, K, W] and [S, R, N] by leader, always at the same addresses."""
        self._placed: list[weakref.ref[AdapterWeights] | None] = [None] * slots
        self._used = [0] * slots
        self._clock = 0

    def place(self, adapters: Sequence[AdapterWeights]) -> tuple[int, ...]:
        """The slot of each adapter; there must be fewer adapters than slots.

        Missing ones are copied into slots that none of these adapters uses.
        Slots of freed adapters are reused first, then the least recently used.
        """
        wanted = {id(weights): weights for weights in adapters}
        present = {id(weights): slot for slot, weights in enumerate(self._occupants()) if id(weights) in wanted}
        kept = set(present.values())
        free = sorted((slot for slot in range(1, self.slots) if slot not in kept), key=self._age)
        for key, slot in zip([key for key in wanted if key not in present], free, strict=False):
            self._flat[slot].copy_(wanted[key].flat)
            self._placed[slot] = weakref.ref(wanted[key])
            present[key] = slot
        self._clock += 1
        for slot in present.values():
            self._used[slot] = self._clock
        return tuple(present[id(weights)] for weights in adapters)

    def _occupants(self) -> list[AdapterWeights | None]:
        """The adapter in each slot. Weak references, so that a freed adapter's id cannot match another one."""
        return [None if place is None else place() for place in self._placed]

    def _age(self, slot: int) -> tuple[bool, int]:
        place = self._placed[slot]
        return place is not None and place() is not None, self._used[slot]

    def routing(self, n_rows: int) -> TableRouting:
        """A routing of `n_rows` rows, all for the base at first."""
        return TableRouting(self, n_rows, self._flat.device)


class TableRouting:
    """Rows of a decode batch, each with a slot of a table. The tensors are fixed; their contents change."""

    def __init__(self, table: AdapterTable, n_rows: int, device: torch.device) -> None:
        self.table = table
        # row of each product row, product row of each row, and the end of each slot's product rows
        self._order_T, self._inverse_T = (torch.arange(n_rows, device=device) for _ in range(2))
        self._ends_S = torch.full((table.slots,), n_rows, dtype=torch.int32, device=device)
        self._product = table.products.in_table(self._ends_S)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Device memory that a replay reads; copy `values` into it first."""
        return self._order_T, self._inverse_T, self._ends_S

    def values(self, slots_T: Sequence[int]) -> tuple[Tensor, ...]:
        """New contents of the tensors, on the host, from the slot of each row; 0 is for the base and padding."""
        slots = torch.tensor(slots_T, dtype=torch.long)
        order = torch.argsort(slots, stable=True)
        ends = torch.bincount(slots, minlength=self.table.slots).cumsum(0)
        return order, torch.argsort(order), ends

    def apply(self, fused: FusedLinears, x_TK: Tensor, y_TN: Tensor) -> None:
        """Add the adapters of fused layers to y; never synchronises, so it can be recorded."""
        matrices = self.table.matrices.get(fused.leader)
        if matrices is None:
            return
        inner_TW = self._product.multiply(x_TK.index_select(0, self._order_T), matrices.a)
        rank = self.table.layout.rank
        for column, (index, b) in enumerate(matrices.bs):
            added = self._product.multiply(inner_TW[:, column * rank : (column + 1) * rank], b)
            y_TN[:, fused.columns(index)].add_(added.index_select(0, self._inverse_T))


@dataclass
class _Graph:
    """A graph and its input tensors, which are fixed; their contents change."""

    token_ids_T: Tensor
    positions_T: Tensor
    attention: ReplayablePass
    routings: tuple[TableRouting, ...]
    replay: Callable[[], Tensor] | None = None
    """Returns the logits [T, V] for the tensors' contents; None until it is captured."""


class CudaGraphRunner:
    """Decoding graphs of one base and one KV cache."""

    def __init__(self, base: LoraModel, cache: KVCache, recorder: Recorder | None = None) -> None:
        self._base, self._cache = base, cache
        self._tables: dict[int, AdapterTable] = {}
        self._graphs: dict[tuple[int, ...], _Graph] = {}
        self._recorder = recorder or Recorder(base.device)

    def logits(
        self, token_ids: Sequence[int], spans: Sequence[Span], adapters: Sequence[AdapterWeights | None]
    ) -> Tensor | None:
        """Raw logits [N, V] for one token of each sequence; None if no graph can be used.

        Args:
            token_ids: the latest token of each sequence.
            spans: that token's position, as a span of length 1.
            adapters: the adapter of each sequence; None for the base.
        """
        base = self._base
        layouts = _layouts(adapters)
        if not all(base.products.fits_table(layout) for layout in layouts):
            return None
        tables = [self._table(layout, adapters) for layout in layouts]
        rows, n_blocks = self._shape(spans)
        key = (rows, n_blocks, *(id(table) for table in tables))
        nobody = Span(0, 1, [self._cache.scrap_block])
        whole = [*spans, *[nobody] * (rows - len(spans))]
        graph = self._graphs.pop(key, None) or self._empty(whole, n_blocks, tables)
        if graph is None:
            return None
        self._fill(graph, [*token_ids, *[0] * (rows - len(spans))], whole, adapters)
        if graph.replay is None:
            try:
                graph.replay = self._recorder.capture(functools.partial(self._run, graph), first=not self._graphs)
            except kernel_failures() as error:  # or the model waits for the device, as a mixture of experts does
                cause = cause_of(error)
                if isinstance(cause, torch.OutOfMemoryError):
                    return None
                base.compute_slower(replace(base.arithmetic, graphs=False), "graphs", cause)
                _log.warning("%s", base.info.notes[-1])
                self._graphs.clear()
                self._tables.clear()
                return None
        self._graphs[key] = graph
        while len(self._graphs) > _KEPT:
            del self._graphs[next(iter(self._graphs))]
        return graph.replay()[: len(spans)]

    def _empty(self, spans: Sequence[Span], n_blocks: int, tables: Sequence[AdapterTable]) -> _Graph | None:
        attention = self._base.attention.replayable(spans, self._cache, n_blocks)
        if attention is None:
            return None
        rows = len(spans)
        token_ids_T, positions_T = (torch.zeros(rows, dtype=torch.long, device=self._base.device) for _ in range(2))
        return _Graph(token_ids_T, positions_T, attention, tuple(table.routing(rows) for table in tables))

    def _shape(self, spans: Sequence[Span]) -> tuple[int, int]:
        """Rows and blocks of the graph for these sequences, rounded up to limit the number of graphs."""
        rows = round_up(len(spans), self._base.arithmetic.rows)
        blocks = max(-(-(span.start + 1) // self._cache.block_size) for span in spans)
        return _power_of_two(rows) if rows <= _STEP else round_up(rows, _STEP), _power_of_two(blocks)

    def _table(self, layout: AdapterLayout, adapters: Sequence[AdapterWeights | None]) -> AdapterTable:
        """The table of a layout, with room for these adapters. A larger one replaces it and its graphs if needed."""
        wanted = len({id(weights) for weights in adapters if weights is not None and weights.layout is layout})
        table = self._tables.get(id(layout))
        if table is None or wanted >= table.slots:
            base = self._base
            if table is not None:
                old = id(table)
                self._graphs = {key: value for key, value in self._graphs.items() if old not in key[2:]}
            slots = max(8, _power_of_two(wanted)) + 1
            table = self._tables[id(layout)] = AdapterTable(layout, slots, base.device, base.dtype, base.products)
        return table

    def _fill(
        self, graph: _Graph, token_ids: list[int], spans: list[Span], adapters: Sequence[AdapterWeights | None]
    ) -> None:
        tensors = [graph.token_ids_T, graph.positions_T, *graph.attention.tensors]
        values = [torch.tensor(token_ids), torch.tensor([span.start for span in spans]), *graph.attention.values(spans)]
        for routing in graph.routings:
            table = routing.table
            own = [weights for weights in adapters if weights is not None and weights.layout is table.layout]
            slots = dict(zip(map(id, own), table.place(own), strict=True))
            rest = [0] * (len(spans) - len(adapters))
            tensors += routing.tensors
            values += routing.values([*(slots.get(id(weights), 0) for weights in adapters), *rest])
        _write(tensors, values)

    def _run(self, graph: _Graph) -> Tensor:
        base = self._base
        graph.attention.calls.clear()
        with base.routed(SamplerRouting(lambda: graph.routings)):
            return base.raw_logits(base.hidden(graph.token_ids_T, graph.positions_T, graph.attention))


def _write(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy integers from the host into fixed tensors, with one copy to the device."""
    flat = torch.cat([value.reshape(-1).long() for value in values]).to(tensors[0].device)
    for tensor, part in zip(tensors, flat.split([value.numel() for value in values]), strict=True):
        tensor.copy_(part.view_as(tensor))


def _layouts(adapters: Sequence[AdapterWeights | None]) -> list[AdapterLayout]:
    """Each layout once, in an order that does not depend on the rows."""
    layouts = {id(weights.layout): weights.layout for weights in adapters if weights is not None}
    return [layouts[key] for key in sorted(layouts)]


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
