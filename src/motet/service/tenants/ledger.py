"""The usage ledger: tokens and device time by day, tenant, job and account.

Tokens are counted when they are sampled or trained, whether or not their step ends. A step's event counts what is left of
it in its own transaction, and events are stored once. Work repeated after a crash reports smaller totals, so it counts once;
work repeated because a failed job was resumed counts again.
Device time arrives in numbered windows, and each window is stored once. That of a tenant's completions is divided among
accounts by the tokens that were counted meanwhile.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from typing import Any, Literal

from sqlalchemy import bindparam, case, event, func, or_, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from motet.runtime.device_usage import COMPLETIONS, IDLE, apportion
from motet.service.database.store import AWAY, Store, find_job
from motet.service.database.tables import Key, MeterReading, StoredJob, Tenant, Usage
from motet.service.schemas.usage import By, UsageLine

_WORKED = "worked/"
"""Prefix of a job's id in the name of a reading: a step, and its tokens counted so far."""
_SAMPLED = "sampled/"
"""Prefix of a job's id in the name of a reading: tokens counted as sampled that are in no finished step."""
_MOST_TOKENS = 2**40
_KNOWN_SECONDS = 1.0
_COUNTS = ("tokens_prompt", "tokens_sampled", "tokens_trained", "microseconds", "cpu_microseconds")
_TOKENS = Usage.tokens_prompt + Usage.tokens_sampled + Usage.tokens_trained
_USED = (
    select(Usage.tenant_id, *map(func.sum, (_TOKENS, Usage.microseconds, Usage.cpu_microseconds)))
    .where(Usage.day == bindparam("day"))
    .group_by(Usage.tenant_id)
)
_USED_BY = _USED.where(Usage.tenant_id.in_(bindparam("tenants", expanding=True)))
"""Made once: most chats ask it."""
PLACE = r"^([0-9-]{0,10}/[01][^/]{0,100}/[^/]{0,40}/[^/]{0,40}/.{0,1000})?$"
"""A place among lines of usage: the day, the tenant, the job, the account and the base after which to go on."""
_PLACE = ("day", "whose", "job", "account", "called")


def today() -> str:
    """The current day in UTC."""
    return datetime.now(UTC).date().isoformat()


@dataclass(frozen=True)
class UsedToday:
    """Usage that counts towards daily limits."""

    tokens: int = 0
    device_seconds: float = 0.0
    cpu_seconds: float = 0.0


