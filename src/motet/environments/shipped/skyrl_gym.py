"""`environment: skyrl_gym`: text environments of the package `skyrl_gym`, and classes written for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import skyrl_gym

from motet.core.errors import EnvironmentFault
from motet.process.own_code import OwnCode

_OWN = OwnCode("environment", EnvironmentFault, ())


class Episode:
    """One episode of an environment with `init` and `step`."""

    def __init__(self, env: str, config: Mapping[str, Any] | None = None, **extras: Any) -> None:
        """`env` is a name in the package, or `file.py:Class`; it gets `extras` with the columns of the row."""
        self._env, self._config, self._extras = env, dict(config or {}), extras
        self._class = _OWN.find(env) if ":" in env else None
        if self._class is None and env not in skyrl_gym.registry:
            raise EnvironmentFault(f"environment skyrl_gym has no {env!r}; there are {', '.join(skyrl_gym.registry)}")

    def reset(self, prompt: str, answer: str, **row: Any) -> str:
        """Begin; the answer of the row is the ground truth."""
        extras = {"reward_spec": {"ground_truth": answer}, **row, **self._extras}
        make = self._class or (lambda **given: skyrl_gym.make(self._env, **given))
        self._running = make(env_config=self._config, extras=extras)
        given = [{"role": "user", "content": prompt}]
        messages, _ = self._running.init(given)
        return "\n\n".join(message["content"] for message in messages if message not in given)

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """Answer a turn."""
        said = self._running.step(text)
        observed = "\n\n".join(message["content"] for message in said["observations"])
        return observed or None, said["reward"], said["done"]

    def close(self) -> None:
        """End it."""
        self._running.close()
