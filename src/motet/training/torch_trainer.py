"""The trainer on one device: packed batches of several adapters over the base that also samples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from motet.config import AdapterConfig, EngineConfig
from motet.core.batch import Batch, Optimizer, OptimStats, Segment, Trained
from motet.core.errors import AdapterError, BaseModelError
from motet.core.types import FloatArray
from motet.model.accelerator import wait_for
from motet.model.lora import AdapterWeights, LoraMatrices, initial_weights
from motet.model.lora_model import LoraModel
from motet.model.peft_io import flatten, read_adapter, write_adapter
from motet.model.recompute import prepare, recomputes
from motet.model.unit_sums import UnitSums
from motet.protocols import Pieces
from motet.training.arena import AdapterArena, step_all
from motet.training.head import whole
from motet.training.packed_pass import Learning, PackedPass
from motet.training.residence import Residence


class TorchTrainer:
    """A `Trainer` on one CPU or GPU."""

    def __init__(
        self,
        base: LoraModel,
        *,
        slots: int,
        kept_tokens: int | None = None,
        share_prompts: bool = True,
        resident: int = 0,
        parking: Path | None = None,
        inputs: Path | None = None,
    ) -> None:
        """Start without adapters.

        Args:
            base: the base of the adapters.
            slots: most adapters at a time.
            kept_tokens: tokens of the largest pass that keeps its activations; larger ones compute them again. None keeps
                all.
            share_prompts: run the prompt of neighbouring samples once; logprobs have the same bits either way.
            resident: adapters that keep masters and moments on the device; 0 keeps all there.
            parking: a directory for the masters and moments of the others; None uses host memory.
            inputs: a directory for the inputs of layers that are computed again; None keeps them on the device.

        Raises:
            BaseModelError: the base cannot compute its layers again, and `kept_tokens` is 0.
        """
        self.base = base
        self._share_prompts, self._inputs = share_prompts, inputs
        self.slots = slots
        self._residence = Residence(resident, parking)
        self._arenas = self._residence.arenas
        if kept_tokens == 0 and not recomputes(base):
            raise BaseModelError(f"{base.info.name} cannot compute its layers again; set engine.recompute to false")
        self._kept_tokens = kept_tokens if recomputes(base) else None
        if self._kept_tokens is not None:
            prepare(base)

    @classmethod
    def of(cls, base: LoraModel, engine: EngineConfig) -> TorchTrainer:
        """Make the trainer for a configuration. Raises BaseModelError if the base cannot recompute."""
        parking, inputs = (
            None if path is None else Path(path).expanduser() for path in (engine.parking, engine.offload)
        )
        return cls(
            base,
            slots=engine.slots,
            kept_tokens=engine.kept_tokens,
            resident=engine.resident,
            parking=parking,
            inputs=inputs,
        )

    def add_adapter(self, name: str, shape: AdapterConfig, seed: int, *, head: bool = False) -> None:
        """Take a slot for a new adapter (B = 0), with zero moments and step count 0; `head` adds a value head."""
        if name in self._arenas:
            raise AdapterError(f"adapter {name!r} exists already")
        if len(self._arenas) >= self.slots:
            raise AdapterError(f"all {self.slots} adapter slots are taken; raise engine.slots or wait for a job to end")
        layout = self.base.adapter_layout(shape.target_modules, shape.rank)
        own = self.base.math
        masters = initial_weights(layout, seed, in_two_steps=own is not None).to(self.base.device)
        width = self.base.info.hidden_size + 1 if head else 0
        arena = AdapterArena(layout, shape, masters, self.base.dtype, head=width, own=own)
        self._residence.add(name, arena)

    def remove_adapter(self, name: str) -> None:
        """Release the slot."""
        self._arena(name)
        self._residence.remove(name)

    def weights(self, name: str) -> AdapterWeights:
        """The version in use, as tensors; immutable."""
        return self._arena(name).weights

    def forward_backward(self, batch: Batch) -> tuple[Trained, ...]:
        """Add the gradient of each segment to its adapter; sums and logprobs of each."""
        return whole(self.train_in_pieces(batch))

    def train_in_pieces(self, batch: Batch) -> Pieces[tuple[Trained, ...]]:
        """`forward_backward` as a generator of pieces."""
        packed = self.packed(batch, batch.n_tokens, share=self._share_prompts)
        with self._using(*(segment.adapter for segment in batch.segments)) as arenas:
            trained = yield from packed.train(list(map(self._learning, arenas, batch.segments)))
            for arena in arenas:
                arena.pending = True
        return trained

    def packed(self, batch: Batch, n_tokens: int, *, share: bool = True) -> PackedPass:
        """A batch laid out to be trained, as part of a pass of so many tokens."""
        recompute = self._kept_tokens is not None and n_tokens > self._kept_tokens
        return PackedPass(self.base, batch, share=share, recompute=recompute, inputs=self._inputs)

    def _learning(self, arena: AdapterArena, segment: Segment) -> Learning:
        """Where a segment's gradient is added."""
        if adds_whole(self.base, by_sample=segment.by_sample):
            return Learning(arena.weights, None, head=arena.values, sums=arena.sums)
        return Learning(arena.weights, arena.gradient_matrices, head=arena.values, head_gradient=arena.head_gradient)

    def values(self, name: str) -> Tensor | None:
        """Weights and bias of the value head [D + 1]; None if the adapter has none."""
        with self._using(name) as (arena,):
            return arena.values

    def add_gradient(self, name: str, parts: dict[str, LoraMatrices] | UnitSums, head: Tensor | None) -> None:
        """Add a segment's gradient from another rank as `forward_backward` adds it: parts with A unscaled, or units."""
        with self._using(name) as (arena,):
            if isinstance(parts, UnitSums):
                arena.sums.add(parts)
                arena.pending = True
            else:
                arena.add(parts)
            if head is not None and arena.head_gradient is not None:
                arena.head_gradient.add_(head)

    def forward(self, batch: Batch, *, base: bool = False) -> tuple[tuple[FloatArray, ...], ...]:
        """Logprobs [T] per sample per segment, no gradient; `base=True` disables the adapters (the KL reference)."""
        return whole(self.score_in_pieces(batch, base=base))

    def score_in_pieces(self, batch: Batch, *, base: bool = False) -> Pieces[tuple[tuple[FloatArray, ...], ...]]:
        """`forward` as a generator of pieces."""
        packed = PackedPass(self.base, batch, share=self._share_prompts)
        if base:
            return (yield from packed.score(None))
        names = [segment.adapter for segment in batch.segments]
        valuing = [name for name in names if self._arena(name).valuing]
        with self._using(*valuing):
            arenas = [self._arena(name) for name in names]
            return (yield from packed.score([arena.weights for arena in arenas], [arena.values for arena in arenas]))

    def wait(self) -> None:
        """Wait until the device has done all that was begun."""
        wait_for(self.base.device)

    def optim_step(self, name: str, optimizer: Optimizer) -> OptimStats:
        """Clip, step and clear the gradient of one adapter; the next version can then be published."""
        return self.optim_steps([(name, optimizer)])[0]

    @property
    def steps_at_once(self) -> int:
        """Of how many adapters kernels take the steps at once: of those that may be on the device."""
        return (self._residence.room or self.slots) if adds_whole(self.base, by_sample=False) else 1

    def optim_steps(self, due: Sequence[tuple[str, Optimizer]]) -> list[OptimStats]:
        """`optim_step` of several adapters, with optimizers of one class."""
        with self._using(*(name for name, _ in due)) as arenas:
            return step_all([(arena, optimizer) for arena, (_, optimizer) in zip(arenas, due, strict=True)])

    def save_adapter(self, name: str, directory: Path, *, optimizer: bool, gradient: bool = True) -> None:
        """Write PEFT files to an existing directory; `optimizer` adds its state. May run during device calls."""
        with self._using(name) as (arena,), _no_openmp_team():
            shape = arena.shape
            write_adapter(directory, self.base, arena.layout, shape, arena.masters)
            arena.save_head(directory)
            if optimizer:
                arena.save_optimizer(directory, gradient=gradient)

    def load_adapter(self, name: str, directory: Path, *, optimizer: bool) -> None:
        """Read what `save_adapter` wrote, or any plain PEFT LoRA directory (`optimizer=False`)."""
        shape, peft = self._arena(name).shape, read_adapter(directory)
        if peft.alpha != shape.alpha:
            raise AdapterError(
                f"{directory} has alpha {peft.alpha:g}, the job asks for {shape.alpha:g}; set adapter.alpha to {peft.alpha:g}"
            )
        if type(shape) is not peft.kind:
            raise AdapterError(f"{directory} is of another type than the job's adapter; set adapter.type to its own")
        with self._using(name) as (arena,):
            masters = flatten(peft, self.base, arena.layout, directory).to(self.base.device)
            state = arena.read_optimizer(directory) if optimizer else None
            arena.load_head(directory)
            arena.set_masters(masters)  # last: what cannot be read changes nothing
            if state is not None:
                arena.set_optimizer(*state)

    @property
    def parks(self) -> bool:
        """Whether adapters may have their training state off the device."""
        return self._residence.room > 0

    def bring_in(self, names: Sequence[str], beside: Sequence[str] = ()) -> None:
        """Load adapters' training state before they are trained; see `Parking`."""
        with _no_openmp_team():
            self._residence.bring_in(names, beside)

    def _using(self, *names: str) -> contextlib.AbstractContextManager[list[AdapterArena]]:
        """Arenas with their training state on the device."""
        for name in names:
            self._arena(name)
        return self._residence.using(names)

    def _arena(self, name: str) -> AdapterArena:
        arena = self._arenas.get(name)
        if arena is None:
            raise AdapterError(
                f"there is no adapter {name!r} in the trainer; there are: {', '.join(self._arenas) or 'none'}"
            )
        return arena


def adds_whole(base: LoraModel, *, by_sample: bool) -> bool:
    """Whether a segment's gradient is added as whole numbers: by sample, or because the kernels add all so."""
    return by_sample or (base.kernels is not None and base.kernels.whole_sums)


@contextlib.contextmanager
def _no_openmp_team() -> Iterator[None]:
    """Use one torch thread in the current thread during the block.

    A thread adopts, at its first operation, the number of threads that any thread set last: the device's, while it
    trains. OpenMP would then keep a second team, and with more threads than cores every team waits by sleeping.
    """
    before = torch.get_num_threads()  # the number is adopted here, not inside
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
