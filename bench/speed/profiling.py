"""Where the time of a repeat goes: torch's profiler, its operations sorted into groups by name and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEventAvg
    from torch.profiler import profile

BASE, LORA, ATTENTION, HEAD = "base products", "adapter products", "attention", "head and sampling"
ELEMENTWISE, COPIES, REST = "elementwise, norms, RoPE", "copies and indexing", "Python and other"
GROUPS = (BASE, LORA, ATTENTION, HEAD, ELEMENTWISE, COPIES, REST)

_PRODUCTS = ("mm", "linear", "matmul")
_ATTENTION = ("scaled_dot_product", "flash", "softmax", "masked_fill", "amax")
_SAMPLING = ("cumsum", "searchsorted", "argmax", "multinomial", "exponential", "topk", "sort")
_COPIES = (
    "copy index select cat stack clone contiguous gather scatter slice pad fill zero empty view reshape narrow transpose "
    "expand permute stride resize embedding split unbind item lift chunk"
).split()

Shape = Sequence[int]


@dataclass(frozen=True)
class Dimensions:
    """Sizes of a model by which its products are told apart."""

    vocabulary: int
    rank: int
    """Of the adapters; 0 where there are none."""
    head: int
    """Width of an attention head."""


def group_of(name: str, shapes: Sequence[Shape], sizes: Dimensions) -> str:
    """The group of an operation, such as `aten::bmm`; without a namespace it is Python's or the autograd engine's own time.

    `shapes` are those of its inputs; empty for those that are no tensors.
    """
    space, _, short = name.partition("::")
    if not short or space == "autograd":
        return REST
    tensors = [tuple(shape) for shape in shapes if len(shape) > 0]
    wide = any(sizes.vocabulary in shape for shape in tensors) and "embedding" not in short
    if wide or any(part in short for part in _SAMPLING):
        return HEAD
    if any(part in short for part in _PRODUCTS):
        return _product_group(tensors, sizes)
    if any(part in short for part in _ATTENTION):
        return ATTENTION
    if any(part in short for part in _COPIES) or short in ("t", "to", "_to_copy"):
        return COPIES
    scores = any(len(shape) >= 4 and shape[0] > 1 for shape in tensors)  # [sequences, heads, rows, keys]
    return ATTENTION if scores else ELEMENTWISE


def _product_group(tensors: Sequence[tuple[int, ...]], sizes: Dimensions) -> str:
    """Products with the rank as a dimension are an adapter's; of the others, batched ones over heads are attention's.

    Layers that share an input may share a product, so twice and three times the rank count too. In a batched product
    [A, M, K] · [A, K, N] the rows M may be any number, so they say nothing.
    """
    ranks = {sizes.rank, 2 * sizes.rank, 3 * sizes.rank} - {0}
    operands = [shape[-2:] for shape in tensors if len(shape) >= 2][:2]
    batched = any(len(shape) > 2 and shape[0] > 1 for shape in tensors)
    telling = {
        size for place, shape in enumerate(operands) for size in (shape[1:] if batched and place == 0 else shape)
    }
    if ranks & telling:
        return LORA
    return ATTENTION if batched and any(sizes.head in shape for shape in operands) else BASE


def totals(
    events: Sequence[tuple[str, Sequence[Shape], float]], seconds: float, sizes: Dimensions
) -> Mapping[str, float]:
    """Seconds by group of (name, shapes, seconds of its own); what no operation accounts for is Python and other."""
    found = dict.fromkeys(GROUPS, 0.0)
    for name, shapes, own in events:
        found[group_of(name, shapes, sizes)] += own
    found[REST] = 0.0
    found[REST] = max(seconds - sum(found.values()), 0.0)
    return found


def profiler(device: str) -> profile:
    """A profiler that is ready to start."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    return profile(activities=activities, record_shapes=True)


def grouped(watcher: profile, seconds: float, sizes: Dimensions) -> Mapping[str, float]:
    """What a profiler saw, by group: time on the device, where there is one, otherwise on the CPU."""
    averages = watcher.key_averages(group_by_input_shape=True)
    on_device = sum(event.self_device_time_total for event in averages) > 0

    def own(event: FunctionEventAvg) -> float:
        return float(event.self_device_time_total if on_device else event.self_cpu_time_total) / 1e6

    return totals([(event.key, event.input_shapes, own(event)) for event in averages], seconds, sizes)
