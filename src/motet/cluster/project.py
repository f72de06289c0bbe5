"""The project directory, with own code and data: nodes that do not see it get a copy in the run directory."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from motet.channel import ChannelMessage
from motet.cluster import messages as m
from motet.config import HostConfig, RunConfig
from motet.errors import ConfigError, EngineError

_log = logging.getLogger(__name__)
MOST_BYTES, MOST_FILES = 512 * 2**20, 20_000
"""Limits for a project to copy."""
COPY = ".project-"


@dataclass(frozen=True)
class Seen:
    """The files visible on the node that Ray chose for a host."""

    node: str
    """Its address."""
    run: bool
    """Whether it sees the run directory."""
    project: bool
    """Whether it sees this machine's project directory."""
    there: bool = True
    """Whether any directory has the project's path."""
    missing: tuple[str, ...] = ()
    """Missing files that jobs name by absolute paths."""


def place_on(seen: Seen, run: Path, project: Path, named: Sequence[str], made: Path | None = None) -> Path:
    """The working directory of a host: the project, or a copy if the node does not see it; `made` is an earlier copy.

    Raises:
        EngineError: the node does not see the run directory, or one of the paths `named`.
        ConfigError: the project cannot be copied, or a path is in a part that is never copied.
    """
    if not seen.run:
        raise EngineError(
            f"node {seen.node} does not see the run directory {run}: mount one file system under the same path everywhere"
        )
    if missing := [path for path in seen.missing if seen.project or not Path(path).is_relative_to(project)]:
        raise EngineError(
            f"node {seen.node} does not see {', '.join(missing)}: mount it there under the same path, or put it into "
            f"{project}, which nodes get a copy of"
        )
    if seen.project:
        return project
    if seen.there and not seen.missing and (large := too_large(project, run)):
        _log.warning(
            "node %s uses its own files in %s, which may differ from those here: %s", seen.node, project, large
        )
        return project
    copy = made or copy_to(run, project)
    inside = [Path(path).relative_to(project) for path in named if Path(path).is_relative_to(project)]
    if left := [str(project / path) for path in inside if not (copy / path).exists()]:
        raise ConfigError(
            f"node {seen.node} does not see {', '.join(left)}, and hidden files, virtual environments and run directories are "
            "not copied: put it elsewhere into the project, or mount it there under the same path"
        )
    return copy


def moved(message: ChannelMessage, project: Path, copy: Path) -> ChannelMessage:
    """A message for a host in a copy: project paths become paths in the copy, and `~` this machine's home."""
    if isinstance(message, m.StartHost):
        return replace(
            message, base=_moved(message.base, project, copy), rewards=_moved(message.rewards, project, copy)
        )
    return replace(message, job=_moved(message.job, project, copy)) if isinstance(message, m.AddJob) else message


def _moved(tree: Any, project: Path, copy: Path) -> Any:
    if isinstance(tree, dict):
        return {_moved(name, project, copy): _moved(value, project, copy) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_moved(value, project, copy) for value in tree]
    if not isinstance(tree, str) or not (place := _place(tree)):
        return tree
    path, name = Path(place), tree.rpartition(".py:")[2] if ".py:" in tree else ""
    path = copy / path.relative_to(project) if path.is_relative_to(project) else path
    return f"{path}:{name}" if name else str(path)


def look_of(directory: Path) -> str:
    """A digest of a directory's names and inodes: equal on two machines only if both see the same one."""
    if not directory.is_dir():
        return ""
    entries = sorted((entry.name, entry.inode()) for entry in os.scandir(directory))
    return hashlib.sha256(repr((directory.stat().st_ino, entries)).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def too_large(project: Path, run: Path) -> str:
    """Why a project cannot be copied; empty if it can."""
    try:
        _files(project, run)
    except ConfigError as error:
        return str(error)
    return ""


def copy_to(run: Path, project: Path) -> Path:
    """Copy a project into a run directory, unless it has a current copy; older copies are deleted.

    Hidden files, virtual environments and run directories are not copied.

    Raises:
        ConfigError: it is too large; the message names the largest part.
    """
    files = _files(project, run)
    seen = [(str(file.relative_to(project)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    name = COPY + hashlib.sha256(repr(sorted(seen)).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    if (run / name).is_dir():
        return run / name
    draft = run / f"{COPY}draft-{secrets.token_hex(4)}"
    try:
        for file in files:
            to = draft / file.relative_to(project)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, to)
        draft.mkdir(exist_ok=True)
        draft.rename(run / name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    for old in run.glob(f"{COPY}*"):
        if old.name != name:
            shutil.rmtree(old, ignore_errors=True)
    return run / name


def _files(project: Path, run: Path) -> list[Path]:
    files, parts = list[Path](), Counter[str]()
    for folder, names, leaves in os.walk(project):
        names[:] = [name for name in names if not _stays(Path(folder, name), run)]
        for leaf in leaves:
            file = Path(folder, leaf)
            if not leaf.startswith(".") and file.is_file():  # skips sockets and broken links
                files.append(file)
                parts[file.relative_to(project).parts[0]] += file.stat().st_size
        if len(files) > MOST_FILES or parts.total() > MOST_BYTES:
            large, n_bytes = parts.most_common(1)[0]
            raise ConfigError(
                f"the project directory {project} is larger than what is copied for nodes that do not see it ({MOST_FILES:,} "
                f"files, {MOST_BYTES >> 20} MiB; {n_bytes >> 20} MiB so far in {large}): mount it there under the same path, "
                "or start Motet in a smaller directory"
            )
    return files


def _stays(folder: Path, run: Path) -> bool:
    if folder.name.startswith(".") or folder.name == "__pycache__" or folder == run:
        return True
    return any((folder / mark).is_file() for mark in ("pyvenv.cfg", "run.json"))


def named_by_place(config: HostConfig) -> list[str]:
    """The files and directories that a base or its jobs name by absolute paths; a copy of the project lacks them."""
    jobs = [job.model_dump(mode="json") for job in config.jobs] if isinstance(config, RunConfig) else []
    return sorted({place for text in _texts([config.base, *jobs]) if (place := _place(text))})


def _place(text: str) -> str:
    """The file of `/path` or `/path.py:name`; empty if there is none, or for a relative path."""
    name = os.path.expanduser(text.rpartition(":")[0] if ".py:" in text else text)
    try:
        return name if os.path.isabs(name) and len(name) > 1 and os.path.exists(name) else ""
    except ValueError:  # a null character
        return ""


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _texts(value)
