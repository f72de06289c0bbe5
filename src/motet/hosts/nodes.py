"""Facts about the nodes of a cluster, and the faults that prevent hosts from running there."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NOTHING = "nothing"
NONE_TOO_LARGE: Mapping[frozenset[str], str] = {}


def address_of(name: str) -> str:
    """The address that a machine's name means there; `nothing` if it means none."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return NOTHING


@dataclass(frozen=True)
class NodeFacts:
    """A node's own report."""

    address: str
    versions: tuple[str, str, str]
    """Versions of Motet, torch and Python."""
    name_means: str
    """The address that its host name resolves to, or `nothing`; gloo listens on it."""
    cores: int
    free_memory: int
    sees: bool
    """Whether it sees the first process's file in the shared directory."""
    free_disk: int
    """Free bytes in that directory."""
    gpus: int = 0
    """GPUs that the driver reports."""
    gpus_of_ray: int = 0
    """GPUs that Ray assigns there."""
    project: bool = True
    """Whether it sees the project directory, with own code and data; otherwise it gets a copy."""
    same: frozenset[str] = frozenset()
    """Mounts and linked directories of the project that it sees, as in `Seen`."""
    gloo: float | str = "not tried"
    """Seconds of a gloo round with all nodes, or why it failed."""


def faults(
    nodes: Sequence[NodeFacts], directory: Path, too_large: Mapping[frozenset[str], str] = NONE_TOO_LARGE
) -> list[str]:
    """Faults that prevent hosts from running, each with a remedy.

    `too_large` says why the project cannot be copied to a node, by the directories that the node sees.
    """
    sentences = []
    if len({node.versions for node in nodes}) > 1:
        sentences.append(
            "nodes have other versions than each other: install the same everywhere, results depend on them"
        )
    if blind := [node.address for node in nodes if not node.sees]:
        sentences.append(
            f"{', '.join(blind)} does not see {directory}: mount one file system under the same path everywhere"
        )
    for same, reason in too_large.items():
        bare = [node.address for node in nodes if not node.project and node.same == same]
        sentences.append(f"{', '.join(bare)} does not see where hosts look for own code and data: {reason}")
    if idle := [node.address for node in nodes if node.gpus_of_ray < node.gpus]:
        sentences.append(f"{', '.join(idle)} has GPUs that Ray does not give out: set --num-gpus of `ray start` there")
    if away := [node.address for node in nodes if isinstance(node.gloo, str)]:
        local = [node.address for node in nodes if node.name_means.startswith(("127.", NOTHING))]
        hint = f" (the name of {', '.join(local)} means itself alone or nothing: set GLOO_SOCKET_IFNAME there)"
        why = f"does not reach the others by gloo{hint if local else ''}: open the ports between nodes"
        sentences.append(f"{', '.join(away)} {why}")
    return sentences
