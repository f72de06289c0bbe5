"""The project directory, with own code and data: nodes that do not see it get a copy in the run directory."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from motet.config import HostConfig, RunConfig
from motet.core.errors import ConfigError, EngineError
from motet.hosts import messages as m
from motet.process.channel import ChannelMessage

_log = logging.getLogger(__name__)
MOST_BYTES, MOST_FILES = 512 * 2**20, 20_000
"""Limits for a project to copy."""
COPY = ".project-"
MOUNTS = Path("/proc/self/mountinfo")
"""Where Linux lists file systems."""
NONE_MADE: Mapping[frozenset[str], Path] = {}


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
    """Files that jobs name by absolute paths and that the node lacks."""
    same: frozenset[str] = frozenset()
    """Mounts in the project, and targets of its links to directories, that this node sees too (`leads_away`)."""


def place_on(
    seen: Seen, run: Path, project: Path, named: Sequence[str], made: Mapping[frozenset[str], Path] = NONE_MADE
) -> Path:
    """The working directory of a host: the project, or a copy if the node does not see it; `made` are earlier copies.

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
    if seen.there and not seen.missing and (large := too_large(project, run, seen.same)):
        _log.warning(
            "node %s uses its own files in %s, which may differ from those here: %s", seen.node, project, large
        )
        return project
    copy = made.get(seen.same) or copy_to(run, project, seen.same, made.values())
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
    try:
        entries = sorted((entry.name, entry.inode()) for entry in os.scandir(directory))
        number = directory.stat().st_ino
    except OSError:  # it is missing, or this user may not read it
        return ""
    return hashlib.sha256(repr((number, entries)).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def leads_away(project: Path, run: Path, mounts: Path = MOUNTS) -> dict[str, str]:
    """Mounts in a project and directories outside that its links point to, each with its `look_of`: a node may see them too."""
    away = set(map(str, _mounts(project, mounts)))
    for number, (folder, names, _) in enumerate(os.walk(project)):
        names[:] = [name for name in names if not _stays(Path(folder, name), run) and f"{folder}/{name}" not in away]
        links = [link.resolve() for name in names if (link := Path(folder, name)).is_symlink()]
        away.update(str(real) for real in links if not real.is_relative_to(project.resolve()))
        if number > MOST_FILES:
            break
    return {path: look_of(Path(path)) for path in sorted(away)}


def _mounts(project: Path, mounts: Path) -> list[Path]:
    """Mount points of other file systems in a project; empty if the kernel does not list them."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    points = (re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), line.split()[4]) for line in lines)
    return [path for path in map(Path, points) if path != project and path.is_relative_to(project) and path.is_dir()]


def seen_here(looks: Mapping[str, str]) -> frozenset[str]:
    """The directories that look the same on this machine as where `looks` was made."""
    return frozenset(path for path, look in looks.items() if look and look_of(Path(path)) == look)


def too_large(project: Path, run: Path, same: Collection[str] = ()) -> str:
    """Why a project cannot be copied to a node that sees the directories `same`; empty if it can."""
    try:
        _files(project, run, same)
    except ConfigError as error:
        return str(error)
    return ""


def copy_to(run: Path, project: Path, same: Collection[str] = (), kept: Collection[Path] = ()) -> Path:
    """Copy a project into a run directory, unless it has a current copy; older copies that are not `kept` are deleted.

    Hidden files, virtual environments and run directories are not copied. The copy links to mounts and linked
    directories that the node sees too (`same`).

    Raises:
        ConfigError: it is too large, or a link leads to a directory outside; the message has the path.
    """
    files, links = _files(project, run, same)
    seen = [(str(file.relative_to(project)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    seen += [(f"{link.relative_to(project)} -> {real}", 0, 0) for link, real in links.items()]
    name = COPY + hashlib.sha256(repr(sorted(seen)).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    if (run / name).is_dir():
        return run / name
    draft = run / f"{COPY}draft-{secrets.token_hex(4)}"
    try:
        for file in files:
            to = draft / file.relative_to(project)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, to)
        for link, real in links.items():
            to = draft / link.relative_to(project)
            to.parent.mkdir(parents=True, exist_ok=True)
            to.symlink_to(real)
        draft.mkdir(exist_ok=True)
        draft.rename(run / name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    for old in run.glob(f"{COPY}*"):
        if old.name != name and old not in kept:
            shutil.rmtree(old, ignore_errors=True)
    return run / name


def _files(project: Path, run: Path, same: Collection[str] = ()) -> tuple[list[Path], dict[Path, str]]:
    """The files to copy, and links to make instead of copying directories of `same`."""
    files, links, parts = list[Path](), dict[Path, str](), Counter[str]()
    for number, (folder, names, leaves) in enumerate(os.walk(project, followlinks=True)):
        paths = [path for name in names if not _stays(path := Path(folder, name), run)]
        real = {path: str(path.resolve() if path.is_symlink() else path) for path in paths}
        links |= {path: real[path] for path in paths if real[path] in same}
        names[:] = [path.name for path in paths if path not in links and _followed(path, project)]
        for leaf in leaves:
            file = Path(folder, leaf)
            if not leaf.startswith(".") and file.is_file():  # skips sockets and broken links
                files.append(file)
                parts[file.relative_to(project).parts[0]] += file.stat().st_size
        if max(number, len(files)) > MOST_FILES or parts.total() > MOST_BYTES:
            large, n_bytes = next(iter(parts.most_common(1)), ("folders", 0))
            raise ConfigError(
                f"the project directory {project} is larger than what is copied for nodes that do not see it ({MOST_FILES:,} "
                f"files, {MOST_BYTES >> 20} MiB; {n_bytes >> 20} MiB so far in {large}): mount it there under the same path, "
                "or start Motet in a smaller directory"
            )
    return files, links


def _followed(folder: Path, project: Path) -> bool:
    """Whether a directory is copied: a link back to one that it is in is not. Raises ConfigError for a link to outside."""
    if not folder.is_symlink():
        return True
    real = folder.resolve()
    if not real.is_relative_to(project.resolve()):
        raise ConfigError(
            f"{folder} is a link to {real}, outside the project, and is not copied for nodes that do not see {project}: mount "
            f"{real} there under the same path, or replace the link by a copy"
        )
    return all(real != above.resolve() for above in folder.parents)


def _stays(folder: Path, run: Path) -> bool:
    if folder.name.startswith(".") or folder.name == "__pycache__" or folder.resolve() == run.resolve():
        return True
    try:
        return any((folder / mark).is_file() for mark in ("pyvenv.cfg", "run.json"))
    except OSError:  # not for this user
        return True


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
