"""Attacks of strangers and tenants on a service, and what a neighbour has beside each: chats, steps, starts of jobs.

    .venv/bin/python -m bench.attacks                                 # every attack; about twenty seconds each
    .venv/bin/python -m bench.attacks bytes sparse --seconds 5
    .venv/bin/python -m bench.attacks --python /tmp/old/.venv/bin/python    # the service of another tree

One service with an engine of one thread meets one attack after another. Before each, the neighbour is alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import socket
import statistics
import struct
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import numpy as np
import pyarrow
import pyarrow.parquet
from bench.neighbours import CHAT, SETTLED, client, sent_again

from motet.service.tinker.wire import CONTENT_TYPE, INT64, KINDS
from tests.support.service_run import Service, tiny

PATIENCE = 10.0
"""Seconds that the neighbour waits for one answer, and for a job to begin; as many are shown where none came."""
ROWS = 1000
"""Steps of the job whose steps are read."""
TENSORS = 800_000
"""Empty ones, in the header of an uploaded adapter."""
BURST, BODY_BYTES = 500, 131_072
"""Connections of a burst, and bytes of each one's body."""
LONG_ROWS, ROW_CHARACTERS = 180_000, 5_000
"""Of a file of half a megabyte that jobs prepare."""


@dataclass
class Beside:
    """What the neighbour got in one stretch of time."""

    chats: list[float]
    """Seconds of each chat of two tokens."""
    steps: float
    """Of its job, a second."""
    start: float
    """Seconds from handing in another job until it runs."""

    def text(self) -> str:
        """The middle and the worst chat, steps a second, the start of a job."""
        return f"{statistics.median(self.chats):7.2f} {max(self.chats):6.2f} {self.steps:8.2f} {self.start:6.1f}"


# --- without a key ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def bytes_(service: Service, key: str) -> Iterator[None]:
    """Four connections that send a body in chunks of one byte."""
    head = b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", service.port), 10) as line:
                line.sendall(head)
                while not stop.is_set():
                    line.sendall(b"1\r\na\r\n" * 2000)

    for _ in range(4):
        threading.Thread(target=send, daemon=True).start()
    try:
        yield
    finally:
        stop.set()


# --- with a key -------------------------------------------------------------------------------------------------------------


def sending(
    path: str, threads: int, **request: object
) -> Callable[[Service, str], contextlib.AbstractContextManager[None]]:
    """Threads that send the same request again and again."""

    def attack(service: Service, key: str) -> contextlib.AbstractContextManager[None]:
        return sent_again(lambda http: http.post(path, **request), service.url, key, threads)  # type: ignore[arg-type]

    return attack


@contextlib.contextmanager
def sparse(service: Service, key: str) -> Iterator[None]:
    """Gradients of a few kilobytes whose sparse tensors mean millions of numbers; the model is none."""
    body = KINDS["Request"](model_id="none:train:0", seq_id=1, loss_fn="cross_entropy")
    for _ in range(32):
        datum = body.data.add()
        datum.model_input.add().encoded_text.tokens = np.zeros(1, "<i4").tobytes()
        targets = datum.loss_fn_inputs.add(key="target_tokens").value
        targets.sparse_csr.values = np.zeros(0, "<i8").tobytes()
        targets.sparse_csr.crow_indices = np.zeros(2, "<i8").tobytes()
        targets.sparse_csr.col_indices = np.zeros(0, "<i8").tobytes()
        targets.dtype = INT64
        targets.shape.extend([1, 2**19])
    request = {"content": body.SerializeToString(), "headers": {"Content-Type": CONTENT_TYPE}}
    with sending("/tinker/api/v1/forward_backward", 4, **request)(service, key):
        yield


@contextlib.contextmanager
def steps(service: Service, key: str) -> Iterator[None]:
    """Threads that read all steps of a job."""
    name = f"read-{time.monotonic_ns()}"
    with client(service.url, key) as http:
        job = tiny(name, ROWS, algorithm={"group_size": 2, "groups_per_step": 1}, sampling={"max_tokens": 1})
        http.post("/v1/jobs", json=job).raise_for_status()
        with sent_again(lambda connection: connection.get(f"/v1/jobs/{name}/steps?points=5000"), service.url, key, 16):
            yield
        http.post(f"/v1/jobs/{name}/cancel")


