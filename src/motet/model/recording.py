"""Decoding that is recorded once and replayed: on a GPU, one launch for a token of every sequence instead of thousands.

Everything that changes from one token to the next (tokens, positions, where keys lie, which adapter a row belongs to) is
written into tensors that stay; a recording reads them. There is one for each shape: number of rows, width of the key tables,
and layouts of the adapters. Rows that are left over decode a token in a block that belongs to nobody.

Legend: T rows, N real rows, V vocabulary.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from motet.model.adapter_table import AdapterTable, TableRouting
from motet.model.grouped import fits
from motet.model.kv_cache import KVCache
from motet.model.layout import Span, round_up
from motet.model.lora import AdapterLayout, AdapterWeights
from motet.model.lora_model import LoraModel
from motet.model.routing import SamplerRouting
from motet.model.tables import AttentionTables, cached_tables

_log = logging.getLogger(__name__)

_KEPT = 16
"""Recordings that are kept; the one that was used longest ago goes first."""

_STEP = 64
"""Rows of recordings are a power of two up to here, and a multiple of it beyond."""

_WARM_UP = 2
"""Runs before a graph is captured: libraries take their workspaces at the first."""


@dataclass
class _Recording:
    """What is read, and the recording that reads it; the tensors stay, their contents change."""

    token_ids_T: Tensor
    positions_T: Tensor
    tables: AttentionTables
    routings: tuple[TableRouting, ...]
    replay: Callable[[], Tensor] | None = None
    """Gives the logits [T, V] of what the tensors hold; None until it is recorded."""


class Recorder:
    """Recordings of decoding on one base and one KV cache."""

    def __init__(self, base: LoraModel, cache: KVCache) -> None:
        self._base, self._cache = base, cache
        self._tables: dict[int, AdapterTable] = {}
        self._recorded: dict[tuple[int, ...], _Recording] = {}
        self._pool: Any = None
        self._side: Any = None

    def logits(
        self, token_ids: Sequence[int], spans: Sequence[Span], adapters: Sequence[AdapterWeights | None]
    ) -> Tensor | None:
        """What the head gives [N, V] for one token of each sequence; None where that cannot be recorded.

        Args:
            token_ids: the latest token of each sequence.
            spans: its place, each of length 1.
            adapters: its adapter; None for the base.
        """
        base = self._base
        layouts = _layouts(adapters)
        if not base.arithmetic.graphs or not all(
            fits(layout, base.device, base.dtype, base.arithmetic) for layout in layouts
        ):
            return None
        tables = [self._table(layout, adapters) for layout in layouts]
        rows, width = self._shape(spans)
        key = (rows, width, *(id(table) for table in tables))
        nobody = Span(0, 1, [self._cache.scrap_block])
        whole = [*spans, *[nobody] * (rows - len(spans))]
        recording = self._recorded.pop(key, None) or self._empty(whole, width, tables)
        self._fill(recording, [*token_ids, *[0] * (rows - len(spans))], whole, adapters)
        if recording.replay is None:
            try:
                recording.replay = self._record(recording)
            except torch.OutOfMemoryError:
                return None
            except RuntimeError as error:  # a model that waits for the device, such as a mixture of experts
                cause = error.__context__ if isinstance(error.__context__, Exception) else error
                base.compute_without("graphs", because=cause)
                _log.warning("%s", base.info.notes[-1])
                self._recorded.clear()
                self._tables.clear()
                return None
        self._recorded[key] = recording
        while len(self._recorded) > _KEPT:
            del self._recorded[next(iter(self._recorded))]
        return recording.replay()[: len(spans)]

    def _empty(self, spans: Sequence[Span], width: int, tables: Sequence[AdapterTable]) -> _Recording:
        device, rows = self._base.device, len(spans)
        token_ids_T, positions_T = (torch.zeros(rows, dtype=torch.long, device=device) for _ in range(2))
        keys = cached_tables(spans, self._cache, device, width)
        return _Recording(token_ids_T, positions_T, keys, tuple(table.routing(rows) for table in tables))

    def _shape(self, spans: Sequence[Span]) -> tuple[int, int]:
        """Rows and blocks of a recording that serves these sequences: few different numbers."""
        rows = round_up(len(spans), self._base.arithmetic.rows)
        blocks = max(-(-(span.start + 1) // self._cache.block_size) for span in spans)
        return _power_of_two(rows) if rows <= _STEP else round_up(rows, _STEP), _power_of_two(blocks)

    def _table(self, layout: AdapterLayout, adapters: Sequence[AdapterWeights | None]) -> AdapterTable:
        """Of a layout, with room for these adapters; one that is too small is made anew, and its recordings go."""
        wanted = len({id(weights) for weights in adapters if weights is not None and weights.layout is layout})
        found = self._tables.get(id(layout))
        if found is None or wanted >= found.slots:
            base = self._base
            if found is not None:
                old = id(found)
                self._recorded = {key: value for key, value in self._recorded.items() if old not in key[2:]}
            slots = max(8, _power_of_two(wanted)) + 1
            found = self._tables[id(layout)] = AdapterTable(layout, slots, base.device, base.dtype, base.arithmetic)
        return found

    def _fill(
        self, recording: _Recording, token_ids: list[int], spans: list[Span], adapters: Sequence[AdapterWeights | None]
    ) -> None:
        fresh = cached_tables(spans, self._cache, torch.device("cpu"), recording.tables.keys_SL.shape[1])
        names = [entry.name for entry in fields(fresh) if isinstance(getattr(fresh, entry.name), Tensor)]
        tensors = [recording.token_ids_T, recording.positions_T, *(getattr(recording.tables, name) for name in names)]
        values = [torch.tensor(token_ids), torch.tensor([span.start for span in spans])]
        values += [getattr(fresh, name) for name in names]
        for routing in recording.routings:
            table = routing.table
            own = [weights for weights in adapters if weights is not None and weights.layout is table.layout]
            slots = dict(zip(map(id, own), table.place(own), strict=True))
            rest = [0] * (len(spans) - len(adapters))
            tensors += routing.tensors
            values += routing.values([*(slots.get(id(weights), 0) for weights in adapters), *rest])
        _write(tensors, values)

    def _record(self, recording: _Recording) -> Callable[[], Tensor]:
        """On a GPU a graph of `_run`; elsewhere `_run` itself."""
        if self._base.device.type != "cuda":
            return lambda: self._run(recording)
        return self._capture(recording)

    def _capture(self, recording: _Recording) -> Callable[[], Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._base.device):
            before = torch.cuda.current_stream()
            if self._side is None:
                self._side = torch.cuda.Stream()  # one for all: libraries keep a workspace for each stream
            if self._pool is None or not self._recorded:
                self._pool = torch.cuda.graph_pool_handle()  # a pool ends with the last graph in it
            self._side.wait_stream(before)
            with torch.cuda.stream(self._side):
                for _ in range(_WARM_UP):
                    self._run(recording)
            before.wait_stream(self._side)
            try:
                # a commit may copy an adapter from the device meanwhile, in a thread of its own
                with torch.cuda.graph(graph, self._pool, self._side, capture_error_mode="thread_local"):
                    logits_TV = self._run(recording)
            except BaseException:
                torch.cuda.set_stream(before)  # which a capture that fails does not
                with contextlib.suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(before.device_index, self._pool)
                raise

        def replay() -> Tensor:
            graph.replay()
            return logits_TV

        return replay

    def _run(self, recording: _Recording) -> Tensor:
        base = self._base
        recording.tables.calls.clear()
        with base.routed(SamplerRouting(recording.routings)):
            return base.raw_logits(base.hidden(recording.token_ids_T, recording.positions_T, recording.tables))


def _write(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Bring integers from the host into tensors that stay: one copy to the device, which is waited for once."""
    flat = torch.cat([value.reshape(-1).long() for value in values]).to(tensors[0].device)
    for tensor, part in zip(tensors, flat.split([value.numel() for value in values]), strict=True):
        tensor.copy_(part.view_as(tensor))


def _layouts(adapters: Sequence[AdapterWeights | None]) -> list[AdapterLayout]:
    """Each once, in an order that does not depend on the rows'."""
    found = {id(weights.layout): weights.layout for weights in adapters if weights is not None}
    return [found[key] for key in sorted(found)]


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
