"""Decodes two tokens when a base is loaded, as jobs do: by a recorded step and its replay, with an adapter.

Legend: T tokens, D model width, N drawn tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from motet.core.errors import BaseModelError
from motet.kernels.cuda.base import CudaBase
from motet.model.attention import AttentionPass, Span
from motet.model.device_steps import (
    BLOCKS,
    DRAWN,
    GROUPS,
    PLAIN,
    POSITION,
    TEMPERATURE,
    TOKEN,
    TOP_P,
    DeviceStep,
)
from motet.model.exactness import RANK
from motet.model.kv_cache import KVCache
from motet.model.lora import AdapterWeights
from motet.model.lora_model import LoraModel
from motet.model.routing import TrainerRouting, TrainSegment

_ONE = int(np.float64(1).view(np.int64))
_STEPS = 2
_SIZE = 0.1
"""Of an adapter's numbers."""


class _OneRow:
    """A `StepLayout` of one row."""

    def __init__(self, n_blocks: int) -> None:
        self.n_rows, self.width = 1, BLOCKS + n_blocks
        self.size = self.width + GROUPS

    def order_at(self, group: int) -> int:
        """See `StepLayout`."""
        return self.width + group

    def row(self, token: int, position: int, blocks: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """Changes that make it the row of the next step; of the array's zeros, its key and its place in the order stay."""
        record = {TOKEN: token, POSITION: position, DRAWN: 0, TEMPERATURE: _ONE, TOP_P: _ONE}
        record |= {BLOCKS + place: block for place, block in enumerate(blocks)}
        return np.array(list(record.items()), np.int64)


@torch.no_grad()
def check_steps(base: LoraModel, prompt_T: Tensor) -> None:
    """Compare the logprobs of drawn tokens with those that a pass gives them.

    Raises:
        BaseModelError: they have other bits.
        Exception: a step fails.
    """
    own, ids = base.kernels, prompt_T.tolist()
    assert isinstance(own, CudaBase)
    layout = base.adapter_layout("all-linear", RANK)
    flat = torch.randn(layout.size, generator=torch.Generator().manual_seed(0)) * _SIZE
    weights = AdapterWeights.from_masters(layout, 1.0, flat.to(base.device), base.dtype)
    cache = KVCache(-(-(len(ids) + _STEPS) // base.block_size), base.block_size, base.device)
    blocks, before = cache.take(cache.n_blocks), len(ids) - 1
    _hidden(base, prompt_T[:before], base.attention.cached([Span(0, before, blocks)], cache), weights)
    steps, row = own.steps(cache), _OneRow(len(blocks))
    steps.hold(row)
    changes_C2, rows = row.row(ids[-1], before, blocks), (weights,)
    flights = [
        steps.launch(DeviceStep(PLAIN, 1, changes, rows, len(blocks), truncates=False))
        for changes in (changes_C2, changes_C2[:0])
    ]
    drawn = [flight.tokens() for flight in flights]
    tokens = [int(each.tokens_N[0]) for each in drawn]
    whole_T = torch.tensor([*ids, *tokens[:-1]], device=base.device)
    hidden_TD = _hidden(base, whole_T, base.attention.packed([len(whole_T)]), weights)
    found_N, *_ = own.math.head_logprobs(
        own.raw_logits(hidden_TD[before:]),
        base.changes,
        torch.tensor(tokens, device=base.device),
        [1.0] * _STEPS,
        slope=False,
    )
    if found_N.tolist() != [float(each.logprobs_N[0]) for each in drawn]:
        raise BaseModelError(f"{base.info.name}: logprobs of decoding steps have other bits than those of a pass")


def _hidden(base: LoraModel, ids_T: Tensor, attention: AttentionPass, weights: AdapterWeights) -> Tensor:
    """Final hidden states [T, D] of one sequence, or of its beginning."""
    n_rows = len(ids_T)
    routing = TrainerRouting([TrainSegment(0, n_rows, weights, None)], base.device, base.products, backward=False)
    with base.routed(routing):
        return base.hidden(ids_T, torch.arange(n_rows, device=base.device), attention)
