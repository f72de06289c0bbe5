"""Requests to a service that its own OpenAPI document describes, right ones and wrong ones, each answer held against it.

found = Asked(service).ask(300, seed=0)     # so many requests over all operations
assert found.faults == {}
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.waiting import PATIENCE

CHECKS: Any = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
ENDLESS = "/stream"
"""Paths that answer for as long as somebody listens."""
QUIET = hypothesis.settings(
    deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), print_blob=False
)


@dataclass
class Asked:
    """A service, what it was asked, and what was wrong with its answers."""

    url: str
    known: dict[str, str]
    """Names for the parameters of paths, of things that are there."""
    bodies: dict[str, Any] = field(default_factory=dict)
    """Bodies that are right, by path."""
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    faults: dict[str, str] = field(default_factory=dict)
    """One example of each fault, by operation and kind."""
    slowest: float = 0.0

    def ask(self, wanted: int, seed: int) -> Asked:
        """Ask about so many things."""
        document = requests.get(f"{self.url}/openapi.json", timeout=PATIENCE).json()
        schema = schemathesis.openapi.from_dict(document)
        found: Iterable[Any] = schema.get_all_operations()
        operations = [one.ok() for one in found if not one.ok().path.endswith(ENDLESS)]
        operations.sort(key=lambda one: str(one.method).upper() == "DELETE")  # first what needs things to be there
        ways = [(one, mode, named) for one in operations for mode in GenerationMode for named in (False, True)]
        with requests.Session() as session:
            for number, (operation, mode, named) in enumerate(ways):
                if named and "{" not in operation.path:
                    continue
                share = max(1, wanted // len(ways))
                self._ask_one(
                    session,
                    operation,
                    mode,
                    share * (1 + (not named and "{" not in operation.path)),
                    seed + number,
                    named,
                )
        return self

    @property
    def total(self) -> int:
        """How many were made."""
        return self.statuses.total()

    def _ask_one(
        self, session: requests.Session, operation: Any, mode: GenerationMode, n: int, seed: int, named: bool
    ) -> None:
        fixed = {name: value for name, value in self.known.items() if f"{{{name}}}" in operation.path}
        if mode is GenerationMode.NEGATIVE and not _can_be_wrong(operation, fixed if named else {}):
            return
        try:
            cases = operation.as_strategy(generation_mode=mode, path_parameters=fixed if named else None)

            @hypothesis.seed(seed)
            @hypothesis.settings(QUIET, max_examples=n)
            @given(case=cases, number=st.integers(0, 2**32))
            def ask(case: Any, number: int) -> None:
                self._look(session, self._real(case, random.Random(number), mode))

            ask()
        except hypothesis.errors.Unsatisfiable:  # nothing is wrong for an operation without parameters
            return

    def _look(self, session: requests.Session, case: Any) -> None:
        started = time.monotonic()
        name = f"{case.method} {case.operation.path}"
        try:
            answer = case.call(base_url=self.url, session=session, timeout=PATIENCE)
        except requests.RequestException as error:
            if not isinstance(error, requests.exceptions.InvalidHeader | requests.exceptions.InvalidURL):
                self.faults.setdefault(f"{name}: {type(error).__name__}", f"{error}\n{case.as_curl_command()}")
            return
        self.slowest = max(self.slowest, time.monotonic() - started)
        self.statuses[name, answer.status_code] += 1
        try:
            case.validate_response(answer, checks=CHECKS)
        except FailureGroup as failures:
            for failure in failures.exceptions:
                title = f"{name}: {answer.status_code} {failure.title}"
                self.faults.setdefault(title, f"{failure}\n{case.as_curl_command()}")

    def _real(self, case: Any, draw: random.Random, mode: GenerationMode) -> Any:
        """Now and then something that gets further than the first check: a right body, with a few odd fields at most."""
        right = self.bodies.get(case.operation.path)
        if right is None or case.method != "POST" or draw.random() < 0.4:
            return case
        odd = case.body if isinstance(case.body, dict) and mode is GenerationMode.NEGATIVE else {}
        case.body = {**right, **{name: odd[name] for name in odd if draw.random() < 0.3}}
        if case.operation.path == "/v1/jobs" and case.body["name"] == right["name"]:
            case.body["name"] = f"job{draw.random()}"
        if case.query and mode is GenerationMode.POSITIVE:
            case.query.pop("after", None)
        return case


def _can_be_wrong(operation: Any, fixed: dict[str, str]) -> bool:
    """Whether a request may break the schema: any text is a right name in a path, which costs a thousand tries to find out."""
    names = [one.definition["schema"] for one in operation.path_parameters if one.name not in fixed]
    return bool(operation.body or operation.query or operation.headers or any("enum" in one for one in names))