@contextlib.contextmanager
def slots(service: Service, key: str) -> Iterator[None]:
    """As many jobs as slots, each one step of many rollouts."""
    names = [f"slot-{number}-{time.monotonic_ns()}" for number in range(16)]
    with client(service.url, key) as http:
        for name in names:
            job = tiny(name, 1, algorithm={"group_size": 8, "groups_per_step": 2048}, sampling={"max_tokens": 32})
            job = {**job, "data": {"source": "toy:sort_letters", "size": 4096, "holdout": 4}}
            http.post("/v1/jobs", json=job).raise_for_status()
        yield
        for name in names:
            http.post(f"/v1/jobs/{name}/cancel")


def _adapter_of_empty_tensors() -> bytes:
    entry = '"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = ("{" + ",".join(entry % number for number in range(TENSORS)) + "}").encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("adapter_config.json", json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16}))
        archive.writestr("adapter_model.safetensors", struct.pack("<Q", len(header)) + header)
    return packed.getvalue()


@contextlib.contextmanager
def tensors(service: Service, key: str) -> Iterator[None]:
    """Adapters whose header names as many empty tensors as fit."""
    packed = _adapter_of_empty_tensors()
    with sent_again(lambda http: http.post("/v1/adapters", files={"file": ("a.zip", packed)}), service.url, key, 2):
        yield


@contextlib.contextmanager
def rows(service: Service, key: str) -> Iterator[None]:
    """Jobs on a small file whose rows are gigabytes, each of which shuffles them in another order."""
    packed = io.BytesIO()
    texts = pyarrow.array(["x" * ROW_CHARACTERS] * LONG_ROWS)
    pyarrow.parquet.write_table(
        pyarrow.table({"prompt": texts, "answer": pyarrow.array(["x"] * LONG_ROWS)}), packed, compression="zstd"
    )
    with client(service.url, key) as http:
        answer = http.post("/v1/files", files={"file": ("rows.parquet", packed.getvalue())})
        source = answer.raise_for_status().json()["id"]

        def submit(connection: httpx2.Client) -> None:
            name = f"rows-{time.monotonic_ns()}"
            connection.post(
                "/v1/jobs", json={**tiny(name, 1), "data": {"source": source, "seed": time.monotonic_ns() % 1000}}
            )
            time.sleep(1)
            connection.post(f"/v1/jobs/{name}/cancel")

        with sent_again(submit, service.url, key, 3):
            yield


def _unfinished_chat(key: str) -> bytes:
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {BODY_BYTES}\r\n\r\n"
    )
    return head.encode() + b" " * (BODY_BYTES - 1)


@contextlib.contextmanager
def bodies(service: Service, key: str) -> Iterator[None]:
    """Hundreds of bodies that never end, under several keys of one tenant."""
    with client(service.url, key) as http:
        made = [http.post("/v1/keys", json={"name": f"k{number}"}).json().get("key", key) for number in range(5)]
    lines = list[socket.socket]()
    stop = threading.Event()

    def open_lines() -> None:
        for number in range(1250):
            if stop.is_set():
                return
            with contextlib.suppress(OSError):
                lines.append(line := socket.create_connection(("127.0.0.1", service.port), 10))
                line.sendall(_unfinished_chat(made[number % 5]))

    opening = threading.Thread(target=open_lines, daemon=True)
    opening.start()
    try:
        yield
    finally:
        stop.set()
        opening.join()
        for line in lines:
            line.close()


@contextlib.contextmanager
def bursts(service: Service, key: str) -> Iterator[None]:
    """Hundreds of connections that are opened in peace, and whose bodies arrive in one moment."""
    request, stop = _unfinished_chat(key), threading.Event()

    def send() -> None:
        while not stop.is_set():
            with contextlib.ExitStack() as open_, contextlib.suppress(OSError):
                lines = [socket.create_connection(("127.0.0.1", service.port), 10) for _ in range(BURST)]
                for line in lines:
                    open_.enter_context(line)
                stop.wait(0.5)
                for line in lines:
                    line.setblocking(False)
                    with contextlib.suppress(OSError):
                        line.send(request)
                stop.wait(2)

    sending_ = threading.Thread(target=send, daemon=True)
    sending_.start()
    try:
        yield
    finally:
        stop.set()
        sending_.join()


