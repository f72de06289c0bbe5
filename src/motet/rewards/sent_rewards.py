"""Reward files that tenants send to a service: what is wrong with a text is told before its job is accepted.

A text is compiled behind the wall, and not run. Whether its function fits is known when the job starts, in its own process.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from motet.config import RewardConfig
from motet.core.errors import ConfigError, RewardError
from motet.core.suggestions import close_matches
from motet.process.cpu_time import counted
from motet.process.isolated_calls import TooMuchError, call
from motet.process.isolated_process import WorkLimits

REFUSED = (
    "this service runs no code of its tenants; whoever runs it can allow that, with `rewards: {tenants: true}` in its "
    "--config file"
)
_NAME = re.compile(r"[\w-][\w.-]{0,96}\.py:[A-Za-z_]\w{0,99}", re.ASCII)
_UNKNOWN = frozenset({"*", "globals", "exec", "__getattr__"})
"""Names with which a file may bind others that only the run knows."""
_INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def check(reward: RewardConfig, *, allowed: bool) -> None:
    """Raise RewardError if a reward with its file's text is not allowed here, or has another name than such a file's."""
    if not allowed:
        file = reward.name.partition(":")[0]
        raise RewardError(
            f"reward {reward.name!r:.200}: {REFUSED}; or score on your machine: motet submit --reward {file:.100}"
        )
    if not _NAME.fullmatch(reward.name):
        raise RewardError(
            f"reward {reward.name!r:.200}: with `code`, name one file and its function, such as rewards.py:reward"
        )


def names_code(spec: Any) -> bool:
    """Whether a stored job, which may be damaged, has a reward with its file's text."""
    rewards = spec.get("rewards") if isinstance(spec, dict) else None
    return isinstance(rewards, list) and any(isinstance(reward, dict) and "code" in reward for reward in rewards)


def faults_of(sent: Sequence[tuple[str, str]], charge: Callable[[float], None]) -> list[str]:
    """What is wrong with each `file.py:function` and the file's text; empty if nothing is seen without running it.

    Raises ConfigError if they take too long to compile; `charge` gets the CPU seconds.
    """
    if not sent:
        return []
    try:
        with counted(charge):
            found: list[str] = json.loads(call(_answer, json.dumps(sent).encode(), WorkLimits()))
    except TooMuchError as error:
        raise ConfigError(f"the files of the rewards cannot be compiled: {error}") from error
    return found


def _answer(given: bytes) -> bytes:
    """Runs in a separate process."""
    return json.dumps([_fault(name, text) for name, text in json.loads(given)]).encode()


def _fault(name: str, text: str) -> str:
    file, _, function = name.partition(":")
    try:
        tree = ast.parse(text, file)
        compile(tree, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"reward file {file!r} does not load: {type(error).__name__}: {error}"
    bound = set(_bound(tree.body))
    if function in bound or not _UNKNOWN.isdisjoint(bound):
        return ""
    near = close_matches(function, sorted(bound), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(sorted(bound)[:20]) or 'nothing to call'}"
    return f"reward {name!r}: {file} has no {function!r}{hint}"


def _bound(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names that a file binds when it is loaded, and of those that it reads the ones in `_UNKNOWN`."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.alias():
                yield node.asname or node.name.partition(".")[0]
            case ast.Name(id=name) if isinstance(node.ctx, ast.Store) or name in _UNKNOWN:
                yield name
        if not isinstance(node, _INNER):
            waiting += ast.iter_child_nodes(node)
