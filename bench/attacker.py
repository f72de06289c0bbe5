"""A tenant that attacks a service in fifteen ways at once, for `bench/attacked_day.py`: a process of its own.

    MOTET_API_KEY=mk-… .venv/bin/python -m bench.attacker http://127.0.0.1:8420 600

Each way sends what once held up other tenants, as near as today's limits take it: where a number is refused, it is sent
again and then halved until it is taken. A way waits for as long as an answer 429 asks, two seconds at most. At the end the
ways and the statuses of their answers are printed as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx2
import pyarrow
import pyarrow.parquet

from motet.service.http.json_size import MOST_NUMBERS, MOST_VALUES
from tests.support.service_run import FINAL, Json, tiny

HOLD = 15.0
"""Seconds that a job of the attacker's keeps running before it is cancelled and handed in again."""
PATIENCE = 60.0
"""Seconds that a job may wait for its turn before another is handed in for it."""
REST = 0.05
CHAT = {"model": "small", "messages": [{"role": "user", "content": "abc"}]}


class Over(Exception):
    """The time is up."""


class Way:
    """One way to attack, in a thread of its own."""

    def __init__(self, name: str, url: str, key: str, until: float) -> None:
        self.name, self.until, self.statuses = name, until, Counter[str]()
        self.said = dict[str, str]()
        """The first refusal of each status."""
        self.url, self.key = url, key
        headers = {"Authorization": f"Bearer {key}", "X-API-Key": f"tml-{key}"}
        self.http = httpx2.Client(base_url=url, headers=headers, timeout=60, trust_env=False)
        self._number = 0

    def rest(self, seconds: float = REST) -> None:
        """Wait, but not beyond the end."""
        left = self.until - time.monotonic()
        if left <= 0:
            raise Over
        time.sleep(min(seconds, left))

    def send(self, method: str, path: str, **request: Any) -> httpx2.Response | None:
        """Ask once; a 429 is waited for."""
        self.rest()
        try:
            answer = self.http.request(method, path, **request)
        except httpx2.HTTPError as error:
            self.statuses[type(error).__name__] += 1
            return None
        self.statuses[str(answer.status_code)] += 1
        if answer.is_error and answer.status_code != 429:
            self.said.setdefault(str(answer.status_code), answer.text[:300])
        if answer.status_code == 429:
            self.rest(min(float(answer.headers.get("Retry-After", "1")), 2.0))
        return answer

    def taken(self, method: str, path: str, **request: Any) -> httpx2.Response:
        """Ask until the answer is another than 429."""
        while (answer := self.send(method, path, **request)) is None or answer.status_code == 429:
            pass
        return answer

    def upload(self, name: str, rows: bytes) -> str:
        """The id of a file of rows."""
        return str(self.taken("POST", "/v1/files", files={"file": (name, rows)}).json().get("id", ""))

    def submit(self, job: Json) -> str:
        """Hand a job in; the name that it has, or an empty one."""
        self._number += 1
        name = f"{self.name}-{self._number}"
        return name if self.taken("POST", "/v1/jobs", json={**job, "name": name}).status_code == 201 else ""

    def hold(self, name: str) -> str:
        """Wait until a job has run for a while, and cancel it; the state that it had before."""
        begun, ran = time.monotonic(), 0.0
        while True:
            answer = self.taken("GET", f"/v1/jobs/{name}")
            state = answer.json()["state"] if answer.is_success else "gone"
            self.statuses[f"seen {state}"] += 1
            if state == "failed":
                self.said.setdefault(state, str(answer.json()["message"])[:300])
            now = time.monotonic()
            ran = ran or (now if state == "running" else 0.0)
            if state in (*FINAL, "gone") or (ran and now > ran + HOLD) or now > begun + PATIENCE:
                break
            self.rest(2.0)
        if state not in (*FINAL, "gone"):
            self.taken("POST", f"/v1/jobs/{name}/cancel")
        self.taken("DELETE", f"/v1/jobs/{name}")
        return state

    def sized(self, made: Callable[[int], Json], size: int) -> None:
        """Jobs of a size, again and again: the whole size each time first, then as much of it as is taken."""
        fits = size
        while True:
            for tried in (size, fits) if fits < size else (size,):
                name = self.submit(made(tried))
                if (not name or self.hold(name) == "failed") and tried == fits > 1:
                    fits //= 2
            self.rest(1.0)


# --- rows -------------------------------------------------------------------------------------------------------------------


def _numbers(rows: int, count: int) -> bytes:
    made = ({"prompt": f"{n}+2?", "answer": "4", "numbers": [7] * count} for n in range(rows))
    return b"".join(json.dumps(row).encode() + b"\n" for row in made)


def _letters(rows: int, length: int) -> bytes:
    packed = io.BytesIO()
    columns = {"prompt": [f"{n}+2?" for n in range(rows)], "answer": ["4"] * rows, "notes": ["x" * length] * rows}
    pyarrow.parquet.write_table(pyarrow.table(columns), packed, compression="zstd")
    return packed.getvalue()


