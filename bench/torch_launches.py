"""How many operations torch launches for a layer of a decoding step of bases that it computes on a GPU, by family.

    .venv/bin/python -m bench.torch_launches            # every family of tests/support/tiny_models.py, a minute or two
    .venv/bin/python -m bench.torch_launches cohere opt

Counted without a card: on torch's `meta` device, by the arithmetic of a GPU. Views and allocations launch nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial
from typing import Any

import torch
import triton  # type: ignore[import-untyped, unused-ignore]

from motet.model.kv_cache import KVCache
from motet.model.lora_model import LoraModel
from motet.rollout.executor import NewTokens
from motet.rollout.model_runner import ModelRunner
from tests.support import tiny_models as tiny
from tests.support.launched_kernels import TARGETS, requests
from tests.support.passes_without_values import LIKE_A_GPU, META, Unpinned, adapter, without_values

ROWS = 8
FREE = (
    "empty",
    "detach",
    "lift_fresh",
    "_unsafe_view",
    "_reshape_alias",
    "resolve_conj",
    "resolve_neg",
    "split",
    "chunk",
    "pin_memory",
    "_pin_memory",
)


class Operations(Unpinned):
    """Counts operations that launch a kernel on a GPU; Motet's Triton kernels are counted by Triton's hook."""

    def __init__(self) -> None:
        super().__init__()
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(FREE):
            self.count += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


@torch.inference_mode()
def step(base: LoraModel, n_adapters: int) -> int:
    """Operations of a decoding step of `ROWS` rows; some have adapters of rank 8."""
    cache = KVCache(64, tiny.BLOCK, META, slots=ROWS + 1)
    runner, blocks = ModelRunner(base, cache), [cache.take(2) for _ in range(ROWS)]
    weights = [adapter(base, 8) for _ in range(n_adapters)]
    each = [weights[row % n_adapters] if weights else None for row in range(ROWS)]
    new = [NewTokens(one, [4], 3, own) for one, own in zip(each, blocks, strict=True)]
    with Unpinned():
        runner.logits(new)  # what is found once
    hook, launched = triton.knobs.runtime.jit_cache_hook, 0

    def take(**request: Any) -> bool:
        nonlocal launched
        launched += 1
        return bool(hook(**request))

    triton.knobs.runtime.jit_cache_hook = take
    with (operations := Operations()):
        runner.logits(new)
    triton.knobs.runtime.jit_cache_hook = hook
    return operations.count + launched


def steps(base: LoraModel, found: list[int]) -> None:
    """Steps without adapters, and with a few."""
    found += [step(base, n_adapters) for n_adapters in (0, 2, 8)]


def main() -> None:
    """Print a line for each family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="default: all")
    print(f"{'family':<20} {'layers':>6} {'none':>8} {'2 adapters':>10} {'8 adapters':>10}   operations a layer")
    for name in parser.parse_args().families or tiny.CONFIGS:
        found = list[int]()
        try:
            base = without_values(name)
            base.compute_with(dataclasses.replace(LIKE_A_GPU, attention="triton"))
            base.read_keys_in_blocks(tiny.BLOCK)
            requests(TARGETS["sm_90"], [partial(steps, base, found)])
        except Exception as error:  # of any library
            print(f"{name:<20} not counted: {type(error).__name__}: {str(error)[:100]}", flush=True)
            continue
        layers = base.model.config.get_text_config().num_hidden_layers
        print(f"{name:<20} {layers:>6} " + " ".join(f"{count / layers:>10.1f}" for count in found), flush=True)


if __name__ == "__main__":
    main()
