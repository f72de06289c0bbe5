"""The simulated cluster in bench/: the product places, moves and admits its jobs, and times are those computed by hand."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import bench.cluster
import pytest
from bench.cluster import Costs, Hosts, Jobs, Simulation, simulate, under_virtual_clock

from motet.hosts import placement
from motet.runtime import scheduler, slot_turns, slots

COSTS = Costs(0.01, 1000, publish_seconds=0.5)
HOST = Hosts(1, COSTS)
JOB = Jobs(1, steps=(10, 10), groups_per_step=4, group_size=8, prompt_tokens=(25, 25), completion_tokens=(100, 100))
STEP = 100 * 0.01 + 4 * 8 * 125 / 1000 + 0.5
"""Seconds of a step when nobody else is there: sampled, trained, published."""


def test_simulation_decides_with_the_functions_of_the_product() -> None:
    for module, names in (
        (placement, ("HostLoad", "moved", "placed")),
        (scheduler, ("FairScheduler",)),
        (slot_turns, ("LOOK_SECONDS", "SlotTurns")),
        (slots, ("Claim", "Rule", "admitted", "preempted_for_share")),
    ):
        for name in names:
            assert getattr(bench.cluster, name) is getattr(module, name)


@pytest.mark.parametrize(
    ("hosts", "count", "steps"),
    [
        (HOST, 1, 10),
        (replace(HOST, slots=1), 3, 30),
        (replace(HOST, slots=1, count=3), 3, 10),
        (replace(HOST, slots=1, count=2), 4, 20),
    ],
)
def test_jobs_take_the_time_computed_by_hand(hosts: Hosts, count: int, steps: int) -> None:
    """One after the other where there is one slot, at once where each has a host, and by halves on two hosts."""
    found = simulate(hosts, [replace(JOB, count=count)])
    assert 3600 * found.hours == pytest.approx(steps * STEP)
    assert found.utilisation == pytest.approx((STEP - 0.5) / STEP)


def test_jobs_move_to_the_host_that_has_fewer() -> None:
    """Short jobs end on one host, and long ones are left on the other."""
    short, long = replace(JOB, tenant="short", count=4, steps=(1, 1)), replace(JOB, tenant="long", count=5)
    assert simulate(replace(HOST, count=2), [long, short]).moves > 0


def test_hosts_that_die_lose_no_step() -> None:
    costs = replace(COSTS, start_seconds=30)
    hosts = Hosts(4, costs, slots=4, hours_between_deaths=0.05)

    async def run() -> Simulation:
        simulation = Simulation(hosts, [replace(JOB, count=24)])
        await simulation.run()
        return simulation

    ended = under_virtual_clock(run())
    assert all(job.done == job.steps and job.ended for job in ended.jobs)
    assert sum(job.starts for job in ended.jobs) > 24


def test_shares_hold_on_each_host_by_itself() -> None:
    """One tenant's only job shares its host with those of a crowd, which has the other host to itself."""
    crowd = Jobs(7, "crowd", steps=(20, 20), groups_per_step=16, group_size=8, completion_tokens=(100, 100))
    hosts = Hosts(2, Costs(token_seconds=0.01, train_tokens_per_second=100_000), slots=8, rows=16)

    async def run() -> float:
        simulation = Simulation(hosts, [crowd, replace(crowd, tenant="few", count=1)])
        running = asyncio.create_task(simulation.run())
        while not simulation.used["few"] or simulation.jobs[-1].ended is None:
            await asyncio.sleep(1.0)
        had = simulation.used["crowd"] / simulation.used["few"]
        await running
        return had

    assert 3 < under_virtual_clock(run()) < 4.5  # half of one host, and one and a half of them


def test_tenants_get_tokens_by_their_shares() -> None:
    """A crowd beside few, all hungry; then twice the share."""
    crowd, few = replace(JOB, tenant="crowd", count=24), replace(JOB, tenant="few", count=8)
    hosts = replace(HOST, slots=8, rows=16)
    even = simulate(hosts, [crowd, few])
    assert even.contended > 0.9
    assert even.fairness < 1.15
    assert simulate(hosts, [crowd, replace(few, share=2.0)]).fairness < 1.25
