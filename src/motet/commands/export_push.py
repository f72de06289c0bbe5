"""`motet export --push`: upload an adapter with its card to the hub that `HF_ENDPOINT` names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from motet.commands.answers import say
from motet.commands.merging import HUB_ID
from motet.core.errors import ConfigError, RunError
from motet.core.types import ADAPTER_CONFIG

FORM = "card"
"""The only format that is pushed: a hub shows its card."""


def check_push(name: str, form: str, *, public: bool) -> None:
    """Refuse what the hub would refuse, before anything slow.

    Raises:
        ConfigError: the name or the format is wrong, there is no token, or a repository that exists is not as private as asked.
        RunError: the hub cannot be reached, or does not accept the token.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    if form != FORM:
        raise ConfigError(
            f"--push: uploads an adapter with its card: use --format {FORM}, or upload other formats with `hf upload`"
        )
    if not HUB_ID.fullmatch(name):
        raise ConfigError(f"--push {name}: give NAMESPACE/NAME, of letters, digits, '.', '_' and '-'")
    if get_token() is None:
        raise ConfigError("--push: there is no token of a hub: set HF_TOKEN, or run `hf auth login`")
    api = HfApi()
    with _told(f"--push {name}: {api.endpoint}"):
        api.whoami()
        try:
            found = api.model_info(name)
        except RepositoryNotFoundError:
            return
    if public == bool(found.private):
        told = "private: leave out --public, or make it public there" if public else "public: add --public"
        raise ConfigError(f"--push {name}: {api.endpoint}/{name} is {told}, or give another name")


def push(folder: Path, name: str, *, public: bool) -> str:
    """Upload a directory; returns its address on the hub.

    Raises:
        RunError: the hub refused it, or the connection broke.
    """
    from huggingface_hub import HfApi

    base = json.loads((folder / ADAPTER_CONFIG).read_text("utf-8"))["base_model_name_or_path"]
    if Path(base).is_absolute():
        say(
            f"note: {base} is its base, a directory of this machine: others need --base with a name on the hub",
            aside=True,
        )
    api, files = HfApi(), [path for path in folder.iterdir() if path.is_file()]
    size, seen = sum(path.stat().st_size for path in files), "public" if public else "private"
    say(f"uploading {len(files)} files ({size / 1e6:.1f} MB) to {api.endpoint}/{name}, {seen} …", aside=True)
    with _told(f"{folder} is written, but not on the hub (`hf upload {name} {folder}` tries again): {api.endpoint}"):
        api.create_repo(name, private=not public, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload an adapter trained with Motet")
    return f"{api.endpoint}/{name}"


@contextmanager
def _told(what: str) -> Iterator[None]:
    """What a hub or the way to it does, as an error for people."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the client that it uses

    try:
        yield
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        response = getattr(error, "response", None)
        answered = f" answered {response.status_code}" if response is not None else " could not be reached"
        if response is None and not isinstance(error, HTTPError | OSError):
            answered = ""
        raise RunError(f"{what}{answered}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The first line of an error, or of its cause."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
