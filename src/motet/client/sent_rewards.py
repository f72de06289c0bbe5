"""The files of a job's own rewards, sent to a service with the job."""

from __future__ import annotations

import ast
import os
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from motet.config import JobConfig, RewardConfig
from motet.config.job import LONGEST_CODE
from motet.core.errors import RewardError

_CURE = "or score on your machine: motet submit --reward FILE"


def with_code(job: JobConfig) -> JobConfig:
    """The job, with the text of each file that its rewards name.

    Raises RewardError if a service could not run one: it takes one file for a function.
    """
    if not any(":" in reward.name and reward.code is None for reward in job.rewards):
        return job
    return job.model_copy(update={"rewards": [_with_code(reward) for reward in job.rewards]})


def _with_code(reward: RewardConfig) -> RewardConfig:
    module, colon, function = reward.name.rpartition(":")
    if not colon or reward.function is not None or reward.code is not None:
        return reward
    if not module.endswith(".py"):
        raise RewardError(
            f"reward {reward.name!r}: a service takes one file with all that a reward needs: name file.py:{function}, {_CURE}"
        )
    path = Path(os.path.expanduser(module)).resolve()
    try:
        with tokenize.open(path) as file:
            text = file.read()
    except FileNotFoundError:
        raise RewardError(f"reward file {module!r} does not exist (looked for {path})") from None
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise RewardError(f"reward file {module!r} cannot be read: {error}") from error
    if len(text) > LONGEST_CODE:
        raise RewardError(
            f"reward file {module!r} has {len(text)} characters, and a service takes {LONGEST_CODE}: make it shorter, {_CURE}"
        )
    if beside := next(_beside(path, text), ""):
        raise RewardError(
            f"reward file {module!r} imports {beside}, which lies beside it, and a service takes one file: put it into this "
            f"one, {_CURE}"
        )
    return reward.model_copy(update={"name": f"{path.name}:{function}", "code": text})


def _beside(path: Path, text: str) -> Iterator[str]:
    """Modules beside a file that it imports."""
    try:
        tree = ast.parse(text, path.name)
    except (SyntaxError, ValueError) as error:
        raise RewardError(f"reward file {str(path)!r} does not load: {type(error).__name__}: {error}") from error
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for top in (name.partition(".")[0] for name in names):
            places = path.parent / f"{top}.py", path.parent / top / "__init__.py"
            if top not in sys.stdlib_module_names and any(place.is_file() for place in places):
                yield next(place for place in places if place.is_file()).relative_to(path.parent).as_posix()
