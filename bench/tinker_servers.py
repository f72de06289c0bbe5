"""One loop of the `tinker` package 0.25 against `motet serve` and against SkyRL's server (JAX), on the same base and two cores.

    python -m bench.tinker_servers --skyrl /path/to/an/environment/bin/python

The environment is a Python 3.12 with `skyrl[tinker,jax]==0.4.0` and `aiohttp`, which it needs and does not name.
Both servers stand; only one of them works at a time, in turn. The first repeat of each is not counted: JAX compiles in it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

LOOP = Path(__file__).parent / "speed" / "workers" / "tinker_loop.py"
CLIENT = Path(".envs/tinker-0.25.0/bin/python")
SHIM = """#!/bin/bash
# stands for `uv run`, by which SkyRL's server starts its engine: the module, in the environment that is installed
while [ "$1" != "-m" ] && [ $# -gt 0 ]; do shift; done
trap 'kill $!' TERM
{python} "$@" &
wait $!
"""


def free_port() -> int:
    """One that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def server(command: list[str], port: int, log: Path, **settings: str) -> Iterator[None]:
    """Run a server, from the moment when it listens until the end of the block."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, **settings}, start_new_session=True
        )
        try:
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                if process.poll() is not None:
                    raise SystemExit(f"{command[0]} has ended: see {log}")
                time.sleep(0.5)
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 15)
            process.wait()


@contextlib.contextmanager
def loop(url: str, base: Path, work: list[int]) -> Iterator[subprocess.Popen[str]]:
    """The client, which does the work once for each line."""
    command = [str(CLIENT), str(LOOP), url, str(base), *map(str, work)]
    env = {**os.environ, "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", "TINKER_API_KEY": "tml-none"}
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def once(process: subprocess.Popen[str]) -> float:
    """Seconds of one repeat."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(json.loads(process.stdout.readline())["seconds"])


def measure(skyrl: Path, base: Path, work: list[int], repeats: int) -> None:
    """Both in turn, and print."""
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="motet-bench-")))
        shim = scratch / "uv"
        shim.write_text(SHIM.format(python=skyrl))
        shim.chmod(0o755)
        ports = {"motet": free_port(), "skyrl": free_port()}
        config = scratch / "engine.yaml"
        config.write_text(json.dumps({"engine": {"samplers": 0}}))
        motet = [sys.executable, "-m", "motet", "serve", "--base", str(base), "--no-keys", "--config", str(config)]
        motet += ["--directory", str(scratch / "motet"), "--port", str(ports["motet"])]
        lora = json.dumps({"max_lora_adapters": 1 + work[0] * (repeats + 1), "max_lora_rank": 16})
        other = [str(shim), "run", "--extra", "jax", "-m", "skyrl.tinker.api", "--base-model", str(base)]
        other += ["--backend", "jax", "--backend-config", lora, "--host", "127.0.0.1", "--port", str(ports["skyrl"])]
        other += ["--checkpoints-base", str(scratch / "skyrl"), "--database-url", f"sqlite:///{scratch}/skyrl.db"]
        path = f"{scratch}:{os.environ['PATH']}"
        stack.enter_context(server(motet, ports["motet"], Path("/tmp/bench-motet.log")))
        stack.enter_context(server(other, ports["skyrl"], Path("/tmp/bench-skyrl.log"), PATH=path, JAX_PLATFORMS="cpu"))
        urls = {"motet": f"http://127.0.0.1:{ports['motet']}/tinker", "skyrl": f"http://127.0.0.1:{ports['skyrl']}"}
        loops = {name: stack.enter_context(loop(url, base, work)) for name, url in urls.items()}
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        for repeat in range(repeats + 1):
            for name, process in loops.items():
                took = once(process)
                print(f"{name}: {took:.1f} s{'' if repeat else ' (not counted)'}", flush=True)
                if repeat:
                    seconds[name].append(took)
    ratio = statistics.median(seconds["skyrl"]) / statistics.median(seconds["motet"])
    clients, steps, groups, each, tokens = work
    print(
        f"{clients} loop(s) of {steps} steps, {groups} × {each} samples of at most {tokens} tokens: {ratio:.2f} × faster"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--skyrl", type=Path, required=True)
    parser.add_argument("--base", type=Path, default=Path.home() / ".cache/motet/SmolLM2-135M-Instruct")
    parser.add_argument(
        "--work", type=int, nargs=5, default=[1, 4, 4, 8, 24], help="loops, steps, groups, each, tokens"
    )
    parser.add_argument("--repeats", type=int, default=2)
    given = parser.parse_args()
    measure(given.skyrl, given.base, given.work, given.repeats)


if __name__ == "__main__":
    main()
