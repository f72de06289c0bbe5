"""Fair shares of the engine: who is next, that nobody starves or waits for ever, and that no permit is lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.algorithms.packing import Standing
from motet.runtime.scheduler import FairScheduler, weight_of
from tests.support.scheduling_policy import next_job
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.tier1


@dataclass
class Tenant:
    """A job that asks again as soon as it was served, `streams` requests at a time."""

    name: str
    priority: int = 0
    rows: int = 1
    tokens: int = 10
    """What a request costs."""
    streams: int = 4
    served: list[int] = field(default_factory=list)
    """The turn of the event loop at which each request ended."""


async def _serve(scheduler: FairScheduler, tenant: Tenant, clock: list[int]) -> None:
    while True:
        async with scheduler.permit(tenant.name, tenant.rows):
            for _ in range(tenant.tokens):
                await asyncio.sleep(0)
            scheduler.spend(tenant.name, tenant.tokens)
            tenant.served.append(clock[0])


async def _play(scheduler: FairScheduler, arrivals: dict[int, list[Tenant]], turns: int) -> None:
    """Let tenants arrive at their turns of the event loop, and stop after so many."""
    clock, tasks = [0], []
    for clock[0] in range(turns):
        for tenant in arrivals.get(clock[0], []):
            scheduler.join(tenant.name, weight_of(tenant.priority))
            tasks += [asyncio.create_task(_serve(scheduler, tenant, clock)) for _ in range(tenant.streams)]
        await asyncio.sleep(0)
        assert scheduler.in_flight <= max(scheduler.capacity, *(t.rows for ts in arrivals.values() for t in ts))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert scheduler.in_flight == 0, "a permit was lost"


def tokens(tenant: Tenant) -> int:
    return len(tenant.served) * tenant.tokens


def test_the_policy_is_least_tokens_per_weight() -> None:
    assert next_job({"a": Standing(10, 1), "b": Standing(15, 2), "c": Standing(8, 1)}) == "b"
    assert next_job({"b": Standing(10, 1), "a": Standing(10, 1)}) == "a"
    assert weight_of(10) == 2 * weight_of(0) == 4 * weight_of(-10)


@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 20), st.sampled_from([-10, 0, 10])), min_size=2, max_size=4
    ),
    capacity=st.integers(1, 4),
)
@settings(max_examples=25)
def test_service_per_weight_converges(shapes: list[tuple[int, int, int]], capacity: int) -> None:
    """Whatever the sizes of their requests, hungry tenants have got the same tokens per weight, to within a few requests."""
    tenants = [Tenant(f"t{i}", priority, rows, cost) for i, (rows, cost, priority) in enumerate(shapes)]
    asyncio.run(_play(FairScheduler(capacity), {0: tenants}, 3000))
    shares = [tokens(tenant) / weight_of(tenant.priority) for tenant in tenants]
    slack = 2 * (capacity + 1) * max(tenant.tokens / weight_of(tenant.priority) for tenant in tenants)
    assert max(shares) - min(shares) <= slack, shares
    assert min(shares) > 0


@pytest.mark.parametrize("capacity", [1, 2, 4])
def test_long_answers_get_no_more_tokens_than_short_ones(capacity: int) -> None:
    """Two jobs of equal weight share a narrow engine by tokens, not by requests, and the short ones never starve."""
    short, long = Tenant("short", tokens=10, streams=8), Tenant("long", tokens=100, streams=8)
    turns = 40_000
    asyncio.run(_play(FairScheduler(capacity), {0: [short, long]}, turns))
    ratio = tokens(long) / tokens(short)
    assert abs(ratio - 1) <= 0.1, f"long answers got {ratio:.2f} times the tokens of short ones"
    assert tokens(long) + tokens(short) > 0.85 * capacity * turns, "the engine stood idle"
    assert longest_wait(short, 0, turns) <= 120, "the short ones waited for more than one long answer"


def longest_wait(tenant: Tenant, since: int, until: int) -> int:
    times = [since, *(time for time in tenant.served if since <= time <= until), until]
    return max(b - a for a, b in itertools.pairwise(times))


@given(late=st.integers(200, 900), idle=st.booleans())
@settings(max_examples=10)
def test_newcomers_starve_nobody_and_are_not_starved(late: int, idle: bool) -> None:
    """Also where some job has asked for little so far: its low account is no credit, for it or for a newcomer."""
    old = [Tenant("old-1"), Tenant("old-2")]
    modest = Tenant("modest", streams=0 if idle else 1, tokens=3)
    new = Tenant("new")
    asyncio.run(_play(FairScheduler(1), {0: [*old, modest], late: [new]}, late + 1000))
    for tenant in (*old, new):
        assert longest_wait(tenant, late, late + 1000) < 120, tenant.name
    served = [sum(time >= late for time in tenant.served) for tenant in (*old, new)]
    assert max(served) <= 1.3 * min(served) + 2, served


def test_whoever_was_away_comes_back_without_credit() -> None:
    scheduler = FairScheduler(1)
    busy, away = Tenant("busy"), Tenant("away", streams=1)

    async def main() -> None:
        clock = [0]
        for tenant in (busy, away):
            scheduler.join(tenant.name, 1.0)
        tasks = [asyncio.create_task(_serve(scheduler, busy, clock)) for _ in range(4)]
        for clock[0] in range(1000):
            await asyncio.sleep(0)
        tasks += [asyncio.create_task(_serve(scheduler, away, clock)) for _ in range(4)]
        for clock[0] in range(1000, 1600):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
    assert longest_wait(busy, 1000, 1600) < 60


@given(
    requests=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.integers(0, 6), st.integers(0, 8)),
        min_size=1,
        max_size=24,
    ),
    capacity=st.integers(1, 6),
)
@settings(max_examples=150)
def test_no_permit_is_lost_and_nobody_waits_in_vain(requests: list[tuple[str, int, int, int]], capacity: int) -> None:
    """Each request (job, rows, turns of work) may be cancelled at some turn. All others are served, and capacity is never
    idle while whoever is next would fit (a request larger than the engine goes alone).
    """
    scheduler = FairScheduler(capacity)

    async def one(job: str, rows: int, turns: int) -> None:
        async with scheduler.permit(job, rows):
            for _ in range(turns):
                await asyncio.sleep(0)
            scheduler.spend(job, rows * turns)

    def check() -> None:
        accounts = {name: account for name, account in scheduler._accounts.items() if account.waiting}
        alive = {name: account for name, account in accounts.items() if not account.waiting[0][1].cancelled()}
        if alive and alive == accounts:
            name = next_job({name: scheduler.standing(name) for name in accounts})
            rows = accounts[name].waiting[0][0]
            assert scheduler.in_flight, "nobody runs although somebody waits"
            assert scheduler.in_flight + rows > capacity, "the next one would fit"

    async def main() -> None:
        for job in "abc":
            scheduler.join(job, 1.0)
        tasks = [asyncio.create_task(one(job, rows, turns)) for job, rows, turns, _ in requests]
        cancelled = [task for task, (_, _, _, at) in zip(tasks, requests, strict=True) if at < 5]
        for turn in range(400):
            for task, (_, _, _, at) in zip(tasks, requests, strict=True):
                if at == turn and at < 5:
                    task.cancel()
            await asyncio.sleep(0)
            check()
        assert all(task.done() for task in tasks), "a deadlock"
        assert all(not task.cancelled() for task in tasks if task not in cancelled)
        assert scheduler.in_flight == 0

    asyncio.run(main())


def test_a_cancelled_request_at_the_front_lets_the_next_one_go() -> None:
    scheduler = FairScheduler(4)

    async def hold(rows: int, job: str = "a") -> None:
        async with scheduler.permit(job, rows):
            await asyncio.sleep(3600)

    async def main() -> None:
        scheduler.join("a", 1.0)
        tasks = [asyncio.create_task(hold(rows)) for rows in (2, 4, 2)]
        await asyncio.sleep(0)
        assert scheduler.in_flight == 2  # the second does not fit, the third may not overtake it
        tasks[1].cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert scheduler.in_flight == 4
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert scheduler.in_flight == 0

    asyncio.run(main())


def test_leaving_ends_the_wait_and_lets_the_next_one_go() -> None:
    scheduler = FairScheduler(4)

    async def hold(job: str, rows: int) -> None:
        async with scheduler.permit(job, rows):
            await asyncio.sleep(3600)

    async def main() -> None:
        for name in ("a", "b", "leaves"):
            scheduler.join(name, 1.0)
        scheduler.spend("b", 10)
        running = asyncio.create_task(hold("a", 2))
        await asyncio.sleep(0)
        leaving = asyncio.create_task(hold("leaves", 4))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(hold("b", 2))
        await asyncio.sleep(0)
        assert scheduler.in_flight == 2
        scheduler.leave("leaves")
        await asyncio.sleep(0)
        assert scheduler.in_flight == 4
        with pytest.raises(asyncio.CancelledError):
            await leaving
        scheduler.spend("leaves", 5)  # a late charge to somebody who left is nothing
        for task in (running, waiting):
            task.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        assert scheduler.in_flight == 0

    asyncio.run(main())


class Counting(FairScheduler):
    """Counts how often it looks at what a job or a tenant has had."""

    looks = 0

    def _figure_of_job(self, job: str) -> float | None:
        self.looks += 1
        return super()._figure_of_job(job)

    def _figure_of_tenant(self, tenant: str) -> float | None:
        self.looks += 1
        return super()._figure_of_tenant(tenant)


@pytest.mark.parametrize("per_tenant", [1, 10, 1000])
def test_a_grant_looks_at_few_accounts(per_tenant: int) -> None:
    """With a hundred times as many jobs, as many looks for each turn that is given."""

    def looks_for_a_turn(jobs: int) -> float:
        async def main() -> float:
            scheduler, tenants = Counting(8), [Tenant(f"{number}", tokens=1 + number % 7) for number in range(jobs)]
            for tenant in tenants:
                scheduler.join(tenant.name, 1.0, f"tenant {int(tenant.name) // per_tenant}")
            tasks = [asyncio.create_task(_serve(scheduler, tenant, [0])) for tenant in tenants]
            for _ in range(400):
                await asyncio.sleep(0)
            before, served = scheduler.looks, sum(len(tenant.served) for tenant in tenants)
            for _ in range(400):
                await asyncio.sleep(0)
            turns = sum(len(tenant.served) for tenant in tenants) - served
            looks = scheduler.looks - before
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert turns > 100
            return looks / turns

        return asyncio.run(main())

    assert looks_for_a_turn(1000) < 2 * looks_for_a_turn(10)


@given(
    asked=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(0, 40)), min_size=1, max_size=60),
    changes=st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["share", "weight", "leave"]), st.floats(0.1, 9)), max_size=12
    ),
)
@settings(max_examples=100)
def test_whoever_is_let_in_is_whom_the_policy_names(
    asked: list[tuple[int, int, int]], changes: list[tuple[int, str, float]]
) -> None:
    """The accounts are kept in heaps; the policy looks at all of them."""

    class Watched(FairScheduler):
        def _grant(self) -> None:
            waiting = {name: self.standing(name) for name, one in self._accounts.items() if one.waiting}
            if waiting:
                tenant = self._waiting.first(self._figure_of_tenant)
                chosen.append((None if tenant is None else self._first_of(tenant), next_job(waiting)))
            super()._grant()

    scheduler, chosen = Watched(3), list[tuple[str | None, str]]()

    async def one(job: str, rows: int, cost: int) -> None:
        async with scheduler.permit(job, rows):
            await asyncio.sleep(0)
            scheduler.spend(job, cost)

    async def main() -> None:
        for number in range(6):
            scheduler.join(f"{number}", 1.0, f"tenant {number % 3}")
        tasks = []
        for turn, (number, rows, cost) in enumerate(asked):
            if turn < len(changes):
                job, what, figure = changes[turn]
                if what == "share":
                    scheduler.share(f"tenant {job % 3}", figure)
                elif what == "weight":
                    scheduler.reweigh(f"{job}", figure)
                else:
                    scheduler.leave(f"{job}")
                    scheduler.join(f"{job}", 1.0, f"tenant {job % 3}")
            tasks.append(asyncio.create_task(one(f"{number}", rows, cost)))
            if turn % 12 == 11:  # several come at a time, so that some have to wait
                await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert scheduler.in_flight == 0

    asyncio.run(main())
    assert all(one == policy for one, policy in chosen)


# --- tenants ----------------------------------------------------------------------------------------------------------------


def test_a_tenant_counts_once_however_many_jobs_it_has() -> None:
    had = {"a1": Standing(0, 1, "a", 30.0), "a2": Standing(9, 1, "a", 30.0), "b": Standing(20, 1, "b", 20.0)}
    assert next_job(had) == "b"
    assert next_job({name: one for name, one in had.items() if name != "b"}) == "a1"
    assert next_job({**had, "b": Standing(20, 1, "b", 20.0, share=0.5)}) == "a1"


@pytest.mark.parametrize("share", [1.0, 3.0])
@pytest.mark.parametrize("priority", [0, 10])
def test_ten_times_the_load_is_no_larger_share(share: float, priority: int) -> None:
    """One tenant with two hungry jobs beside one with twenty, a job of high priority among them: weighted tokens by share."""
    crowd = [Tenant(f"a{number}", tokens=5 + number, streams=2) for number in range(19)]
    crowd.append(Tenant("a-high", priority=20, tokens=8, streams=2))
    few = [Tenant("b0", priority=priority, tokens=12, streams=8), Tenant("b1", tokens=7, streams=8)]
    scheduler = FairScheduler(3)
    scheduler.share("b", share)

    async def main() -> None:
        clock = [0]
        tasks = []
        for one in (*crowd, *few):
            scheduler.join(one.name, weight_of(one.priority), one.name[0])
            tasks += [asyncio.create_task(_serve(scheduler, one, clock)) for _ in range(one.streams)]
        for clock[0] in range(30_000):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def weighted(tenants: list[Tenant]) -> float:
        return sum(tokens(one) / weight_of(one.priority) for one in tenants)

    asyncio.run(main())
    assert abs(weighted(few) / share / weighted(crowd) - 1) < 0.02
    inside = [tokens(one) / weight_of(one.priority) for one in few]
    assert abs(inside[0] / inside[1] - 1) < 0.02
    inside = [tokens(one) / weight_of(one.priority) for one in crowd]
    assert max(inside) / min(inside) < 1.1


def test_a_tenant_that_was_away_comes_back_without_credit_and_a_job_that_trains_keeps_its_turn() -> None:
    scheduler = FairScheduler(1)

    async def serve(job: str, n: int) -> None:
        for _ in range(n):
            async with scheduler.permit(job, 1):
                scheduler.spend(job, 10)

    async def main() -> None:
        for job, tenant in (("a1", "a"), ("a2", "a"), ("b", "b"), ("c", "c")):
            scheduler.join(job, 1.0, tenant)
        await serve("b", 1)
        await serve("c", 1)
        with scheduler.working("c"):
            await serve("a1", 50)
            await serve("b", 1)
            had = {job: scheduler.standing(job).tenant_consumed for job in ("a1", "b", "c")}
            assert had["b"] >= 490, "credit for a tenant that was away"
            async with scheduler.permit("c", 1):
                assert scheduler.standing("c").tenant_consumed == 10, "the turn of a job that trains was given away"
        scheduler.leave("a1")
        assert scheduler.standing("a2").tenant_consumed == had["a1"]
        assert scheduler.standing("a2").tenant_consumed == had["a1"]
        scheduler.share("a", 2.0)
        assert scheduler.standing("a2").tenant_consumed / 2 == had["a1"]
        before = scheduler.standing("b")
        scheduler.reweigh("b", 4.0)
        after = scheduler.standing("b")
        assert before.consumed / before.weight == after.consumed / after.weight

    asyncio.run(main())


def test_a_tenant_counts_as_working_for_a_minute_after_it_was_charged() -> None:
    clock = [0.0]
    scheduler = FairScheduler(8, lambda: clock[0])
    for name, share in (("a", 1.0), ("b", 2.0)):
        scheduler.share(name, share)
        scheduler.join(name, 1.0, name)
    assert scheduler.others("a") == 0.0
    scheduler.spend("b", 10)
    clock[0] = 59.0
    assert scheduler.others("a") == 2.0, "between two of its steps it asks for nothing"
    clock[0] = 60.0
    assert scheduler.others("a") == 0.0
    with scheduler.working("b"):
        clock[0] = 200.0
        assert scheduler.others("a") == 2.0
        assert not scheduler.idle("b")
    scheduler.join("b2", 1.0, "b")
    with scheduler.working("b2"):
        assert scheduler.others("a") == 2.0
        scheduler.leave("b2")
        assert scheduler.others("a") == 0.0
    assert scheduler.others("a") == 0.0
    scheduler.spend("a", 10)
    assert scheduler.others("b") == 0.5
    assert scheduler.idle("b")
    assert scheduler.idle("a job that has left")


def test_a_request_that_is_cancelled_when_its_turn_comes_is_over() -> None:
    scheduler = FairScheduler(1)
    for name in "ab":
        scheduler.join(name, 1.0, name)

    async def go() -> None:
        async with scheduler.permit("a", 1):
            waiting = asyncio.create_task(scheduler.permit("b", 1).__aenter__())
            await asyncio.sleep(0)
            assert scheduler.others("a") == 1.0
            waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert (scheduler.others("a"), scheduler.idle("b"), scheduler.in_flight) == (0.0, True, 0)

    asyncio.run(go())


@pytest.mark.parametrize("changed", ["share", "weight"])
def test_whoever_has_less_after_a_change_by_rounding_alone_is_next(changed: str) -> None:
    """Jobs a and b were level: of tokens per share or weight, 3 · 7.6 / 7.6 is less than 3."""
    scheduler, served = FairScheduler(1), list[str]()

    async def one(job: str) -> None:
        async with scheduler.permit(job, 1):
            served.append(job)

    async def go() -> None:
        for job in "cab":
            scheduler.join(job, 1.0, job if changed == "share" else "")
            scheduler.spend(job, 3 * (job != "c"))
        async with scheduler.permit("c", 1):
            tasks = [asyncio.create_task(one(job)) for job in "ab"]
            await asyncio.sleep(0)
            if changed == "share":
                scheduler.share("b", 7.6)
            else:
                scheduler.reweigh("b", 7.6)
        await asyncio.gather(*tasks)

    asyncio.run(go())
    assert served == ["b", "a"]


def test_a_share_that_changes_keeps_the_consumption_for_each_share() -> None:
    """A tenant that comes later has its own."""
    scheduler = FairScheduler(8)
    scheduler.join("a1", 4.0, "a")
    scheduler.spend("a1", 40)
    scheduler.share("a", 3.0)
    scheduler.share("b", 0.5)
    scheduler.join("b1", 1.0, "b")
    assert [scheduler.payer(job) for job in ("a1", "b1", "gone")] == [("a", 3.0), ("b", 0.5), ("", 1.0)]
    assert scheduler.standing("a1") == Standing(40, 4.0, "a", 30.0, 3.0)
    scheduler.share("a", 2.0)
    assert scheduler.standing("a1") == Standing(40, 4.0, "a", 20.0, 2.0)


def test_a_tenant_begins_anew_once_its_last_job_has_left() -> None:
    scheduler, consumed = FairScheduler(8), []
    scheduler.join("1", 1.0, "a")
    scheduler.spend("1", 40)
    for number in range(1, 4):
        scheduler.join(f"{number + 1}", 1.0, "a")
        scheduler.leave(f"{number}")
        consumed.append(scheduler.standing(f"{number + 1}").tenant_consumed)
    scheduler.leave("4")
    scheduler.join("5", 1.0, "a")
    consumed.append(scheduler.standing("5").tenant_consumed)
    assert consumed == [40, 40, 40, 0]


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_whoever_is_new_begins_level_by_its_weight_and_share(tenant: str) -> None:
    """Beside a job of the same tenant, or as another tenant."""
    scheduler = FairScheduler(8)
    scheduler.share("b", 4.0)
    scheduler.join("old", 1.0, "a")
    scheduler.join("new", 4.0, tenant)

    async def go() -> None:
        for _ in range(3):
            async with scheduler.permit("old", 1):
                scheduler.spend("old", 10)
        async with scheduler.permit("new", 1):
            standing = scheduler.standing("new")
            assert (standing.consumed if tenant == "a" else standing.tenant_consumed) == 4 * 20

    asyncio.run(go())


def test_completions_wait_for_no_other_tenant_within_its_share() -> None:
    scheduler = FairScheduler(8)
    scheduler.join("long", 1.0, "greedy")
    scheduler.join("chats", 1.0, "small")

    async def go() -> None:
        async with contextlib.AsyncExitStack() as held:
            await held.enter_async_context(scheduler.permit("long", 8))
            for _ in range(4):
                await asyncio.wait_for(held.enter_async_context(scheduler.permit("chats", 1, at_once=True)), PATIENCE)
            assert scheduler.in_flight == 12
            beyond = asyncio.create_task(held.enter_async_context(scheduler.permit("chats", 1, at_once=True)))
            await asyncio.sleep(0)
            assert not beyond.done(), "a tenant has more than half of the capacity before its turn"
            beyond.cancel()
            await asyncio.gather(beyond, return_exceptions=True)
        assert scheduler.in_flight == 0
        async with asyncio.timeout(PATIENCE), scheduler.permit("chats", 8, at_once=True):
            assert scheduler.in_flight == 8, "alone it has everything"

    asyncio.run(go())


def test_rows_of_a_tenant_that_left_are_not_those_of_one_that_comes_under_its_name() -> None:
    scheduler = FairScheduler(8)
    scheduler.join("long", 1.0, "greedy")
    scheduler.join("chats", 1.0, "small")

    async def go() -> None:
        async with contextlib.AsyncExitStack() as held, contextlib.AsyncExitStack() as before:
            await held.enter_async_context(scheduler.permit("long", 8))
            await before.enter_async_context(scheduler.permit("chats", 4, at_once=True))
            scheduler.leave("chats")
            scheduler.join("chats", 1.0, "small")
            await held.enter_async_context(scheduler.permit("chats", 4, at_once=True))
            await before.aclose()
            beyond = asyncio.create_task(held.enter_async_context(scheduler.permit("chats", 1, at_once=True)))
            await asyncio.sleep(0)
            assert not beyond.done(), "it has its share"
            beyond.cancel()
            await asyncio.gather(beyond, return_exceptions=True)
        assert scheduler.in_flight == 0

    asyncio.run(go())


def test_whoever_begins_thousands_waits_while_many_of_them_wait() -> None:
    async def go() -> None:
        scheduler = FairScheduler(1)
        scheduler.join("job", 1.0)
        turns, begun = asyncio.Semaphore(0), list[asyncio.Task[None]]()

        async def ask() -> None:
            async with scheduler.permit("job", 1):
                await turns.acquire()

        async def begin() -> None:
            for _ in range(100):
                begun.append(asyncio.create_task(ask()))
                await asyncio.sleep(0)
                await scheduler.few_wait("job", 8)

        beginning = asyncio.create_task(begin())
        for ended in range(20):
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(begun) == ended + 9  # one has its turn, eight wait
            turns.release()
        beginning.cancel()
        for task in begun:
            task.cancel()
        await asyncio.gather(beginning, *begun, return_exceptions=True)

    asyncio.run(go())
