"""Find the files of a base or an adapter, without loading them."""

from __future__ import annotations

import os
from pathlib import Path

from motet.core.errors import AdapterError, BaseModelError
from motet.core.suggestions import close_matches
from motet.core.types import ADAPTER_CONFIG, ADAPTER_WEIGHTS

SHORT_NAMES = ("small", "smollm2")
SMALL_BASE = Path(__file__).parent.parent / "assets" / "small-base"
_HUB_SECONDS = 10.0
_BRING = "run `hf download` where there is a network, and give the directory here"
_AGREE = "open its page there, accept them, and set HF_TOKEN"
_SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


def cache_directory() -> Path:
    """Directory of converted models: `$MOTET_CACHE`, by default `~/.cache/motet`."""
    return Path(os.environ.get("MOTET_CACHE") or Path.home() / ".cache" / "motet").expanduser()


def _smollm2() -> Path:
    return cache_directory() / _SMOLLM2.partition("/")[2]


def hub_id_of(directory: Path) -> str | None:
    """The name on the hub of a base that has a short name here; `small` is on no hub."""
    return _SMOLLM2 if directory.resolve() == _smollm2().resolve() else None


def find_base(name: str) -> tuple[str, str | None]:
    """Resolve a name to what transformers loads: hub id or directory, and the name of a GGUF file or None.

    Raises:
        BaseModelError: the name is misspelled, or is a local path that does not exist or holds no model.
    """
    if name == "small":
        return str(SMALL_BASE), None
    if name == "smollm2":
        cached = _smollm2()
        if not cached.is_dir():
            raise BaseModelError(f"base smollm2 is not in {cached}; download it with `make smollm2`")
        return str(cached), None
    path = Path(os.path.expanduser(name))
    near = close_matches(name, SHORT_NAMES, 1, cutoff=0.8)
    if near and not path.is_dir():
        raise BaseModelError(f"there is no base {name!r}; did you mean {near[0]!r}?")
    if path.suffix == ".gguf":
        if not path.is_file():
            raise BaseModelError(f"there is no file {path}; give the path of a .gguf file")
        return str(path.parent), path.name
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BaseModelError(f"{path} has no config.json, so it is not a model directory")
        return str(path), None
    if looks_local:
        raise BaseModelError(f"there is no directory {path}; give a model directory, a hub id, `small` or `smollm2`")
    return name, None


def find_files(name: str) -> tuple[str, str | None]:
    """`find_base`; a hub id that is not in the hub's cache is looked up there once, because a download tries for a long time.

    Raises:
        BaseModelError: also if the hub has no such model, refuses it, or cannot be reached.
    """
    source, gguf = found = find_base(name)
    if gguf is not None or Path(source).is_dir():
        return found
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # the first is of the client that it uses
        GatedRepoError,
        HFValidationError,
        HTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    wanted = f"base {name!r} is not on this machine"
    try:
        if not isinstance(try_to_load_from_cache(source, "config.json"), str):
            HfApi().model_info(source, timeout=_HUB_SECONDS)
    except GatedRepoError as error:
        raise BaseModelError(
            f"{wanted}, and the hub gives it only to people who accepted its terms: {_AGREE}"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise BaseModelError(
            f"{wanted}, and the hub has no model of this name that you may see; give a model directory, a hub id such as "
            "Qwen/Qwen3-0.6B, `small` or `smollm2`"
        ) from error
    except OfflineModeIsEnabled as error:
        raise BaseModelError(f"{wanted}, and HF_HUB_OFFLINE forbids to ask the hub; unset it, or {_BRING}") from error
    except (HTTPError, OSError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise BaseModelError(f"{wanted}, and the hub does not answer ({reason:.200}); {_BRING}") from error
    return found


def find_adapter(directory: Path) -> None:
    """Check that a directory has an adapter's files.

    Raises:
        AdapterError: a file is missing; the message suggests the likely path.
    """
    if not directory.exists():
        raise AdapterError(f"there is no directory {directory}")
    if not (directory / ADAPTER_CONFIG).is_file():
        for below, kind in (("", "the directory of a job"), ("*/", "a run directory")):
            numbered = (path for path in directory.glob(f"{below}versions/v*") if path.name[1:].isdecimal())
            if newest := max(numbered, key=lambda path: int(path.name[1:]), default=None):
                raise AdapterError(f"{directory} is {kind}; give a version of its adapter, such as {newest}")
        if role := next(iter(sorted(directory.glob(f"*/{ADAPTER_CONFIG}"))), None):
            raise AdapterError(f"{directory} has the adapters of a team; give that of one role, such as {role.parent}")
        raise AdapterError(f"{directory} has no {ADAPTER_CONFIG}; give a directory that `peft` or Motet wrote")
    if not (directory / ADAPTER_WEIGHTS).is_file():
        kind = " (a pickle is not read; save it as safetensors)" if (directory / "adapter_model.bin").exists() else ""
        raise AdapterError(f"{directory} has no {ADAPTER_WEIGHTS}{kind}")
