"""Tenants, their keys, and the principal of a request."""

from __future__ import annotations

import contextlib
import hashlib
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass

from sqlalchemy import BindParameter, ColumnElement, Float, bindparam, delete, func, not_, or_, select, tuple_, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from motet.config.service import Role
from motet.core.errors import StoreError
from motet.service.database.tables import AuditEntry, ClosedTenant, Key, Submitted, Tenant, new_id, now

MOST_SIGN_INS = 20
"""Most open sign-ins per person."""
PLACE_OF_KEY = r"^([0-9]{1,15}\.[0-9]{1,20}/[0-9A-Za-z_.-]{1,60})?$"
"""A place in a list of keys: the key after which to go on."""
MOST_KEYS = 1000
"""Most keys of a tenant that have not ended, without sign-ins; also the most ended ones in a list."""
PREFIX = "mk-"
"""Prefix of API keys."""
_MOST_ENDED, _AT_ONCE = 2 * MOST_KEYS, 100
"""Ended keys of a tenant that are kept, with sign-ins; older ones are deleted, so many at once."""
_KNOWN_SECONDS = 1.0
_MOST_KNOWN = 10_000
"""Keys whose tenants are kept in memory."""


@dataclass(frozen=True)
class Principal:
    """The authenticated requester."""

    tenant_id: str
    tenant: str
    key_id: str
    role: str
    scope: frozenset[str] | None = None
    """The subset of its role's rights that the key has; None for all."""
    expires: float | None = None
    """Expiry of the key in Unix seconds."""
    name: str = ""
    """Name of the key; for a sign-in, of the person."""
    signed_in: bool = False
    """Whether the key comes from a sign-in."""
    account: str | None = None
    submitter: str | None = None
    """Both as in `Submitted`."""

    @classmethod
    def member_of(cls, tenant_id: str, account: str | None = None) -> Principal:
        """A tenant as principal, without a key, for internal requests on its behalf."""
        return cls(tenant_id, "", "", "member", account=account)

    @property
    def submitted(self) -> dict[str, str | None]:
        """Columns of what it makes."""
        return {"account": self.account, "submitter": self.submitter}

    def may_change(self, thing: Submitted) -> bool:
        """Whether a job, an upload or an adapter of its tenant is its own, is nobody's, or it is an admin."""
        return thing.account in (None, self.account) or self.role in ("tenant-admin", "admin")

    @property
    def admin(self) -> bool:
        """Whether the principal can access all tenants' objects."""
        return self.role == "admin"


_WITH_TENANT = select(Key, Tenant.name).join(Tenant, Tenant.id == Key.tenant_id)


def digest(key: str) -> str:
    """The stored form of a key. Keys are random, so a plain hash is enough."""
    return hashlib.sha256(key.encode()).hexdigest()


def _good(at: float | BindParameter[float] | None = None) -> ColumnElement[bool]:
    return Key.revoked.is_(None) & or_(Key.expires.is_(None), Key.expires > (now() if at is None else at))


_WHO = (
    select(
        Key.tenant_id,
        Tenant.name,
        Key.id,
        Key.role,
        Key.scope,
        Key.expires,
        Key.name,
        Key.person,
        Key.account,
        Key.submitter,
    )
    .join(Tenant, Tenant.id == Key.tenant_id)
    .where(Key.digest == bindparam("digest"), _good(bindparam("at", type_=Float)))
)
"""Of columns and made once, because every request asks it: objects of tables take twice the time."""


def _seen_by(who: Principal) -> list[ColumnElement[bool]]:
    if who.admin:
        return []
    of_tenant = Key.tenant_id == who.tenant_id
    if who.role == "tenant-admin":
        return [of_tenant]
    return [of_tenant, or_(Key.id == who.key_id, Key.made_by == who.key_id)]


def audit_entry(who: Principal, action: str, thing: str) -> AuditEntry:
    """A row that says who changed what."""
    return AuditEntry(tenant_id=who.tenant_id, key_id=who.key_id, action=action, object=thing)


