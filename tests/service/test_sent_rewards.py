"""Rewards that tenants send with their jobs: refused at once, run as `motet run` runs them, and no neighbour's business."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import select

from motet.config.job import LONGEST_CODE
from motet.config.jobfile import load_service
from motet.core.errors import ConfigError
from motet.core.types import JobState
from motet.rewards.reward_walls import NO_WALL
from motet.service.app import create_app
from motet.service.database.tables import StoredJob
from motet.service.settings import Settings
from tests.support.adapter_files import run_alone, weights_of
from tests.support.house import House, open_house
from tests.support.sent_code import LIFTED, SPIN, one
from tests.support.service_run import FINAL, Service, serving, tiny
from tests.support.tenants import Tenants

CODE = """
import math
import numpy as np

BONUS = 0.25


def length(text):
    return len(text)


def reward(problem, completion, scale=1.0):
    print("scored", len(completion))
    right = completion.strip() == problem.answer
    return float(scale * (BONUS + right) - 0.01 * np.sqrt(length(completion)) + np.random.uniform(0, 0.01))
"""
NAME = "rewards.py:reward"
OFF = "this service runs no code of its tenants; whoever runs it can allow that, with `rewards: {tenants: true}`"


def job(name: str, code: str | None = CODE, function: str = NAME, **fields: Any) -> dict[str, Any]:
    """A job with a reward of its own, as it is sent."""
    sent = {} if code is None else {"code": code}
    return tiny(name, reward={"name": function, **sent, **fields})


# --- refused --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with open_house(tmp_path_factory.mktemp("on"), sent_rewards=True) as found:
        yield found


REFUSED = [
    (job("a", code="x = 1\ndef reward(:"), r"reward file 'rewards.py' does not load: SyntaxError: .*\(rewards.py, line 2\)"),
    (job("a", function="rewards.py:rewad"), r"rewards.py has no 'rewad'; did you mean 'reward'\?"),
    (job("a", code=None), r"'rewards.py:reward' cannot be used here: its file was not sent \(`code`\)"),
    (job("a", function="exact"), "with `code`, name one file and its function, such as rewards.py:reward"),
    (job("a", function="http"), "with `code`, name one file and its function"),
    (job("a", function="/etc/rewards.py:reward"), "with `code`, name one file and its function"),
    (job("a", function="../rewards.py:reward"), "with `code`, name one file and its function"),
    (job("a", function="os:getcwd"), "with `code`, name one file and its function"),
    (job("a", wall=False), "only the service's operator can set wall: false"),
    (job("a", code="#" * (LONGEST_CODE + 1)), f"at most {LONGEST_CODE} characters"),
    (job("a", cpu_seconds=61), "cpu_seconds: 61 is more than 60"),
    (job("a", memory_mb=4096), "memory_mb: 4096 is more than 2048"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "why"), REFUSED)
def test_what_cannot_run_is_refused_at_once(house: House, given: dict[str, Any], why: str) -> None:
    answer = house.ask("POST", "/v1/jobs", json=given)
    assert 400 <= answer.status_code < 500
    assert re.search(why, answer.json()["error"]["message"]), answer.text
    assert house.ask("GET", "/v1/jobs/a").status_code == 404


def test_of_several_jobs_the_wrong_ones_are_named(house: House) -> None:
    good, bad = job("good"), job("bad", function="rewards.py:nothing")
    told = house.refused(400, "POST", "/v1/submissions", json={"jobs": [{"job": good}, {"job": bad}]})["message"]
    assert "rewards.py has no 'nothing'" in told
    assert "good" not in told
    text = json.dumps({"jobs": [good, bad]})
    assert "rewards.py has no 'nothing'" in house.refused(400, "POST", "/v1/check", json={"text": text})["message"]


def test_a_file_is_stored_shown_and_deleted_with_its_job(house: House) -> None:
    def stored() -> int:
        house.service.stored.measure()
        found: int = house.ask("GET", "/v1/limits").json()["stored_bytes"]
        return found

    before = stored()
    taken = house.ask("POST", "/v1/jobs", json=job("kept", code=CODE + "#" * 50_000))
    assert taken.status_code == 201, taken.text
    assert stored() - before > 50_000
    for path in ("/v1/jobs/kept", "/v1/jobs"):
        assert "BONUS" not in house.ask("GET", path).text
    (shown,) = house.ask("GET", "/v1/jobs/kept").json()["spec"]["rewards"]
    assert shown["code"] == f"{len(CODE) + 50_000} characters"
    house.ask("POST", "/v1/jobs/kept/cancel")
    assert house.ask("DELETE", "/v1/jobs/kept").status_code == 204
    assert stored() - before < 10_000
    assert any(line["name"] == "file.py:function" for line in house.ask("GET", "/v1/rewards").json()["data"])


def test_a_service_that_is_switched_off_says_who_can_switch_it_on(tmp_path: Path) -> None:
    with open_house(tmp_path) as house:
        for given in (job("a"), job("a", code=None)):
            assert OFF in house.refused(400, "POST", "/v1/jobs", json=given)["message"]
        assert not any(line["kind"] == "sent" for line in house.ask("GET", "/v1/rewards").json()["data"])


def test_jobs_of_a_service_that_is_switched_off_wait(tmp_path: Path) -> None:
    with open_house(tmp_path, sent_rewards=True) as house:
        assert house.ask("POST", "/v1/jobs", json=job("before")).status_code == 201
        assert house.ask("POST", "/v1/jobs", json=tiny("another")).status_code == 201
    service = create_app(Settings("small", tmp_path)).state.service
    try:
        (message,) = service.handover.open_jobs()
        assert message.job["rewards"][0]["name"] == "exact"
        (waits,) = service.store.scalars(select(StoredJob).where(StoredJob.name == "before"))
        assert (waits.state, OFF in waits.message) == ("queued", True)
    finally:
        service.request_files.close()
        service.store.close()


def test_the_switch_is_a_switch(tmp_path: Path) -> None:
    (file := tmp_path / "serve.yaml").write_text("rewards: {tenants: true, mine: 'rewards.py:reward'}")
    assert (load_service(file).sent_rewards, [*load_service(file).installed]) == (True, ["mine"])
    file.write_text("rewards: {tenants: false}")
    assert not load_service(file).sent_rewards
    for wrong in ("{tenants: 'rewards.py:reward'}", "{mine: true}"):
        file.write_text(f"rewards: {wrong}")
        with pytest.raises(ConfigError, match="`tenants` is true or false"):
            load_service(file)


WITHOUT_LANDLOCK = """
import os, sys
import pyseccomp
calls = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
calls.add_rule(pyseccomp.ERRNO(38), 444)
calls.load()
os.execv(sys.executable, [sys.executable, "-m", "motet", *sys.argv[1:]])
"""


def test_a_service_does_not_start_with_it_where_the_wall_does_not_hold(tmp_path: Path) -> None:
    (file := tmp_path / "serve.yaml").write_text("rewards: {tenants: true}\n")
    words = "serve", "--base", "small", "--no-keys", "--directory", str(tmp_path / "served"), "--config", str(file)
    done = subprocess.run([sys.executable, "-c", WITHOUT_LANDLOCK, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, f"rewards.tenants: {NO_WALL} (" in " ".join(done.stderr.split())) == (2, True), done.stderr
    assert not (tmp_path / "served").exists()


# --- run ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One for the whole file; an admin asks."""
    directory = tmp_path_factory.mktemp("serve")
    (directory / "serve.yaml").write_text("engine: {samplers: 0, threads: 1, slots: 4}\nrewards: {tenants: true}\n")
    with serving(directory / "served", "--config", str(directory / "serve.yaml"), keys=True) as found:
        yield found


