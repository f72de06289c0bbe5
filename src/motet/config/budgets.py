"""Derives memory and time budgets: KV cache, adapter slots, threads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from motet.config import EngineConfig, HostConfig

_MOST_SAMPLERS = 7
_SMALL_MODEL = 500_000_000
"""Below this many parameters, decoding is faster on one torch thread: products are too short to share."""


_JUDGED_AT_ONCE = 8
"""Questions to the base as a judge that fit into the KV cache in addition to a full decode batch."""


@dataclass(frozen=True)
class Need:
    """The most that one job's sequences need."""

    prompt_tokens: int
    new_tokens: int
    judge_tokens: int = 0
    """Tokens of one question to the base as a judge, with its answer."""
    least: int = 0
    """Tokens that the longest trained sample has in any case: those of a row, or of a prompt and one more."""

    @property
    def tokens(self) -> int:
        """Of the longest sequence."""
        return self.prompt_tokens + self.new_tokens


def cores() -> int:
    """Processors that this process may use: OMP_NUM_THREADS if set, otherwise all that it may run on."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > 0:
        return int(threads)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_of(engine: EngineConfig) -> int:
    """Threads of one computing process; ranks share the cores unless a number is set."""
    return engine.threads or max(1, cores() // engine.n_ranks)


def gpus() -> int:
    """Number of NVIDIA GPUs that the driver reports, without importing torch."""
    with contextlib.suppress(OSError):
        return sum(1 for _ in Path("/proc/driver/nvidia/gpus").iterdir())
    return 0


def idle_gpus(config: HostConfig, device: str, gpus: int) -> list[str]:
    """Notes about parts that use the CPU by default on a machine with GPUs; `device` is the trainer's."""
    if not gpus or device != "cpu":
        return []
    have, lines = f"this machine has {gpus} GPU{'s' if gpus > 1 else ''}", []
    if config.engine.device == "auto":
        lines.append(
            f"the CPU trains, because torch sees no GPU, and {have}: install torch with CUDA, or set engine.device to cpu"
        )
    launch = config.rollout.launch
    if launch is not None and not launch.names_gpus:
        lines.append(f"servers start with settings for a CPU, and {have}: name some in rollout.launch.devices")
    return lines


def samplers(threads: int, base_bytes: int, memory: int) -> int:
    """Number of sampling processes: one per core but the first, while their bases fit into a quarter of `memory`."""
    copies = memory // 4 // max(1, 2 * base_bytes)  # weights and their second copy
    return max(0, min(threads - 1, copies, _MOST_SAMPLERS))


def tick_threads(threads: int, n_samplers: int, n_parameters: int) -> int:
    """Torch threads of this process while it samples: one if other processes sample too, or if the base is small."""
    return 1 if n_samplers or n_parameters < _SMALL_MODEL else threads


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of main memory available without swapping, within the limits of a container."""
    return max(0, min([_of_machine(proc / "meminfo"), *_below_limits(proc / "self" / "cgroup", cgroups)]))


def _of_machine(meminfo: Path) -> int:
    if meminfo.exists():
        for line in meminfo.read_text("utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return int(os.sysconf("SC_PAGE_SIZE")) * int(os.sysconf("SC_PHYS_PAGES")) // 2


def _below_limits(own: Path, cgroups: Path) -> Iterator[int]:
    """Bytes left in each cgroup of this process and its parents; a container may see its own as the root, at any path."""
    for line in own.read_text("utf-8").splitlines() if own.exists() else ():
        number, kinds, path = line.split(":", 2)
        if number == "0":
            root, most, used, files = cgroups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in kinds.split(","):
            root, files = cgroups / "memory", "total_inactive_file"
            most, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        below = PurePosixPath(path.lstrip("/"))
        for one in () if ".." in below.parts else (below, *below.parents):
            with contextlib.suppress(OSError, ValueError):  # no limit, or `max`
                left = int((root / one / most).read_text("utf-8")) - int((root / one / used).read_text("utf-8"))
                yield left + _in_stat(root / one / "memory.stat", files)


def _in_stat(stat: Path, name: str) -> int:
    """Page cache that counts as used but is freed first."""
    lines = (line.split() for line in stat.read_text("utf-8").splitlines())
    return next((int(line[1]) for line in lines if line[0] == name), 0)


def rows_with_states(max_rows: int, state_bytes: int, memory: int) -> int:
    """Rows of the decode batch whose states, plus one prompt's, fit into half of the memory; at least one."""
    if not state_bytes:
        return max_rows
    return max(1, min(max_rows, memory // 2 // state_bytes - 1))


def kv_tokens(needs: Sequence[Need], max_rows: int, block_size: int, bytes_per_token: int, memory: int) -> int:
    """Size of the KV cache: room for a full decode batch of the longest sequences, as far as memory goes.

    At least the longest single sequence fits; with less than a full batch, sequences wait or are preempted.
    """
    longest = max(_blocks(need.tokens, block_size) for need in needs) * block_size
    judged = max(_blocks(need.judge_tokens, block_size) for need in needs) * block_size
    wanted = (max_rows + 1) * longest + _JUDGED_AT_ONCE * judged
    affordable = memory // bytes_per_token // block_size * block_size
    return max(longest, min(wanted, affordable))


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
