"""How many operations torch launches for a layer of a decoding step of bases that it computes on a GPU, by family.

    .venv/bin/python -m bench.torch_launches            # every family of tests/support/tiny_models.py, a minute or two
    .venv/bin/python -m bench.torch_launches cohere opt

Counted without a card: on torch's `meta` device, by the arithmetic of a GPU. Views and allocations launch nothing. A mixture
reads values, which are a CPU's then: its counts depend on the experts that eight rows choose.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from functools import partial
from typing import Any, Literal

import torch
import triton  # type: ignore[import-untyped, unused-ignore]

from motet.model.kv_cache import KVCache
from motet.model.load import load_base
from motet.model.lora import AdapterWeights
from motet.model.lora_model import LoraModel
from motet.rollout.decode_steps import NewTokens
from motet.rollout.model_runner import ModelRunner
from tests.support import tiny_models as tiny
from tests.support.launched_kernels import TARGETS, requests
from tests.support.passes_without_values import LIKE_A_GPU, Unpinned, without_values

ROWS = 8
ON_CPU: dict[str, Any] = {
    "dtype": "bfloat16", "device": "cpu", "block_size": tiny.BLOCK, "arithmetic": LIKE_A_GPU, "pack": False,
}  # fmt: skip
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
    cache = KVCache(64, tiny.BLOCK, base.device, slots=ROWS + 1)
    runner, blocks = ModelRunner(base, cache), [cache.take(2) for _ in range(ROWS)]
    layout = base.adapter_layout("all-linear", 8)
    flats = [torch.zeros(layout.size, dtype=base.dtype, device=base.device) for _ in range(n_adapters)]
    weights = [AdapterWeights(layout, 2.0, flat) for flat in flats]
    each = [weights[row % n_adapters] if weights else None for row in range(ROWS)]
    slots = [cache.states.take() if base.stateful else 0 for _ in range(ROWS)]
    new = [NewTokens(adapter, [row + 4], 3, blocks[row], slots[row]) for row, adapter in enumerate(each)]
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


def counted(name: str) -> tuple[int, list[int]]:
    """Layers of a family's tiny base, and what `steps` finds: without values if it reads none, by Motet's attention if it can.

    Raises:
        Exception: of any library, where no step can be counted.
    """
    attentions: tuple[Literal["triton", "torch"], ...] = "triton", "torch"
    for values, attention in itertools.product((False, True), attentions):
        found = list[int]()
        try:
            base = load_base(str(tiny.directory(name)), **ON_CPU) if values else without_values(name)
            base.compute_with(dataclasses.replace(LIKE_A_GPU, attention=attention))
            base.read_keys_in_blocks(tiny.BLOCK)
            requests(TARGETS["sm_90"], [partial(steps, base, found)])
        except Exception as error:
            failure = error
        else:
            return base.model.config.get_text_config().num_hidden_layers, found
    raise failure


def main() -> None:
    """Print a line for each family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="default: all")
    print(f"{'family':<20} {'layers':>6} {'none':>8} {'2 adapters':>10} {'8 adapters':>10}   operations a layer")
    for name in parser.parse_args().families or tiny.CONFIGS:
        try:
            layers, found = counted(name)
        except Exception as error:  # of any library
            print(f"{name:<20} not counted: {type(error).__name__}: {str(error)[:100]}", flush=True)
            continue
        print(f"{name:<20} {layers:>6} " + " ".join(f"{count / layers:>10.1f}" for count in found), flush=True)


if __name__ == "__main__":
    main()
