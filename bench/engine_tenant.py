"""A tenant of a service whose engine is measured: its files and jobs, and what it asks for: `bench.engine_loop`.

A number that is too large for a service is lowered to the one that its refusal names.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx2

from motet.data.row_files import UPLOADED
from tests.support.service_run import FINAL

Fields = dict[str, Any]
_FITS = re.compile(r"set (?:it|algorithm\.\w+) to (\d+)|: (\d+) fits|(\d+) fit")
_LOOK_SECONDS = 0.3
_MOST_TRIES = 6
WIDEST = UPLOADED.row_values - 8
TOY: Fields = {"source": "toy:sort_letters", "size": 256, "holdout": 0}


def lines(row: Mapping[str, Any], count: int) -> bytes:
    """A file of equal rows."""
    return (json.dumps(row) + "\n").encode() * count


def wide(**columns: Any) -> Fields:
    """A row with as many values as a row may have."""
    return {**columns, "more": [1.5] * WIDEST}


class Tenant:
    """A tenant of a service, and its jobs."""

    def __init__(self, http: httpx2.Client, seconds: float) -> None:
        """`http` has its key; a job gets so many seconds for its steps."""
        self.http, self.seconds, self._number = http, seconds, 0
        self.outcome = ""
        """How the last job ended, or what it was when its time was over."""

    def file(self, content: bytes, name: str = "rows.jsonl") -> str:
        """The id of uploaded rows."""
        return str(self._ok(self.http.post("/v1/files", files={"file": (name, content)}))["id"])

    def job(
        self,
        steps: int = 2,
        beside: Callable[[str], contextlib.AbstractContextManager[None]] | None = None,
        **fields: Any,
    ) -> None:
        """Run a job until its end, or for `seconds`; lower what is refused as too large to what fits."""
        for _ in range(_MOST_TRIES):
            self._number += 1
            body = {"name": f"job-{self._number}", "steps": steps, "checkpoint": {"every": 1}, **fields}
            answer = self.http.post("/v1/jobs", json=body)
            if answer.is_success:
                job = str(answer.json()["id"])
                with beside(job) if beside is not None else contextlib.nullcontext():
                    state, message = self._ended(job)
                self.http.delete(f"/v1/jobs/{job}")
            elif answer.status_code == 429:
                time.sleep(1.0)
                continue
            else:
                state, message = "refused", str(answer.json()["error"]["message"])
            self.outcome = f"{state}: {message}" if message else state
            if state not in ("failed", "refused") or not _lowered(fields, message):
                return

    def _ended(self, job: str) -> tuple[str, str]:
        """How a job ended; it is cancelled when it has had its time."""
        began, cancelled, last = None, False, ""
        while True:
            found = self._asked_patiently(job)
            if found["state"] in FINAL:
                return (last if cancelled else found["state"]), found.get("message") or ""
            if began is None and found["state"] == "running":
                began = time.monotonic()
            if began is not None and time.monotonic() - began > self.seconds and not cancelled:
                cancelled, last = True, f"at step {found['step']}"
                self._ok(self.http.post(f"/v1/jobs/{job}/cancel"))
            time.sleep(_LOOK_SECONDS)

    def _asked_patiently(self, job: str) -> Any:
        while (answer := self.http.get(f"/v1/jobs/{job}")).status_code == 429:
            time.sleep(_LOOK_SECONDS)
        return self._ok(answer)

    def state(self, job: str, wanted: str) -> None:
        """Wait for a state of a job, or its end."""
        while self._asked_patiently(job)["state"] not in (wanted, *FINAL):
            time.sleep(_LOOK_SECONDS)

    def submit(self, **fields: Any) -> str:
        """The id of a job that is not waited for."""
        self._number += 1
        return str(self._ok(self.http.post("/v1/jobs", json={"name": f"job-{self._number}", **fields}))["id"])

    def ask(self, path: str, body: Fields) -> None:
        """Ask for an answer of the base."""
        answer = self.http.post(path, json=body)
        self.outcome = f"{answer.status_code}" if answer.is_success else f"{answer.status_code}: {answer.text[:200]}"

    def _ok(self, answer: httpx2.Response) -> Any:
        assert answer.is_success, answer.text
        return answer.json()


def _lowered(fields: Fields, message: str) -> bool:
    """Lower the number of a job that its refusal names; whether there was one."""
    found = _FITS.search(message)
    if found is None:
        return False
    fits = int(next(filter(None, found.groups())))
    for section, name in re.findall(r"(algorithm|data)\.(\w+)", message):
        if isinstance(fields.get(section), dict) and isinstance(was := fields[section].get(name), int) and was > fits:
            fields[section] = {**fields[section], name: fits}
            return True
    return False