def _prompts(rows: int, words: int) -> bytes:
    return b"".join(json.dumps({"prompt": f"{n} " * words, "answer": "4"}).encode() + b"\n" for n in range(rows))


def _agent(**fields: Any) -> Json:
    job = tiny("", 50, environment={"name": "agent"}, **fields)
    del job["reward"]
    return job


# --- the ways ---------------------------------------------------------------------------------------------------------------


def scores(way: Way) -> None:
    """B1: results with as many whole numbers as a body may have."""
    job = ""
    results = [{"id": f"unit-{n}", "scores": [1] * 120} for n in range(255)]
    body = json.dumps({"results": results}).encode()
    while True:
        if not job or way.taken("GET", f"/v1/jobs/{job}").status_code != 200:
            job = way.submit(tiny("", 50, reward={"name": "worker"}))
        for _ in range(100):
            headers = {"Content-Type": "application/json"}
            way.send("POST", f"/v1/jobs/{job}/work/rewards/results", content=body, headers=headers)


def texts(way: Way) -> None:
    """B2: texts that a database cannot keep."""
    while True:
        for text in ("\0", "\ud800"):
            content = json.dumps(tiny("text", 1, sampling={"max_tokens": 8, "stop": [text]})).encode()
            way.send("POST", "/v1/jobs", content=content, headers={"Content-Type": "application/json"})
        way.rest(1.0)


def rows_of_a_step(way: Way) -> None:
    """B3: toy data, all rows in one step."""

    def made(size: int) -> Json:
        data = {"source": "toy:sort_letters", "size": 1000, "holdout": 4}
        return {"data": data, "algorithm": {"type": "sft", "rows_per_step": size}, "steps": 50}

    way.sized(made, 131_072)


def episodes(way: Way) -> None:
    """B4: rows of many numbers for episodes that nobody plays."""
    files = dict[int, str]()

    def made(size: int) -> Json:
        files[size] = files.get(size) or way.upload("rows.jsonl", _numbers(16, size))
        algorithm = {"group_size": 512, "groups_per_step": 8}
        return _agent(data={"source": files[size], "holdout": 4}, algorithm=algorithm)

    way.sized(made, 50_000)


def scored_rows(way: Way) -> None:
    """B5: rows of many numbers for reward workers that never come."""
    files = dict[int, str]()

    def made(size: int) -> Json:
        files[size] = files.get(size) or way.upload("rows.jsonl", _numbers(16, size))
        job = tiny("", 50, algorithm={"group_size": 8, "groups_per_step": 64}, reward={"name": "worker"})
        return {**job, "data": {"source": files[size], "holdout": 4}}

    way.sized(made, 100_000)


def small_file(way: Way) -> None:
    """B6: a file of a kilobyte that stands for long rows."""
    file = way.upload("rows.parquet", _letters(8, 900_000))

    def made(size: int) -> Json:
        job = tiny("", 50, algorithm={"group_size": 2, "groups_per_step": size})
        return {**job, "data": {"source": file, "holdout": 2}}

    way.sized(made, 1500)


def held_out(way: Way) -> None:
    """B7: three jobs that hold long rows out."""
    file = way.upload("rows.parquet", _letters(300, 900_000))
    size = 292
    while True:
        for holdout in {292, size}:
            data = {"source": file, "holdout": holdout}
            names = [way.submit({**tiny("", 50), "data": data}) for _ in range(3)]
            states = [way.hold(name) for name in names if name]
            size = size // 2 if holdout == size > 1 and "failed" in states else size


def silent_worker(way: Way) -> None:
    """B8: agent jobs whose worker takes an episode of each, and says nothing."""
    while True:
        names = [name for _ in range(4) if (name := way.submit(_agent()))]
        for _ in range(30):
            for name in names:
                lease = {"worker": "silent", "most": 1, "wait_seconds": 0}
                way.send("POST", f"/v1/jobs/{name}/work/episodes/lease", json=lease)
            way.rest(1.0)
        for name in names:
            way.taken("POST", f"/v1/jobs/{name}/cancel")
            way.taken("DELETE", f"/v1/jobs/{name}")


def steps_ahead(way: Way) -> None:
    """B9: many wide steps ahead."""

    def made(size: int) -> Json:
        algorithm = {"group_size": 2, "groups_per_step": size, "max_off_policy_steps": 60}
        data = {"source": "toy:sort_letters", "size": 10_000, "holdout": 4}
        return {**tiny("", 50, algorithm=algorithm), "data": data}

    way.sized(made, 8192)


def long_prompts(way: Way) -> None:
    """B10: held-out prompts that are long, with answers of a token."""
    file = way.upload("rows.jsonl", _prompts(620, 200))

    def made(size: int) -> Json:
        job = tiny("", 50, sampling={"max_tokens": 1}, eval={"every": 1})
        return {**job, "data": {"source": file, "holdout": size}}

    way.sized(made, 590)


def completions(way: Way) -> None:
    """B11: requests for many long completions at once; several threads do this."""
    while True:
        way.send("POST", "/v1/completions", json={"model": "small", "prompt": "Once", "n": 16, "max_tokens": 500})