class Ledger:
    """Usage in the service's database."""

    def __init__(self, store: Store, day: Callable[[], str] = today) -> None:
        """`day` returns the current day."""
        self._store, self.day = store, day
        self._changes = 0
        self._lately: dict[str, tuple[float, tuple[str, int], UsedToday]] = {}
        """When the usage of a tenant was read, on which day and after how many changes, and what it was."""
        self._counting = threading.Lock()
        self._counted: dict[tuple[str, str, str], tuple[int, int]] = {}
        """Tokens of completions not yet stored, by tenant id, base and account: (prompt, sampled)."""
        self._weights: dict[tuple[str, str], tuple[Mapping[str, int], Counter[str]]] = {}
        """Tokens of completions by account, by tenant id and base: in the last window that had some, and since the last one."""
        self._graded = Counter[str]()
        """CPU microseconds of graders not yet stored, by tenant id."""

    def step(self, job_id: str, data: Mapping[str, Any]) -> Callable[[Session], None]:
        """Returns the update for a step's event, to run in the event's transaction."""

        def add(session: Session) -> None:
            job = find_job(session, job_id)
            if job is not None:
                counts = {name: int(data.get(name) or 0) for name in ("tokens_sampled", "tokens_trained")}
                counted = _counted(session, job.id, int(data.get("step", -1)))
                counts["tokens_trained"] = max(0, counts["tokens_trained"] - counted)
                sampled, before = counts["tokens_sampled"], _reading(session, _SAMPLED + job.id)
                counts["tokens_sampled"] = max(0, sampled - before)
                if before:
                    _set_reading(session, _SAMPLED + job.id, max(0, before - sampled))
                self._add(session, [(_owner(job), counts)])

        return add

    def worked(self, job_id: str, step: int, trained: int, sampled: int = 0) -> None:
        """Count the tokens that a job has trained in a step so far, and those sampled that are in no finished step."""
        with self._store.transaction() as session:
            if (job := find_job(session, job_id)) is None:
                return
            counts = {"tokens_trained": 0, "tokens_sampled": 0}
            before = _counted(session, job_id, step)
            if trained and _is_new(session, _WORKED + job_id, step * _MOST_TOKENS + trained):
                counts["tokens_trained"] = trained - before
            before = _reading(session, _SAMPLED + job_id)
            if step >= job.step and sampled > before:  # earlier steps are repeated after a crash
                counts["tokens_sampled"] = sampled - before
                _set_reading(session, _SAMPLED + job_id, sampled)
            self._add(session, [(_owner(job), counts)])

    def begin_again(self, job_id: str) -> None:
        """A failed job is resumed: a host counts its unfinished work from 0, all of it new."""
        with self._store.transaction() as session:
            job = find_job(session, job_id)
            _set_reading(session, _SAMPLED + job_id, 0)
            if job is not None and job.spec["algorithm"]["type"] != "client":  # its journal has what was counted
                _set_reading(session, _WORKED + job_id, 0)

    def window(
        self,
        engine: str,
        number: int,
        microseconds: Mapping[str, int],
        cpu: Mapping[str, int] | None = None,
        read: Mapping[str, int] | None = None,
        *,
        base: str = "",
    ) -> bool:
        """Store a window of device time, CPU time and prompts, with a number that increases; False if it is stored already.

        `microseconds` are by job, by tenant (`COMPLETIONS` and its id), and `IDLE`; `read` has tokens by job. A job's
        usage counts for the base stored with the job, other usage for `base`.
        """
        with self._store.transaction() as session:
            if not _is_new(session, engine, number):
                return False
            counts = Counter(microseconds), Counter(cpu or {}), Counter(read or {})
            names = sorted({name for count in counts for name in count})  # a fixed order: transactions cannot deadlock
            owners = _owners(session, [name for name in names if name.startswith("job-")])
            more = list[tuple[_Owner, Mapping[str, int]]]()
            for name in names:
                kinds = zip(("microseconds", "cpu_microseconds", "tokens_prompt"), counts, strict=True)
                used = {kind: count[name] for kind, count in kinds}
                if name.startswith(COMPLETIONS):
                    more += self._by_account(name.removeprefix(COMPLETIONS), base, used)
                else:
                    more.append((owners.get(name, ("", "" if name == IDLE else name, "", base, "")), used))
            self._add(session, more)
        return True

    def _by_account(self, tenant_id: str, base: str, used: Mapping[str, int]) -> list[tuple[_Owner, Mapping[str, int]]]:
        """What a tenant's completions used in a window, divided by the tokens that were counted meanwhile."""
        with self._counting:
            before, since = self._weights.get((tenant_id, base), ({"": 1}, Counter()))
            weights = +since or before
            self._weights[tenant_id, base] = weights, Counter()
        parts = {kind: apportion(total, weights) for kind, total in used.items()}
        return [
            ((tenant_id, "", "", base, account), {kind: part[account] for kind, part in parts.items()})
            for account in sorted(weights)
        ]

    def count_completion(self, tenant_id: str, base: str, prompt: int, sampled: int, account: str = "") -> None:
        """Count tokens of a completion until `flush` stores them."""
        with self._counting:
            self._count((tenant_id, base, account), prompt, sampled)
            self._weights.setdefault((tenant_id, base), ({"": 1}, Counter()))[1][account] += prompt + sampled

    def _count(self, owner: tuple[str, str, str], prompt: int, sampled: int) -> None:
        before = self._counted.get(owner, (0, 0))
        self._counted[owner] = (before[0] + prompt, before[1] + sampled)

    def count_cpu(self, tenant_id: str, seconds: float) -> None:
        """Count CPU time of a tenant's graders until `flush` stores it."""
        with self._counting:
            self._graded[tenant_id] += round(1e6 * seconds)

    def keep_owner(self, job: StoredJob) -> None:
        """Store a line without usage of a job that is deleted: what is reported later finds its tenant by it."""
        with self._store.transaction() as session:
            owner = dict(zip(_OWNER, _owner(job), strict=True))
            line = _insert(session)(Usage).values(day=self.day(), **owner, **dict.fromkeys(_COUNTS, 0))
            session.execute(line.on_conflict_do_nothing())

    def flush(self) -> None:
        """Store the counted completions and graders."""
        with self._counting:
            counted, self._counted = self._counted, {}
            graded, self._graded = self._graded, Counter[str]()
        if not counted and not graded:
            return
        try:
            with self._store.transaction() as session:
                more = [
                    ((tenant, "", "", base, account), {"tokens_prompt": prompt, "tokens_sampled": sampled})
                    for (tenant, base, account), (prompt, sampled) in sorted(counted.items())
                ]
                self._add(session, more)
                cpu = [((tenant, "", "", "", ""), {"cpu_microseconds": graded[tenant]}) for tenant in sorted(graded)]
                self._add(session, cpu)
        except AWAY:
            with self._counting:  # kept for the next call, when the database may be back; their weights are counted
                self._graded.update(graded)
                for owner, tokens in counted.items():
                    self._count(owner, *tokens)
            raise

    def used_today(self, *tenants: str) -> dict[str, UsedToday]:
        """Usage of the current day by tenant id, of these tenants, or of all."""
        which = {"day": self.day(), **({"tenants": tenants} if tenants else {})}
        with self._store.transaction() as session:
            return {
                str(row[0]): UsedToday(int(row[1]), int(row[2]) / 1e6, int(row[3]) / 1e6)
                for row in session.execute(_USED_BY if tenants else _USED, which)
            }

    def used_lately(self, tenant_id: str) -> UsedToday:
        """Usage of the current day of a tenant; what another process stored is seen within a second."""
        state = self.day(), self._changes
        read, known, used = self._lately.get(tenant_id, (-math.inf, None, UsedToday()))
        if known != state or time.monotonic() > read + _KNOWN_SECONDS:
            read = time.monotonic()
            used = self.used_today(tenant_id).get(tenant_id, UsedToday())
            self._lately[tenant_id] = read, state, used
        with self._counting:  # else they would be neither open nor used
            counted = sum(sum(tokens) for (whose, *_), tokens in self._counted.items() if whose == tenant_id)
        return replace(used, tokens=used.tokens + counted)

    def _add(self, session: Session, more: Sequence[tuple[_Owner, Mapping[str, int]]]) -> None:
        """Add to rows in this order, creating those that are not there: one statement for all of them."""
        rows = [
            {
                "day": self.day(), **dict(zip(_OWNER, owner, strict=True)), **dict.fromkeys(_COUNTS, 0), **counts,
            }
            for owner, counts in more
            if any(counts.values())
        ]  # fmt: skip
        if rows:
            statement = _insert(session)(Usage)
            sums = {name: getattr(Usage, name) + getattr(statement.excluded, name) for name in _COUNTS}
            once = ["day", "tenant_id", "job_id", "base", "account"]
            session.execute(statement.on_conflict_do_update(index_elements=once, set_=sums), rows)
        event.listen(session, "after_commit", self._changed, once=True)

    def _changed(self, session: Session) -> None:
        self._changes += 1

    def tokens_of(self, job_id: str) -> int:
        """Tokens sampled and trained by a job so far, which its budget limits."""
        query = select(func.coalesce(func.sum(Usage.tokens_sampled + Usage.tokens_trained), 0))
        query = query.where(Usage.job_id == job_id)
        return int(self._store.scalar(query) or 0)

    def page(
        self,
        tenant_id: str | None,
        by: Sequence[By] = ("job",),
        since: date | str | None = None,
        until: date | str | None = None,
        called: Callable[[str], str] | None = None,
        after: str = "",
        limit: int = 1000,
    ) -> tuple[list[UsageLine], str | None]:
        """Usage lines of a tenant or, with None, of all and of the idle device, and the place after which there are more.

        `since` and `until` are days. `called` maps a stored base to its current name; without it, lines have no base.
        `after` matches `PLACE`.
        """
        wanted = [
            or_(*(getattr(Usage, name) > 0 for name in _COUNTS)),  # other lines keep owners of jobs that did nothing
            *([] if tenant_id is None else [Usage.tenant_id == tenant_id]),
            *([] if since is None else [Usage.day >= str(since)]),
            *([] if until is None else [Usage.day <= str(until)]),
        ]
        place: dict[str, Any] = {
            **({"day": Usage.day} if "day" in by else {}),
            "whose": case((Tenant.name.is_(None), "1"), else_="0" + Tenant.name),  # idle time last
            **({"job": Usage.job_id} if "job" in by else {}),
            **({"account": Usage.account} if "key" in by else {}),
        }
        with self._store.transaction() as session:
            if called is not None:
                stored = session.scalars(select(Usage.base).where(*wanted).distinct())
                names = {base: called(base) for base in stored} or {"": ""}
                place["called"] = case(names, value=Usage.base, else_="")
            sums = [func.sum(getattr(Usage, name)).label(name) for name in _COUNTS]
            query = select(Usage.tenant_id, Tenant.name, func.max(Usage.job_name).label("job_name"), *sums)
            query = query.add_columns(*(column.label(name) for name, column in place.items()))
            query = query.outerjoin(Tenant, Tenant.id == Usage.tenant_id).where(*wanted)
            groups = [name if name == "called" else column for name, column in place.items() if name != "whose"]
            query = query.group_by(Usage.tenant_id, Tenant.name, *groups)
            if after:
                known = dict(zip(_PLACE, after.split("/", len(_PLACE) - 1), strict=True))
                query = query.where(tuple_(*place.values()) > tuple_(*(known[name] for name in place)))
            rows = [row._mapping for row in session.execute(query.order_by(*place).limit(limit + 1))]
            names = _names(session, {(row["tenant_id"], row["account"]) for row in rows if row.get("account")})
        following = "/".join(rows[limit - 1].get(name, "") for name in _PLACE) if len(rows) > limit else None
        return [_line(row, by, names) for row in rows[:limit]], following


