"""What the host waits for in training and decoding on a card. Run as a module without the interpreter; prints JSON lines.

Tensors are on torch's `meta` device, where shapes are computed and no values. A read of a value is noted, and answered with
zeros; what else asks for a value (`.nonzero()`, an index of booleans) fails. Launches are taken by Triton's hook.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from motet.algorithms.critic import ValueLoss
from motet.config import AdapterConfig
from motet.core.batch import AdamW, Batch, Segment
from motet.core.types import GenerateRequest, SamplingParams
from motet.kernels.cuda.attention import PIECE
from motet.kernels.cuda.base import CudaBase
from motet.kernels.cuda.launches import count
from motet.kernels.cuda.product_backends import BUCKETS, ROWS_OF_DECODING, Library, ProductShape, table_for
from motet.kernels.cuda.products import Products, ProductWeight
from motet.kernels.cuda.step import CudaSteps
from motet.model.accelerator import Recorder, WorkQueue
from motet.model.device_steps import BLOCKS, PLAIN, TOKEN, DeviceStep
from motet.model.kv_cache import KVCache
from motet.model.lora import AdapterWeights
from motet.model.lora_model import LoraModel
from motet.rollout.decode_steps import NewTokens
from motet.rollout.model_runner import ModelRunner
from motet.rollout.sequences import Prompt, SampledSequence
from motet.rollout.step_table import StepTable
from motet.training.torch_trainer import TorchTrainer
from tests.support import tiny_models as tiny
from tests.support.launched_kernels import CPU, TARGETS, requests
from tests.support.passes_without_values import LIKE_A_GPU, META, Unpinned, adapter, without_values
from tests.support.segments import REINFORCE, make_samples


@dataclass
class Waits:
    """How often the host waits for the device in one piece of work."""

    work: str
    adapters: int
    launches: dict[str, int]
    """By kernel."""
    reads: int = 0
    """Reads of values after the last launch."""
    early: int = 0
    """Reads before it."""
    paged: int = 0
    """Copies to the device of memory that may be paged out, which may wait too."""
    sent: int = 0
    """Other copies to the device."""
    fetched: int = 0
    """Copies to the host that only their reader waits for."""


class Watch(TorchDispatchMode):
    """Notes at which launch values are read; memory is never pinned here, so requests for it are noted."""

    def __init__(self, launches: Counter[str]) -> None:
        super().__init__()
        self._launches = launches
        self._pinned: list[Tensor] = []
        self.reads: list[int] = []
        self.paged = self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name in ("pin_memory", "_pin_memory"):
            self._pinned.append(args[0])
            return args[0]
        if name in ("_local_scalar_dense", "item") and args[0].device == META:
            self.reads.append(self._launches.total())
            return 0 if not args[0].is_floating_point() else 0.0
        if name == "_to_copy" and kwargs.get("device") is not None and kwargs["device"] != args[0].device:
            if args[0].device == META:
                self.reads.append(self._launches.total())
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
            self._count(args[0], waits=not kwargs.get("non_blocking"))
        if name == "copy_" and args[0].device != args[1].device:
            self._count(args[1], waits=True)
        return func(*args, **kwargs)

    def _count(self, host: Tensor, *, waits: bool) -> None:
        if waits or not any(host is pinned for pinned in self._pinned):
            self.paged += 1
        else:
            self.sent += 1


class Lists(TorchFunctionMode):
    """Counts lists that become tensors of the device, by copies that wait."""

    sent = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor):
            self.sent += kwargs.get("device") == META
        return func(*args, **kwargs)


def watched(work: str, adapters: int, run: Callable[[], object]) -> Waits:
    """Run it and count."""
    with count() as launches, Watch(launches) as watch, Lists() as lists:
        run()
    late = sum(at == launches.total() for at in watch.reads)
    early = len(watch.reads) - late
    return Waits(work, adapters, dict(launches), late, early, watch.paged + lists.sent, watch.sent)


class Queue(WorkQueue):
    """Begins work at once, and counts copies of its own memory, which a card's queue does not wait for."""

    sent = fetched = 0

    def host_memory(self, n_bytes: int) -> Tensor:
        """See `WorkQueue`."""
        return torch.zeros(n_bytes, dtype=torch.uint8)

    def begin(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `WorkQueue`."""
        work()
        return lambda: None

    def send(self, host: Tensor) -> Tensor:
        """See `WorkQueue`."""
        self.sent += 1
        return torch.empty(host.shape, dtype=host.dtype, device=META)

    def fetch(self, device: Tensor, host: Tensor) -> None:
        """See `WorkQueue`."""
        self.fetched += 1


def by_a_library(weights: Sequence[ProductWeight]) -> Products:
    """Each product by the library, whose switches torch has on cards alone."""
    table = table_for(CPU, torch.bfloat16)
    table.library = library = Library(contextlib.nullcontext())
    for shape in map(ProductShape.of, weights):
        table.tried[shape] = frozenset(ROWS_OF_DECODING)
        for rows in BUCKETS:
            table.speeds[shape, rows] = {table.own(shape, rows).name: 99.0, library.name: 1.0}
    return Products(table)


def by_tiles(_weights: Sequence[ProductWeight]) -> Products:
    """Each product by Motet's own."""
    return Products(table_for(CPU, torch.bfloat16))


def base_on_meta(
    products_of: Callable[[Sequence[ProductWeight]], Products] = by_tiles,
) -> tuple[LoraModel, CudaBase]:
    """A base by the kernels for cards."""
    base = without_values()
    base.compute_with(replace(LIKE_A_GPU, rows=1, attention="triton"))
    base.read_keys_in_blocks(tiny.BLOCK)
    base.kernels = own = CudaBase(base, products_of)
    base.attention = own.attention
    return base, own


def decoding(
    n_adapters: int,
    found: list[Waits],
    of: str = "",
    products_of: Callable[[Sequence[ProductWeight]], Products] = by_tiles,
    n_blocks: int = 1,
) -> None:
    """A step of a row for each adapter, or of one without, whose rows join; and one in which nothing changes."""
    with Unpinned():
        base, own = base_on_meta(products_of)
    weights = tuple(adapter(base, 8 + row % 2) for row in range(n_adapters)) or (None,)
    rows = range(len(weights))
    cache, queue = KVCache(len(rows) * n_blocks, tiny.BLOCK, META), Queue(META)
    steps, table = CudaSteps(own, cache, queue, Recorder(CPU)), StepTable(len(rows), n_blocks)
    steps.hold(table)
    records = [(row * table.width + column, value) for row in rows for column, value in ((TOKEN, 7), (BLOCKS, row))]
    joined = np.array([*records, *((table.order_at(PLAIN) + row, row) for row in rows)], np.int64)
    for work, changes in (("decode", joined), ("decode again", joined[:0])):
        queue.sent = queue.fetched = 0
        step = DeviceStep(PLAIN, len(rows), changes, weights, n_blocks, truncates=False)
        waits = watched(work + of, n_adapters, partial(steps.launch, step))
        found.append(replace(waits, sent=waits.sent + queue.sent, fetched=queue.fetched))


def reading(n_adapters: int, found: list[Waits]) -> None:
    """A prompt for each adapter, or one without, is read, and the first tokens are drawn."""
    with Unpinned():
        base, _ = base_on_meta()
    weights: Sequence[AdapterWeights | None] = [adapter(base, 8 + row % 2) for row in range(n_adapters)] or [None]
    cache = KVCache(len(weights), tiny.BLOCK, META)
    runner = ModelRunner(base, cache)
    request = GenerateRequest("r", "job", np.zeros(3, np.int32), None, SamplingParams(), (1,))
    inputs = [NewTokens(each, [1, 2, 3], 0, cache.take(1)) for each in weights]
    sequences = [SampledSequence(Prompt(request, each, print), 0, 1) for each in weights]
    found.append(watched("read", n_adapters, lambda: runner.draw(sequences, runner.logits(inputs))))


def trainer_of(n_adapters: int) -> TorchTrainer:
    """Adapters of two ranks; the last one has a value head."""
    base, _ = base_on_meta()
    trainer = TorchTrainer(base, slots=n_adapters)
    for index in range(n_adapters):
        shape = AdapterConfig(rank=8 + index % 2, alpha=16)
        trainer.add_adapter(str(index), shape, seed=index, head=index == n_adapters - 1)
    return trainer


def batch_of(n_adapters: int) -> Batch:
    """Samples that share no rows, and at last a critic's."""
    segments = [
        Segment(str(index), make_samples([(3, 6), (5, 2)], index), REINFORCE, 16.0) for index in range(n_adapters)
    ]
    return Batch((*segments[:-1], replace(segments[-1], loss=ValueLoss(0.2))))


def work(n_adapters: int, found: list[Waits]) -> None:
    """A pass of scores, one of training, and the steps of all adapters."""
    with Unpinned():
        trainer = trainer_of(n_adapters)
    batch = batch_of(n_adapters)
    found.append(watched("score", n_adapters, lambda: trainer.forward(batch)))
    found.append(watched("train", n_adapters, lambda: trainer.forward_backward(batch)))
    due = [(str(index), AdamW(1e-3)) for index in range(n_adapters)]
    found.append(watched("step", n_adapters, lambda: trainer.optim_steps(due)))


def main(_words: Sequence[str] = ()) -> None:
    found: list[Waits] = []
    works: list[Callable[[], None]] = []
    for n_adapters in (0, 8, 64):
        works += [partial(each, n_adapters, found) for each in (decoding, reading)]
        works += [partial(decoding, n_adapters, found, " by a library", by_a_library)]
        works += [partial(decoding, n_adapters, found, " of many blocks", n_blocks=2 * PIECE // tiny.BLOCK)]
        works += [partial(work, n_adapters, found)] if n_adapters else []
    requests(TARGETS["sm_90"], works)
    for waits in found:
        print(json.dumps(asdict(waits)))


if __name__ == "__main__":
    main()
