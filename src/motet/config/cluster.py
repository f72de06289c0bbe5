"""What a user may write of the machines that hosts are on."""

from __future__ import annotations

from typing import Literal

from motet.section import Config


class ClusterConfig(Config):
    """Where the processes of `engine.hosts` are."""

    launcher: Literal["local", "ray"] = "local"
    """`local` processes of this machine, or processes that Ray places on the nodes of a cluster (`pip install 'motet[ray]'`);
    all nodes see the run directory under the same path, and each host asks Ray for `engine.threads` cores of one node."""
    address: str = "auto"
    """Of the Ray cluster, `HOST:PORT` of its head; `auto` is the one that runs on this machine."""
