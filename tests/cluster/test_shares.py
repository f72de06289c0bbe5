"""Shares of tenants over all hosts: laws of the account, and what it makes of tenants that are on different hosts."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from bench.cluster import Costs, Hosts, Jobs, Simulation, under_virtual_clock

from motet.cluster.shares import MOST, ClusterShares


def test_who_is_behind_gets_more_and_nobody_more_than_the_most() -> None:
    account = ClusterShares()
    used = {0: {"ann": 0.0, "ben": 0.0}, 1: {"ann": 0.0}}
    assert account.update(used, {"ann", "ben"}, {}) == {"ann": 1.0, "ben": 1.0}
    factors = []
    for look in range(1, 40):
        used = {0: {"ann": 50.0 * look, "ben": 50.0 * look}, 1: {"ann": 100.0 * look}}
        factors.append(account.update(used, {"ann", "ben"}, {})["ben"])
    assert factors == sorted(factors)
    assert factors[0] > 1
    assert factors[-1] == pytest.approx(MOST)
    for look in range(1, 40):  # it catches up
        used = {0: {"ann": 1950.0, "ben": 1950.0 + 150 * look}, 1: {"ann": 3900.0}}
        factors.append(account.update(used, {"ann", "ben"}, {})["ben"])
    assert factors[-1] == 1.0


def test_a_share_counts_and_so_does_a_host_that_was_started_again() -> None:
    account = ClusterShares()
    for look in range(1, 20):
        assert account.update({0: {"ann": 200.0 * look, "ben": 100.0 * look}}, {"ann", "ben"}, {"ann": 2.0}) == {
            "ann": 1.0,
            "ben": 1.0,
        }
    assert account.update({0: {"ann": 10.0}}, {"ann", "ben"}, {"ann": 2.0})["ben"] > 1.0


def test_whoever_comes_is_level_with_the_one_that_has_had_least() -> None:
    account = ClusterShares()
    for look in range(20):
        account.update({0: {"ann": 300.0 * look, "ben": 100.0 * look}}, {"ann", "ben"}, {})
    factors = account.update({0: {"ann": 5700.0, "ben": 1900.0}}, {"ann", "ben", "cleo"}, {})
    assert factors["cleo"] == factors["ben"] > factors["ann"] == 1.0


def test_one_account_over_two_hosts() -> None:
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

    assert under_virtual_clock(run()) < 2.5  # 3.8 where each host has an account of its own
