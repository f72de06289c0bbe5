"""Heads and rows that draws on the card are tested with, and launches of them with the sizes of real vocabularies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from motet.core.types import SamplingParams
from motet.kernels.cuda.math import CudaMath
from motet.kernels.cuda.sampling import Drawn, Head, RowSettings, Truncation, draw
from motet.model.distribution import LogitChanges

CPU = torch.device("cpu")


def head_of(n_ids: int, without: Sequence[int] = (), device: torch.device = CPU, **config: float) -> Head:
    """A head whose configuration names these changes of logits."""
    return Head(LogitChanges(SimpleNamespace(**config), tuple(without)), n_ids, device)


def settings_of(
    head: Head,
    params: Sequence[SamplingParams],
    keys: NDArray[np.uint64],
    positions: NDArray[np.uint64],
    allowed_NW: Tensor | None = None,
    device: torch.device = CPU,
) -> RowSettings:
    """Settings of rows in device memory."""
    return RowSettings(
        head,
        torch.tensor([row.temperature for row in params], device=device),
        torch.from_numpy(keys.view(np.int64)).to(device),
        torch.from_numpy(positions.view(np.int64)).to(device),
        allowed_NW,
        Truncation.of(params, device),
    )


def launches(*, everything: bool) -> Iterator[Callable[[], object]]:
    """Draws and passes of any number of rows: of Qwen 2.5's vocabulary; of Llama 3's; and of a capped head.

    The latter has ids without a token, and its rows have grammars.
    """
    own, heads = (
        CudaMath(),
        [(151_936, (), {}), (128_256, (), {}), (256_000, (255_999,), {"final_logit_softcapping": 30.0})],
    )
    for n_ids, without, config in heads[: None if everything else 1]:
        changes = LogitChanges(SimpleNamespace(**config), without)
        head = Head(changes, n_ids, CPU)
        for n_rows in (7, 64):
            raw_NV, counters = torch.zeros(n_rows, n_ids, dtype=torch.bfloat16), np.arange(n_rows, dtype=np.uint64)
            allowed_NW = torch.zeros(n_rows, -(-n_ids // 32), dtype=torch.int32) if without else None
            settings = settings_of(head, [SamplingParams(top_k=20)] * n_rows, counters, counters, allowed_NW)
            yield partial(draw, raw_NV, settings, Drawn.empty(n_rows, CPU))
            tokens_N = torch.zeros(n_rows, dtype=torch.int64)
            yield partial(own.head_logprobs, raw_NV, changes, tokens_N, [1.0] * n_rows, slope=True)
            yield partial(own.finish, raw_NV, changes)
