"""The device: one thread on which training calls and decode ticks take turns."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from concurrent.futures import CancelledError

import pytest

from motet.core.device import DECODES, Device, used_by
from motet.core.errors import DeviceLost
from motet.core.tenant_turns import Payer
from tests.support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.tier1


def test_calls_run_in_order_on_one_thread(device: Device) -> None:
    seen: list[tuple[int, int]] = []

    def note(i: int) -> None:
        seen.append((i, threading.get_ident()))

    futures = [device.submit(functools.partial(note, i)) for i in range(50)]
    for future in futures:
        future.result(timeout=PATIENCE)
    assert [i for i, _ in seen] == list(range(50))
    assert len({thread for _, thread in seen}) == 1
    assert seen[0][1] != threading.get_ident()


def test_results_and_errors_come_back(device: Device) -> None:
    def fails() -> None:
        raise KeyError("no such thing")

    async def main() -> None:
        assert await device.run(lambda: 7) == 7
        with pytest.raises(KeyError, match="no such thing"):
            await device.run(fails)
        assert await device.run(lambda: 8) == 8

    asyncio.run(main())


def held(device: Device) -> threading.Event:
    """Lets a device go on that has begun a call: what comes meanwhile waits, and the ticks that it has come next."""
    begun, go = threading.Event(), threading.Event()

    def wait() -> bool:
        begun.set()
        return go.wait(PATIENCE)

    device.submit(wait)
    assert begun.wait(PATIENCE)
    return go


@pytest.mark.parametrize(
    ("call", "tick", "wanted"), [(1, 1, "tctctctc"), (3, 1, "tcttctttctttc"), (1, 3, "tccctccctccc")]
)
def test_calls_and_ticks_take_turns(call: int, tick: int, wanted: str) -> None:
    """While decoding has work, ticks have as much time after a call as the call took, and the other way around."""
    order: list[str] = []
    clock = [0]

    def work(name: str, seconds: int) -> bool:
        if name == "t" and order.count("t") == 40:
            return False
        order.append(name)
        clock[0] += seconds
        return True

    device = Device(clock=lambda: clock[0])
    try:
        device.add_tick(lambda: work("t", tick))
        go = held(device)
        futures = [device.submit(lambda: work("c", call)) for _ in range(10)]
        go.set()
        for future in futures:
            future.result(timeout=PATIENCE)
    finally:
        device.close()
    assert "".join(order).startswith(wanted)


def worked(calls: list[tuple[str, float]], tick: int = 0) -> str:
    """The order of calls of tenants, by their first letters, of so many seconds each; ticks of a tenant `t` beside them.

    Those of less than a second are light.
    """
    order: list[str] = []
    clock = [0.0]
    device = Device(clock=lambda: clock[0])

    def work(name: str, seconds: float) -> bool:
        order.append(name[0])
        clock[0] += seconds
        return True

    def ticked() -> bool:
        device.turns.come(["t"], DECODES)
        device.turns.charge(tick, [(Payer("t", "t"), 1)])
        return work("t", tick)

    try:
        if tick:
            device.add_tick(ticked)
        go = held(device)
        futures = []
        for name, seconds in calls:
            with used_by(f"job of {name}", name):
                futures.append(device.submit(functools.partial(work, name, seconds), light=seconds < 1))
        go.set()
        for future in futures:
            future.result(timeout=PATIENCE)
    finally:
        device.close()
    return "".join(order)


def test_a_call_does_not_pay_for_what_a_tick_has_begun() -> None:
    now, begun, ticked = [0], [0], threading.Event()

    def tick() -> bool:
        begun[0] = 7
        ticked.set()
        return True

    def wait() -> None:
        now[0] += begun[0]
        begun[0] = 0

    def call() -> None:
        wait()
        now[0] += 2

    device = Device(clock=lambda: now[0])
    try:
        device.add_tick(tick, wait)
        device.wake()
        assert ticked.wait(PATIENCE)
        with used_by("job"):
            device.submit(call).result(timeout=PATIENCE)
    finally:
        device.close()
    assert device.busy.take()[2] == {"job": 2}
    assert device.busy.turns == 9


def test_a_call_waits_for_no_more_than_one_of_a_tenant_with_many() -> None:
    assert worked([*[("greedy", 1)] * 10, *[("small", 1)] * 3]) == "gsgsgs" + 7 * "g"


def test_long_calls_count_as_long_as_they_take() -> None:
    assert worked([*[("greedy", 3)] * 4, *[("small", 1)] * 6]).startswith("gsssgsss")


def test_a_tenants_calls_wait_while_another_that_decodes_has_had_less() -> None:
    """However long a call takes: the other gets half of the time."""
    assert "gtttttgtttttg" in worked([("greedy", 5)] * 6, tick=1)


def test_light_calls_come_first_while_their_tenant_is_little_ahead() -> None:
    """As the probe of a version does, which would else wait for the training of many jobs."""
    many = [*[("greedy", 1)] * 3, ("small", 1), *[("probe", 0.04)] * 5, ("small", 0.04)]
    assert worked(many, tick=1).startswith("tpsppg")
    assert worked([*[("greedy", 1)] * 3, *[("probe", 0.04)] * 9]) == "pppgppppppgg"


def test_ticks_without_work_do_not_spin(device: Device) -> None:
    ticks = [0]

    def tick() -> bool:
        ticks[0] += 1
        return False

    device.add_tick(tick)
    device.wake()
    device.submit(lambda: None).result(timeout=PATIENCE)
    time.sleep(0.05)
    assert ticks[0] <= 4


def test_a_wake_during_a_tick_is_not_lost(device: Device) -> None:
    """Work that arrives while a tick finds nothing to do must be ticked again."""
    found = threading.Event()
    state = {"work": False}

    def tick() -> bool:
        if state["work"]:
            found.set()
        elif not found.is_set():
            state["work"] = True
            device.wake()
        return False

    device.add_tick(tick)
    device.wake()
    assert found.wait(timeout=PATIENCE)


def test_a_tick_that_breaks_ends_nobody_elses_calls(device: Device) -> None:
    """A tick must not raise; where one does, whoever calls hears of it instead of waiting for ever."""

    def tick() -> bool:
        raise RuntimeError("the decoder broke")

    device.add_tick(tick)
    go = held(device)
    waiting = device.submit(lambda: 1)
    go.set()
    with pytest.raises(DeviceLost, match=r"down: RuntimeError.*the decoder broke"):
        waiting.result(timeout=PATIENCE)
    with pytest.raises(DeviceLost, match="the device broke down"):
        device.submit(lambda: 1)


def test_a_device_that_can_do_no_more_work_ends_whoever_watches_it() -> None:
    """After any failure it is checked; an error that leaves it whole is its caller's alone."""
    whole = [True]

    def check() -> None:
        if not whole[0]:
            raise OSError("an illegal memory access was encountered")

    def fail() -> None:
        raise MemoryError("no room")

    async def main() -> None:
        with device.watched():
            with pytest.raises(MemoryError):
                await device.run(fail)
            assert await device.run(lambda: 1) == 1
            whole[0] = False
            with pytest.raises(DeviceLost, match="an illegal memory access") as caught:
                await device.run(fail)
            assert isinstance(caught.value.__cause__, MemoryError)
            await asyncio.Event().wait()

    device = Device(check=check)
    with contextlib.closing(device):
        with pytest.raises(DeviceLost, match="resumes from its last commit"):
            asyncio.run(asyncio.wait_for(main(), PATIENCE))
        with pytest.raises(DeviceLost):
            device.submit(lambda: 1)
        with pytest.raises(DeviceLost):
            asyncio.run(main())


