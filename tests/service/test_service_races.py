"""Races of a service: the decisions of `motet run`, whatever dies; who may do what with candidates; what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml

import motet
from motet.commands.served_jobs import asked_for
from motet.core.errors import ServiceError
from motet.core.types import JobState
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.race_record import RaceRecord
from motet.service.jobs.races import Races
from tests.support.commands import Motet, job_file
from tests.support.house import House, open_house
from tests.support.processes import ending
from tests.support.service_run import Json, Service, serving, tiny
from tests.support.waiting import PATIENCE

RACE = {"candidates": 4, "first": 1, "finalists": 1, "over": {"optimizer.lr": [1e-3, 4e-3, 1.6e-2]}}
DATA = {"source": "toy:sort_letters", "size": 64, "holdout": 12}
ENGINE = {"samplers": 0, "threads": 1}


def racing(name: str = "say", **fields: object) -> Json:
    """A race with decisions after two and after three steps of six."""
    return {**tiny(name, steps=6), "data": DATA, "race": RACE, "checkpoint": {"keep": 100}, **fields}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same race in this process."""
    run = tmp_path_factory.mktemp("alone")
    motet.run([racing()], base="small", directory=run, engine=ENGINE, quiet=True)
    return run


def race(service: Service, name: str = "say") -> Json:
    found: Json = service.ask("GET", f"/v1/races/{name}")
    return found


def typed(service: Service, *words: str) -> str:
    """What a command says."""
    with ending(service.motet(*words)) as command:
        out, _ = command.communicate(timeout=PATIENCE)
    assert command.returncode == 0, out
    return out


def assert_as_alone(service: Service, alone: Path) -> None:
    found, record = race(service), RaceRecord.read(alone / "say.race.json")
    assert msgspec.convert(found["record"], RaceRecord) == record
    assert found["failure"] == ""
    for name, job in found["jobs"].items():
        served, own = service.directory / "run" / job, alone / name
        assert {
            path.name: (path / "adapter_model.safetensors").read_bytes() for path in served.glob("versions/v*")
        } == {path.name: (path / "adapter_model.safetensors").read_bytes() for path in own.glob("versions/v*")}
        out = record.dropped().get(name)
        assert service.job(name)["state"] == ("succeeded" if out is None else "cancelled")
        assert service.job(name)["message"] == (out or "")


# --- a real engine ----------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_a_race_of_a_service_decides_as_a_run_does_though_everything_dies(tmp_path: Path, alone: Path) -> None:
    with serving(tmp_path) as service:
        first = service.submit(racing())
        assert first["name"] == "say-c=00"
        assert first["race"] == race(service)["id"]
        service.until(lambda: service.job("say-c=00")["step"] >= 1)
        service.kill_all()
        service.start()
        service.until(lambda: len(race(service)["record"]["rungs"]) == 1)
        service.kill()  # the engine goes on, and holds those that train
        service.start()
        service.until(lambda: race(service)["ended"] is not None)
        assert_as_alone(service, alone)
        shown = typed(service, "show", "say")
        assert "dropped" in shown
        assert "decisions are made" not in shown
        outcome = msgspec.convert(race(service)["record"], RaceRecord).outcome
        assert outcome is not None
        assert outcome.finalist is not None
        assert f"c={outcome.finalist[6:8]}" in shown


def test_a_cancelled_race_ends_and_a_paused_one_goes_on(
    tmp_path: Path, alone: Path, says: Motet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, "--hosts", "2") as service:
        monkeypatch.setenv("MOTET_URL", service.url)
        jobs = service.ask("POST", "/v1/submissions", json={"jobs": [{"job": racing()}, {"job": racing("other")}]})[
            "data"
        ]
        names = [f"{name}-c=0{n}" for name in ("say", "other") for n in range(4)]
        assert [job["name"].partition("-lr")[0] for job in jobs] == names
        service.reaches(jobs[1]["id"], 1)
        assert says("pause", "say")[0] == 0
        assert says("cancel", "other")[0] == 0
        service.until(lambda: race(service, "other")["ended"] is not None)
        assert race(service, "other")["record"]["outcome"]["finalist"] is None
        assert all(service.job(job["id"])["state"] == "cancelled" for job in jobs[4:])
        assert race(service)["ended"] is None
        assert says("resume", "say")[0] == 0
        service.until(lambda: race(service)["ended"] is not None)
        assert_as_alone(service, alone)


