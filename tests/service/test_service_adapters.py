"""Uploaded adapters, sharing and waiting with a real engine: what is refused at the upload, what answers, what starts."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from safetensors.numpy import load_file, save_file

import motet
from motet.core.errors import DataError, ServiceError
from motet.core.types import ADAPTER_CONFIG, ADAPTER_FILES, ADAPTER_WEIGHTS
from tests.support.commands import Motet, job_file
from tests.support.service_run import LASTING, Service, serving, tiny

pytestmark = pytest.mark.slow
ASKED: Any = {"messages": [{"role": "user", "content": "Sort the letters of dca."}], "max_tokens": 12, "seed": 5}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One that is up for the whole file, and asks for keys."""
    with serving(tmp_path_factory.mktemp("serve") / "served", keys=True) as found:
        yield found


@pytest.fixture(scope="module")
def key(keyed: Service) -> str:
    """Of the tenant who asks in most tests."""
    keyed.become(keyed.admin_key)
    made = keyed.key_for("us")
    keyed.become(made)
    return made


@pytest.fixture(scope="module")
def service(keyed: Service, key: str) -> Service:
    """That service, asked with this key, with an adapter that was trained."""
    assert key
    keyed.submit(tiny("elder", 2))
    assert keyed.ended("elder") == "succeeded"
    return keyed


