"""The result of a simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from motet.cluster.simulation.clock import under_virtual_clock
from motet.cluster.simulation.cluster import HOUR, Simulation
from motet.config.simulation import SimulationConfig
from motet.core.errors import ConfigError


@dataclass(frozen=True)
class SimulationOutcome:
    """The result of a simulation."""

    hours: float
    utilisation: float
    """Fraction of their time in which hosts sampled or trained."""
    arriving: float
    """`utilisation` between the arrivals of the first and the last job; NaN if all arrived at once."""
    contended: float
    """`utilisation` while every tenant had enough jobs for its share of the slots; NaN if that never happened."""
    wait: tuple[float, float]
    """Seconds from arrival to the first slot: median and 99th percentile."""
    steps_per_hour: float
    tokens_per_hour: float
    """Trained on."""
    fairness: float
    """Largest tokens per share of a tenant divided by the smallest, over the same time; 1 is fair."""
    publish: float
    """Seconds from a step to its version, 99th percentile."""
    moves: int
    """Moves of jobs to other hosts."""
    job_hours: float
    """Hours of a host for each job."""
    step_hours: float
    """Hours of a host for each step."""
    cost: float
    curve: Sequence[tuple[float, int, int]]
    """(hours, jobs with a slot, jobs that wait for one)."""


def simulate(config: SimulationConfig) -> SimulationOutcome:
    """Simulate the jobs of a configuration. Raises ConfigError if no job does a step."""

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
    if not steps:
        raise ConfigError("every job fails before it has done a step: set `failing` lower, or more steps or jobs")
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
        step_hours=len(ended.hosts) * seconds / HOUR / steps,
        cost=config.hosts.costs.price_per_hour * len(ended.hosts) * seconds / HOUR,
        curve=ended.curve,
    )


def _part(figures: Sequence[float], part: float) -> float:
    """The quantile of some figures; 0 if there are none."""
    return sorted(figures)[min(len(figures) - 1, int(part * len(figures)))] if figures else 0.0
