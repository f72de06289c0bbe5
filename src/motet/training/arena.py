"""The trained state of one adapter in contiguous memory: fp32 masters, gradient and AdamW moments, and the version in use."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from motet.config import OptimizerConfig
from motet.errors import AdapterError
from motet.model.lora import AdapterLayout, AdapterWeights
from motet.model.peft_io import save_tensors
from motet.types import OptimStats

OPTIMIZER = "optimizer.safetensors"


class AdapterArena:
    """Owned by the trainer, one per resident adapter; made anew for every job, so a slot never remembers its last owner."""

    def __init__(
        self, layout: AdapterLayout, scaling: float, masters: Tensor, config: OptimizerConfig, dtype: torch.dtype
    ) -> None:
        self.layout = layout
        self.scaling = scaling
        self.config = config
        self.dtype = dtype
        self.masters = torch.nn.Parameter(masters.clone())
        self.gradient = torch.zeros_like(masters)
        self.masters.grad = self.gradient
        self.gradient_products = layout.products(self.gradient)
        self._adamw = self._new_adamw()
        self.weights = self._compute_copy()

    def _new_adamw(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            [self.masters],
            lr=1.0,
            betas=self.config.betas,
            eps=self.config.eps,
            weight_decay=self.config.weight_decay,
            fused=True,
        )

    def _compute_copy(self) -> AdapterWeights:
        return AdapterWeights.from_masters(self.layout, self.scaling, self.masters, self.dtype)

    def set_masters(self, flat: Tensor) -> None:
        """Start from these weights, with fresh moments."""
        with torch.no_grad():
            self.masters.copy_(flat)
        self.gradient.zero_()
        self._adamw = self._new_adamw()
        self.weights = self._compute_copy()

    def step(self, lr: float) -> OptimStats:
        """Clip by norm and apply AdamW; a gradient that is not finite changes nothing but is cleared."""
        norm = float(torch.linalg.vector_norm(self.gradient))
        skipped = not (norm < float("inf"))
        if not skipped:
            if norm > self.config.clip_norm:
                self.gradient.mul_(self.config.clip_norm / (norm + 1e-6))
            self._adamw.param_groups[0]["lr"] = lr
            self._adamw.step()
            self.weights = self._compute_copy()
        self.gradient.zero_()
        return OptimStats(grad_norm=norm, lr=lr, skipped=skipped)

    def save_optimizer(self, directory: Path) -> None:
        """Write AdamW's moments and step count."""
        state = self._adamw.state.get(self.masters, {})
        moments = {name: state.get(name, torch.zeros(self.layout.size)).cpu() for name in ("exp_avg", "exp_avg_sq")}
        tensors = {
            **moments,
            "step": torch.as_tensor(state.get("step", 0.0), dtype=torch.float32).reshape(1).cpu(),
        }
        save_tensors(tensors, directory / OPTIMIZER, self._metadata())

    def _metadata(self) -> dict[str, str]:
        """Which layers the moments belong to; one entry, because safetensors writes several in random order."""
        layout = {"places": [place.path for place in self.layout.places], "rank": self.layout.rank}
        return {"layout": json.dumps(layout)}

    def load_optimizer(self, directory: Path) -> None:
        """Read what `save_optimizer` wrote.

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
        if set(tensors) != {"exp_avg", "exp_avg_sq", "step"} or layout != self._metadata():
            raise AdapterError(f"{path} belongs to an adapter of another shape")
        device = self.masters.device
        self._adamw = self._new_adamw()
        if float(tensors["step"]) > 0:
            self._adamw.state[self.masters] = {
                "step": tensors["step"].reshape(()).to(device),
                "exp_avg": tensors["exp_avg"].to(device),
                "exp_avg_sq": tensors["exp_avg_sq"].to(device),
            }
