"""Who submitted what: the name is shown with everything that a key makes, and decides who may change it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from motet.core.types import JobState
from motet.service.database.tables import UploadedAdapter, now
from tests.support.house import House
from tests.support.keyed_routes import operations
from tests.support.service_run import ROWS, Json, tiny

pytestmark = pytest.mark.tier1


@pytest.fixture(scope="module")
def team(house: House) -> House:
    """A service on which three people of the tenant `us` have keys, and their head too."""
    for name in ("ann", "bob", "head"):
        role: Any = "tenant-admin" if name == "head" else "member"
        _, house.keys[name] = house.store.tenants.create_key("us", name, role)
    return house


def submitted(house: House, key: str, name: str) -> Json:
    """A job of someone."""
    answer = house.ask("POST", "/v1/jobs", key, json=tiny(name))
    assert answer.status_code == 201, answer.text
    job: Json = answer.json()
    return job


def test_what_a_key_makes_shows_whose_it_is(team: House) -> None:
    job = submitted(team, "ann", "sort")
    assert job["submitter"] == "ann"
    for path in ("/v1/jobs/sort", "/v1/jobs?limit=1", "/v1/jobs/sort/events"):
        shown = team.ask("GET", path, "bob").json()
        first = shown["data"][0] if "data" in shown else shown
        assert {**first, **first.get("data", {})}["submitter"] == "ann"
    file = team.ask("POST", "/v1/files", "ann", files={"file": ("rows.jsonl", ROWS)}).json()
    assert team.ask("GET", f"/v1/files/{file['id']}", "bob").json()["submitter"] == "ann"
    assert team.ask("GET", "/v1/adapters/brought", "bob").json()["submitter"] is None  # as an earlier release stored it
    entries = team.ask("GET", "/v1/audit?limit=2", "admin").json()["data"]
    assert [(one["action"], one["submitter"]) for one in entries] == [("upload file", "ann"), ("submit", "ann")]


def test_a_member_has_one_name_whatever_key_it_makes_for_itself(team: House) -> None:
    made = team.ask("POST", "/v1/keys", "ann", json={"name": "bob"}).json()
    assert made["submitter"] == "ann"
    team.keys["as bob"] = made["key"]
    turned = team.ask("POST", f"/v1/keys/{made['id']}/rotate", "as bob").json()
    team.keys["turned"] = turned["key"]
    assert (turned["name"], turned["submitter"]) == ("bob", "ann")
    assert submitted(team, "turned", "turned")["submitter"] == "ann"
    new = team.ask("POST", "/v1/keys", "head", json={"name": "eve"}).json()  # for somebody else
    assert new["submitter"] == "eve"
    nameless = team.ask("POST", "/v1/keys", "head", json={}).json()
    assert nameless["submitter"] == nameless["id"]


def test_a_person_keeps_their_account_when_they_sign_in_again(team: House) -> None:
    accounts = set()
    for name in ("Eve", "Eve Smith"):
        _, team.keys[name] = team.store.tenants.sign_in("us", name, "member", now() + 60, "e" * 64)
        principal = team.store.tenants.who(team.keys[name])
        assert principal is not None
        assert principal.submitter == name
        accounts.add(principal.account)
    assert len(accounts) == 1


# --- who may change it ------------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "keys.md"
TABLE = PAGE.read_text().partition("\n## Who may do what\n")[2].partition("\n## ")[0]
CHANGES = set(re.findall(r"`(POST|PATCH|DELETE) (/v1/[^`]+)`", TABLE))
"""What the page says that only submitters and admins may ask."""


WORK = "/v1/jobs/{job}/work/{kind}"
MEMBERS = {
    *(("POST", f"/v1/{path}") for path in ("jobs", "submissions", "check", "fine_tuning/jobs", "files", "adapters")),
    *(("POST", f"/v1/{path}") for path in ("chat/completions", "completions", "responses", "messages")),
    *(("POST", f"/v1/fine_tuning/alpha/graders/{word}") for word in ("run", "validate")),
    *(("POST", f"{WORK}/{word}") for word in ("lease", "results")), ("DELETE", f"{WORK}/workers/{{worker}}"),
    *((method, f"/v1/jobs/{{job}}/{old}/{{rest:path}}") for method in ("POST", "DELETE") for old in ("scoring", "episodes")),
    *((("POST", "/v1/keys"), ("POST", "/v1/keys/{key}/rotate"), ("DELETE", "/v1/keys/{key}"))),
}  # fmt: skip
"""What every member may ask: it makes something, does the work of a job, or is of keys, which have their own rule."""


def belongings(house: House, tag: str) -> dict[str, str]:
    """A job, a fine-tuning job, a file, an adapter and a share of ann, by their names in paths."""
    job = submitted(house, "ann", f"job-{tag}")
    house.service.fine_tunings.keep(job["id"], {"model": "small", "training_file": "file-x"})
    file = house.ask("POST", "/v1/files", "ann", files={"file": ("rows.jsonl", ROWS)}).json()
    share = house.ask("POST", "/v1/shares", "ann", json={"name": job["name"], "tenant": "them"}).json()
    who = house.store.tenants.who(house.keys["ann"])
    assert who is not None
    shape: Json = {"bytes": 4, "rank": 32, "alpha": 32.0, "target_modules": ["q_proj"], **who.submitted}
    adapter = UploadedAdapter(id=f"adapter-{tag}", tenant_id=who.tenant_id, name=f"adapter-{tag}", **shape)
    house.service.adapters.add(who, adapter)
    return {"job": job["id"], "word": "pause", "file": file["id"], "adapter": adapter.id, "share": share["id"]}


def change(house: House, key: str, method: str, path: str, of: dict[str, str]) -> Any:
    """The answer to a change of one of them."""
    given = {"worker": "w", "kind": "rewards", "version": "best", "tenant": "none", "key": "none", "rest": "x", **of}
    body = {"/v1/shares": {"name": of["job"], "tenant": "nobody"}, "/v1/jobs/{job}": {"budget": 10**6}}.get(path)
    return house.ask(method, path.replace(":path", "").format(**given), key, json=body if method != "DELETE" else None)


def test_only_submitters_and_admins_change_what_the_page_says(team: House) -> None:
    of = belongings(team, "page")
    refused, others = set(), set()
    for method, path in operations():
        if method == "GET" or path.startswith(("/tinker/", "/v1/tenants")):
            continue
        others.add((method, path))
        answer = change(team, "bob", method, path, of)
        if "was submitted by 'ann'" in answer.text:
            refused.add((method, path))
            assert answer.status_code == 403
            assert "admins of the tenant" in answer.json()["error"]["message"]
    assert refused == CHANGES
    assert others - refused == MEMBERS


@pytest.mark.parametrize("key", ["ann", "head", "admin"])
def test_a_submitter_and_admins_change_it(team: House, key: str) -> None:
    of = belongings(team, key)
    job = team.ask("GET", f"/v1/jobs/{of['job']}", key).json()
    assert (job["may_change"], team.ask("GET", f"/v1/jobs/{of['job']}", "bob").json()["may_change"]) == (True, False)
    for method, path in sorted(CHANGES, key=lambda one: (one[0] == "DELETE", -len(one[1]))):
        if (method, path) == ("DELETE", "/v1/jobs/{job}"):
            team.recorder.record_state(of["job"], JobState.CANCELLED, "")
        answer = change(team, key, method, path, of)
        if (key, path) == ("admin", "/v1/files/{file}"):  # an operator sees no other tenant's rows
            assert answer.status_code == 404
            continue
        assert answer.is_success, (method, path, answer.text)


def test_every_member_changes_what_has_no_submitter(team: House) -> None:
    assert team.ask("DELETE", "/v1/shares/share-1", "bob").status_code == 204
    assert team.ask("DELETE", "/v1/adapters/brought", "bob").status_code == 204