def _names(session: Session, whose: Collection[tuple[str, str]]) -> dict[str, str]:
    """Names of people and keys by tenant id and account; of those whose keys are gone, from their jobs."""
    names, left = dict[str, str](), {account for _, account in whose}
    for table in (Key, StoredJob):
        if left:
            named = select(table.account, func.max(table.submitter)).group_by(table.account)
            found = named.where(table.tenant_id.in_({tenant for tenant, _ in whose}), table.account.in_(left))
            names |= {str(row[0]): str(row[1]) for row in session.execute(found)}
            left -= names.keys()
    return names


def _line(row: Mapping[Any, Any], by: Sequence[By], names: Mapping[str, str]) -> UsageLine:
    job, account = str(row.get("job") or ""), str(row.get("account") or "")
    kind: Literal["job", "completions", "idle", "all"] = "job" if job else "completions"
    if row["name"] is None and not job:
        kind = "idle"
    elif "job" not in by:
        kind = "all"
    return UsageLine(
        day=row.get("day"),
        tenant=row["name"],
        job=job or None,
        name=row["job_name"] if job else None,
        kind=kind,
        tokens_prompt=int(row["tokens_prompt"]),
        tokens_sampled=int(row["tokens_sampled"]),
        tokens_trained=int(row["tokens_trained"]),
        device_seconds=int(row["microseconds"]) / 1e6,
        cpu_seconds=int(row["cpu_microseconds"]) / 1e6,
        base=row.get("called"),
        submitter=names.get(account, account) or None,
        account=account or None,
    )


