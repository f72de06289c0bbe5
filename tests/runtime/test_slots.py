"""Who gets a slot among tenants, and who gives one up: the policy as a pure function, and a pipeline that keeps to it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import motet
from motet.commands.run import run_file
from motet.core.types import JobState
from motet.runtime.progress import JobChanged
from motet.runtime.slot_turns import LOOK_SECONDS, TURN_SECONDS, SlotTurns
from motet.runtime.slots import Claim, Rule, admitted, preempted_for_share, preempted_if_idle
from tests.support.counting import calls
from tests.support.fake_run import FakeRun, Setting, job, run_jobs
from tests.support.waiting import until

pytestmark = pytest.mark.tier1


def claims(*names: str) -> list[Claim]:
    """Jobs of the tenants that their first letters name; `+` and `-` at the end are priorities."""
    priorities = {"+": 10, "-": -10}
    return [Claim(name, name[0], priorities.get(name[-1], 0)) for name in names]


def test_free_slots_go_by_priority_then_to_the_tenant_with_fewest_then_in_order() -> None:
    assert admitted(claims("a1", "a2", "b1"), [], 2, {}) == ["a1", "b1"]
    assert admitted(claims("a1", "a2", "b1"), [], 3, {}) == ["a1", "b1", "a2"]
    assert admitted(claims("a1", "a2+", "b1"), [], 2, {}) == ["a2+", "b1"]
    assert admitted(claims("a1", "b1"), claims("b0"), 2, {}) == ["a1"]
    assert admitted(claims("a1", "a2", "a3"), [], 2, {}) == ["a1", "a2"]  # one tenant: in order
    assert admitted(claims("a1", "a2", "b1", "b2"), claims("a0", "b0"), 5, {"a": Rule(share=2.0)}) == ["a1", "a2", "b1"]
    assert admitted(claims("a1"), claims("b0"), 1, {}) == []


def test_priority_counts_against_others_only_as_far_as_the_tenant_is_allowed() -> None:
    allowed = {"a": Rule(highest=10)}
    assert admitted(claims("a1+", "b1"), claims("a0"), 2, {}) == ["b1"]
    assert admitted(claims("a1+", "b1"), claims("a0"), 2, allowed) == ["a1+"]
    assert preempted_for_share(claims("b1"), claims("a1+", "a2+"), 2, {}) == "a2+"
    assert preempted_for_share(claims("b1"), claims("a1+", "a2+"), 2, allowed) is None
    assert admitted(claims("a1", "a2+"), [], 1, {}) == ["a2+"]  # among its own jobs it always counts


def test_rules_keep_jobs_in_the_queue() -> None:
    rules = {"a": Rule(running=1), "b": Rule(hold="spent")}
    assert admitted(claims("a1", "a2", "b1", "c1"), [], 8, rules) == ["a1", "c1"]
    assert preempted_for_share(claims("b1"), claims("a1", "a2"), 2, rules) is None


def test_a_tenant_with_many_slots_gives_way() -> None:
    assert preempted_for_share(claims("b1"), claims("a1", "a2"), 2, {}) == "a2"
    assert preempted_for_share(claims("b1"), claims("a1", "a2"), 3, {}) is None  # there is a free one
    assert preempted_for_share(claims("b1"), claims("a1"), 1, {}) is None  # it would only turn the injustice round
    assert preempted_for_share(claims("b2"), claims("a1", "a2", "b1"), 3, {}) is None
    assert preempted_for_share(claims("b2"), claims("a1", "a2", "a3", "b1"), 4, {}) == "a3"
    assert preempted_for_share(claims("a9"), claims("a1", "a2"), 2, {}) is None
    assert preempted_for_share(claims("b1"), claims("a1-", "a2"), 2, {}) == "a1-"
    assert preempted_for_share(claims("b1-"), claims("a1", "a2"), 2, {}) is None  # a lower priority waits
    assert preempted_for_share(claims("b1"), claims("a1", "a2"), 2, {"a": Rule(share=3.0)}) is None
    assert preempted_for_share([], claims("a1", "a2"), 2, {}) is None


def test_no_job_is_compared_where_none_wants_a_slot_or_none_waits() -> None:
    """It is asked several times a second: to compare each running job with all others takes the square of their number."""
    running, queued = [Claim(f"a{n}", "a") for n in range(200)], [Claim("b1", "b")]
    for wanted, waiting in ((list[Claim](), {"a1"}), (queued, set[str]()), (queued, {"a1"})):
        with calls() as counted:
            preempted_if_idle(wanted, running, waiting, len(running), {})
        assert counted["admitted"] == bool(wanted and waiting)


def test_who_only_waits_makes_room_for_whoever_would_get_the_slot() -> None:
    assert preempted_if_idle(claims("a9"), claims("a1", "a2"), {"a1"}, 2, {}) == "a1"  # of the same tenant too
    assert preempted_if_idle(claims("b1"), claims("a1", "a2"), {"a1", "a2"}, 2, {}) == "a2"
    assert preempted_if_idle(claims("b1"), claims("a1", "a2"), {}, 2, {}) is None
    assert preempted_if_idle(claims("b1"), claims("a1", "a2"), {"a1"}, 3, {}) is None  # there is a free one
    assert preempted_if_idle(claims("b1"), claims("a1"), {"a1"}, 1, {}, {"b": 9.0}) is None  # a has had less
    two = Claim("b1", "b", slots=2)  # the first of the queue, but for its past turns, and too large for the free one
    assert preempted_if_idle([two, *claims("c1")], claims("a1", "a2"), {"a1"}, 3, {}) == "a1"
    assert preempted_if_idle([two, *claims("c1")], claims("a1", "a2"), {"a1"}, 3, {}, {"b": 9.0}) is None
    assert preempted_if_idle([], claims("a1", "a2"), {"a1"}, 2, {}) is None
    assert preempted_if_idle(claims("a9-"), claims("a1"), {"a1"}, 1, {}) is None  # it would get its slot back
    assert preempted_if_idle(claims("b1"), claims("a1", "b0"), {"b0"}, 2, {}) == "b0"
    assert preempted_if_idle(claims("b1"), claims("a1", "b0"), {"a1"}, 2, {}) is None  # tenant b has as many
    assert preempted_if_idle(claims("b1"), claims("a1"), {"a1"}, 1, {"b": Rule(hold="spent")}) is None
    assert (
        preempted_if_idle(claims("b1"), claims("a1"), {"a1"}, 1, {"a": Rule(hold="spent"), "b": Rule(hold="spent")})
        is None
    )


NAMES = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("+- ")), max_size=10)


@given(NAMES, st.integers(1, 8), st.integers(1, 3))
def test_it_comes_to_rest_with_slots_by_share(wanted: list[tuple[str, str]], slots: int, most: int) -> None:
    """Giving way again and again ends, and fills every slot that may be filled."""
    everything = claims(*(f"{tenant}{number}{priority}" for number, (tenant, priority) in enumerate(wanted)))
    rules = {"c": Rule(running=most)}
    running: list[Claim] = []
    for _ in range(100):
        queued = [claim for claim in everything if claim not in running]
        new = set(admitted(queued, running, slots, rules))
        running += [claim for claim in queued if claim.job in new]
        assert len(running) <= slots
        queued = [claim for claim in queued if claim.job not in new]
        if (job := preempted_for_share(queued, running, slots, rules)) is None:
            break
        running = [claim for claim in running if claim.job != job]
    else:
        raise AssertionError("it never comes to rest")
    assert sum(claim.tenant == "c" for claim in running) <= most
    able = [claim for claim in queued if claim.tenant != "c" or sum(one.tenant == "c" for one in running) < most]
    assert not able or len(running) == slots


def test_a_job_with_two_slots_gets_both_though_a_smaller_one_waits() -> None:
    """The first slot that is free for it is not enough, and whoever waits with one slot would fit in."""
    two, queued, running = Claim("b1", "b", slots=2), claims("a5"), claims("a1", "a2", "a3", "a4")
    assert preempted_for_share([*queued, two], running, 4, {}) == "a4"
    assert admitted([*queued, two], running[:3], 4, {}) == []
    assert preempted_for_share([*queued, two], running[:3], 4, {}) == "a3"
    assert admitted([*queued, two], running[:2], 4, {}) == ["b1"]
    assert preempted_for_share([two], claims("a1", "a2", "a3"), 3, {}) is None, "it would have more than the others"
    assert preempted_if_idle([*queued, two], running[:3], {"a2"}, 4, {}) == "a2"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3)), max_size=8), st.integers(3, 8))
def test_it_comes_to_rest_with_jobs_of_several_slots(wanted: list[tuple[str, int]], slots: int) -> None:
    everything = [Claim(f"{tenant}{n}", tenant, slots=size) for n, (tenant, size) in enumerate(wanted)]
    running: list[Claim] = []
    for _ in range(100):
        new = set(admitted([claim for claim in everything if claim not in running], running, slots, {}))
        running += [claim for claim in everything if claim.job in new]
        assert sum(claim.slots for claim in running) <= slots
        queued = [claim for claim in everything if claim not in running]
        if (job := preempted_for_share(queued, running, slots, {})) is None:
            return
        running = [claim for claim in running if claim.job != job]
    raise AssertionError("it never comes to rest")


def test_turns_that_were_had_count_as_slots() -> None:
    assert admitted(claims("a1", "b1"), [], 1, {}, {"a": 1.0, "b": 0.5}) == ["b1"]
    assert preempted_for_share(claims("b1"), claims("a1"), 1, {}, {"a": 0.9, "b": 0.0}) is None
    assert preempted_for_share(claims("b1"), claims("a1"), 1, {}, {"a": 1.0, "b": 0.0}) == "a1"
    assert preempted_for_share(claims("b1"), claims("a1"), 1, {}, {"a": 1.0, "b": 0.5}) is None
    assert preempted_for_share(claims("b1-"), claims("a1"), 1, {}, {"a": 5.0, "b": 0.0}) is None, "it has less priority"
    assert preempted_for_share(claims("c1"), claims("a1", "a2", "b1", "b2"), 4, {}, {"b": 1.0}) == "b2"


def test_turns_that_were_had_move_no_slot_to_a_tenant_with_as_many() -> None:
    """Two with equal parts and steps of minutes would give way to each other after every step."""
    queued, running = claims("a2", "b2"), claims("a1", "b1")
    assert preempted_for_share(queued, running, 2, {}, {"a": 2.0, "b": 0.0}) is None
    assert preempted_for_share(queued, claims("a1", "a3", "b1"), 3, {}, {"a": 2.0, "b": 0.0}) == "a3"


def test_a_tenant_that_does_not_give_way_keeps_nobody_else_from_it() -> None:
    """One with priority has had most; the two others take turns at what it leaves."""
    rules = {"h": Rule(highest=10)}
    assert preempted_for_share(claims("c1"), claims("h1+", "b1"), 2, rules, {"h": 9.0, "b": 2.0, "c": 0.0}) == "b1"


def slot_seconds(jobs: dict[str, float], slots: int, seconds: int, step: int = 1) -> dict[str, int]:
    """What each job, which begins to ask at some second and gives way after a step, has of the slots."""
    clock, had = [0.0], dict.fromkeys(jobs, 0)
    turns, running = SlotTurns(clock=lambda: clock[0]), list[Claim]()
    for second in range(0, seconds, step):
        clock[0] = float(second)
        queued = claims(
            *(name for name, from_ in jobs.items() if from_ <= second and Claim(name, name[0]) not in running)
        )
        turns.update(running, queued, slots, {})
        running += [claim for claim in queued if claim.job in admitted(queued, running, slots, {}, turns.had)]
        turns.hold(running)
        queued = [claim for claim in queued if claim not in running]
        name = preempted_for_share(queued, running, slots, {}, turns.had)
        running = [claim for claim in running if claim.job != name]
        for claim in running:
            had[claim.job] += step
    return had


def test_tenants_take_turns_at_a_slot() -> None:
    """Three on two slots, the third of which comes last; nobody is ahead of another by more than two turns."""
    had = slot_seconds({"a": 0, "b": 0, "c": 10}, 2, 3600)
    assert max(had.values()) - min(had.values()) <= 2 * TURN_SECONDS
    assert sum(had.values()) > 0.97 * 2 * 3600


def test_waiting_is_no_credit_beyond_two_turns() -> None:
    """Who waited for a day, behind a higher priority, does not keep the slot for another."""
    clock = [0.0]
    turns = SlotTurns(clock=lambda: clock[0])
    turns.update([], claims("a1", "b1"), 1, {})
    turns.hold(claims("a1"))
    clock[0] = 86400.0
    turns.update(claims("a1"), claims("b1"), 1, {})
    assert turns.had["a"] - turns.had["b"] == 2.0
    turns.hold(claims("a1"))
    clock[0] *= 2
    turns.update(claims("a1"), claims("b1"), 1, {"b": Rule(share=0.5)})
    assert turns.had["a"] - turns.had["b"] == 4.0, "a turn of half a share counts twice"
    turns.update(claims("a1"), claims("c1"), 1, {"c": Rule(share=0.5)})
    assert turns.had["c"] == turns.had["a"], "a tenant that comes starts level with the one that has had least"
    assert admitted(claims("a1", "d1"), [], 1, {}, {"a": 0.5}) == ["d1"], "no past turns are none"


def test_turns_count_by_shares_and_a_tenant_begins_within_a_round_of_its_host() -> None:
    clock, rules = [0.0], {"a": Rule(share=2.0)}
    turns, wide = (SlotTurns("host", lambda: clock[0]) for _ in range(2))
    turns.update([], claims("a1"), 1, rules)
    wide.update([], claims("a1"), 2, rules)
    began = turns.had["a"]
    assert 0 < began < 1
    hosts = [SlotTurns(f"{number}", lambda: clock[0]) for number in range(64)]
    for host in hosts:
        host.update([], claims("a1"), 1, {"a": Rule(share=9.0)})
    delays = [host.had["a"] for host in hosts]
    assert (min(delays) < 0.1, max(delays) > 0.9, max(delays) < 1) == (True, True, True)
    assert wide.had["a"] == began / 2, "with twice the slots a round is half as long"
    turns.hold([Claim("a1", "a", slots=3)])
    clock[0] = TURN_SECONDS
    turns.update(claims("a1"), [], 1, rules)
    assert turns.had["a"] == pytest.approx(began + 1.5), "each of its slots counts"


@pytest.mark.parametrize(
    ("running", "queued", "seconds", "due"),
    [
        (["a1"], ["b1"], LOOK_SECONDS, True),
        (["a1"], ["b1"], LOOK_SECONDS - 0.1, False),
        (["a1"], ["a2"], LOOK_SECONDS, False),
        (["a1", "b1"], [], LOOK_SECONDS, False),
    ],
    ids=["another tenant waits", "since a moment", "of the same tenant", "nobody waits"],
)
def test_a_turn_may_be_over_once_another_tenant_waited(
    running: list[str], queued: list[str], seconds: float, due: bool
) -> None:
    clock = [100.0]
    turns = SlotTurns(clock=lambda: clock[0])
    turns.update(claims(*running), claims(*queued), 1, {})
    clock[0] += seconds
    assert turns.due == due
    turns.update(claims(*running), claims(*queued), 1, {})
    assert not turns.due, "it was looked at"


# --- in a pipeline ----------------------------------------------------------------------------------------------------------


def test_a_newcomer_gets_a_slot_and_no_byte_changes(tmp_path: Path) -> None:
    """A tenant that fills all slots gives one to another, whose job does not wait for the end of a long one."""
    configs = [job("a1", steps=12), job("a2", steps=12), job("b", steps=3)]
    run_jobs(tmp_path / "alone", configs, Setting(slots=3))
    order: list[str] = []
    tenants = {"a1": "a", "a2": "a", "b": "b"}

    async def script(run: FakeRun) -> None:
        late = run.jobs["b"]
        for name in ("a1", "a2"):
            run.jobs[name].observer = lambda event, name=name: (  # type: ignore[misc]
                order.append(f"{name} {event.state}") if isinstance(event, JobChanged) else None
            )
        await until(lambda: run.jobs["a2"].progress.step >= 2)
        run.pipeline.add(late)
        await until(lambda: late.state is JobState.SUCCEEDED)
        assert run.jobs["a1"].progress.step < 12

    run = run_jobs(tmp_path / "together", configs, Setting(slots=2, tenants=tenants, late=frozenset({"b"})), script)
    assert {one.state for one in run.jobs.values()} == {JobState.SUCCEEDED}
    assert "a2 queued" in order
    assert "a1 queued" not in order
    for config in configs:
        for file in ("metrics.jsonl", f"versions/v{config.steps}/adapter_model.safetensors"):
            alone, together = (tmp_path / place / config.name / file for place in ("alone", "together"))
            assert alone.read_bytes() == together.read_bytes(), (config.name, file)


def test_a_tenant_that_is_held_pauses_and_goes_on_by_itself(tmp_path: Path) -> None:
    """Its jobs only, and those that a person paused stay paused."""
    told: list[str] = []
    setting = Setting(tenants={"a1": "a", "a2": "a"})

    async def script(run: FakeRun) -> None:
        for name in ("a1", "a2"):
            run.jobs[name].observer = lambda event: (
                told.append(event.message) if isinstance(event, JobChanged) else None
            )
        await until(lambda: run.jobs["a1"].progress.step >= 1)
        run.pipeline.pause("a2")
        await until(lambda: run.state("a2") is JobState.PAUSED)
        run.pipeline.rule("a", Rule(hold="the day's tokens are spent"))
        await until(lambda: run.state("a1") is JobState.PAUSED)
        run.pipeline.resume("a1")  # in vain
        assert run.state("a1") is JobState.PAUSED
        await until(lambda: run.state("b") is JobState.SUCCEEDED)
        run.pipeline.rule("a", Rule())
        await until(lambda: run.state("a1") is JobState.SUCCEEDED)
        assert run.state("a2") is JobState.PAUSED
        run.pipeline.resume("a2")

    run = run_jobs(tmp_path, [job("a1", steps=8), job("a2", steps=8), job("b", steps=8)], setting, script)
    assert {one.state for one in run.jobs.values()} == {JobState.SUCCEEDED}
    assert any(message.startswith("paused after step") and "tokens are spent" in message for message in told)


def test_a_tenants_running_jobs_are_limited(tmp_path: Path) -> None:
    seen: list[int] = []

    async def script(run: FakeRun) -> None:
        names = ("a1", "a2", "a3")
        while not all(run.state(name).final for name in names):
            seen.append(sum(run.state(name) is JobState.RUNNING for name in names))
            await asyncio.sleep(0)

    setting = Setting(tenants=dict.fromkeys(("a1", "a2", "a3"), "a"), rules={"a": Rule(running=1)})
    run = run_jobs(tmp_path, [job(name) for name in ("a1", "a2", "a3", "b")], setting, script)
    assert {one.state for one in run.jobs.values()} == {JobState.SUCCEEDED}
    assert max(seen) == 1


# --- budgets ----------------------------------------------------------------------------------------------------------------


def test_a_job_pauses_when_its_budget_is_spent_and_goes_on_with_a_larger_one(tmp_path: Path) -> None:
    whole = run_jobs(tmp_path / "whole", [job("a", steps=6), job("b", steps=2)])
    committed = whole.jobs["a"].directory.newest()
    assert committed is not None
    budget = committed.tokens // 3
    run = run_jobs(tmp_path / "parts", [job("a", steps=6, budget=budget), job("b", steps=2)])  # ends by itself
    assert (run.state("a"), run.state("b")) == (JobState.PAUSED, JobState.SUCCEEDED)
    message, kept = run.jobs["a"].progress.message, run.jobs["a"].directory.newest()
    assert f"its budget of {budget} tokens is spent" in message
    assert "--budget" in message
    assert kept is not None
    assert kept.tokens >= budget
    assert 0 < kept.step < 6
    asked = {
        request.id.split("/")[2] for request in run.engine.requests if request.job == "a" and "/train/" in request.id
    }
    assert asked == {str(step) for step in range(kept.step)}, "what is not paid for was sampled"
    again = run_jobs(tmp_path / "parts", [job("a", steps=6, budget=budget), job("b", steps=2)])
    assert again.state("a") is JobState.PAUSED
    reopened = again.jobs["a"].directory.newest()
    assert reopened is not None
    assert replace(reopened, after=kept.after) == kept, "only the manifest has another record"
    more = run_jobs(tmp_path / "parts", [job("a", steps=6, budget=10 * committed.tokens), job("b", steps=2)])
    assert more.state("a") is JobState.SUCCEEDED
    for file in ("metrics.jsonl", "versions/v6/adapter_model.safetensors"):
        assert (tmp_path / "whole" / "a" / file).read_bytes() == (tmp_path / "parts" / "a" / file).read_bytes()


def test_a_budget_can_be_raised_and_lowered_while_the_job_runs(tmp_path: Path) -> None:
    async def script(run: FakeRun) -> None:
        await until(lambda: run.jobs["a"].progress.step >= 2)
        run.pipeline.change("a", budget=1, priority=10)
        await until(lambda: run.state("a") is JobState.PAUSED)
        assert run.jobs["a"].progress.step < 40
        run.pipeline.change("a", budget=None)
        run.pipeline.resume("a")

    run = run_jobs(tmp_path, [job("a", steps=40), job("b", steps=60)], None, script)
    assert {one.state for one in run.jobs.values()} == {JobState.SUCCEEDED}
    assert run.jobs["a"].config.priority == 10


@pytest.mark.slow
def test_a_run_ends_when_budgets_are_spent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """From Python it is a result, from the command line a line and exit code 0; a larger budget is no other job."""
    file = tmp_path / "jobs.yaml"
    small = {"data": {"source": "toy:sort_letters", "size": 64, "holdout": 0}, "reward": "exact", "steps": 3}
    small |= {"sampling": {"max_tokens": 8}, "algorithm": {"group_size": 4, "groups_per_step": 2}}
    tree = {"base": "small", "engine": {"samplers": 0, "threads": 1}, "jobs": [{"name": "poor", **small, "budget": 1}]}
    file.write_text(json.dumps(tree))
    options = {
        "sequential": False,
        "accept_changes": False,
        "ray": None,
        "trust_remote_code": False,
    }
    assert run_file(file, [], directory=tmp_path / "run", **options) == 0  # type: ignore[arg-type]
    assert "poor paused after step 1: its budget of 1 tokens is spent" in " ".join(capfd.readouterr().out.split())
    jobs = [{**one, "budget": budget} for one in tree["jobs"] for budget in (1, 10**9)]  # type: ignore[dict-item]
    engine = {"samplers": 0, "threads": 1}
    poor = motet.run(jobs[:1], directory=tmp_path / "run", engine=engine, quiet=True).jobs["poor"]
    assert (poor.state, poor.spent) == (JobState.PAUSED, True)
    rich = motet.run(jobs[1:], directory=tmp_path / "run", engine=engine, quiet=True).jobs["poor"]
    assert (rich.state, rich.spent, len(rich.rewards)) == (JobState.SUCCEEDED, False, 3)