@pytest.mark.soak
def test_copies_of_a_service_are_those_of_a_run(tmp_path: Path) -> None:
    copied = racing(race={**RACE, "finalists": 2, "exploit": [0.3]})
    motet.run([tiny("first", steps=1)], base="small", directory=tmp_path / "first", engine=ENGINE, quiet=True)
    init = {"adapter": {"init": f"{tmp_path}/first/first/versions/v1"}}
    motet.run([{**copied, **init}], base="small", directory=tmp_path / "alone", engine=ENGINE, quiet=True)
    record = RaceRecord.read(tmp_path / "alone" / "say.race.json")
    assert len(record.copies) == 1
    (copy,) = record.copies
    with serving(tmp_path) as service:
        service.submit(tiny("first", steps=1))
        service.ended("first")
        service.submit({**copied, "adapter": {"init": "first@latest"}})
        service.until(lambda: len(race(service)["record"]["rungs"]) == 1)
        service.kill_all()
        service.start()
        service.until(lambda: race(service)["ended"] is not None)
        assert_as_alone(service, tmp_path / "alone")
        assert copy.name in race(service)["jobs"]
        assert service.steps(copy.name) == [*range(7)], "also those before it began"
        used = [one for one in service.ask("GET", "/v1/usage")["data"] if one["name"] != "first"]
        assert record.outcome is not None
        assert sum(one["tokens_sampled"] + one["tokens_trained"] for one in used) == record.outcome.tokens, "once"
        assert "copy of" in typed(service, "show", "say")
        states = [event["data"] for event in service.events(copy.name) if event["kind"] == "state"]
        assert [one.get("inexact") or [] for one in states] == [[]] * len(states)
        described = yaml.safe_load((tmp_path / "run" / service.job(copy.name)["id"] / "job.yaml").read_text())
        assert described["job"]["adapter"]["init"] == "start"


# --- the routes alone -------------------------------------------------------------------------------------------------------


def submitted(house: House, name: str, **fields: object) -> Json:
    """A race of `ours`, whose candidates no engine trains."""
    house.ask("POST", "/v1/jobs", json=racing(name, **fields)).raise_for_status()
    found: Json = house.ask("GET", f"/v1/races/{name}").json()
    return found


def arrive(house: House, run: Path, source: str = "", **fields: object) -> dict[str, str]:
    """A race whose candidates have the directories of a run (or all that of one job) at the first decision."""
    jobs: dict[str, str] = submitted(house, "say", **fields)["jobs"]
    for name, job in jobs.items():
        shutil.copytree(run / (source or name), house.storage.run / job, dirs_exist_ok=True)
        (house.storage.run / job / "status.json").unlink()
        house.store.change_job(job, step=2)
    return jobs


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[House]:
    """A house for one test."""
    with open_house(tmp_path / "house") as found:
        yield found


def again(house: House) -> Races:
    """As another process of the service has it."""
    old = house.part(Races)
    return Races(old._store, old._storage, old._bus, old._recorder, old._hosts)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"data": {**DATA, "holdout": 11}}, "11 held-out rows are too few"),
        ({"data": {**DATA, "holdout": "auto", "size": 40}}, "10 held-out rows are too few"),
        ({"data": {**DATA, "size": 9000, "holdout": 4097}}, "at most 4096 are compared"),
        ({"steps": 2}, "2 steps are too few"),
        ({"race": {**RACE, "over": {"algorithm.groups_per_step": [2, 20_000]}}}, "algorithm.groups_per_step"),
        ({"race": {**RACE, "over": {"algorithm.group_size": ["a"]}}}, "algorithm.group_size: 'a' cannot be used"),
        ({"budget": 1000}, "set race.budget"),
    ],
)
def test_what_cannot_race_is_refused_and_nothing_is_kept(house: House, fields: Json, why: str) -> None:
    before = house.store.counts()
    assert why in house.refused(400, "POST", "/v1/jobs", json=racing("no-race", **fields))["message"]
    assert house.store.counts() == before
    house.refused(404, "GET", "/v1/races/no-race")


