"""What the hardware can do: the rate of bfloat16 products and the bandwidth of memory, with all cores.

Products are measured twice, because which is faster depends on library and shape: by one process with all threads, and by one
process of one thread for each core, all at the same time. `python -m … OPTIONS alone` is such a process; it waits for a line.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bench.speed.workers.serve import Repeat, options, serve, versions

OPTIONS = options()
SHAPES = (
    (64, 576, 1536),
    (256, 576, 1536),
    (1024, 576, 1536),
    (1024, 1536, 576),
    (512, 2048, 2048),
    (2048, 2048, 2048),
)
BIG_SHAPES = ((4096, 4096, 4096), (8192, 4096, 14336), (8192, 8192, 8192))
SECONDS = 0.2
"""For each measurement."""


def load() -> dict[str, Any]:
    """Import torch and set its threads."""
    torch = importlib.import_module("torch")
    torch.set_num_threads(OPTIONS["threads"])
    device = {"device": torch.cuda.get_device_name()} if OPTIONS["device"] == "cuda" else {}
    return {"versions": versions("torch"), **device}


def per_second(call: Callable[[], Any], amount: float) -> float:
    """How much a call gets through: its amount by the least time of one, over a while."""
    torch = importlib.import_module("torch")
    wait = torch.cuda.synchronize if OPTIONS["device"] == "cuda" else (lambda: None)
    call()
    wait()
    best, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        started = time.perf_counter()
        call()
        wait()
        best = min(best, time.perf_counter() - started)
    return amount / best


def product_rates() -> dict[str, float]:
    """Operations per second of y = x · Wᵀ by shape."""
    torch = importlib.import_module("torch")
    found = {}
    for rows, inner, outer in BIG_SHAPES if OPTIONS["device"] == "cuda" else SHAPES:
        x = torch.randn(rows, inner, device=OPTIONS["device"]).bfloat16()
        weight = torch.randn(outer, inner, device=OPTIONS["device"]).bfloat16()
        call = lambda x=x, weight=weight: torch.nn.functional.linear(x, weight)  # noqa: E731
        found[f"{rows}×{inner}×{outer}"] = per_second(call, 2.0 * rows * inner * outer)
    return found


def read_bandwidth() -> float:
    """Bytes read per second, far more of them than a cache holds."""
    torch = importlib.import_module("torch")
    values = torch.ones(2**27, device=OPTIONS["device"])
    return per_second(values.sum, values.numel() * 4.0)


def alone_on_each_core() -> tuple[dict[str, float], float]:
    """The sums over processes of one thread each, all at the same time."""
    words = [sys.executable, "-m", "bench.speed.workers.machine_side", json.dumps({**OPTIONS, "threads": 1}), "alone"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen(words, **pipes) for _ in range(OPTIONS["threads"])]  # type: ignore[call-overload]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    found = [json.loads(child.communicate()[0]) for child in children]
    return {shape: sum(item["rates"][shape] for item in found) for shape in found[0]["rates"]}, sum(
        item["bandwidth"] for item in found
    )


@contextmanager
def limits(args: dict[str, Any]) -> Iterator[Repeat]:
    """Rates and bandwidth, the best of both ways."""

    def repeat() -> dict[str, Any]:
        together, bandwidth = product_rates(), read_bandwidth()
        apart: dict[str, float] = {}
        if OPTIONS["device"] == "cpu" and OPTIONS["threads"] > 1:
            apart, summed = alone_on_each_core()
            bandwidth = max(bandwidth, summed)
        best = max([*together.values(), *apart.values()])
        return {"value": best, "bandwidth": bandwidth, "together": together, "apart": apart}

    yield repeat


if __name__ == "__main__":
    if sys.argv[2:3] == ["alone"]:
        load()
        print("ready", flush=True)
        sys.stdin.readline()
        print(json.dumps({"rates": product_rates(), "bandwidth": read_bandwidth()}))
    else:
        serve(load, {"limits": limits})
