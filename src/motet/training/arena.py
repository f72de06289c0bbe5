"""The trained state of one adapter in contiguous memory: fp32 masters, gradient, the optimizer's and the version in use."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.adamw import adamw

from motet.config import AdapterConfig
from motet.config.optimizers import OPTIMIZERS, name_of
from motet.core.batch import AdamW, Optimizer, OptimStats
from motet.core.errors import AdapterError
from motet.model.adapter_step import AdapterStep, StepNorms
from motet.model.distribution import MathKernels
from motet.model.lora import AdapterLayout, AdapterWeights, LoraMatrices, new_vector
from motet.model.peft_io import save_tensors
from motet.model.unit_sums import UnitSums, split_saved

OPTIMIZER = "optimizer.safetensors"
HEAD = "value_head.safetensors"


class AdapterArena:
    """Training state of one adapter. Each adapter gets a new arena, so nothing remains of a slot's last owner.

    A parked arena keeps only its version in use on the device; call `bring_in` before using anything but `weights`.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        shape: AdapterConfig,
        masters: Tensor,
        dtype: torch.dtype,
        *,
        head: int = 0,
        own: MathKernels | None = None,
    ) -> None:
        """Start from masters; the optimizer step uses `own`, or torch if None.

        `head` further elements, initially zero, follow the matrices: the value head's weights [D] and its bias.
        """
        flat = new_vector(len(masters) + head, masters.dtype, masters.device)
        flat[: len(masters)] = masters
        self.layout, self.shape = layout, shape
        self.scaling = shape.scale
        self.own = own
        self.valuing = head > 0
        """Whether it has a value head."""
        self.dtype = dtype
        self.masters = flat
        self._gradient: Tensor | None = None
        self._sums: UnitSums | None = None
        self.pending = False
        """Whether a gradient was added since the last step."""
        self._forget()
        self.weights = self._compute_copy()
        self.parked = 0
        """Number of parked vectors."""
        self._outside: Tensor | None = None  # [4, size], or [6, size] once there were `sums`, with AdamW

    def _forget(self) -> None:
        """Begin without an optimizer's state."""
        self.kind: type[Optimizer] = AdamW
        """The optimizer of its last step."""
        self.count = 0
        """Steps of that optimizer."""
        self.state: tuple[Tensor, ...] = ()
        """That optimizer's vectors; none before its first step."""

    def _compute_copy(self) -> AdapterWeights:
        return AdapterWeights.from_masters(self.layout, self.scaling, self.masters, self.dtype)

    @property
    def gradient(self) -> Tensor:
        """The gradient since the last step, initially zero."""
        if self._sums is None or self._gradient is not None:
            return self._floats if self._sums is None else self._floats + self._sums.total()
        return self._sums.total()

    @property
    def sums(self) -> UnitSums:
        """What is added in whole numbers. Has memory as `_floats` has."""
        if self._sums is None:
            self._sums = UnitSums.empty(len(self.masters), self.masters.device)
        return self._sums

    @property
    def _floats(self) -> Tensor:
        """What is added in fp32. Has memory only between its first use and the step."""
        if self._gradient is None:
            masters = self.masters
            self._gradient = new_vector(len(masters), masters.dtype, masters.device, zeros=False).zero_()
        return self._gradient

    @property
    def gradient_matrices(self) -> dict[str, LoraMatrices]:
        """Views of what is added in fp32."""
        return self.layout.matrices(self._floats)

    def _clear(self) -> None:
        self._gradient, self._sums, self.pending = None, None, False

    @property
    def head_gradient(self) -> Tensor | None:
        """View of what is added to the value head's in fp32 [D + 1]; None if the adapter has none."""
        return self._floats[self.layout.size :] if self.valuing else None

    @property
    def values(self) -> Tensor | None:
        """Weights and bias of the value head, in fp32 [D + 1]; None if the adapter has none."""
        return self.masters[self.layout.size :] if self.valuing else None

    def set_masters(self, flat: Tensor) -> None:
        """Replace the weights and reset the optimizer's state."""
        self.masters[: self.layout.size].copy_(flat)
        self._clear()
        self._forget()
        self.weights = self._compute_copy()

    def add(self, parts: dict[str, LoraMatrices]) -> None:
        """Add the gradient of a segment; A's part comes without the scale, which is applied here.

        That is the order of a backward pass. Motet's kernels round after scaling, before adding.
        """
        for leader, own in self.layout.matrices(self._floats).items():
            if self.own is None:
                own.a.add_(parts[leader].a, alpha=self.scaling)
            else:
                own.a.add_(parts[leader].a * self.scaling)
            for (_, sums), (_, part) in zip(own.bs, parts[leader].bs, strict=True):
                sums.add_(part)
        self.pending = True

    def step(self, optimizer: Optimizer) -> OptimStats:
        """Clip by norm and step; a gradient that is not finite is only cleared."""
        return step_all([(self, optimizer)])[0]

    def due(self, optimizer: Optimizer) -> AdapterStep:
        """The next step as kernels take it; `take` ends it. Another optimizer begins anew. Nothing changes here."""
        masters, kind = self.masters, type(optimizer)
        count, state = (self.count, self.state) if kind is self.kind else (0, ())
        state = state or tuple(torch.zeros_like(masters) for _ in kind.STATE)
        gradient = self._floats if self._sums is None else self._gradient
        flat = new_vector(len(masters), self.dtype, masters.device, zeros=False)
        new = AdapterWeights(self.layout, self.scaling, flat)
        return AdapterStep(optimizer, count + 1, masters, state, gradient, self._sums, new)

    def take(self, step: AdapterStep, norms: StepNorms) -> OptimStats:
        """End a step that was taken, or left out because the gradient is not finite; clears the gradient."""
        skipped = not norms.gradient < math.inf
        if not skipped:
            self.masters.copy_(step.masters)
            self.kind, self.count, self.state = type(step.optimizer), step.number, tuple(step.state)
            self.weights = step.new
        self._clear()
        return OptimStats(norms.gradient, step.optimizer.lr, skipped=skipped, adapter_norm=norms.weights)

    def park(self, directory: Path | None) -> None:
        """Move masters, the optimizer's state and a pending gradient to host memory, or to disk in a directory.

        Raises:
            OSError: the disk has no room; nothing was moved.
        """
        rows = 2 + len(self.kind.STATE) + (0 if self._sums is None else 2)
        if self._outside is None or len(self._outside) < rows:
            self._outside = _outside(rows, len(self.masters), self.masters.device, directory)
        moved = [self.masters, *self.state]
        moved += [] if self._gradient is None else [self._gradient]
        if self._sums is not None:
            moved += self._sums.take_out()
        self.parked = len(moved)
        for place, tensor in zip(self._outside, moved, strict=False):
            place.copy_(tensor)
        nothing = self.masters.new_empty(0)
        self._gradient = None if self._gradient is None else nothing
        self.masters, self.state = nothing, tuple(nothing for _ in self.state)

    def bring_in(self) -> None:
        """Restore what `park` moved, with the same bits."""
        if not self.parked:
            return
        assert self._outside is not None
        device, moved = self.masters.device, self._outside[: self.parked]
        if self._sums is not None:
            moved = self._sums.put_back(moved, device)
        back = [new_vector(len(place), place.dtype, device).copy_(place) for place in moved]
        self.masters = back.pop(0)
        self._gradient = None if self._gradient is None else back.pop()
        self.state = tuple(back)
        self.parked = 0

    def save_optimizer(self, directory: Path, *, gradient: bool = True) -> None:
        """Write the optimizer's state and step count, and with `gradient` a pending one."""
        state = self.state or [torch.zeros(len(self.masters)) for _ in self.kind.STATE]
        vectors = {name: vector.cpu() for name, vector in zip(self.kind.STATE, state, strict=True)}
        tensors = {**vectors, "step": torch.tensor([float(self.count)])}
        if self.pending and gradient:
            tensors |= {} if self._gradient is None else {"gradient": self._gradient.cpu()}
            tensors |= {} if self._sums is None else self._sums.saved()
        save_tensors(tensors, directory / OPTIMIZER, self._metadata(name_of(self.kind)))

    def save_head(self, directory: Path) -> None:
        """Write the value head, if there is one, beside the adapter."""
        if self.values is not None:
            save_tensors({"head": self.values.cpu()}, directory / HEAD, {})

    def load_head(self, directory: Path) -> None:
        """Read what `save_head` wrote.

        Raises:
            AdapterError: missing, damaged, or of another base.
        """
        if self.values is None:
            return
        path = directory / HEAD
        try:
            self.values.copy_(load_file(str(path))["head"])
        except (OSError, SafetensorError, KeyError, RuntimeError) as error:
            raise AdapterError(f"{path} cannot be read: {error}") from error

    def _metadata(self, kind: str) -> dict[str, str]:
        """Names the layers of the state, and an optimizer that is not the first.

        A single entry, because safetensors writes several in random order.
        """
        layout = {"places": self.layout.paths, "rank": self.layout.rank}
        return {"layout": json.dumps(layout if kind == "adamw" else {**layout, "optimizer": kind})}

    def read_optimizer(self, directory: Path) -> tuple[type[Optimizer], dict[str, Tensor]]:
        """Read what `save_optimizer` wrote, for `set_optimizer`.

        Raises:
            AdapterError: missing, damaged, or of another adapter.
        """
        path = directory / OPTIMIZER
        try:
            tensors = load_file(str(path))
            with safe_open(str(path), framework="pt") as file:
                layout = file.metadata()
        except (OSError, SafetensorError) as error:
            raise AdapterError(f"{path} cannot be read: {error}") from error
        sums, tensors = split_saved(tensors, len(self.masters))
        kinds = {self._metadata(name)["layout"]: section.STEP for name, section in OPTIMIZERS.items()}
        kind = kinds.get((layout or {}).get("layout", ""))
        names = () if kind is None else (*kind.STATE, "step")
        wanted = {**dict.fromkeys({*names, *tensors}, self.masters.shape), "step": torch.Size([1])}
        found = {name: tensor.shape for name, tensor in tensors.items() if tensor.dtype == torch.float32}
        if kind is None or tensors.keys() - {"gradient"} != {*names} or found != wanted:
            raise AdapterError(f"{path} belongs to an adapter of another shape")
        return kind, tensors | sums

    def set_optimizer(self, kind: type[Optimizer], tensors: dict[str, Tensor]) -> None:
        """Replace the optimizer's state, and add a gradient that waited for its step."""
        device = self.masters.device
        self._forget()
        if (count := int(tensors["step"])) > 0:
            self.kind, self.count, self.state = kind, count, tuple(tensors[name].to(device) for name in kind.STATE)
        if "gradient" in tensors:
            self._floats.copy_(tensors["gradient"])
        self._sums = UnitSums.of_saved(tensors, device)
        self.pending = self._gradient is not None or self._sums is not None


