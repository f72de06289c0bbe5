"""Checkpoints in four and eight bits as their publishers store them, made of tiny models byte by byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support import tiny_models as tiny

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FLOAT8_BLOCK = (32, 32)
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def nf4(weight: Tensor, nested: bool) -> dict[str, Tensor]:
    """The tensors of a weight [N, K], by what their names have more than the layer's path."""
    runs = weight.float().flatten().split(64)
    absmax = torch.stack([run.abs().max() for run in runs])
    table = torch.tensor(NF4)
    nearest = torch.cat(
        [(run / scale)[:, None].sub(table).abs().argmin(-1) for run, scale in zip(runs, absmax, strict=True)]
    )
    pairs = torch.nn.functional.pad(nearest, (0, nearest.numel() % 2)).view(-1, 2)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    tensors = {"weight": (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8), "weight.quant_map": table}
    if nested:
        offset = absmax.mean()
        groups = (absmax - offset).split(256)
        scales = torch.stack([group.abs().max() for group in groups])
        numbers = torch.linspace(-1, 1, 256)
        stored = [
            (group / scale)[:, None].sub(numbers).abs().argmin(-1) for group, scale in zip(groups, scales, strict=True)
        ]
        tensors |= {"weight.absmax": torch.cat(stored).to(torch.uint8), "weight.nested_absmax": scales}
        tensors["weight.nested_quant_map"] = numbers
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
    else:
        tensors["weight.absmax"] = absmax
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return {**tensors, "weight.quant_state.bitsandbytes__nf4": text}


def mxfp4(weights_EKN: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks and exponents of the weights of experts."""
    blocks = weights_EKN.float().transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = (blocks.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2).clamp(-127, 127)
    nearest = (blocks * torch.exp2(-exponents)[..., None])[..., None].sub(torch.tensor(FP4)).abs().argmin(-1)
    return (nearest[..., ::2] | nearest[..., 1::2] << 4).to(torch.uint8), (exponents + 127).to(torch.uint8)


def write_nf4(directory: Path, name: str = "llama", *, nested: bool = True) -> None:
    """A tiny model with each linear layer in nf4."""
    tensors: dict[str, Tensor] = {}
    for key, tensor in load_file(tiny.directory(name) / "model.safetensors").items():
        path = key.removesuffix("weight")
        parts = nf4(tensor, nested) if key.endswith("_proj.weight") else {"weight": tensor}
        tensors |= {path + part: value for part, value in parts.items()}
    said = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": nested}
    _write(directory, name, tensors, {"quant_method": "bitsandbytes", **said})


def write_mxfp4(directory: Path) -> None:
    """The tiny gpt-oss with its experts in MXFP4."""
    tensors: dict[str, Tensor] = {}
    for key, tensor in load_file(tiny.directory("gpt_oss") / "model.safetensors").items():
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[f"{key}_blocks"], tensors[f"{key}_scales"] = mxfp4(tensor)
        else:
            tensors[key] = tensor
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    _write(directory, "gpt_oss", tensors, {"quant_method": "mxfp4", "modules_to_not_convert": left_out})


def write_float8(directory: Path) -> None:
    """The tiny Llama with each linear layer as eight-bit numbers, and scales for blocks, some of them cut at an edge."""
    tensors: dict[str, Tensor] = {}
    for key, tensor in load_file(tiny.directory("llama") / "model.safetensors").items():
        if not key.endswith("_proj.weight"):
            tensors[key] = tensor
            continue
        blocks = tensor.float().unflatten(0, (-1, FLOAT8_BLOCK[0])).unflatten(2, (-1, FLOAT8_BLOCK[1]))
        scales = blocks.abs().amax(dim=(1, 3)) / 448
        tensors[key] = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
        tensors[key.replace("weight", "weight_scale_inv")] = scales
    said = {"quant_method": "fp8", "weight_block_size": FLOAT8_BLOCK, "activation_scheme": "dynamic"}
    _write(directory, "llama", tensors, said)


def _write(directory: Path, name: str, tensors: dict[str, Tensor], said: dict[str, Any]) -> None:
    for file in tiny.directory(name).iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()}, directory / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
