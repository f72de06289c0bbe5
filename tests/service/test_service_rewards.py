"""What the routes say of rewards, without an engine: who may be named, how workers take and hand in, what is refused."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from motet.client.reward_files import RewardFiles
from motet.config import JobConfig, RewardConfig
from motet.config.jobfile import load_service
from motet.core.errors import ConfigError, RewardError
from motet.core.types import JobState
from motet.rewards.reward_elsewhere import ELSEWHERE, SEALED, AnswerDetails, WorkerArgs
from motet.rewards.reward_installed import install
from motet.rewards.rewards import BUILTIN
from motet.service.database.tables import ScoringUnit, StoredJob
from motet.service.events import EventBus
from motet.service.http.bodies import MOST_SCORES
from motet.service.schemas.workers import LeaseRequest
from motet.service.workers.attached import TAKES_PER_SECOND, AttachedWorkers
from motet.service.workers.rewards import RewardWorkers, key_of
from tests.support import inside
from tests.support.commands import NOBODY
from tests.support.house import House, open_house
from tests.support.processes import ending
from tests.support.service_run import Json, tiny
from tests.support.waiting import PATIENCE, wait_until

OPERATORS = '''
"""Rewards of the house."""
import helpers_of_the_house


def short(problem, completion, limit=20):
    """One where the answer is short.

    More words.
    """
    return float(len(completion) < limit)


def graded(prompts, completions, answer, bonus=0.5, **columns):
    """After the manner of TRL."""
    return [bonus] * len(completions)


def strict(problem, completion, level):
    """Wants an argument."""
    return float(level)


def _hidden(problem, completion):
    return 0.0


def letters(text):
    return len(text)
'''


LEASE = 20.0
"""Seconds; tests do not wait for their end."""


@pytest.fixture(scope="module")
def rewards_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The operator's rewards."""
    directory = tmp_path_factory.mktemp("operator")
    (directory / "helpers_of_the_house.py").write_text("print('loading')\n")
    (directory / "rewards.py").write_text(OPERATORS)
    return directory / "rewards.py"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, rewards_file: Path) -> Iterator[House]:
    """One for the whole file."""
    rewards = install({"brief": {"function": f"{rewards_file}:short", "args": {"limit": 3}}}, rewards_file)
    with open_house(tmp_path_factory.mktemp("house"), rewards=rewards, lease_seconds=LEASE) as found:
        yield found


# --- what may be named --------------------------------------------------------------------------------------------------


def test_all_rewards_are_listed_with_what_they_take(house: House) -> None:
    found = {one["name"]: one for one in house.ask("GET", "/v1/rewards").json()["data"]}
    assert list(found) == [*BUILTIN, "scorer", "short", "graded", "strict", "brief", *ELSEWHERE]
    assert found["regex"]["parameters"] == {"pattern": "", "full": "False", "ignore_case": "False", "of": "'text'"}
    assert found["short"] == {
        "name": "short", "kind": "installed", "summary": "One where the answer is short.", "parameters": {"limit": "20"},
    }  # fmt: skip
    assert found["brief"]["parameters"] == {"limit": "3"}
    assert found["graded"]["parameters"] == {"bonus": "0.5"}
    assert found["strict"]["parameters"] == {"level": ""}
    assert set(found["http"]["parameters"]) == {"url", "headers", "args"}
    assert all(one["summary"].endswith((".", ":")) for one in found.values())


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("short_", "short"),
        ("_hidden", "cannot be used here"),
        ({"name": "short", "args": {"width": 3}}, "'width'"),
        ("strict", "'level'"),
    ],
)
def test_a_reward_that_cannot_be_used_is_refused_with_the_reason(house: House, reward: Any, words: str) -> None:
    assert words in house.refused(400, "POST", "/v1/jobs", json={**tiny("odd"), "reward": reward})["message"]