def test_rows_of_a_file_are_counted_before_a_race_begins(house: House) -> None:
    file = "".join(f'{{"prompt": "say {number}", "answer": "{number}"}}\n' for number in range(44))
    sent = house.ask("POST", "/v1/files", files={"file": ("rows.jsonl", file)}).json()["id"]
    reward = {"reward": "exact"}
    for data, held_out in (({"source": sent}, 11), ({**DATA, "eval_source": house.file["id"]}, 2)):
        told = house.refused(400, "POST", "/v1/jobs", json=racing("no-race", data=data, **reward))["message"]
        assert f"{held_out} held-out rows are too few" in told
    assert house.ask(
        "POST", "/v1/jobs", json=racing("file-race", data={"source": sent, "holdout": 12}, **reward)
    ).is_success


def test_a_name_is_given_once_in_a_request(house: House) -> None:
    for jobs in ([racing("twin"), racing("twin")], [racing("twin"), tiny("twin")], [tiny("twin"), racing("twin")]):
        told = house.refused(400, "POST", "/v1/submissions", json={"jobs": [{"job": job} for job in jobs]})["message"]
        assert "another job of this request has it" in told


def test_a_worker_may_be_given_a_race(house: House) -> None:
    own, *_ = races = [submitted(house, name) for name in ("worked", "beside")]
    with motet.Client(str(house.http.base_url), house.keys["ours"]) as client:
        asked = asked_for(client, ["worked", next(iter(races[1]["jobs"]))])
        assert [one.name for one in asked] == [*own["jobs"], next(iter(races[1]["jobs"]))]
        with pytest.raises(ServiceError, match="nothing"):
            asked_for(client, ["nothing"])


def test_a_race_is_its_owners(house: House) -> None:
    own = submitted(house, "own")
    assert list(own["record"]["values"]) == list(own["jobs"])
    for method, path in (("GET", "own"), ("GET", own["id"]), ("POST", "own/cancel")):
        house.refused(404, method, f"/v1/races/{path}", "theirs")
    assert all(one["name"] != "own" for one in house.ask("GET", "/v1/races", "theirs").json()["data"])
    assert house.ask("GET", f"/v1/races/{own['id']}", "admin").json()["tenant"] == "us"
    theirs = house.ask("POST", "/v1/jobs", "theirs", json=racing("own"))
    assert theirs.status_code == 201
    assert house.ask("GET", "/v1/races/own", "theirs").json()["id"] != own["id"]
    assert "there is a race 'own' already" in house.refused(409, "POST", "/v1/jobs", json=racing("own"))["message"]


def test_a_repeated_request_makes_no_second_race(house: House) -> None:
    again: Json = {"json": racing("again"), "headers": {"Idempotency-Key": "race-again"}}
    first, second = (house.ask("POST", "/v1/jobs", **again).json() for _ in range(2))
    assert first == second
    both: Json = {
        "json": {"jobs": [{"job": racing("both")}, {"job": tiny("one-more")}]},
        "headers": {"Idempotency-Key": "both"},
    }
    first, second = (house.ask("POST", "/v1/submissions", **both).json() for _ in range(2))
    assert first == second
    assert len(first["data"]) == 5


def test_pages_of_races(house: House) -> None:
    names = [f"page-{number}" for number in range(3)]
    for name in names:
        submitted(house, name)
    page = house.ask("GET", "/v1/races?limit=2").json()
    assert [one["name"] for one in page["data"]] == names[:0:-1]
    assert house.ask("GET", f"/v1/races?limit=1&after={page['next']}").json()["data"][0]["name"] == names[0]


