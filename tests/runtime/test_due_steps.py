"""Steps of several jobs are taken together, if the trainer can, and each is its own job's alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import pytest

from motet.config import AdapterConfig
from motet.core.batch import AdamW, Optimizer, OptimStats
from motet.core.device import Device
from motet.core.tenant_turns import Payer
from motet.runtime.due_steps import DueSteps
from motet.runtime.scheduler import FairScheduler
from tests.support.fake_trainer import FakeTrainer
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.tier1

NAMES = "abc"


class Together(FakeTrainer):
    """Takes steps together, but none of `bad` with others, nor alone."""

    def __init__(self, bad: str = "", at_once: int = 8) -> None:
        super().__init__()
        self.steps_at_once = at_once
        self.taken: list[str] = []
        self.bad = bad

    def optim_steps(self, due: Sequence[tuple[str, Optimizer]]) -> list[OptimStats]:
        if self.bad and self.bad in [name for name, _ in due]:
            raise RuntimeError("out of memory")
        self.taken.append("".join(name for name, _ in due))
        return [self.optim_step(name, optimizer) for name, optimizer in due]


class Charging(Device):
    """Keeps which jobs calls are charged to."""

    def __init__(self) -> None:
        super().__init__()
        self.charged: list[str] = []

    def charge(self, owners: Mapping[Payer, float]) -> None:
        self.charged.append("".join(sorted(payer.job for payer in owners)))
        super().charge(owners)


def on_a_device(
    trainer: FakeTrainer, script: Callable[[DueSteps, Device], Coroutine[Any, Any, None]]
) -> tuple[list[str], dict[str, float]]:
    """Runs a script; returns the jobs to which steps are charged, call by call, and what each job has paid."""
    device, scheduler = Charging(), FairScheduler(8)
    for name in NAMES:
        trainer.add_adapter(name, AdapterConfig(rank=4), seed=1)
        scheduler.join(name, 1.0, tenant=name)

    async def run() -> None:
        await script(DueSteps(trainer, device, scheduler), device)

    try:
        asyncio.run(run())
    finally:
        device.close()
    return device.charged, device.busy.take()[2]


def rate(name: str) -> AdamW:
    return AdamW(1.0 + ord(name))


def test_steps_that_are_due_at_once_are_taken_at_once_and_charged_to_all() -> None:
    trainer, found = Together(), list[OptimStats]()

    async def script(steps: DueSteps, _device: Device) -> None:
        found.extend(await asyncio.gather(*(steps.take(name, name, rate(name)) for name in NAMES)))

    charged, paid = on_a_device(trainer, script)
    assert trainer.taken == [NAMES]
    assert [one.lr for one in found] == [rate(name).lr for name in NAMES]
    assert charged == [NAMES]
    assert paid.keys() == set(NAMES)


class Other(AdamW):
    """An optimizer of another class."""


def test_steps_taken_at_once_have_one_class_of_optimizer() -> None:
    trainer = Together()

    async def script(steps: DueSteps, _device: Device) -> None:
        settings = {"a": AdamW(1.0), "b": Other(1.0), "c": AdamW(1.0)}
        await asyncio.gather(*(steps.take(name, name, settings[name]) for name in NAMES))

    on_a_device(trainer, script)
    assert trainer.taken == ["ac", "b"]


@pytest.mark.parametrize(("at_once", "taken"), [(2, ["ab", "c"]), (1, ["a", "b", "c"])])
def test_no_more_steps_are_taken_at_once_than_there_is_room_for(at_once: int, taken: list[str]) -> None:
    trainer = Together(at_once=at_once)

    async def script(steps: DueSteps, _device: Device) -> None:
        await asyncio.gather(*(steps.take(name, name, rate(name)) for name in NAMES))

    on_a_device(trainer, script)
    assert (trainer.taken or ["a", "b", "c"]) == taken


def test_a_step_that_fails_fails_its_own_job_alone() -> None:
    trainer, found = Together("b"), list[Any]()

    async def script(steps: DueSteps, _device: Device) -> None:
        each = (steps.take(name, name, rate(name)) for name in NAMES)
        found.extend(await asyncio.gather(*each, return_exceptions=True))

    on_a_device(trainer, script)
    assert trainer.taken == ["a", "c"]
    assert [isinstance(one, RuntimeError) for one in found] == [False, True, False]


def test_a_job_that_was_cancelled_is_not_stepped_by_another() -> None:
    trainer = Together()

    async def script(steps: DueSteps, device: Device) -> None:
        goes = threading.Event()
        busy = device.submit(lambda: goes.wait(PATIENCE))
        tasks = [asyncio.create_task(steps.take(name, name, rate(name))) for name in NAMES]
        while len(steps._due) < len(NAMES):
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        tasks[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        goes.set()
        await asyncio.gather(tasks[0], tasks[2])
        assert busy.result()
        assert not steps._due

    on_a_device(trainer, script)
    assert trainer.taken == ["ac"]


def test_other_trainers_take_each_step_alone() -> None:
    trainer, found = FakeTrainer(), list[OptimStats]()

    async def script(steps: DueSteps, _device: Device) -> None:
        found.extend(await asyncio.gather(*(steps.take(name, name, rate(name)) for name in NAMES)))

    charged, paid = on_a_device(trainer, script)
    assert not charged
    assert paid.keys() == set(NAMES)
    assert [one.lr for one in found] == [rate(name).lr for name in NAMES]
