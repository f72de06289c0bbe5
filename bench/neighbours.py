"""A small tenant beside a greedy one: steps a second of its job, and how long a chat of two tokens takes it.

    .venv/bin/python -m bench.neighbours                     # every attack; about six minutes
    .venv/bin/python -m bench.neighbours gradients --seconds 30

Each attack has a fresh service with an engine of one thread. First the small tenant is alone, then the other tenant attacks.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import numpy as np

from motet.service.tinker.wire import CONTENT_TYPE, INT64, KINDS
from tests.support.service_run import Service, tiny

SETTLED = 3
"""Steps of the small job before anything is measured."""
DATA, TOKENS, TARGETS = 26, 1000, 100
"""Of each request for a gradient."""
REQUESTS, JOBS, CHATS = 20, 400, 24
CHAT = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2, "temperature": 0}
LONG = {"messages": [{"role": "user", "content": "abc " * 100}], "max_tokens": 256, "n": 8}


@dataclass
class Beside:
    """What the small tenant got in one stretch of time."""

    steps: float
    """A second."""
    chat: float
    """Median seconds of a chat of two tokens."""


def client(url: str, key: str) -> httpx2.Client:
    """For a tenant's requests, also of the Tinker protocol."""
    headers = {"Authorization": f"Bearer {key}", "X-API-Key": f"tml-{key}"}
    return httpx2.Client(base_url=url, headers=headers, timeout=120, trust_env=False)


@contextlib.contextmanager
def sent_again(send: Callable[[httpx2.Client], object], url: str, key: str, threads: int) -> Iterator[None]:
    """Threads that send something as the greedy tenant, again and again."""
    stop = threading.Event()

    def loop() -> None:
        with client(url, key) as http:
            while not stop.is_set():
                with contextlib.suppress(httpx2.HTTPError):
                    send(http)

    workers = [threading.Thread(target=loop, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        stop.set()


@contextlib.contextmanager
def gradients(service: Service, key: str) -> Iterator[None]:
    """Requests for gradients of long data with many targets, which no step follows."""
    with client(f"{service.url}/tinker/api/v1", key) as http:
        session = http.post("/create_session", json={"tags": []}).json()["session_id"]
        wanted = {"session_id": session, "model_seq_id": 0, "base_model": "small", "lora_config": {"rank": 8}}
        model = http.post("/create_model", json=wanted).json()["model_id"]
        for number in range(1, 1 + REQUESTS):
            body = KINDS["Request"](model_id=model, seq_id=number, loss_fn="cross_entropy")
            for _ in range(DATA):
                datum = body.data.add()
                datum.model_input.add().encoded_text.tokens = (np.arange(TOKENS, dtype="<i4") % 30).tobytes()
                targets = datum.loss_fn_inputs.add(key="target_tokens").value
                targets.dense = (np.arange(TOKENS * TARGETS, dtype="<i8") % 30).tobytes()
                targets.dtype = INT64
                targets.shape.extend([TOKENS, TARGETS])
            content, headers = body.SerializeToString(), {"Content-Type": CONTENT_TYPE}
            answer = http.post("/forward_backward", content=content, headers=headers)
            assert answer.is_success, answer.text
    yield


@contextlib.contextmanager
def jobs(service: Service, key: str) -> Iterator[None]:
    """Many jobs of one step."""
    with client(service.url, key) as http:
        for number in range(JOBS):
            http.post("/v1/jobs", json=tiny(f"many-{number}", 1))
    yield


@contextlib.contextmanager
def large(service: Service, key: str) -> Iterator[None]:
    """A job of 16,384 groups of 8, and threads that ask for long completions."""
    job = tiny("large", 100, sampling={"max_tokens": 64}, algorithm={"group_size": 8, "groups_per_step": 16_384})
    job["data"] = {"source": "toy:sort_letters", "size": 20_000, "holdout": 4}

    def ask(http: httpx2.Client) -> object:
        return http.post("/v1/chat/completions", json={"model": "small", **LONG})

    with client(service.url, key) as http:
        http.post("/v1/jobs", json=job).raise_for_status()
    with sent_again(ask, service.url, key, CHATS):
        yield


ATTACKS = {"gradients": gradients, "jobs": jobs, "large": large}


def measured(service: Service, seconds: float) -> Beside:
    """Ask as the small tenant for a while."""
    chats, first, begun = [], int(service.job("small")["step"]), time.monotonic()
    while time.monotonic() - begun < seconds:
        asked = time.monotonic()
        answer = httpx2.post(
            f"{service.url}/v1/chat/completions",
            json={"model": "small", **CHAT},
            headers={"Authorization": service._http.headers["Authorization"]},
            timeout=120,
        )
        assert answer.is_success, answer.text
        chats.append(time.monotonic() - asked)
        time.sleep(0.5)
    spent = time.monotonic() - begun
    return Beside((int(service.job("small")["step"]) - first) / spent, statistics.median(chats))


def run(attack: str, engine: str, seconds: float) -> tuple[Beside, Beside]:
    """Alone, and beside an attack."""
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made) / "served"
        directory.mkdir()
        config = Path(made) / "config.yaml"
        config.write_text(f"engine: {engine}\nrate: {{requests_per_second: null}}\n")
        service = Service(directory, "--config", str(config), keys=True)
        try:
            service.start()
            service.become(service.admin_key)
            mine, theirs = (service.key_for(name) for name in ("small", "greedy"))
            service.become(mine)
            service.submit(tiny("small", 100_000))
            service.reaches("small", SETTLED)
            alone = measured(service, seconds)
            with ATTACKS[attack](service, theirs):
                time.sleep(3)
                return alone, measured(service, seconds)
        finally:
            service.close()


def main() -> None:
    """Run attacks and print what the small tenant kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", choices=[*ATTACKS, []], default=[])
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--engine", default="{samplers: 0, threads: 1}")
    options = parser.parse_args()
    steps, chats = f"{'steps/s alone':>14} {'beside':>8} {'kept':>6}", f"{'chat alone':>11} {'beside':>8} {'times':>6}"
    print(f"{'attack':<10} {steps} {chats}")
    for attack in options.attacks or ATTACKS:
        alone, beside = run(attack, options.engine, options.seconds)
        print(
            f"{attack:<10} {alone.steps:>14.2f} {beside.steps:>8.2f} {beside.steps / alone.steps:>6.2f} "
            f"{alone.chat:>9.3f} s {beside.chat:>6.3f} s {beside.chat / alone.chat:>6.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
