"""Keeps freed tensor memory in the process: glibc would return it to the system after every large tensor.

Each forward pass would then fault in fresh pages, which takes a fifth of SmolLM2's decoding time on a CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import platform
from collections.abc import Iterator

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8  # malloc.h of glibc
_LARGEST_FROM_HEAP = 32 << 20  # the largest that glibc accepts
_SMALLEST_APART = 1 << 20


def keep_freed_memory() -> bool:
    """Serve tensors of up to 32 MB from memory that stays in the process; call it before other threads start.

    Returns:
        Whether the C library accepted the setting (glibc only; others are unchanged).
    """
    return _set_options(
        {
            _ARENA_MAX: 1,
            _MMAP_THRESHOLD: _LARGEST_FROM_HEAP,
            _TRIM_THRESHOLD: (1 << 31) - 1,
            _TOP_PAD: _LARGEST_FROM_HEAP,
        }
    )


def give_back_freed_memory() -> bool:
    """Return the memory of tensors of 1 MB and more as soon as they are freed, for a process that must stay small.

    Returns:
        Whether the C library accepted the setting.
    """
    return _set_options({_ARENA_MAX: 1, _MMAP_THRESHOLD: _SMALLEST_APART, _TRIM_THRESHOLD: _SMALLEST_APART})


def memory_apart(n_bytes: int) -> mmap.mmap:
    """Zeroed memory outside the heap that returns to the system when unused, for vectors with unequal lifetimes.

    In the heap, a freed vector leaves a hole. glibc before 2.38 does not reuse it for an aligned vector of the same
    size, so the heap grew by 8 bytes per parameter of each parked adapter.
    """
    return mmap.mmap(-1, max(1, n_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Disable garbage collection while importing libraries: it took a sixth of the time, and their objects stay."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _set_options(settings: dict[int, int]) -> bool:
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    taken = [mallopt(name, value) for name, value in settings.items()]
    return all(taken)
