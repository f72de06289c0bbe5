"""How long a turn of the service's event loop takes, by route: `python -m bench.loop [docs/loop-figures.md]`.

Every route gets the dearest bodies and queries that it allows, with a key and without one, and in each field of its
bodies the dearest values of each kind. `bench.turns` says what a turn is. Measure how late a timer is where nothing else
runs.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from bench.turns import TURNS, collected
from pydantic import BaseModel

from motet.config.service import RateConfig
from motet.core.plain_yaml import DEEPEST
from motet.service.app import ROUTES
from motet.service.http.auth import RateLimit
from motet.service.http.bodies import MOST_FIELDS, MOST_GRADIENT, most_values
from motet.service.http.json_size import MOST_CONTAINERS, MOST_NUMBERS, MOST_TEXTS, MOST_VALUES
from motet.service.http.parsing import CHUNK
from motet.service.tinker.wire import CONTENT_TYPE, KINDS
from tests.support.house import House, open_house
from tests.support.service_run import tiny

MOST_SECONDS = 0.02
"""Longest turn."""
MOST_SHARE = 0.3
"""Largest share of the loop that one tenant may have."""
MOST_COLLECTION = 0.05
"""Longest collection of garbage."""
PER_SECOND = 50.0
"""Requests of a tenant in a second, by default."""
STEPS = 3000
"""Steps of the job that is asked about."""
TRIES = 3
"""How often a request is sent; the least counts, because what is made once is made at first, and others work here too."""
_SECONDS = 0.5
"""How long an answer is waited for: without an engine, some never come."""


@dataclass
class Figure:
    """What the requests to a route took, with a key or without."""

    route: str
    key: bool
    turn: float = 0.0
    """Seconds of the longest turn."""
    late: float = 0.0
    """Seconds that a timer was late."""
    share: float = 0.0
    """Of the loop, at the rate that one tenant may have."""
    worst: str = ""
    """The request of the longest turn."""
    statuses: set[int] = field(default_factory=set)


def _numbers(count: int, length: int = 4) -> bytes:
    return b"[" + b",".join([b"0." + b"7" * (length - 2)] * count) + b"]"


def _values(most: int, most_texts: int) -> dict[str, Any]:
    """The dearest values of each kind, for a body that may have so many."""
    n, texts, containers = most - 64, most_texts - 64, MOST_CONTAINERS - 64
    return {
        "whole": [1] * n,
        "decimals": [0.1] * n,
        "truths": [True] * n,
        "nulls": [None] * n,
        "texts": ["a"] * texts,
        "keys": {f"{number:x}": 1 for number in range(texts)},
        "lists": [[]] * containers,
        "objects": [{}] * containers,
        "deep": json.loads("[" * (DEEPEST - 8) + "]" * (DEEPEST - 8)),
        "a text": "a" * 900_000,
        "a number": 10**600,
    }


def _filled(route: Any) -> Iterator[tuple[str, Any]]:
    """Bodies with these values in each field of a route's body."""
    field = route.body_field
    model = None if field is None else field.field_info.annotation
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return
    for name, info in model.model_fields.items():
        for kind, value in _values(*most_values(route.path, "us")).items():
            yield f"{name}: {kind}", {info.alias or name: value}


