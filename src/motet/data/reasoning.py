"""reasoning-gym: procedural tasks with their own graders (https://github.com/open-thought/reasoning-gym).

Some of its tasks draw from sets of strings, so their rows depend on Python's hash seed (`word_ladder`, `ransom_note`, …). Rows
are therefore made in a separate process with a fixed hash seed. Reward processes have the same seed and make each entry again
from its index, so that values which JSON cannot hold (tuples, integer keys) are as the task made them.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import msgspec

from motet.core.errors import DataError, MotetError, RewardError
from motet.core.suggestions import close_matches
from motet.core.types import Problem
from motet.process.isolated_calls import TooMuchError, call
from motet.process.isolated_process import WorkLimits

if TYPE_CHECKING:  # every reward process loads this module, and files of rows take as long as all the rest of Motet
    from motet.data.row_files import RowLimits

_OWN = WorkLimits(1e6, 1 << 16, clock=1.0)
"""Limits on rows of one's own."""
_MOST_ROWS, _APART = 10**9, 709_183_895
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class ScorerSpec:
    """Describes reasoning-gym data for its scorer; only JSON values, so that it can be sent to a reward process."""

    task: str
    """The task's name in reasoning-gym."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The task's options."""
    size: int = 1
    seed: int = 0
    evaluation: ScorerSpec | None = None
    """The evaluation data, if it is not held-out rows of the same source."""

    def build(self) -> Any:
        """The `ProceduralDataset`. Raises any exception of reasoning-gym for an unknown task or option."""
        import reasoning_gym

        return reasoning_gym.create_dataset(self.task, **{**self.config, "size": self.size, "seed": self.seed})


def first_seed(seed: int) -> int:
    """The seed of row 0 for a `data.seed`; row i has the next i-th, and those of other seeds are far away.

    Seed 0 has its own rows. All others are in the upper half of 32 bits, which numpy's seeds have: those within 1,000 of each
    other at least 500,000 apart, as multiples of the golden ratio are.
    """
    return 2**31 + seed * _APART % (2**31 - _MOST_ROWS) if seed else 0


def make_entries(spec: ScorerSpec, bounds: RowLimits | None = None) -> list[dict[str, Any]]:
    """The rows of a task: `question`, `answer` and `metadata`, as JSON values; the same for the same spec.

    Raises:
        DataError: there is no such task (the message has similar names), it refuses its options (the message lists them), or
            its rows take more time or memory than the bounds.
    """
    reply = json.loads(_made(json.dumps(asdict(spec), sort_keys=True), bounds))
    if "error" in reply:
        raise DataError(reply["error"])
    entries: list[dict[str, Any]] = reply["entries"]
    return entries


@functools.lru_cache(maxsize=4)  # jobs of a sweep share their data
def _made(spec: str, bounds: RowLimits | None) -> bytes:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise DataError(
            "reasoning-gym is not installed: `make smollm2` brings it, or pip install 'motet[reasoning]' "
            "(it needs a C compiler)"
        )
    limits = _OWN if bounds is None else WorkLimits(bounds.seconds, bounds.memory_mb, clock=1.0)
    try:
        return call(_reply, spec.encode(), limits)
    except (MotetError, RuntimeError) as error:
        hint = "; lower data.size, or make the task easier in data.config" if isinstance(error, TooMuchError) else ""
        raise DataError(f"reasoning-gym made no rows: {error}{hint}") from error


def build_scorer(spec: ScorerSpec) -> Callable[[Problem, str], float]:
    """Rebuild the task and return `(problem, completion) -> score`; 1 is right.

    The answer is the text between the last `<answer>` tags, or the whole completion without outer spaces.

    Raises:
        RewardError: the task cannot be built here.
    """
    for module, names in READ_INSTEAD.items():
        for name, function in names.items():
            setattr(importlib.import_module(f"reasoning_gym.{module}"), name, function)
    try:
        made = [source.build() for source in (spec, spec.evaluation) if source is not None]
    except Exception as error:  # tasks have many authors and raise exceptions of any kind
        raise RewardError(f"the scorer of reasoning-gym task {spec.task!r} cannot be built: {error}") from error

    @functools.lru_cache(maxsize=64)
    def entry_of(index: int, question: str) -> tuple[Any, dict[str, Any]] | None:
        for dataset in made:
            if index < len(dataset) and (entry := dataset[index])["question"] == question:
                return dataset, entry
        return None

    def score(problem: Problem, completion: str) -> float:
        known = entry_of(problem.id, problem.metadata.get("question", ""))
        if known is None:
            raise ValueError("this problem is not a row of the job's reasoning-gym data, so its scorer cannot grade it")
        dataset, entry = known
        tagged = _ANSWER_TAG.findall(completion)
        try:
            return float(dataset.score_answer((tagged[-1] if tagged else completion).strip(), entry))
        except MemoryError:
            raise
        except Exception as error:  # such as for words where numbers are expected: the answer is wrong
            dataset.score_answer(entry["answer"], entry)  # which raises where no answer could be right
            if not raised:
                print(f"the scorer of {spec.task} raised {error!r} for an answer, which gets 0; this is said once")
                raised.append(error)
            return 0.0

    raised: list[Exception] = []
    return score


_UNFIT = {
    "game_of_life_halting": "a constant answer earns most rewards",
    "coin_flip": "a constant answer earns most rewards",
    "puzzle24": "an answer that solves nothing earns the reward",
    "list_functions": "its rows change when they are made again, so that its scorer does not know them",
}
"""Tasks of reasoning-gym 0.1 that cannot be learned, and why."""


def unfit(spec: ScorerSpec | None) -> tuple[str, ...]:
    """A note about data whose task cannot be learned; none for others."""
    why = _UNFIT.get(spec.task) if spec else None
    return (f"reasoning-gym:{spec.task} cannot be learned: {why}; take another task",) if spec and why else ()


# --- scorers that would evaluate an answer as Python, which a tenant can make a model write ---------------------------------

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
"""Names that `build_scorer` replaces, by module of reasoning-gym. Behind a wall alone are answers for its integrals and
products of polynomials, which sympy evaluates."""


def _reply(given: bytes) -> bytes:
    """Runs in the process that makes rows: the entries, or the fault in the spec."""
    return json.dumps(_entries(msgspec.convert(json.loads(given), ScorerSpec))).encode()


def _entries(spec: ScorerSpec) -> dict[str, Any]:
    from reasoning_gym.factory import DATASETS

    from motet.core.plain_json import as_json

    if spec.task not in DATASETS:
        near = close_matches(spec.task, DATASETS, n=3, cutoff=0.5)
        nearest = ", ".join(near or close_matches(spec.task, DATASETS, n=8, cutoff=0.0))
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"the nearest names are {nearest}"
        gallery = "https://github.com/open-thought/reasoning-gym/blob/main/GALLERY.md"
        return {"error": f"reasoning-gym has no task {spec.task!r}; {hint} (it has {len(DATASETS)}, see {gallery})"}
    try:
        dataset = spec.build()
        return {"entries": [as_json(dict(dataset[i])) for i in range(spec.size)]}
    except MemoryError:
        raise
    except Exception as error:  # see build_scorer
        options = sorted(set(getattr(DATASETS[spec.task][1], "__dataclass_fields__", {})) - {"seed", "size"})
        refused = f"reasoning-gym task {spec.task!r} refuses data.config {dict(spec.config)}: {error!r}"
        return {"error": f"{refused}. Its options: {', '.join(options)}"}
