"""Reads mathematics as people and models write it, plain or LaTeX, and compares it by Hugging Face's math-verify.

math-verify reads LaTeX, and of plain text only numbers: `2*pi` would be 2. Short plain texts are therefore written as LaTeX
first. A text that cannot be read as a whole is no expression, so that no part of it passes for the whole.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from typing import Any

UNSPACED = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3005-\u30ff\u3100-\u312f\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
"""Letters of scripts without spaces between words (Thai, Lao, Tibetan, Burmese, Khmer, Japanese, Chinese), in a class."""
_LONGEST, _LONGEST_UNIT = 1000, 100
_FUNCTIONS = "arcsin arccos arctan sinh cosh tanh sin cos tan cot sec csc log ln exp max min gcd sqrt".split()
_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi psi omega"
).split()
_INFINITY, _BETWEEN = ("oo", "inf", "infty", "infinity"), ("and", "or")
_SYMBOLS = str.maketrans(
    {letter: f"\\{name} " for letter, name in zip("αβγδεζηθικλμνξπρστυφχψω", _GREEK, strict=False) if name != "omicron"}
    | dict(zip("−–÷（），", "--/(),", strict=True))
    | {"×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∞": r"\infty ", "√": "sqrt", "°": r"^\circ "}
    | {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm "}
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_REWRITTEN: tuple[tuple[re.Pattern[str], Any], ...] = (
    (re.compile(r"\d"), lambda found: str(int(found[0]))),  # those of any script
    (re.compile(r"[⁰¹²³⁴-⁹⁻]+"), lambda found: f"^{{{found[0].translate(_SUPERSCRIPTS)}}}"),
    (re.compile(r"[¼-¾⅐-⅞]"), lambda found: " " + unicodedata.normalize("NFKC", found[0]).replace("\u2044", "/")),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"(?<=\d)(?:\s+x\s+(?=\d)|x(?=10\^))"), r"\\times "),
    (re.compile(r"(?<![\w.\\])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d{1,3})(?![\w.])"), r"(\1 \\cdot 10^{\2})"),
    (re.compile(r"(?<=\d) (?=\d{3}(?!\d))(?<![\d.,]\d{4} )"), ""),
    (re.compile(r"(?<![\d.,/^])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d./])"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"\^\s*([-+]\s*(?:\d+|[A-Za-z]))"), r"^{\1}"),
    (re.compile(r"[)\]]\s*(?=\()"), r"\g<0>\\cdot "),
    (re.compile(r"(?<![<>=!])([<>!])="), lambda found: {"<": r"\le ", ">": r"\ge ", "!": r"\ne "}[found[1]]),
)
_COMMAND = re.compile(r"\\(?:text\w*|math\w*|operatorname|begin|end)\{[^{}]*\}|\\(?:[A-Za-z]+|.)")
_WORD = re.compile(rf"{_COMMAND.pattern}|[^\W\d_]+")
_ROOT = re.compile(r"\\sqrt\s*(?:\(([^()]*(?:\([^()]*\)[^()]*)*)\)|(\d+(?:\.\d+)?|[A-Za-z]))")
# Words, letters of other scripts, and numbers side by side are no expression, nor is mathematics inside of a sentence.
_SENTENCE = re.compile(
    r"[^\W\d_]{4}|[^\W\d_]{2,}\s+[^\W_]|[^\W_]\s+[^\W\d_]{2}|(?<![_\d.])[\d.]+\s+\d|[^\W\d_a-zA-Z]|\$|\\\(|\\\[|[?;:]$|\n"
)
_WORDS = re.compile(r"[^\W\d_]+(?:[ '’-][^\W\d_]+)*")
_UNIT = re.compile(
    r"(?:^|\s)([-−+]?[\d.,/ ]*\d(?:[eE][-+]?\d+)?)\s*"
    r"((?:[^\W\d_]+\s+){0,2}[^\W\d_]+(?:\s*[*/·]\s*[^\W\d_]+|\^\{?-?\d\}?|[²³])*)$"
)
_MARK = re.compile(r"answer\b(?:\s+is)?\s*[:=]?|####|答案\s*[是为為]?\s*[:：]?", re.IGNORECASE)
_DENIED = re.compile(r"\b(?:not|never|cannot be)\s+(?:[a-z]+\s+){0,2}[^\s\d]*[-−]?[\d.,/]+\D*$", re.IGNORECASE)
_AROUND = " \t\r\n*\"'`"


@functools.lru_cache(maxsize=64)
def expressions(text: str) -> list[Any]:
    """The expression that a text is, in a list for math-verify's `verify`; empty if it is not one as a whole."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    if not (latex := _as_latex(text)):
        return []
    units = "\\text" in latex or "\\math" in latex or "%" in latex or "circ" in latex
    config = NormalizationConfig(basic_latex=True, units=units, malformed_operators=True, nits=True, boxed="all")
    target = [LatexExtractionConfig(normalization_config=config)]
    found: list[Any] = parse(f"${latex}$", target, "no_fallback", "first_match", None)
    return found