def addresses(way: Way) -> None:
    """B12: no key, and another address named in each request."""
    number = 0
    with httpx2.Client(base_url=way.url, timeout=60, trust_env=False) as http:
        while True:
            way.rest()
            number += 1
            with contextlib.suppress(httpx2.HTTPError):
                forwarded = {"X-Forwarded-For": f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"}
                answer = http.post("/v1/jobs", headers=forwarded, json={"jobs": [0.5] * 1000})
                way.statuses[str(answer.status_code)] += 1


def unread(way: Way) -> None:
    """B13: leases of many megabytes that nobody reads."""
    file = way.upload("rows.parquet", _letters(8, 700_000))
    host, _, port = way.url.removeprefix("http://").partition(":")
    while True:
        job = tiny("", 50, algorithm={"group_size": 2, "groups_per_step": 24}, reward={"name": "worker"})
        name = way.submit({**job, "data": {"source": file, "holdout": 2}})
        for turn in range(30):
            with contextlib.ExitStack() as lines:
                for number in range(8):
                    body = json.dumps({"worker": f"w{turn}-{number}", "most": 256, "wait_seconds": 1})
                    head = f"POST /v1/jobs/{name}/work/rewards/lease HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {way.key}\r\n"
                    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                    with contextlib.suppress(OSError):
                        line = lines.enter_context(socket.create_connection((host, int(port)), 10))
                        line.sendall((head + body).encode())
                way.rest(2.0)
            for number in range(8):
                way.send("DELETE", f"/v1/jobs/{name}/work/rewards/workers/w{turn}-{number}")
        way.taken("POST", f"/v1/jobs/{name}/cancel")
        way.taken("DELETE", f"/v1/jobs/{name}")


def schemas(way: Way) -> None:
    """B14: another schema each time, as dear as is taken; several threads do this."""
    number = 0
    while True:
        number += 1
        words = [f"{number:x}-{n:x}" * 2 for n in range(900)]
        properties: Json = {f"p{n}": {"enum": words[n::8]} for n in range(8)}
        schema = {"type": "object", "properties": properties, "required": ["p0", "p1"]}
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        way.send("POST", "/v1/chat/completions", json={**CHAT, "max_tokens": 8, "response_format": form})


def values(way: Way) -> None:
    """B15: dear JSON, and dear reads."""
    bodies = [
        json.dumps({"jobs": [{"job": {"args": [0.1] * (2 * MOST_VALUES - 64)}}]}).encode(),
        b"[" + b"0.5," * 1_000_000 + b"1]",
        json.dumps({"base_model": "small", "prompt": {"chunks": [{"tokens": [7] * (MOST_NUMBERS - 100)}]}}).encode(),
    ]
    paths = ("/v1/submissions", "/v1/submissions", "/tinker/api/v1/asample")
    while True:
        for path, body in zip(paths, bodies, strict=True):
            way.send("POST", path, content=body, headers={"Content-Type": "application/json"})
        for name in ("checkpoints", "training_runs"):
            way.send("GET", f"/tinker/api/v1/{name}?limit=1")


WAYS: dict[str, tuple[Callable[[Way], None], int]] = {
    "b1": (scores, 2), "b2": (texts, 1), "b3": (rows_of_a_step, 1), "b4": (episodes, 1), "b5": (scored_rows, 1),
    "b6": (small_file, 1), "b7": (held_out, 1), "b8": (silent_worker, 1), "b9": (steps_ahead, 1),
    "b10": (long_prompts, 1), "b11": (completions, 24), "b12": (addresses, 1), "b13": (unread, 1),
    "b14": (schemas, 4), "b15": (values, 2),
}  # fmt: skip
"""Each with its threads."""


def attack(url: str, key: str, seconds: float, names: list[str]) -> dict[str, dict[str, int]]:
    """Attack in all ways at once; gives the statuses of the answers, by way."""
    until = time.monotonic() + seconds
    ways = [Way(f"{name}-{number}", url, key, until) for name in names for number in range(WAYS[name][1])]

    def go(way: Way) -> None:
        while time.monotonic() < until:
            try:
                WAYS[way.name.partition("-")[0]][0](way)
            except Over:
                return
            except (httpx2.HTTPError, KeyError, ValueError) as error:
                way.statuses[repr(error)[:200]] += 1

    threads = [threading.Thread(target=go, args=(way,)) for way in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found: dict[str, Counter[str]] = {name: Counter() for name in names}
    for way in ways:
        found[way.name.partition("-")[0]] += way.statuses
    if os.environ.get("MOTET_ATTACKS_SAID"):
        told = {way.name.partition("-")[0]: way.said for way in ways}
        print(json.dumps(told, indent=1), file=sys.stderr)
    return {name: dict(statuses) for name, statuses in found.items()}


def main() -> None:
    """Attack, and print what was answered."""
    url, seconds, *names = sys.argv[1:]
    print(json.dumps(attack(url, os.environ["MOTET_API_KEY"], float(seconds), names or list(WAYS))))


if __name__ == "__main__":
    main()
