"""The client and the commands that use it, against a real service without keys, and routes that want them."""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import motet
from motet.client import connection
from motet.commands.answers import command_for, same_command
from motet.commands.served_jobs import base_meant, job_cells
from motet.config import RunConfig
from motet.core.errors import DataError, ServiceError
from motet.core.types import ADAPTER_FILES
from motet.service.schemas import Health, Job
from tests.support.commands import Motet, job_file, rows_in
from tests.support.house import House
from tests.support.pages import fences
from tests.support.processes import ending
from tests.support.service_run import LASTING, Service, tiny
from tests.support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
ENDED = ("succeeded", "failed", "cancelled")


@pytest.fixture
def service(shared_service: Service, monkeypatch: pytest.MonkeyPatch) -> Service:
    """The open service, named by the environment."""
    monkeypatch.setenv("MOTET_URL", shared_service.url)
    monkeypatch.delenv("MOTET_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    return shared_service


# --- the client ---------------------------------------------------------------------------------------------------------


def test_the_script_of_the_page_prints_rewards_of_steps_and_held_out_rewards(service: Service, tmp_path: Path) -> None:
    script, *_ = fences((ROOT / "docs" / "team.md").read_text("utf-8"), "py")
    rows = [{"prompt": f"{n} + {n} =", "answer": f"{2 * n}"} for n in range(40)]
    (tmp_path / "exam.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    asked = [sys.executable, "-c", script.replace('"steps": 100', '"steps": 2')]
    ran = subprocess.run(
        asked,
        cwd=tmp_path,
        env=service.environment("none"),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    *lines, end = ran.stdout.splitlines()
    figures = [re.sub(r"\d\.\d+(e-\d+)?$", "F", line) for line in lines]
    steps = ["step 0 reward F", "version 0 held-out F", "step 1 reward F", "version 2 held-out F"]
    assert figures == steps, ran.stdout + ran.stderr
    assert end.startswith("succeeded adapters/exam-v")


def test_a_job_from_submission_to_deletion(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with motet.Client() as client:
        assert (client.url, client.health().base, client.health().status) == (service.url, "small", "ok")
        job = client.submit(motet.JobConfig(**tiny("whole", 2)), idempotency_key="once")
        assert job.spec["algorithm"]["group_size"] == 4
        events = list(client.events(job.id, follow=True))
        assert [event.data["step"] for event in events if event.kind == "step"] == [0, 1, 2]
        states = [event.data["state"] for event in events if event.kind == "state"]
        assert states == ["queued", "running", "succeeded"]
        assert client.submit(tiny("whole", 2), idempotency_key="once").id == job.id
        assert list(client.events("whole")) == events
        assert list(client.events("whole", events[2].id)) == events[3:]
        assert list(client.events("whole", events[-1].id, follow=True)) == [], "nothing comes after the end"

        found = client.rollouts("whole", step=1, limit=5)
        assert (found.step, found.steps, len(found.data)) == (1, [0, 1], 5)
        assert client.rollouts("whole", min_reward=2.0).data == []
        versions = client.versions("whole")
        assert versions[-1].version == 2
        assert versions[-1].latest
        assert {version.model for version in versions} <= {model.id for model in client.models()}

        adapter = client.pull("whole", "latest", tmp_path / "home")
        assert adapter == tmp_path / "home" / "whole-v2"
        assert {item.name for item in adapter.iterdir()} == {*ADAPTER_FILES, "receipt.json", "receipts"}
        assert {item.name for item in (adapter / "receipts").iterdir()} == {"v0.json", "v1.json", "v2.json"}
        assert (adapter / ADAPTER_FILES[1]).stat().st_size > 1000
        assert client.pull("whole", 2, tmp_path / "home") == adapter, "once more over it"

        client.submit(tiny("second"))
        monkeypatch.setattr(connection, "PAGE", 1)
        assert [job.name for job in client.jobs() if job.name in ("second", "whole")] == ["second", "whole"]
        service.becomes("second", "succeeded")
        assert {job.state for job in client.jobs("succeeded")} == {"succeeded"}
        client.delete("whole")
        with pytest.raises(ServiceError, match="there is no job 'whole'") as refused:
            client.job("whole")
        assert refused.value.status == 404


def test_steering(service: Service) -> None:
    with motet.Client() as client:
        client.submit(tiny("steered", steps=LASTING))
        service.becomes("steered", "running")
        client.pause("steered")
        service.becomes("steered", "paused")
        client.resume("steered")
        service.becomes("steered", "running")
        assert client.cancel("steered").name == "steered"
        states = [event.data["state"] for event in client.events("steered", follow=True) if event.kind == "state"]
        assert states[-1] == "cancelled"
        with pytest.raises(ServiceError, match=r"has cancelled; it.*be asked to resume") as refused:
            client.resume("steered")
        assert refused.value.status == 409


def test_a_job_that_stopped_early_says_why_and_how_to_train_on(service: Service) -> None:
    with motet.Client() as client:
        client.submit(tiny("enough", steps=9, stop_when={"held_out_above": -1}))
        service.becomes("enough", "succeeded")
        done = client.job("enough")
        assert done.step == 1
        assert done.message.startswith("stopped early after step 1: the held-out reward of v0 is ")
        with pytest.raises(ServiceError, match=r"early.*adapter\.init.*cannot be asked"):
            client.resume("enough")


def test_files(service: Service, tmp_path: Path) -> None:
    rows = rows_in(tmp_path)
    with motet.Client() as client:
        known = client.files()
        file = client.upload(rows)
        assert [(one.id, one.filename, one.rows) for one in client.files() if one not in known] == [
            (file, "rows.jsonl", 20)
        ]
        job = client.submit(tiny("from-rows", data={"source": file, "holdout": 4}))
        assert [event.data.get("state") for event in client.events(job.id, follow=True)][-1] == "succeeded"
        client.delete_file(file)
        assert client.files() == known
        (tmp_path / "table.csv").write_text("prompt,answer\n1 + 1 =,2\n")
        table = client.upload(tmp_path / "table.csv")
        added = [(one.filename, one.rows) for one in client.files() if one not in known]
        assert added == [("table.jsonl", 1)], "it goes as lines of JSON"
        client.delete_file(table)
        with pytest.raises(DataError, match=r"gone\.jsonl cannot be read: No such file"):
            client.upload(tmp_path / "gone.jsonl")
        rows.write_text("not JSON\n")
        with pytest.raises(ServiceError, match=r"rows\.jsonl line 1") as refused:
            client.upload(rows)
        assert refused.value.status == 400


def test_the_same_asynchronously(service: Service, tmp_path: Path) -> None:
    async def everything() -> None:
        async with motet.AsyncClient() as client:
            first, second = await asyncio.gather(*(client.submit(tiny(f"async-{i}", 2)) for i in (1, 2)))
            events = [event async for event in client.events(first.id, follow=True)]
            assert [event.kind for event in events] == ["state", "state", "step", "step", "step", "state"]
            assert [event async for event in client.events("async-1")] == events
            assert [event async for event in client.events("async-1", events[-1].id, follow=True)] == []
            assert (await client.rollouts("async-1")).steps == [0, 1]
            assert (await client.versions("async-1"))[-1].latest
            assert (await client.pull("async-1", "latest", tmp_path)).name == "async-1-v2"
            assert second.id in [job.id async for job in client.jobs()]
            assert (await client.health()).status == "ok"
            with pytest.raises(ServiceError, match="there is no job 'nobody'"):
                [event async for event in client.events("nobody", follow=True)]
            assert [event.data async for event in client.events(second.id, follow=True)]
            assert (await client.job(second.id)).state in ENDED
            await client.delete(second.id)

    asyncio.run(everything())


@pytest.mark.parametrize(
    "words",
    [
        ("tenants", "limit", "us", "--share", "nan"),
        ("tenants", "limit", "us", "--storage-mb", "inf"),
        ("keys", "create", "us", "--expires-days", "nan"),
    ],
)
def test_numbers_that_are_none_are_refused(
    house: House, says: Motet, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("MOTET_URL", str(house.http.base_url))
    monkeypatch.setenv("MOTET_API_KEY", house.keys["admin"])
    code, _, err = says(*words)
    assert (code, words[-2] in err) == (2, True)


def test_a_name_with_a_slash_is_no_other_route(house: House, says: Motet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_URL", str(house.http.base_url))
    monkeypatch.setenv("MOTET_API_KEY", house.keys["ours"])
    for command in (("show", "theirs/ended"), ("logs", "ended/events"), ("delete", "ended/versions")):
        code, out, err = says(*command)
        assert (code, f"there is no job {command[1]!r}" in out + err) == (2, True), (code, out, err)
    with motet.Client() as client, pytest.raises(ServiceError, match="there is no file 'a/content'"):
        client.delete_file("a/content")


def test_keys_of_two_tenants(house: House, says: Motet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for an engine; the house has keys of its own, and a job."""
    monkeypatch.setenv("MOTET_URL", str(house.http.base_url))
    monkeypatch.setenv("MOTET_API_KEY", house.keys["admin"])
    with motet.Client() as admin:
        known = {one.id for ones in (admin.keys(), admin.jobs()) for one in ones}
    code, out, err = says("keys", "create", "team-a", "--name", "laptop", "--expires-days", 1)
    assert code == 0
    key = out.strip()
    assert "member of team-a; it is shown only once" in err
    with motet.Client() as admin, motet.Client(key=key) as member:
        other = admin.create_key("team-b")
        job = member.submit(tiny("theirs"))
        assert [one.id for one in admin.jobs() if one.id not in known] == [job.id]
        assert [one.id for one in member.jobs()] == [job.id]
        with motet.Client(key=other.key) as stranger:
            assert list(stranger.jobs()) == []
            with pytest.raises(ServiceError, match="there is no job"):
                stranger.job(job.id)
            admin.revoke_key(other.id)
            with pytest.raises(ServiceError, match="unknown, revoked or expired") as refused:
                stranger.models()
            assert refused.value.status == 401
        with pytest.raises(ServiceError, match="this needs an admin's key") as refused:
            member.tenants()
        assert refused.value.status == 403
        (own,) = member.keys()
        with motet.Client(key=member.create_key(name="ci", scope=["read"]).key) as narrow:
            assert [one.id for one in narrow.jobs()] == [job.id]
            with pytest.raises(ServiceError, match=r"this needs the right.*key may do: read"):
                narrow.submit(tiny("more"))
        assert says("keys", "rotate", own.id)[0] == 0
        with pytest.raises(ServiceError, match="unknown, revoked or expired"):
            member.keys()
        listed = admin.keys()
        assert {(one.tenant, one.role, one.revoked is None) for one in listed if one.id not in known} == {
            ("team-a", "member", True), ("team-a", "member", False), ("team-b", "member", False),
        }  # fmt: skip
    assert re.search(r"^ theirs +queued .* team-a$", says("ls")[1], re.M)
    code, out, _ = says("keys", "ls")
    assert code == 0
    assert re.search(r"team-a +laptop +member +\S+ +until", out)
    assert re.search(r"team-b +member +\S+ +revoked", out)
    shown = json.loads(says("keys", "ls", "--json")[1])
    (laptop,) = (one for one in shown if one["name"] == "laptop" and one["revoked"] is None)  # the other was rotated
    assert json.loads(says("keys", "create", "team-c", "--role", "admin", "--json")[1])["key"].startswith("mk-")
    assert says("keys", "revoke", laptop["id"])[:2] == (0, f"{laptop['id']} is refused from now on\n")
    assert says("ls", "--key", key)[0] == 2
    monkeypatch.delenv("MOTET_API_KEY")
    told = "motet: this service needs an API key: `motet login`, or set MOTET_API_KEY, or give --key (from Python: key=…)\n"
    assert says("ls")[::2] == (2, told)


# --- following ----------------------------------------------------------------------------------------------------------


def test_following_goes_on_over_a_restart(service: Service, tmp_path: Path) -> None:
    """One follows in Python, one from the command line, while the service is killed and started again."""
    steps = 8
    path = job_file(tmp_path, tiny("followed", steps=steps))
    shown = service.motet("submit", path, "--follow", "--url", service.url, err=subprocess.PIPE)
    with ending(shown), motet.Client() as client:
        wait_until(lambda: any(job.name == "followed" and job.step for job in client.jobs()), PATIENCE, shown)
        seen = []
        for event in client.events("followed", follow=True):
            seen.append(event)
            if len(seen) == 3:
                service.kill()
                service.launch()
        assert client.job("followed").state == "succeeded"
        assert [event.id for event in seen] == sorted({event.id for event in seen})
        assert [event.data["step"] for event in seen if event.kind == "step"] == list(range(steps + 1))
        out, err = shown.communicate(timeout=PATIENCE)
    assert shown.returncode == 0, out + err
    assert re.findall(r"step (\d+)/8", out) == [str(step) for step in range(1, steps + 1)]
    service.until(lambda: service.answers("/readyz"))


# --- the commands -------------------------------------------------------------------------------------------------------


def test_a_name_without_a_version_is_asked_of_the_service_and_not_of_the_hub(service: Service) -> None:
    service.submit(tiny("asked", 1))
    assert service.ended("asked") == "succeeded"
    options = ("--temperature", "0", "--max-tokens", "8")
    with socket.socket() as taken:  # nobody listens there
        taken.bind(("127.0.0.1", 0))
        hub = {"HF_ENDPOINT": f"http://127.0.0.1:{taken.getsockname()[1]}", "HF_HUB_OFFLINE": "0"}
        told = {
            name: subprocess.run(
                [sys.executable, "-m", "motet", "chat", name, *options],
                env=service.environment() | hub, input="2 + 2 =\n", capture_output=True, text=True, check=False,
            )
            for name in ("asked", "nobody")
        }  # fmt: skip
    answers = service.ask(
        "POST", "/v1/chat/completions",
        json={"model": "asked", "messages": [{"role": "user", "content": "2 + 2 ="}], "temperature": 0, "max_tokens": 8},
    )  # fmt: skip
    assert told["asked"].returncode == 0, told["asked"].stderr
    assert (said := answers["choices"][0]["message"]["content"])
    assert said in told["asked"].stdout
    assert "the hub does not answer" in told["nobody"].stderr, "the service has no such name"


def test_a_job_that_learned_nothing_says_so_in_the_same_words_wherever_it_is_looked_at(
    service: Service, tmp_path: Path, says: Motet
) -> None:
    """No answer is long enough to lose any of its reward."""
    level = tiny("level", 5, reward={"name": "length", "args": {"target": 1000}})
    code, out, err = says("run", job_file(tmp_path, level), "--run", tmp_path / "run")
    assert code == 0, out + err
    service.submit(level)
    assert service.ended("level") == "succeeded"
    sign = re.search(r"hint: (nothing was learned): .+?#flat\)", service.job("level")["message"])
    assert sign, service.job("level")
    listed, shown = says("ls")[1], says("show", "level")[1]
    assert re.search(rf"^ level +succeeded, {sign[1]} +5/5", listed, re.MULTILINE), listed
    for text in (out, shown):
        assert sign[0] in " ".join(text.split()), text


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("hint: nothing was learned: no step changed the adapter (docs/x.md#flat)", "succeeded, nothing was learned"),
        ("warning: worse: x; hint: hardly learned: held-out reward 0.1 (docs/x.md#flat)", "succeeded, hardly learned"),
        ("3 of 4 rewards failed: x; hint: PAID: y docs/not-learning.md#flat", "succeeded"),
    ],
)
def test_a_list_of_jobs_has_only_words_of_its_own(message: str, shown: str) -> None:
    """A message may hold what a reward raised."""
    about: dict[str, Any] = {
        "id": "job-1",
        "name": "a",
        "step": 1,
        "steps": 1,
        "created": 0.0,
        "ended": None,
        "spec": {},
    }
    job = Job(state="succeeded", message=message, **about)
    assert str(job_cells(job, based=False, named=False, owned=False)[1]) == shown
    waits = Job(state="running", message="", progress={"phase": "waits for \x1b]0;theirs\x07"}, **about)
    assert "\x1b" not in str(job_cells(waits, based=False, named=False, owned=False)[1])


@pytest.mark.parametrize("still", [True, False])
def test_a_person_who_takes_an_untrained_version_of_a_service_is_told(
    service: Service, tmp_path: Path, says: Motet, monkeypatch: pytest.MonkeyPatch, still: bool
) -> None:
    """Without a trained version the latest is the best. A job that starts from it knows only a copy of its files."""
    first, second, third = (f"{name}-{still}" for name in ("first", "second", "third"))
    reward = {"name": "length", "args": {"target": 1000}} if still else "exact"  # nobody writes as much
    for one in (
        tiny(first, 2),
        tiny(second, 2, adapter={"init": f"{first}@latest"}, reward=reward),
        tiny(third, 1, adapter={"init": f"{second}@best"}),
    ):
        service.submit(one)
        assert service.ended(one["name"]) == "succeeded", service.job(one["name"])["message"]
    for words in (("chat", second), ("pull", second, "--to", tmp_path), ("share", second, "--with", "*")):
        monkeypatch.setattr("sys.stdin", io.StringIO())
        code, out, err = says(*words)
        assert code == 0, (words, out, err)
        told = f"warning: {second}@2 is untrained: it equals the adapter that the job began with"
        assert (told in err) == still, (words, err)
    told = f"starts from an untrained adapter: {second}-v2 is untrained: it equals the adapter that the job began with"
    assert (told in (logs := says("logs", third)[1])) == still, logs


def test_a_job_file_is_submitted_whole(
    service: Service, tmp_path: Path, says: Motet, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_in(tmp_path)
    data = {"source": "rows.jsonl", "eval_source": "rows.jsonl", "holdout": 4}
    defaults = {key: value for key, value in tiny("").items() if key != "name"} | {"steps": 9}
    jobs: list[dict[str, Any]] = [
        {"name": "plain"},
        {"name": "swept", "data": data, "sweep": {"optimizer.lr": [1e-4, 3e-4]}},
    ]
    path = job_file(tmp_path, *jobs, defaults=defaults, engine={"slots": 2})
    with motet.Client(service.url) as client:
        before = {file.id for file in client.files()}
    code, out, err = says("submit", path, "--set", "steps=2", "--follow")
    assert code == 0, out + err
    assert re.findall(r"^(\S+)  job-\w{16}$", out, re.M) == ["plain", "swept-lr=0.0001", "swept-lr=0.0003"]
    assert len(re.findall(r"step 2/2  reward \d\.\d\d", out)) == 3
    assert len(re.findall(r"succeeded after 2/2 steps  eval \S+→\S+\n", out)) == 3
    assert f"`engine` of {path}: ignored" in err
    with motet.Client() as client:
        assert len({file.id for file in client.files()} - before) == 1, (
            "a file that is named four times is uploaded once"
        )
        spec = client.job("swept-lr=0.0003").spec
        assert spec["data"]["source"] == spec["data"]["eval_source"] == client.files()[0].id
        assert spec["optimizer"]["lr"] == 3e-4

    assert says("chat", "plain@latst")[::2] == (
        2, "motet: the service has no plain@latst; did you mean plain@latest? `motet ls` shows jobs, `motet show JOB` the "
        "versions of one\n",
    )  # fmt: skip
    (plain,) = re.findall(r"^plain  (job-\w{16})$", out, re.M)
    for known in ("plain@latest", "plain@2", f"{plain}@2", "plain@"):
        monkeypatch.setattr("sys.stdin", io.StringIO())
        assert says("chat", known)[0] == 0
    assert "the service has no nobody@2; `motet ls`" in says("chat", "nobody@2")[2]

    code, out, _ = says("ls", "--limit", 2)
    listed = re.findall(r"^ (\S+) +succeeded +2/2 +\d\.\d\d +reward \d\.\d\d \(v\d\) +\d+s", out, re.M)
    assert listed == ["swept-lr=0.0003", "swept-lr=0.0001"], out
    assert "the newest 2; --limit 0 shows all" in out
    assert [job["name"] for job in json.loads(says("ls", "--limit", 1, "--json")[1])] == ["swept-lr=0.0003"]
    assert "no jobs" in says("ls", "--state", "paused")[1]
    assert says("ls", "--state", "lost")[::2] == (
        2, "motet: there is no state 'lost'; there are queued, running, paused, succeeded, failed, cancelled\n",
    )  # fmt: skip

    code, out, _ = says("show", "plain")
    assert code == 0
    assert re.search(r"^plain\nid +job-\w+\nstate +succeeded\nsteps +2/2\nreward +\d\.\d\d→\d", out), out
    assert "plain@2" in out
    assert [one["version"] for one in json.loads(says("show", "plain", "--json")[1])["versions"]][-1] == 2
    code, out, _ = says("logs", "plain")
    assert re.search(r"^plain  running\nplain  step 1/2 .*\nplain  step 2/2 .*\nplain  succeeded after 2/2", out), out
    told = [json.loads(line) for line in says("logs", "plain", "-f", "--json")[1].splitlines()]
    assert [event["kind"] for event in told] == ["state", "state", "step", "step", "step", "state"]
    code, out, _ = says("pull", "plain", "--version", "latest", "--to", tmp_path)
    assert (code, Path(out.strip())) == (0, tmp_path / "plain-v2")
    assert (tmp_path / "plain-v2" / "adapter_config.json").is_file()


def test_a_failed_job_is_exit_code_1(service: Service, tmp_path: Path, says: Motet) -> None:
    path = job_file(tmp_path, tiny("fails", data={"source": "toy:sort_letters", "max_prompt_tokens": 1}))
    code, out, err = says("submit", path, "--follow", "--json")
    (job,) = json.loads(out)
    assert (code, job["state"]) == (1, "failed")
    assert job["message"] in err
    assert says("logs", "fails", "-f")[0] == 1
    assert says("logs", "fails")[0] == 0
    assert re.search(r"state +failed: \w+", says("show", "fails")[1])


def test_what_cannot_be_submitted(service: Service, tmp_path: Path, says: Motet) -> None:
    path = job_file(tmp_path, tiny("never", reward="rewards.py:reward"))
    code, _, err = says("submit", path)
    assert (code, "reward file" in err, "rewards.py' does not exist" in err) == (2, True, True)
    (tmp_path / "rewards.py").write_text("import beside\n\ndef reward(problem, completion): return 1.0\n")
    code, _, err = says("submit", path)
    assert (code, "this service runs no code of its tenants; whoever runs it can allow that" in err) == (2, True)
    (tmp_path / "beside.py").write_text("")
    code, _, err = says("submit", path)
    assert (code, "imports beside.py, which lies beside it, and a service takes one file" in err) == (2, True)
    code, _, err = says("submit", job_file(tmp_path, tiny("never", reward="my_rewards:reward")))
    assert (code, "name file.py:reward, or score on your machine: motet submit --reward FILE" in err) == (2, True)
    path = job_file(tmp_path, tiny("never"))
    code, _, err = says("submit", path, "--set", "base=smollm2")
    assert (code, err) == (
        2, "motet: the file's base is 'smollm2', but this service trains 'small'; change the file, give --set base=small, "
        "or speak to another service\n",
    )  # fmt: skip
    code, _, err = says("submit", path, "--set", "data.source=gone.jsonl")
    assert (code, "job never: data.source 'gone.jsonl' is not a file" in err) == (2, True)
    assert says("submit", tmp_path / "nowhere.yaml")[0] == 2
    assert "never" not in says("ls", "--json")[1]


def test_the_sections_that_a_service_does_not_read_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    tree = {"base": "small", "jobs": [tiny("a")], "observers": ["tensorboard"], "cluster": "ray", "run": "there"}
    health = Health(status="ok", base="small")
    assert base_meant(RunConfig.model_validate(tree), health, Path("jobs.yaml")) is None
    assert capsys.readouterr().err == (
        "note: `cluster`, `observers` of jobs.yaml: ignored, because the service has its own\n"
    )
    base_meant(RunConfig.model_validate({"base": "small", "jobs": [tiny("a")]}), health, Path("jobs.yaml"))
    assert capsys.readouterr().err == ""


def test_steering_by_command(service: Service, tmp_path: Path, says: Motet) -> None:
    assert says("submit", job_file(tmp_path, tiny("by-hand", steps=LASTING)), "--json")[0] == 0
    with motet.Client() as client:
        service.becomes("by-hand", "running")
        for word, state in (("pause", "paused"), ("resume", "running"), ("cancel", "cancelled")):
            assert says(word, "by-hand") == (0, f"asked by-hand to {word}\n", "")
            service.becomes("by-hand", state)
            if word == "resume":
                service.until(lambda: client.job("by-hand").progress is not None)
                assert re.search(r"^now +\w+", says("show", "by-hand")[1], re.M)
    assert "now       " not in says("show", "by-hand")[1]
    code, _, err = says("pause", "runs/jobs")
    assert (code, err) == (2, "motet: runs/jobs is a run directory; name a job of it too: motet pause runs/jobs JOB\n")
    assert "there is no run directory runs/nowhere" in says("pause", "runs/nowhere", "add")[2]
    assert says("pause", "one", "two", "three")[0] == 2


def test_a_command_to_type_speaks_to_the_same_service_and_tells_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_URL", "http://here:1")
    for url in (None, "http://here:1"):
        assert command_for(url, "logs", "a b", "-f") == "motet logs 'a b' -f"
    assert command_for("http://there:1", "logs", "a") == "motet logs a --url http://there:1"
    typed = ["agent", "jobs.yaml", "--concurrency", "3", "--url", "http://there:1"]
    for key in ([], ["--key", "secret"], ["--key=secret"]):
        monkeypatch.setattr(sys, "argv", ["/bin/motet", *typed[:2], *key, *typed[2:]])
        assert same_command() == "motet agent jobs.yaml --concurrency 3 --url http://there:1"


def test_jobs_of_a_service_are_compared_on_their_held_out_problems(service: Service, says: Motet) -> None:
    for name in ("one", "another"):
        service.submit(tiny(name, 1))
    assert [service.ended(name) for name in ("one", "another")] == ["succeeded"] * 2
    code, out, err = says("compare", "one", "another")
    assert (code, err) == (0, "")
    (row,) = (line.split() for line in out.splitlines() if line.strip().startswith("another  ") and "[" in line)
    assert row[1:3] == ["1", "4"]
    with motet.Client() as client:
        held_out = [client.job(name).held_out for name in ("one", "another")]
    assert all(one is not None and one.version == 1 for one in held_out)
    difference = held_out[1].value - held_out[0].value  # type: ignore[union-attr]
    assert float(row[3]) == pytest.approx(difference, abs=0.001)
    assert says("compare", "one", "nobody")[0] == 2
