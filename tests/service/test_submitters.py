"""Who submitted what: the name is shown with everything that a key makes, and decides who may change it."""

from __future__ import annotations

from typing import Any

import pytest

from motet.service.database.tables import now
from tests.support.house import House
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