def _hold(session: Session, key_id: str) -> Key | None:
    """A key that is not revoked, and cannot be before the transaction ends; None if there is none.

    SQLite has no `FOR UPDATE`, and Python begins a transaction on it only before a write. So this is a write, which
    changes nothing.
    """
    same = update(Key).where(Key.id == key_id, Key.revoked.is_(None)).values(revoked=None)
    return session.scalar(same.returning(Key))


def _hold_maker(session: Session, key_id: str) -> Key:
    if (maker := _hold(session, key_id)) is None:
        raise StoreError("the key that asks was revoked meanwhile")
    return maker


def hold_tenant(session: Session, tenant_id: str) -> None:
    """Let others that hold this tenant wait until the transaction ends; what they count then has what it adds."""
    session.execute(update(Tenant).where(Tenant.id == tenant_id).values(created=Tenant.created))


def _check_number(session: Session, tenant: Tenant) -> None:
    held = select(func.count()).where(Key.tenant_id == tenant.id, Key.person.is_(None), _good())
    if (session.scalar(held) or 0) >= MOST_KEYS:
        raise StoreError(
            f"the tenant {tenant.name!r} has {MOST_KEYS} keys that have not ended, the most of a tenant: end those that "
            "nobody uses with `motet keys revoke`, and give new ones `--expires-days`"
        )


def _forget_ended(session: Session, tenant_id: str) -> None:
    """Delete a tenant's ended keys but for the newest: those that are made again and again would stay for ever."""
    ended = select(Key.id).where(Key.tenant_id == tenant_id, not_(_good()))
    oldest = ended.order_by(Key.created.desc(), Key.id.desc()).offset(_MOST_ENDED).limit(_AT_ONCE)
    if old := list(session.scalars(oldest)):
        session.execute(delete(Key).where(Key.id.in_(old)))