def _masks() -> dict[str, object]:
    words = [f"{number:x}" * 4 for number in range(400)]
    schema = {
        "type": "object",
        "properties": {f"p{n}": {"enum": words[n::8]} for n in range(8)},
        "required": ["p0", "p1"],
    }
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    return {"model": "small", "messages": CHAT["messages"], "max_tokens": 64, "n": 16, "response_format": form}


_FLOATS = json.dumps({"jobs": [[0.1] * 250_000]}).encode()
_FORM = b"\r\n--Bx" * 2_000_000
ATTACKS: dict[str, Callable[[Service, str], contextlib.AbstractContextManager[None]]] = {
    "bytes": bytes_,
    "sparse": sparse,
    "floats": sending("/v1/submissions", 2, content=_FLOATS, headers={"Content-Type": "application/json"}),
    "forms": sending("/v1/files", 4, content=_FORM, headers={"Content-Type": "multipart/form-data; boundary=B"}),
    "steps": steps,
    "masks": sending("/v1/chat/completions", 16, json=_masks()),
    "slots": slots,
    "tensors": tensors,
    "rows": rows,
    "bodies": bodies,
    "bursts": bursts,
}


def beside(service: Service, key: str, seconds: float, number: int) -> Beside:
    """Ask as the neighbour for a while; another job of its is begun meanwhile."""
    chats, start = list[float](), [PATIENCE]
    with httpx2.Client(
        base_url=service.url, headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE, trust_env=False
    ) as http:

        def timed(ask: Callable[[], httpx2.Response]) -> float:
            begun = time.monotonic()
            with contextlib.suppress(httpx2.TransportError):
                ask()
            return time.monotonic() - begun

        def begin() -> None:
            begun, name = time.monotonic(), f"start-{number}"
            with contextlib.suppress(httpx2.TransportError, KeyError):
                http.post("/v1/jobs", json=tiny(name, 1))
                while time.monotonic() - begun < PATIENCE:
                    if http.get(f"/v1/jobs/{name}").json()["state"] != "queued":
                        start[0] = time.monotonic() - begun
                        return
                    time.sleep(0.1)

        def step() -> float:
            with contextlib.suppress(httpx2.TransportError):
                return float(http.get("/v1/jobs/small").json()["step"])
            return float("nan")

        before, begun = step(), time.monotonic()
        beginning = threading.Thread(target=begin)
        beginning.start()
        while time.monotonic() - begun < seconds:
            chats.append(timed(lambda: http.post("/v1/chat/completions", json={"model": "small", **CHAT})))
            time.sleep(0.2)
        after, spent = step(), time.monotonic() - begun
        beginning.join()
    return Beside(chats, (after - before) / spent, start[0])


def main() -> None:
    """Run attacks and print what the neighbour had alone, and beside each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", choices=[*ATTACKS, []], default=[])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each attack, and alone before it")
    parser.add_argument("--python", help="the Python whose Motet serves; default: this one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        service = Service(Path(made) / "served", keys=True)
        if options.python:
            service._command[0] = options.python
        try:
            service.start()
            service.become(service.admin_key)
            mine, theirs = (service.key_for(name) for name in ("small", "greedy"))
            service.become(mine)
            service.submit(tiny("small", 100_000))
            service.reaches("small", SETTLED)
            print(f"{'attack':<8} {'alone: chat, worst, steps/s, start':>36} {'beside':>32}")
            for number, attack in enumerate(options.attacks or ATTACKS):
                alone = beside(service, mine, options.seconds, 2 * number)
                with ATTACKS[attack](service, theirs):
                    time.sleep(1)
                    attacked = beside(service, mine, options.seconds, 2 * number + 1)
                print(f"{attack:<8} {alone.text():>36} {attacked.text():>32}", flush=True)
        finally:
            service.close()


if __name__ == "__main__":
    main()
