"""The trained state of one adapter in contiguous memory: fp32 masters, gradient, AdamW moments and the version in use."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from motet.config import AdapterConfig
from motet.core.batch import AdamW, OptimStats
from motet.core.errors import AdapterError
from motet.model.adapter_step import AdapterStep, StepNorms
from motet.model.distribution import MathKernels
from motet.model.lora import AdapterLayout, AdapterWeights, LoraMatrices, new_vector
from motet.model.peft_io import save_tensors
from motet.model.unit_sums import UnitSums, split_saved

OPTIMIZER = "optimizer.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")
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
        self.scaling = shape.alpha / shape.rank
        self.own = own
        self.valuing = head > 0
        """Whether it has a value head."""
        self.dtype = dtype
        self.masters = torch.nn.Parameter(flat)
        self._gradient: Tensor | None = None
        self._sums: UnitSums | None = None
        self.pending = False
        """Whether a gradient was added since the last step."""
        self._adamw = self._new_adamw()
        self.weights = self._compute_copy()
        self.parked = 0
        """Number of parked vectors."""
        self._outside: Tensor | None = None  # [4, size], or [6, size] once there were `sums`

    def _new_adamw(self) -> torch.optim.AdamW:
        return torch.optim.AdamW([self.masters], fused=True)

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
        self._gradient, self._sums, self.masters.grad, self.pending = None, None, None, False

    @property
    def head_gradient(self) -> Tensor | None:
        """View of what is added to the value head's in fp32 [D + 1]; None if the adapter has none."""
        return self._floats[self.layout.size :] if self.valuing else None

    @property
    def values(self) -> Tensor | None:
        """Weights and bias of the value head, in fp32 [D + 1]; None if the adapter has none."""
        return self.masters.detach()[self.layout.size :] if self.valuing else None

    def set_masters(self, flat: Tensor) -> None:
        """Replace the weights and reset the moments."""
        with torch.no_grad():
            self.masters[: self.layout.size].copy_(flat)
        self._clear()
        self._adamw = self._new_adamw()
        self.weights = self._compute_copy()

    def add(self, parts: dict[str, LoraMatrices]) -> None:
        """Add the gradient of a segment; A's part comes without alpha / rank, which is applied here.

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

    def step(self, adamw: AdamW) -> OptimStats:
        """Clip by norm and apply AdamW; a gradient that is not finite is only cleared."""
        return step_all([(self, adamw)])[0]

    def due(self, adamw: AdamW) -> AdapterStep:
        """The next step as kernels take it; `take` ends it. Nothing changes here."""
        masters, state = self.masters.detach(), self._adamw.state.get(self.masters, {})
        mean, square = (state[name] if name in state else torch.zeros_like(masters) for name in MOMENTS)
        gradient = self._floats if self._sums is None else self._gradient
        flat = new_vector(len(masters), self.dtype, masters.device, zeros=False)
        new = AdapterWeights(self.layout, self.scaling, flat)
        return AdapterStep(adamw, int(state.get("step", 0)) + 1, masters, mean, square, gradient, self._sums, new)

    def take(self, step: AdapterStep, norms: StepNorms) -> OptimStats:
        """End a step that kernels took, or left out because the gradient is not finite; clears the gradient."""
        skipped = not norms.gradient < math.inf
        if not skipped:
            count = torch.tensor(float(step.number))
            moments = dict(zip(MOMENTS, (step.mean, step.square), strict=True))
            self._adamw.state[self.masters].update({"step": count, **moments})
            self.weights = step.new
        self._clear()
        return OptimStats(norms.gradient, step.adamw.lr, skipped=skipped, adapter_norm=norms.weights)

    def park(self, directory: Path | None) -> None:
        """Move masters, moments and a pending gradient to host memory, or to disk in a directory.

        Raises:
            OSError: the disk has no room; nothing was moved.
        """
        rows = 4 if self._sums is None else 6
        if self._outside is None or len(self._outside) < rows:
            self._outside = _outside(rows, len(self.masters), self.masters.device, directory)
        state = self._adamw.state.get(self.masters, {})
        moved = [self.masters.detach(), *(state[name] for name in MOMENTS if name in state)]
        moved += [] if self._gradient is None else [self._gradient]
        if self._sums is not None:
            moved += self._sums.take_out()
        self.parked = len(moved)
        for place, tensor in zip(self._outside, moved, strict=False):
            place.copy_(tensor)
        nothing = self.masters.new_empty(0)
        self._gradient = None if self._gradient is None else nothing
        self.masters.grad, self.masters.data = None, nothing
        state.update({name: nothing for name in MOMENTS if name in state})

    def bring_in(self) -> None:
        """Restore what `park` moved, with the same bits."""
        if not self.parked:
            return
        assert self._outside is not None
        device, moved = self.masters.device, self._outside[: self.parked]
        if self._sums is not None:
            moved = self._sums.put_back(moved, device)
        back = [new_vector(len(place), place.dtype, device).copy_(place) for place in moved]
        self.masters.data = back.pop(0)
        self._gradient = None if self._gradient is None else back.pop()
        if back:
            self._adamw.state[self.masters].update(dict(zip(MOMENTS, back, strict=True)))
        self.parked = 0

    def save_optimizer(self, directory: Path, *, gradient: bool = True) -> None:
        """Write AdamW's moments and step count, and with `gradient` a pending one."""
        state = self._adamw.state.get(self.masters, {})
        moments = {name: state.get(name, torch.zeros(len(self.masters))).cpu() for name in MOMENTS}
        tensors = {**moments, "step": torch.as_tensor(state.get("step", 0.0), dtype=torch.float32).reshape(1).cpu()}
        if self.pending and gradient:
            tensors |= {} if self._gradient is None else {"gradient": self._gradient.cpu()}
            tensors |= {} if self._sums is None else self._sums.saved()
        save_tensors(tensors, directory / OPTIMIZER, self._metadata())

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

    def _metadata(self) -> dict[str, str]:
        """Names the layers of the moments. A single entry, because safetensors writes several in random order."""
        layout = {"places": self.layout.paths, "rank": self.layout.rank}
        return {"layout": json.dumps(layout)}

    def read_optimizer(self, directory: Path) -> dict[str, Tensor]:
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
        wanted = {**dict.fromkeys({*MOMENTS, *tensors}, self.masters.shape), "step": torch.Size([1])}
        found = {name: tensor.shape for name, tensor in tensors.items() if tensor.dtype == torch.float32}
        if set(tensors) - {"gradient"} != {*MOMENTS, "step"} or found != wanted or layout != self._metadata():
            raise AdapterError(f"{path} belongs to an adapter of another shape")
        return tensors | sums

    def set_optimizer(self, tensors: dict[str, Tensor]) -> None:
        """Replace the moments, and add a gradient that waited for its step."""
        device = self.masters.device
        self._adamw = self._new_adamw()
        if float(tensors["step"]) > 0:
            self._adamw.state[self.masters] = {
                "step": tensors["step"].reshape(()).to(device if self.own is None else "cpu"),
                **{name: tensors[name].to(device) for name in MOMENTS},
            }
        if "gradient" in tensors:
            self._floats.copy_(tensors["gradient"])
        self._sums = UnitSums.of_saved(tensors, device)
        self.pending = self._gradient is not None or self._sums is not None


