"""How fast the machine could do a piece of work: its products at the best measured rate, its bytes at the measured bandwidth.

    seconds of a phase = max(floating-point operations ÷ rate, bytes ÷ bandwidth)

and a piece of work is the sum of its phases: reading prompts, decoding, gradients, updates. Counted are products with weights,
attention, and the bytes of weights and of keys and values; nothing else. Work that passes the limit has none of this kind: its
weights stay in a cache, or torch's products, whose rate is taken, are emulated on this processor.

Legend: P weights of the linear layers, H of the head, L of one adapter; a product with n weights is 2 n operations per token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

ELEMENT = 2
"""Bytes of a bfloat16."""
UPDATE = 34
"""Bytes per parameter that an optimizer step moves: reads and writes of fp32 master, gradient and two moments, and the copy."""


@dataclass(frozen=True)
class Machine:
    """What was measured of the hardware in the same run."""

    rate: float
    """Best bfloat16 product rate with all cores, operations per second."""
    bandwidth: float
    """Bytes read from memory per second."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama-shaped model."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int

    @classmethod
    def of(cls, directory: Path) -> Shape:
        """The sizes in a model's config.json."""
        config = json.loads((directory / "config.json").read_text())
        heads = config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            width=config["hidden_size"],
            inner=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head=config.get("head_dim") or config["hidden_size"] // heads,
            vocabulary=config["vocab_size"],
        )

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of the linear layers of one block."""
        queries, keys = self.heads * self.head, self.kv_heads * self.head
        attention = ((self.width, queries), (self.width, keys), (self.width, keys), (queries, self.width))
        return (*attention, (self.width, self.inner), (self.width, self.inner), (self.inner, self.width))

    @property
    def body_weights(self) -> int:
        """P: weights of all linear layers but the head."""
        return self.layers * sum(n_in * n_out for n_in, n_out in self.linears)

    @property
    def head_weights(self) -> int:
        """H: weights of the head."""
        return self.width * self.vocabulary

    def adapter_weights(self, rank: int) -> int:
        """L: weights of an adapter on all linear layers."""
        return self.layers * rank * sum(n_in + n_out for n_in, n_out in self.linears)

    def attention(self, context: float) -> float:
        """Operations per token that looks at so many keys: scores and sums."""
        return 4.0 * context * self.heads * self.head * self.layers

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values per token."""
        return 2 * self.layers * self.kv_heads * self.head * ELEMENT


@dataclass(frozen=True)
class Counts:
    """What one repeat computes."""

    decoded: float = 0.0
    """Tokens sampled."""
    passes: float = 0.0
    """Forward passes that sampled them."""
    prefilled: float = 0.0
    """Prompt tokens read, each group's prompt once."""
    trained: float = 0.0
    """Tokens that have to go forward and backward; a group's prompt once."""
    headed: float = 0.0
    """Of these, tokens whose logits are needed."""
    batches: float = 0.0
    """Forward and backward passes that trained them."""
    context: float = 0.0
    """Keys that a token sees, on average."""
    adapters: int = 0
    """Adapters in a pass; 0 is the base alone."""
    updates: float = 0.0
    """Optimizer steps, each of one adapter."""

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Counts:
        """From a worker's answer; unknown names are refused."""
        known = {field.name for field in fields(cls)}
        unknown = answer.keys() - known
        if unknown:
            raise ValueError(f"a worker counts what has no limit: {', '.join(sorted(unknown))}")
        return cls(**answer)


def least_seconds(counts: Counts, shape: Shape, rank: int, machine: Machine) -> float:
    """The least time that the work can take on a machine."""
    body, head = shape.body_weights, shape.head_weights
    adapter = shape.adapter_weights(rank) if counts.adapters else 0
    attention = shape.attention(counts.context)

    def phase(operations: float, traffic: float) -> float:
        return max(operations / machine.rate, traffic / machine.bandwidth)

    weights = ELEMENT * (body + counts.adapters * adapter)
    decode = phase(
        counts.decoded * (2 * (body + adapter + head) + attention),
        counts.passes * (weights + ELEMENT * head) + counts.decoded * counts.context * shape.kv_bytes,
    )
    prefill = phase(counts.prefilled * (2 * (body + adapter) + attention / 2), weights if counts.prefilled else 0.0)
    gradients = phase(  # an adapter's products: forward, gradient of the input, gradient of the weights
        counts.trained * (4 * body + 6 * adapter + 3 * attention) + counts.headed * 4 * head,
        counts.batches * 2 * (weights + ELEMENT * head),
    )
    update = counts.updates * UPDATE * adapter / machine.bandwidth
    return decode + prefill + gradients + update
