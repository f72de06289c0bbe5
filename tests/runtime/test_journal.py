"""A session's journal, and jobs of a tenant that begin one after another."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.msgpack import encode

from motet.config import OF_CLIENT, JobConfig
from motet.runtime.client_loop import ABOUT
from motet.runtime.journal import AnyOutcome, Done, Failed, Journal, JournalError, Nothing, OptimStep, Save
from motet.runtime.slot_turns import StartTurns
from motet.service.tinker.requests import FinishSession
from tests.support.counting import calls
from tests.support.fake_run import FakeRun, run_jobs
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.tier1


def test_a_cancel_counts_for_a_command_that_is_there_and_not_done(tmp_path: Path) -> None:
    theirs, sessions = Journal(tmp_path), Journal(tmp_path)
    theirs.cancel(1)
    assert not list(tmp_path.rglob("*.stop")), "of a number that never came nothing is kept"
    theirs.put(1, encode(Nothing()))
    theirs.put(1, encode(Nothing()))
    with pytest.raises(JournalError, match="numbers are used once"):
        theirs.put(1, encode(Nothing({"other": 1})))
    assert not sessions.cancelled(1)
    theirs.cancel(1)
    theirs.cancel(1)
    assert sessions.cancelled(1)
    sessions.answer(1, Done())
    assert not sessions.cancelled(1), "its outcome was there first"


def test_a_gap_that_was_refused_in_part_is_refused_whole(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in (0, 2, 3):
        journal.put(number, encode(Nothing()))
    journal.answer(3, Failed("request 1 of this model never came"))  # and the process was killed
    journal.drop(3)
    assert journal.refuse_behind_gap() == [2, 1]
    assert journal.refuse_behind_gap() == []
    journal.answer(0, Done())
    journal.put(4, encode(Nothing()))
    assert journal.refuse_behind_gap() == []


def test_a_command_waits_for_the_disk_three_times(tmp_path: Path) -> None:
    with calls() as counted:
        Journal(tmp_path).put(1, encode(Nothing()))
    assert counted["fsync"] == 3, "its two files, and their names"
    assert counted["rename"] == 2


def test_the_looks_of_a_step_are_kept_for_that_step_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.put(1, encode(Nothing()))
    assert journal.forward_only(3) == (-1, 0)
    journal.record_forward_only(3, 7, 120)
    assert Journal(tmp_path).forward_only(3) == (7, 120)
    assert Journal(tmp_path).forward_only(4) == (-1, 0)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_checkpoint_is_replaced_only_by_a_command_that_may(tmp_path: Path, overwrite: bool) -> None:
    """Both commands were accepted before the first was executed."""
    data, step = {"source": OF_CLIENT, "chat_template": False}, OptimStep(1e-3, (0.9, 0.95), 1e-8, 0.0, None)
    tree = {"name": "client", "algorithm": "client", "data": data, "optimizer": {"lr": 0.05}, "steps": 9}
    journal, outcomes = Journal(tmp_path / "client"), list[AnyOutcome | None]()
    for number in (1, 3):
        journal.put(number - 1, encode(step))
        journal.put(number, encode(Save("weights/w", False, {"number": number}, {"saved": number}, overwrite)))

    async def script(run: FakeRun) -> None:
        await until(lambda: journal.done(3), PATIENCE)
        outcomes.extend(map(journal.outcome, (1, 3)))
        journal.finish()
        run.jobs["client"].news.set()

    run_jobs(tmp_path, [JobConfig.model_validate(tree)], script=script)
    there = json.loads((tmp_path / "client" / "checkpoints" / "weights" / "w" / ABOUT).read_bytes())
    refused = Failed("path: there is a checkpoint 'w' already; give another name")
    assert outcomes == [Done({"saved": 1}), Done({"saved": 3}) if overwrite else refused]
    assert there["number"] == (3 if overwrite else 1)


def test_a_saved_checkpoint_survives_a_power_failure(tmp_path: Path) -> None:
    data = {"source": OF_CLIENT, "chat_template": False}
    tree = {"name": "client", "algorithm": "client", "data": data, "optimizer": {"lr": 0.05}, "steps": 9}
    synced = []
    for command in (Nothing(), Save("weights/w", False, {"number": 0})):
        directory = tmp_path / type(command).__name__
        journal = Journal(directory / "client")
        journal.put(0, encode(command))
        journal.finish()
        with calls() as counted:
            run_jobs(directory, [JobConfig.model_validate(tree)])
        synced.append(counted["fsync"])
    assert synced[1] - synced[0] == 5, "its three files, its directory and its name"


@pytest.mark.parametrize(
    ("body", "state", "told"),
    [
        ({}, "succeeded", ""),
        ({"reason": {"type": "success"}, "detail": None}, "succeeded", ""),
        (
            {"reason": {"type": "errored"}, "detail": "ValueError: no"},
            "failed",
            "with an error (errored: ValueError: no)",
        ),
        (
            {"reason": {"type": "interrupted"}},
            "succeeded",
            "stopped early: its client was interrupted: it gave no detail",
        ),
    ],
)
def test_a_session_ends_as_its_client_says(tmp_path: Path, body: dict[str, Any], state: str, told: str) -> None:
    data = {"source": OF_CLIENT, "chat_template": False}
    tree = {"name": "client", "algorithm": "client", "data": data, "optimizer": {"lr": 0.05}, "steps": 9}
    journal = Journal(tmp_path / "client")
    journal.put(0, encode(OptimStep(1e-3, (0.9, 0.95), 1e-8, 0.0, None)))
    journal.finish(FinishSession.model_validate(body).told)
    journal.finish("errored: later")
    run = run_jobs(tmp_path, [JobConfig.model_validate(tree)])
    assert (run.state("client").value, told in run.jobs["client"].progress.message) == (state, True)
    assert Journal(tmp_path / "client").done(0), "what it asked for is done"


def test_jobs_of_a_tenant_begin_one_after_another_and_hold_nobody_else_up() -> None:
    turns, now, seen = StartTurns(lambda tenant: 0), {"a": 0, "b": 0, "": 0}, []

    async def begin(tenant: str) -> None:
        async with turns.turn("open", tenant):
            now[tenant] += 1
            await asyncio.sleep(0)
            seen.append(dict(now))
            now[tenant] -= 1

    async def all_of_them() -> None:
        await asyncio.gather(*(begin(tenant) for tenant in ["a", "b", ""] * 3))

    asyncio.run(all_of_them())
    assert max(one["a"] for one in seen) == max(one["b"] for one in seen) == 1
    assert max(one["a"] + one["b"] for one in seen) == 2
    assert max(one[""] for one in seen) == 3, "a run without tenants"
    assert not turns._locks, "locks of tenants that begin nothing are kept by nobody"