def step_all(due: Sequence[tuple[AdapterArena, AdamW]]) -> list[OptimStats]:
    """Steps of adapters of one base, together if its kernels take them."""
    own = due[0][0].own
    if own is None:
        return [_step_by_torch(arena, adamw) for arena, adamw in due]
    steps = [arena.due(adamw) for arena, adamw in due]
    taken = zip(due, steps, own.step_all(steps), strict=True)
    return [arena.take(step, norms) for (arena, _), step, norms in taken]


def _step_by_torch(arena: AdapterArena, adamw: AdamW) -> OptimStats:
    gradient = arena.gradient
    norm = float(torch.linalg.vector_norm(gradient))
    skipped = not norm < math.inf
    if not skipped:
        if norm > adamw.clip_norm and (factor := adamw.clip_norm / (norm + 1e-6)) < 1:
            gradient.mul_(factor)
        options = {"lr": adamw.lr, "betas": adamw.betas, "eps": adamw.eps, "weight_decay": adamw.weight_decay}
        arena._adamw.param_groups[0].update(options)
        arena.masters.grad = gradient
        arena._adamw.step()
        arena.weights = arena._compute_copy()
    arena._clear()
    weights = float(torch.linalg.vector_norm(arena.masters.detach()[: arena.layout.size]))
    return OptimStats(grad_norm=norm, lr=adamw.lr, skipped=skipped, adapter_norm=weights)


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
