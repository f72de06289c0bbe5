"""Numbers in texts, and how the form of a reference answer decides which number of an answer is compared."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

# 1,234.5 · -3 · .5 · 2e-3; a minus directly behind a digit or letter is a subtraction or a hyphen, not a sign.
_NUMBER = re.compile(r"(?:(?<![\w.)])[-−+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
_FRACTION = re.compile(
    r"(?<![\w./^:-])(?:([-−+])\s*)?(?:(\d+)\s+|(\d+)(?=\\))?(?:(\d+)\s*/\s*(\d+)(?!/|\.?\d)|\\[dt]?frac\{?(\d+)\}?\{?(\d+)\}?)"
)
_EXPONENT = re.compile(r"\^\s*\{?\s*[-−+]?\d+\s*\}?|(?<=m)[23]\b")
# A number before a unit that has no free number in it: $12 · 12 cm^2 · 5 m/s^{-1} · 50 %
_WITH_UNIT = re.compile(rf"[$€£¥₹]?\s*({_NUMBER.pattern})\s*((?:[^\W\d_]|[°%€£¥$])(?:\D|(?<=[\^{{-])\d|(?<=m)[23]$)*)")
# What stands before the last number of 2*3, 10^3, \sqrt{2}, 3:45, 12-15 and 2024-01-05, which is no number by itself.
_OPERATED = re.compile(
    r"(?:[\w)}]\s*(?:[\^*/×÷·:]|\*\*)\s*|\d\s*[-−–+]\s*|√\s*|\\(?:sqrt|[dt]?frac|log|ln|sin|cos|tan)\W*)[({]?$"
)
_OTHER_SIGNS = str.maketrans("٫٬", ".,")


def compared(answer: str, completion: str) -> tuple[Decimal, Decimal | None]:
    """The number of a reference answer, and that of a completion, or None without any.

    Raises ValueError if the reference answer has no number, or is an expression.
    """
    answer, completion = answer.translate(_OTHER_SIGNS), completion.translate(_OTHER_SIGNS)
    marked = "####" in answer
    answer, first = _after_mark(answer) if marked else answer, marked and "####" in completion
    completion = _after_mark(completion) if first else completion
    bare = answer.strip(" \t\n$*").rstrip(" .。$*")
    fractions = [found for found in _FRACTION.finditer(bare) if found.end() == len(bare)]
    united = None if fractions else _WITH_UNIT.fullmatch(bare)
    wanted = last_number(_value(fractions[0]) if fractions else united[1] if united else answer)
    if wanted is None:
        raise ValueError(f"the reference answer {answer[:80]!r} has no number: try `exact` or `math`")
    before = answer[: [*_NUMBER.finditer(answer)][-1].start()][-20:]
    if not fractions and not united and _OPERATED.search(before):
        raise ValueError(f"the reference answer {answer[:80]!r} is no single number: try `math` or `exact`")
    if united:
        completion = _EXPONENT.sub(" ", completion.replace(united[2].strip(), " "))
    numbers = _NUMBER.findall(_FRACTION.sub(_value, completion) if fractions else completion)
    return wanted, _decimal(numbers[0 if first else -1]) if numbers else None


def last_number(text: str) -> Decimal | None:
    """The last decimal number in a text, or None."""
    digits = _NUMBER.findall(text)
    return _decimal(digits[-1]) if digits else None


def _decimal(digits: str) -> Decimal | None:
    try:
        number = Decimal(digits.replace(",", "").replace("−", "-"))
    except InvalidOperation:
        return None
    # A number with an exponent of a billion could not be compared in reasonable time.
    return number if abs(number.adjusted()) < 400 else None


def _after_mark(text: str) -> str:
    """The line after the last `####`."""
    return (text.rpartition("####")[2].strip().splitlines() or [""])[0]


def _value(found: re.Match[str]) -> str:
    """The value of a fraction as a decimal number; nothing if it has none."""
    sign, whole, joined, *parts = found.groups()
    above, below = (_decimal(part) for part in parts if part)
    if above is None or not below:
        return ""
    return f" {'-' if sign and sign in '-−' else ''}{Decimal(whole or joined or 0) + above / below:f} "
