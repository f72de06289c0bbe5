"""A cache that tells no tenant what another one has in it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class TenantCache(Generic[Key, Value]):
    """Values by tenant and key. If it is full, the tenant with the most values loses the one that it used least recently."""

    def __init__(self, most: int, of_one: int | None = None) -> None:
        """`most` is the number of values of all tenants together, `of_one` that of one tenant; None is `most`."""
        self._most, self._of_one, self._values = most, of_one or most, dict[str, OrderedDict[Key, Value]]()

    def get(self, tenant: str, key: Key) -> Value | None:
        """The tenant's value; None if it has none."""
        own = self._values.get(tenant)
        if own is None or key not in own:
            return None
        own.move_to_end(key)
        return own[key]

    def put(self, tenant: str, key: Key, value: Value) -> None:
        """Keep a value for a tenant."""
        own = self._values.setdefault(tenant, OrderedDict())
        own[key] = value
        own.move_to_end(key)
        if len(own) > self._of_one:
            own.popitem(last=False)
        while sum(map(len, self._values.values())) > self._most:
            name, most = max(self._values.items(), key=lambda item: len(item[1]))
            most.popitem(last=False)
            if not most:
                del self._values[name]
