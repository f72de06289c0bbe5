"""Whose things are: tenants, their keys, and who asks."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass

from sqlalchemy import and_, delete, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from motet.config.service import Role
from motet.errors import StoreError
from motet.service.database.tables import ClosedTenant, Key, Tenant, new_id, now

MOST_SIGN_INS = 20
"""Of one person at a time."""
PREFIX = "mk-"
"""What API keys begin with."""


@dataclass(frozen=True)
class Principal:
    """Who asks."""

    tenant_id: str
    tenant: str
    key_id: str
    role: str
    scope: frozenset[str] | None = None
    """The rights that the key has of those of its role; None is all."""
    expires: float | None = None
    """When the key ends, in Unix seconds."""
    name: str = ""
    """Of the key; for a sign-in, the person's."""
    signed_in: bool = False
    """Whether the key was made by a sign-in."""

    @classmethod
    def member_of(cls, tenant_id: str) -> Principal:
        """A tenant itself, without a key: its own objects are there, and no others, whoever asks on its behalf."""
        return cls(tenant_id, "", "", "member")

    @property
    def admin(self) -> bool:
        """Whether every tenant's objects are theirs."""
        return self.role == "admin"


def digest(key: str) -> str:
    """What is stored of a key. Keys are random, so a plain hash is enough."""
    return hashlib.sha256(key.encode()).hexdigest()