def _as_latex(text: str) -> str:
    """A plain or LaTeX text as LaTeX; empty if it is a sentence, or no text."""
    text = _bare(text)
    if len(text) > _LONGEST:
        return ""
    text = _inside(text).translate(_SYMBOLS)
    for pattern, written in _REWRITTEN:
        text = pattern.sub(written, text)
    text = _ROOT.sub(lambda root: f"\\sqrt{{{root[1] or root[2]}}}", _WORD.sub(_command, text))
    return "" if _SENTENCE.search(_COMMAND.sub("+", text)) else text.replace("%", "\\%").replace("\\\\%", "\\%")


def _command(found: re.Match[str]) -> str:
    word = found[0]
    if word in _BETWEEN:
        return ","
    return r"\infty" if word in _INFINITY else f"\\{word}" if word in _FUNCTIONS or word in _GREEK else word


def _bare(text: str) -> str:
    """A text without what surrounds it in prose, such as a full stop."""
    return text.strip(_AROUND).rstrip(f"{_AROUND}.。")


def _inside(text: str) -> str:
    """A text without the dollars, or the brackets of LaTeX, around all of it."""
    for begin, end in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        inside = text[len(begin) : -len(end)]
        if text.startswith(begin) and text.endswith(end) and inside and begin not in inside:
            return _bare(inside)
    return text


def claim_of(completion: str) -> str:
    """What a completion claims: its last box, or what follows its last "answer is", or its last line."""
    start = completion.rfind("\\boxed{")
    if start >= 0:
        start += len("\\boxed{")
        depth = 1
        for end in range(start, len(completion)):
            depth += {"{": 1, "}": -1}.get(completion[end], 0)
            if not depth:
                return completion[start:end]
    marks = list(_MARK.finditer(completion))
    after = completion[marks[-1].end() :].strip() if marks else ""
    lines = (after or completion).strip().splitlines()
    return (lines[0] if after else lines[-1] if lines else "").strip(f"{_AROUND}=#")


def said(text: str) -> str:
    """A text for comparison with another: without case, and what writers put around answers."""
    text = re.sub(r"\\(?:text\w*|mathrm|mathbf|boxed)\{([^{}]*)\}", r"\1", _inside(_bare(text)))
    text = re.sub(r"(?<=[^\W\d_]{2})[!\s]+$", "", text.strip(_AROUND))
    if re.fullmatch(r"\(\w+\)", text):
        text = text[1:-1]
    return re.sub(r"^(?:the|an?) +|\s+", lambda found: "" if found[0].strip() else " ", text.casefold())


def unit_of(text: str) -> tuple[str, str]:
    """The number, if it is all before it, and the unit that ends a text (`12 cm^2`); empty texts if it ends otherwise."""
    found = _UNIT.search(_bare(text)[-_LONGEST_UNIT:])
    if found is None or found[2] in _INFINITY or any(word in _FUNCTIONS + _GREEK for word in found[2].split()):
        return "", ""
    return "" if found.start() else found[1], re.sub(r"[\s{}]", "", found[2].translate(_SUPERSCRIPTS)).casefold()


@functools.lru_cache(maxsize=64)
def _reference(answer: str) -> tuple[list[Any], str]:
    """The expressions of a reference answer, and its unit. Raises ValueError if it is no mathematics."""
    from math_verify import parse

    number, unit = unit_of(answer) if not expressions(answer) else ("", "")
    gold = expressions(number) if number else []
    if gold:
        return gold, unit
    gold = expressions(answer) or expressions(claim_of(answer))
    if not gold and ("$" in answer or "\\" in answer or len(re.findall(r"\d+(?:[.,/]\d+)*", answer)) == 1):
        gold = parse(answer, parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify finds no expression in the reference answer {answer[:80]!r}")
    return gold, ""


def equal(answer: str, completion: str) -> bool:
    """Whether a completion claims what a reference answer says, as an expression or as words.

    Raises ValueError if the reference answer is neither.
    """
    from math_verify import parse, verify

    claim = claim_of(completion)[-_LONGEST:]
    if said(claim) and said(claim) == said(answer):
        return True
    if _WORDS.fullmatch(said(answer)) and not _as_latex(answer):
        return False
    gold, unit = _reference(answer)
    found = expressions(claim)
    if not found:
        number, other = unit_of(claim)
        if unit and other and unit != other:
            return False
        found = expressions(number) if number else []
    if not found:
        if _DENIED.search(claim):
            return False
        found = parse(re.sub(rf"(?<=[{UNSPACED}])(?=[-−\d$\\])", " ", completion), parsing_timeout=None)
    return bool(verify(gold, found, float_rounding=_rounding(gold), timeout_seconds=None))


def forget() -> None:
    """Forget what was compared before, here and in sympy, which also draws from the start again."""
    from sympy.core.cache import clear_cache  # type: ignore[import-untyped]
    from sympy.core.random import seed  # type: ignore[import-untyped]

    clear_cache()
    expressions.cache_clear()
    _reference.cache_clear()
    seed(0)


def _rounding(gold: list[Any]) -> int:
    """Decimals of a comparison: six, and more for a small number, of which six are nothing."""
    try:
        size = abs(float(gold[0]))
    except (TypeError, ValueError, OverflowError):
        return 6
    return 6 if not 0 < size < 1 else min(5 + len(f"{1 / size:.0f}"), 60)
