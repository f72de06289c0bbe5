"""What each tenant of `bench/load.py` asks, as locust runs it: in an environment of its own, with keys from a file."""

# locust is not in the environment of the type checker
# mypy: disable-error-code="misc, untyped-decorator, import-not-found"
from __future__ import annotations

import itertools
import json
import os
import random
import time
from pathlib import Path
from typing import Any

from locust import HttpUser, between, task

KEYS: dict[str, Any] = json.loads(Path(os.environ["MOTET_LOAD_KEYS"]).read_text())
NUMBERS = itertools.count()
CHAT = {"model": "small", "messages": [{"role": "user", "content": "Sort the letters of DCBA."}], "max_tokens": 6}
JOB = {
    "data": {"source": "toy:sort_letters", "size": 64, "holdout": 4}, "reward": "exact", "steps": 2,
    "sampling": {"max_tokens": 8}, "algorithm": {"group_size": 4, "groups_per_step": 2}, "eval": {"every": 0},
}  # fmt: skip
ROWS = b'{"prompt": "a?", "answer": "b"}\n' * 20
ENDED = ("succeeded", "failed", "cancelled")


class Tenant(HttpUser):
    """One of many with a key of its own."""

    wait_time = between(0.2, 1.8)

    def on_start(self) -> None:
        """Take a key."""
        self.number = next(NUMBERS)
        self.random = random.Random(self.number)
        key = KEYS["tenants"][self.number % len(KEYS["tenants"])]
        self.client.headers["Authorization"] = f"Bearer {key}"
        self.job, self.jobs = "", 0

    def ask(self, what: str, method: str, path: str, **request: Any) -> Any:
        """An answer, or None where the service says when to ask again, which is counted apart and waited for."""
        with self.client.request(method, path, name=what, timeout=120, catch_response=True, **request) as answer:
            if answer.status_code == 429 and "Retry-After" in answer.headers:
                answer.request_meta["name"] = f"{what} (429)"
                answer.success()
                time.sleep(min(float(answer.headers["Retry-After"]), 5.0))
                return None
            if not 200 <= answer.status_code < 300:
                answer.failure(f"{answer.status_code} {answer.text[:200]}")
                return None
            if request.get("stream"):
                answer.success() if b"[DONE]" in answer.content else answer.failure("the stream broke off")
                return None
            answer.success()
            json_is_there = answer.content and "json" in answer.headers.get("content-type", "")
            return answer.json() if json_is_there else answer.text

    @task(10)
    def chat(self) -> None:
        """A few tokens."""
        self.ask("chat", "POST", "/v1/chat/completions", json=CHAT)

    @task(4)
    def streamed(self) -> None:
        """The same, streamed; its time is that to the first byte."""
        body = {**CHAT, "max_tokens": 16, "stream": True}
        self.ask("chat, streamed", "POST", "/v1/chat/completions", json=body, stream=True)

    @task(2)
    def completed(self) -> None:
        """Two completions of a prompt."""
        body = {"model": "small", "prompt": "Sort", "n": 2, "max_tokens": 6}
        self.ask("completions", "POST", "/v1/completions", json=body)

    @task(6)
    def listed(self) -> None:
        """Jobs, models and usage."""
        path = self.random.choice(("/v1/jobs", "/v1/jobs", "/v1/models", "/v1/usage", "/v1/limits"))
        self.ask(f"list {path}", "GET", path)

    @task(1)
    def metrics(self) -> None:
        """For Prometheus, with the operator's token."""
        self.ask("metrics", "GET", "/metrics", headers={"Authorization": f"Bearer {KEYS['metrics']}"})

    @task(2)
    def trains(self) -> None:
        """A small job; once it has ended, its steps, its rollouts and its adapter, and the next."""
        if not self.job:
            self.jobs += 1
            name = f"job-{self.number}-{self.jobs}"
            self.job = name if self.ask("submit", "POST", "/v1/jobs", json={**JOB, "name": name}) else ""
            return
        job = self.ask("job", "GET", f"/v1/jobs/{self.job}")
        if job and job["state"] in ENDED:
            assert job["state"] == "succeeded", job["message"]
            for what in ("steps", "rollouts", "events", "versions/latest/download"):
                self.ask(what.split("/")[-1], "GET", f"/v1/jobs/{self.job}/{what}")
            self.ask("delete", "DELETE", f"/v1/jobs/{self.job}")
            self.job = ""

    @task(1)
    def uploads(self) -> None:
        """A file, which is removed again."""
        file = self.ask("upload", "POST", "/v1/files", files={"file": ("rows.jsonl", ROWS)})
        if file:
            self.ask("delete", "DELETE", f"/v1/files/{file['id']}")

    @task(2)
    def samples(self) -> None:
        """A sample of the Tinker protocol, from its promise to its end."""
        path = "/tinker/api/v1"
        prompt = {"chunks": [{"tokens": [5, 6, 7]}]}
        body = {"base_model": "small", "prompt": prompt, "sampling_params": {"max_tokens": 6}}
        promise = self.ask("asample", "POST", f"{path}/asample", json=body)
        while promise:
            body = {"request_id": promise["request_id"]}
            answer = self.ask("retrieve_future", "POST", f"{path}/retrieve_future", json=body)
            if not isinstance(answer, dict) or answer.get("type") != "try_again":
                return
