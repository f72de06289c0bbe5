"""The page about every door on every engine, docs/doors.md, from the marks `cell` of the tests. `make_reference.py` writes it.

@pytest.mark.cell("agent local, retry", "vLLM")            # the test proves both cells
@pytest.mark.cell("kept turns", "vLLM", refused="why")     # the test proves that this is refused
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
DOORS = (
    "single turn", "retry", "environment", "agent local", "agent worker", "agent gateway", "Tinker client", "critic",
    "distillation", "preferences", "structured output", "kept turns", "publish by files", "publish by tensors",
    "several bases", "hosts",
)  # fmt: skip
ENGINES = ("embedded", "vLLM", "two vLLMs", "SGLang (fake)", "hosts 2", "shards 2", "Ray")
BY_HAND = {("hosts", "vLLM"): "2026-11-23"}
"""Tried once by a person, and by no test."""
NOTHING = {
    **{(f"publish by {way}", engine): "no version travels" for way in ("files", "tensors")
       for engine in ("embedded", "shards 2")},
    ("hosts", "hosts 2"): "the column says it",
    ("hosts", "embedded"): "that is the column `hosts 2`",
}  # fmt: skip
"""Cells that mean nothing, and why."""
HEAD = """# Tested combinations

The rows are ways to train or to ask a model (in the tests: *doors*), the columns are what samples. A cell says whether they
have run together. The table is made from the marks of the tests.

- **tested**: `make test` or `make check` repeats it. **long proof**: `make soak` does.
- **by hand**: a person tried it once, on that date.
- **refused**: Motet says so at the start; the reasons are below the table.
- **untried**: nobody has run it, and it may or may not work. If its test waits for a first run, the test is listed below.

vLLM is a real server of release 0.32, built for CPUs. SGLang has no build for CPUs, so a server in the tests speaks its
protocol over a real base. No GPU has run any of it: [What has run where](evidence.md).

"""
RANK = ("refused", "tested", "long proof", "untried")
"""What a cell says where several tests are of it: the first."""

Cell = tuple[str, str]


@dataclass(frozen=True)
class Proof:
    """A test that a cell is marked on."""

    state: str
    test: str
    """`file::function`."""
    reason: str = ""


def proofs(tests: Path = TESTS) -> dict[Cell, Proof]:
    """The proof of each marked cell.

    Raises:
        ValueError: a mark names a door or an engine that is not known.
    """
    found: dict[Cell, Proof] = {}
    for file in sorted(tests.rglob("test_*.py"), key=lambda file: file.name):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        shared = any(
            _is_soak(line) for line in tree.body if isinstance(line, ast.Assign) and _names(line) == "pytestmark"
        )
        for function in (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            for mark, soak in _marks(function, shared=shared):
                proof = _proof(mark, f"{file.stem}::{function.name}", soak=soak)
                for cell in _cells(mark, file):
                    before = found.get(cell, proof)
                    found[cell] = min(before, proof, key=lambda proof: RANK.index(proof.state))
    return found


def _names(line: ast.Assign) -> str:
    return line.targets[0].id if isinstance(line.targets[0], ast.Name) else ""


def _is_soak(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Attribute) and inner.attr == "soak" for inner in ast.walk(node))


def _marks(function: ast.FunctionDef | ast.AsyncFunctionDef, *, shared: bool) -> Iterator[tuple[ast.Call, bool]]:
    """Each mark of a test or of one of its parameters, and whether it is a long proof."""
    direct = [decorator for decorator in function.decorator_list if not _is_parametrised(decorator)]
    soak = shared or any(map(_is_soak, direct))
    for decorator in direct:
        if _is_cell(decorator):
            yield decorator, soak  # type: ignore[misc]
    for decorator in function.decorator_list:
        for param in (
            inner for inner in ast.walk(decorator) if isinstance(inner, ast.Call) and _called(inner) == "param"
        ):
            for mark in filter(_is_cell, ast.walk(param)):
                yield mark, soak or _is_soak(param)  # type: ignore[misc]


def _is_parametrised(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _called(node) in ("parametrize", "fixture")


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _is_cell(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _called(node) == "cell"


def _proof(mark: ast.Call, test: str, *, soak: bool) -> Proof:
    """`soak=True`: a parameter of a fixture makes the test a long one. `untried=True`: nobody has run the test yet."""
    named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in mark.keywords}
    if named.get("untried"):
        return Proof("untried", test)
    reason, soak = str(named.get("refused", "")), soak or bool(named.get("soak"))
    return Proof("refused" if reason else "long proof" if soak else "tested", test, reason)


def _cells(mark: ast.Call, file: Path) -> Iterator[Cell]:
    doors, engines = (str(ast.literal_eval(argument)).split(", ") for argument in mark.args)
    for door in doors:
        for engine in engines:
            if door not in DOORS or engine not in ENGINES:
                raise ValueError(
                    f"{file.name} marks the cell {door!r} of {engine!r}: scripts/doors_page.py knows neither"
                )
            yield door, engine


def doors(tests: Path = TESTS) -> str:
    """The page, without the notice that it is generated."""
    found = proofs(tests)
    lines = [f"| | {' | '.join(ENGINES)} |", f"|---{'|---' * len(ENGINES)}|"]
    lines += [f"| {door} | {' | '.join(_text(found, (door, engine)) for engine in ENGINES)} |" for door in DOORS]
    texts = [_text(found, (door, engine)).partition(" ")[0] for door in DOORS for engine in ENGINES]
    counted = {word: texts.count(word) for word in ("tested", "long", "by", "refused", "untried")}
    told = (
        "{tested} cells are tested, {long} have a long proof, {by} ran by hand, {refused} refused, {untried} untried."
    )
    reasons = [
        f"| {door}, {engine} | {proof.reason} | `{proof.test}` |"
        for (door, engine), proof in sorted(found.items(), key=lambda item: _place(item[0])) if proof.reason
    ]  # fmt: skip
    tests_of = [
        f"| {door} | {', '.join(dict.fromkeys(f'`{found[door, kind].test}`' for kind in ENGINES if (door, kind) in found))} |"
        for door in DOORS
    ]
    return (
        HEAD + "\n".join(lines) + "\n\n" + told.format(**counted)
        + "\n\n## Refused\n\n| cell | reason | test |\n|---|---|---|\n" + "\n".join(reasons)
        + "\n\n## Tests\n\nThe tests of each door, in the order of the columns.\n\n| door | tests |\n|---|---|\n"
        + "\n".join(tests_of) + "\n"
    )  # fmt: skip


def _place(cell: Cell) -> tuple[int, int]:
    return DOORS.index(cell[0]), ENGINES.index(cell[1])


def _text(found: dict[Cell, Proof], cell: Cell) -> str:
    if cell in found and found[cell].state != "untried":
        return found[cell].state
    if cell in NOTHING:
        return "–"
    return f"by hand {BY_HAND[cell]}" if cell in BY_HAND else "untried"
