"""What tenants have had over all hosts, and by how much their shares on each host grow so that it evens out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

EVEN_SECONDS = 10.0
"""Between two looks at what tenants have had."""
MOST = 8.0
"""By how much the share of the tenant that is furthest behind grows: nobody else's jobs stand still meanwhile."""
_LOOKS = 12
"""Looks whose tokens make up the most by which a tenant can be behind: older ones are forgotten."""


class ClusterShares:
    """One account for each tenant, in tokens per share, over all hosts.

    A tenant that comes starts level with the one that has had least. Nobody is further behind whoever has had most than a few
    looks' tokens: waiting, for whatever reason, is no credit beyond that.
    """

    def __init__(self) -> None:
        self._had: dict[str, float] = {}
        self._seen: dict[int, Mapping[str, float]] = {}
        """What each host had counted at the last look."""
        self._recent = 0.0
        """Tokens per share between two looks, as of late."""

    def look(
        self, used: Mapping[int, Mapping[str, float]], there: Collection[str], shares: Mapping[str, float]
    ) -> dict[str, float]:
        """Count what was used since the last look; the factor of each tenant's share on every host, 1 for whoever had most.

        Args:
            used: tokens by host and tenant, since that host started.
            there: tenants that have jobs.
            shares: of tenants; those that are not named have 1.
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