def test_candidates_stay_until_the_race_has_ended(house: House) -> None:
    (first, *others) = submitted(house, "kept")["jobs"].values()
    message = house.refused(400, "PATCH", f"/v1/jobs/{first}", json={"budget": 1000})["message"]
    assert "race.budget" in message
    house.recorder.record_state(first, JobState.FAILED, "broken")
    assert "has not ended" in house.refused(409, "DELETE", f"/v1/jobs/{first}")["message"]
    for job in others:
        house.recorder.record_state(job, JobState.CANCELLED, "")
    races = house.part(Races)
    races.decide()
    ended = house.ask("GET", "/v1/races/kept").json()
    assert ended["ended"] is not None
    assert ended["record"]["outcome"]["finalist"] is None
    assert "has ended" in house.refused(409, "POST", f"/v1/jobs/{first}/resume")["message"]
    place = house.storage.races / ended["id"]
    assert place.is_dir()
    for job in (first, *others):
        assert house.ask("DELETE", f"/v1/jobs/{job}").status_code == 204
    house.refused(404, "GET", "/v1/races/kept")
    assert not place.exists()


def test_a_candidate_that_failed_before_a_decision_stays_out(house: House, alone: Path) -> None:
    """The other candidates have the evaluations of a real run; the one that failed has none."""
    jobs = submitted(house, "say")["jobs"]
    failed, *others = jobs
    record = RaceRecord.read(alone / "say.race.json")
    for name in others:
        shutil.copytree(alone / name, house.storage.run / jobs[name], dirs_exist_ok=True)
        (house.storage.run / jobs[name] / "status.json").unlink()
        house.store.change_job(jobs[name], step=record.rungs[0].step)
    races = house.part(Races)
    races.decide()
    assert house.ask("GET", "/v1/races/say").json()["record"]["rungs"] == []  # one has not arrived
    house.recorder.record_state(jobs[failed], JobState.FAILED, "broken")
    races.decide()
    told = house.ask("GET", "/v1/races/say").json()
    assert told["failure"] == ""
    (rung,) = told["record"]["rungs"]
    assert {one["name"] for one in rung["standings"] if one["verdict"] == "failed"} == {failed}
    assert "out of the race" in house.refused(409, "POST", f"/v1/jobs/{jobs[failed]}/resume")["message"]
    known = {name: house.ask("GET", f"/v1/jobs/{job}").json() for name, job in jobs.items()}
    dropped = {one["name"] for one in rung["standings"] if one["verdict"] not in ("leads", "goes on")} - {failed}
    assert {name for name, job in known.items() if job["state"] == "cancelled"} == dropped
    assert all(known[name]["message"].startswith("dropped by the race") for name in dropped)
    rows = {name: house.store.job_by_id(job) for name, job in jobs.items()}
    goes_on = {name for name, row in rows.items() if row is not None and row.until != record.rungs[0].step}
    assert goes_on == set(jobs) - dropped - {failed}, "who is out may train no further, whenever the service is killed"


def test_a_process_that_was_killed_while_it_decided_leaves_nobody_behind(empty: House, alone: Path) -> None:
    jobs = arrive(empty, alone)
    empty.part(Races).decide()
    (rung,) = empty.ask("GET", "/v1/races/say").json()["record"]["rungs"]
    leader = jobs[rung["standings"][0]["name"]]
    empty.store.change_job(leader, until=rung["step"])
    again(empty).decide()
    row = empty.store.job_by_id(leader)
    assert row is not None
    assert row.until == 3


def test_a_budget_counts_tokens_up_to_the_decision(empty: House, alone: Path) -> None:
    """The directories are further, as where a backup of the database alone was restored."""
    (first, *_) = RaceRecord.read(alone / "say.race.json").rungs
    tokens = [JobDirectory(alone / one.name).committed(first.step).tokens for one in first.standings]
    arrive(empty, alone, race={**RACE, "budget": round(sum(tokens) + sum(tokens[:2]) / first.step) + 1})
    empty.part(Races).decide()
    (rung,) = empty.ask("GET", "/v1/races/say").json()["record"]["rungs"]
    assert rung["keep"] == 2


