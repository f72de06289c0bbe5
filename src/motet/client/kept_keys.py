"""The keys of this user's sign-ins, one for each service, in a file that only they can read."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, TypeAdapter, ValidationError

from motet.core.errors import ConfigError

if TYPE_CHECKING:
    from motet.service.schemas import NewKey


class _Kept(BaseModel):
    key: str
    expires: float
    """Unix seconds."""


_FILE = TypeAdapter(dict[str, _Kept])


def key_file() -> Path:
    """Where keys of sign-ins are kept: below `$XDG_CONFIG_HOME`, or ~/.config."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "motet" / "keys.json"


def kept_key(url: str) -> str:
    """The key of the last sign-in at a service; empty without one."""
    kept = _kept()
    return kept[url].key if url in kept else ""


def keep_key(url: str, made: NewKey | None) -> None:
    """Store the key of a sign-in, readable for this user only, or delete it; also deletes expired keys."""
    kept = {where: one for where, one in _kept().items() if where != url and one.expires > time.time()}
    if made is not None:
        kept[url] = _Kept(key=made.key, expires=made.expires or time.time() + 86400.0)
    path = key_file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{secrets.token_hex(4)}.new")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(_FILE.dump_json(kept))
    draft.replace(path)


def _kept() -> dict[str, _Kept]:
    try:
        return _FILE.validate_json(key_file().read_bytes())
    except OSError:
        return {}
    except ValidationError as error:
        raise ConfigError(f"{key_file()} is not what `motet login` wrote; delete it and sign in again") from error
