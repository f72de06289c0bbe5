"""What a simulation showed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from motet.config.simulation import SimulationConfig
from motet.simulation.clock import under_virtual_clock
from motet.simulation.cluster import HOUR, Simulation


@dataclass(frozen=True)
class SimulationOutcome:
    """What a simulation showed."""

    hours: float
    utilisation: float
    """The part of their time in which hosts sampled or trained."""
    arriving: float
    """The same from the first job that came to the last one; NaN where all came at once."""
    contended: float
    """The same while every tenant had jobs for its part of all slots; NaN where that was never so."""
    wait: tuple[float, float]
    """Seconds from coming to the first slot: median and 99 %."""
    steps_per_hour: float
    tokens_per_hour: float
    """Trained on."""
    fairness: float
    """The most tokens per share of a tenant by the least, in the same time; 1 is fair."""
    publish: float
    """Seconds from a step to its version, 99 %."""
    moves: int
    """How often a job went on elsewhere."""
    job_hours: float
    """Hours of a host for each job."""
    step_hours: float
    """Hours of a host for each step."""
    cost: float
    curve: Sequence[tuple[float, int, int]]
    """Hours, jobs that have a slot, jobs that wait for one."""


def simulate(config: SimulationConfig) -> SimulationOutcome:
    """Let the jobs of a configuration run, and look at how it went."""

    async def run() -> tuple[Simulation, float]:
        simulation = Simulation(config)
        return simulation, await simulation.run()

    ended, seconds = under_virtual_clock(run())
    contended, (first, last) = ended.contended, (ended.arriving[0], ended.arriving[-1])
    arriving = (last[0] - first[0]) * len(ended.hosts)
    shares = {jobs.tenant: jobs.share for jobs in config.jobs}
    had = [contended.used[tenant] / share for tenant, share in shares.items()]
    waits = [job.first - job.arrives for job in ended.jobs if job.first is not None]
    steps = sum(job.done for job in ended.jobs)
    return SimulationOutcome(
        hours=seconds / HOUR,
        utilisation=sum(host.busy for host in ended.hosts) / (seconds * len(ended.hosts)),
        arriving=(last[1] - first[1]) / arriving if arriving else math.nan,
        contended=contended.busy / (contended.seconds * len(ended.hosts)) if contended.seconds else math.nan,
        wait=(_part(waits, 0.5), _part(waits, 0.99)),
        steps_per_hour=HOUR * steps / seconds,
        tokens_per_hour=HOUR * sum(job.done * job.tokens_of_step for job in ended.jobs) / seconds,
        fairness=math.nan if not contended.seconds else max(had) / min(had) if min(had) else math.inf,
        publish=_part([taken for job in ended.jobs for taken in job.published], 0.99),
        moves=sum(max(0, job.starts - 1) for job in ended.jobs),
        job_hours=len(ended.hosts) * seconds / HOUR / len(ended.jobs),
        step_hours=len(ended.hosts) * seconds / HOUR / steps if steps else math.inf,
        cost=config.hosts.costs.price_per_hour * len(ended.hosts) * seconds / HOUR,
        curve=ended.curve,
    )


def _part(figures: Sequence[float], part: float) -> float:
    """The figure that so large a part is not above; 0 where there is none."""
    return sorted(figures)[min(len(figures) - 1, int(part * len(figures)))] if figures else 0.0
