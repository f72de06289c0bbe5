"""Copies of KV blocks and states in host memory: the same bits back, each shared block once, within the bound, nothing left."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.core.types import GenerateRequest, SamplingParams
from motet.model.host_cache import HostCache, HostCopy
from motet.model.kv_cache import KVCache
from motet.rollout.block_allocator import BlockAllocator
from motet.rollout.prefix_cache import PrefixCache
from motet.rollout.sequences import Prompt
from tests.support import inside

BLOCK = 4
NAN = float("nan")


def make_cache(n_blocks: int, device: str = "cpu") -> KVCache:
    """Two layers of attention, of different types and shapes, and one with two kinds of states."""
    where = torch.device(device)
    cache = KVCache(n_blocks, BLOCK, where)
    cache.layer(0, torch.zeros(1, 2, 3), torch.zeros(1, 2, 5))
    cache.layer(1, torch.zeros(1, 1, 4).bfloat16(), torch.zeros(1, 1, 4).bfloat16())
    for kind, shape in (("convolution", (3, 7)), ("recurrent", (2, 4, 4))):
        cache.states.read(2, kind, torch.tensor([1], device=where), shape)
    return cache


def pools(cache: KVCache) -> list[torch.Tensor]:
    return inside.block_pools(cache)


def fill(cache: KVCache, blocks: list[int], value: float) -> None:
    for number, block in enumerate(blocks):
        for layer, pool in enumerate(pools(cache)):
            pool[block] = value + number + layer / 8


def holds(cache: KVCache, blocks: list[int], value: float) -> bool:
    return all(
        bool((pool[block] == torch.tensor(value + number + layer / 8, dtype=pool.dtype)).all())
        for number, block in enumerate(blocks)
        for layer, pool in enumerate(pools(cache))
    )


@dataclass(eq=False)
class Owner:
    """A sequence of a group, which shares its first blocks."""

    group: int
    value: float
    n_tokens: int
    blocks: list[int]
    slot: int
    copy: HostCopy | None = None

    def right(self, cache: KVCache) -> bool:
        n_shared = self.group + 1
        states = all(bool((pool[self.slot] == self.value).all()) for pool in inside.state_pools(cache))
        shared = holds(cache, self.blocks[:n_shared], 100.0 * self.group)
        return states and shared and holds(cache, self.blocks[n_shared:], self.value)


def born(cache: KVCache, owners: list[Owner], number: int, value: float) -> Owner | None:
    """Another sequence, where there is room."""
    group = number % 2
    n_tokens = (group + 1) * BLOCK + 1 + number % 9
    fellows = [one for one in owners if one.group == group and one.blocks]
    shared = fellows[0].blocks[: group + 1] if fellows else []
    n_new = -(-n_tokens // BLOCK) - len(shared)
    if n_new > cache.n_free or not cache.states.n_free:
        return None
    cache.share(shared)
    owner = Owner(group, value, n_tokens, [*shared, *cache.take(n_new)], cache.states.take())
    if not fellows:
        fill(cache, owner.blocks[: group + 1], 100.0 * group)
    fill(cache, owner.blocks[group + 1 :], value)
    for pool in inside.state_pools(cache):
        pool[owner.slot] = value
    return owner


def give_back(cache: KVCache, owner: Owner) -> None:
    """And spoil what nobody holds any more."""
    cache.give_back(owner.blocks)
    cache.states.give_back(owner.slot)
    for pool in pools(cache):
        for block in owner.blocks:
            if not cache.references(block):
                pool[block] = NAN
    for pool in inside.state_pools(cache):
        pool[owner.slot] = NAN
    owner.blocks, owner.slot = [], cache.states.no_slot


def brought_in(cache: KVCache, host: HostCache, owner: Owner) -> bool:
    """Copy a sequence back, where there is room."""
    assert owner.copy is not None
    present = host.present(owner.copy, owner.n_tokens)
    if -(-owner.n_tokens // BLOCK) - len(present) > cache.n_free or not cache.states.n_free:
        return False
    cache.share(present)
    owner.blocks, owner.slot = [*present, *cache.take(-(-owner.n_tokens // BLOCK) - len(present))], cache.states.take()
    host.restore(owner.copy, owner.n_tokens, owner.blocks, owner.slot, len(present))
    host.forget(owner.copy)
    owner.copy = None
    return True


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["new", "out", "out", "spare", "in", "in", "end"]), st.integers(0, 1000)), max_size=60
)


@settings(max_examples=150)
@given(ACTIONS, st.sampled_from([0, 2000, 5000, 1 << 20]))
def test_what_comes_back_is_what_went_and_nothing_is_left(actions, bound):
    cache = make_cache(16)
    host, owners = HostCache(cache, bound), list[Owner]()
    for step, (action, number) in enumerate(actions):
        if action == "new":
            owners += [one for one in [born(cache, owners, number, 200.0 + step)] if one is not None]
        kind = [one for one in owners if (one.copy is None) == (action in ("out", "spare"))]
        one = kind[number % len(kind)] if kind else None
        if action == "end" and owners:
            one = owners.pop(number % len(owners))
            give_back(cache, one)
            if one.copy is not None:
                host.forget(one.copy)
        elif action in ("out", "spare") and one is not None:
            paged_out(cache, host, one, spare=action == "spare")
        elif action == "in" and one is not None:
            assert brought_in(cache, host, one) <= one.right(cache)
        owners = [one for one in owners if one.blocks or (one.copy is not None and not one.copy.gone)]
        assert host.used <= bound
        assert all(one.right(cache) for one in owners if one.blocks)
        for block, copy in host._by_block.items():
            assert copy.holders > 0, block
    for one in owners:
        give_back(cache, one)
        if one.copy is not None:
            host.forget(one.copy)
    assert (host.used, len(host._by_block), len(host._spare)) == (0, 0, 0)
    assert (cache.n_free, cache.states.n_free) == (cache.n_blocks, cache.states.n_slots)


def group(cache: KVCache, n: int) -> list[Owner]:
    """Sequences that share two full blocks and have one of their own."""
    owners: list[Owner] = []
    for number in range(n):
        owners += [one for one in [born(cache, owners, 1, 200.0 + number)] if one is not None]
    assert len(owners) == n
    return owners


def paged_out(cache: KVCache, host: HostCache, owner: Owner, *, spare: bool = False) -> None:
    def forget() -> None:
        assert owner.copy is not None
        host.forget(owner.copy)

    owner.copy = host.put(owner.blocks, owner.slot, owner.n_tokens, spare=forget if spare else None)
    give_back(cache, owner)


def test_shared_blocks_are_copied_once_and_come_back_once():
    cache = make_cache(16)
    host, owners = HostCache(cache, 1 << 20), group(cache, 4)
    for one in owners:
        paged_out(cache, host, one)
    assert host.tokens_out == 2 * BLOCK + 4 * (owners[0].n_tokens - 2 * BLOCK)
    assert cache.n_free == cache.n_blocks
    for one in owners:
        assert brought_in(cache, host, one)
    assert all(one.right(cache) for one in owners)
    assert cache.n_blocks - cache.n_free == 2 + 4, "the group shares its blocks again"
    assert (host.tokens_in, host.prefills_saved) == (host.tokens_out, 4)


def test_a_block_that_has_another_owner_now_is_not_taken_for_its_copy():
    cache = make_cache(3)
    host, (one,) = HostCache(cache, 1 << 20), group(cache, 1)
    paged_out(cache, host, one)
    (other,) = group(cache, 1)
    assert one.copy is not None
    assert host.present(one.copy, one.n_tokens) == []
    fill(cache, other.blocks, 7.0)
    give_back(cache, other)
    assert brought_in(cache, host, one)
    assert one.right(cache)


def test_what_is_spare_goes_the_least_recently_used_first_and_all_else_stays():
    cache = make_cache(32)
    owners = [one for number in range(4) for one in [born(cache, [], 0, 200.0 + number)] if one is not None]
    paged_out(cache, HostCache(cache, 0), owners.pop())
    probe = HostCache(cache, 1 << 20)
    assert probe.put(owners[0].blocks, owners[0].slot, owners[0].n_tokens) is not None
    host = HostCache(cache, 2 * probe.used)
    paged_out(cache, host, owners[0], spare=True)
    paged_out(cache, host, owners[1], spare=True)
    first, second = owners[0].copy, owners[1].copy
    assert first is not None
    assert second is not None
    blocks, slot = cache.take(-(-owners[0].n_tokens // BLOCK)), cache.states.take()
    host.restore(first, owners[0].n_tokens, blocks, slot, 0)
    cache.give_back(blocks)
    cache.states.give_back(slot)
    paged_out(cache, host, owners[2])
    assert (first.gone, second.gone, host.used) == (False, True, 2 * probe.used)
    needed = [one for one in [born(cache, [], 0, 300.0 + number) for number in range(2)] if one is not None]
    for one in needed:
        paged_out(cache, host, one)
    assert first.gone
    assert [one.copy is None for one in (owners[2], *needed)] == [False, False, True]


class Refusing(HostCache):
    """Of a machine that has no more pinned memory, or whose device has no room for what comes back."""

    refuses = False

    def _to_host(self, contents: torch.Tensor) -> torch.Tensor:
        if self.refuses:
            raise RuntimeError("out of memory")
        return super()._to_host(contents)

    def _to_device(self, contents: torch.Tensor) -> torch.Tensor:
        if self.refuses:
            raise RuntimeError("out of memory")
        return super()._to_device(contents)


def test_where_the_host_has_no_memory_nothing_is_copied_and_what_was_stays():
    cache = make_cache(16)
    host, owners = Refusing(cache, 1 << 20), group(cache, 3)
    paged_out(cache, host, owners[0])
    used, host.refuses = host.used, True
    paged_out(cache, host, owners[1])
    assert (owners[1].copy, host.used) == (None, used)
    host.refuses = False
    paged_out(cache, host, owners[2])
    assert owners[2].copy is None, "it is not tried again and again"
    assert brought_in(cache, host, owners[0])
    assert owners[0].right(cache)


def test_a_fault_while_a_copy_comes_back_holds_no_block_for_ever():
    cache = make_cache(16)
    host = Refusing(cache, 1 << 20)
    blocks = BlockAllocator(cache, host, PrefixCache(cache, host, 0, stateful=True))
    request = GenerateRequest("r", "job", np.arange(13, dtype=np.int32), None, SamplingParams(max_tokens=1), (1,))
    prompt = Prompt(request, None, lambda chunk: None)
    assert blocks.begin(prompt, 0)
    blocks.page_out(prompt)
    host.refuses = True
    with pytest.raises(RuntimeError):
        blocks.begin(prompt, 0)
    blocks.give_back(prompt)
    assert (host.used, cache.n_free, cache.states.n_free) == (0, cache.n_blocks, cache.states.n_slots)


@pytest.mark.gpu
def test_copies_of_a_gpu_lie_in_pinned_memory_and_come_back():
    cache = make_cache(16, "cuda")
    host, owners = HostCache(cache, 1 << 20), group(cache, 4)
    for one in owners:
        paged_out(cache, host, one)
        assert one.copy is not None
        assert all(block.contents.is_pinned() for block in one.copy.blocks)
    for one in owners:
        assert brought_in(cache, host, one)
    assert all(one.right(cache) for one in owners)
    assert host.used == 0