def _json(limit: int) -> Iterator[tuple[str, bytes]]:
    """The dearest bodies of JSON, whatever they mean."""
    yield "numbers", _numbers(min(MOST_VALUES, limit // 19) - 2, 18)
    yield "long numbers", _numbers(limit // 1003, 1000)
    yield "texts", json.dumps({f"{number:x}": "" for number in range(MOST_TEXTS // 2 - 8)}).encode()
    yield "lists", json.dumps([[]] * (MOST_CONTAINERS - 8)).encode()
    yield "a text", json.dumps({"text": "\\" * (limit // 4)}).encode()
    yield "deep", b"[" * (MOST_CONTAINERS - 8)


def _gradients() -> Iterator[tuple[str, bytes]]:
    def request(data: int, tokens: int) -> Any:
        message = KINDS["Request"](model_id="x", seq_id=1, loss_fn="cross_entropy")
        for _ in range(data):
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = np.zeros(tokens, "<i4").tobytes()
            target = datum.loss_fn_inputs.add(key="target_tokens").value
            target.dtype, target.dense = 2, np.zeros(tokens, "<i8").tobytes()
        return message

    yield "a large gradient", request(1024, 2000).SerializeToString()
    yield "small data", request(180, 1).SerializeToString()
    yield "no model", b"\xff" * 2**14
    sparse = request(4, 1)
    for datum in sparse.data:
        target = datum.loss_fn_inputs[0].value
        target.ClearField("dense")
        target.sparse_csr.crow_indices = np.zeros(2, "<i8").tobytes()
        target.shape[:] = [1, 2**20]
    yield "sparse", sparse.SerializeToString()
    yield "too large", b"\0" * (MOST_GRADIENT + 1)


def _meant(route: str) -> Iterator[tuple[str, Any]]:
    """The dearest bodies that mean something to a route."""
    text, ids = "x" * 900_000, [7] * (MOST_NUMBERS - 100)
    user = {"role": "user", "content": text}
    parts = {"role": "user", "content": [{"type": "text", "text": ""}] * 60}
    chat = {"model": "small", "max_tokens": 8}
    grader = {
        "type": "string_check",
        "name": "a",
        "operation": "eq",
        "reference": "{{item.a}}",
        "input": "{{sample.output_text}}",
    }
    bodies: dict[str, list[Any]] = {
        "/v1/chat/completions": [{**chat, "messages": [user]}, {**chat, "messages": [parts] * 64}],
        "/v1/messages": [{**chat, "messages": [user]}, {**chat, "messages": [parts] * 64}],
        "/v1/responses": [{"model": "small", "input": text}],
        "/v1/completions": [{"model": "small", "prompt": ids}, {"model": "small", "prompt": [text[:190_000]] * 16}],
        "/v1/submissions": [
            {"jobs": [{"job": tiny(f"job-{number}")} for number in range(400)]},
            *({"jobs": [{"job": {"args": values}}]} for values in _values(*most_values(route, "us")).values()),
        ],
        "/v1/check": [{"text": json.dumps([tiny(f"job-{number}") for number in range(400)])}, {"text": "[" * 100_000}],
        "/v1/jobs/{job}/work/{kind}/results": [
            *(
                {"results": [{"id": f"unit-{number}", "scores": [value] * n} for number in range(255)]}
                for value, n in ((1, 126), (0.123456789, 126), (True, 126), (None, 126), ("x", 120), ("x" * 1000, 30))
            ),
            {"results": [{"id": f"unit-{number}", "scores": [{"chance": "x"}] * 30} for number in range(255)]},
            {"results": [{"id": f"unit-{number}", "scores": [{"score": 1}] * 30} for number in range(255)]},
            {"results": [{"id": "unit", "scores": [{"score": 1, "metrics": {f"{n}": 1 for n in range(64)}}] * 500}]},
            {"results": [{"id": f"ep-{number}", "rewards": {f"{n}": 0.5 for n in range(50)}} for number in range(255)]}
        ],
        "/v1/fine_tuning/alpha/graders/run": [
            {"grader": grader, "model_sample": "x" * 90_000, "item": {"a": [0.5] * 30_000, "b": text}},  # too large
            {"grader": grader, "model_sample": "x" * 90_000, "item": {"a": [0.5] * 30_000, "b": text[:800_000]}},
        ],
        "/tinker/api/v1/asample": [
            {"prompt": {"chunks": [{"tokens": ids}]}, "sampling_params": {"max_tokens": 1}},
            {"prompt": {"chunks": [{"tokens": [7]}] * 8000}, "sampling_params": {"max_tokens": 1}},
        ],
    }  # fmt: skip
    yield from ((f"meant {number}", body) for number, body in enumerate(bodies.get(route, ()), 1))


def _form() -> bytes:
    head = b'--Bound\r\nContent-Disposition: form-data; name="file"; filename="rows.jsonl"\r\n\r\n'
    return head + b"\r\n--Boune" * (2**20 // 9) + b"\r\n--Bound--\r\n"


QUERIES = {
    "/v1/jobs/{job}/steps": ["points=5000", "points=5000&field=loss&field=step", "points=2"],
    "/v1/jobs/{job}/events": ["after=0"],
    "/v1/jobs/{job}/rollouts": ["limit=1000&tokens=true"],
    "/v1/jobs": ["limit=200"],
    "/v1/fine_tuning/jobs": ["limit=200"],
    "/tinker/api/v1/training_runs": ["limit=1000"],
    "/tinker/api/v1/checkpoints": ["limit=1000"],
}
LONG_QUERY = "&".join(f"metadata[{number}]={number}" for number in range(MOST_FIELDS))


def requests_to(route: Any, method: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The requests that a route gets."""
    yield "plain", {}
    yield "a long query", {"params": LONG_QUERY}
    for path in QUERIES.get(route.path, ()):
        yield path, {"params": path}
    if method in ("GET", "HEAD", "DELETE"):
        return
    if route.path in ("/v1/files", "/v1/adapters"):
        yield "a form", {"content": _form(), "headers": {"content-type": "multipart/form-data; boundary=Bound"}}
    if route.path.endswith("/forward_backward"):
        for name, content in _gradients():
            yield name, {"content": content, "headers": {"content-type": CONTENT_TYPE}}
    for name, content in _json(2**20):
        request = {"content": content, "headers": {"content-type": "application/json"}}
        yield name, request
        if name == "texts":
            yield "texts and a long query", {**request, "params": LONG_QUERY}
    if method == "POST":
        small = {"content": [b" " * CHUNK] * 2000}
        yield "small chunks", {**small, "headers": {"content-type": CONTENT_TYPE}}
    yield "numbers as text", {"content": _numbers(10_000), "headers": {"content-type": "text/plain"}}
    for name, body in (*_meant(route.path), *_filled(route)):
        yield name, {"content": json.dumps(body).encode(), "headers": {"content-type": "application/json"}}


def fill(house: House) -> None:
    """Give the house what long answers are made of."""
    job = house.job["id"]
    metrics = {f"metric_{number}": number / 7 for number in range(60)}
    for step in range(2, STEPS):
        house.recorder.record_step(
            job, {"step": step, "loss": 0.1, **metrics, **({"eval": {"reward": 1.0}} if step % 50 == 0 else {})}
        )
    directory = house.storage.job(job)
    text = {"text": "word " * 400, "reward": 0.5, "token_texts": ["word "] * 400, "logprobs": [-0.123456] * 400}
    directory.write_rollouts("1", [{**text, "step": 1, "problem": number} for number in range(1000)])


def drive(house: House) -> list[Figure]:
    """Send every route its requests."""
    buckets = next(limit for limit in vars(house.service.access).values() if isinstance(limit, RateLimit))._buckets
    figures = []
    named = {"job": "ended", "file": house.file["id"], "version": "best", "word": "pause", "name": "app.js",
             "kind": "rewards"}  # fmt: skip
    for route in (route for module in ROUTES for route in module.router.routes):
        path = route.path_format
        for name in route.param_convertors:
            path = path.replace(f"{{{name}}}", named.get(name, "x"))
        for method in sorted(route.methods):
            for key in ("ours", "none"):
                figures.append(figure := Figure(f"{method} {route.path}", key == "ours"))
                for name, request in requests_to(route, method):
                    if method == "DELETE" or (path.endswith("/finish") and key == "ours" and name != "plain"):
                        path = path.replace("ended", "gone")
                    tries = [_sent(house, figure, buckets, (method, path), key, request)]
                    turn, late, share = tries[0]
                    if max(turn / MOST_SECONDS, late / MOST_SECONDS, share / MOST_SHARE) > 0.5:
                        tries += [_sent(house, figure, buckets, (method, path), key, request) for _ in range(TRIES - 1)]
                    turn, late, share = map(min, zip(*tries, strict=True))  # another program may make each longer
                    figure.late = max(figure.late, late)
                    figure.share = max(figure.share, share)
                    if turn > figure.turn:
                        figure.turn, figure.worst = turn, name
    return figures


def _sent(
    house: House, figure: Figure, buckets: Any, asked: tuple[str, str], key: str, request: dict[str, Any]
) -> tuple[float, float, float]:
    """The longest turn of one request, how late a timer was, and its share of the loop."""
    _end_turn(house)
    before = sum(left for left, _ in buckets.values())
    TURNS.longest = TURNS.latest = TURNS.total = 0.0
    headers = {**request.get("headers", {})}
    if house.keys[key]:
        headers["authorization"] = f"Bearer {house.keys[key]}"
    try:
        with house.http.stream(*asked, **{**request, "headers": headers}, timeout=_SECONDS) as answer:
            figure.statuses.add(answer.status_code)
            if not figure.route.endswith("/stream"):
                answer.read()
    except httpx2.TransportError:  # no engine answers, or a refusal ends a body that is sent
        pass
    _end_turn(house)
    counted = max(1.0, before - sum(left for left, _ in buckets.values()))
    return TURNS.longest, TURNS.latest, TURNS.total / counted * PER_SECOND


def _end_turn(house: House) -> None:
    """Wait until the loop has counted the turn that it is in: a client reads an answer before that turn ends."""
    for _ in range(2):
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), house.app.state.loop).result()


def measured(directory: Path) -> list[Figure]:
    """The figures of every route, of a service in this process."""
    rate = RateConfig(requests_per_second=1e-6, burst=10**7)
    gc.callbacks.append(collected)
    try:
        with open_house(directory, rate=rate, loop="bench.turns:MeasuredLoop") as house:
            fill(house)
            gc.collect()
            gc.freeze()  # as `motet serve` does
            TURNS.longest_collection = 0.0
            figures = drive(house)
    finally:
        gc.callbacks.remove(collected)
        gc.unfreeze()
    return figures


def page(figures: list[Figure]) -> str:
    """The figures as a page."""
    lines = [
        "# Figures of the event loop\n",
        "Written by `python -m bench.loop docs/loop-figures.md`. Every route gets the dearest bodies and queries that it",
        "allows, and in each field of its bodies the dearest values of each kind. The longest turn of the loop is in",
        f"milliseconds of CPU time, with a key and without one; the goal is {MOST_SECONDS * 1000:g} ms. How late a timer was,",
        "by the clock, shows what else holds the interpreter's lock. The share is of the loop, if one tenant sends the",
        "dearest request as often as the [rate](operations.md#limits-on-requests) allows. The longest collection of",
        f"garbage took {TURNS.longest_collection * 1000:.0f} ms. [The engine's loop](engine-loop.md) has its own page.\n",
        "| route | longest turn, ms | without a key, ms | timer late, ms | share |\n|---|---|---|---|---|",
    ]
    by_route: dict[str, dict[bool, Figure]] = {}
    for figure in figures:
        by_route.setdefault(figure.route, {})[figure.key] = figure
    for route, found in by_route.items():
        good, none = found[True], found[False]
        times = " | ".join(f"{1000 * seconds:.1f}" for seconds in (good.turn, none.turn, good.late))
        lines.append(f"| `{route}` | {times} | {good.share:.0%} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write or print the page."""
    with tempfile.TemporaryDirectory() as directory:
        figures = measured(Path(directory))
    for figure in sorted(figures, key=lambda figure: -figure.turn)[:12]:
        route = f"{figure.route} ({'key' if figure.key else 'none'})"
        print(f"{figure.turn * 1000:6.1f} ms {figure.share:6.1%} {route}: {figure.worst}", file=sys.stderr)
    text = page(figures)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
