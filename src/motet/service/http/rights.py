"""Rights of keys: each request needs one right; a key has those of its role, limited by its scope."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from motet.service.database.tables import Submitted
from motet.service.database.tenants import Principal
from motet.service.errors import Refusal

Right = Literal["read", "jobs", "completions", "files", "keys", "service"]
ROLES: dict[str, frozenset[Right]] = {
    "reader": frozenset({"read"}),
    "member": frozenset({"read", "jobs", "completions", "files", "keys"}),
    "tenant-admin": frozenset({"read", "jobs", "completions", "files", "keys"}),
    "admin": frozenset({"read", "jobs", "completions", "files", "keys", "service"}),
}
"""In ascending order. An admin of a tenant sees all its keys, a member those that its own key created."""
_TINKER = "/tinker/api/v1"
_LOOKS = (
    "/v1/check", *(f"{_TINKER}/{name}" for name in (
        "client/", "create_session", "session_heartbeat", "telemetry", "get_info", "weights_info", "retrieve_future",
    )),
)  # fmt: skip
"""POST requests that change nothing."""
_RULES: tuple[tuple[Right, Collection[str], tuple[str, ...]], ...] = (
    ("keys", (), ("/v1/keys",)),
    ("service", (), ("/v1/audit", "/v1/tenants", "/metrics")),
    ("read", ("GET", "HEAD"), ("/",)),
    ("read", ("POST",), _LOOKS),
    ("read", ("DELETE",), ("/v1/login",)),
    ("completions", ("POST",), (
        "/v1/chat/", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/fine_tuning/alpha/", f"{_TINKER}/asample",
        f"{_TINKER}/cancel_future", f"{_TINKER}/create_sampling_session",
    )),
    ("files", (), ("/v1/files", "/v1/adapters", "/v1/shares")),
    ("jobs", (), ("/",)),
)  # fmt: skip
"""(right, methods (empty for any), path prefixes); the first match counts."""


def needed(method: str, path: str) -> Right:
    """The right that a request needs."""
    for right, methods, beginnings in _RULES:
        if (not methods or method in methods) and path.startswith(beginnings):
            return right
    raise AssertionError(path)


def rights(who: Principal) -> frozenset[str]:
    """The rights of a key."""
    of_role = ROLES.get(who.role, frozenset())
    return of_role if who.scope is None else of_role & who.scope


def check(who: Principal, method: str, path: str) -> None:
    """Check that a key may send this request. Raises Refusal if it may not; the message lists its rights."""
    right = needed(method, path)
    if right in rights(who):
        return
    if right == "service":
        raise Refusal(403, "this needs an admin's key")
    has = ", ".join(sorted(rights(who))) or "nothing"
    raise Refusal(403, f"this needs the right {right!r}, and the key may do: {has}; ask with a key that has it")


def check_change(who: Principal, thing: Submitted, name: str) -> None:
    """Check that a key may change or delete a job, an upload or an adapter of its tenant. Raises Refusal if it may not."""
    if not who.may_change(thing):
        raise Refusal(
            403,
            f"{name} was submitted by {thing.submitter!r}, who may change it, as may admins of the tenant; ask one of them",
        )


def check_new(who: Principal, role: str, expires: float | None) -> None:
    """Check that a key may create another with this role and expiry. Raises Refusal if it may not."""
    ranks = list(ROLES)
    if ranks.index(role) > ranks.index(who.role):
        raise Refusal(
            403, f"a {who.role}'s key cannot make a key of the role {role}; ask someone whose role is higher", "role"
        )
    if who.expires is not None and (expires is None or expires > who.expires):
        raise Refusal(
            403, "a key cannot make one that outlives it: give expires_days within its own time", "expires_days"
        )
