"""KV blocks: counted, shared, zeroed when handed out."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.core.types import GenerateRequest, SamplingParams
from motet.model.host_cache import HostCache
from motet.model.kv_cache import KVCache
from motet.rollout.block_allocator import BlockAllocator
from motet.rollout.prefix_cache import PrefixCache
from motet.rollout.sequences import Prompt, SampledSequence

pytestmark = pytest.mark.tier1

CPU = torch.device("cpu")
BLOCK, HEADS, WIDTH = 4, 2, 3


def make_cache(n_blocks: int, *, clean: bool = True) -> KVCache:
    cache = KVCache(n_blocks, BLOCK, CPU, clean=clean)
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
                with pytest.raises(ValueError, match=f"{n} KV blocks requested, {cache.n_free} free"):
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


def failing_cache(*, clean: bool = True) -> KVCache:
    """With states, of a device that fails whenever they, or the blocks of its last layer, are written."""
    cache = make_cache(8, clean=clean)
    with torch.inference_mode():  # torch refuses to write to what was made here once it is left
        cache.layer(2, torch.zeros(1, HEADS, WIDTH), torch.zeros(1, HEADS, WIDTH))
        cache.states.read(2, "recurrent", torch.tensor([1]), (3,))
    return cache


def assert_all_is_free(cache: KVCache) -> None:
    assert (cache.n_free, cache.states.n_free) == (cache.n_blocks, cache.states.n_slots)


def test_a_fault_of_the_device_leaves_what_was_to_be_handed_out_free():
    cache = failing_cache()
    for take in (lambda: cache.take(2), cache.states.take):
        with pytest.raises(RuntimeError, match="inference"):
            take()
    assert_all_is_free(cache)


def test_a_fault_while_a_copy_is_made_leaves_it_free():
    cache = failing_cache(clean=False)
    with pytest.raises(RuntimeError, match="inference"):
        cache.copy(cache.zero_block)
    with torch.inference_mode(), pytest.raises(IndexError):
        cache.states.copy(99)
    assert_all_is_free(cache)


def test_a_sequence_whose_states_cannot_be_had_gives_its_blocks_back():
    cache = failing_cache(clean=False)
    host = HostCache(cache, 0)
    blocks = BlockAllocator(cache, host, PrefixCache(cache, host, 0, stateful=True))
    request = GenerateRequest("r", "job", np.arange(6, dtype=np.int32), None, SamplingParams(max_tokens=1), (1,))
    prompt = Prompt(request, None, lambda chunk: None)
    sequence = SampledSequence(prompt, 0, 1)
    with pytest.raises(RuntimeError, match="inference"):
        blocks.begin(prompt, 0)
    with pytest.raises(RuntimeError, match="inference"):
        blocks.resume(sequence)
    blocks.give_back(prompt)
    blocks.give_back(sequence)
    assert_all_is_free(cache)
