"""What a tenant asks an engine for, by kind of step, at the limits of a service with its defaults: for `bench.engine_loop`."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2
from bench.engine_asked import CHAT, of_jobs, of_requests
from bench.engine_tenant import TOY, Fields, Tenant, lines, wide

# --- rows -------------------------------------------------------------------------------------------------------------------


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
RATED = {"prompt": "a", "completion": "b", "label": True}


def of_rows(kind: str, row: Fields, held: int) -> Iterator[tuple[str, Callable[[Tenant], None]]]:
    """Jobs that learn from rows of one kind."""
    algorithm = {"type": kind, "rows_per_step": 32_768}
    text = {name: value * 400 if isinstance(value, str) else value for name, value in row.items()}

    def rows(content: Callable[[Tenant], bytes], **fields: Any) -> Callable[[Tenant], None]:
        return lambda us: us.job(
            data={"source": us.file(content(us)), "holdout": 0}, algorithm=dict(algorithm), **fields
        )

    yield f"{kind}: many rows", rows(lambda us: lines(row, 64))
    yield f"{kind}: wide rows", rows(lambda us: lines(wide(**row), 60))
    yield f"{kind}: long rows", rows(lambda us: lines(text, 64))

    def held_out(us: Tenant) -> None:
        rows = b"".join(json.dumps({**row, "prompt": f"a {n}"}).encode() + b"\n" for n in range(held + 8))
        us.job(
            data={"source": us.file(rows), "holdout": held},
            algorithm={"type": kind, "rows_per_step": 8},
            eval={"every": 1},
        )

    yield f"{kind}: held-out rows", held_out


def of_conversations(us: Tenant) -> None:
    """SFT on conversations with many messages, calls and tools."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    talk = [{"role": "user" if n % 2 == 0 else "assistant", "content": "a"} for n in range(40)]
    row = {"messages": talk, "tools": [tool] * 4}
    us.job(data={"source": us.file(lines(row, 16)), "holdout": 0}, algorithm={"type": "sft", "rows_per_step": 4096})


# --- rollouts ---------------------------------------------------------------------------------------------------------------


def rl(us: Tenant, groups: int, size: int, *, tokens: int = 1, data: Fields | None = None, **fields: Any) -> None:
    """A job of reinforcement learning; `algorithm` adds to its algorithm."""
    algorithm = {
        "groups_per_step": groups,
        "group_size": size,
        "max_failed_fraction": 1.0,
        **fields.pop("algorithm", {}),
    }
    given = {"reward": "exact", "sampling": {"max_tokens": tokens}, "eval": {"every": 0}, **fields}
    us.job(data=dict(data or TOY), algorithm=algorithm, **given)


def of_wide(us: Tenant) -> Fields:
    """Data of rows that have as many values as they may have."""
    return {"source": us.file(lines(wide(prompt="a", answer="b"), 60)), "holdout": 0}


def of_rollouts() -> Iterator[tuple[str, Callable[[Tenant], None]]]:
    """Jobs whose rewards are built in."""
    yield "RL: large groups", lambda us: rl(us, 8, 1024)
    yield "RL: many groups", lambda us: rl(us, 16_384, 2)
    yield "RL: as many rollouts as a step has", lambda us: rl(us, 32, 1024)
    yield (
        "RL: wide rows",
        lambda us: rl(us, 60, 16, data=of_wide(us)),
    )
    text = {"prompt": "a", "answer": "b " * 450_000}
    yield "RL: large columns", lambda us: rl(us, 60, 16, data={"source": us.file(lines(text, 60)), "holdout": 0})
    stops = [f"{n:03}" + "x" * 197 for n in range(64)]
    yield "RL: many stops", lambda us: rl(us, 64, 64, tokens=64, sampling={"max_tokens": 64, "stop": stops})
    rewards = [{"name": "length", "args": {"target": n + 1}} for n in range(64)]
    yield "RL: many rewards", lambda us: rl(us, 8, 256, reward=rewards)
    yield "RL: long answers", lambda us: rl(us, 8, 128, tokens=900)
    yield "RL: dynamic sampling", lambda us: rl(us, 512, 8, algorithm={"oversampling": 8.0})
    yield "RL: over-provision", lambda us: rl(us, 64, 8, algorithm={"over_provision": 4.0})
    ahead = {"max_off_policy_steps": 60}
    yield "RL: steps ahead", lambda us: rl(us, 8192, 2, algorithm=ahead)
    yield (
        "RL: steps ahead, wide rows",
        lambda us: rl(us, 8, 4, algorithm=ahead, data=of_wide(us)),
    )
    yield (
        "RL: in flight",
        lambda us: rl(us, 64, 64, tokens=16, algorithm={"max_off_policy_steps": 4, "in_flight": "continue"}),
    )
    yield "RL: many updates", lambda us: rl(us, 64, 64, algorithm={"updates_per_batch": 1000})
    yield "RL: critic", lambda us: rl(us, 64, 64, tokens=4, algorithm={"type": "ppo", "critic": {}})
    yield "RL: KL", lambda us: rl(us, 64, 64, tokens=4, algorithm={"kl": {"coef": 0.1}})
    yield "RL: shared prefixes", lambda us: rl(us, 8, 512, tokens=4, algorithm={"share_prefixes": True})
    held = {**TOY, "size": 20_000, "holdout": 16_000}
    yield "evaluation: many problems", lambda us: rl(us, 1, 2, data=held, eval={"every": 1})
    yield (
        "evaluation: many completions",
        lambda us: rl(us, 1, 2, data={**TOY, "holdout": 8}, eval={"every": 1, "n": 1024}),
    )