class Tenants:
    """Tenants and keys of one database; part of its `Store`."""

    def __init__(self, transaction: Callable[[], AbstractContextManager[Session]]) -> None:
        """`transaction` is the store's."""
        self._transaction = transaction
        self._names: dict[str, str] = {}

    def find(self, name: str) -> Tenant | None:
        """The tenant of a name, where there is one."""
        with self._transaction() as session:
            return session.scalar(select(Tenant).where(Tenant.name == name))

    def name_of(self, tenant_id: str) -> str:
        """The name of a tenant, which never changes; empty where there is none."""
        if tenant_id not in self._names:
            with self._transaction() as session:
                tenant = session.get(Tenant, tenant_id)
            if tenant is None:
                return ""
            self._names[tenant_id] = tenant.name
        return self._names[tenant_id]

    def forget(self, tenant_id: str) -> None:
        """The tenant was erased."""
        self._names.pop(tenant_id, None)

    def close(self, tenant_id: str) -> None:
        """End the tenant's keys, and let nobody sign in to it until an admin makes a key of it."""
        # another may close it at the same time
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
        """The tenant of a name, made where there is none."""
        if (tenant := self.find(name)) is not None:
            return tenant
        # another may make it at the same time
        with contextlib.suppress(IntegrityError), self._transaction() as session:
            session.add(Tenant(id=new_id("tenant"), name=name))
        with self._transaction() as session:
            return session.scalars(select(Tenant).where(Tenant.name == name)).one()

    def create_key(
        self,
        tenant: str,
        name: str,
        role: Role,
        expires: float | None = None,
        scope: Collection[str] | None = None,
        made_by: str | None = None,
        person: str | None = None,
    ) -> tuple[Key, str]:
        """A new key of a tenant, which is made where there is none, and the key's text, which is shown once.

        `made_by` is the key, by its id, with which this one ends.
        """
        owner, text = self.made(tenant), PREFIX + secrets.token_urlsafe(32)
        with self._transaction() as session:
            if made_by is not None:
                maker = session.get(Key, made_by, with_for_update=True)
                if maker is None or maker.revoked is not None:
                    raise StoreError("the key that asks was revoked meanwhile")
            elif person is not None:
                self._check_open(session, tenant)
            else:
                session.execute(delete(ClosedTenant).where(ClosedTenant.digest == digest(tenant)))
            key = Key(
                id=new_id("key"), tenant_id=owner.id, digest=digest(text), name=name, role=role, expires=expires,
                scope=None if scope is None else sorted(scope), made_by=made_by, person=person,
            )  # fmt: skip
            session.add(key)
        return key, text

    def sign_in(self, tenant: str, name: str, role: Role, expires: float, person: str) -> tuple[Key, str]:
        """The key of a person who signed in, and its text. Of more than `MOST_SIGN_INS` that are open, the oldest end.

        Raises:
            StoreError: the tenant was erased.
        """
        with self._transaction() as session:  # before `create_key` makes the tenant
            self._check_open(session, tenant)
        made = self.create_key(tenant, name, role, expires, person=person)
        with self._transaction() as session:
            still_open = select(Key.id).where(Key.person == person, Key.revoked.is_(None), Key.expires > now())
            oldest = list(session.scalars(still_open.order_by(Key.created.desc(), Key.id).offset(MOST_SIGN_INS)))
        for key_id in oldest:
            self.revoke_key(key_id)
        return made

    def all_keys(self) -> list[tuple[Key, str]]:
        """All keys and the names of their tenants, oldest first; sign-ins that have ended are left out."""
        listed = or_(Key.person.is_(None), and_(Key.revoked.is_(None), Key.expires > now()))
        query = select(Key, Tenant.name).join(Tenant, Tenant.id == Key.tenant_id).where(listed)
        query = query.order_by(Key.created, Key.id)
        with self._transaction() as session:
            return [(key, tenant) for key, tenant in session.execute(query).all()]

    def keys_of(self, who: Principal) -> list[tuple[Key, str]]:
        """The keys that somebody may see and end: an admin all, a tenant's admin the tenant's, others their own and its own."""
        known = self.all_keys()
        if who.admin:
            return known
        if who.role == "tenant-admin":
            return [one for one in known if one[0].tenant_id == who.tenant_id]
        return [one for one in known if one[0].id == who.key_id or one[0].made_by == who.key_id]

    def revoke_key(self, key_id: str) -> bool:
        """End a key, and those that were made with it; False where there is none."""
        with self._transaction() as session:
            if session.get(Key, key_id, with_for_update=True) is None:
                return False
            ending = [key_id]
            for one in ending:  # which grows
                ending += session.scalars(select(Key.id).where(Key.made_by == one, Key.id.not_in(ending)))
            session.execute(update(Key).where(Key.id.in_(ending), Key.revoked.is_(None)).values(revoked=now()))
            return True

    def rotate_key(self, key_id: str, made_by: str | None = None) -> tuple[Key, str] | None:
        """Another text for a key, under another id; the old one ends. None where there is none that is good.

        The new one ends with the key `made_by`, where that is given.
        """
        text = PREFIX + secrets.token_urlsafe(32)
        with self._transaction() as session:
            old = session.get(Key, key_id)
            if old is None or old.revoked is not None or (old.expires is not None and old.expires <= now()):
                return None
            kept = {
                name: getattr(old, name)
                for name in ("tenant_id", "name", "role", "expires", "scope", "made_by", "person")
            }
            kept |= {} if made_by is None else {"made_by": made_by}
            key = Key(id=new_id("key"), digest=digest(text), **kept)
            session.add(key)
            session.execute(update(Key).where(Key.made_by == key_id).values(made_by=key.id))
            old.revoked = now()
        return key, text

    def ended_keys(self, key_ids: Collection[str]) -> set[str]:
        """Which of some keys, by their ids, were revoked or erased, or have expired."""
        good = and_(Key.revoked.is_(None), or_(Key.expires.is_(None), Key.expires > now()))
        with self._transaction() as session:
            left = set(session.scalars(select(Key.id).where(Key.id.in_(key_ids), good)))
        return {one for one in key_ids if one.startswith("key-") and one not in left}

    def who(self, text: str) -> Principal | None:
        """Whose key this is; None where it is unknown, revoked or expired."""
        with self._transaction() as session:
            row = session.execute(
                select(Key, Tenant.name).join(Tenant, Tenant.id == Key.tenant_id).where(Key.digest == digest(text))
            ).first()
        if row is None:
            return None
        key, tenant = row
        if key.revoked is not None or (key.expires is not None and key.expires <= now()):
            return None
        scope = None if key.scope is None else frozenset(key.scope)
        signed_in = key.person is not None
        return Principal(key.tenant_id, tenant, key.id, key.role, scope, key.expires, key.name, signed_in)
