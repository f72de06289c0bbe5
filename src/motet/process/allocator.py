"""Keeps freed tensor memory in the process: glibc would return it to the system after every large tensor.

Each forward pass would then fault in fresh pages, which takes a fifth of SmolLM2's decoding time on a CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import platform
import weakref
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8  # malloc.h of glibc
_LARGEST_FROM_HEAP = 32 << 20  # the largest that glibc accepts
_SMALLEST_APART = 1 << 20
HUGE = 4 << 20
"""Bytes from which memory is requested in huge pages."""
_waiting: defaultdict[int, list[mmap.mmap]] = defaultdict(list)


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


def give_back_freed_memory() -> None:
    """Return the memory of tensors of 1 MB and more as soon as they are freed, for a process that must stay small."""
    _set_options({_ARENA_MAX: 1, _MMAP_THRESHOLD: _SMALLEST_APART, _TRIM_THRESHOLD: _SMALLEST_APART})


def memory_apart(n_bytes: int) -> mmap.mmap:
    """Zeroed memory outside the heap that returns to the system when unused, for vectors with unequal lifetimes.

    In the heap, a freed vector leaves a hole. glibc before 2.38 does not reuse it for an aligned vector of the same
    size, so the heap grew by 8 bytes per parameter of each parked adapter.
    """
    return mmap.mmap(-1, max(1, n_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def huge_memory(n_bytes: int) -> mmap.mmap:
    """`memory_apart` in huge pages, if it is large and Linux has them."""
    memory = memory_apart(n_bytes)
    if n_bytes >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def memory_again(n_bytes: int) -> NDArray[np.uint8]:
    """Memory of any content, outside the heap; when unused, it waits for the next request of the same size.

    Fresh pages take ten times as long as writing to them. The system may take back the pages of memory that waits.
    """
    try:
        memory = _waiting[n_bytes].pop()
    except IndexError:
        memory = huge_memory(n_bytes)
    array = np.frombuffer(memory, np.uint8)
    weakref.finalize(array, _wait, n_bytes, memory).atexit = False
    return array


def _wait(n_bytes: int, memory: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_FREE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_FREE)
    _waiting[n_bytes].append(memory)


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