def test_closing_cancels_what_waits_and_refuses_what_comes() -> None:
    device, gate, begun = Device(), threading.Event(), threading.Event()

    def wait_at_the_gate() -> bool:
        begun.set()
        return gate.wait()

    running = device.submit(wait_at_the_gate)
    assert begun.wait(PATIENCE)
    waiting = device.submit(lambda: None)
    threading.Timer(0.05, gate.set).start()
    device.close()
    assert running.result(timeout=PATIENCE) is True
    with pytest.raises(CancelledError):
        waiting.result(timeout=PATIENCE)
    with pytest.raises(RuntimeError, match="the device is closed"):
        device.submit(lambda: None)
    device.close()


def test_a_cancelled_call_is_not_run(device: Device) -> None:
    gate, ran = threading.Event(), threading.Event()
    device.submit(gate.wait)
    waiting = device.submit(ran.set)
    assert waiting.cancel()
    gate.set()
    device.submit(lambda: None).result(timeout=PATIENCE)
    assert not ran.is_set()


def test_two_event_loops_may_share_a_device(device: Device) -> None:
    async def main() -> int:
        return sum(await asyncio.gather(*(device.run(functools.partial(int, i)) for i in range(20))))

    assert asyncio.run(main()) == asyncio.run(main()) == 190