def _insert(session: Session) -> Any:
    """The database's insert with conflict handling."""
    return postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert


_Owner = tuple[str, str, str, str, str]
_OWNER = ("tenant_id", "job_id", "job_name", "base", "account")
"""Its columns."""


def _owner(job: StoredJob) -> _Owner:
    return job.tenant_id, job.id, job.name, job.base or "", job.account or ""


def _is_new(session: Session, engine: str, number: int) -> bool:
    """Whether a window is new; records it."""
    later = update(MeterReading).where(MeterReading.engine == engine, MeterReading.window < number)
    if session.scalar(later.values(window=number).returning(MeterReading.window)) is not None:
        return True
    first = _insert(session)(MeterReading).values(engine=engine, window=number).on_conflict_do_nothing()
    return session.scalar(first.returning(MeterReading.window)) is not None


def _counted(session: Session, job_id: str, step: int) -> int:
    """Tokens of an unfinished step that were counted already."""
    of, tokens = divmod(_reading(session, _WORKED + job_id), _MOST_TOKENS)
    return tokens if of == step else 0


def _reading(session: Session, name: str) -> int:
    """A reading; 0 if there is none."""
    return session.scalar(select(MeterReading.window).where(MeterReading.engine == name)) or 0


def _set_reading(session: Session, name: str, value: int) -> None:
    row = _insert(session)(MeterReading).values(engine=name, window=value)
    session.execute(row.on_conflict_do_update(index_elements=["engine"], set_={"window": value}))


def _owners(session: Session, jobs: Sequence[str]) -> dict[str, _Owner]:
    """Owners of jobs; for deleted jobs, from their usage."""
    columns = (StoredJob.tenant_id, StoredJob.id, StoredJob.name, StoredJob.base, StoredJob.account)
    known = (Usage.tenant_id, Usage.job_id, Usage.job_name, Usage.base, Usage.account)
    before = session.execute(select(*known).where(Usage.job_id.in_(jobs)).distinct()).all()
    there = session.execute(select(*columns).where(StoredJob.id.in_(jobs))).all()
    return {
        str(row[1]): (str(row[0]), str(row[1]), str(row[2]), row[3] or "", row[4] or "") for row in (*before, *there)
    }