def step_all(due: Sequence[tuple[AdapterArena, Optimizer]]) -> list[OptimStats]:
    """Steps of adapters of one base with one class of optimizer, together if its kernels take them.

    If several are due and this raises an exception, nothing is changed.
    """
    own, kind = due[0][0].own, type(due[0][1])
    steps = [arena.due(optimizer) for arena, optimizer in due]
    if own is not None and (kernel := own.steps.get(kind)) is not None:
        taken = list(zip(steps, kernel(steps), strict=True))
    else:
        taken = [_by_torch(step, torch.linalg.vector_norm if own is None else own.norm) for step in steps]
    return [arena.take(step, norms) for (arena, _), (step, norms) in zip(due, taken, strict=True)]


def _by_torch(step: AdapterStep, norm_of: Callable[[Tensor], float | Tensor]) -> tuple[AdapterStep, StepNorms]:
    """The step with its outcome: AdamW's is taken in place, and that of others is in new tensors."""
    gradient, optimizer = step.total(), step.optimizer
    norm = float(norm_of(gradient))
    if norm < math.inf:
        if norm > optimizer.clip_norm:
            gradient = gradient * (optimizer.clip_norm / (norm + 1e-6))
        if isinstance(optimizer, AdamW):
            _fused(optimizer, step, gradient)
        else:
            masters, *state = optimizer.step(step.number, step.masters, gradient, step.state)
            step = replace(step, masters=masters, state=state)
        layout, scaling, empty = step.new.layout, step.new.scaling, step.new.flat
        step = replace(step, new=AdapterWeights.from_masters(layout, scaling, step.masters, empty.dtype))
    return step, StepNorms(norm, float(torch.linalg.vector_norm(step.masters[: step.new.layout.size])))


def _fused(optimizer: AdamW, step: AdapterStep, gradient: Tensor) -> None:
    (mean, square), (beta1, beta2) = step.state, optimizer.betas
    before = torch.tensor(step.number - 1, dtype=torch.float32, device=gradient.device)
    adamw(
        [step.masters], [gradient], [mean], [square], [], [before], fused=True, amsgrad=False, maximize=False,
        lr=optimizer.lr, beta1=beta1, beta2=beta2, eps=optimizer.eps, weight_decay=optimizer.weight_decay,
    )  # fmt: skip


def _outside(rows: int, size: int, device: torch.device, directory: Path | None) -> Tensor:
    """Memory for vectors off the device: host memory, or a mapped file that is deleted with the process."""
    if directory is None:
        return torch.empty(rows, size, pin_memory=device.type == "cuda")
    handle, name = tempfile.mkstemp(prefix="motet-parked-", dir=directory)
    try:
        # report a full disk here, not by a signal when a page is written
        os.posix_fallocate(handle, 0, rows * size * 4)
        return torch.from_file(name, shared=True, size=rows * size, dtype=torch.float32).view(rows, size)
    finally:
        os.close(handle)
        os.unlink(name)
