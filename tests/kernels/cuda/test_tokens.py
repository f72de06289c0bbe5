"""Requests to every covered base have the tokens that torch's kernels give them, but where a number meets a border."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import tests.support.triton_on_cpu  # noqa: F401
from motet.core import seeds
from motet.model.kv_cache import KVCache
from motet.model.lora import AdapterWeights
from motet.model.lora_model import LoraModel
from motet.rollout.decoder import Decoder
from tests.support import cuda_bases as cuda
from tests.support import tiny_models as tiny
from tests.support.cases import few
from tests.support.decoding import Ask, Outcome, add, as_request, finish, outcomes

GREEDY, DRAWN = 0.0, 1.0
ASKS = (
    (Ask(21, 6, 1, (1, 2, 3)), DRAWN),
    (Ask(14, 6, 0, (4, 5)), DRAWN),
    (Ask(9, 6, 2, (6,)), GREEDY),
    (Ask(6, 6, 0, (7,)), GREEDY),
)
"""Two adapters and none together, and the temperature of each."""
N_COMPLETIONS = sum(len(ask.seeds) for ask, _ in ASKS)
NEAR = 2e-4
"""Of logprobs, and of the place of a border between two tokens, as a share of the whole."""


def adapter(base: LoraModel, number: int) -> AdapterWeights | None:
    some = cuda.targets(base, "v_proj", "o_proj", "up_proj")
    return tiny.adapter(base, rank=(3, 18)[number - 1], targets=some, seed=number) if number else None


def completed(base: LoraModel) -> list[list[Outcome]]:
    cache = KVCache(24, base.block_size, base.device, clean=False)
    decoder = Decoder(base, cache, max_rows=N_COMPLETIONS, prefill_tokens=64)
    found = []
    for name, (ask, temperature) in enumerate(ASKS):
        request = as_request(str(name), ask, temperature=temperature)
        found.append(add(decoder, request, adapter(base, ask.adapter)))
    finish(decoder)
    return [outcomes(chunks, len(ask.seeds)) for chunks, (ask, _) in zip(found, ASKS, strict=True)]


def logits_before(base: LoraModel, ask: Ask, tokens: list[int]) -> Tensor:
    """Of the token that comes next, [V]."""
    ids = torch.cat([tiny.tokens(ask.prompt, seed=ask.adapter), torch.tensor(tokens, dtype=torch.long)])
    (logits_TV,) = tiny.packed_logits(base, [(adapter(base, ask.adapter), ids)])
    return logits_TV[-1].double().cpu()


def assert_at_a_border(logits_V: Tensor, one: int, other: int, uniform: float | None) -> None:
    """`uniform` is the number by which a token was drawn; None of greedy ones."""
    if uniform is None:
        assert abs(float(logits_V[one] - logits_V[other])) <= NEAR * float(logits_V.abs().max())
        return
    ends_V = torch.softmax(logits_V, -1).cumsum(-1)
    first, last = sorted((one, other))
    assert float((ends_V[first:last] - uniform).abs().max()) <= NEAR, "no neighbour at a border"


@pytest.mark.parametrize("name", few(cuda.DENSE, "llama_long"))
def test_tokens_are_those_of_torch_but_at_borders(name: str) -> None:
    theirs, n_borders = tiny.base(name), 0
    for (ask, temperature), ours, torchs in zip(ASKS, completed(cuda.base(name)), completed(theirs), strict=True):
        for seed, mine, stock in zip(ask.seeds, ours, torchs, strict=True):
            same = np.equal(mine[0], stock[0])
            first = len(same) if same.all() else int(np.argmin(same))
            assert np.abs(np.subtract(mine[1][:first], stock[1][:first])).max(initial=0.0) <= NEAR
            if first < len(same):
                n_borders += 1
                uniform = float(seeds.uniforms(np.array([seed], np.uint64), np.array([first], np.uint64))[0])
                drawn_by = uniform if temperature else None
                assert_at_a_border(
                    logits_before(theirs, ask, mine[0][:first]), mine[0][first], stock[0][first], drawn_by
                )
    print(f"{name}: {n_borders} of {N_COMPLETIONS} completions meet a border")
    assert n_borders <= 1
