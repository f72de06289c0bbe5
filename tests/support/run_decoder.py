"""The decoder of a run that is over, as the run left it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Collection, Iterator

from motet.rollout.decoder import Decoder


@contextlib.contextmanager
def collected_late() -> Iterator[set[int]]:
    """What runs within leave behind stays until the end. Yields the ids of decoders that other tests still have."""
    gc.collect()
    gc.disable()
    try:
        yield {id(one) for one in decoders()}
    finally:
        gc.enable()


def decoders(before: Collection[int] = ()) -> list[Decoder]:
    """All that are in memory, without those with these ids."""
    return [one for one in gc.get_objects() if type(one) is Decoder and id(one) not in before]


def assert_all_is_back(decoder: Decoder) -> None:
    """Whether no block and no slot is held by anybody, and nobody waits."""
    cache = decoder.cache
    assert decoder.idle
    assert len(decoder.kept) == 0
    assert (cache.n_free, cache.states.n_free) == (cache.n_blocks, cache.states.n_slots)
    assert decoder.host.used == 0
