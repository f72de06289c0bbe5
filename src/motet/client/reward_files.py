"""The functions that a reward worker may call: only those in files named by its owner."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet.config import JobConfig, RewardConfig
from motet.core.errors import RewardError
from motet.rewards.reward_elsewhere import WorkerArgs
from motet.rewards.reward_installed import install

RewardGiven = str | Path | Callable[..., Any]
"""`rewards.py`, `rewards.py:reward`, `my_package.rewards`, with or without a function, or a function itself."""


@dataclass(frozen=True)
class _RewardModule:
    """A file or a module, and its one function that may be called, or all of them."""

    path: str
    function: str
    call: Callable[..., Any] | None = None

    @property
    def short(self) -> str:
        """The name used in jobs, without the folder."""
        return Path(self.path).name if self.path.endswith(".py") else self.path


class RewardFiles:
    """Files and functions that a worker may call."""

    def __init__(self, given: RewardGiven | Sequence[RewardGiven]) -> None:
        """Loads nothing yet. Raises RewardError if a file is missing, or none is given."""
        several = [given] if isinstance(given, str | Path) or callable(given) else list(given)
        self._modules = [_module_of(one) for one in several]
        if not self._modules:
            raise RewardError("name the file with your reward functions: --reward rewards.py")
        self._default = ""

    def default(self) -> str:
        """The function for a job that names none: the only one, or `reward`. Raises RewardError if it is not clear."""
        if not self._default:
            names = [name for module in self._modules for name in _functions(module)]
            chosen = [name for name in names if name.rpartition(":")[2] == "reward"] or names
            if len(chosen) != 1:
                raise RewardError(f"name one function, such as {names[0]}; there are {', '.join(names)}")
            self._default = chosen[0]
        return self._default

    def find(self, asked: WorkerArgs, limits: RewardConfig) -> RewardConfig:
        """The reward that a job names, prepared for this machine. Raises RewardError if its function is not allowed."""
        file, _, function = (asked.function or self.default()).rpartition(":")
        if function.isidentifier() and not function.startswith("_"):
            for one in self._modules:
                if (not file or file == one.short) and one.function in ("", function):
                    name = function if one.call is not None else f"{one.path}:{function}"
                    return limits.model_copy(update={"name": name, "function": one.call, "args": asked.args})
        given = ", ".join(f"{one.short}:{one.function}" if one.function else one.short for one in self._modules)
        raise RewardError(
            f"the job is scored by {asked.function!r}, which is not in {given}; name its file: --reward {file or 'rewards.py'}"
        )

    def for_service(self, jobs: Sequence[JobConfig]) -> list[JobConfig]:
        """Jobs with their own functions assigned to a worker, or, if none has one, all with the default reward.

        Raises:
            RewardError: a job names a function that is not in these files.
        """
        own = [reward for job in jobs for reward in job.rewards if _is_own(reward) or reward.name == "worker"]
        if own:
            return [job.model_copy(update={"rewards": [self._moved(one) for one in job.rewards]}) for job in jobs]
        default = RewardConfig(name="worker", args={"function": self.default()})
        return [job.model_copy(update={"rewards": [default]}) for job in jobs]

    def _moved(self, reward: RewardConfig) -> RewardConfig:
        if not _is_own(reward):
            return reward
        function = reward.name
        if reward.function is None:
            module, _, name = reward.name.rpartition(":")
            function = f"{Path(module).name if module.endswith('.py') else module}:{name}"
        args = {"function": function, "args": reward.args} if reward.args else {"function": function}
        self.find(WorkerArgs.model_validate(args), reward)
        return reward.model_copy(update={"name": "worker", "args": args, "function": None})


def _is_own(reward: RewardConfig) -> bool:
    return reward.function is not None or ":" in reward.name


def _module_of(given: RewardGiven) -> _RewardModule:
    if not isinstance(given, str | Path):
        return _RewardModule("", getattr(given, "__name__", "reward"), given)
    text = str(given)
    module, _, function = text.rpartition(":") if ":" in text else (text, "", "")
    if not module.endswith(".py"):
        return _RewardModule(module, function)
    path = Path(os.path.expanduser(module)).resolve()
    if not path.is_file():
        raise RewardError(f"reward file {module!r} does not exist (looked for {path})")
    return _RewardModule(str(path), function)


def _functions(module: _RewardModule) -> list[str]:
    if module.function:
        return [f"{module.short}:{module.function}" if module.path else module.function]
    if not module.path.endswith(".py"):
        raise RewardError(f"name the function of {module.path}: {module.path}:reward")
    return [f"{module.short}:{name}" for name in install({}, Path(module.path))]