def test_headers_are_never_shown(house: House) -> None:
    reward = {"name": "http", "args": {"url": "https://example.org/score", "headers": {"Authorization": "hidden-word"}}}
    made = house.ask("POST", "/v1/jobs", json={**tiny("secret"), "reward": reward})
    assert made.status_code == 201, made.text
    shown = [
        made,
        house.ask("GET", "/v1/jobs/secret"),
        house.ask("GET", "/v1/jobs"),
        house.ask("GET", "/v1/jobs/secret/events"),
    ]
    shown += [house.ask("POST", "/v1/jobs/secret/pause"), house.ask("GET", "/v1/jobs/secret", "admin")]
    for answer in shown:
        assert answer.is_success
        assert "hidden-word" not in answer.text
    args = made.json()["spec"]["rewards"][0]["args"]
    assert (args["url"], list(args["headers"])) == ("https://example.org/score", ["Authorization"])
    again = {**tiny("again"), "rewards": made.json()["spec"]["rewards"]}
    del again["reward"]
    assert "mask" in house.refused(400, "POST", "/v1/jobs", json=again)["message"]
    stored = house.store.job_by_id(made.json()["id"])
    assert stored is not None
    (kept,) = JobConfig.model_validate(stored.spec).rewards
    assert kept.args["headers"]["Authorization"].startswith(SEALED)
    files = [path for path in house.storage.directory.rglob("*") if path.is_file()]
    assert {"motet.db", "motet.db-wal", "secret.key"} <= {path.name for path in files}
    assert not [path for path in files if b"hidden-word" in path.read_bytes()]
    again["rewards"][0]["args"]["headers"] = kept.args["headers"]
    assert SEALED in house.refused(400, "POST", "/v1/jobs", json=again)["message"]


# --- workers ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def waiting(house: House) -> Iterator[tuple[str, list[str]]]:
    """A job, and the keys of two units that wait for a worker."""
    job = house.ask("POST", "/v1/jobs", json={**tiny(f"job{time.time_ns()}"), "reward": "worker"}).json()["id"]
    work = [{"reward": {"args": {}}, "problem": {"id": n}, "completions": ["a", "\ud800é\0"]} for n in range(2)]
    keys = [key_of(one) for one in work]
    for key, one in zip(keys, work, strict=True):
        house.part(RewardWorkers).units.ask(job, key, 0, one)
    yield job, keys
    house.ask("POST", f"/v1/jobs/{job}/cancel")
    house.recorder.record_state(job, JobState.CANCELLED, "")


def lease(house: House, job: str, worker: str = "w", **fields: Any) -> Json:
    """What a worker gets."""
    answer = house.ask(
        "POST", f"/v1/jobs/{job}/work/rewards/lease", json={"worker": worker, "wait_seconds": 0, **fields}
    )
    assert answer.status_code == 200, answer.text
    found: Json = answer.json()
    return found


def results(house: House, job: str, given: dict[str, Any]) -> Json:
    """What becomes of scores."""
    body = {"results": [{"id": key, "scores": scores} for key, scores in given.items()]}
    answer = house.ask("POST", f"/v1/jobs/{job}/work/rewards/results", json=body)
    assert answer.status_code == 200, answer.text
    found: Json = answer.json()
    return found


def test_a_worker_leases_scores_and_hands_in_as_often_as_it_likes(house: House, waiting: tuple[str, list[str]]) -> None:
    job, keys = waiting
    found = lease(house, job, most=1)
    assert [unit["id"] for unit in found["units"]] == keys[:1]
    assert found["units"][0]["completions"] == ["a", "\ud800é\0"]
    assert (found["seconds"], found["state"]) == (LEASE, "queued")
    assert [unit["id"] for unit in lease(house, job, "v")["units"]] == keys[1:]
    assert lease(house, job)["units"] == []
    scores = [0.5, {"chance": "late"}]
    assert results(house, job, {keys[0]: scores}) == {"counted": keys[:1], "known": [], "unknown": []}
    for _ in range(2):  # twice, late, or by another
        told = results(house, job, {keys[0]: [9, 9], "none": [1]})
        assert told == {"counted": [], "known": keys[:1], "unknown": ["none"]}
    assert house.part(RewardWorkers).units.ask(job, keys[0], 0, {"completions": []}) == scores
    assert house.ask("DELETE", f"/v1/jobs/{job}/work/rewards/workers/v").status_code == 204
    assert [unit["handed_out"] for unit in lease(house, job)["units"]] == [2]
    with house.store.transaction() as session:
        session.execute(update(ScoringUnit).values(leased_until=0.0))
    assert [unit["handed_out"] for unit in lease(house, job, "v")["units"]] == [3]
    assert results(house, job, {keys[1]: ["a reason", 1]})["counted"] == keys[1:]


