"""CPU seconds of rewards and graders: they are counted, shown and limited, and earlier tenants have no limit on them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sqlite3
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from motet.config import RewardConfig
from motet.config.service import LimitsConfig
from motet.core.types import Problem
from motet.hosts.messages import UsageWindow
from motet.rewards.judging import Graders
from motet.rewards.reward_pool import RewardPool
from motet.rewards.reward_walls import Walls
from motet.service.database.store import Store
from tests.support.adapter_files import tarred
from tests.support.earlier import FIRST, unpack
from tests.support.house import House, open_house
from tests.support.service_run import tiny
from tests.support.waiting import wait_until

BUSY = """
import time

def busy(problem, completion):
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    return 1.0

def gone(problem, completion):
    busy(problem, completion)
    import os
    os._exit(3)
"""


@pytest.mark.parametrize("name", ["busy", "gone"])
def test_what_a_jobs_rewards_take_of_the_processor_is_charged_to_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "rewards.py").write_text(BUSY)

    async def scenario() -> Counter[str]:
        used = Counter[str]()
        pool = RewardPool(1, charge=lambda job, seconds: used.update({job: round(1e6 * seconds)}))
        try:
            await pool.register("job", [RewardConfig(name=f"{tmp_path / 'rewards.py'}:{name}", cpu_seconds=5)])
            before = used.total()
            assert before > 30_000, "its process has started"
            await pool.score("job", Problem(0, (), ""), ["a", "b"])
            assert used.total() - before >= 2 * 250_000
        finally:
            await pool.close()
        return used

    assert set(asyncio.run(scenario())) == {"job"}


def window(house: House, number: int, seconds: float) -> None:
    """What an engine tells of a job's rewards."""
    job = house.job["id"]
    house.recorder.record_usage(UsageWindow("engine", number, {"": 5}, "", {job: round(1e6 * seconds)}))


def test_cpu_seconds_are_shown_and_at_their_limit_jobs_pause(tmp_path: Path) -> None:
    with open_house(tmp_path, limits=LimitsConfig(cpu_seconds_per_day=10)) as house:
        us = house.store.tenants.made("us").id
        window(house, 1, 4.0)
        window(house, 1, 4.0)  # once more, after a crash
        house.service.ledger.count_cpu(us, 1.0)
        house.service.enforcer.enforce()
        assert (
            round(house.ask("GET", "/v1/limits").json()["cpu_seconds_today"], 1) == 5.0
        )  # the house's upload took a little
        lines = house.ask("GET", "/v1/usage?by=job").json()["data"]
        assert {line["job"]: round(line["cpu_seconds"], 1) for line in lines if line["cpu_seconds"]} == {
            house.job["id"]: 4.0,
            None: 1.0,
        }
        assert house.service.enforcer.rule(us).hold == ""
        window(house, 2, 5.0)
        assert house.service.enforcer.rule(us).hold.startswith("cpu_seconds_per_day: the 10 CPU seconds")
        grading = {"grader": {"type": "string_check", "name": "a", "input": "a", "reference": "a", "operation": "eq"}}
        told = house.refused(429, "POST", "/v1/fine_tuning/alpha/graders/run", json={**grading, "model_sample": "a"})
        assert "cpu_seconds_per_day" in told["message"]
        house.service.quotas.check_day(us)  # chats take no such time
        assert house.ask("PUT", "/v1/tenants/us/limits", "admin", json={"cpu_seconds_per_day": None}).status_code == 200
        assert house.service.enforcer.rule(us).hold == ""


def test_graders_are_charged_to_their_owner() -> None:
    used = Counter[str]()
    graders = Graders(Walls(), lambda owner, seconds: used.update({owner: 1 + round(1e6 * seconds)}))
    from motet.rewards.graders.shapes import parse

    async def scenario() -> None:
        async def nobody(judge: object, messages: object) -> tuple[str, int]:
            raise AssertionError

        given = {
            "type": "string_check",
            "name": "a",
            "input": "{{sample.output_text}}",
            "reference": "a",
            "operation": "eq",
        }
        try:
            assert (await graders.graded("us", parse(given), {}, ["a"], nobody))[0].reward == 1.0
        finally:
            await graders.close()

    asyncio.run(scenario())
    assert set(used) == {"us"}


def test_tenants_that_an_earlier_release_made_have_no_limit_and_new_ones_have(tmp_path: Path) -> None:
    directory = unpack(FIRST, "served", tmp_path)
    with contextlib.closing(sqlite3.connect(directory / "motet.db")) as database:
        before = {name for (name,) in database.execute("SELECT name FROM tenants")}
    with open_house(directory) as house:
        limits = {one.name: one.limits for one in house.service.quotas.used(limit=100)}
        assert {limits[name].cpu_seconds_per_day for name in before} == {None}
        assert limits["us"].cpu_seconds_per_day == LimitsConfig().cpu_seconds_per_day == 200_000
        assert limits["globex"].tokens_per_day == 1_000_000, "what an admin has set stays"
    store = Store(f"sqlite:///{directory / 'motet.db'}")  # once more: nothing changes
    store.close()


def test_a_job_that_is_deleted_before_its_work_is_reported_is_charged_to_its_tenant(tmp_path: Path) -> None:
    with open_house(tmp_path) as house:
        job = house.ask("POST", "/v1/jobs", json=tiny("short")).json()["id"]
        house.ask("POST", "/v1/jobs/short/cancel")
        assert house.ask("DELETE", "/v1/jobs/short").status_code == 204
        assert job not in {line["job"] for line in house.ask("GET", "/v1/usage").json()["data"]}, "it did nothing yet"
        house.recorder.record_usage(UsageWindow("engine", 1, {job: 3_000_000}, "", {job: 4_000_000}, {job: 50}))
        (line,) = [one for one in house.ask("GET", "/v1/usage").json()["data"] if one["job"] == job]
        assert (line["name"], line["device_seconds"], line["cpu_seconds"], line["tokens_prompt"]) == ("short", 3, 4, 50)
        assert house.ask("GET", "/v1/limits").json()["cpu_seconds_today"] >= 4.0


def test_processes_that_read_uploads_are_charged_and_not_begun_for_who_has_nothing_left(tmp_path: Path) -> None:
    packed = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"], "answer": ["b"]}), packed)
    rows = packed.getvalue()
    adapter = tarred({"adapter_config.json": b"[", "adapter_model.safetensors": b"x"})
    with open_house(tmp_path, limits=LimitsConfig(cpu_seconds_per_day=1000)) as house:
        us, ledger = house.store.tenants.made("us").id, house.service.ledger

        def spent() -> float:
            ledger.flush()
            return ledger.used_today(us)[us].cpu_seconds

        sent = (("files", "a.parquet", rows), ("adapters", "a.tar.gz", adapter))
        for path, name, data in sent:
            before = spent()
            house.ask("POST", f"/v1/{path}", files={"file": (name, data)})
            wait_until(lambda before=before: spent() > before + 0.03)  # type: ignore[misc]  # a Python has started
        ledger.count_cpu(us, 1000)
        wait_until(lambda: spent() > 1000)
        for path, name, data in sent:
            told = house.refused(429, "POST", f"/v1/{path}", files={"file": (name, data)})
            assert "cpu_seconds_per_day" in told["message"]
