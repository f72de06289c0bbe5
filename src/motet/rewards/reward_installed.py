"""Rewards that a service's operator installs: functions that jobs use by name."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from motet.core.errors import MotetError, RewardError
from motet.process.isolated_calls import call
from motet.process.isolated_process import WorkLimits
from motet.rewards.reward_elsewhere import ELSEWHERE
from motet.rewards.reward_forms import adapted, own_parameters
from motet.rewards.reward_loading import OWN, SCORER
from motet.rewards.rewards import BUILTIN
from motet.workers.worker_link import LOAD_SECONDS, import_path


@dataclass(frozen=True)
class Installed:
    """A function that jobs may use by a name."""

    target: str
    """`file.py:function` or `module:function`."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments; those of a job win."""
    summary: str = ""
    """The first line of its docstring."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Its parameters and their defaults as text; empty text for required ones."""
    wall: bool = True
    """Whether it runs behind a wall: without network, files and other processes."""


def install(wanted: Mapping[str, Mapping[str, Any]], file: Path | None = None) -> dict[str, Installed]:
    """Load functions in a process of their own, and describe them.

    Args:
        wanted: `{"function": …, "args": {…}}` by name.
        file: a file whose public reward functions are all installed under their names.

    Raises:
        RewardError: one of them does not load, or a name is taken; the message says why.
    """
    asked = json.dumps({"path": import_path(), "wanted": wanted, "file": None if file is None else str(file)})
    try:
        answer = json.loads(call(_answer, asked.encode(), WorkLimits(LOAD_SECONDS, clock=1.0, walled=False)))
    except (MotetError, RuntimeError) as error:
        raise RewardError(f"the rewards do not load: {error}") from error
    if "error" in answer:
        raise RewardError(answer["error"])
    installed = {name: Installed(**one) for name, one in answer["found"].items()}
    for name in installed:
        if name in BUILTIN or name in ELSEWHERE or name == SCORER or ":" in name:
            raise RewardError(f"a reward cannot be installed as {name!r}: the name is already taken")
    return installed


def without_folder(text: str, target: str) -> str:
    """A reward's message without the path of its file."""
    folder = Path(os.path.expanduser(target.rpartition(":")[0])).resolve().parent if ".py:" in target else None
    return text if folder is None else text.replace(f"{folder}/", "")


def _describe(function: Any, target: str, args: Mapping[str, Any], wall: bool) -> Installed:
    summary = (inspect.getdoc(function) or "").strip().partition("\n")[0]
    known = inspect.signature(function).parameters
    own = list(own_parameters(known).values())
    if "completions" in known:  # TRL's columns are not arguments of a job
        own = [one for one in known.values() if one.default is not one.empty]
    parameters = {
        one.name: repr(args.get(one.name, one.default)) if one.name in args or one.default is not one.empty else ""
        for one in own
    }
    return Installed(target, dict(args), summary, parameters, wall)


def _of_file(file: str) -> dict[str, str]:
    """Public reward functions of a file, by name."""
    functions = {}
    module = OWN.load_file(file)
    for name, value in vars(module).items():
        if name.startswith("_") or not inspect.isfunction(value) or value.__module__ != module.__name__:
            continue
        parameters = list(inspect.signature(value).parameters)
        both = {"problem", "completion"} <= set(parameters)
        of_others = {"completions", "solution_str", "solution_strs", "queries"}.intersection(parameters)
        if of_others or both or (len(parameters) > 1 and parameters[0] == "problem"):
            functions[name] = f"{Path(os.path.expanduser(file)).resolve()}:{name}"
    if not functions:
        raise RewardError(f"{file} has no reward: a function (problem, completion) that returns a number")
    return functions


def _answer(given: bytes) -> bytes:
    """Runs in a separate process."""
    asked = json.loads(given)
    sys.path[:] = asked["path"]
    try:
        return json.dumps({"found": _described(asked)}).encode()
    except RewardError as error:
        return json.dumps({"error": str(error)}).encode()


def _described(asked: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    wanted = dict(asked["wanted"])
    if asked["file"] is not None:
        wanted = {**{name: {"function": target} for name, target in _of_file(asked["file"]).items()}, **wanted}
    described_rewards = {}
    for name, one in wanted.items():
        target, args = str(one["function"]), one.get("args") or {}
        function = OWN.find(target)
        described = _describe(function, target, args, one.get("wall", True))
        adapted(function, {**dict.fromkeys(described.parameters), **args}, name)  # checks that it can be called
        described_rewards[name] = asdict(described)
    return described_rewards
