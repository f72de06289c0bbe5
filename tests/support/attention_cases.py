"""Shapes and caches that attention is tested with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from motet.model.attention import motet_attention
from motet.model.attention.torch_attention import TorchPass
from motet.model.attention.torch_metadata import TorchMetadata
from motet.model.kv_cache import KVCache

BLOCK, HEADS, WIDTH = 16, 2, 16
PROMPTS = [(40, [45, 41, 60, 70, 49]), (17, [20, 33]), (0, [5]), (0, [50]), (48, [49, 52, 81])]
"""Tokens that the members of a prompt have in common, and their lengths."""


def shared_blocks(cache: KVCache) -> list[list[int]]:
    """Blocks of each sequence; members of a prompt share its full ones."""
    tables: list[list[int]] = []
    for common, lengths in PROMPTS:
        shared = cache.take(common // BLOCK)
        tables.extend([*shared, *cache.take(-(-length // BLOCK) - len(shared))] for length in lengths)
    return tables


class Layer(nn.Module):
    """Number 0."""

    layer_idx = 0


def attend(states: list[Tensor], metadata: TorchMetadata, **options: Any) -> Tensor:
    """Query, key and value [T, heads, E] → [T, H, E]."""
    query, key, value = (each.transpose(0, 1)[None] for each in states)
    output, _ = motet_attention(Layer(), query, key, value, None, attention_pass=TorchPass(metadata), **options)
    return output[0]


def sequences(dtype: torch.dtype, heads: int) -> list[list[Tensor]]:
    """Query, key and value of each sequence; members of a prompt begin alike."""
    generator = torch.Generator().manual_seed(0)

    def random(n: int) -> list[Tensor]:
        return [torch.randn(n, width, WIDTH, generator=generator).to(dtype) for width in (heads, HEADS, HEADS)]

    made: list[list[Tensor]] = []
    for common, lengths in PROMPTS:
        prompt = random(common)
        rests = [random(length - common) for length in lengths]
        made.extend([torch.cat([one, other]) for one, other in zip(prompt, rest, strict=True)] for rest in rests)
    return made


def sinks_of(heads: int) -> Tensor:
    """Some above all scores, some far below."""
    return torch.linspace(-9.0, 6.0, heads)