def test_nothing_runs_while_held(device: Device) -> None:
    ticks, begun, may = [0], threading.Event(), threading.Event()

    def tick() -> bool:
        begun.set()
        assert may.wait(PATIENCE)
        ticks[0] += 1
        return True

    device.add_tick(tick)
    device.wake()
    assert begun.wait(PATIENCE)
    device.hold()
    may.set()
    wait_until(lambda: ticks[0] > 0)  # the tick under way
    before = ticks[0]
    waiting = device.submit(lambda: 7)
    device.wake()
    time.sleep(0.05)
    assert ticks[0] == before > 0
    assert not waiting.done()
    device.go()
    assert waiting.result(timeout=PATIENCE) == 7
    device.hold()
    device.close()  # also while it is held


def test_a_turn_is_told_once_and_before_its_work() -> None:
    """Calls in a row, or ticks in a row, are one turn."""
    order: list[str] = []
    device = Device(lambda training: order.append("T" if training else "S"))
    left = [3]

    def tick() -> bool:
        if not left[0]:
            return False
        order.append("tick")
        left[0] -= 1
        return left[0] > 0

    try:
        device.submit(lambda: order.append("call")).result(timeout=PATIENCE)
        device.add_tick(tick)
        device.wake()
        wait_until(lambda: not left[0])
        device.submit(lambda: order.append("call")).result(timeout=PATIENCE)
        device.submit(lambda: None).result(timeout=PATIENCE)
    finally:
        device.close()
    assert order[:9] == ["T", "call", "S", "tick", "tick", "tick", "T", "call", "S"]


def test_whose_call_runs_is_known(device: Device) -> None:
    def charged(*jobs: str) -> str:
        device.charge({Payer(job): 1.0 for job in jobs})
        return device.job

    async def work() -> list[str]:
        with used_by("a"):
            found = [await device.run(lambda: device.job)]
            found.append(await device.run(lambda: charged("a", "b")))
        with used_by("", "tenant"):
            found.append(await device.run(lambda: device.job))
            found.append(await device.run(lambda: charged("b")))
        return found

    assert asyncio.run(work()) == ["a", "", "", "b"]
    wait_until(lambda: device.job == "")  # its answer comes before the call is counted


def test_a_light_call_takes_no_turn() -> None:
    """What another process samples goes on beside it."""
    order: list[str] = []
    device = Device(lambda training: order.append("T" if training else "S"))
    try:
        for name, light in (("light", True), ("call", False), ("light", True), ("light", True)):
            device.submit(lambda name=name: order.append(name), light=light).result(timeout=PATIENCE)  # type: ignore[misc]
    finally:
        device.close()
    assert order == ["S", "light", "T", "call", "S", "light", "light"]


def test_a_turn_that_fails_is_told_to_who_waits() -> None:
    def turn(training: bool) -> None:
        raise OSError("no such process")

    device = Device(turn)
    device.add_tick(lambda: False)
    waiting = device.submit(lambda: None)
    with pytest.raises(DeviceLost, match="the device broke down"):
        waiting.result(timeout=PATIENCE)
    device.close()
