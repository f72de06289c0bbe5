"""Rewards that are scored elsewhere, with a real engine: workers that come, go and die, addresses that misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import motet
from motet.client.reward_files import RewardFiles
from motet.client.scoring import RewardWorker
from motet.core.errors import RewardError, ServiceError
from motet.rewards.reward_elsewhere import Chance, to_wire
from tests.support.adapter_files import run_alone, weights_of
from tests.support.commands import Motet
from tests.support.misbehaving_rewards import Scorer, misbehaving
from tests.support.service_run import Json, Service, serving, tiny
from tests.support.waiting import PATIENCE

pytestmark = [
    pytest.mark.slow,
]

REWARDS = '''
import os
import time


def reward(problem, completion, scale=1.0):
    """Longer is better, up to a point."""
    return scale * (len(completion) % 7) / 7


def conversed(problem, completion, transcript):
    """By all that was said."""
    return sum(len(one["content"]) for one in transcript) % 7 / 5


def vowels(prompts, completions, answer, **columns):
    """How many letters are vowels; each call leaves a line where it is told to, and may have to wait for a file."""
    if "MOTET_TEST_CALLS" in os.environ:
        with open(os.environ["MOTET_TEST_CALLS"], "a") as calls:
            calls.write(repr((prompts, completions)) + "\\n")
        while "MOTET_TEST_GATE" in os.environ and not os.path.exists(os.environ["MOTET_TEST_GATE"]):
            time.sleep(0.01)
    return [sum(letter in "aeiou" for letter in text) / (1 + len(text)) for text in completions]
'''
WAITS = "waits for a reward worker"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tenant's own rewards."""
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(REWARDS)
    return path


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    """Addresses that score, and some that should."""
    with misbehaving() as found:
        yield found


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, file: Path) -> Iterator[Service]:
    """One that is up for the whole file, with the same file installed by its operator."""
    directory = tmp_path_factory.mktemp("serve")
    with serving(directory / "served", "--config", configured(directory), "--rewards", str(file)) as found:
        yield found


def configured(directory: Path) -> str:
    """A service that may ask addresses of this machine, and gives workers two seconds."""
    config = directory / "serve.yaml"
    config.write_text("engine: {samplers: 0, threads: 1}\nreward_hosts: ['127.0.0.1:*']\nlease_seconds: 2\n")
    return str(config)


def job(name: str, *rewards: Any, steps: int = 3) -> Json:
    """A job with these rewards and no evaluation, so that no problem comes twice."""
    found = {
        **tiny(name, steps),
        "rewards": list(rewards),
        "data": {"source": "toy:sort_letters", "size": 64, "holdout": 0},
    }
    del found["reward"]
    return found


def many(name: str, *rewards: Any) -> Json:
    """A job with sixty groups, twenty a step."""
    return job(name, *rewards) | {"algorithm": {"group_size": 2, "groups_per_step": 20}}


def mixed(place: Path) -> list[Any]:
    """The rewards of `motet run`: of one file, with weights and arguments, and one that is built in."""
    own = {"name": f"{place}:reward", "args": {"scale": 0.5}}
    return [own, {"name": f"{place}:vowels", "weight": 2.0}, "exact"]


def moved() -> list[Any]:
    """The same as `motet submit --reward` hands them in."""
    own = {"name": "worker", "args": {"function": "rewards.py:reward", "args": {"scale": 0.5}}}
    return [own, {"name": "worker", "args": {"function": "rewards.py:vowels"}, "weight": 2.0}, "exact"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, file: Path, scorer: Scorer) -> dict[str, bytes]:
    """Adapters of `motet run`, each job without company."""
    jobs = [
        job("worked", *mixed(file)),
        job("shared", *mixed(file), steps=6),
        many("beside", *mixed(file)),
        job("killed", f"{file}:vowels", steps=6),
        job("asked", {"name": "http", "args": {"url": scorer.url("good")}}),
        {**job("talked", f"{file}:conversed"), "environment": "retry"},
    ]
    result = run_alone(tmp_path_factory.mktemp("alone"), *jobs)
    assert not result.jobs["asked"].inexact
    return weights_of(result)


def waiting(service: Service, name: str) -> bool:
    """Whether a job says that it waits."""
    return (service.job(name)["progress"] or {}).get("phase") == WAITS


