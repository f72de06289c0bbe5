"""Requests to an engine, and jobs that come and go, at the limits of a service with its defaults: for `bench.engine_loop`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.engine_tenant import TOY, Fields, Tenant, lines, wide

from tests.support.tinker_requests import Client

CHAT: Fields = {"model": "small", "messages": [{"role": "user", "content": "Say a word."}]}

# --- requests ---------------------------------------------------------------------------------------------------------------


def of_requests() -> Iterator[tuple[str, Callable[[Tenant], None]]]:
    """Chats, completions, and what clients of the Tinker protocol send."""
    words = "word " * 200
    properties = {f"p{n}": {"type": "string", "enum": [f"{n}-{m}" for m in range(10)]} for n in range(100)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    kept = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    chat = {**CHAT, "max_tokens": 200}
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": {"type": "object"}}} for n in range(8)]
    yield "chat: a large schema", lambda us: us.ask("/v1/chat/completions", {**chat, "n": 16, "response_format": kept})
    yield (
        "chat: logprobs",
        lambda us: us.ask("/v1/chat/completions", {**chat, "n": 16, "logprobs": True}),
    )
    yield "chat: tools", lambda us: us.ask("/v1/chat/completions", {**chat, "n": 16, "tools": tools})
    stops = [f"{n}" + "x" * 480 for n in range(8)]
    yield "chat: stops", lambda us: us.ask("/v1/chat/completions", {**chat, "n": 16, "stop": stops})
    long = {"model": "small", "prompt": [[7] * 900 for _ in range(4)], "n": 16, "max_tokens": 100}
    yield "completions: long prompts", lambda us: us.ask("/v1/completions", long)
    large = {"model": "small", "prompt": "a" * 120_000, "max_tokens": 1}
    yield "completions: a large text", lambda us: us.ask("/v1/completions", large)
    many = {"model": "small", "prompt": [words] * 4, "n": 16, "max_tokens": 100, "logprobs": 0}
    yield "completions: logprobs", lambda us: us.ask("/v1/completions", many)
    yield "Tinker: a large gradient", lambda us: gradient(us, [1000] * 400)
    yield "Tinker: many data", lambda us: gradient(us, [4] * 4096)
    yield "Tinker: many targets", lambda us: gradient(us, [500] * 16, 250)
    yield "Tinker: many samples", samples
    yield "Tinker: a wide sample", wide_sample


def gradient(us: Tenant, lengths: list[int], targets: int = 0) -> None:
    """A step of a Tinker client."""
    client = Client(us.http)
    answer = client.send_gradient(lengths, targets)
    us.outcome = f"{answer.status_code} {'' if answer.is_success else answer.text[:200]}"
    if answer.is_success:
        with contextlib.suppress(AssertionError):
            client.wait(answer.json()["request_id"], us.seconds)
            client.wait(client.step(), us.seconds)
    client.finish()


def samples(us: Tenant) -> None:
    """Many samples of a Tinker client at once."""
    client = Client(us.http)
    futures = [client.sample([7] * 900, 1, num_samples=512) for _ in range(8)]
    for future in futures:
        with contextlib.suppress(AssertionError):
            client.wait(future, us.seconds)
    client.finish()


def wide_sample(us: Tenant) -> None:
    """Samples with everything that is told about their prompts."""
    client = Client(us.http)
    more = {"num_samples": 64, "prompt_logprobs": True, "topk_prompt_logprobs": 20}
    for _ in range(4):
        with contextlib.suppress(AssertionError):
            client.wait(client.sample([7] * 900, 100, **more), us.seconds)
    client.finish()


# --- jobs that come and go --------------------------------------------------------------------------------------------------


def of_jobs() -> Iterator[tuple[str, Callable[[Tenant], None]]]:
    """Preparation, opening, publishing, resuming and parking."""
    small: Fields = {
        "algorithm": {"groups_per_step": 1, "group_size": 2},
        "reward": "exact",
        "sampling": {"max_tokens": 1},
    }
    few: Fields = {"steps": 2, **small}

    def file_of(row: Fields, count: int, **data: Any) -> Callable[[Tenant], None]:
        return lambda us: us.job(data={"source": us.file(lines(row, count)), "holdout": 4, **data}, **few)

    yield "preparation: many rows", file_of({"prompt": "a", "answer": "b"}, 200_000)
    yield "preparation: wide rows", file_of(wide(prompt="a", answer="b"), 60)
    yield "preparation: a long template", file_of({"prompt": "a", "answer": "b"}, 2000, template="{prompt}" + "b" * 900)
    yield (
        "publishing: a large rank",
        lambda us: us.job(data={**TOY, "size": 64}, adapter={"rank": 512, "alpha": 32}, **few),
    )
    yield "parking: many jobs come and go", lambda us: parked(us, small)


def parked(us: Tenant, small: Fields) -> None:
    """As many jobs as a tenant may have, and pauses of those that run."""
    data = {**TOY, "size": 64}
    jobs = [us.submit(data=data, steps=1000, **small) for _ in range(40)]
    us.state(jobs[0], "running")
    time.sleep(us.seconds)
    for word in ("pause", "resume", "cancel"):
        for job in jobs:
            us.http.post(f"/v1/jobs/{job}/{word}")
        time.sleep(2.0)
    for job in jobs:
        us.state(job, "cancelled")
