"""Tenants' consumption over all hosts, and the factors on their shares that even it out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

EVEN_SECONDS = 10.0
"""Seconds between two readings of consumption."""
MOST = 8.0
"""Largest factor on a share, so that other tenants' jobs still progress."""
_LOOKS = 12
"""Readings that count towards a tenant's arrears; older ones are dropped."""


class ClusterShares:
    """One account per tenant, in tokens per share, over all hosts.

    A new tenant starts level with the one that has had the least. A tenant's arrears never exceed the tokens of a few
    readings: waiting longer earns no credit.
    """

    def __init__(self) -> None:
        self._had: dict[str, float] = {}
        self._seen: dict[int, Mapping[str, float]] = {}
        """Values of each host at the last reading."""
        self._recent = 0.0
        """Recent tokens per share between two readings."""

    def update(
        self, used: Mapping[int, Mapping[str, float]], there: Collection[str], shares: Mapping[str, float]
    ) -> dict[str, float]:
        """Add the consumption since the last reading; returns the factor on each tenant's share, 1 for the leader.

        `used` has tokens by host and tenant since the start of each host, `there` the tenants that have jobs; a share is 1
        by default.
        """
        since: defaultdict[str, float] = defaultdict(float)
        for host, tokens in used.items():
            before = self._seen.get(host, {})
            for tenant, now in tokens.items():
                then = before.get(tenant, 0.0)
                since[tenant] += now - then if now >= then else now  # it was started again
        self._seen = {host: dict(tokens) for host, tokens in used.items()}
        had = {
            tenant: self._had[tenant] + since[tenant] / shares.get(tenant, 1.0)
            for tenant in there
            if tenant in self._had
        }
        least, most = min(had.values(), default=0.0), max(had.values(), default=0.0)
        each = sum(since.values()) / sum(shares.get(tenant, 1.0) for tenant in there) if there else 0.0
        self._recent = max(each, 0.9 * self._recent)
        limit = _LOOKS * self._recent
        self._had = {tenant: max(had.get(tenant, least), most - limit) for tenant in there}
        return {tenant: MOST ** ((most - one) / limit) if limit else 1.0 for tenant, one in self._had.items()}
