"""Checks that adapters of the largest rank in all slots, and the longest sample, fit into the memory beside a base."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from motet.config import AdapterConfig, HostConfig, JobConfig, budgets
from motet.config.budgets import Need
from motet.config.optimizers import OPTIMIZERS
from motet.config.service import Largest
from motet.config.team import MOST_RANK
from motet.core.batch import AdamW, Optimizer
from motet.core.errors import ConfigError
from motet.core.model_info import ALL_LINEAR

if TYPE_CHECKING:
    from motet.model.lora_model import LoraModel

_WHOLE = 4
"""How many more bytes per parameter a gradient takes that waits for its step as whole numbers."""


@dataclass(frozen=True)
class FreeMemory:
    """Memory beside a base, in bytes."""

    of_device: int
    """Free memory of the device, before anything but the base is put there."""
    sampling: int = 0
    """Part of it that sampling may take."""
    of_host: int = 0
    """Host memory that sampling may take, if the device has memory of its own."""
    processes: int = 1
    """Number of processes with a copy of each version."""


@dataclass(frozen=True)
class SampleMemory:
    """What can be trained in the memory beside a base that Motet's kernels compute."""

    free: int
    """Bytes."""
    longest: int
    """Tokens of the longest sample, as the engine is configured."""
    recomputed: int
    """The same if all passes compute their layers again."""

    @classmethod
    def of(cls, base: LoraModel, free: int, kept_tokens: int | None) -> SampleMemory | None:
        """None if torch computes the base: what it keeps is estimated, so that is told by `motet check` only."""
        from motet.training.memory import longest_sample

        if base.kernels is None:
            return None
        return cls(free, longest_sample(base, kept_tokens, free), longest_sample(base, 0, free))

    def check(self, needs: Sequence[Need]) -> None:
        """Check the samples that jobs have in any case.

        Raises:
            ConfigError: the longest does not fit.
        """
        least = max((need.least for need in needs), default=0)
        if least <= self.longest:
            return
        more = self.recomputed
        way = f"set engine.recompute to true, with which {more:,} fit, or " if more >= least else ""
        raise ConfigError(
            f"the jobs have a sample of at least {least:,} tokens, and beside the base {self.free / 2**30:.1f} GiB are "
            f"free, in which one of {self.longest:,} can be trained; {way}shorten such rows, or, where the "
            f"prompt alone is as long, leave them out by data.max_prompt_tokens: {max(self.longest - 1, 1)}"
        )


@dataclass(frozen=True)
class SlotMemory:
    """Bytes of one slot's adapter."""

    trained: int
    """Masters, gradient and the optimizer's state, in fp32; on the device while the adapter is resident."""
    versions: int
    """Compute copies, always on the device: the version in use, and older ones that rollouts still read."""

    @classmethod
    def of(
        cls, base: LoraModel, targets: str | Sequence[str], rank: int, versions: int = 1, step: type[Optimizer] = AdamW
    ) -> SlotMemory:
        """Memory of an adapter on these layers, with this number of versions."""
        packed = base.kernels is not None and base.device.type == "cpu"
        copies = 2 * versions if packed else versions
        whole = base.kernels is not None and base.kernels.whole_sums
        return cls.of_size(
            base.adapter_layout(targets, rank).size, copies * base.dtype.itemsize, whole=whole, step=step
        )

    @classmethod
    def of_size(cls, size: int, version_bytes: int, *, whole: bool, step: type[Optimizer] = AdamW) -> SlotMemory:
        """Memory of an adapter with `size` parameters.

        Its versions together take `version_bytes` per parameter; `whole` says whether its gradient is added as whole numbers.
        """
        return cls((4 * (2 + len(step.STATE)) + _WHOLE * whole) * size, version_bytes * size)

    def fitting(self, slots: int, resident: int, device: int, host: int | None) -> int:
        """How many slots fit, if `resident` (0: all) are on the device, the others in `host` bytes (None: no limit)."""

        def lacks(n: int) -> bool:
            whole = min(n, resident or n)
            outside = host is not None and (n - whole) * self.trained > host
            return outside or n * self.versions + whole * self.trained > device

        return bisect.bisect_left(range(1, slots + 1), True, key=lacks)


def check_slots(
    base: LoraModel, config: HostConfig, memory: FreeMemory, wanted: Sequence[JobConfig] | Largest
) -> list[str]:
    """Returns a note if they do not fit; `wanted` are the jobs, or the largest job that may come.

    Raises:
        ConfigError: a single adapter of the largest rank does not fit beside the base.
    """
    engine, on_card = config.engine, base.device.type != "cpu"
    unlimited, shapes = False, list[tuple[str | Sequence[str], int, str, type[Optimizer]]]()
    if isinstance(wanted, Largest):
        slots, lag, limit = engine.slots, wanted.lag or 0, wanted.rank or wanted.usual_rank
        settings = "limits.rank" if wanted.rank is None else "limits.rank or rollout.launch.max_rank"
        largest = max((each.STEP for each in OPTIMIZERS.values()), key=lambda step: len(step.STATE))
        shapes.append((ALL_LINEAR, min(limit or AdapterConfig().rank, MOST_RANK), "", largest))
        unlimited = limit is None
    else:
        slots = min(engine.slots, sum(job.slots for job in wanted))
        lag, settings = max(job.algorithm.lag for job in wanted), "adapter.rank"
        pairs = ((job, shape) for job in wanted for shape in job.adapters.values())
        shapes += [(shape.target_modules, shape.rank, f"job {job.name}: ", job.optimizer.STEP) for job, shape in pairs]
    versions = (1 + lag) * memory.processes if config.rollout.engine == "embedded" else 1
    each, rank, whose = max(
        ((SlotMemory.of(base, targets, rank, versions, step), rank, whose) for targets, rank, whose, step in shapes),
        key=lambda one: one[0].trained,
    )
    named = f"an adapter of rank {rank} takes {_size(each.trained + each.versions)} while it trains"
    if each.trained + each.versions // versions > memory.of_device and not unlimited:
        raise ConfigError(f"{whose}{named}, and {_size(memory.of_device)} are free beside the base; lower {settings}")
    resident = engine.resident if on_card or engine.parking is not None else 0
    host = max(0, budgets.available_memory() - memory.of_host) if on_card and engine.parking is None else None
    left = max(0, memory.of_device - memory.sampling)
    if (fitting := each.fitting(slots, resident, left, host)) == slots:
        return []
    usual = ", the default of a job, as limits.rank is not set" if unlimited else ""
    parked = "engine.resident" if on_card else "engine.resident and engine.parking"
    return [
        f"{slots} slots are wanted, and there is memory for {fitting}: {named}{usual}, and base and sampling leave "
        f"{_size(left)}; lower engine.slots or {settings}, or set {parked}"
    ]


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"
