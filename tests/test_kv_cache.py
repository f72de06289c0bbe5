"""KV blocks: counted, shared, zeroed when handed out."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.model.kv_cache import KVCache

CPU = torch.device("cpu")
BLOCK, HEADS, WIDTH = 4, 2, 3


def make_cache(n_blocks: int) -> KVCache:
    cache = KVCache(n_blocks, BLOCK, CPU)
    for layer in range(2):
        cache.layer(layer, torch.zeros(1, HEADS, WIDTH), torch.zeros(1, HEADS, WIDTH))
    return cache


def storage(cache: KVCache) -> list[torch.Tensor]:
    like = torch.zeros(1, HEADS, WIDTH)
    return [states for layer in range(2) for states in cache.layer(layer, like, like)]


ACTIONS = st.lists(st.tuples(st.sampled_from(["take", "share", "copy", "give"]), st.integers(0, 1000)), max_size=60)


@settings(max_examples=80)
@given(st.integers(1, 7), ACTIONS)
def test_blocks_are_counted_and_clean(n_blocks, actions):
    cache, held = make_cache(n_blocks), Counter[int]()
    for action, number in actions:
        owned = sorted(+held)
        block = owned[number % len(owned)] if owned else None
        if action == "take":
            n = number % (n_blocks + 2)
            if n > cache.n_free:
                with pytest.raises(ValueError, match=f"{n} KV blocks asked for, {cache.n_free} free"):
                    cache.take(n)
                continue
            for fresh in cache.take(n):
                assert held[fresh] == 0, "handed out twice"
                held[fresh] = 1
                for states in storage(cache):
                    assert not states[fresh].any(), "handed out dirty"
                    states[fresh] = float("nan")
        elif block is None:
            continue
        elif action == "share":
            cache.share([block])
            held[block] += 1
        elif action == "give":
            cache.give_back([block])
            held[block] -= 1
        elif cache.n_free:
            for states in storage(cache):
                states[block] = float(number)
            twin = cache.copy(block)
            assert held[twin] == 0
            held[twin] = 1
            assert all(bool((states[twin] == number).all()) for states in storage(cache))
            for states in storage(cache):
                states[twin] = float("nan")
                assert bool((states[block] == number).all()), "a copy has storage of its own"
        assert cache.n_free == n_blocks - len(+held)
        assert held[cache.zero_block] == 0
        assert not any(states[cache.zero_block].any() for states in storage(cache))


def test_layers_may_differ_in_shape():
    cache = KVCache(2, BLOCK, CPU)
    keys, values = cache.layer(0, torch.zeros(1, 2, 8), torch.zeros(1, 2, 6))
    assert (keys.shape, values.shape) == ((4, 2, BLOCK, 8), (4, 2, BLOCK, 6))
    assert cache.layer(0, torch.zeros(1, 2, 8), torch.zeros(1, 2, 6))[0] is keys
    assert cache.layer(5, torch.zeros(1, 1, 4).bfloat16(), torch.zeros(1, 1, 4))[0].dtype == torch.bfloat16


def test_an_empty_cache_is_refused():
    with pytest.raises(ValueError, match="at least one block"):
        KVCache(0, BLOCK, CPU)