def test_a_job_with_a_reward_of_its_own_makes_the_bytes_of_motet_run(service: Service, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(CODE)
    given = tiny("mine", reward={"name": NAME, "args": {"scale": 2.0}})
    (tmp_path / "jobs.yaml").write_text(yaml.safe_dump({"base": "small", "jobs": [given]}))
    tenants = Tenants(service)
    process = service.motet("submit", "jobs.yaml", "--follow", key=tenants.key("us"), cwd=tmp_path)
    said = process.communicate()[0]
    assert process.returncode == 0, said
    service.become(tenants.key("us"))
    made = service.weights("mine")
    own = {**given, "reward": {"name": f"{tmp_path / NAME}", "args": {"scale": 2.0}}}
    alone = run_alone(tmp_path / "alone", own)
    assert made == weights_of(alone)["mine"]
    (receipt,) = service.directory.glob(f"run/{service.job('mine')['id']}/receipts/v3.json")
    told = told_in(receipt)
    assert told == told_in(alone.jobs["mine"].adapter / "receipt.json")
    assert [one["name"] for one in told[0]] == ["code/rewards.py"]
    lines = {line["name"]: line["cpu_seconds"] for line in service.ask("GET", "/v1/usage?by=job")["data"]}
    assert lines["mine"] > 0.05
    tenants.close()


def told_in(receipt: Path) -> tuple[list[Any], dict[str, Any]]:
    """The code that a receipt names, and the settings but for the job's name on a service."""
    built = json.loads(receipt.read_bytes())["predicate"]["buildDefinition"]
    settings = {name: value for name, value in built["externalParameters"].items() if name not in ("name", "seed")}
    return [one for one in built["resolvedDependencies"] if one["name"].startswith("code/")], settings


HOSTILE = {
    "loops": (one(SPIN), "failed", "more than 0.5 s of CPU time"),
    "lifts": (LIFTED, "failed", "more CPU time than it may"),
    "eats": (one("x = [bytearray(1 << 20) for _ in range(10**5)]"), "failed", "more than 128 MB of memory"),
    "eats-as-it-loads": ("X = [bytearray(1 << 20) for _ in range(10**5)]\n" + one("pass"), "failed", "MemoryError"),
    "reads": (one("open('{directory}/motet.db').read()"), "failed", "PermissionError"),
    "reads-a-file": (one("open('{upload}').read()"), "failed", "PermissionError"),
    "exits": (one("os._exit(3)"), "failed", "exit status 3"),
}


def test_a_neighbours_job_does_not_notice(service: Service, tmp_path: Path) -> None:
    proof = tiny("proof", 12, seed=5, eval={"every": 0})
    tenants = Tenants(service)
    victim, mallory = tenants.http("victim"), tenants.http("mallory")
    victim.post("/v1/files", files={"file": ("rows.jsonl", b'{"prompt": "a?", "answer": "b"}\n')}).raise_for_status()
    (upload,) = (service.directory / "files").iterdir()
    limits: dict[str, Any] = {"cpu_seconds": 0.5, "memory_mb": 128, "wall_seconds": 60}
    short = {"eval": {"every": 0}, "algorithm": {"group_size": 2, "groups_per_step": 1}}
    for name, (code, _, _) in HOSTILE.items():
        code = code.replace("{directory}", str(service.directory)).replace("{upload}", str(upload))
        mallory.post("/v1/jobs", json={**job(name, code, **limits), **short}).raise_for_status()
    victim.post("/v1/jobs", json=proof).raise_for_status()
    service.become(tenants.key("victim"))
    assert service.ended("proof") == JobState.SUCCEEDED
    assert service.weights("proof") == weights_of(run_alone(tmp_path / "alone", proof))["proof"]
    service.become(tenants.key("mallory"))
    service.until(lambda: all(service.job(name)["state"] in FINAL for name in HOSTILE), seconds=600)
    ended = {name: (service.job(name)["state"], service.job(name)["message"]) for name in HOSTILE}
    wrong = {name: end for name, end in ended.items() if end[0] != HOSTILE[name][1] or HOSTILE[name][2] not in end[1]}
    assert wrong == {}
    assert not any(str(service.directory) in message for _, message in ended.values())
    assert len(service.engines()) == 1
    tenants.close()