def test_work_whose_answer_was_lost_is_leased_again(house: House, waiting: tuple[str, list[str]]) -> None:
    job, keys = waiting
    lease(house, job, most=1)
    assert [unit["id"] for unit in lease(house, job, most=1, holds=keys[:1])["units"]] == keys[1:]
    assert lease(house, job, holds=keys)["units"] == []
    assert [unit["id"] for unit in lease(house, job, holds=keys[1:])["units"]] == keys[:1]
    assert [unit["id"] for unit in lease(house, job, holds=[])["units"]] == keys
    assert lease(house, job)["units"] == []  # by default it keeps all


def test_answers_alike_after_other_conversations_are_each_scored(house: House, waiting: tuple[str, list[str]]) -> None:
    job = house.store.job_by_id(waiting[0])
    assert job is not None
    reward, problem = RewardConfig(name="worker"), {"id": 7}

    async def scored() -> list[Any]:
        workers = RewardWorkers(house.store, EventBus(), 60.0)
        talks = [[[{"role": "user", "content": text}]] for text in ("a", "b", "a")]
        asked = [asyncio.create_task(workers.ask(job, reward, problem, ["yes"], AnswerDetails(talk))) for talk in talks]
        found: dict[str, list[Any]] = {}
        async with asyncio.timeout(PATIENCE):
            while not all(one.done() for one in asked):
                for unit in workers.units.lease(job.id, "w", 9, 60):
                    if unit.work["problem"] == problem:
                        found[unit.key] = [float(ord(unit.work["transcripts"][0][0]["content"]))]
                await workers.settle(job.id, found)
                await asyncio.sleep(0.01)
        workers.close()
        return [one.result() for one in asked]

    assert asyncio.run(scored()) == [[97.0], [98.0], [97.0]]


def test_what_a_worker_gets_wrong_is_refused_and_nothing_is_counted(
    house: House, waiting: tuple[str, list[str]]
) -> None:
    job, keys = waiting
    path = f"/v1/jobs/{job}/work/rewards/results"
    for scores, status in (([1.0], 400), ([1.0, 2.0, 3.0], 400), ([{}, 1.0], 422), ([[1.0], 1.0], 422), ("no", 422)):
        body = {"results": [{"id": keys[0], "scores": [1.0, 1.0]}, {"id": keys[1], "scores": scores}]}
        assert house.refused(status, "POST", path, json=body)["message"]
    for odd in ("NaN", "Infinity", "-1e999"):
        text = f'{{"results": [{{"id": "{keys[0]}", "scores": [1.0, {odd}]}}]}}'
        house.refused(422, "POST", path, content=text.encode(), headers={"Content-Type": "application/json"})
    assert house.refused(413, "POST", path, content=b" " * (MOST_SCORES + 1))["message"]
    assert len(lease(house, job)["units"]) == 2


def test_another_tenant_neither_takes_nor_scores(house: House, waiting: tuple[str, list[str]]) -> None:
    job, keys = waiting
    body = {"results": [{"id": keys[0], "scores": [1.0, 1.0]}]}
    house.refused(404, "POST", f"/v1/jobs/{job}/work/rewards/lease", "theirs", json={"worker": "w"})
    house.refused(404, "POST", f"/v1/jobs/{job}/work/rewards/results", "theirs", json=body)
    house.refused(404, "DELETE", f"/v1/jobs/{job}/work/rewards/workers/w", "theirs")
    other = house.ask("POST", "/v1/jobs", "theirs", json={**tiny("theirs"), "reward": "worker"}).json()["id"]
    told = house.ask("POST", f"/v1/jobs/{other}/work/rewards/results", "theirs", json=body).json()
    assert told == {"counted": [], "known": [], "unknown": keys[:1]}
    assert len(lease(house, job)["units"]) == 2


def test_a_worker_that_waits_gets_work_at_once_and_hears_of_the_end(
    house: House, waiting: tuple[str, list[str]]
) -> None:
    """In one of several tries before it would look of itself, which it does every five seconds."""
    job, workers, took = waiting[0], house.part(RewardWorkers), list[float]()

    def asked(answers: list[Json]) -> threading.Thread:
        asking = threading.Thread(target=lambda: answers.append(lease(house, job, "patient", wait_seconds=30)))
        asking.start()
        wait_until(lambda: workers._polling[job] == 1)
        return asking

    deadline = time.monotonic() + PATIENCE
    while min(took, default=math.inf) > 2.5:
        assert time.monotonic() < deadline, took
        house.ask("DELETE", f"/v1/jobs/{job}/work/rewards/workers/patient")
        lease(house, job)
        got = list[Json]()
        asking, started = asked(got), time.monotonic()
        house.ask("DELETE", f"/v1/jobs/{job}/work/rewards/workers/w")
        asking.join()
        took.append(time.monotonic() - started)
        assert len(got[0]["units"]) == 2
    got = list[Json]()
    asking = asked(got)
    house.recorder.record_state(job, JobState.CANCELLED, "")
    asking.join()
    assert (got[0]["units"], got[0]["state"]) == ([], "cancelled")
    assert lease(house, job)["state"] == "cancelled"


