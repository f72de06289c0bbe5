"""Several bases of which some have servers: each asks its own, says when they are away, and what it used is told by base."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from motet.config import EngineConfig, HostConfig, LaunchConfig, RolloutConfig, RunConfig
from motet.config.engine import ClusterConfig
from motet.config.jobfile import load_service
from motet.config.service import ANY_SIZE, Largest, ServiceConfig
from motet.core.errors import ConfigError
from motet.core.types import JobState, Wanted
from motet.hosts.host_link import HostChild, HostHandlers
from motet.hosts.hosts import Hosts
from motet.hosts.launch import load
from motet.hosts.messages import (
    AddJob,
    HostReady,
    JobChanged,
    Released,
    SetRule,
    StartHost,
    SteerJob,
    UsageWindow,
)
from motet.hosts.process import away_seconds
from motet.hosts.ray_hosts import cores_and_gpus
from motet.hosts.running import run_config
from motet.hosts.starts import launcher, starts_of
from motet.model.find import cache_directory
from motet.runtime.slots import Rule
from motet.service.adapters.adapters import Adapters
from motet.service.app import create_app
from motet.service.database.tenants import Principal
from motet.service.jobs.submissions import GivenJob
from motet.service.settings import Settings
from motet.service.tenants.ledger import Ledger
from tests.support import inside
from tests.support.base_servers import BaseServer, base_servers
from tests.support.commands import Motet
from tests.support.house import open_house
from tests.support.service_run import Json, Service, serving, tiny
from tests.support.waiting import PATIENCE, until

ENGINE = {"threads": 1}
SAMPLING = {"samplers": 0, "max_rows": 64}
ASKED: Any = [{"role": "user", "content": "Sort the letters of DCBA."}]
START = StartHost("small", "", {}, {}, {}, [], 1.0, ANY_SIZE)


# --- a service with servers of one of its bases ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(twin: Path) -> Iterator[BaseServer]:
    """One of the twin."""
    with base_servers(load(str(twin), EngineConfig(threads=1)), 1) as (one,):
        yield one


def rollout(server: BaseServer, place: Path) -> Json:
    """Of the base that has the server; nobody waits long for it."""
    return {"engine": "vllm", "urls": [server.url], "directory": str(place), "patience_seconds": 60.0}


@pytest.fixture(scope="module")
def service(server: BaseServer, twin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The small base samples itself, its twin has the server."""
    place = tmp_path_factory.mktemp("served")
    bases = {"small": "small", "twin": {"base": str(twin), "rollout": rollout(server, place / "versions")}}
    (place / "bases.yaml").write_text(yaml.safe_dump({"engine": {**ENGINE, **SAMPLING}, "bases": bases}))
    speeds, named = cache_directory() / "speeds", f"{twin.name.replace('-', '_')}-*.txt"
    for known in speeds.glob(named):
        known.unlink()
    with serving(place / "service", "--config", str(place / "bases.yaml"), base=None) as found:
        found.until(lambda: not found.ask("GET", "/readyz")["message"])
        found.until(lambda: any(speeds.glob(named)))  # how fast the server is was measured by asking it
        yield found