class Tenants:
    """Tenants and keys of one database; part of its `Store`."""

    def __init__(self, transaction: Callable[[], AbstractContextManager[Session]]) -> None:
        self._transaction = transaction
        self._names: dict[str, str] = {}
        self._ids: dict[str, tuple[float, str]] = {}
        """When the id of a tenant was looked up, and the id."""
        self._of_keys: OrderedDict[str, str] = OrderedDict()
        """Tenant ids by the digests of good keys that were used lately."""

    def find(self, name: str) -> Tenant | None:
        """The tenant of a name, or None."""
        with self._transaction() as session:
            return session.scalar(select(Tenant).where(Tenant.name == name))

    def name_of(self, tenant_id: str) -> str:
        """The name of a tenant, which never changes; empty if there is none."""
        if tenant_id not in self._names:
            with self._transaction() as session:
                tenant = session.get(Tenant, tenant_id)
            if tenant is None:
                return ""
            self._names[tenant_id] = tenant.name
        return self._names[tenant_id]

    def forget(self, tenant_id: str) -> None:
        """Remove an erased tenant from the cache."""
        self._names.pop(tenant_id, None)
        self._ids.clear()
        self._of_keys.clear()

    def close(self, tenant_id: str) -> None:
        """End the tenant's keys, and allow no sign-in until an admin creates a key for it."""
        # another request may close it at the same time
        with contextlib.suppress(IntegrityError), self._transaction() as session:
            name = session.scalars(select(Tenant.name).where(Tenant.id == tenant_id)).one_or_none()
            if name is not None and session.get(ClosedTenant, digest(name)) is None:
                session.add(ClosedTenant(digest=digest(name)))
        with self._transaction() as session:
            session.execute(update(Key).where(Key.tenant_id == tenant_id, Key.revoked.is_(None)).values(revoked=now()))

    def _check_open(self, session: Session, tenant: str) -> None:
        if session.get(ClosedTenant, digest(tenant)) is not None:
            raise StoreError(
                f"the tenant {tenant!r} was erased; an admin opens it again with `motet keys create {tenant}`"
            )

    def made(self, name: str) -> Tenant:
        """The tenant of a name, created if needed."""
        if (tenant := self.find(name)) is not None:
            return tenant
        # another request may create it at the same time
        with contextlib.suppress(IntegrityError), self._transaction() as session:
            session.add(Tenant(id=new_id("tenant"), name=name))
        with self._transaction() as session:
            return session.scalars(select(Tenant).where(Tenant.name == name)).one()

    def made_id(self, name: str) -> str:
        """The id of `made`, looked up once a second: another process may erase the tenant."""
        looked, tenant_id = self._ids.get(name, (-math.inf, ""))
        if time.monotonic() > looked + _KNOWN_SECONDS:
            looked, tenant_id = time.monotonic(), self.made(name).id
            self._ids[name] = looked, tenant_id
        return tenant_id

    def create_key(
        self,
        tenant: str,
        name: str,
        role: Role,
        expires: float | None = None,
        scope: Collection[str] | None = None,
        made_by: str | None = None,
        person: str | None = None,
        asker: Principal | None = None,
    ) -> tuple[Key, str]:
        """Create a key, and its tenant if needed; returns the key and its text, which is shown once.

        The new key ends with the key that has the id `made_by`; that of a member is of the same account. With `asker` or
        `person`, the audit log gets an entry.

        Raises:
            StoreError: that key was revoked, the tenant was erased, or it has too many keys.
        """
        owner, text, key_id = self.made(tenant), PREFIX + secrets.token_urlsafe(32), new_id("key")
        account, submitter = f"person-{person[:32]}" if person else key_id, name or key_id
        with self._transaction() as session:
            if made_by is not None:
                if (maker := _hold_maker(session, made_by)).role == "member" and maker.account and maker.submitter:
                    account, submitter = maker.account, maker.submitter
            elif person is not None:
                self._check_open(session, tenant)
            else:
                session.execute(delete(ClosedTenant).where(ClosedTenant.digest == digest(tenant)))
            if person is None:
                hold_tenant(session, owner.id)
                _check_number(session, owner)
            key = Key(
                id=key_id, tenant_id=owner.id, digest=digest(text), name=name, role=role, expires=expires,
                scope=None if scope is None else sorted(scope), made_by=made_by, person=person, account=account,
                submitter=submitter,
            )  # fmt: skip
            session.add(key)
            _forget_ended(session, owner.id)
            if asker is not None:  # in this transaction: a failure after it would lose the text
                session.add(audit_entry(asker, "create key", key.id))
            if person is not None:
                session.add(AuditEntry(tenant_id=owner.id, key_id=key.id, action="sign in", object=key.id))
        return key, text

    def sign_in(self, tenant: str, name: str, role: Role, expires: float, person: str) -> tuple[Key, str]:
        """Create a key for a signed-in person; returns it with its text. Above `MOST_SIGN_INS`, the oldest end.

        Raises:
            StoreError: the tenant was erased.
        """
        with self._transaction() as session:  # before `create_key` creates the tenant
            self._check_open(session, tenant)
        made = self.create_key(tenant, name, role, expires, person=person)
        with self._transaction() as session:
            still_open = select(Key.id).where(Key.person == person, Key.revoked.is_(None), Key.expires > now())
            oldest = list(session.scalars(still_open.order_by(Key.created.desc(), Key.id).offset(MOST_SIGN_INS)))
        for key_id in oldest:
            self.revoke_key(key_id)
        return made

    def keys_of(self, who: Principal | None, after: str = "", limit: int = MOST_KEYS) -> list[tuple[Key, str]]:
        """Keys with their tenants' names, oldest first: the good ones, and the newest ended ones without sign-ins.

        They are those that a principal may see and revoke: an admin (or None) all, a tenant's admin the tenant's, others
        their own. `after` is empty, or matches `PLACE_OF_KEY`.
        """
        place, seen = (Key.created, Key.id), [] if who is None else _seen_by(who)
        ended = select(Key.id).where(*seen, not_(_good()), Key.person.is_(None))
        newest = ended.order_by(*(column.desc() for column in place)).limit(MOST_KEYS)
        query = _WITH_TENANT.where(*seen, or_(_good(), Key.id.in_(newest)))
        if after:
            created, key_id = after.split("/")
            query = query.where(tuple_(*place) > (float(created), key_id))
        with self._transaction() as session:
            return [(key, tenant) for key, tenant in session.execute(query.order_by(*place).limit(limit))]

    def key_of(self, who: Principal, key_id: str) -> tuple[Key, str] | None:
        """One of these keys, with its tenant's name."""
        with self._transaction() as session:
            row = session.execute(_WITH_TENANT.where(Key.id == key_id, *_seen_by(who))).first()
        return None if row is None else (row[0], row[1])

    def revoke_key(self, key_id: str, asker: Principal | None = None, action: str = "revoke key") -> bool:
        """Revoke a key and those created with it; False if there is none. With `asker`, the audit log gets an entry."""
        with self._transaction() as session:  # its own first: from then on nothing is created with it
            own = update(Key).where(Key.id == key_id).values(revoked=func.coalesce(Key.revoked, now()))
            if session.scalar(own.returning(Key.id)) is None:
                return False
            ended = {key_id}
            left = select(Key.id).where(Key.revoked.is_(None))
            while found := set(session.scalars(left.where(Key.made_by.in_(ended)))):
                session.execute(update(Key).where(Key.id.in_(found), Key.revoked.is_(None)).values(revoked=now()))
                ended |= found  # and again: what was rotated meanwhile has a successor
            if asker is not None:
                session.add(audit_entry(asker, action, key_id))
            return True

    def rotate_key(
        self, key_id: str, made_by: str | None = None, asker: Principal | None = None
    ) -> tuple[Key, str] | None:
        """Replace a key by one of its account with another id and text; None if it does not exist or has ended.

        The new key ends with the key `made_by`, if given. With `asker`, the audit log gets an entry.

        Raises:
            StoreError: `made_by` was revoked.
        """
        text = PREFIX + secrets.token_urlsafe(32)
        with self._transaction() as session:
            if made_by is not None:
                _hold_maker(session, made_by)
            old = _hold(session, key_id)
            if old is None or (old.expires is not None and old.expires <= now()):
                return None
            kept = {
                name: getattr(old, name)
                for name in (
                    "tenant_id",
                    "name",
                    "role",
                    "expires",
                    "scope",
                    "made_by",
                    "person",
                    "account",
                    "submitter",
                )
            }
            kept |= {} if made_by is None else {"made_by": made_by}
            key = Key(id=new_id("key"), digest=digest(text), **kept)
            session.add(key)
            session.execute(update(Key).where(Key.made_by == key_id).values(made_by=key.id))
            old.revoked = now()
            _forget_ended(session, old.tenant_id)
            if asker is not None:
                session.add(audit_entry(asker, "rotate key", key_id))
        return key, text

    def ended_keys(self, key_ids: Collection[str]) -> set[str]:
        """Which of these key ids are revoked, erased or expired."""
        with self._transaction() as session:
            left = set(session.scalars(select(Key.id).where(Key.id.in_(key_ids), _good())))
        return {one for one in key_ids if one.startswith("key-") and one not in left}

    def tenant_of(self, text: str) -> str | None:
        """The tenant of a key that was good when it was last used; None if it is not known here. Asks no database."""
        return self._of_keys.get(digest(text))

    def who(self, text: str) -> Principal | None:
        """The principal of a key; None if it is unknown, revoked or expired."""
        if not text.startswith(PREFIX):  # clients of a service without keys send any text
            return None
        hashed = digest(text)
        with self._transaction() as session:
            row = session.execute(_WHO, {"digest": hashed, "at": now()}).first()
        self._of_keys.pop(hashed, None)
        if row is None:
            return None
        tenant_id, tenant, key_id, role, scope, expires, name, person, *whose = row
        self._of_keys[hashed] = tenant_id
        if len(self._of_keys) > _MOST_KNOWN:
            self._of_keys.popitem(last=False)
        rights = None if scope is None else frozenset(scope)
        return Principal(tenant_id, tenant, key_id, role, rights, expires, name, person is not None, *whose)