def motet_score(
    service: Service, file: Path, *words: str, calls: Path | None = None, gate: Path | None = None
) -> subprocess.Popen[str]:
    """`motet` beside the service, with a reward that writes down its calls and may have to wait for a file."""
    named = {"MOTET_TEST_CALLS": calls, "MOTET_TEST_GATE": gate}
    return service.motet(*words, "--reward", file, env={name: str(path) for name, path in named.items() if path})


def once(calls: Path) -> int:
    """How many calls there were, none of which came twice."""
    lines = calls.read_text().splitlines()
    assert len(lines) == len(set(lines))
    return len(lines)


# --- workers ------------------------------------------------------------------------------------------------------------


def test_a_job_scored_by_a_worker_has_the_bytes_of_motet_run(
    service: Service, file: Path, alone: dict[str, bytes]
) -> None:
    service.submit(job("worked", *moved()))
    service.until(lambda: waiting(service, "worked"))
    assert service.steps("worked") == []
    with motet.Client(service.url) as client:
        with pytest.raises(RewardError, match="reward"):
            client.score("worked", reward=f"{file}:nothing")
        client.score("worked", reward=file)
    assert service.job("worked")["state"] == "succeeded"
    assert service.weights("worked") == alone["worked"]
    (first, *_) = [one["data"] for one in service.events("worked") if one["kind"] == "step"]
    assert set(first["reward_parts"]) == {"rewards.py:reward", "rewards.py:vowels", "exact"}
    assert service.job("worked")["message"] == ""


def test_workers_side_by_side_share_the_work_and_one_that_dies_loses_none(
    service: Service, file: Path, alone: dict[str, bytes], tmp_path: Path
) -> None:
    """Each step has more than one worker takes at once, and none is scored before both have some."""
    service.submit(many("beside", *moved()))
    service.until(lambda: waiting(service, "beside"))
    calls = [tmp_path / f"calls{number}" for number in range(3)]
    gate = tmp_path / "gate"
    workers = [motet_score(service, file, "score", "beside", calls=path, gate=gate) for path in calls[:2]]
    try:
        service.until(lambda: all(path.exists() for path in calls[:2]))  # none has scored anything: each holds work
        workers[0].kill()  # with what it holds
        workers.append(motet_score(service, file, "score", "beside", calls=calls[2]))
        gate.touch()
        assert service.ended("beside") == "succeeded"
        for worker in workers[1:]:
            out, _ = worker.communicate(timeout=PATIENCE)
            assert worker.returncode == 0, out
            *said, last = out.splitlines()
            assert last.startswith("beside  succeeded after 3/3"), out
            if worker is workers[1]:  # the other may begin after the last step
                assert said[-1].startswith("beside  step 3/3 "), out
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert service.weights("beside") == alone["beside"]
    lines = [line for path in calls if path.exists() for line in path.read_text().splitlines()]
    assert len(set(lines)) == 60
    assert len(lines) - 60 <= 2  # what the dead one held


@pytest.mark.soak
@pytest.mark.parametrize("often", [False, True])
def test_a_server_that_is_killed_between_lease_and_result_asks_nothing_twice(
    service: Service, tmp_path: Path, file: Path, alone: dict[str, bytes], often: bool
) -> None:
    calls, name = tmp_path / "calls", f"killed-{often}"
    found = job("killed", {"name": "worker", "args": {"function": "vowels"}}, steps=6)
    service.submit({**found, "name": name, "seed": seed_of("killed")})
    worker = motet_score(service, file, "score", name, calls=calls)
    try:
        service.until(lambda: calls.exists() and len(calls.read_text().splitlines()) >= 3)
        service.kill()  # the worker holds something, and hands it in to the next one
        service.start()
        if often:
            service.until(lambda: len(calls.read_text().splitlines()) >= 6)
            service.engine().kill()
            service.until(lambda: len(calls.read_text().splitlines()) >= 9)
            service.terminate()
            service.start()
        assert service.ended(name) == "succeeded"
        out, _ = worker.communicate(timeout=PATIENCE)
        assert worker.returncode == 0, out
        assert service.weights(name) == alone["killed"]
        assert service.steps(name) == list(range(6))
        assert once(calls) == 12
    finally:
        worker.kill()
        worker.communicate()


