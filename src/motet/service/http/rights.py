"""What keys may do: each request needs one right, and a key has those of its role, or of them only those in its scope."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from motet.service.database.tenants import Principal
from motet.service.errors import Refusal

Right = Literal["read", "jobs", "completions", "files", "keys", "service"]
ROLES: dict[str, frozenset[Right]] = {
    "reader": frozenset({"read"}),
    "member": frozenset({"read", "jobs", "completions", "files", "keys"}),
    "tenant-admin": frozenset({"read", "jobs", "completions", "files", "keys"}),
    "admin": frozenset({"read", "jobs", "completions", "files", "keys", "service"}),
}
"""From the least on; an admin of a tenant sees all its keys, a member those that its own key made."""
_TINKER = "/tinker/api/v1"
_LOOKS = (
    "/v1/check", *(f"{_TINKER}/{name}" for name in (
        "client/", "create_session", "session_heartbeat", "telemetry", "get_info", "weights_info", "retrieve_future",
    )),
)  # fmt: skip
"""Where a POST changes nothing."""
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
"""(the right, the methods (any where none is named), the beginnings of paths); the first that fits counts."""


def needed(method: str, path: str) -> Right:
    """The right that a request needs."""
    for right, methods, beginnings in _RULES:
        if (not methods or method in methods) and path.startswith(beginnings):
            return right
    raise AssertionError(path)


def rights(who: Principal) -> frozenset[str]:
    """What a key may do."""
    of_role = ROLES.get(who.role, frozenset())
    return of_role if who.scope is None else of_role & who.scope


def check(who: Principal, method: str, path: str) -> None:
    """Look whether a key may ask this.

    Raises:
        Refusal: it may not, and what it may.
    """
    right = needed(method, path)
    if right in rights(who):
        return
    if right == "service":
        raise Refusal(403, "this needs an admin's key")
    has = ", ".join(sorted(rights(who))) or "nothing"
    raise Refusal(403, f"this needs the right {right!r}, and the key may do: {has}; ask with a key that has it")


def check_new(who: Principal, role: str, expires: float | None) -> None:
    """Look whether a key may make another of a role that ends then.

    Raises:
        Refusal: it may not.
    """
    ranks = list(ROLES)
    if ranks.index(role) > ranks.index(who.role):
        raise Refusal(
            403, f"a {who.role}'s key cannot make a key of the role {role}; ask someone whose role is higher", "role"
        )
    if who.expires is not None and (expires is None or expires > who.expires):
        raise Refusal(
            403, "a key cannot make one that outlives it: give expires_days within its own time", "expires_days"
        )
