"""What keys may do: every route with every role and scope, and keys that people make for themselves."""

from __future__ import annotations

import contextlib
import itertools
import re
import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.exc import OperationalError

from motet.service.database.tables import Key, new_id, now
from motet.service.database.tenants import MOST_KEYS
from motet.service.http.rights import ROLES, needed
from tests.support.house import House, error_of
from tests.support.keyed_routes import operations
from tests.support.service_run import Json

pytestmark = pytest.mark.tier1

EXPECTED = {
    "completions": {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions", "/tinker/api/v1/asample"},
    "files": {"/v1/files", "/v1/adapters", "/v1/shares"},
    "jobs": {"/v1/jobs", "/v1/jobs/{job}/work/{kind}/lease", "/v1/fine_tuning/jobs",
             "/tinker/api/v1/forward_backward", "/tinker/api/v1/create_model"},
    "keys": {"/v1/keys"},
    "read": {"/v1/check", "/tinker/api/v1/retrieve_future"},
}  # fmt: skip
"""Routes with POST that show what each right is for."""


def filled(path: str) -> str:
    """A path that names nothing that is there."""
    return re.sub(r"\{\w+\}", "none", path.replace("{word}", "pause"))


def key_of(house: House, name: str, role: Any, scope: list[str] | None = None, **more: Any) -> str:
    """A key of the tenant `us`; gives its id."""
    key, house.keys[name] = house.store.tenants.create_key("us", name, role, scope=scope, **more)
    return key.id


def test_every_right_is_of_the_routes_that_it_should_be() -> None:
    for right, paths in EXPECTED.items():
        assert {needed("POST", path) for path in paths} == {right}
    known = {(method, path): needed(method, path) for method, path in operations()}
    assert {right for (method, _), right in known.items() if method == "GET"} == {"read", "keys", "service"}
    assert {path for (method, path), right in known.items() if right == "service"} == {
        "/v1/audit", "/v1/tenants", "/v1/tenants/{tenant}", "/v1/tenants/{tenant}/limits", "/metrics",
    }  # fmt: skip
    changing = {path for (method, path), right in known.items() if right == "read" and method != "GET"}
    assert all(path == "/v1/check" or path.startswith("/tinker/") for path in changing)
    assert len(known) > 90


def test_every_route_is_refused_to_a_key_without_its_right(house: House) -> None:
    who: list[tuple[str, list[str] | None, frozenset[str]]] = [
        (role, None, frozenset(rights)) for role, rights in ROLES.items() if role != "tenant-admin"
    ]  # which has a member's rights
    who.append(("admin", ["completions"], frozenset({"completions"})))
    for role, scope, _ in who:
        key_of(house, f"{role} {scope}", role, scope)
    for (role, scope, rights), (method, path) in itertools.product(who, operations()):
        if path == "/v1/events/stream" and "read" in rights:  # which does not end
            continue
        answer = house.ask(method, filled(path), f"{role} {scope}", json={"tenant": "!"})
        words = ("needs the right", "needs an admin's key")
        refused = answer.status_code == 403 and any(one in answer.text for one in words)
        assert refused == (needed(method, path) not in rights), (role, scope, method, path, answer.text)


# --- one's own ------------------------------------------------------------------------------------------------------------


def listed(house: House, key: str) -> set[str]:
    """The names of the keys that a key sees."""
    return {one["name"] for one in house.ask("GET", "/v1/keys", key).json()["data"]}


def made(house: House, by: str, name: str, **wanted: Any) -> Json:
    """A key that another made."""
    answer = house.ask("POST", "/v1/keys", by, json={"name": name, **wanted})
    assert answer.status_code == 201, answer.text
    new: Json = answer.json()
    house.keys[name] = new["key"]
    return new


def test_a_member_makes_narrower_keys_that_end_with_its_own(house: House) -> None:
    own = key_of(house, "person", "member")
    child = made(house, "person", "laptop", scope=["read", "jobs"], expires_days=1)
    assert (child["tenant"], child["role"], child["scope"]) == ("us", "member", ["jobs", "read"])
    made(house, "person", "second")
    made(house, "second", "third")
    assert listed(house, "person") == {"person", "laptop", "second"}
    assert house.ask("GET", "/v1/jobs", "laptop").is_success
    for key in ("second", "theirs", "ours"):
        house.refused(404, "DELETE", f"/v1/keys/{own}", key)
    assert "keys" in house.refused(403, "GET", "/v1/keys", "laptop")["message"]
    for wanted in ({"role": "tenant-admin"}, {"role": "admin"}, {"tenant": "them"}):
        house.refused(403, "POST", "/v1/keys", "person", json=wanted)
    assert house.ask("DELETE", f"/v1/keys/{child['id']}", "person").status_code == 204
    house.refused(401, "GET", "/v1/jobs", "laptop")
    assert house.ask("DELETE", f"/v1/keys/{own}", "person").status_code == 204
    for key in ("person", "second", "third"):
        assert error_of(house.ask("GET", "/v1/jobs", key))["type"] == "authentication_error"


def test_no_key_outlives_the_one_that_made_it(house: House) -> None:
    key_of(house, "short", "member", expires=now() + 3600)
    message = house.refused(403, "POST", "/v1/keys", "short", json={"expires_days": 1.0})["message"]
    assert "outlives" in message
    assert made(house, "short", "shorter", expires_days=0.01)["expires"] < now() + 3600
    assert 0 < made(house, "short", "as long")["expires"] - now() <= 3600


def test_a_key_is_rotated_with_what_it_may_do(house: House) -> None:
    old = key_of(house, "turning", "member")
    made(house, "turning", "kept")
    new = house.ask("POST", f"/v1/keys/{old}/rotate", "turning").json()
    assert (new["name"], new["role"], new["scope"]) == ("turning", "member", None)
    house.refused(401, "GET", "/v1/jobs", "turning")
    house.keys["turning"] = new["key"]
    assert listed(house, "turning") == {"turning", "kept"}
    assert house.ask("GET", "/v1/jobs", "kept").is_success
    house.refused(404, "POST", f"/v1/keys/{old}/rotate", "turning")
    house.refused(404, "POST", f"/v1/keys/{old}/rotate", "admin")


# --- many keys ------------------------------------------------------------------------------------------------------------


def crowd(house: House, tenant: str, number: int, revoked: float | None) -> None:
    """So many keys of a tenant."""
    owner = house.store.tenants.made(tenant).id
    rows = [
        Key(
            id=new_id("key"), tenant_id=owner, digest=new_id(tenant), name="one of many", role="member", revoked=revoked
        )
        for _ in range(number)
    ]
    with house.store.transaction() as session:
        session.add_all(rows)


def loaded(house: House, tenant: str) -> list[int]:
    """How many keys are read when a new tenant's admin lists, makes, rotates and revokes some."""
    found = []
    head, house.keys[tenant] = house.store.tenants.create_key(tenant, "head", "tenant-admin")
    member, _ = house.store.tenants.create_key(tenant, "member", "member")
    changes = (("GET", ""), ("POST", ""), ("POST", f"/{member.id}/rotate"), ("DELETE", f"/{head.id}"))
    for method, path in changes:
        keys: list[object] = []

        def note(key: object, _: object, keys: list[object] = keys) -> None:
            keys.append(key)

        event.listen(Key, "load", note)
        answer = house.ask(method, f"/v1/keys{path}", tenant, json={} if (method, path) == ("POST", "") else None)
        event.remove(Key, "load", note)
        assert answer.is_success, answer.text
        found.append(len(keys))
    return found


def test_keys_of_other_tenants_are_not_read(house: House) -> None:
    before = loaded(house, "alone")
    crowd(house, "crowd", MOST_KEYS + 1000, 1.0)
    crowd(house, "crowd", 1000, None)
    assert loaded(house, "not alone") == before
    ended = [one for one in house.ask("GET", "/v1/keys", "admin").json()["data"] if one["revoked"] == 1.0]
    assert 0 < len(ended) <= MOST_KEYS


def test_a_tenant_has_so_many_keys_that_have_not_ended(house: House) -> None:
    crowd(house, "full", MOST_KEYS - 2, None)
    crowd(house, "full", 10, 1.0)
    head, house.keys["head of many"] = house.store.tenants.create_key("full", "head", "tenant-admin")
    last = made(house, "head of many", "the last")
    for by in ("head of many", "admin"):
        message = house.refused(409, "POST", "/v1/keys", by, json={"tenant": "full"})["message"]
        assert "1000 keys that have not ended" in message
        assert "motet keys revoke" in message
    house.store.tenants.sign_in("full", "someone", "member", now() + 60, "a person")
    assert house.ask("POST", f"/v1/keys/{last['id']}/rotate", "head of many").status_code == 201
    assert house.ask("DELETE", f"/v1/keys/{head.id}", "admin").status_code == 204
    assert house.ask("POST", "/v1/keys", "admin", json={"tenant": "full"}).status_code == 201


@contextlib.contextmanager
def no_room_for_audit() -> Iterator[None]:
    """A disk that is full once the audit log is written to."""

    def listen(connection: Any, cursor: Any, statement: str, *more: Any) -> None:
        if statement.startswith("INSERT INTO audit"):
            raise OperationalError(statement, None, sqlite3.OperationalError("database or disk is full"))

    event.listen(Engine, "before_cursor_execute", listen)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", listen)


def test_a_key_is_not_lost_when_the_disk_fills_up(house: House) -> None:
    own = key_of(house, "unlucky", "member")
    with no_room_for_audit():
        house.refused(503, "POST", f"/v1/keys/{own}/rotate", "unlucky")
        house.refused(503, "POST", "/v1/keys", "unlucky", json={"name": "unheard of"})
    assert listed(house, "unlucky") == {"unlucky"}
    new = house.ask("POST", f"/v1/keys/{own}/rotate", "unlucky").json()
    made(house, "admin", "told", tenant="us")
    entries = house.ask("GET", "/v1/audit?limit=2", "admin").json()["data"]
    assert [(one["action"], one["key_name"]) for one in entries] == [("create key", "admin"), ("rotate key", "unlucky")]
    assert entries[1]["object"] == own != new["id"]


@pytest.mark.parametrize("word", ["rotate", "revoke"])
def test_a_tenants_admin_has_its_keys_and_none_of_a_higher_role(house: House, word: str) -> None:
    key_of(house, f"head {word}", "tenant-admin")
    member, admin = key_of(house, f"a member {word}", "member"), key_of(house, f"an admin {word}", "admin")
    assert {f"a member {word}", f"an admin {word}", "ours"} <= listed(house, f"head {word}")
    assert "theirs" not in listed(house, f"head {word}")

    def act(key: str) -> int:
        way = ("POST", f"/v1/keys/{key}/rotate") if word == "rotate" else ("DELETE", f"/v1/keys/{key}")
        return house.ask(*way, f"head {word}").status_code

    assert act(admin) == 403
    assert house.ask("GET", "/v1/tenants", f"an admin {word}").is_success
    assert act(member) in (201, 204)
    assert house.refused(403, "POST", "/v1/keys", f"head {word}", json={"role": "admin"})["param"] == "role"


def test_a_key_that_samples_ends_no_gradients(house: House) -> None:
    key_of(house, "chat app", "member", ["completions"])
    path, model = "/tinker/api/v1/cancel_future", "session-0123456789abcdef:train:0"
    said = house.refused(403, "POST", path, "chat app", json={"request_id": f"{model}/1"})["message"]
    assert "'jobs'" in said
    assert house.ask("POST", path, "chat app", json={"request_id": "sample-1"}).is_success
