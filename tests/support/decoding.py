"""Requests to a decoder, and what came of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from motet.core.types import AdapterRef, BoolArray, Chunk, FinishReason, GenerateRequest, SamplingParams
from motet.model.lora import AdapterWeights
from motet.rollout.decoder import Decoder
from motet.rollout.grammars import Grammar
from motet.rollout.sequences import Prompt, SampledSequence
from tests.support import tiny_models as tiny

BLOCK = 8
ROOMY = 1 << 30
CPU = torch.device("cpu")


@functools.cache
def adapters(dtype: str = "float32", name: str = "llama") -> tuple[AdapterWeights | None, ...]:
    base = tiny.base(name, dtype)
    shapes: tuple[tuple[int, str | list[str]], ...] = (
        (8, "all-linear"),
        (8, "all-linear"),
        (3, "all-linear"),
        (4, ["q_proj", "down_proj"]),
    )
    return (None, *(tiny.adapter(base, rank=r, targets=t, seed=i) for i, (r, t) in enumerate(shapes)))


@functools.cache
def broken(dtype: str = "float32", name: str = "llama") -> AdapterWeights:
    return tiny.adapter(tiny.base(name, dtype), seed=9, scale=math.nan)


@dataclass(frozen=True)
class Ask:
    """One request of a test."""

    prompt: int
    max_tokens: int
    adapter: int = 0
    seeds: tuple[int, ...] = (1,)
    tick: int = 0
    """When it comes."""
    stream: bool = False

    @property
    def blocks(self) -> int:
        return -(-(self.prompt + self.max_tokens) // BLOCK)


def as_request(name: str, ask: Ask, **sampling: Any) -> GenerateRequest:
    ref = AdapterRef(f"adapter-{ask.adapter}", 7) if ask.adapter else None
    ids = tiny.tokens(ask.prompt, seed=ask.adapter).numpy().astype(np.int32)
    params = SamplingParams(max_tokens=ask.max_tokens, **sampling)
    return GenerateRequest(name, "job", ids, ref, params, ask.seeds, ask.stream)


def add(decoder: Decoder, request: GenerateRequest, weights: AdapterWeights | None) -> list[Chunk]:
    """Queue a request; its chunks gather in the list."""
    chunks: list[Any] = []
    prompt = Prompt(request, weights, chunks.append)
    prompt.waiting = [SampledSequence(prompt, index, key) for index, key in enumerate(request.seeds)]
    decoder.add(prompt)
    return chunks


class EveryThird(Grammar):
    """Allows a third of the tokens, by the token before."""

    def __init__(self) -> None:
        super().__init__(None, tiny.VOCABULARY)
        self.last = 0

    def compute(self) -> float:
        self._mask = (np.arange(tiny.VOCABULARY) + self.last) % 3 == 0
        return 0.0

    def take(self, token: int) -> str:
        allowed: BoolArray | None = self._mask
        assert allowed is not None
        assert allowed[token], "the mask of another token was used"
        self._mask, self.last = None, token
        return ""


Outcome = tuple[list[int], list[float], str, FinishReason | None]


def outcomes(chunks: Iterable[Chunk], n: int) -> list[Outcome]:
    """Tokens, logprobs, text and reason of each completion, joined from its chunks."""
    found: list[Outcome] = [([], [], "", None)] * n
    for chunk in chunks:
        tokens, logprobs, text, reason = found[chunk.index]
        assert reason is None, "nothing comes after the last chunk"
        assert len(chunk.token_ids) == len(chunk.logprobs) == len(chunk.versions)
        found[chunk.index] = (
            tokens + chunk.token_ids.tolist(),
            logprobs + chunk.logprobs.tolist(),
            text + chunk.text,
            chunk.finish_reason,
        )
    assert all(outcome[3] is not None for outcome in found), "every completion ends"
    return found


def finish(decoder: Decoder, limit: int = 1000) -> None:
    for _ in range(limit):
        if decoder.idle:
            break
        decoder.tick()
    assert decoder.idle, "the decoder makes progress"
    assert decoder.cache.n_free == decoder.cache.n_blocks, "all blocks are back"
    assert decoder.cache.states.n_free == decoder.cache.states.n_slots, "all slots are back"
    assert decoder.host.used == 0, "all copies are gone"


ASKS = st.lists(
    st.builds(
        Ask,
        prompt=st.integers(1, 36),
        max_tokens=st.integers(1, 14),
        adapter=st.integers(0, 5),  # 5 is broken
        seeds=st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True).map(tuple),
        tick=st.integers(0, 12),
        stream=st.booleans(),
    ),
    min_size=1,
    max_size=6,
)
