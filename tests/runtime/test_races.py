"""Races: candidates, decisions at rungs, and what they must not depend on."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.text import Text

import motet
from motet.cluster import messages as m
from motet.commands.control import send
from motet.commands.replay import fork_job
from motet.commands.verify import verify
from motet.config import JobConfig
from motet.config.candidates import RaceCopy, RacePlan, copied, raced
from motet.config.jobfile import load_jobs, merge
from motet.config.race import RaceConfig
from motet.core.errors import ConfigError, RunError
from motet.core.types import AdapterRef, JobState, Problem
from motet.hosting.reports import EveryStep, JobReports
from motet.hosting.running import run_config
from motet.report.read import read_job
from motet.rollout.fake import FakeSync
from motet.runtime.bracket import bracket_rows, verdict
from motet.runtime.checkpoint import Committed, JobDirectory
from motet.runtime.held_out import figure_of
from motet.runtime.identity import of_config
from motet.runtime.race_record import RaceOutcome, RaceRecord, interval, known_jobs, why_out
from motet.runtime.race_rule import confirming, decide, deciding
from motet.service.database.tables import newer_evaluation
from motet.tasks.reward_answers import NO_CONTEXT, AnswerContext, ScoreOutcome
from motet.view.tables import summary_table
from tests.support.fake_run import (
    FakeRun,
    InlineRewards,
    Script,
    Setting,
    job,
    metrics,
    records,
    run_jobs,
    vowels,
    weights,
)

ROWS = [{"prompt": f"Say {i}", "answer": f"{i % 4}"} for i in range(48)]
OVER = {"optimizer.lr": [0.01, 0.05, 0.2, 0.5]}
RACE = {"candidates": 6, "keep_one_in": 2, "first": 2, "over": OVER}


def racing(**fields: Any) -> JobConfig:
    """A job of the fakes that races."""
    return job("say", **merge({"steps": 8, "race": RACE, "eval": {"every": 2}, "checkpoint": {"keep": 100}}, fields))


def planned(**fields: Any) -> RacePlan:
    jobs, (plan,) = raced([racing(**fields)])
    assert tuple(jobs) == plan.candidates
    return plan


def on_fakes(path: Path, ordered: Callable[[list[JobConfig]], Sequence[JobConfig]] = list, **setting: Any) -> FakeRun:
    return run_jobs(path, [racing()], Setting(holdout=15, ordered=ordered, **setting))


def failing_while(wanted: list[bool]) -> JobConfig:
    """A race whose reward fails while `wanted` says so."""

    def reward(problem: Problem, completion: str) -> float:
        if wanted[0]:
            raise ValueError("out of order")
        return vowels(problem, completion)

    reward.__name__ = vowels.__name__
    return racing(reward=reward)


def contents(path: Path) -> dict[str, bytes]:
    """What a race may not owe to company, order or interruption."""
    wanted = ("metrics.jsonl", "adapter_model.safetensors", "optimizer.safetensors", "say.race.json")
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.name in wanted}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("alone")
    on_fakes(path)
    return path


# --- a race -----------------------------------------------------------------------------------------------------------


def test_candidates_are_dropped_at_rungs_and_finalists_go_on_to_the_end(alone: Path) -> None:
    record = RaceRecord.read(alone / "say.race.json")
    assert (record.name, record.plan) == ("say", ((2, 3), (4, 2)))
    assert [len(rung.standings) for rung in record.rungs] == [6, 3]
    assert record.outcome is not None
    finalist = record.outcome.finalist
    assert finalist is not None
    done = {name: len(metrics(alone, name).splitlines()) for name in record.values}
    assert sorted(done.values()) == [3, 3, 3, 5, 9, 9]
    assert done[finalist] == 9, "eight steps and the last evaluation"
    assert len(record.dropped()) == 4


def test_order_slots_and_speed_change_neither_decisions_nor_bytes(alone: Path, tmp_path: Path) -> None:
    def shuffled(jobs: list[JobConfig]) -> list[JobConfig]:
        return random.Random(4).sample(jobs, len(jobs))

    on_fakes(tmp_path, shuffled, slots=2, jitter=5, capacity=5)
    assert contents(tmp_path) == contents(alone)


def test_a_candidate_has_the_bytes_that_it_has_without_a_race(alone: Path, tmp_path: Path) -> None:
    run_jobs(tmp_path, planned().candidates, Setting(holdout=15))
    for one in planned().candidates:
        raced_lines, lines = metrics(alone, one.name), metrics(tmp_path, one.name)
        assert lines.startswith(raced_lines)
        steps = len(raced_lines.splitlines()) - (raced_lines == lines)
        assert weights(alone, one.name, steps) == weights(tmp_path, one.name, steps)


def test_a_race_that_was_interrupted_decides_the_same(alone: Path, tmp_path: Path) -> None:
    for steps in (2, 3, 4):  # in the middle of the first stretch, at the rung, and after it

        async def stop(run: FakeRun, steps: int = steps) -> None:
            while not any(one.progress.step >= steps for one in run.jobs.values()):
                await asyncio.sleep(0)
            run.pipeline.stop()

        run_jobs(tmp_path, [racing()], Setting(holdout=15), stop)
    on_fakes(tmp_path)
    assert contents(tmp_path) == contents(alone)


def test_a_record_that_the_evaluations_contradict_is_refused(alone: Path, tmp_path: Path) -> None:
    on_fakes(tmp_path)
    path = tmp_path / "say.race.json"
    tree = json.loads(path.read_text())
    tree["rungs"][0]["standings"][1]["mean"] += 0.25
    path.write_text(json.dumps(tree))
    with pytest.raises(RunError, match="decision 1 is not what the evaluations of its candidates give"):
        on_fakes(tmp_path)
    for lost in ("{", json.dumps({name: tree[name] for name in ("name", "values", "plan")})):
        path.write_text(lost)
        with pytest.raises(RunError, match="is damaged"):
            on_fakes(tmp_path)


def test_a_race_with_other_candidates_is_refused(alone: Path, tmp_path: Path) -> None:
    on_fakes(tmp_path)
    with pytest.raises(RunError, match="with other candidates, rungs, level or exploit"):
        run_jobs(tmp_path, [racing(race={"candidates": 5})], Setting(holdout=15))
    assert RaceRecord.read(tmp_path / "say.race.json").level == 0.95
    with pytest.raises(RunError, match="with other candidates, rungs, level or exploit"):
        run_jobs(tmp_path, [racing(race={"level": 0.6})], Setting(holdout=15))
    path = tmp_path / "say.race.json"  # as a race wrote it before its record had the level
    path.write_text(
        json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != "level"})
    )
    on_fakes(tmp_path)


def test_a_candidate_that_fails_is_out_and_the_others_go_on(tmp_path: Path) -> None:
    async def cancel(run: FakeRun) -> None:
        run.pipeline.cancel("say-c=00")

    ended = run_jobs(tmp_path, [racing()], Setting(holdout=15), cancel)
    record = RaceRecord.read(tmp_path / "say.race.json")
    assert record.rungs[0].standings[-1].name == "say-c=00"
    assert record.rungs[0].standings[-1].verdict == "failed"
    assert record.outcome is not None
    assert record.outcome.finalist is not None
    assert ended.state(record.outcome.finalist) is JobState.SUCCEEDED


def test_a_candidate_that_is_out_is_not_resumed_by_hand(tmp_path: Path) -> None:
    failing, first = [False], "say-c=00"

    async def until(reached: Callable[[], bool]) -> None:
        while not reached():
            await asyncio.sleep(0)

    async def resume(run: FakeRun) -> None:
        await until(lambda: bool(run.jobs[first].directory.steps()))
        failing[0] = True  # the other candidates have no slot yet
        await until(lambda: run.state(first) is JobState.FAILED)
        failing[0] = False
        await until((tmp_path / "say.race.json").exists)
        with pytest.raises(
            RunError, match=rf"out of the race after step 3: .* motet fork JOBS.yaml {first}@\d NEW_RUN"
        ):
            send(tmp_path, first, "resume")
        run.pipeline.resume(first)
        assert run.state(first) is JobState.FAILED
        assert "not resumed: out of the race" in run.jobs[first].progress.message

    ended = run_jobs(tmp_path, [failing_while(failing)], Setting(holdout=15, slots=1), resume)
    assert ended.state(first) is JobState.FAILED
    record = RaceRecord.read(tmp_path / "say.race.json")
    dropped = next(name for name in record.dropped() if name != first)
    assert f"motet fork JOBS.yaml {dropped}@" in (why_out([record], ended.jobs[dropped].directory) or "")


def test_a_race_whose_candidates_all_failed_is_run_again(alone: Path, tmp_path: Path) -> None:
    failing = [True]
    config, path = failing_while(failing), tmp_path / "say.race.json"
    ended = run_jobs(tmp_path, [config], Setting(holdout=15))
    assert {one.state for one in ended.jobs.values()} == {JobState.FAILED}
    assert verdict(RaceRecord.read(path)) == "no winner: every candidate failed or was ended"
    failing[0] = False
    run_jobs(tmp_path, [config], Setting(holdout=15))
    assert contents(tmp_path) == contents(alone)


def test_candidates_that_failed_and_are_resumed_by_hand_race_again(alone: Path, tmp_path: Path) -> None:
    failing = [True]
    path = tmp_path / "race" / "say.race.json"

    async def resume(run: FakeRun) -> None:
        run.pipeline.pause("other")  # the run goes on until it ends
        while not path.exists():
            await asyncio.sleep(0)
        failing[0] = False
        for name in run.jobs:
            run.pipeline.resume(name)

    run_jobs(tmp_path / "race", [failing_while(failing), job("other")], Setting(holdout=15), resume)
    assert contents(alone).items() <= contents(tmp_path / "race").items()


def test_a_finalist_that_failed_joins_when_the_race_is_run_again(alone: Path, tmp_path: Path) -> None:
    failing, path = [False], tmp_path / "say.race.json"

    async def fail_one(run: FakeRun) -> None:
        while not (path.exists() and len(RaceRecord.read(path).rungs) == 2):
            await asyncio.sleep(0)
        failing[0] = True  # the other finalist has no slot yet
        while JobState.FAILED not in {one.state for one in run.jobs.values()}:
            await asyncio.sleep(0)
        failing[0] = False

    config = failing_while(failing)
    run_jobs(tmp_path, [config], Setting(holdout=15, slots=1), fail_one)
    assert contents(tmp_path) != contents(alone)
    run_jobs(tmp_path, [config], Setting(holdout=15, slots=1))
    assert contents(tmp_path) == contents(alone)


def test_a_fault_in_loading_a_version_that_nobody_samples_does_not_end_a_candidate(alone: Path, tmp_path: Path) -> None:
    """A candidate that waits for a decision, or was dropped, samples nothing from the version at the rung."""
    dropped = {one.name for one in RaceRecord.read(alone / "say.race.json").rungs[0].standings if not one.stays}

    class Faulty(FakeSync):
        async def publish(self, name: str, ref: AdapterRef) -> None:
            if name in dropped and ref.version == 3:
                raise RuntimeError("out of order")
            await super().publish(name, ref)

    on_fakes(tmp_path, sync=Faulty)
    assert contents(tmp_path) == contents(alone)


class Rated(InlineRewards):
    """Rates held-out rows by the candidate, the place of the row, and how many evaluations it had."""

    def __init__(self, rate: Callable[[str, int, int], float]) -> None:
        super().__init__()
        self._rate, self._evaluated = rate, Counter[tuple[str, int]]()

    async def score(
        self, job: str, problem: Problem, completions: Sequence[str], context: AnswerContext = NO_CONTEXT
    ) -> list[ScoreOutcome]:
        scored = await super().score(job, problem, completions, context)
        if problem.id < 100:
            return scored
        evaluation = self._evaluated[job, problem.id]
        self._evaluated[job, problem.id] += 1
        rate = self._rate(job, problem.id - 100, evaluation)
        return [ScoreOutcome(rate, {"rate": rate}) for _ in scored]


def rated(path: Path, rate: Callable[[str, int, int], float], **fields: Any) -> RaceOutcome:
    """The outcome of a race that these ratings decide; it evaluates the versions 0, 2, 4, 6 and 8."""
    run_jobs(path, [racing(**fields)], Setting(holdout=15, rewards=functools.partial(Rated, rate)))
    outcome = RaceRecord.read(path / "say.race.json").outcome
    assert outcome is not None
    return outcome


def test_rows_that_confirm_do_not_choose_the_version(tmp_path: Path) -> None:
    """Version 2 is the best by the rows that decide; in one race, the others rate version 6 much higher."""

    def plain(candidate: str, place: int, evaluation: int) -> float:
        return (0.0, 0.5, 0.3, 0.2, 0.4)[evaluation] + 0.01 * (place % 2)

    def otherwise(candidate: str, place: int, evaluation: int) -> float:
        return plain(candidate, place, evaluation) + (evaluation == 3 and place % 3 == 2)

    ends = [
        rated(tmp_path / "plain", plain, checkpoint={"keep": 1}),
        rated(tmp_path / "otherwise", otherwise, checkpoint={"keep": 1}),
        rated(tmp_path / "kept", otherwise, checkpoint={"keep": 100}),
    ]
    assert [(one.finalist, one.version) for one in ends] == [("say-c=00", 2)] * 3


def test_the_last_version_is_taken_unless_the_best_one_is_shown_better(tmp_path: Path) -> None:
    """Version 2 is the best; only in one race do the rows that decide agree on that."""

    def rate(candidate: str, place: int, evaluation: int, *, agree: bool) -> float:
        last = 0.4 if agree or place % 2 else 1.0
        return {1: 0.8, 4: last}.get(evaluation, 0.1)

    ends = [rated(tmp_path / str(agree), functools.partial(rate, agree=agree)) for agree in (False, True)]
    assert [(one.finalist, one.version) for one in ends] == [("say-c=00", 8), ("say-c=00", 2)]


def test_the_best_version_is_the_same_one_wherever_it_is_shown(tmp_path: Path) -> None:
    """The rows that confirm rate version 6 much higher, so it has the best mean of all rows."""

    def rate(candidate: str, place: int, evaluation: int) -> float:
        return (0.0, 0.5, 0.3, 0.2, 0.4)[evaluation] + (evaluation == 3 and place % 3 == 2)

    told: list[m.JobStepped] = []

    def tell(message: m.FromHost) -> None:
        if isinstance(message, m.JobStepped) and message.job == "say-c=00":
            told.append(message)

    async def listen(run: FakeRun) -> None:
        for one in run.jobs.values():
            one.observer = functools.partial(JobReports(tell, "host").event, one, leaves=False)

    setting = Setting(holdout=15, rewards=functools.partial(Rated, rate))
    run = run_jobs(tmp_path, [racing()], setting, listen)
    job, stored = run.jobs["say-c=00"], None
    EveryStep(job.directory, 0, functools.partial(JobReports(tell, "next").event, job, leaves=False))
    assert [(one.line["step"], one.best) for one in told if "eval" in one.line] == [
        *((0, False), (2, True), (4, False), (6, False), (8, False)),
        *((0, False), (2, True), (4, False), (6, False), (8, False)),
    ]
    for one in told:
        if "eval" in one.line:
            figure = figure_of(one.line["eval"])
            stored = newer_evaluation(stored, one.line["step"], figure, best=one.best, best_by=one.best_by)
    record = read_job(job.directory.path)
    figures = dict(zip(record.evaluations.xs, record.evaluations.ys, strict=True))
    assert max(figures, key=lambda version: figures[version]) == 6
    assert (done := job.directory.newest()) is not None
    assert done.best_version == 2
    named = {"figure": "reward", "best_by": "reward, over the rows that decide"}
    assert stored == {"version": 8, "value": figures[8], "best_version": 2, "best": figures[2], **named}
    assert record.best == (2, figures[2])
    assert list(summary_table([job.progress], tmp_path).columns[-1].cells) == [Text("v2 (newest v8)")]


def test_the_leader_of_the_last_decision_is_told_where_another_one_wins(tmp_path: Path) -> None:
    def rate(candidate: str, place: int, evaluation: int) -> float:
        if candidate.startswith("say-c=01"):
            return (0.3 if place % 4 else 0.9) + (evaluation > 2)
        return 0.5 if candidate == "say-c=00" else 0.0

    outcome = rated(tmp_path, rate)
    assert outcome.finalist is not None
    assert outcome.finalist.startswith("say-c=01")
    assert outcome.as_good == ("say-c=00",)


def test_leaving_rows_out_of_the_best_version_makes_no_other_job() -> None:
    """So a race that began before its candidates did goes on."""
    plain = JobConfig.model_validate({"name": "say", "data": "toy:add", "reward": "exact"})
    confirming_rows = plain.model_copy(update={"eval": plain.eval.model_copy(update={"confirm": True})})
    assert of_config(confirming_rows) == of_config(plain)
    assert "confirm" not in of_config(plain)["job"]["eval"]


def test_a_budget_lets_fewer_go_on(alone: Path, tmp_path: Path) -> None:
    planned_tokens = RaceRecord.read(alone / "say.race.json")
    assert planned_tokens.outcome is not None
    config = racing(race={"budget": planned_tokens.outcome.tokens // 2, "keep_one_in": 2, "candidates": 6, "first": 2})
    run_jobs(tmp_path, [config], Setting(holdout=15))
    record = RaceRecord.read(tmp_path / "say.race.json")
    assert record.rungs[0].keep == 1
    assert len(record.rungs[1].standings) == 1


# --- copies -----------------------------------------------------------------------------------------------------------


EXPLOIT = {"exploit": [0.5, 2]}


def exploiting(path: Path, script: Script | None = None, **setting: Any) -> FakeRun:
    return run_jobs(path, [racing(race=EXPLOIT)], Setting(holdout=15, **setting), script)


@pytest.fixture(scope="module")
def exploited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exploited")
    exploiting(path)
    return path


def test_half_of_the_places_go_to_copies_of_the_best(exploited: Path) -> None:
    record = RaceRecord.read(exploited / "say.race.json")
    first, second = record.rungs
    best, other = [one.name for one in first.standings if one.stays]
    (copy,) = first.copies
    assert (copy.of, copy.step, copy.factor) == (best, 3, 0.5), "three places: two candidates, and the leader once more"
    assert {one.name for one in second.standings} == {best, other, copy.name}
    (last,) = second.copies
    assert last.of == second.standings[0].name, "two places: the leader, and the leader once more"
    assert copy.name.startswith(f"say-c=06-of={best[6:8]}-times=0.5")
    assert last.name.startswith("say-c=07-of=")
    lines = {path.parent.name: len(path.read_bytes().splitlines()) for path in exploited.glob("*/metrics.jsonl")}
    assert {name for name, n in lines.items() if n == 9} == {last.of, last.name}, "the finalists train to the end"
    assert record.outcome is not None
    directories = {path.parent.name: JobDirectory(path.parent) for path in exploited.glob("*/metrics.jsonl")}
    assert [copy.tokens for copy in record.copies] == [
        directories[copy.of].committed(copy.step).tokens for copy in record.copies
    ]
    newest = [(one.newest() or Committed()).tokens for one in directories.values()]
    assert record.outcome.tokens == sum(newest) - sum(copy.tokens for copy in record.copies), (
        "what is copied counts once"
    )
    headings, rows = bracket_rows(record)
    assert headings[:2] == ["candidate", "copy of"]
    assert {row[1] for row in rows if row[1]} == {
        f"c={best[6:8]} at step 3, lr × 0.5",
        f"c={last.of[6:8]} at step 5, lr × 0.5",
    }


def test_a_copy_has_the_bytes_of_a_job_with_its_schedule(exploited: Path, tmp_path: Path) -> None:
    record = RaceRecord.read(exploited / "say.race.json")
    plan = planned(race=EXPLOIT)
    known = known_jobs([racing(race=EXPLOIT)], exploited)
    copies = [known[copy.name] for copy in record.copies]
    assert [max(one.optimizer.lr_factors) for one in copies] == [3, 5]
    run_jobs(tmp_path, [*copies, plan.candidates[0]], Setting(holdout=15))
    for one in copies:
        own = len(records(exploited, one.name))
        assert metrics(tmp_path, one.name).startswith(metrics(exploited, one.name))
        described = [(path / one.name / "job.yaml").read_text() for path in (exploited, tmp_path)]
        assert described[0] == described[1], "nothing says that its first steps were computed otherwise"
        version = min(own, 8)
        assert weights(exploited, one.name, version) == weights(tmp_path, one.name, version)


def test_a_copy_samples_from_the_versions_of_its_original(tmp_path: Path) -> None:
    """Its first steps train on what older versions sampled."""
    config = racing(race=EXPLOIT, algorithm={"max_off_policy_steps": 2}, checkpoint={"keep": 1})
    run_jobs(tmp_path / "race", [config], Setting(holdout=15))
    record = RaceRecord.read(tmp_path / "race" / "say.race.json")
    copies = [known_jobs([config], tmp_path / "race")[copy.name] for copy in record.copies]
    assert copies
    run_jobs(tmp_path / "alone", copies, Setting(holdout=15))
    for one in copies:
        assert metrics(tmp_path / "alone", one.name).startswith(metrics(tmp_path / "race", one.name))


def test_a_copy_changes_the_rate_from_its_step_on() -> None:
    own = job("say", optimizer={"lr": 0.1, "lr_factors": {2: 0.5, 8: 0.1}})
    once = copied(own, RaceCopy("once", "say", 4, 3.0))
    assert once.optimizer.lr_factors == {2: 0.5, 4: 1.5, 8: 0.3}
    assert copied(once, RaceCopy("twice", "once", 6, 0.3)).optimizer.lr_factors == {2: 0.5, 4: 1.5, 6: 0.45, 8: 0.09}


def test_a_budget_counts_copies_at_what_their_originals_take(exploited: Path, tmp_path: Path) -> None:
    record = RaceRecord.read(exploited / "say.race.json")
    leader, step = record.rungs[0].standings[0].name, record.rungs[0].step
    so_far = {name: JobDirectory(exploited / name).committed(step).tokens for name in record.values}
    further = so_far[leader] / step * (record.rungs[1].step - step)
    for share, expected in ((1.5, (1, 0, 1)), (2.5, (2, 1, 2))):  # the leader twice costs it twice
        config = racing(race={**EXPLOIT, "budget": round(sum(so_far.values()) + share * further)})
        run_jobs(tmp_path / str(share), [config], Setting(holdout=15))
        first, second = RaceRecord.read(tmp_path / str(share) / "say.race.json").rungs
        assert (first.keep, len(first.copies), len(second.standings)) == expected


def test_ways_to_write_factors_of_copies() -> None:
    assert [RaceConfig(exploit=given).exploit for given in (True, False, 0.5)] == [[0.3, 3], [], [0.5]]
    with pytest.raises(ValidationError, match="a factor of 1 would copy a candidate with the same rate; leave it out"):
        RaceConfig(exploit=[0.3, 1])


def test_copies_are_the_same_after_an_interruption_and_in_any_order(exploited: Path, tmp_path: Path) -> None:
    def shuffled(jobs: list[JobConfig]) -> list[JobConfig]:
        return random.Random(4).sample(jobs, len(jobs))

    exploiting(tmp_path / "few", slots=2, ordered=shuffled)
    assert contents(tmp_path / "few") == contents(exploited)
    for steps in (2, 3, 4, 5):

        async def stop(run: FakeRun, steps: int = steps) -> None:
            while not any(one.progress.step >= steps for one in run.jobs.values()):
                await asyncio.sleep(0)
            run.pipeline.stop()

        exploiting(tmp_path / "cut", stop)
    exploiting(tmp_path / "cut")
    assert contents(tmp_path / "cut") == contents(exploited)


def test_a_decision_that_was_not_written_down_makes_its_copies_again(exploited: Path, tmp_path: Path) -> None:
    """Killed after the copies were made, and before the decision was written."""

    async def killed(run: FakeRun) -> None:
        while not (tmp_path / "say.race.json").exists():
            await asyncio.sleep(0)
        run.pipeline.stop()

    exploiting(tmp_path, killed)
    record = RaceRecord.read(tmp_path / "say.race.json")
    (copy,) = record.copies
    for path in (tmp_path / "say.race.json", *tmp_path.glob("*/status.json")):
        path.unlink()
    shutil.rmtree(tmp_path / copy.name)
    (tmp_path / copy.name).mkdir()
    (tmp_path / copy.name / "forked.json").write_text("{}")
    exploiting(tmp_path)
    assert contents(tmp_path) == contents(exploited)


def test_a_race_on_the_small_base_is_shown_and_its_winner_is_an_ordinary_job(tmp_path: Path) -> None:
    file = tmp_path / "jobs.yaml"
    wanted = {
        "name": "say",
        "data": {"source": "toy:add", "size": 24, "holdout": 12},
        "reward": "exact",
        "sampling": {"max_tokens": 2},
        "algorithm": {"group_size": 2, "groups_per_step": 2},
        "adapter": {"rank": 4},
        "steps": 3,
        "race": {"candidates": 2, "keep_one_in": 2, "first": 1, "over": {"optimizer.lr": [1e-3]}},
    }
    tree = {"base": "small", "run": str(tmp_path / "run"), "engine": {"samplers": 0}, "jobs": [wanted]}
    file.write_text(json.dumps(tree))
    ended = run_config(load_jobs(file))
    assert ended.ok, ended
    record = ended.races["say"]
    assert record.outcome is not None
    finalist = record.outcome.finalist
    assert finalist is not None
    assert ended.jobs[finalist].best.is_dir()
    (dropped,) = record.dropped()
    assert ended.jobs[dropped].message == record.dropped()[dropped]
    assert ended.report is not None
    page = ended.report.read_text()
    assert "dropped: not shown worse at v1" in page
    assert verdict(record) in page
    assert verdict(record).startswith("no winner: "), "nothing is learned in three steps"
    again = run_config(load_jobs(file))
    assert again.races == ended.races
    assert again.jobs[dropped].message == ended.jobs[dropped].message
    assert verify(tmp_path / "run") == 0
    record_file = tmp_path / "run" / "say.race.json"
    record_file.rename(tmp_path / "away")
    with pytest.raises(RunError, match="is gone, and candidates were dropped by it"):
        run_config(load_jobs(file))
    (tmp_path / "away").rename(record_file)
    fork_job(file, f"{finalist}@3", tmp_path / "longer", None, ["steps=4"])
    (longer,) = load_jobs(tmp_path / "longer" / "jobs.yaml").jobs
    assert (longer.name, longer.steps, longer.race) == (finalist, 4, None)
    assert (tmp_path / "longer" / finalist / "versions" / "v3").is_dir()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"algorithm": {"type": "sft"}, "reward": None}, "has no rewards of held-out rows"),
        ({"data": {"source": ROWS, "holdout": 5}}, "5 held-out rows are too few"),
    ],
)
def test_a_race_that_cannot_compare_is_refused_before_anything_is_loaded(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    wanted = {"name": "say", "data": {"source": ROWS}, "reward": "exact", "race": 4}
    wanted = {name: value for name, value in {**wanted, **fields}.items() if value is not None}
    for hosts in (1, 2):
        with pytest.raises(ConfigError, match=message):
            motet.run([wanted], engine={"samplers": 0, "hosts": hosts}, directory=tmp_path, quiet=True)


def test_rows_with_long_prompts_are_left_out_before_a_race_is_refused(tmp_path: Path) -> None:
    """Twelve of the held-out rows are there, and one of them has a long prompt."""
    evaluation = tmp_path / "evaluation.jsonl"
    rows = [{"prompt": f"Add {i}" + " and one more" * 20 * (i == 5), "answer": "1"} for i in range(12)]
    evaluation.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = {"source": "toy:add", "size": 24, "eval_source": str(evaluation), "max_prompt_tokens": 30}
    wanted = {"name": "say", "data": data, "reward": "exact", "race": 4, "sampling": {"max_tokens": 2}}
    why = "11 held-out rows are too few.*; raise data.holdout or data.max_prompt_tokens"
    with pytest.raises(ConfigError, match=why):
        motet.run([wanted], engine={"samplers": 0}, directory=tmp_path / "run", quiet=True)
    assert not list(tmp_path.glob("run/say*"))
    with pytest.raises(ConfigError, match=why):
        motet.check([wanted], engine={"samplers": 0})


# --- the rule ---------------------------------------------------------------------------------------------------------


def test_who_is_shown_worse_is_dropped_even_among_the_best() -> None:
    rows = {"good": [1.0] * 18 + [0.0] * 2, "close": [1.0] * 17 + [0.0] * 3, "bad": [0.0] * 19 + [1.0]}
    first, second, third = decide(rows, 3, 0.95, 2)
    assert (first.name, first.verdict) == ("good", "leads")
    assert (second.name, second.verdict) == ("close", "goes on")
    assert (third.name, third.verdict) == ("bad", "worse")
    assert third.high is not None
    assert third.high < 0
    assert decide(rows, 1, 0.95, 2)[1].verdict == "dropped"


def test_decisions_do_not_depend_on_the_order_of_candidates() -> None:
    rng = random.Random(1)
    rows = {f"c{i}": [float(rng.random() < 0.5) for _ in range(20)] for i in range(8)}
    names = list(rows)
    expected = decide(rows, 3, 0.95, 2)
    for _ in range(5):
        rng.shuffle(names)
        assert decide({name: rows[name] for name in names}, 3, 0.95, 2) == expected


def test_equal_candidates_are_almost_never_shown_worse() -> None:
    rng, wrong = random.Random(7), 0
    for _ in range(100):
        rows = {f"c{i}": [float(rng.random() < 0.5) for _ in range(42)] for i in range(16)}
        wrong += any(one.verdict == "worse" for one in decide(rows, 4, 0.95, 2))
    assert wrong <= 3, "an error of 5 % is split over two decisions"


def test_rows_without_a_reward_are_left_out_and_confirming_rows_are_apart() -> None:
    rows = [float(i) for i in range(10)]
    assert sorted(deciding(rows) + confirming(rows)) == rows
    assert not set(deciding(rows)) & set(confirming(rows))
    gone = decide({"a": [1.0, math.nan, 1.0], "b": [0.0, 0.0, math.nan], "c": [math.nan] * 3}, 2, 0.95, 1)
    assert [one.name for one in gone] == ["a", "b", "c"]
    assert gone[1].difference == -1.0
    assert (gone[2].mean, gone[2].difference) == (None, None)


def test_a_difference_is_told_with_its_interval() -> None:
    assert interval(-0.5, -0.75, -0.25) == "-0.500 (-0.750 to -0.250)"
    assert interval(-0.5, None, None) == "-0.500"
    assert interval(None, None, None) == "no row in common"


# --- candidates -------------------------------------------------------------------------------------------------------


def test_candidates_are_drawn_evenly_and_the_first_is_the_job_itself() -> None:
    over = {"optimizer.lr": {"low": 1e-4, "high": 1e-2}, "algorithm.group_size": [2, 6]}
    plan = planned(race={"candidates": 9, "over": over, "keep_one_in": 3, "first": 2})
    first, *others = plan.candidates
    assert all(one.eval.confirm for one in plan.candidates)
    assert first.model_copy(update={"name": "say", "eval": racing().eval}) == racing().model_copy(update={"race": None})
    rates = sorted(float(str(one.optimizer.lr)) for one in others)
    assert all(1e-4 * 10 ** (i / 4) <= rate * 1.05 for i, rate in enumerate(rates))
    assert all(rate <= 1.05 * 1e-4 * 10 ** ((i + 1) / 4) for i, rate in enumerate(rates))
    assert sorted(one.rl.group_size for one in others) == [2] * 4 + [6] * 4
    assert {one.rl.group_size * one.rl.groups_per_step for one in others} == {12}, "as many rollouts a step"
    assert len({one.effective_seed for one in plan.candidates}) == 1
    assert plan == planned(race={"candidates": 9, "over": over, "keep_one_in": 3, "first": 2})


@pytest.mark.parametrize(("lr", "widest"), [("auto", 3.0), (1e-3, 10.0)])
def test_the_default_race_costs_about_four_runs(lr: float | str, widest: float) -> None:
    for steps in (24, 50, 100, 400):
        fresh = JobConfig.model_validate(
            {"name": "say", "data": "toy:add", "reward": "exact", "steps": steps, "race": True, "optimizer": {"lr": lr}}
        )
        _, (plan,) = raced([fresh])
        assert plan.total_steps <= 4.05 * steps
        factors, part = sorted(one.optimizer.lr_multiplier for one in plan.candidates), widest ** (2 / 7) * 1.05
        assert 0.99 / widest < factors[0] < part / widest
        assert widest / part < factors[-1] <= widest
        assert all(a < b for (a, _), (b, _) in pairwise(plan.rungs))
        assert {field for given in plan.values.values() for field in given} == {
            "optimizer.lr_multiplier",
            "adapter.rank",
            "algorithm.group_size",
        }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"eval": {"every": 0}}, "evaluations decide"),
        ({"steps": 3}, "3 steps are too few"),
        ({"budget": 100}, "race.budget"),
        ({"data": {"source": "in memory", "holdout": 0}}, "compares held-out rows"),
        ({"algorithm": {"over_provision": 2}}, "depend on the clock"),
        ({"race": {"over": {"algorithm.over_provision": [1, 1.5]}}}, "job say-c=.*depend on the clock"),
        (
            {
                "algorithm": {"max_off_policy_steps": 1},
                "race": {"over": {"algorithm.in_flight": ["finish", "continue"]}},
            },
            "job say-c=.*depend on the clock",
        ),
        ({"race": {"over": {"algorithm.group_size": [0]}}}, "race.over.algorithm.group_size: 0 cannot be used"),
        ({"race": {"over": {"algorithm.group_size": ["a"]}}}, "race.over.algorithm.group_size: 'a' cannot be used"),
        ({"race": {"over": {"adapter.rank": [0]}}}, "race.over.adapter.rank: 0 cannot be used"),
        ({"race": {"over": {"optimizer.rate": [1]}}}, "race.over.optimizer.rate: 1 cannot be used"),
        (
            {"algorithm": {"type": "dapo", "overlong_buffer": 4}, "race": {"over": {"sampling.max_tokens": [2]}}},
            "job say-c=.*algorithm.overlong_buffer: 4 is more than sampling.max_tokens, 2",
        ),
        ({"name": "n" * 100}, "no room for the endings"),
    ],
)
def test_what_cannot_race_is_refused_with_the_reason(fields: dict[str, Any], message: str) -> None:
    name = fields.pop("name", "say")
    with pytest.raises(ConfigError, match=message):
        raced([racing(**fields).model_copy(update={"name": name})])


def test_a_candidate_with_another_loss_has_the_clip_of_that_loss() -> None:
    over = {"algorithm.loss": ["ppo_clip", "gspo"]}
    fields = {"algorithm": {"loss": "gspo"}, "race": {"candidates": 3, "over": over}}
    sent = racing(**fields).model_dump(mode="json", exclude_unset=True)
    as_sent = JobConfig.model_validate(sent)
    assert json.dumps(as_sent.model_dump(mode="json", exclude_unset=True)) == json.dumps(sent), "forks compare bytes"
    for plan in (planned(**fields), raced([as_sent])[1][0]):
        clips = {one.rl.loss: (one.rl.clip_low, one.rl.clip_high) for one in plan.candidates}
        assert clips == {"gspo": (3e-4, 4e-4), "ppo_clip": (0.2, 0.28)}


def test_candidates_keep_the_shape_of_the_adapter_that_they_start_from() -> None:
    """Otherwise the first that does not would fail after the whole job that it waits for."""
    first = racing(race=None).model_copy(update={"name": "first"})
    over = {"adapter.rank": [first.adapter.rank, first.adapter.rank // 2]}
    job = racing(race={"over": over}, adapter={**first.adapter.model_dump(), "init": "first"})
    with pytest.raises(
        ConfigError, match=r"job say-c=.*: adapter\.init: 'first' has .*, the job asks for .*; leave out adapter\."
    ):
        raced([first, job])
