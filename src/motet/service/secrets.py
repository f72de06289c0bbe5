"""Secrets of jobs (headers of HTTP rewards), encrypted with the operator's key; the database has no other form.

The key is `secret.key` in the service's directory, created at the first start, or another file, or `MOTET_SECRET_KEY`.
Several keys may be given, separated by spaces or lines: the first encrypts, all of them decrypt.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from sqlalchemy import select, update

from motet.config import JobConfig, RewardConfig
from motet.core.errors import ConfigError
from motet.rewards.reward_elsewhere import SEALED, AnswerDetails, Elsewhere, ScoreOrReason, with_headers
from motet.service.database.store import Store
from motet.service.database.tables import ServiceStart

KEY_FILE = "secret.key"
KEY_VARIABLE = "MOTET_SECRET_KEY"
_MAKE = 'python -c "from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())"'


class Secrets:
    """Encrypts and decrypts."""

    def __init__(self, keys: Sequence[str]) -> None:
        """Raises ValueError if a text is not a Fernet key."""
        self._keys = [key.encode() for key in keys]
        self._fernet = MultiFernet([Fernet(key) for key in self._keys])
        own = [hmac.digest(key, b"motet texts for clients", "sha256") for key in self._keys]
        self._of_clients = MultiFernet([Fernet(base64.urlsafe_b64encode(key)) for key in own])
        """A separate key, so that sealed secrets of tenants are never accepted as state from clients."""

    def seal(self, text: str) -> str:
        """Encrypt a text; an encrypted one is unchanged."""
        return text if text.startswith(SEALED) else f"{SEALED}{self._fernet.encrypt(text.encode()).decode()}"

    def open(self, text: str) -> str:
        """Decrypt a text. Raises ConfigError if it was encrypted with another key."""
        try:
            return self._fernet.decrypt(text.removeprefix(SEALED).encode()).decode()
        except InvalidToken:
            raise ConfigError(
                "the headers of the reward http cannot be decrypted, because the key of the service has changed: submit the "
                "job again with its headers"
            ) from None

    def signature(self, text: str) -> str:
        """16 letters that cannot be computed without the key."""
        return _signature(self._keys[0], text)

    def signed(self, text: str, signature: str) -> bool:
        """Whether a signature matches a text, for any of the keys."""
        return any(hmac.compare_digest(_signature(key, text), signature) for key in self._keys)

    def pack(self, purpose: str, fields: Mapping[str, Any]) -> str:
        """Encrypt fields as a text for a client to store."""
        return self._of_clients.encrypt(json.dumps([purpose, fields]).encode()).decode()

    def unpack(self, purpose: str, text: str, seconds: int) -> dict[str, Any] | None:
        """The fields of a text from `pack`; None if it is invalid, expired, or for another purpose."""
        try:
            sealed_for, fields = json.loads(self._of_clients.decrypt(text.encode(), seconds))
        except InvalidToken:
            return None
        return fields if sealed_for == purpose else None

    # --- jobs -----------------------------------------------------------------------------------------------------------

    def sealed(self, config: JobConfig) -> JobConfig:
        """A job in its stored form."""
        plain = [one.model_dump(include={"name", "args"}) for one in config.rewards]
        args = [with_headers(one, self.seal)["args"] for one in plain]
        rewards = [one.model_copy(update={"args": own}) for one, own in zip(config.rewards, args, strict=True)]
        return config.model_copy(update={"rewards": rewards})

    def opened(self, reward: RewardConfig) -> RewardConfig:
        """A reward as its owner submitted it. Raises ConfigError if it was encrypted with another key."""
        args = with_headers(reward.model_dump(include={"name", "args"}), self.open)["args"]
        return reward.model_copy(update={"args": args})

    def asking(self, ask: Elsewhere) -> Elsewhere:
        """Wrap a scorer so that it gets decrypted rewards."""

        async def asked(
            job: str, reward: RewardConfig, problem: dict[str, object], texts: list[str], seen: AnswerDetails
        ) -> list[ScoreOrReason]:
            try:
                opened = self.opened(reward)
            except ConfigError as error:
                return [str(error)] * len(texts)
            return await ask(job, opened, problem, texts, seen)

        return asked


def load_secrets(directory: Path, file: str, store: Store) -> Secrets:
    """Load or create the operator's key. Raises ConfigError if it is invalid, or not the key used before."""
    path = Path(file).expanduser() if file else directory / KEY_FILE
    given = os.environ.get(KEY_VARIABLE, "").replace(",", " ").split()
    text = path.read_text("utf-8") if path.is_file() and not given else None
    keys = given or (text or "").split()
    where = f"the environment variable {KEY_VARIABLE}" if given else str(path)
    try:
        secrets = Secrets(keys or [Fernet.generate_key().decode()])
    except ValueError:
        raise ConfigError(f"{where} holds no key: make one with {_MAKE}") from None
    newest = select(ServiceStart.proof).where(ServiceStart.proof.is_not(None)).order_by(ServiceStart.time.desc())
    proof = store.scalar(newest.limit(1))
    new_is_meant = text is not None and not keys
    if proof is not None and not new_is_meant:
        try:
            secrets.open(proof)
        except ConfigError:
            place = f"is not in {where}" if keys else f"was in {path}, which is gone"
            raise ConfigError(
                f"the key with which secrets of jobs were encrypted {place}: put it back from a backup. If it is lost, "
                f"leave {KEY_VARIABLE} unset and make {path} an empty file: Motet writes a new key into it, and jobs whose "
                "rewards have headers fail until they are submitted again"
            ) from None
    if not keys:
        _write(path, secrets)
    elif not given:
        path.chmod(0o600)
    with store.transaction() as session:
        own = update(ServiceStart).where(ServiceStart.token == store.presence.token)
        session.execute(own.values(proof=secrets.seal("motet")))
    return secrets


def _write(path: Path, secrets: Secrets) -> None:
    """Write a new key, readable for the service's owner only."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(b"\n".join(secrets._keys) + b"\n")
        out.flush()
        os.fsync(out.fileno())
    draft.replace(path)


def _signature(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()[:16]