def test_a_copy_is_a_job_of_the_race(empty: House, alone: Path) -> None:
    leader = RaceRecord.read(alone / "say.race.json").rungs[0].standings[0].name
    jobs = arrive(empty, alone, race={**RACE, "exploit": [0.3]})
    empty.part(Races).decide()
    told = empty.ask("GET", "/v1/races/say").json()
    (copy,) = told["record"]["rungs"][0]["copies"]
    assert (copy["of"], copy["step"]) == (leader, 2)
    made = empty.ask("GET", f"/v1/jobs/{copy['name']}").json()
    assert (made["id"], made["race"], made["step"], made["state"]) == (
        told["jobs"][copy["name"]],
        told["id"],
        2,
        "queued",
    )
    assert made["spec"]["optimizer"]["lr_factors"] == {"2": 0.3}
    row = empty.store.job_by_id(made["id"])
    assert row is not None
    assert row.until == 3
    assert (empty.storage.run / made["id"] / "state" / "2").is_dir()
    empty.store.delete_job(made["id"])  # as if the process had been killed before it made the job
    again(empty).decide()
    assert empty.ask("GET", f"/v1/jobs/{copy['name']}").json() | {"created": made["created"]} == made
    empty.ask("POST", "/v1/races/say/cancel").raise_for_status()
    for job in (jobs[leader], made["id"]):
        empty.recorder.record_state(job, JobState.CANCELLED, "")
    again(empty).decide()
    assert empty.ask("GET", "/v1/races/say").json()["ended"] is not None
    for job in (*jobs.values(), made["id"]):
        assert empty.ask("DELETE", f"/v1/jobs/{job}").status_code == 204
    assert list(empty.storage.run.glob("job-*")) == [empty.storage.run / empty.job["id"]]


def test_the_name_of_a_copy_may_be_taken(empty: House, alone: Path) -> None:
    leader = RaceRecord.read(alone / "say.race.json").rungs[0].standings[0].name
    taken = f"say-c=04-of={leader[6:8]}-times=0.3"
    arrive(empty, alone, race={**RACE, "exploit": [0.3]})
    empty.ask("POST", "/v1/jobs", json=tiny(taken)).raise_for_status()
    empty.part(Races).decide()
    assert f"there is a job '{taken}' already" in empty.ask("GET", "/v1/races/say").json()["failure"]


def test_decisions_that_are_gone_end_a_race(empty: House, alone: Path) -> None:
    jobs = arrive(empty, alone)
    races = empty.part(Races)
    races.decide()
    made = empty.ask("GET", "/v1/races/say").json()
    races.path(made["id"], "say").unlink()
    again(empty).decide()
    told = empty.ask("GET", "/v1/races/say").json()
    assert "say.race.json, are gone" in told["failure"]
    assert str(empty.storage.directory) not in told["failure"]
    assert told["ended"] is not None
    assert {empty.ask("GET", f"/v1/jobs/{job}").json()["state"] for job in jobs.values()} == {
        "failed",
        "cancelled",
    }


def test_too_few_rows_at_a_decision_end_a_race(empty: House, tmp_path: Path) -> None:
    """As where `max_prompt_tokens` leaves rows out."""
    few = {**tiny("few", steps=2), "data": {**DATA, "holdout": 11}, "eval": {"every": 1}}
    motet.run([few], base="small", directory=tmp_path, engine=ENGINE, quiet=True)
    arrive(empty, tmp_path, source="few")
    empty.part(Races).decide()
    assert "11 held-out rows are too few" in empty.ask("GET", "/v1/races/say").json()["failure"]


