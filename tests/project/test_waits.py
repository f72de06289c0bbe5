"""A test gives up after `PATIENCE`, not after seconds that a busy machine can take."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
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
    "socket.create_connection(('127.0.0.1', int(argument)), 5)",
    "httpx2.get(f'{server.url}/health', timeout=5.0, trust_env=False)",
)
"""Waits whose end is no failure."""
PLACES = {"timeout": 0, "wait_for": 1, "result": 0, "join": 0, "wait": 0, "until": 1, "wait_until": 1}
PLACES |= {"settimeout": 0, "create_connection": 1}
"""Where functions take the seconds that they wait at most."""
CLOCKS = ("time.monotonic()", "time.perf_counter()")
ELAPSED = {"seconds", "took", "elapsed"}
"""What tests call a time that has passed; a function with such a parameter waits as long."""


def constants(module: ast.Module) -> dict[str, float]:
    """Numbers that a module gives names."""
    found = dict[str, float]()
    for one in module.body:
        if isinstance(one, ast.Assign | ast.AnnAssign) and (value := number(one.value, {})) is not None:
            names = one.targets if isinstance(one, ast.Assign) else [one.target]
            found |= {ast.unparse(name): value for name in names}
    return found


def number(value: ast.expr | None, known: Mapping[str, float]) -> float | None:
    """A number that is written out, or that the module names."""
    if isinstance(value, ast.Name):
        return known.get(value.id)
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, int | float) else None


def deadline(call: ast.Call) -> ast.expr | None:
    """The seconds that a call waits at most."""
    named = {one.arg: one.value for one in call.keywords}
    asked, given_all = call.func, call.args
    if ast.unparse(asked).endswith(("to_thread", ".submit")) and given_all:
        asked, *given_all = given_all
    owner, _, name = ast.unparse(asked).rpartition(".")
    place = PLACES.get(name)
    if name in ("timeout", "wait_for") and owner != "asyncio":
        return None
    given = given_all[place] if place is not None and place < len(given_all) else None
    return named.get("timeout") or (None if place is None else named.get("seconds") or given)


def elapsed(module: ast.Module) -> set[str]:
    """The names of times that have passed."""
    found = set(ELAPSED)
    for one in ast.walk(module):
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.BinOp) and isinstance(one.value.op, ast.Sub):
            found |= {ast.unparse(to) for to in one.targets if any(clock in ast.unparse(one.value) for clock in CLOCKS)}
    return found


def bounds(test: ast.Compare, names: set[str], asserted: bool) -> Iterator[ast.expr]:
    """The seconds that must not have passed: asserted to be more, or looked for as less."""
    wanted = (ast.Lt, ast.LtE) if asserted else (ast.Gt, ast.GtE)
    for left, operator, right in zip([test.left, *test.comparators], test.ops, test.comparators, strict=False):
        passed = any(clock in ast.unparse(left) for clock in CLOCKS)
        passed = passed or any(isinstance(one, ast.Name) and one.id in names for one in ast.walk(left))
        if passed and isinstance(operator, wanted):
            yield right


def hasty(source: str) -> Iterator[str]:
    """Waits that fail on a busy machine, with their lines; one whose deadline is expected to pass is none.

    The test of a `while` is none either: the loop tries again.
    """
    module = ast.parse(source)
    known, names = constants(module), elapsed(module)

    def told(node: ast.stmt | ast.expr, seconds: ast.expr | None, least: float) -> Iterator[str]:
        found, text = number(seconds, known), ast.unparse(node)
        if found is not None and least <= found < LEAST and text not in EARLY:
            yield f"line {node.lineno}: {text}"

    def look(node: ast.AST, passes: bool, asserted: bool) -> Iterator[str]:
        if isinstance(node, ast.With | ast.AsyncWith):
            passes = passes or any("raises(TimeoutError" in ast.unparse(one.context_expr) for one in node.items)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            passes = True
        if isinstance(node, ast.Call) and not passes:
            yield from told(node, deadline(node), POLL)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and ast.unparse(node.left) in CLOCKS:
            yield from told(node, node.right, POLL)
        if isinstance(node, ast.Compare):
            for bound in bounds(node, names, asserted):
                yield from told(node, bound, 0 if asserted else POLL)
        if isinstance(node, ast.arguments):
            own = zip([*node.posonlyargs, *node.args][::-1], node.defaults[::-1], strict=False)
            for name, given in [*own, *zip(node.kwonlyargs, node.kw_defaults, strict=True)]:
                if given is not None and name.arg in (*ELAPSED, "timeout"):
                    yield from told(given, given, POLL)
        asserted = asserted or isinstance(node, ast.Assert)
        for below in ast.iter_child_nodes(node):
            if not (isinstance(node, ast.While) and below is node.test):
                yield from look(below, passes, asserted)

    yield from look(module, passes=False, asserted=False)


def test_no_deadline_is_one_that_a_busy_machine_can_miss() -> None:
    """Those that are found wait for `PATIENCE` instead, of tests/support/waiting.py."""
    found = {str(path.relative_to(TESTS)): list(hasty(path.read_text())) for path in TESTS.rglob("*.py")}
    assert {path: waits for path, waits in found.items() if waits} == {}
