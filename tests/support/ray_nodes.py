"""Where hosts run: on this machine, or on a Ray cluster of two nodes on it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.service_run import Json
from tests.support.waiting import PATIENCE

_STORE = 80 * 2**20  # the least that Ray takes


@contextmanager
def cluster_of(launcher: str, cpus: int = 1) -> Iterator[Json]:
    """What a configuration has as its `cluster`: this machine (`local`), or two nodes of Ray with so many `cpus` each."""
    if launcher == "local":
        yield {"launcher": "local"}
        return
    import ray
    from ray._private import services
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patched:  # a node that is not there after half a minute has not failed yet
        patched.setattr(services, "get_node", tried_again(services.get_node))
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus, "object_store_memory": _STORE})
        nodes.add_node(num_cpus=cpus, object_store_memory=_STORE)
    try:
        yield {"launcher": "ray", "address": nodes.address}
    finally:
        ray.shutdown()  # a run in this process is still connected
        nodes.shutdown()


def tried_again(call: Callable[..., Any], seconds: float = PATIENCE) -> Callable[..., Any]:
    """What is called, until it succeeds: Ray itself looks for a node that starts for 30 s, which a busy machine needs."""

    def called(*args: Any, **named: Any) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):
                return call(*args, **named)
            time.sleep(0.2)
        return call(*args, **named)

    return called
