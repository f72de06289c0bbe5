"""One service over several bases: each job on the base it names, with the bytes of that base alone, whatever dies."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import yaml
from pydantic import ValidationError

from motet.config import HostConfig, budgets
from motet.config.engine import ClusterConfig, EngineConfig
from motet.config.jobfile import load_service, validate
from motet.config.service import ANY_SIZE, ServiceConfig
from motet.core.device import Device
from motet.core.errors import ConfigError, StoreError
from motet.core.types import Message, SamplingParams, Wanted
from motet.hosts.answers import Answers
from motet.hosts.assignments import Assignments
from motet.hosts.host_link import HostLink
from motet.hosts.launch import load
from motet.hosts.messages import AddJob, Complete, FromHost, StartHost, Tokens
from motet.hosts.placement import HostLoad, Move, moved, placed
from motet.hosts.running import run_config
from motet.hosts.starts import launcher, starts_of
from motet.rollout.embedded import EmbeddedEngine
from motet.runtime.scheduler import FairScheduler
from motet.runtime.slots import Claim, Rule
from motet.service.app import create_app
from motet.service.bases import SMALL_BASE, Bases
from motet.service.database.tables import UploadedAdapter
from motet.service.database.tenants import Principal
from motet.service.jobs.submissions import GivenJob
from motet.service.settings import Settings
from motet.service.tinker.parts import PREFIX
from tests.support.adapter_files import run_alone, weights_of
from tests.support.base_servers import base_servers
from tests.support.commands import Motet
from tests.support.house import House, open_house
from tests.support.ray_nodes import cluster_of
from tests.support.service_run import Json, Service, host_process, serving, tiny
from tests.support.tinker_run import job_of, run_script
from tests.support.waiting import PATIENCE

ENGINE = {"samplers": 0, "threads": 1}
STEPS = 12
JOBS = {"a": "small", "b": "twin", "c": "small", "d": "twin"}
"""Jobs, and their bases."""
ASKED: Any = [{"role": "user", "content": "Sort the letters of DCBA."}]


def job(name: str, steps: int = STEPS) -> Json:
    """Of some seconds."""
    return tiny(name, steps=steps, optimizer={"lr": 1e-3})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, twin: Path) -> dict[str, bytes]:
    """Each job's adapter, by `motet run` on its base."""
    made: dict[str, bytes] = {}
    for base, place in (("small", "small"), ("twin", str(twin))):
        jobs = [job(name) for name, its in JOBS.items() if its == base]
        made |= weights_of(run_alone(tmp_path_factory.mktemp("alone"), *jobs, base=place))
    assert len(set(made.values())) == len(JOBS)
    return made


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.soak)])
def hosts(request: pytest.FixtureRequest) -> int:
    """How many the small base has."""
    return int(request.param)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, twin: Path, hosts: int) -> Iterator[Service]:
    """One host of the twin after those of the small base."""
    config = tmp_path_factory.mktemp("served") / "bases.yaml"
    bases = {"small": {"base": "small", "hosts": hosts}, "twin": str(twin)}
    config.write_text(yaml.safe_dump({"engine": ENGINE, "bases": bases}))
    with serving(config.parent / "service", "--config", str(config), keys=True, base=None) as found:
        found.become(found.admin_key)
        found.until(lambda: not found.ask("GET", "/readyz")["message"])
        yield found


@pytest.fixture(scope="module")
def tenants(service: Service) -> dict[str, str]:
    """A key of each of two tenants."""
    return {tenant: service.key_for(tenant) for tenant in ("ann", "ben")}


def hosts_now(service: Service) -> dict[str, int]:
    """Which host has each job that runs, as an admin sees it."""
    running = [one for one in service.ask("GET", "/v1/jobs")["data"] if one["progress"] is not None]
    return {one["name"]: one["progress"]["host"] for one in running}


@dataclass
class Story:
    """Which host had each job before the host of one of them died, and which have had it since."""

    victim: str
    first: dict[str, int]
    since: dict[str, set[int]]