# --- whoever is asked elsewhere ---------------------------------------------------------------------------------------------


def working(
    us: Tenant, kind: str, do: Callable[[Fields], Fields]
) -> Callable[[str], contextlib.AbstractContextManager[None]]:
    """A worker of a job: it leases as much as it may, and answers at once."""

    @contextlib.contextmanager
    def beside(job: str) -> Iterator[None]:
        over = threading.Event()

        def work() -> None:
            path, units = f"/v1/jobs/{job}/{kind}", "units" if kind == "scoring" else "episodes"
            while not over.is_set():
                wanted = {"worker": "one", "most": 256, "wait_seconds": 1}
                answer = us.http.post(f"{path}/lease", json=wanted)
                leased = answer.json()[units] if answer.is_success else []
                over.wait(0.05 if leased else 0.5)
                for unit in leased:
                    us.http.post(f"{path}/results", json={"results": [do(unit)]})
                    over.wait(0.05)  # not beyond the rate

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    return beside


def scores(unit: Fields) -> Fields:
    """Numbers."""
    return {"id": unit["id"], "scores": [n / 7 for n in range(len(unit["completions"]))]}


def reasons(unit: Fields) -> Fields:
    """Long reasons for no score."""
    return {"id": unit["id"], "scores": ["r" * 3900] * len(unit["completions"])}


def logged(unit: Fields) -> Fields:
    """Scores with much that is logged."""
    metrics, extra = {f"m{n}": 0.123 + n for n in range(64)}, {f"t{n}": "x" * 400 for n in range(64)}
    few = [{"score": n / 7, "metrics": metrics, "extra": extra} for n in range(min(128, len(unit["completions"])))]
    return {"id": unit["id"], "scores": (few * 8)[: len(unit["completions"])]}


def of_others(address: str) -> Iterator[tuple[str, Callable[[Tenant], None]]]:
    """Jobs that ask workers, agents, judges and the address of a reward."""

    worker: Fields = {"reward": "worker"}
    yield "worker: nobody scores wide rows", lambda us: rl(us, 60, 64, data=of_wide(us), **worker)
    yield "worker: large groups", lambda us: rl(us, 4, 1024, beside=working(us, "scoring", scores), **worker)
    yield "worker: many groups", lambda us: rl(us, 2048, 2, beside=working(us, "scoring", scores), **worker)
    yield "worker: long reasons", lambda us: rl(us, 4, 250, beside=working(us, "scoring", reasons), **worker)
    yield "worker: much logged", lambda us: rl(us, 4, 128, beside=working(us, "scoring", logged), **worker)
    yield "worker: long answers", lambda us: rl(us, 2, 512, tokens=64, beside=working(us, "scoring", scores), **worker)
    http: Fields = {"reward": {"name": "http", "args": {"url": address}}}
    yield "http: wide rows", lambda us: rl(us, 60, 16, data=of_wide(us), **http)
    yield "http: large groups", lambda us: rl(us, 4, 1024, **http)
    judge = {
        "type": "label_model",
        "model": "base",
        "labels": ["a", "b"],
        "passing_labels": ["a"],
        "input": "{{sample.output_text}}?",
    }
    yield "judge: the base", lambda us: rl(us, 4, 256, reward={"name": "judge", "args": judge})
    agent: Fields = {"environment": {"name": "agent"}, "reward": []}
    yield "agents: nobody runs wide rows", lambda us: rl(us, 60, 512, data=of_wide(us), **agent)
    yield "agents: many episodes", lambda us: rl(us, 4096, 8, **agent)

    def play(unit: Fields) -> Fields:
        headers, path = {"Authorization": f"Bearer {unit['key']}"}, f"{unit['path']}/chat/completions"
        with contextlib.suppress(httpx2.HTTPError):
            httpx2.post(
                f"{address_of[0]}{path}", json={**CHAT, "model": "x", "max_tokens": 1}, headers=headers, timeout=60
            )
        return {"id": unit["id"], "reward": 1.0}

    address_of = [""]

    def agents(us: Tenant) -> None:
        address_of[0] = f"{us.http.base_url}".rstrip("/")
        rl(us, 4, 256, beside=working(us, "episodes", play), **agent)

    yield "agents: episodes of a worker", agents


@contextlib.contextmanager
def scorer() -> Iterator[str]:
    """The address of a reward."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answer = {"scores": [0.123456789] * len(asked.get("completions", []))}
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score"
    finally:
        server.shutdown()
        server.server_close()


def kinds(address: str) -> dict[str, Callable[[Tenant], None]]:
    """What is asked for, by its name; `address` is that of a reward."""
    rows = (
        *of_rows("sft", {"prompt": "a", "answer": "b"}, 30_000),
        *of_rows("dpo", PAIR, 2000),
        *of_rows("kto", RATED, 2000),
    )
    talk = ("sft: conversations", of_conversations)
    return dict([*rows, talk, *of_rollouts(), *of_others(address), *of_requests(), *of_jobs()])