def test_a_limit_lets_all_candidates_resume_or_none(empty: House) -> None:
    first, *others = submitted(empty, "say")["jobs"].values()
    empty.ask("POST", "/v1/races/say/pause").raise_for_status()
    assert {empty.ask("GET", f"/v1/jobs/{job}").json()["state"] for job in others} == {"paused"}
    empty.store.change_job(first, state="queued")  # as where its host has not paused it yet
    step = {"step": 0, "loss": 0.1, "tokens_sampled": 30, "tokens_trained": 0}
    empty.recorder.record_step(others[0], step)
    limits = "/v1/tenants/us/limits"
    empty.ask("PUT", limits, "admin", json={"tokens_per_day": 25}).raise_for_status()
    assert "tokens_per_day" in empty.refused(429, "POST", "/v1/races/say/resume")["message"]

    def wanted() -> set[str]:
        rows = [empty.store.job_by_id(job) for job in (first, *others)]
        return {row.wanted for row in rows if row is not None}

    assert wanted() == {"pause"}
    empty.ask("PUT", limits, "admin", json={"tokens_per_day": 1000}).raise_for_status()
    empty.ask("POST", "/v1/races/say/resume").raise_for_status()
    assert wanted() == {"run"}


def test_a_disk_that_is_full_delays_a_decision_and_a_paused_candidate_holds_it(house: House) -> None:
    made = submitted(house, "waits")
    races, jobs = house.part(Races), list(made["jobs"].values())
    for job in jobs:
        house.store.change_job(job, step=9, state="paused")
    assert not any(one.waits for one in races.rows.open()[made["id"]]), "nothing is read for it each second"
    for job in jobs:
        house.recorder.record_state(job, JobState.CANCELLED, "")
    place = house.storage.races / made["id"]
    place.parent.mkdir(exist_ok=True)
    place.write_text("no directory can be made here")
    races.decide()
    assert house.ask("GET", "/v1/races/waits").json()["ended"] is None
    place.unlink()
    races.decide()
    assert house.ask("GET", "/v1/races/waits").json()["ended"] is not None


def test_a_race_whose_record_is_damaged_fails_with_the_reason(
    house: House, says: Motet, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = submitted(house, "damaged")
    path = house.part(Races).path(made["id"], "damaged")
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    house.ask("POST", "/v1/races/damaged/cancel")
    for job in made["jobs"].values():
        house.recorder.record_state(job, JobState.CANCELLED, "")
    house.part(Races).decide()
    told = house.ask("GET", "/v1/races/damaged").json()
    assert "damaged.race.json is damaged" in told["failure"]
    assert str(house.storage.directory) not in told["failure"]
    assert told["ended"] is not None
    monkeypatch.setenv("MOTET_URL", str(house.http.base_url))
    monkeypatch.setenv("MOTET_API_KEY", house.keys["ours"])
    code, out, _ = says("show", "damaged")
    assert (code, "damaged.race.json is damaged" in out) == (0, True)


def test_a_request_has_a_thousand_jobs_with_all_candidates(house: House) -> None:
    jobs = [{"job": racing(f"crowd-{number}", race={**RACE, "candidates": 64})} for number in range(16)]
    told = house.refused(400, "POST", "/v1/submissions", json={"jobs": jobs})["message"]
    assert "job crowd-15: race: this request has more than 1000 jobs" in told
    house.refused(404, "GET", "/v1/races/crowd-0")
    jobs = [*jobs[:15], *({"job": tiny(f"plain-{number}")} for number in range(41))]
    assert (
        "job plain-40: race: this request has"
        in house.refused(400, "POST", "/v1/submissions", json={"jobs": jobs})["message"]
    )


def test_submit_takes_the_option_of_run(
    tmp_path: Path, house: House, says: Motet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTET_URL", str(house.http.base_url))
    monkeypatch.setenv("MOTET_API_KEY", house.keys["ours"])
    plain = {name: value for name, value in racing("typed", steps=40).items() if name != "race"}
    code, out, _ = says("submit", job_file(tmp_path, plain), "--race")
    assert code == 0
    assert out.count("typed-c=") == 8
    assert "typed-c=00" in says("ls", "--limit", "0")[1]
    code, out, _ = says("show", "typed")
    assert code == 0
    assert "0 of 2 decisions are made" in out
    says("cancel", "typed")
    jobs = house.ask("GET", "/v1/races/typed").json()["jobs"].values()
    assert {house.ask("GET", f"/v1/jobs/{job}").json()["state"] for job in jobs} == {"cancelled"}
    assert "there is no job 'untyped'" in says("cancel", "untyped")[2]
