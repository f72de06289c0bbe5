"""A real vLLM on this CPU for tests, from the environment that `make vllm` makes.

with vllm_server(base, directory) as server: ...     # server.url, server.key, server.process

It finds versions by their names in directory / "by-name", fetches those that it is given a location of, and reads others.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from bench.speed.envs import directory as environments
from bench.speed.envs import python_of

from motet.config import LaunchConfig, RolloutConfig
from motet.hosts import servers
from motet.rollout.in_vllm.motet_vllm import TESTED
from motet.rollout.server import Demand
from tests.conftest import IN_CI
from tests.support import inside

WANTED = Demand(adapters=4, versions=16, rank=16)
START_SECONDS = 600.0
OPTIONS = "options: "
"""Before what the server's own parser made of `reads`, in its log."""
READS = f"""
import json, runpy, sys
from vllm.utils.argparse_utils import FlexibleArgumentParser
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:  # of older releases
    from vllm.entrypoints.openai.cli_args import make_arg_parser
found = vars(make_arg_parser(FlexibleArgumentParser()).parse_args(json.loads(sys.argv.pop(1))))
print({OPTIONS!r} + json.dumps({{name: str(value) for name, value in found.items()}}), flush=True)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def vllm_python(release: str = TESTED[-1]) -> str:
    """The interpreter that has this vLLM; skips the test where there is none."""
    older = "" if release == TESTED[-1] else f"-{release}"
    given = "" if older else os.environ.get("MOTET_VLLM_PYTHON")
    found = Path(given) if given else python_of(environments(), f"vllm{older}")
    if not found.is_file():
        reason = f"vLLM {release} is not installed in {found.parents[1]}: run `make vllm{older and f' VLLM={release}'}`"
        if IN_CI:
            pytest.fail(reason)
        pytest.skip(reason)
    return str(found)


def launch(release: str = TESTED[-1]) -> LaunchConfig:
    """How tests start a server: small."""
    return LaunchConfig(python=vllm_python(release), args=["--max-model-len", "512"])


@contextlib.contextmanager
def vllm_server(
    base: Any, directory: Path, *args: str, own_worker: bool = True, release: str = TESTED[-1], key: str = "",
    reads: Sequence[str] = (),
) -> Iterator[servers.Launched]:  # fmt: skip
    """A server that runs while the block does.

    Without `own_worker` its worker shares the engine's process: it loads sooner, and neither waits in a busy loop. It reads
    the options `reads` before its own, and tells in its log what they mean to it.
    """
    (directory / "by-name").mkdir(parents=True)
    env = {
        "VLLM_LORA_RESOLVER_CACHE_DIR": str(directory / "by-name"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": f"{own_worker:d}",
        **({"VLLM_API_KEY": key} if key else {}),
    }
    start = launch(release)
    start = start.model_copy(update={"env": env, "args": [*start.args, *args]})
    config = RolloutConfig(engine="vllm", launch=start, publish_by="tensors")
    (server,) = servers.launched(base.info, str(base.model.config.name_or_path), config, start, WANTED, directory)
    if reads:
        python, dash_m, module, *rest = inside.command(server)
        assert dash_m == "-m"
        inside.command(server)[:] = [python, "-c", READS, json.dumps(reads), module, *rest]
    server.process.start()
    try:
        _wait(server)
        yield replace(server, key=key or server.key)
    finally:
        server.process.close()


def _wait(server: servers.Launched) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.process.alive:
        with contextlib.suppress(httpx2.TransportError):
            if httpx2.get(f"{server.url}/health", timeout=5.0, trust_env=False).status_code == 200:
                return
        time.sleep(0.5)
    raise AssertionError(server.process.ending)