def test_a_worker_that_hangs_up_while_it_waits_is_handed_nothing(house: House, waiting: tuple[str, list[str]]) -> None:
    job, keys = waiting
    held = lease(house, job)
    assert len(held["units"]) == 2
    code = (
        "import sys, httpx2; httpx2.post(sys.argv[1], headers={'Authorization': sys.argv[2]}, timeout=60, "
        "json={'worker': 'dead', 'wait_seconds': 30})"
    )
    url = str(house.http.base_url.join(f"/v1/jobs/{job}/work/rewards/lease"))
    words = [sys.executable, "-c", code, url, f"Bearer {house.keys['ours']}"]
    with ending(subprocess.Popen(words)):
        wait_until(lambda: "dead" in inside.attached(house.part(RewardWorkers))[job])
    wait_until(lambda: "dead" not in inside.attached(house.part(RewardWorkers))[job])
    house.ask("DELETE", f"/v1/jobs/{job}/work/rewards/workers/w")
    assert [unit["id"] for unit in lease(house, job, "alive")["units"]] == keys


class Counting(AttachedWorkers):
    """Workers for whom there is never work."""

    looks = 0

    async def state(self, job_id: str) -> JobState:
        return JobState.RUNNING

    async def take(self, job: StoredJob, asked: LeaseRequest, owner: str) -> list[Json]:
        self.looks += 1
        return []

    async def wait(self, worker: str, seconds: float) -> list[Json]:
        async def nobody() -> bool:
            return False

        asked = LeaseRequest.model_construct(worker=worker, most=1, wait_seconds=seconds, holds=None)
        return await self.lease(StoredJob(id="job"), asked, "key", nobody, lambda: lambda: None)


def test_many_workers_that_wait_for_work_of_a_job_look_seldom(house: House) -> None:
    async def waited(many: int, seconds: float, looks: float = math.inf) -> tuple[int, int]:
        """How often they looked, and how often there was something new."""
        bus, news = EventBus(), 0
        workers = Counting(house.store, bus, 60.0)
        waiting = asyncio.gather(*(workers.wait(f"w{number}", seconds) for number in range(many)))
        while not waiting.done() and workers.looks < looks:
            workers._publish("job")
            news += 1
            await asyncio.sleep(0.01)
        waiting.cancel()
        return workers.looks, news

    looks, news = asyncio.run(waited(1, PATIENCE, 20))
    assert looks > news / 10, "one that is alone looks whenever there is something new"
    assert asyncio.run(waited(100, 2.0))[0] < 2 * 100 + 2 * 2.0 * TAKES_PER_SECOND


def test_a_job_rests_when_it_is_to_and_nobody_scores(house: House) -> None:
    job_id = house.ask("POST", "/v1/jobs", json={**tiny("resting"), "reward": "worker"}).json()["id"]
    workers, loop = house.part(RewardWorkers), house.app.state.loop
    job = house.store.job_by_id(job_id)
    assert job is not None
    reward = RewardConfig(name="worker")
    asked = asyncio.run_coroutine_threadsafe(workers.ask(job, reward, {"id": 1}, ["a"]), loop)
    wait_until(lambda: workers.waits(job_id))
    assert not asked.done()  # as long as it takes
    lease(house, job_id, most=0)
    assert not workers.waits(job_id)  # somebody is attached
    loop.call_soon_threadsafe(workers.rest, job_id, True)
    loop.call_soon_threadsafe(inside.attached(workers)[job_id].update, {"w": -1e9})
    wait_until(asked.done)  # when the worker's time is over
    assert type(asked.exception()).__name__ == "ScorerAway"
    assert not workers.waits(job_id)


# --- the tenant's own files -----------------------------------------------------------------------------------------------


