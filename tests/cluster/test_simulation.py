"""The simulator: what can be said by hand comes out so, nothing is lost when hosts die, and tenants get their shares."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import pytest

from motet.cluster.simulation.clock import now, under_virtual_clock
from motet.cluster.simulation.cluster import Simulation
from motet.cluster.simulation.host import SimulatedDevice
from motet.cluster.simulation.outcome import SimulationOutcome, simulate
from motet.commands.simulate import show
from motet.config.jobfile import load_simulation
from motet.config.simulation import HostCosts, SimulationConfig
from motet.core.errors import ConfigError
from tests.conftest import ROOT
from tests.support.waiting import PATIENCE

COSTS = {"token_seconds": 0.01, "train_tokens_per_second": 1000, "publish_seconds": 0.5}
JOBS = {
    "count": 1,
    "steps": [10, 10],
    "groups_per_step": 4,
    "group_size": 8,
    "prompt_tokens": [25, 25],
    "completion_tokens": [100, 100],
}
STEP = 100 * 0.01 + 4 * 8 * 125 / 1000 + 0.5
"""Seconds of a step when nobody else is there: sampled, trained, published."""


def cluster(hosts: dict[str, Any], *jobs: dict[str, Any]) -> SimulationConfig:
    costs = {**COSTS, **hosts.pop("costs", {})}
    return SimulationConfig.model_validate(
        {"hosts": {"count": 1, "rows": 64, "costs": costs, **hosts}, "jobs": [{**JOBS, **one} for one in jobs]}
    )


def outcome(hosts: dict[str, Any], *jobs: dict[str, Any]) -> SimulationOutcome:
    return simulate(cluster(hosts, *jobs))


def test_what_can_be_said_by_hand() -> None:
    alone = outcome({}, {})
    assert 3600 * alone.hours == pytest.approx(10 * STEP)
    assert alone.utilisation == pytest.approx((STEP - 0.5) / STEP)
    assert alone.wait == (0.0, 0.0)
    assert alone.publish == pytest.approx(0.5)
    assert alone.steps_per_hour == pytest.approx(3600 / STEP)
    narrow = outcome({"rows": 8}, {})  # its groups sample one after another
    assert 3600 * narrow.hours == pytest.approx(10 * (STEP + 3))
    crowd = outcome({"costs": {"row_seconds": 0.001}}, {})  # the groups begin with 8, 16, 24 and 32 rows
    assert 3600 * crowd.hours == pytest.approx(10 * (STEP + 100 * 0.001 * 31))
    queue = outcome({"slots": 1}, {"count": 3})
    assert 3600 * queue.hours == pytest.approx(30 * STEP)
    assert queue.wait == pytest.approx((10 * STEP, 20 * STEP))
    two = outcome({"slots": 1, "count": 3}, {"count": 3})
    assert 3600 * two.hours == pytest.approx(10 * STEP)


def test_what_two_hosts_cost() -> None:
    """Each does two of four jobs, one after the other."""
    found = outcome({"count": 2, "slots": 1, "costs": {"price_per_hour": 3.0}}, {"count": 4})
    assert 3600 * found.hours == pytest.approx(20 * STEP)
    assert found.utilisation == pytest.approx((STEP - 0.5) / STEP)
    assert (found.job_hours, found.step_hours) == pytest.approx((2 * found.hours / 4, 2 * found.hours / 40))
    assert found.cost == pytest.approx(6 * found.hours)
    assert found.wait == pytest.approx((10 * STEP, 10 * STEP))


def test_jobs_that_fail_end_before_their_last_step() -> None:
    found = outcome({}, {"count": 3, "failing": 1.0})
    assert found.steps_per_hour * found.hours < 3 * 9.5
    with pytest.raises(ConfigError, match="every job fails before it has done a step"):
        outcome({}, {"failing": 1.0, "steps": [1, 1]})


def test_an_error_ends_the_simulation() -> None:
    async def without_hosts() -> None:
        simulation = Simulation(cluster({}, {"count": 2}))
        simulation.hosts.clear()
        async with asyncio.timeout(1e6):
            await simulation.run()

    with pytest.raises(ExceptionGroup) as error:
        under_virtual_clock(without_hosts())
    assert error.value.subgroup(IndexError)

    async def fails_later() -> None:
        asyncio.get_running_loop().call_later(5.0, lambda: 1 / 0)
        await asyncio.sleep(10.0)

    with pytest.raises(ZeroDivisionError):
        under_virtual_clock(fails_later())


def test_what_a_job_takes_beside_its_steps() -> None:
    """Its opening, evaluations with the first step and after the last one, and what other jobs cost it."""
    opened = outcome({"costs": {"open_seconds": 7.0, "train_seconds": 0.25}}, {})
    assert 3600 * opened.hours == pytest.approx(7 + 10 * (STEP + 0.25))
    evaluated = outcome({"costs": {"row_seconds": 0.001}}, {"evaluation": 5, "evaluate_every": 4})
    alone = 10 * (STEP + 100 * 0.001 * 31)
    # its 5 rows are beside 32 at versions 0, 4 and 8, and alone at version 10
    assert 3600 * evaluated.hours == pytest.approx(alone + 3 * 100 * 0.001 * 5 + 100 * (0.01 + 0.001 * 4))
    beside = outcome({"slots": 2, "costs": {"job_seconds": 0.002, "own_sampler": True}}, {"count": 2, "steps": [1, 1]})
    assert 3600 * beside.hours == pytest.approx(100 * 0.012 + 2 * 4 + 0.5)


def test_utilisation_from_the_first_job_to_the_last() -> None:
    assert math.isnan(outcome({}, {}).arriving)
    found = outcome({"count": 2, "slots": 4}, {"count": 40, "over_hours": 0.2})
    assert 0.8 < found.arriving <= 1


def test_sampling_waits_for_training_on_the_same_device() -> None:
    """Two jobs by turns: what one samples while the other trains takes as much longer, unless it has devices of its own."""
    shared, apart = (outcome({"costs": {"own_sampler": own}}, {"count": 2}) for own in (False, True))
    assert apart.hours < shared.hours
    assert 3600 * shared.hours >= 2 * 10 * 4  # all that is trained, one after another


def test_hosts_that_die_lose_no_step() -> None:
    config = cluster(
        {"count": 4, "slots": 4, "hours_between_deaths": 0.05, "costs": {"start_seconds": 30}}, {"count": 24}
    )

    async def run() -> Simulation:
        simulation = Simulation(config)
        await simulation.run()
        return simulation

    simulation = under_virtual_clock(run())
    assert all(job.done == job.steps and job.ended for job in simulation.jobs)
    assert sum(job.starts for job in simulation.jobs) > 24
    assert sum(job.first is not None and job.first < 1 for job in simulation.jobs) == 16, "the first slot counts"
    assert not any(host.jobs or host.running for host in simulation.hosts)


def test_tenants_get_tokens_by_their_shares() -> None:
    """A crowd beside few, all hungry; then twice the share."""
    crowd, few = {"tenant": "crowd", "count": 24}, {"tenant": "few", "count": 8}
    even = outcome({"slots": 8, "rows": 16}, crowd, few)
    assert even.contended > 0.9
    assert even.fairness < 1.15
    more = outcome({"slots": 8, "rows": 16}, crowd, {**few, "share": 2.0})
    assert more.fairness < 1.25


def test_a_small_cluster_in_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun = time.monotonic()
    show(ROOT / "examples" / "cluster.yaml", None, tmp_path / "cluster.html")
    assert time.monotonic() - begun < PATIENCE
    said = capsys.readouterr().out
    assert "4 hosts, 120 jobs" in said
    assert "utilisation" in said
    assert "plotly" in (tmp_path / "cluster.html").read_text()


def test_a_plot_that_cannot_be_written_is_told_before_anything_is_computed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make the directory"):
        show(ROOT / "examples" / "cluster.yaml", None, tmp_path / "absent" / "cluster.html")


def test_tenants_that_cannot_all_have_a_slot_take_turns() -> None:
    """Three tenants on two slots, and hosts that do not let the same one wait; then one that is given half as much."""
    hungry = [{"tenant": name, "count": 4, "steps": [60, 60], "groups_per_step": 1, "group_size": 32} for name in "abc"]
    alone = outcome({"slots": 2}, *hungry)
    assert alone.fairness < 1.2
    assert alone.moves >= 4
    spread = outcome({"slots": 2, "count": 4}, *({**tenant, "count": 16} for tenant in hungry))
    assert spread.fairness < 1.2
    less = outcome({"slots": 1}, {**hungry[0], "share": 2.0}, hungry[1])
    assert less.fairness < 1.2


def test_where_tenants_never_compete_there_is_no_fairness() -> None:
    assert math.isnan(outcome({}, {"tenant": "a"}, {"tenant": "b"}).fairness)


def test_a_late_completion_slows_those_that_are_there() -> None:
    """Both groups sample half of their tokens with 8 rows and half with 16."""

    async def run() -> list[float]:
        device = SimulatedDevice(HostCosts(token_seconds=0.01, row_seconds=0.001, train_tokens_per_second=1000))
        ended: list[float] = []

        async def sample(after: float) -> None:
            await asyncio.sleep(after)
            await device.sample("job", 100, 8)
            ended.append(now())

        await asyncio.gather(sample(0.0), sample(50 * 0.017))
        return ended

    assert under_virtual_clock(run()) == pytest.approx([50 * 0.017 + 50 * 0.025, 100 * 0.017 + 50 * 0.025])


@pytest.mark.soak
def test_ten_thousand_jobs_on_a_thousand_hosts() -> None:
    """A base of 30B-A3B: what a host takes is arithmetic for an H100, not measured.

    Jobs come over half of the time, more than hosts can take.
    """
    costs = {"token_seconds": 0.009, "row_seconds": 0.00012, "train_tokens_per_second": 24_000}
    tenants = [
        {
            "tenant": f"{number}",
            "count": 1000,
            "over_hours": 0.075,
            "steps": [8, 24],
            "groups_per_step": 2,
            "group_size": 16,
            "prompt_tokens": [128, 128],
            "completion_tokens": [100, 600],
        }
        for number in range(10)
    ]
    begun = time.monotonic()
    found = outcome(
        {"count": 1000, "slots": 4, "rows": 256, "costs": {**costs, "publish_seconds": 0.4, "open_seconds": 2.0}},
        *tenants,
    )
    print(f"{time.monotonic() - begun:.0f} s")
    print({name: value for name, value in vars(found).items() if name != "curve"})
    assert found.contended >= 0.9
    assert found.arriving >= 0.9
    assert found.utilisation >= 0.75
    assert found.fairness <= 1.1
    assert found.publish < 1


def test_mistakes_are_told(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("jobs: []")
    with pytest.raises(ConfigError, match="must hold `hosts:` and `jobs:`"):
        load_simulation(file)
    text = (ROOT / "examples" / "cluster.yaml").read_text()
    file.write_text(text.replace("steps: [10, 30]", "steps: [30, 10]"))
    with pytest.raises(ConfigError, match=r"steps is \[30, 10\]; give the smallest number first"):
        load_simulation(file)
    assert load_simulation(ROOT / "examples" / "cluster.yaml", 3).hosts.count == 3
