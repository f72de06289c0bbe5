"""Adapters to PEFT's files and back, and what PEFT computes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from motet.config import AdapterConfig
from motet.model.find import SMALL_BASE
from motet.model.lora import AdapterWeights
from motet.model.lora_model import LoraModel
from motet.model.peft_io import flatten, read_adapter, write_adapter


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> bool:
    return float((ours - theirs).abs().max()) <= tolerance * float(theirs.abs().max())


def export(directory: Path, base: LoraModel, weights: AdapterWeights, targets: str | list[str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    masters = weights.flat.float().clone()
    masters[: weights.layout.size_a] /= weights.scaling
    rank = weights.layout.rank
    shape = AdapterConfig(rank=rank, alpha=weights.scaling * rank, target_modules=targets)
    write_adapter(directory, base, weights.layout, shape, masters)


def save_random(directory: Path, seed: int = 0) -> None:
    """An adapter that changes what the small base says."""
    base = AutoModelForCausalLM.from_pretrained(SMALL_BASE, dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # A is PEFT's own
        peft = get_peft_model(base, LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"]))
    randomise(peft, seed)
    peft.save_pretrained(str(directory))


def load(directory: Path, base: LoraModel) -> AdapterWeights:
    peft = read_adapter(directory)
    layout = base.adapter_layout(peft.target_modules, peft.rank)
    masters = flatten(peft, base, layout, directory)
    return AdapterWeights.from_masters(layout, peft.alpha / peft.rank, masters, base.dtype)


@torch.no_grad()
def peft_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model.eval()(input_ids=ids[None], use_cache=False).logits[0].float()
    return logits


def randomise(model: Any, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
