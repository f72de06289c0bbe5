"""`calculate_output` of a multi grader: arithmetic over the scores of its graders, and nothing else.

Operators are + - * / and ^ (power); functions are min, max, abs, floor, ceil, exp, sqrt and log.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Collection, Mapping

FUNCTIONS: Mapping[str, Callable[..., float]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "exp": math.exp,
    "sqrt": math.sqrt,
    "log": math.log,
}
_SEVERAL = ("min", "max")
_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.Pow: math.pow,  # no complex numbers, and no integers that grow without end
}
_LONGEST = 2000
_DEEPEST = 50


def parse(text: str, names: Collection[str]) -> ast.expr:
    """Parse a formula over the scores of graders, for `value`.

    Raises ValueError, which says why, if it is not arithmetic over these names.
    """
    if len(text) > _LONGEST:
        raise ValueError(f"the formula has {len(text)} characters; the limit is {_LONGEST}")
    try:
        tree = ast.parse(text.strip().replace("^", "**"), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r:.200} is not a formula: {getattr(error, 'msg', error)}") from error
    _check(tree, names, 0)
    return tree


def value(tree: ast.expr, scores: Mapping[str, float]) -> float:
    """Evaluate a formula with scores. Raises ValueError if it has no finite value, such as after a division by zero."""
    try:
        result = float(_value(tree, scores))
    except (ArithmeticError, ValueError) as error:
        raise ValueError(f"calculate_output has no value for {dict(scores)}: {error}") from error
    if not math.isfinite(result):
        raise ValueError(f"calculate_output is {result} for {dict(scores)}")
    return result


def _check(node: ast.expr, names: Collection[str], depth: int) -> None:
    if depth > _DEEPEST:
        raise ValueError(f"the formula is nested more than {_DEEPEST} deep")
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool) and abs(number) < 1e300:
            return
        case ast.Name(id=name) if name in names:
            return
        case ast.Name(id=name):
            raise ValueError(f"there is no grader {name!r}; there are {', '.join(sorted(names))}")
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            _check(left, names, depth + 1)
            _check(right, names, depth + 1)
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            _check(operand, names, depth + 1)
        case ast.Call(func=ast.Name(id=name), args=[_, *more] as args, keywords=[]) if name in FUNCTIONS:
            if more and name not in _SEVERAL:
                raise ValueError(f"{name} takes one number, got {len(args)}")
            for argument in args:
                _check(argument, names, depth + 1)
        case _:
            raise ValueError(
                f"{ast.unparse(node)!r:.80} is not arithmetic: there are numbers, graders, + - * / ^ and "
                f"{', '.join(FUNCTIONS)}"
            )


def _value(node: ast.expr, scores: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.Name(id=name):
            return scores[name]
        case ast.BinOp(left=left, op=operator, right=right):
            return _OPERATORS[type(operator)](_value(left, scores), _value(right, scores))
        case ast.UnaryOp(op=sign, operand=operand):
            number = _value(operand, scores)
            return -number if isinstance(sign, ast.USub) else number
        case ast.Call(func=ast.Name(id=name), args=args):
            values = [_value(argument, scores) for argument in args]
            return float(FUNCTIONS[name](*values) if len(values) > 1 or name not in _SEVERAL else values[0])
    raise ValueError(f"{ast.dump(node)} was not checked")
