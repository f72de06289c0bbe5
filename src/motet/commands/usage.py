"""What usage and tenants do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from motet.client import Client
from motet.commands.remote import Where, show_json
from motet.commands.remote_view import table
from motet.config.service import LimitsConfig
from motet.errors import ConfigError
from motet.service.schemas.usage import By, TenantInfo, UsageLine
from motet.view.text import duration_text

Form = Literal["table", "csv", "json"]


def show(where: Where, by: Sequence[By], since: str | None, until: str | None, tenant: str | None, form: Form) -> None:
    """Usage as a table, as CSV or as JSON."""
    with Client(where.url, where.key) as client:
        if form == "csv":
            print(client.usage_csv(by, since, until, tenant), end="")
            return
        found = client.usage(by, since, until, tenant)
    if form == "json":
        show_json(found)
        return
    Console(emoji=False).print(_usage_table(found) if found else "nothing was used")


def _usage_table(lines: Sequence[UsageLine]) -> Any:
    days = any(line.day for line in lines)
    counts = ("prompts", "sampled", "trained", "device")
    rows = table(*(["day"] if days else []), "tenant", "job", *counts, folds=("job", "tenant"), right=counts)
    for line in lines:
        what = line.name or {"completions": "(completions)", "idle": "(idle)"}.get(line.kind, "")
        tokens = (line.tokens_prompt, line.tokens_sampled, line.tokens_trained)
        cells = (line.tenant or "", what, *(f"{n:,}" for n in tokens), duration_text(line.device_seconds))
        rows.add_row(*map(Text, ([line.day or ""] if days else []) + list(cells)))
    return rows


def list_tenants(where: Where, *, as_json: bool) -> None:
    """A table of tenants."""
    with Client(where.url, where.key) as client:
        found = client.tenants()
    if as_json:
        show_json(found)
        return
    right = ("running", "waiting", "tokens today", "MB", "rank", "steps", "share")
    rows = table("tenant", *right[:4], *right[4:6], "priority", right[6], folds=("tenant",), right=right)
    for one in found:
        rows.add_row(*map(Text, _cells(one)))
    Console(emoji=False).print(rows if found else "no tenants")


def _cells(one: TenantInfo) -> tuple[str, ...]:
    limits = one.limits

    def of(used: str, most: object) -> str:
        return used if most is None else f"{used}/{most}"

    return (
        one.name,
        of(str(one.running), limits.running_jobs),
        of(str(one.waiting), limits.queued_jobs),
        of(f"{one.tokens_today:,}", None if limits.tokens_per_day is None else f"{limits.tokens_per_day:,}"),
        of(f"{one.stored_bytes / 2**20:.1f}", None if limits.storage_mb is None else f"{limits.storage_mb:g}"),
        "" if limits.rank is None else str(limits.rank),
        "" if limits.steps is None else str(limits.steps),
        limits.priority or "",
        f"{limits.share:g}",
    )


def set_limits(where: Where, tenant: str, given: Mapping[str, str | None], *, as_json: bool) -> None:
    """Change some of a tenant's own limits, the others stay.

    Raises:
        ConfigError: there is no such tenant, or nothing to change.
    """
    changes = {name: value for name, value in given.items() if value is not None}
    if not changes:
        raise ConfigError(f"say what to change, such as: motet tenants limit {tenant} --running-jobs 2")
    with Client(where.url, where.key) as client:
        known = next((one for one in client.tenants() if one.name == tenant), None)
        if known is None:
            raise ConfigError(f"there is no tenant {tenant!r}; motet keys create {tenant} makes one")
        own = {name: getattr(known.limits, name) for name in known.own}
        for name, value in changes.items():
            own.pop(name, None)
            if value != "default":
                own[name] = None if value == "none" else _value(name, value)
        found = client.set_limits(tenant, own)
    if as_json:
        show_json(found)
        return
    told = {name: getattr(found.limits, name) for name in LimitsConfig.model_fields}
    print(f"{tenant}: " + ", ".join(f"{name} {'none' if most is None else most}" for name, most in told.items()))


def _value(name: str, text: str) -> str | float | int:
    if name == "priority":
        return text
    try:
        return int(text) if name not in ("share", "storage_mb", "cpu_seconds", "wall_seconds") else float(text)
    except ValueError:
        option = name.replace("_", "-")
        raise ConfigError(f"--{option} {text!r} must be a number, `none` or `default`") from None