def test_a_worker_calls_only_what_its_owner_named(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine.py", tmp_path / "other.py"
    mine.write_text(
        "import os\ndef reward(problem, completion, k=1): return k\ndef second(problem, completion): return 0\n"
    )
    other.write_text("def score(problem, completion): return 1\n")
    limits = RewardConfig(name="worker", cpu_seconds=3)

    def found(function: str, *given: Any) -> str:
        return RewardFiles(given or (mine,)).find(WorkerArgs(function=function), limits).name

    assert found("mine.py:second") == f"{mine}:second"
    assert found("second") == f"{mine}:second"
    assert found("") == f"{mine}:reward"
    assert found("", other) == f"{other}:score"
    assert found("score", mine, f"{other}:score") == f"{mine}:score"  # the first file that may have it
    assert found("other.py:score", mine, f"{other}:score") == f"{other}:score"
    for bad in ("os.system", "mine.py:os.system", "_hidden", "os:system", "other.py:score", "mine.py:__import__"):
        with pytest.raises(RewardError, match="--reward"):
            found(bad)
    with pytest.raises(RewardError, match="second"):
        found("second", f"{mine}:reward")
    for missing in (tmp_path / "nowhere.py", NOBODY / "mine.py"):
        with pytest.raises(RewardError, match="does not exist"):
            RewardFiles([missing])
    kept = RewardFiles(len).find(WorkerArgs(function="len"), limits)
    assert (kept.function, kept.cpu_seconds) == (len, 3)


def test_jobs_are_handed_in_with_a_worker_in_the_place_of_own_functions(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def reward(problem, completion, k=1): return k\n")
    own = JobConfig.model_validate(
        {"name": "own", "data": "toy:add", "reward": [
            {"name": f"{mine}:reward", "args": {"k": 2}, "weight": 0.5, "cpu_seconds": 4}, "exact",
        ]}
    )  # fmt: skip
    plain = JobConfig.model_validate({"name": "plain", "data": "toy:add", "reward": "exact"})
    moved, left = RewardFiles(mine).for_service([own, plain])
    first, second = moved.rewards
    assert (first.name, first.args) == ("worker", {"function": "mine.py:reward", "args": {"k": 2}})
    assert (first.weight, first.cpu_seconds, second.name) == (0.5, 4, "exact")
    assert left == plain
    (replaced,) = RewardFiles(mine).for_service([plain])
    assert [(one.name, one.args) for one in replaced.rewards] == [("worker", {"function": "mine.py:reward"})]
    with pytest.raises(RewardError, match=r"--reward mine\.py"):
        RewardFiles(len).for_service([own])


# --- the operator's files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def reward(problem, completion) return 1", "SyntaxError"),
        ("import nowhere_at_all", "nowhere_at_all"),
        ("x = 1", "has no reward"),
        ("def exact(problem, completion): return 1", "'exact'"),
        ("raise SystemExit", "SystemExit"),
        ("def reward(problem, completion_ids, completions): return 1\n", "completion_ids"),
    ],
)
def test_what_an_operator_gets_wrong_is_told_at_the_start(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(text)
    with pytest.raises(RewardError) as error:
        install({}, file)
    assert words in str(error.value)


def test_a_file_that_ends_its_process_has_no_reward(tmp_path: Path) -> None:
    (file := tmp_path / "ends.py").write_text("import os\nos._exit(0)\n")
    with pytest.raises(RewardError, match=r"do not load: the.*with exit status 0"):
        install({"ends": {"function": f"{file}:score"}})


def test_a_services_file_names_rewards_beside_it(tmp_path: Path, rewards_file: Path) -> None:
    config = rewards_file.parent / "serve.yaml"
    config.write_text(
        "rewards: {tiny: {function: 'rewards.py:short', args: {limit: 2}}, plain: 'rewards.py:graded'}\n"
        "reward_hosts: [scores.example.org]\nlease_seconds: 5\n"
    )
    found = load_service(config)
    assert found.installed["tiny"].function == f"{rewards_file}:short"
    assert (found.reward_hosts, found.lease_seconds) == (["scores.example.org"], 5)
    installed = install({name: one.model_dump() for name, one in found.installed.items()})
    assert (installed["tiny"].args, installed["plain"].summary) == ({"limit": 2}, "After the manner of TRL.")
    config.write_text("rewards: {tiny: 'rewards.py:nothing'}\n")
    wanted = {name: one.model_dump() for name, one in load_service(config).installed.items()}
    with pytest.raises(RewardError, match="nothing"):
        install(wanted)
    config.write_text("rewards: {tiny: {file: x}}\n")
    with pytest.raises(ConfigError, match="function"):
        load_service(config)
