"""Compiles what real launches of the Triton kernels ask for, for cards that are not here. Run as a module; prints JSON lines.

Triton takes a launch's arguments (types, addresses that 16 divides, constants) from tensors on the CPU; the driver below names
a card, and a hook of Triton's takes the request in place of the launch. Outputs of the launchers are garbage here.

    python -m tests.support.launched_kernels --targets sm_90 gfx942 --widths 64 256 --dtypes bf16
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import triton  # type: ignore[import-untyped, unused-ignore]
from torch import Tensor
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped, unused-ignore]
from triton.compiler import ASTSource, compile  # type: ignore[import-untyped, unused-ignore]

from motet.model.attention.backend import LayerCall, Prefix, Span
from motet.model.attention.triton_attention import TritonPass
from motet.model.attention.triton_metadata import cached_metadata, packed_metadata
from motet.model.kv_cache import KVCache
from motet.model.mixers.stretches import packed_stretches
from motet.model.mixers.triton_recurrence import recur_by_kernels

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MODELS = ("plain", "capped", "delta", "gated")
"""Attention; attention with a window, a soft cap and sinks; recurrences with the delta rule and without it."""
ATOMIC = r"\b(?:RED|REDG|ATOM|ATOMG)\b|\b(?:global|flat|buffer)_atomic_|\b(?:atom|red)\.[\w.:]*global\b"
"""Instructions on global memory of NVIDIA's and AMD's machine code, and of PTX."""
BY_TENSOR_CORE = r"^.*(?:tt\.dot .*parent = #mma|ttng\.(?:warp_group_dot|tc_gen5_mma) ).*$"
"""Lines of Triton's code for GPUs that multiply by the tensor core, not by sums of each thread."""
CPU = torch.device("cpu")
Launch = Callable[[], object]


@dataclass(frozen=True)
class Made:
    """One kernel compiled as a launch makes it."""

    kernel: str
    code: str
    """Sha256 of the machine code."""
    spills: int | None
    """Instructions that store registers to memory or load them from it again; None if nobody counted them."""
    shared: int
    """Bytes of shared memory of one program."""
    products: list[str]
    """Kinds of tensor-core instructions, if disassembled."""
    dots: list[str]
    """Rows, depth and columns of the products that the tensor core computes."""
    atomics: int
    """Atomic instructions on global memory."""
    atomic_floats: int
    """Those of them that add or compare floating-point numbers."""
    fused: bool
    """Whether a product and a sum are rounded once, or may be by another compiler: defaults differ between versions."""
    wide: int
    """Loads of 16 bytes from global memory."""
    short: int
    """Loads of four and eight bytes."""
    narrow: int
    """Loads of two bytes."""
    constants: dict[str, str]
    """The constants and options of the launch."""