@pytest.fixture(scope="module")
def story(service: Service, tenants: dict[str, str], hosts: int) -> Story:
    """The jobs of two tenants while the only host of the twin dies, or one of two of the small base."""
    for engine in service.engines():
        engine.suspend()  # none of the jobs is done before the last one is there
    for name, base in JOBS.items():
        service.become(tenants["ann" if name in "ab" else "ben"])
        assert service.submit({**job(name), **({} if base == "small" else {"base": base})})["base"] == base
    for engine in service.engines():
        engine.resume()
    service.become(service.admin_key)
    first: dict[str, int] = {}

    def all_begun() -> bool:
        """The first of them may have ended before the last one begins."""
        for name, host in hosts_now(service).items():
            first.setdefault(name, host)
        return len(first) == len(JOBS)

    service.until(all_begun)
    story = Story("b" if hosts == 1 else "c", first, {name: set() for name in JOBS})
    service.reaches(story.victim, 1)
    dying = story.first[story.victim]
    host_process(service.directory / "run", dying).kill()
    if hosts == 1:
        others_go_on(service)

    def ended() -> bool:
        for name, host in hosts_now(service).items():
            story.since[name].add(host)
        return all(service.job(name)["ended"] for name in JOBS)

    service.until(ended)
    return story


def others_go_on(service: Service) -> None:
    """The twin's only host is away: that is told, and the other base answers."""
    service.until(lambda: "twin" in service.ask("GET", "/readyz")["message"], PATIENCE)
    said = {"model": "small", "messages": ASKED, "max_tokens": 4, "temperature": 0}
    assert service.ask("POST", "/v1/chat/completions", json=said)["choices"]
    service.refused(503, "POST", "/v1/chat/completions", json={**said, "model": "twin"})


@pytest.mark.cell("several bases", "embedded, hosts 2")
def test_each_job_trains_on_its_base_and_a_host_that_dies_loses_nothing(
    service: Service, story: Story, alone: dict[str, bytes], hosts: int
) -> None:
    """Jobs whose base has no other host wait for it; those of the other base do not notice."""
    service.become(service.admin_key)
    dead = JOBS[story.victim]
    for name, base in JOBS.items():
        assert service.job(name)["state"] == "succeeded", service.job(name)["message"]
        assert service.weights(name) == alone[name], f"not the bytes of {base} alone"
        assert {story.first[name], *story.since[name]} <= ({hosts} if base == "twin" else {*range(hosts)})
        assert service.steps(name) == list(range(STEPS + 1))
        if base != dead:
            assert service.states(name).count("running") == 1
    assert {story.first["a"], story.first["c"]} == {*range(hosts)}
    assert service.states(story.victim).count("running") >= 2
    service.until(lambda: starts(service)[str(story.first[story.victim])] == (dead, 2.0))
    assert starts(service)[str(hosts)][0] == "twin"


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [
        pytest.param("shards", marks=pytest.mark.cell("several bases", "shards 2")),
        pytest.param("ray", marks=pytest.mark.cell("several bases", "Ray")),
        pytest.param("sglang", marks=pytest.mark.cell("several bases", "SGLang (fake)")),
    ],
)
def test_bases_in_shards_on_nodes_and_on_servers_have_the_bytes_of_each_alone(
    where: str, twin: Path, tmp_path: Path
) -> None:
    engine: Json = {**ENGINE, "kernels": "torch"}
    if where == "sglang":  # servers sample
        del engine["samplers"]
    bases: dict[str, Json] = {"small": {"base": "small"}, "twin": {"base": str(twin)}}
    with contextlib.ExitStack() as stack:
        for name, one in bases.items() if where == "sglang" else ():
            loaded = load(one["base"], EngineConfig(threads=1, kernels="torch"))
            (server,) = stack.enter_context(base_servers(loaded, 1, where))
            one["rollout"] = {"engine": where, "urls": [server.url], "directory": str(tmp_path / f"served-{name}")}
        names = dict(zip("ab", bases, strict=True))
        alone = {
            name: weights_of(run_config(validate({
                **bases[base], "run": str(tmp_path / name), "engine": engine, "jobs": [job(name, 3)]
            }, "the test")))[name]
            for name, base in names.items()
        }  # fmt: skip
        cluster = stack.enter_context(cluster_of("ray" if where == "ray" else "local"))
        shard = 2 if where == "shards" else 1
        config = {"engine": {**engine, "shard": shard}, "bases": bases, "cluster": cluster}
        (tmp_path / "bases.yaml").write_text(yaml.safe_dump(config))
        with serving(tmp_path / "service", "--config", str(tmp_path / "bases.yaml"), base=None) as service:
            for name, base in names.items():
                service.submit({**job(name, 3), "base": base})
            for name, base in names.items():
                assert service.ended(name) == "succeeded", service.job(name)["message"]
                assert service.weights(name) == alone[name], f"not the bytes of {base} alone"