def test_a_job_that_waits_rests_at_once_and_holds_up_no_end(service: Service, file: Path) -> None:
    service.submit(job("resting", "worker", steps=2))
    service.until(lambda: waiting(service, "resting"))
    service.steer("resting", "pause")
    service.becomes("resting", "paused")
    service.steer("resting", "resume")
    service.until(lambda: waiting(service, "resting"))
    service.terminate()
    service.start()
    service.until(lambda: waiting(service, "resting"))
    with motet.Client(service.url) as client:
        client.score("resting", reward=f"{file}:vowels")
    assert service.job("resting")["state"] == "succeeded"
    service.submit(job("dropped", "worker"))
    service.until(lambda: waiting(service, "dropped"))
    service.steer("dropped", "cancel")
    assert service.ended("dropped") == "cancelled"


BAD = """
import time


def reward(problem, completion, way="hang"):
    if way == "hang":
        time.sleep(60)
    if way == "raise":
        raise ValueError("for a test")
    return {"nan": float("nan"), "text": "no"}[way]
"""


def test_a_reward_that_is_bad_on_the_worker_fails_its_job_only(service: Service, tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(BAD)
    ways = {"hang": "gave no answer in 0.5 s", "raise": "for a test", "nan": "nan", "text": "not a number"}
    for way in ways:
        reward = {"name": "worker", "args": {"function": "bad.py:reward", "args": {"way": way}}, "wall_seconds": 0.5}
        service.submit(job(f"bad-{way}", reward))
    with motet.Client(service.url) as client:
        client.score(*(f"bad-{way}" for way in ways), reward=bad)
    for way, words in ways.items():
        found = service.job(f"bad-{way}")
        assert found["state"] == "failed"
        assert words in found["message"]


def test_a_result_that_the_service_refuses_is_told_and_does_not_end_the_worker(service: Service, file: Path) -> None:
    service.submit(job("refused", {"name": "worker", "args": {}}))
    path = "/v1/jobs/refused/work/rewards"

    async def handed_in(path: str, *scores: Any) -> str:
        async with motet.AsyncClient(service.url) as client:
            return await RewardWorker(client, RewardFiles([file]))._hand_in(path, {"id": "none", "scores": [*scores]})

    assert "scores.0" in asyncio.run(handed_in(path, "x" * 9000))
    assert asyncio.run(handed_in(path, 1.0)) == ""  # nobody waits for it
    with pytest.raises(ServiceError, match="nobody"):
        asyncio.run(handed_in("/v1/jobs/nobody/work/rewards", 1.0))
    assert to_wire(["x" * 9000, Chance("y" * 9000), 1.0]) == ["x" * 4000, {"chance": "y" * 4000}, 1.0]
    service.steer("refused", "cancel")


def test_a_worker_and_an_address_see_the_whole_conversation(
    service: Service, file: Path, scorer: Scorer, alone: dict[str, bytes]
) -> None:
    """As `motet run` shows it to a function of one's own, to the same bytes."""
    rewards = {
        "worker": {"name": "worker", "args": {"function": "rewards.py:conversed"}},
        "http": {"name": "http", "args": {"url": scorer.url("conversed")}},
    }
    for name, reward in rewards.items():
        service.submit({**job(f"talked-{name}", reward), "environment": "retry", "seed": seed_of("talked")})
    with motet.Client(service.url) as client:
        client.score("talked-worker", reward=file)
    for name in rewards:
        assert service.ended(f"talked-{name}") == "succeeded"
        assert service.weights(f"talked-{name}") == alone["talked"]
    lengths = {len(talk) for path, _, body in scorer.asked if path == "/conversed" for talk in body["transcripts"]}
    assert lengths == {2, 4}


# --- from the command line ------------------------------------------------------------------------------------------------


def test_motet_submit_scores_here_until_ctrl_c_and_motet_score_goes_on(
    service: Service, file: Path, alone: dict[str, bytes], tmp_path: Path
) -> None:
    jobs = tmp_path / "jobs.yaml"
    (tmp_path / "rewards.py").write_text(REWARDS)
    tree = [{**job("shared", *mixed(Path("rewards.py")), steps=6), "name": "typed", "seed": seed_of("shared")}]
    jobs.write_text(json.dumps({"base": "small", "jobs": tree}))
    calls = tmp_path / "calls"
    worker = motet_score(service, tmp_path / "rewards.py", "submit", str(jobs), calls=calls)
    try:
        service.until(calls.exists)
        out, terminal = "", worker.stdout
        assert terminal is not None
        while "step 1/6" not in out:  # not what the service knows: the command says it a little later
            more = os.read(terminal.fileno(), 4096).decode()
            assert more, out
            out += more
        worker.send_signal(signal.SIGINT)
        out += worker.communicate(timeout=PATIENCE)[0]
        assert worker.returncode == 130, out
        again = re.search(r"continues with: `(motet score typed --reward .*)`", out)
        assert again, out
        service.until(lambda: waiting(service, "typed"))
        worker = service.motet(*shlex.split(again[1])[1:])
        out, _ = worker.communicate(timeout=PATIENCE)
        assert worker.returncode == 0, out
        assert "step 6/6" in out
        assert "step 1/6" not in out, "it was done before"
    finally:
        worker.kill()
        worker.communicate()
    assert service.weights("typed") == alone["shared"]


def seed_of(name: str) -> int:
    """The seed of a job of this name."""
    return motet.JobConfig.model_validate(tiny(name)).effective_seed


# --- addresses and the operator's own -------------------------------------------------------------------------------------


def test_bad_addresses_fail_their_jobs_and_change_no_byte_of_the_others(
    service: Service, scorer: Scorer, alone: dict[str, bytes]
) -> None:
    ways = {
        "hang": "0.5 s", "slow": "0.5 s", "error": "500", "nan": "nan", "text": "gave text", "gigabyte": "more than 1 MB",
        "few": "3 scores for 4", "redirect": "redirect", "reset": "3 times",
    }  # fmt: skip
    for way in ways:
        service.submit(
            job(
                f"http-{way}",
                {
                    "name": "http",
                    "args": {"url": scorer.url(way)},
                    "wall_seconds": 5.0 if way == "error" else 0.5 if way in ("hang", "slow") else 30.0,
                },
            )
        )
    service.submit(job("asked", {"name": "http", "args": {"url": scorer.url("good")}}))
    assert service.ended("asked") == "succeeded"
    assert service.weights("asked") == alone["asked"]
    for way, words in ways.items():
        assert service.ended(f"http-{way}") == "failed"
        assert words in service.job(f"http-{way}")["message"]
    assert scorer.count("GET /good") == 0


def test_a_reward_that_the_operator_installed_runs_by_name(
    service: Service, alone: dict[str, bytes], file: Path, says: Motet
) -> None:
    service.submit(
        {**job("shared", {"name": "reward", "args": {"scale": 0.5}}, {"name": "vowels", "weight": 2.0}, "exact", steps=6),
         "name": "installed", "seed": seed_of("shared")}
    )  # fmt: skip
    assert service.ended("installed") == "succeeded"
    assert service.weights("installed") == alone["shared"]
    service.submit(job("broken", {"name": "reward", "args": {"scale": "x"}}))
    assert service.ended("broken") == "failed"
    message = service.job("broken")["message"]
    assert "TypeError" in message or "ValueError" in message or "text" in message
    assert str(file.parent) not in json.dumps(
        [message, service.ask("GET", "/v1/jobs/broken"), service.events("broken")]
    )
    listed = json.loads(says("rewards", "--url", service.url, "--json")[1])
    assert {"reward", "vowels", "http", "exact"} <= {one["name"] for one in listed}
    assert "Longer is better" in says("rewards", "--url", service.url)[1]


def test_a_worker_whose_service_says_no_ends_with_the_reason(service: Service, file: Path) -> None:
    with motet.Client(service.url) as client, pytest.raises(ServiceError, match="nobody"):
        client.score("nobody", reward=file)


def test_a_header_reaches_its_address_and_nobody_else_can_read_what_a_service_writes(
    service: Service, scorer: Scorer
) -> None:
    reward = {"name": "http", "args": {"url": scorer.url("good"), "headers": {"Authorization": "hidden-word"}}}
    service.submit(job("hidden", reward))
    assert service.ended("hidden") == "succeeded"
    assert any(headers.get("authorization") == "hidden-word" for _, headers, _ in scorer.asked)
    files = [service.directory, *service.directory.rglob("*")]
    assert {"job.yaml", "engine.log", "motet.db-wal", "metrics.jsonl"} <= {path.name for path in files}
    assert not [path for path in files if path.is_file() and b"hidden-word" in path.read_bytes()]
    assert {(path, oct(path.stat().st_mode & 0o077)) for path in files if path.stat().st_mode & 0o077} == set()
    assert "from now on only its owner can" in (service.directory / "out").read_text()