class Card:
    """Triton's view of a card that is not here."""

    def __init__(self, target: GPUTarget, place: int) -> None:
        self._target, self._place = target, place

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._place

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Request:
    """What a launch asks the compiler for."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]

    @property
    def key(self) -> str:
        return repr((self.kernel.__name__, self.signature, self.constants, self.attributes, self.options))


def requests(target: GPUTarget, launches: Sequence[Callable[[], object]]) -> list[Request]:
    """Those of all launches, each once."""
    found: dict[str, Request] = {}

    def take(*, fn: Any, compile: dict[str, Any], **_others: Any) -> bool:
        options = {name: compile[name] for name in ("num_warps", "num_stages", "num_ctas", "enable_fp_fusion")}
        request = Request(fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0], options)
        found.setdefault(request.key, request)
        return True  # neither compile nor launch

    triton.runtime.driver.set_active(Card(target, list(TARGETS.values()).index(target)))
    triton.knobs.runtime.jit_cache_hook = take
    for launch in launches:
        launch()
    triton.knobs.runtime.jit_cache_hook = None
    return list(found.values())


def made_of(request: Request, target: str, *, disassembled: bool = True) -> Made:
    """Compile it; without disassembling it (half the time) spills are None, and atomics are those of the PTX.

    Raises:
        Exception: what Triton or ptxas says.
    """
    source = ASTSource(request.kernel, request.signature, request.constants, request.attributes)
    made = compile(source, target=TARGETS[target], options=request.options)
    cuda = "cubin" in made.asm
    ptx = made.asm["ptx"] if cuda else ""
    text = made.asm["sass" if cuda else "amdgcn"] if disassembled else ptx
    return Made(
        kernel=request.kernel.__name__,
        code=hashlib.sha256(made.asm["cubin" if cuda else "hsaco"]).hexdigest(),
        spills=len(re.findall(r"\b(?:STL|LDL)\b|\bscratch_(?:load|store)_", text)) if disassembled else None,
        shared=made.metadata.shared,
        products=sorted(set(re.findall(r"\b(HMMA|HGMMA|UTC\w*MMA|v_mfma)", text))),
        dots=sorted(set(map(_sizes, re.findall(BY_TENSOR_CORE, made.asm["ttgir"], re.MULTILINE)))),
        atomics=len(re.findall(ATOMIC, text)),
        atomic_floats=len(re.findall(r"\b(?:atom|red)\.[\w.:]*\.(?:f16|f16x2|bf16|bf16x2|f32|f64)\b", ptx)),
        fused=bool(request.options["enable_fp_fusion"]) or "fma.rn.f32" in ptx,
        wide=len(
            re.findall(
                r"ld\.global[^;]*\.v4\.b32|ld\.global[^;]*\.v2\.b64|cp\.async\.c[ag]\.shared\.global[^;]*0x10", ptx
            )
        ),
        short=len(re.findall(r"ld\.global(?:\.(?!v\d)\w+(?:::\w+)*)*\.(?:b32|b64|v2\.b32|v[24]\.b16)\b", ptx))
        + len(re.findall(r"cp\.async\.ca\.shared\.global[^;]*, 0x[48]\b", ptx)),
        narrow=len(re.findall(r"ld\.global(?:\.\w+(?:::\w+)*)*\.[bu]16", ptx)),
        constants={
            **{request.kernel.arg_names[place[0]]: repr(value) for place, value in request.constants.items()},
            **{name: repr(value) for name, value in request.options.items()},
        },
    )


def _sizes(product: str) -> str:
    """Rows, depth and columns, from the types of the operands."""
    (rows, depth), (_, columns) = re.findall(r"(?:tensor|memdesc)<(\d+)x(\d+)x", product)[:2]
    return f"{rows}x{depth}x{columns}"


# --- launches ---------------------------------------------------------------------------------------------------------


def attention_launches(width: int, dtype: torch.dtype, *, capped: bool) -> Iterator[Callable[[], object]]:
    """Training, prefill and decoding of few and of many sequences, by the launchers of the package."""
    call = LayerCall(0, width**-0.5, *((50, 2.0, torch.zeros(8, dtype=dtype)) if capped else (None, None)))
    for lengths, prefixes in (([1], ()), ([70, 40, 3], (None, Prefix(0, 70), Prefix(0, 70))), ([17] * 16, ())):
        states = _states(sum(lengths), width, dtype, gradients=True)
        yield partial(_trained, TritonPass(packed_metadata(lengths, CPU, prefixes)), call, states)
        for starts in ([0] * len(lengths), [16] * len(lengths)):
            cache = KVCache(64, 16, CPU)
            spans = [
                Span(start, length if start == 0 else 1, cache.take(-(-(start + length) // 16)))
                for start, length in zip(starts, lengths, strict=True)
            ]
            rows = sum(span.length for span in spans)
            through_cache = TritonPass(cached_metadata(spans, cache, CPU))
            yield partial(through_cache.attend, call, *_states(rows, width, dtype))


def _states(rows: int, width: int, dtype: torch.dtype, *, gradients: bool = False) -> list[Tensor]:
    """Queries of eight heads, keys and values of two."""
    return [torch.zeros(rows, heads, width, dtype=dtype, requires_grad=gradients) for heads in (8, 2, 2)]


def _trained(attention: TritonPass, call: LayerCall, states: list[Tensor]) -> None:
    attention.attend(call, *states).sum().backward()


def recurrence_launches(width: int, *, delta: bool) -> Iterator[Callable[[], object]]:
    """Training and decoding of few and of many stretches."""
    for lengths in ([1], [70, 40, 3], [17] * 16):
        for gradients in (False, True):
            yield partial(_recurred, lengths, width, delta=delta, gradients=gradients)


def _recurred(lengths: list[int], width: int, *, delta: bool, gradients: bool) -> None:
    (wave,) = packed_stretches(lengths, CPU).waves
    rows, heads = sum(lengths), 2

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, requires_grad=gradients)

    inputs = [zeros(rows, heads, 4, width), zeros(rows, heads, width), zeros(rows, heads), zeros(rows, heads)]
    inputs += [zeros(rows, heads)] if delta else []
    output, end = recur_by_kernels(wave, zeros(len(lengths), heads, width, width), *inputs)
    if gradients:
        (output.sum() + end.sum()).backward()


def print_made(
    target: str,
    dtype: str,
    width: int,
    model: str,
    launches: Sequence[Launch],
    kernels: Sequence[str] = (),
    made_before: set[str] | None = None,
    *,
    disassembled: bool = True,
) -> None:
    """One line for each thing that these launches compile.

    With `kernels` of these alone; with `made_before` of kernels that it lacks, whose names are added to it.
    """
    for request in requests(TARGETS[target], launches):
        name = request.kernel.__name__
        if (not kernels or name in kernels) and (made_before is None or name not in made_before):
            if made_before is not None:
                made_before.add(name)
            made = made_of(request, target, disassembled=disassembled)
            print(
                json.dumps(asdict(made) | {"target": target, "dtype": dtype, "width": width, "model": model}),
                flush=True,
            )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 80, 96, 128, 192, 256])
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp16"], choices=list(DTYPES))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    chosen = parser.parse_args(words)
    for target, model in itertools.product(chosen.targets, chosen.models):
        if model in ("delta", "gated"):
            print_made(target, "fp32", 128, model, list(recurrence_launches(128, delta=model == "delta")))
            continue
        for dtype, width in itertools.product(chosen.dtypes, chosen.widths):
            launches = list(attention_launches(width, DTYPES[dtype], capped=model == "capped"))
            print_made(target, dtype, width, model, launches)


if __name__ == "__main__":
    main()
