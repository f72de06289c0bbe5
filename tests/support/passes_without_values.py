"""A decoding pass and a training pass on torch's `meta` device, whose tensors have shapes and no values. Run as a module.

What would make the host wait for a device (`.item()`, `.nonzero()`, a copy back) fails here, and so does a tensor that was
left on the host. Launches of kernels are taken by the hook of `tests.support.launched_kernels`; their names are printed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from motet.model.arithmetic import Arithmetic
from motet.model.attention import Prefix
from motet.model.kv_cache import KVCache
from motet.model.load import load_base
from motet.model.lora import AdapterWeights, LoraMatrices
from motet.model.lora_model import LoraModel
from motet.model.routing import TrainerRouting, TrainSegment
from motet.rollout.decode_steps import NewTokens
from motet.rollout.model_runner import ModelRunner
from motet.training.head import Targets, head_logprobs, whole
from tests.support import tiny_models as tiny
from tests.support.launched_kernels import TARGETS, requests

META = torch.device("meta")
LIKE_A_GPU = Arithmetic(rows=16, tile=16, products="grouped", attention="torch", logit_rows=16)


class Unpinned(TorchDispatchMode):
    """Leaves memory as it is, because no card is here for which it could be pinned."""

    def __init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func.overloadpacket.__name__ in ("pin_memory", "_pin_memory") else func(*args, **kwargs or {})


def without_values(name: str = "llama") -> LoraModel:
    """A base that was proved on the CPU."""
    directory = str(tiny.directory(name))
    base = load_base(
        directory, dtype="bfloat16", device="cpu", block_size=tiny.BLOCK, arithmetic=LIKE_A_GPU, pack=False
    )
    torch.__future__.set_swap_module_params_on_conversion(True)  # what else refers to a parameter moves too
    base.model.to(META)
    base.device = META
    return base


def adapter(base: LoraModel, rank: int) -> AdapterWeights:
    layout = base.adapter_layout("all-linear", rank)
    flat = torch.empty(layout.size, dtype=base.dtype, device=META)
    return AdapterWeights(layout, 2.0, flat)


@torch.inference_mode()
def decode(base: LoraModel) -> None:
    """Read two prompts, then decode a token of each with two adapters, and one with the base."""
    cache = KVCache(64, tiny.BLOCK, META)
    runner, blocks = ModelRunner(base, cache), [cache.take(4) for _ in range(3)]
    first, wide = adapter(base, 8), adapter(base, 16)
    runner.logits([NewTokens(None, [1, 2, 3], 0, each) for each in blocks])
    runner.logits([NewTokens(weights, [4], 3, each) for weights, each in zip((first, wide, None), blocks, strict=True)])


def train(base: LoraModel) -> None:
    """Gradients of two adapters, where two sequences have a prompt in common."""
    lengths, prefixes, spans = [20, 7, 9], [None, Prefix(0, 20), None], [(0, 27), (27, 36)]
    segments = []
    for span, rank in zip(spans, (8, 16), strict=True):
        own = adapter(base, rank)
        gradients: dict[str, LoraMatrices] = own.layout.matrices(torch.zeros(own.layout.size, device=META))
        segments.append(TrainSegment(*span, own, gradients))
    ids, positions = (base.pad(torch.zeros(sum(lengths), dtype=torch.long, device=META)) for _ in range(2))
    rows = torch.zeros(9, dtype=torch.long, device=META)
    with base.routed(TrainerRouting(segments, META, base.products, backward=True)), torch.enable_grad():
        hidden_TD = base.hidden(ids, positions, base.attention.packed(lengths, prefixes))
        found = whole(head_logprobs(base, hidden_TD, [Targets(rows + start, rows, 1.0) for start, _ in spans]))
        torch.autograd.backward([logprobs_N.sum() for logprobs_N, _ in found])


def main(words: Sequence[str] = ()) -> None:
    base = without_values()
    for attention in ("triton", "torch"):
        base.compute_with(dataclasses.replace(LIKE_A_GPU, attention=attention))
        base.read_keys_in_blocks(tiny.BLOCK)
        for work in (decode, train):
            try:
                with Unpinned():
                    kernels = requests(TARGETS["sm_90"], [partial(work, base)])
                found = sorted({one.kernel.__name__ for one in kernels})
            except NotImplementedError as error:  # a value is asked for
                found = [str(error)]
            print(json.dumps([attention, work.__name__, found]))


if __name__ == "__main__":
    main()
