"""Replacements for scorers of reasoning-gym that evaluate an answer as Python. A tenant can make a model write anything."""

from __future__ import annotations

import ast
import importlib
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip
_LONGEST = 1000


def arithmetic(text: str) -> Fraction:
    """The value of numbers, `+ - * /` and brackets, exactly.

    Raises:
        ValueError, SyntaxError, ZeroDivisionError: the text is something else, or has no value.
    """
    if len(text) > _LONGEST:
        raise ValueError(f"more than {_LONGEST} characters")
    return _value(ast.parse(text.strip(), mode="eval").body)


def _value(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))  # type: ignore[no-any-return]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))  # type: ignore[no-any-return]
    raise ValueError("not arithmetic")


READ_INSTEAD: Mapping[str, Mapping[str, Callable[[str], Any]]] = {
    "algorithmic.binary_matrix": {"eval": ast.literal_eval},
    "algorithmic.spiral_matrix": {"eval": ast.literal_eval},
    "algorithmic.string_insertion": {"eval": ast.literal_eval},
    "games.countdown": {"parse_expr": arithmetic},
    "games.n_queens": {"eval": ast.literal_eval},
    "games.puzzle24": {"parse_expr": arithmetic},
}
"""Replacements by module of reasoning-gym and name."""

EVALUATED = frozenset(
    {"algebra.intermediate_integration", "algebra.polynomial_multiplication", "algebra.simple_integration"}
)
"""Modules whose scorers evaluate symbolic mathematics with sympy: only the wall protects against these answers."""

OF_ITS_OWN = frozenset(
    {
        "algorithmic.number_sorting", "arithmetic.basic_arithmetic", "arithmetic.bitwise_arithmetic",
        "arithmetic.gsm_symbolic.generators_00_49", "arithmetic.gsm_symbolic.generators_50_99", "code.codeio",
    }
)  # fmt: skip
"""Modules that evaluate only texts that they made themselves, never an answer."""


def read_safely() -> None:
    """Replace the names in `READ_INSTEAD` in this process."""
    for module, names in READ_INSTEAD.items():
        for name, function in names.items():
            setattr(importlib.import_module(f"reasoning_gym.{module}"), name, function)
