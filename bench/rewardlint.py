"""How many right answers a built-in reward refuses, and how many wrong ones it takes, of rewardlint's public cases.

python -m venv /tmp/lint && /tmp/lint/bin/pip install rewardlint==0.1.0
PYTHONPATH=$(echo /tmp/lint/lib/python3*/site-packages) python -m bench.rewardlint [math] [numeric] ...
"""

from __future__ import annotations

import importlib
import sys

from motet.core.types import Problem
from motet.rewards.rewards import BUILTIN


def main(names: list[str]) -> None:
    """Print the shares and the cases of each reward; a case in which the reward raises counts as one that got 0."""
    cases = importlib.import_module("rewardlint.corpus").load()
    for name in names:
        wrong: dict[bool, list[str]] = {True: [], False: []}
        for case in cases:
            speech = case.completion.rpartition("</think>")[2]
            try:
                passed = BUILTIN[name](Problem(0, (), case.reference), speech) > 0
            except ValueError:
                passed = False
            if passed is not case.expect:
                wrong[case.expect].append(case.id)
        right = sum(case.expect for case in cases)
        refused, taken = len(wrong[True]) / right, len(wrong[False]) / (len(cases) - right)
        print(
            f"{name}: refuses {refused:.0%} of {right} right answers, takes {taken:.0%} of {len(cases) - right} wrong ones"
        )
        for case in (*wrong[True], *wrong[False]):
            print(f"  {case}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["math", "numeric", "exact", "contains"])
