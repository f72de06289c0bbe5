"""Reach a number with three others, each used once. `python countdown.py > countdown.jsonl` writes the problems."""

from __future__ import annotations

import ast
import json
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from motet import Problem

SIGNS = {ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b}


def value(node: ast.expr, used: list[int]) -> int:
    """Of an expression of whole numbers with + - * and brackets; its numbers are added to `used`.

    Raises:
        ValueError: it is anything else.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
        return SIGNS[type(node.op)](value(node.left, used), value(node.right, used))
    raise ValueError("not an expression of whole numbers with + - *")


def reward(problem: Problem, completion: str) -> float:
    """1 if the expression uses each number once and reaches the target, 0.1 if it only uses each number once."""
    used: list[int] = []
    try:
        reached = value(ast.parse(completion[:100].strip(), mode="eval").body, used)
    except (SyntaxError, ValueError):
        return 0.0
    if sorted(used) != sorted(problem.metadata["numbers"]):
        return 0.0
    return 1.0 if reached == problem.metadata["target"] else 0.1


def row(rng: random.Random) -> dict[str, object]:
    """A problem, and the expression that it was made from."""
    while True:
        a, b, c = numbers = [rng.randint(1, 9) for _ in range(3)]
        answer = f"{a} {rng.choice('+-*')} {b} {rng.choice('+-')} {c}"
        target = value(ast.parse(answer, mode="eval").body, [])
        if target > 0:
            shown = ", ".join(map(str, rng.sample(numbers, 3)))
            prompt = f"Use each of {shown} once, with + - *, to make {target}. Write only the expression."
            return {"prompt": prompt, "answer": answer, "numbers": numbers, "target": target}


if __name__ == "__main__":
    draws = random.Random(0)
    for _ in range(1024):
        print(json.dumps(row(draws)))