def starts(service: Service) -> dict[str, tuple[str, float]]:
    """The base of each host, and how often it was started."""
    found = re.findall(r'^motet_engine_starts\{base="(\w+)",host="(\d)"\} (\S+)$', service.get("/metrics").text, re.M)
    return {host: (base, float(count)) for base, host, count in found}


def said_alone(base: Any, adapter: Path | None) -> tuple[str, list[float]]:
    """What an engine says that has this base and no other."""
    device, sent = Device(), list[FromHost]()
    engine = EmbeddedEngine(base, device, max_rows=1, kv_tokens=1024, prefill_tokens=256)
    shared: Any = SimpleNamespace(engine=engine, scheduler=FairScheduler(1), engine_suffix="x")
    answers = Answers(base, shared, 1024, sent.append)
    where, sampling = None if adapter is None else str(adapter), SamplingParams(max_tokens=12)
    asyncio.run(
        answers.answer(
            Complete("any", where, 1, 7, False, True, sampling, messages=[Message("user", ASKED[0]["content"])])
        )
    )
    device.close()
    (answer,) = [message.chunk for message in sent if isinstance(message, Tokens)]
    return answer.text, answer.logprobs.tolist()


def test_models_answer_on_their_own_base(
    service: Service, tenants: dict[str, str], story: Story, twin: Path, tmp_path: Path
) -> None:
    """What they say is what an engine says that has that base alone."""
    service.become(service.admin_key)
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key=tenants["ann"], max_retries=0)

    def said(model: str) -> tuple[str, list[float]]:
        answer: Any = client.chat.completions.create(
            model=model,
            messages=ASKED,
            max_tokens=12,
            seed=7,
            logprobs=True,
        )
        choice = answer.choices[0]
        return choice.message.content, [token.logprob for token in choice.logprobs.content]

    models = {one.id: getattr(one, "base", None) for one in client.models.list()}
    assert [models["small"], models["twin"], models["a@latest"], models["b@latest"]] == [None, None, "small", "twin"]
    assert "c@best" not in models
    here = {name: said(name) for name in ("small", "twin", "a@latest", "b@latest")}
    assert len({str(one) for one in here.values()}) == 4
    for base, name, place in (("small", "a", "small"), ("twin", "b", str(twin))):
        loaded = load(place, EngineConfig(threads=1))
        assert here[base] == said_alone(loaded, None)
        (tmp_path / name).mkdir()
        for file, content in service.adapter(name).items():
            (tmp_path / name / file).write_bytes(content)
        assert here[f"{name}@latest"] == said_alone(loaded, tmp_path / name)