@pytest.fixture(scope="module")
def elder(service: Service, key: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That adapter as a PEFT directory."""
    with motet.Client(service.url, key=key) as client:
        return client.pull("elder", "latest", tmp_path_factory.mktemp("pulled"))


@pytest.fixture
def client(service: Service, key: str) -> Iterator[motet.Client]:
    with motet.Client(service.url, key=key) as found:
        yield found


def answer(url: str, model: str, key: str = "none") -> list[tuple[str, float]]:
    """The tokens of an answer with their logprobs, which tell adapters apart that were trained for a moment."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        told = client.chat.completions.create(model=model, **ASKED, logprobs=True).choices[0].logprobs
        return [(one.token, one.logprob) for one in (told.content or [] if told is not None else [])]


# --- uploads ----------------------------------------------------------------------------------------------------------------


def test_an_uploaded_adapter_answers_trains_and_comes_home(
    service: Service, client: motet.Client, elder: Path, tmp_path: Path, key: str
) -> None:
    pushed = client.push(elder, "brought")
    assert (pushed.name, pushed.rank, pushed.alpha) == ("brought", 32, 32.0)
    assert "q_proj" in pushed.target_modules
    assert [one.id for one in client.adapters()] == [pushed.id]
    assert client.adapter("brought") == client.adapter(pushed.id) == pushed
    for name in ("brought", pushed.id):
        assert answer(service.url, name, key) == answer(service.url, "elder@latest", key)
    assert answer(service.url, "brought", key) != answer(service.url, "small", key)
    home = client.pull("brought", directory=tmp_path)
    assert home == tmp_path / "brought"
    assert {file: (home / file).read_bytes() for file in ADAPTER_FILES} == {
        file: (elder / file).read_bytes() for file in ADAPTER_FILES
    }
    client.submit(tiny("from-brought", 1, adapter={"init": "brought"}))
    client.submit(tiny("from-elder", 1, adapter={"init": "elder@latest"}, seed=7))
    client.submit(tiny("from-id", 1, adapter={"init": pushed.id}, seed=7))
    client.delete_adapter("brought")  # those jobs have what they need
    for name in ("from-brought", "from-elder", "from-id"):
        assert service.ended(name) == "succeeded", service.job(name)["message"]
    assert service.adapter("from-brought", "0")[ADAPTER_WEIGHTS] == (elder / ADAPTER_WEIGHTS).read_bytes()
    assert service.weights("from-id") == service.weights("from-elder")
    with pytest.raises(ServiceError, match="no uploaded adapter 'brought'"):
        client.adapter("brought")
    assert not (service.directory / "adapters" / pushed.id).exists()


def changed(
    elder: Path, directory: Path, config: dict[str, Any] | None = None, tensors: dict[str, float] | None = None
) -> Path:
    """The adapter with something else in it."""
    shutil.copytree(elder, directory)
    known = json.loads((directory / ADAPTER_CONFIG).read_text())
    (directory / ADAPTER_CONFIG).write_text(json.dumps({**known, **(config or {})}))
    if tensors:
        weights = load_file(directory / ADAPTER_WEIGHTS)
        first = weights.pop(sorted(weights)[0])
        weights |= {name: first * value for name, value in tensors.items()}
        save_file(weights, directory / ADAPTER_WEIGHTS)
    return directory


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "DoRA"),
        ({"r": 16}, "shape"),
        ({"r": 10**9}, "rank"),
        ({"r": "x"}, "not a rank"),
        ({"lora_alpha": 0}, "alpha"),
        ({"lora_alpha": 10**400}, "damaged"),
        ({"target_modules": ["nothing_proj"]}, "nothing_proj"),
        ({"target_modules": {"a": 1}}, "target_modules"),
        ({"target_modules": ["q_proj"]}, "nothing asks for"),
        ({"bias": "all"}, "biases"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_at_the_upload(
    service: Service, client: motet.Client, elder: Path, tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ServiceError, match=words) as refused:
        client.push(changed(elder, tmp_path / "bad", config))
    assert refused.value.status == 400
    assert str(service.directory) not in str(refused.value)
    assert not list((service.directory / "adapters").glob("*"))


def test_weights_that_do_not_fit_are_refused_at_the_upload(client: motet.Client, elder: Path, tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="has no tensor"):
        client.push(changed(elder, tmp_path / "less", tensors={"odd": 1.0}))
    name = sorted(load_file(elder / ADAPTER_WEIGHTS))[0]
    with pytest.raises(ServiceError, match="not finite"):
        client.push(changed(elder, tmp_path / "nan", tensors={name: float("nan")}))
    broken = changed(elder, tmp_path / "broken")
    (broken / ADAPTER_WEIGHTS).write_bytes((elder / ADAPTER_WEIGHTS).read_bytes()[:-10])
    with pytest.raises(ServiceError, match="damaged"):
        client.push(broken)
    (broken / ADAPTER_WEIGHTS).unlink()
    with pytest.raises(DataError, match=ADAPTER_WEIGHTS):
        client.push(broken)


# --- waiting ----------------------------------------------------------------------------------------------------------------


def test_jobs_wait_for_each_other_and_for_a_time_across_restarts(service: Service, client: motet.Client) -> None:
    service.engine().suspend()
    client.submit(tiny("first", 8))
    client.submit(tiny("second", 1, adapter={"init": "first@best"}), after=["first"])
    client.submit(tiny("doomed", 1), after=["second", "broken-too"][:1])
    client.submit(tiny("timed", 1), at=time.time() + 4)
    client.cancel("doomed")
    assert client.job("second").message == "waits for 'first' to succeed"
    service.engine().resume()
    service.reaches("first", 3)
    service.kill()
    service.start()
    assert service.ended("first") == "succeeded"
    assert service.ended("second") == "succeeded", service.job("second")["message"]
    assert service.ended("timed") == "succeeded"
    best = next(one.version for one in client.versions("first") if one.best)
    assert service.adapter("second", "0")[ADAPTER_WEIGHTS] == service.adapter("first", str(best))[ADAPTER_WEIGHTS]
    first, second, timed = (client.events(name) for name in ("first", "second", "timed"))
    began = next(event.time for event in second if event.data.get("state") == "running")
    assert began >= [event.time for event in first][-1]
    assert service.states("second") == ["queued", "queued", "running", "succeeded"]
    at = client.job("timed").at
    assert at is not None
    assert next(event.time for event in timed if event.data.get("state") == "running") >= at
    assert service.job("doomed")["state"] == "cancelled"


# --- sharing ----------------------------------------------------------------------------------------------------------------


def test_two_teams_share_by_the_command_line(
    keyed: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Motet
) -> None:
    monkeypatch.setenv("MOTET_URL", keyed.url)
    keys = {"admin": keyed.admin_key}

    def of(tenant: str) -> None:
        monkeypatch.setenv("MOTET_API_KEY", keys[tenant])

    of("admin")
    for tenant in ("team-a", "team-b"):
        keys[tenant] = says("keys", "create", tenant, "--name", tenant)[1].strip()
    of("team-a")
    jobs = [tiny("sort", 1), tiny("again", 1, adapter={"init": "sort@best"})]
    assert says("submit", job_file(tmp_path, jobs[0]), "--follow")[0] == 0
    assert says("submit", job_file(tmp_path, jobs[1]), "--after", "sort", "--at", "2020-01-01", "--follow")[0] == 0
    code, out, _ = says("ls")
    assert code == 0
    assert "sort" in out
    of("team-b")
    assert says("pull", "team-a/sort")[0] == 2
    of("team-a")
    code, out, _ = says("share", "sort", "--with", "team-b")
    assert (code, out.split()[1:]) == (0, "team-b can use team-a/sort".split())
    share = out.split(":")[0]
    of("team-b")
    assert "team-a/sort" in says("shares")[1]
    code, out, _ = says("pull", "team-a/sort", "--version", "latest", "--to", tmp_path)
    assert (code, out.strip()) == (0, str(tmp_path / "sort-v1"))
    assert {path.name for path in (tmp_path / "sort-v1").iterdir()} == set(ADAPTER_FILES)  # its settings are team-a's
    assert "has no receipt.json" in says("verify", tmp_path / "sort-v1")[2]
    of("team-a")
    assert says("pull", "sort", "--version", "latest", "--to", tmp_path / "own")[0] == 0
    own = tmp_path / "own" / "sort-v1"
    code, out, _ = says("verify", own)
    assert (code, "sort-v1: version 1 is as it was saved; 2 in its chain of receipts" in out) == (0, True)
    assert "not checked: base, data, code and settings (give --jobs)" in out
    code, out, _ = says("verify", own, "--jobs", job_file(tmp_path, tiny("other", 1, seed=5), jobs[0]))
    assert code == 0, out
    code, out, _ = says("verify", own, "--jobs", job_file(tmp_path, {**jobs[0], "optimizer": {"lr": 0.5}}))
    assert (code, "optimizer.lr" in out) == (1, True)
    (own / "receipts" / "v0.json").write_text("{}")
    code, out, _ = says("verify", own)
    assert (code, "v0.json is not what was saved" in " ".join(out.split())) == (1, True)
    of("team-b")
    assert answer(keyed.url, "team-a/sort@latest", keys["team-b"])
    assert says("show", "sort")[0] == 2
    assert says("push", tmp_path / "sort-v1", "--name", "ours")[1].strip() == "ours"
    assert "ours" in says("adapters", "ls")[1]
    theirs = {**tiny("theirs", 1), "adapter": {"init": "team-a/sort"}}
    mine = {**tiny("mine", 1), "adapter": {"init": str(tmp_path / "sort-v1")}}  # a directory: it is uploaded
    assert says("submit", job_file(tmp_path, theirs, mine), "--follow")[0] == 0
    assert says("adapters", "rm", "ours")[0] == 0
    of("team-a")
    assert says("unshare", share)[0] == 0
    of("team-b")
    code, _, err = says("pull", "team-a/sort")
    assert (code, "no adapter 'team-a/sort'" in err) == (2, True)
    assert says("audit")[0] == 2
    of("admin")
    told = json.loads(says("audit", "--tenant", "team-a", "--json")[1])
    assert [one["action"] for one in told] == ["unshare", "share", "submit", "submit"]
    assert says("submit", job_file(tmp_path, tiny("x")), "--at", "noon")[0] == 2


# --- what goes wrong --------------------------------------------------------------------------------------------------------


def test_an_engine_that_cannot_go_on_is_started_again(tmp_path: Path) -> None:
    """Its base is not whole at first, which is told while jobs are kept. A state that cannot be written ends nothing."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    service = Service(tmp_path / "served", "--base", str(base))
    try:
        (tmp_path / "served" / "engine.yaml").write_text("engine: {samplers: 0, threads: 1, slots: 1}\n")
        service.start(ready=False)
        service.until(lambda: str(base) in service.get("/readyz").json()["message"])
        assert service.get("/readyz").status_code == 503
        assert str(base) in (service.directory / "engine.log").read_text()
        assert service.submit(tiny("early", 1))["state"] == "queued"
        with pytest.raises(openai.APIStatusError, match="base has no tokenizer") as refusal:
            answer(service.url, "base")
        assert refusal.value.status_code == 503
        shutil.copytree(Path(motet.__file__).parent / "assets" / "small-base", base, dirs_exist_ok=True)
        service.until(lambda: service.answers("/readyz"))
        assert service.ended("early") == "succeeded", "it was kept"
        service.submit(tiny("long", LASTING))
        service.reaches("long", 1)
        waiting = service.submit(tiny("waiting", 1))["id"]
        directory = service.directory / "run" / str(waiting)
        service.until(directory.is_dir)
        (directory / "status.json").mkdir()
        service.steer("long", "cancel")
        assert service.ended("waiting") == "succeeded"
        assert service.ended("long") == "cancelled"
    finally:
        service.close()
