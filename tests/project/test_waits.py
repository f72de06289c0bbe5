"""A test gives up after `PATIENCE`, not after seconds that a busy machine can take."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.waiting import PATIENCE

TESTS = Path(__file__).resolve().parents[1]
LEAST = PATIENCE
"""Seconds of a deadline that is written out."""
POLL = 1
"""Seconds below which a wait is a pause between two looks."""
EARLY = (
    "psutil.wait_procs(below, timeout=10)",
    "handler.scorer.closing.wait(60)",
    "httpx2.get(f'{server.url}/health', timeout=5.0, trust_env=False)",
)
"""Waits whose end is no failure."""
CLOCKS = ("time.monotonic()", "time.perf_counter()")


def deadline(call: ast.Call) -> ast.expr | None:
    """The seconds that a call waits at most."""
    named = {one.arg: one.value for one in call.keywords}
    owner, _, name = ast.unparse(call.func).rpartition(".")
    place = {"timeout": 0, "wait_for": 1, "result": 0, "join": 0, "wait": 0, "until": 1, "wait_until": 1}.get(name)
    if name in ("timeout", "wait_for") and owner != "asyncio":
        return None
    given = call.args[place] if place is not None and place < len(call.args) else None
    return named.get("timeout") or (None if place is None else named.get("seconds") or given)


def bound(test: ast.expr) -> float:
    """The seconds that must not have passed."""
    given = (
        test.comparators[-1] if isinstance(test, ast.Compare) and isinstance(test.ops[-1], ast.Lt | ast.LtE) else None
    )
    told = given is not None and any(clock in ast.unparse(test) for clock in CLOCKS)
    seconds = given.value if told and isinstance(given, ast.Constant) else LEAST
    return seconds if isinstance(seconds, int | float) else LEAST


def hasty(source: str) -> Iterator[str]:
    """Waits that fail on a busy machine, with their lines; one whose deadline is expected to pass is none."""

    def look(node: ast.AST, passes: bool) -> Iterator[str]:
        if isinstance(node, ast.With | ast.AsyncWith):
            passes = passes or any("raises(TimeoutError" in ast.unparse(one.context_expr) for one in node.items)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            passes = True
        if isinstance(node, ast.Call) and not passes and (found := deadline(node)) is not None:
            seconds = found.value if isinstance(found, ast.Constant) else LEAST
            text = ast.unparse(node)
            if isinstance(seconds, int | float) and POLL <= seconds < LEAST and text not in EARLY:
                yield f"line {node.lineno}: {text}"
        if isinstance(node, ast.Assert) and bound(node.test) < LEAST and (text := ast.unparse(node.test)) not in EARLY:
            yield f"line {node.lineno}: {text}"
        for below in ast.iter_child_nodes(node):
            yield from look(below, passes)

    yield from look(ast.parse(source), passes=False)


def test_no_deadline_is_one_that_a_busy_machine_can_miss() -> None:
    """Those that are found wait for `PATIENCE` instead, of tests/support/waiting.py."""
    found = {str(path.relative_to(TESTS)): list(hasty(path.read_text())) for path in TESTS.rglob("*.py")}
    assert {path: waits for path, waits in found.items() if waits} == {}


def test_what_is_hasty() -> None:
    found = hasty("async with asyncio.timeout(5): pass\ndone.wait(20)\nuntil(ready, 10)\nrun(['x'], timeout=30)\n")
    assert [line.partition(":")[0] for line in found] == ["line 1", "line 2", "line 3", "line 4"]
    assert len(list(hasty("assert time.monotonic() - begun < 10\nassert 0.2 <= time.monotonic() - begun < 8"))) == 2
    fine = "with pytest.raises(TimeoutError): task.result(timeout=5)\nassert not ended.wait(2)\nover.wait(0.1)\njoin(',')\n"
    fine += "assert time.monotonic() - begun < PATIENCE\nassert time.monotonic() - begun >= 0.2\n"
    assert list(hasty(fine)) == []