def test_people_see_and_choose_the_base(
    service: Service,
    tenants: dict[str, str],
    story: Story,
    twin: Path,
    tmp_path: Path,
    says: Motet,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service.become(tenants["ann"])
    monkeypatch.setenv("MOTET_URL", service.url)
    monkeypatch.setenv("MOTET_API_KEY", tenants["ann"])
    _, shown, _ = says("ls")
    assert re.search(r"\bbase\b", shown)
    assert re.search(r"^ *b .*twin", shown, re.M)
    assert "base      twin" in says("show", "b")[1]
    file = tmp_path / "jobs.yaml"
    for base, name in ((str(twin), "by-path"), ("twin", "by-name")):
        file.write_text(yaml.safe_dump({"base": base, "jobs": [tiny(name, steps=1)]}))
        assert says("submit", file)[0] == 0
        assert service.job(name)["base"] == "twin"
    file.write_text(yaml.safe_dump({"base": "other", "jobs": [tiny("no", steps=1)]}))
    code, _, refused = says("submit", file)
    assert code
    assert "'small', 'twin'" in refused

    start = {"init": "b@latest", **{name: service.job("b")["spec"]["adapter"][name] for name in ("rank", "alpha")}}
    on = service.refused(400, "POST", "/v1/jobs", json=tiny("wrong", adapter=start))["message"]
    assert "'b@latest' is an adapter on the base 'twin', and the job is for 'small'" in on
    service.submit({**tiny("right", adapter=start), "base": "twin"})
    for name in ("right", "by-path", "by-name"):
        assert service.ended(name) == "succeeded", service.job(name)["message"]


def test_the_tinker_client_trains_and_samples_on_the_base_it_names(service: Service, tenants: dict[str, str]) -> None:
    found = run_script(service, "two_bases", tenants["ben"])
    assert found["supported"] == ["small", "twin"]
    assert found["bases"] == {"small": "small", "twin": "twin"}
    assert found["sampled"]["small"] != found["sampled"]["twin"]
    assert found["adapted"]["small"] != found["adapted"]["twin"]
    assert "is of a model on another base, 'small'" in found["across"]
    service.become(tenants["ben"])
    for base, model in found["models"].items():
        assert service.job(job_of(model))["base"] == base


# --- names and bounds, without an engine ------------------------------------------------------------------------------------

TWO: Json = {"small": "small", "twin": {"base": "/models/twin", "slots": 4}}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """The routes of a service with two bases."""
    with open_house(tmp_path_factory.mktemp("house"), bases=TWO) as found:
        yield found


def test_a_job_is_on_the_base_it_names_or_on_the_first(house: House) -> None:
    asked = {None: "small", "small": "small", "twin": "twin", "/models/twin": "twin"}
    for number, (given, base) in enumerate(asked.items()):
        tree = {**tiny(f"on-{number}"), **({} if given is None else {"base": given})}
        assert house.ask("POST", "/v1/jobs", json=tree).json()["base"] == base
    for odd in ("other", "", 5, ["twin"], {"twin": 1}):
        message = house.refused(400, "POST", "/v1/jobs", json=tiny("odd", base=odd))["message"]
        assert message.endswith("is not served here; there are 'small', 'twin'")
    text = {"text": yaml.safe_dump({"base": "twin", "jobs": [tiny("one"), tiny("two")]})}
    assert [one["base"] for one in house.ask("POST", "/v1/check", json=text).json()["jobs"]] == ["twin", "twin"]
    assert house.ask("GET", "/readyz").json()["bases"] == {"small": "small", "twin": "/models/twin"}


def test_a_fine_tuning_goes_on_where_its_model_is(house: House) -> None:
    file = house.ask("POST", "/v1/files", files={"file": ("r.jsonl", CHATS)}).json()["id"]
    for number, (model, base) in enumerate({"small": "small", "twin": "twin", "ended@best": "small"}.items()):
        body = {"model": model, "training_file": file, "suffix": f"ft{number}"}
        made = house.ask("POST", "/v1/fine_tuning/jobs", json=body).json()
        assert house.ask("GET", f"/v1/jobs/{made['id']}").json()["base"] == base
    refused = house.refused(400, "POST", "/v1/fine_tuning/jobs", json={"model": "other", "training_file": file})
    assert "name a base (small, twin)" in refused["message"]


CHATS = b'{"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]}\n' * 2


def test_a_model_of_a_client_is_on_the_base_it_names(house: House) -> None:
    session = house.ask("POST", f"{PREFIX}/create_session", json={"tags": []}).json()["session_id"]
    names = {0: ("twin", "twin"), 1: ("/home/ann/models/twin", "twin"), 2: ("base", "small"), 3: ("small", "small")}
    for number, (given, base) in names.items():
        body = {"session_id": session, "model_seq_id": number, "base_model": given, "lora_config": {"rank": 4}}
        model = house.ask("POST", f"{PREFIX}/create_model", json=body).json()["model_id"]
        info = house.ask("POST", f"{PREFIX}/get_info", json={"model_id": model}).json()
        assert info["model_name"] == base
        assert info["model_data"]["tokenizer_id"] == (str(SMALL_BASE) if base == "small" else "/models/twin")
        assert house.ask("GET", f"{PREFIX}/training_runs/{model}").json()["base_model"] == base
        body = {"session_id": session, "sampling_session_seq_id": number, "base_model": given}
        sampler = house.ask("POST", f"{PREFIX}/create_sampling_session", json=body).json()["sampling_session_id"]
        assert house.ask("GET", f"{PREFIX}/samplers/{sampler}").json()["base_model"] == base
    body = {"session_id": session, "model_seq_id": 9, "base_model": "other"}
    assert "'small' or 'twin'" in house.refused(400, "POST", f"{PREFIX}/create_model", json=body)["message"]


def test_one_base_is_as_it_always_was(tmp_path: Path) -> None:
    with open_house(tmp_path) as house:
        assert house.ask("GET", "/readyz").json()["bases"] == {}
        assert house.ask("GET", "/v1/models").json()["data"][0] == {
            "id": "small", "object": "model", "created": 0, "owned_by": "motet",
        }  # fmt: skip
        assert house.ask("POST", "/v1/jobs", json=tiny("one", base="small")).json()["base"] is None
        assert 'base="' not in house.ask("GET", "/metrics", "admin").text
        refused = house.refused(400, "POST", "/v1/jobs", json=tiny("other", base="other"))["message"]
        assert refused == "base: 'other' is not served here; there is 'small'"


def test_a_job_whose_base_is_not_served_any_more_says_so() -> None:
    assert Bases({"moved": "/models/a"}).of("/models/b") == "moved"
    several = Bases({"a": "/models/a", "b": "/models/b"})
    assert [several.of(None), several.of("b"), several.of("/models/b")] == ["a", "b", "b"]
    with pytest.raises(ConfigError, match="'c' is no longer served"):
        several.of("c")
    known = {"a": "/models/a", "b": "/models/b", "c": "/models/c"}
    for now, (none, by_name, by_place) in {
        ("/models/b",): (None, None, None),  # what is of `a` is not of the one that is alone now
        ("/models/a",): ("/models/a", "/models/a", "/models/a"),
        ("b", "c"): (None, None, None),  # nor of the one that stands first now
        ("c", "a"): ("a", "a", "a"),
    }.items():
        later = Bases({name: known.get(name, name) for name in now})
        later.known = known
        found = [None if later.missing(one) else later.of(one) for one in (None, "a", "/models/a")]
        assert found == [none, by_name, by_place], now
    alike = Bases({"a": "/models/x", "b": "/other/x"})
    assert (alike.alike("/home/x"), alike.alike("/models/x")) == (None, "a")


def test_jobs_of_a_base_that_is_left_out_wait_until_it_is_back(tmp_path: Path) -> None:
    def opened(bases: Json) -> Any:
        return create_app(
            Settings("small", tmp_path, config=ServiceConfig(bases=bases), open_to_all=True)
        ).state.service

    parts = opened(TWO)
    who = Principal.member_of(parts.store.tenants.made("us").id)
    given = [GivenJob(tiny(f"on-{base}", base=base)) for base in TWO]
    names = [job.id for job in parts.submissions.submit(who, given, None)]
    parts = opened({"small": "small", "third": "/models/third"})
    assert [one.job["name"] for one in parts.handover.open_jobs()] == names[:1]
    waits = parts.store.job(who, "on-twin")
    assert (waits.state, "'twin' is no longer served" in waits.message) == ("queued", True)
    assert [one.job["name"] for one in opened(TWO).handover.open_jobs()] == names


def test_nothing_is_named_like_a_base(house: House) -> None:
    assert "is a base of this service" in house.refused(400, "POST", "/v1/jobs", json=tiny("twin"))["message"]
    adapters = house.service.adapters
    row = UploadedAdapter(id="adapter-x", tenant_id="x", name="twin", bytes=4, rank=1, alpha=1.0, target_modules=[])
    with pytest.raises(StoreError, match="is a base of this service"):
        adapters.add(Principal.member_of("x"), row)


def test_hosts_of_other_bases_take_no_job_and_count_for_limits() -> None:
    mine, other = Claim("mine", "ann", base="b"), Claim("other", "ann", base="a")
    full = HostLoad(1, 1, running=(Claim("x", "ben", base="b"), Claim("y", "ben", base="b")), base="b")
    idle = HostLoad(0, 8, base="a")
    assert placed(mine, [idle, full], {}) == 1
    assert placed(mine, [idle], {}) is None
    assert placed(mine, [HostLoad(0, 8, running=(other,), base="a"), full], {"ann": Rule(running=1)}) is None
    here, away = (
        HostLink(number, StartHost(base, "", {}, {}, {}, [], 1.0, ANY_SIZE, serves=base), Path(), ThreadPoolExecutor())
        for number, base in enumerate("ab")
    )
    here.ready = True
    assignments = Assignments([here, away])
    jobs = [AddJob({"name": name}, Wanted.RUN, 0, "ann", Rule(running=1), 1, "a") for name in ("first", "second")]
    assert [assignments.place(one, assignments.loads()) for one in jobs] == [here, None], (
        "also while one alone is there"
    )
    assert moved([idle, full]) is None
    second = HostLoad(2, 4, base="b")
    assert moved([idle, full, second]) == Move("y", 1, 2)


def test_hosts_of_all_bases_share_the_machine(tmp_path: Path, says: Motet) -> None:
    config = ServiceConfig.model_validate(
        {"engine": {"slots": 3, "kv_memory_fraction": 0.4}, "bases": {"a": {"base": "/a", "hosts": 2}, "b": "/b"}}
    )
    start = StartHost("small", "", {}, {}, {}, [], 1.0, ANY_SIZE)
    made = starts_of(*((start, one.host) for one in config.bases.values()))
    assert [one.host for one in made] == [0, 1, 2]
    engines = [EngineConfig.model_validate(one.engine) for one in made]
    assert {one.threads for one in engines} == {max(1, budgets.cores() // 3)}
    assert [round(one.kv_memory_fraction, 3) for one in engines] == [0.133] * 3
    assert {one.slots for one in engines} == {3}
    with pytest.raises(ConfigError, match=r"set engine\.threads"):
        launcher(
            ClusterConfig(launcher="ray"), *(HostConfig(base="small", engine=EngineConfig(threads=n)) for n in (1, 0))
        )
    for odd in ({"base": "small"}, {"a b": "small"}, {"a": {"hosts": 2}}, {"a": {"base": "x", "nonsense": 1}}):
        with pytest.raises(ValidationError):
            ServiceConfig.model_validate({"bases": odd})
    file = tmp_path / "service.yaml"
    (tmp_path / "models" / "b").mkdir(parents=True)
    file.write_text("bases: {a: small, b: ./models/b}")
    assert [one.base for one in load_service(file).bases.values()] == ["small", str(tmp_path / "models" / "b")]
    with pytest.raises(ConfigError, match=r"--hosts is for one.*in the --config file"):
        load_service(file, hosts=2)
    assert (
        "--base is for one base, and the --config file has `bases`: leave one of the two out"
        in says("serve", "--base", "small", "--config", file)[2]
    )
    assert "name what to serve" in says("serve")[2]


def test_an_adapter_is_brought_to_the_base_it_names(house: House) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("x/adapter_config.json"))
    files = {"file": ("a.tar.gz", packed.getvalue())}
    refused = house.refused(400, "POST", "/v1/adapters?base=other", files=files)["message"]
    assert "there are 'small', 'twin'" in refused