@pytest.mark.slow
def test_jobs_answers_and_usage_are_of_the_servers_of_their_base(
    service: Service, server: BaseServer, twin: Path, tmp_path: Path, says: Motet, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = server.completions
    service.submit(tiny("own"))
    assert service.ended("own") == "succeeded", service.job("own")["message"]
    assert (server.completions, server.loads) == (asked, []), "a job of the other base asked the server"
    service.submit(tiny("served", base="twin"))
    assert service.ended("served") == "succeeded", service.job("served")["message"]
    assert server.completions > asked
    assert {name.partition(".")[0] for name in server.loads} == {service.job("served")["id"]}
    alone = RunConfig.model_validate(
        {
            "base": str(twin),
            "engine": ENGINE,
            "rollout": rollout(server, tmp_path / "versions"),
            "jobs": [tiny("served")],
            "run": str(tmp_path / "run"),
        }
    )
    adapter = run_config(alone).jobs["served"].adapter
    assert service.weights("served") == (adapter / "adapter_model.safetensors").read_bytes()

    said = {"messages": ASKED, "max_tokens": 4, "temperature": 0}
    for model, there in (("small", 0), ("own@latest", 0), ("twin", 1), ("served@latest", 1)):
        asked = server.completions
        assert service.ask("POST", "/v1/chat/completions", json={**said, "model": model})["choices"]
        assert server.completions - asked == there, model

    def used() -> dict[str, Json]:
        lines = service.ask("GET", "/v1/usage")["data"]
        return {f"{one['name'] or one['kind']} on {one['base']}": one for one in lines}

    service.until(lambda: {"completions on small", "completions on twin"} <= set(used()))
    assert set(used()) == {f"{kind} on {base}" for base in ("small", "twin") for kind in ("completions", "idle")} | {
        "own on small", "served on twin",
    }  # fmt: skip
    by_base = {one["base"]: one for one in service.ask("GET", "/v1/usage?by=base")["data"] if one["tenant"]}
    for base, job in (("small", "own on small"), ("twin", "served on twin")):
        assert by_base[base]["tokens_trained"] == used()[job]["tokens_trained"] > 0
    assert all("base" not in one or one["base"] is None for one in service.ask("GET", "/v1/usage?by=tenant")["data"])
    monkeypatch.setenv("MOTET_URL", service.url)
    assert re.search(r"served .* twin *$", says("usage")[1], re.M)
    assert re.search(r"^ *local +[\d,]+ .* twin *$", says("usage", "--by", "tenant", "--by", "base")[1], re.M)


@pytest.mark.slow
def test_a_base_whose_servers_are_away_says_so_and_others_go_on(service: Service, server: BaseServer) -> None:
    said = {"messages": ASKED, "max_tokens": 4, "temperature": 0}
    service.submit(tiny("cut-off", 8, base="twin"))
    service.reaches("cut-off", 1)
    server.go()
    try:
        service.until(lambda: "no server answers" in service.ask("GET", "/readyz")["message"], PATIENCE)
        message = service.ask("GET", "/readyz")["message"]
        assert message.startswith("twin: ")
        assert server.url in message
        refused = service.refused(503, "POST", "/v1/chat/completions", json={**said, "model": "twin"})
        assert server.url in refused["message"]
        service.submit(tiny("beside"))
        assert service.ended("beside") == "succeeded", service.job("beside")["message"]
        assert service.ask("POST", "/v1/chat/completions", json={**said, "model": "small"})["choices"]
    finally:
        server.come_back()
    assert service.ended("cut-off") == "succeeded", service.job("cut-off")["message"]
    assert service.ask("POST", "/v1/chat/completions", json={**said, "model": "twin"})["choices"]
    assert not service.ask("GET", "/readyz")["message"]
    found = service.get("/metrics").text
    assert 'motet_device_train_seconds{base="twin",host="1"}' in found


# --- settings ---------------------------------------------------------------------------------------------------------------


def hosts_of(config: ServiceConfig) -> list[StartHost]:
    """The first messages of all hosts."""
    hosts = Settings("", Path(), config=config).hosts
    return starts_of(*((START, host) for host in hosts.values()))


def test_each_base_has_its_own_servers_or_those_that_the_file_launches() -> None:
    servers = {"engine": "vllm", "urls": ["http://a:1", "http://b:1", "http://c:1"]}
    config = ServiceConfig.model_validate(
        {
            "engine": {**SAMPLING, "slots": 3, "kv_memory_fraction": 0.4},
            "bases": {"own": {"base": "/o", "hosts": 2}, "served": {"base": "/s", "hosts": 2, "rollout": servers}},
        }
    )
    made = hosts_of(config)
    assert [one.rollout["urls"] for one in made] == [[], [], ["http://a:1", "http://c:1"], ["http://b:1"]]
    engines = [EngineConfig.model_validate(one.engine) for one in made]
    assert [one.samplers for one in engines] == [0, 0, "auto", "auto"]  # what servers do not read is not theirs
    assert [one.kv_memory_fraction for one in engines[:2]] == [0.2, 0.2], "hosts with servers have no keys and values"
    assert {one.slots for one in engines} == {3}

    launch = {"engine": "vllm", "launch": {"devices": ["0", "1", "2"]}}
    config = ServiceConfig.model_validate({"rollout": launch, "bases": {"a": {"base": "/a", "hosts": 2}, "b": "/b"}})
    assert [one.rollout["launch"]["devices"][0] for one in hosts_of(config)] == ["0", "1", "2"]
    two = {"engine": "vllm", "launch": {"devices": ["0", "1", "2"], "replicas": 2, "gpu_memory_utilization": 0.4}}
    config = ServiceConfig.model_validate(
        {"rollout": launch, "bases": {"a": {"base": "/a", "rollout": two}, "b": "/b"}}
    )
    first, second = (one.rollout["launch"]["devices"] for one in hosts_of(config))
    assert (first[:2], second[:1]) == (["0", "1"], ["2"]), "also where something else differs"


def test_servers_of_two_bases_and_settings_without_effect_are_refused() -> None:
    servers = {"engine": "vllm", "urls": ["http://a:1"]}
    with pytest.raises(ValidationError, match=r"http://a:1 is for.*a server has one base"):
        ServiceConfig.model_validate({"rollout": servers, "bases": {"a": "/a", "b": "/b"}})
    with pytest.raises(ValidationError, match=r"engine\.samplers has no effect here"):
        ServiceConfig.model_validate({"bases": {"a": {"base": "/a", "samplers": 0, "rollout": servers}}})
    with pytest.raises(ValidationError, match=r"rollout\.rows has no effect here"):
        ServiceConfig.model_validate({"bases": {"a": {"base": "/a", "rollout": {"rows": 3}}}})


def test_a_file_may_say_for_one_base_what_the_servers_of_another_do_not_read(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    shared = "engine: {max_rows: 8}\nrollout: {engine: vllm, launch: {}}\n"
    file.write_text(f"{shared}bases: {{a: {{base: small, rollout: embedded}}, b: small}}")
    bases = load_service(file).bases
    assert (bases["a"].max_rows, bases["b"].max_rows) == (8, EngineConfig().max_rows)
    for alone in ("bases: {b: small}", ""):
        file.write_text(shared + alone)
        with pytest.raises(ConfigError, match=r"engine\.max_rows has no effect here"):
            load_service(file)


def test_a_job_may_be_as_large_as_the_servers_of_its_base_are_started_for(tmp_path: Path) -> None:
    """Hosts of two bases with different limits: a rank that one refuses goes to the other, into any of its slots."""
    bases = {
        name: {"base": "small", "slots": slots, "rollout": {"engine": "vllm", "launch": {"max_rank": rank}}}
        for name, slots, rank in (("narrow", 4, 8), ("wide", 2, 64))
    }
    with open_house(tmp_path, bases={"own": "small", **bases}) as house:
        hosts = {host.base: host for host in house.part(Hosts).hosts}
        assert {name: (host.slots, host._start.largest.rank) for name, host in hosts.items()} == {
            "own": (16, None), "narrow": (4, 8), "wide": (2, 64),
        }  # fmt: skip
        large = {**tiny("large"), "adapter": {"rank": 32}}
        refused = house.refused(400, "POST", "/v1/jobs", json={**large, "base": "narrow"})["message"]
        assert "adapter.rank: 32 is more than 8" in refused
        assert "rollout.launch.max_rank" in refused
        for base in ("wide", "own"):
            assert house.ask("POST", "/v1/jobs", json={**large, "name": base + "-large", "base": base}).is_success
    limited = ServiceConfig.model_validate({"limits": {"rank": 16}})
    servers = RolloutConfig(engine="vllm", launch=LaunchConfig())
    assert limited.largest(HostConfig(base="small", rollout=servers)) == Largest(16, 4)


def test_a_launched_server_has_the_time_that_it_takes_to_start() -> None:
    given = RolloutConfig(engine="vllm", urls=["http://a:1"])
    launched = RolloutConfig(engine="vllm", launch=LaunchConfig(), patience_seconds=900)
    assert (away_seconds(given), away_seconds(given.model_copy(update={"patience_seconds": 6.0}))) == (60.0, 3.0)
    assert 600 < away_seconds(launched) < 900, "a host ends before its jobs have waited in vain, and not sooner"


def test_ray_is_asked_for_the_gpus_of_launched_servers() -> None:
    def asked(device: str, **launch: Any) -> int:
        engine = EngineConfig(threads=2, device=device)
        servers = RolloutConfig(engine="vllm", launch=LaunchConfig(**launch)) if launch else RolloutConfig()
        (start,) = starts_of((START, HostConfig(base="small", engine=engine, rollout=servers)))
        return cores_and_gpus(start)[1]

    assert (asked("cpu"), asked("cuda")) == (0, 1)
    assert asked("cpu", max_rank=8) == 0
    assert asked("cpu", gpu_memory_utilization=0.9) == 1
    assert asked("cpu", tensor_parallel=8, gpu_memory_utilization=0.9) == 8
    assert (asked("cuda", max_rank=8), asked("cuda", tensor_parallel=2)) == (1, 2)
    devices = RolloutConfig(engine="vllm", launch=LaunchConfig(devices=["0"]))
    with pytest.raises(ConfigError, match=r"leave rollout\.launch\.devices out"):
        launcher(
            ClusterConfig(launcher="ray"), HostConfig(base="small", engine=EngineConfig(threads=1), rollout=devices)
        )


# --- while a base is down ----------------------------------------------------------------------------------------------------


async def _no_machine(start: StartHost, log: Path) -> HostChild:
    await asyncio.Event().wait()
    raise AssertionError


def test_open_jobs_are_read_again_only_where_one_could_be_placed(tmp_path: Path) -> None:
    """Not at each event of a job while others wait for a base that is down, or for their tenant's turn."""
    reads = [0]
    jobs = [
        AddJob({"name": name}, Wanted.RUN, 0, tenant, Rule(running=1), 1, base)
        for name, tenant, base in (("a1", "ann", "a"), ("a2", "ann", "a"), ("b1", "ben", "b"))
    ]

    def open_jobs() -> list[AddJob]:
        reads[0] += 1
        return jobs

    async def go() -> None:
        made = [StartHost(base, "", {}, {}, {}, [], 1.0, ANY_SIZE, serves=base) for base in "ab"]
        client = Hosts(made, tmp_path, _no_machine)
        handlers = HostHandlers(open_jobs, lambda _: None)
        client.gather_seconds = 0.0
        client.start(handlers)
        here, down = client.hosts
        here.ready = True
        inside.hear(client, here, HostReady([]))
        await until(lambda: client.jobs.on(here) == 1)
        assert reads[0] == 1
        for _ in range(20):
            inside.hear(client, here, JobChanged("a1", JobState.RUNNING, ""))
            await asyncio.sleep(0.005)
        assert reads[0] == 1, "all open jobs were read at each event"
        jobs.pop(0)
        inside.hear(client, here, JobChanged("a1", JobState.SUCCEEDED, ""))  # its tenant may have another out
        await until(lambda: client.jobs.on(here) == 1 and reads[0] == 2)
        down.ready = True
        inside.hear(client, down, HostReady([]))
        await until(lambda: client.jobs.on(down) == 1)
        await client.kill()

    asyncio.run(go())


def test_what_is_asked_of_a_job_counts_although_its_host_lets_it_go_while_open_jobs_are_read(tmp_path: Path) -> None:
    """A pause goes to the host that has the job by then; what was read before says that the job is to run."""
    reads: list[Wanted] = []

    async def go() -> None:
        client, loop = Hosts([START], tmp_path, _no_machine), asyncio.get_running_loop()
        (host,) = client.hosts

        def open_jobs() -> list[AddJob]:
            reads.append(Wanted.PAUSE if len(reads) > 1 else Wanted.RUN)
            read = [AddJob({"name": "moves"}, reads[-1], 0, "ann", Rule(running=1), 1, "")]
            if len(reads) == 2:  # somebody pauses it now, and its host lets it go
                client.send(SteerJob("moves", Wanted.PAUSE))
                loop.call_soon_threadsafe(inside.hear, client, host, Released("moves"))
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
            return read

        client.start(HostHandlers(open_jobs, lambda _: None))
        host.ready = True
        inside.hear(client, host, HostReady([]))
        await until(lambda: client.has("moves"))
        client.send(SetRule("ann", Rule(running=2)))  # the open jobs are read once more
        await until(lambda: len(reads) >= 3 and client.has("moves"))
        (job,) = client.jobs._jobs.values()
        assert job.state is JobState.PAUSED, "it runs, although its owner has paused it"
        await client.kill()

    asyncio.run(go())


def test_a_base_that_comes_while_the_database_is_away_takes_questions(tmp_path: Path) -> None:
    def open_jobs() -> list[AddJob]:
        raise OSError("the database is away")

    async def go() -> None:
        client = Hosts([StartHost("a", "", {}, {}, {}, [], 1.0, ANY_SIZE, serves="a")], tmp_path, _no_machine)
        client.start(HostHandlers(open_jobs, lambda _: None))
        client.hosts[0].ready = True
        inside.hear(client, client.hosts[0], HostReady([]))
        async with asyncio.timeout(PATIENCE):
            await client.there["a"].wait()
        await client.kill()

    asyncio.run(go())


# --- from several bases to one -----------------------------------------------------------------------------------------------

TWO: Json = {"small": "small", "math": {"base": "/models/math"}}


def test_what_was_of_another_base_is_not_taken_for_the_only_one(tmp_path: Path) -> None:
    """Neither jobs nor adapters, which would fit by their shapes."""
    with open_house(tmp_path, bases=TWO) as house:
        assert house.ask("POST", "/v1/jobs", json=tiny("on-math", base="math")).is_success
        house.part(Adapters)  # `brought` and `lent` have no base: they are of the first
        store = house.store
        who = Principal.member_of(store.tenants.made("us").id)
        ended = store.job(who, "ended")
        assert ended is not None
        store.change_job(ended.id, base="math")

    def opened(base: str, **bases: Any) -> Any:
        return create_app(Settings(base, tmp_path, config=ServiceConfig(**bases), open_to_all=True)).state.service

    alone = opened("small")
    reason = "its base 'math' is no longer served"
    with pytest.raises(ConfigError, match=reason):
        alone.adapters.of_model(who, "ended@best")
    assert alone.adapters.of_model(who, "brought").base == "small"
    assert alone.handover.open_jobs() == []
    waiting = alone.store.job(who, "on-math")
    assert (waiting.state, reason in waiting.message) == ("queued", True)
    start = {"init": "ended@best", "rank": 32, "alpha": 32}
    with pytest.raises(ConfigError, match=reason):
        alone.submissions.check(who, [GivenJob(tiny("on", adapter=start))])
    other = opened("/models/math")
    assert other.adapters.of_model(who, "ended@best").base == "/models/math", "the same base under its path"
    assert [one.job["name"] for one in other.handover.open_jobs()] == [waiting.id]
    with pytest.raises(ConfigError, match="its base 'small' is no longer served"):
        other.adapters.of_model(who, "brought")
    moved = opened("", bases={"math": "/elsewhere/math"})
    assert moved.adapters.of_model(who, "ended@best").base == "math", "the operator says where it is now"


def test_usage_of_a_base_is_told_under_the_name_that_it_has(tmp_path: Path) -> None:
    with open_house(tmp_path) as house:
        us = house.store.tenants.made("us").id
        for base in ("", "small"):
            house.part(Ledger).count_completion(us, base, 2, 3)
        house.part(Ledger).flush()
        assert [one["tokens_prompt"] for one in house.ask("GET", "/v1/usage").json()["data"]] == [4]
        assert {one["base"] for one in house.ask("GET", "/v1/usage").json()["data"]} == {None}
        assert house.ask("GET", "/v1/usage?by=base").json()["data"][0]["base"] == "small"
    with open_house(tmp_path / "several", bases=TWO) as house:
        us = house.store.tenants.made("us").id
        for base, tokens in (("", 1), ("small", 2), ("math", 4), ("/models/math", 8), ("gone", 16)):
            house.part(Ledger).count_completion(us, base, tokens, 0)
        house.part(Ledger).flush()
        for number, base in enumerate(TWO):  # of two hosts
            house.recorder.record_usage(UsageWindow(f"host {number}", 1, {f"answers/{us}": 10**6, "": 10**6}, base))
        told = {one["base"]: one["tokens_prompt"] for one in house.ask("GET", "/v1/usage").json()["data"]}
        assert told == {"small": 3, "math": 12, "gone": 16}
        seconds = {one["base"]: one["device_seconds"] for one in house.ask("GET", "/v1/usage").json()["data"]}
        assert seconds == {"small": 1.0, "math": 1.0, "gone": 0.0}
        everybody = house.ask("GET", "/v1/usage?by=base", "admin").json()["data"]
        assert [(one["kind"], one["base"]) for one in everybody if not one["tenant"]] == [
            ("idle", "math"), ("idle", "small"),
        ]  # fmt: skip
        assert house.ask("GET", "/v1/usage?format=csv").text.splitlines()[0].endswith(",base,submitter,account")


@pytest.mark.slow
def test_the_dashboard_tells_the_base_of_jobs_and_of_device_time(tmp_path: Path) -> None:
    pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    from tests.support.browser import CHROMIUM, browsing, watched

    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt install chromium")
    with open_house(tmp_path, bases=TWO) as house:
        made = house.ask("POST", "/v1/jobs", json=tiny("sums", base="math")).json()["id"]
        for number, base in enumerate(TWO):
            used = {"": 10**6, **({made: 2 * 10**6} if base == "math" else {})}
            house.recorder.record_usage(UsageWindow(f"host {number}", 1, used, base))
        url = str(house.http.base_url).rstrip("/")
        with browsing() as browser, watched(browser, url, expected=("503",)) as page:  # no engine is started
            page.goto(url)
            page.get_by_label("API key").fill(house.keys["admin"])
            page.get_by_role("button", name="Sign in with this key").click()
            row = page.get_by_role("row", name="sums")
            row.wait_for()
            assert row.locator("td[data-label=base]").inner_text() == "math"
            page.get_by_text("idle · small").wait_for()
            told = page.locator(".keys").last.inner_text()
            assert [name in told for name in ("sums · math 2 s", "idle · math 1 s", "idle · small 1 s")] == [True] * 3


# --- who is told where things lie ---------------------------------------------------------------------------------------------


def test_who_has_no_key_is_not_told_where_things_lie(tmp_path: Path) -> None:
    with open_house(tmp_path, bases=TWO) as house:
        house.part(Hosts).hosts[1].failure = "/models/math cannot be loaded by http://10.0.0.7:8000"
        for key in ("ours", "none"):
            answer = house.ask("GET", "/readyz", key)
            assert answer.status_code == 503
            assert (("/models" in answer.text), ("10.0.0.7" in answer.text)) == (key == "ours", key == "ours")
            assert list(answer.json()["bases"]) == ["small", "math"]
        there = house.part(Hosts).there["small"]
        house.app.state.loop.call_soon_threadsafe(there.set)
        assert house.ask("GET", "/readyz", "none").json()["message"] == "math: is not there yet"
        assert "10.0.0.7" in house.ask("GET", "/readyz").json()["message"]
        house.store.close()
        (database,) = tmp_path.glob("**/*.db")
        database.rename(database.with_suffix(".away"))
        database.mkdir()
        away = house.ask("GET", "/readyz", "none").json()
        assert "was removed or replaced" in away["message"]
        assert str(tmp_path) not in away["message"]
        assert away["bases"] == {"small": "small", "math": "math"}
        database.rmdir()
        database.with_suffix(".away").rename(database)
