"""The process in which environments run: `python -m motet.tasks.environment_process PARENT_PID`.

First line in: which class; first line out: `{"tools": […], "judges": …}` or `{"error": …}`. Then calls of episodes, each of
which has an instance of the class, one reply each. A class of a person's own is written in one of two ways, or in both:

    def reset(self, **row) -> str | None      # columns of the row; what it returns is added to the prompt
    def any_public_method(self, x: int) -> str    # a tool, by its signature and docstring (TRL's environments)
    def step(self, text) -> str | None | tuple    # what is said to a turn, or (text, reward[, done]); None ends the episode
    def get_reward(self) -> float             # of the whole episode
    done: bool                                # once true, the episode has ended
"""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
import typing
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError, validate_call

from motet.errors import EnvironmentFault
from motet.own_code import OwnCode, describe
from motet.tasks.worker_process import CpuLimitError, Limits, Read, Write, run, seed_random

OWN = OwnCode("environment", EnvironmentFault, ("single", "retry"))
_NOT_TOOLS = frozenset({"reset", "step", "get_reward", "close"})
_ARGS = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?:\s*(.+)$")


class Environments:
    """Instances of one class, by the names of their episodes."""

    def __init__(self, name: str, args: Mapping[str, Any]) -> None:
        """Load the class.

        Raises:
            EnvironmentFault: it is not there, or is no environment.
        """
        self._class, self._args = OWN.find(name), dict(args)
        if not isinstance(self._class, type):
            raise EnvironmentFault(f"environment {name!r} is {type(self._class).__name__}, not a class")
        self._tools = {
            tool: member
            for tool, member in inspect.getmembers(self._class, callable)
            if not tool.startswith("_") and tool not in _NOT_TOOLS
        }
        if not self._tools and not hasattr(self._class, "step"):
            raise EnvironmentFault(
                f"environment {name!r} has neither a public method, which would be a tool, nor step(text): the model could do "
                "nothing in it"
            )
        self._instances: dict[str, Any] = {}

    def about(self) -> dict[str, Any]:
        """What the parent has to know of the class."""
        tools = [_schema(name, function) for name, function in self._tools.items()]
        return {"tools": tools, "steps": hasattr(self._class, "step"), "judges": hasattr(self._class, "get_reward")}

    def reset(self, episode: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """Begin an episode."""
        instance = self._instances[episode] = self._class(**self._args)
        reset = getattr(instance, "reset", None)
        if reset is None:
            return {"text": ""}
        parameters = inspect.signature(reset).parameters
        open_ended = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        said = reset(**{name: value for name, value in row.items() if open_ended or name in parameters})
        if not isinstance(said, str | None):
            raise TypeError(f"reset returned {type(said).__name__}, not text or None")
        return {"text": said or "", **self._state(instance)}

    def step(self, episode: str, text: str) -> dict[str, Any]:
        """Say something to a turn without a tool call."""
        instance = self._instances[episode]
        said = instance.step(text)
        parts = said if isinstance(said, tuple) else (said,)
        reply, reward, done = (*parts, *(None, None)[: 3 - len(parts)]) if len(parts) < 3 else parts[:3]
        if not isinstance(reply, str | None):
            raise TypeError(f"step returned {type(reply).__name__}, not text, None, or (text, reward, done)")
        state = self._state(instance)
        return {
            "text": reply or "",
            "reward": None if reward is None else _number(reward, "step"),
            "done": state["done"] or bool(done) or reply is None,
        }

    def call(self, episode: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Call a tool; what goes wrong in it is told to the model."""
        instance = self._instances[episode]
        if name not in self._tools:
            return {
                "text": f"Error: there is no tool {name!r}; there are {', '.join(self._tools)}",
                **self._state(instance),
            }
        checked = validate_call(config=ConfigDict(arbitrary_types_allowed=True))(getattr(instance, name))
        try:
            said = checked(**arguments)
        except ValidationError as error:
            mistakes = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            said = f"Error: {mistakes}"
        except Exception as error:  # a tool's own: the model may do better next time
            said = f"Error: {describe(error)}"
        return {"text": said if isinstance(said, str) else json.dumps(said, default=str), **self._state(instance)}

    def reward(self, episode: str) -> dict[str, Any]:
        """What the whole episode is worth."""
        return {"reward": _number(self._instances[episode].get_reward(), "get_reward")}

    def close(self, episode: str) -> dict[str, Any]:
        """Let go of an instance."""
        instance = self._instances.pop(episode, None)
        if hasattr(instance, "close"):
            instance.close()
        return {}

    @staticmethod
    def _state(instance: Any) -> dict[str, Any]:
        return {"done": getattr(instance, "done", False) is True}


def _number(value: Any, of: str) -> float:
    number = float(value) if hasattr(value, "__float__") and not isinstance(value, str) else math.nan
    if not math.isfinite(number):
        raise ValueError(f"{of} returned {value!r:.80}, not a finite number")
    return number


def _schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """A tool as chat templates have it: parameters from the signature, descriptions from the docstring's `Args:`."""
    hints = typing.get_type_hints(function)
    parameters = [one for key, one in inspect.signature(function).parameters.items() if key != "self"]
    summary, _, rest = inspect.cleandoc(function.__doc__ or "").partition("\n")
    matches = filter(None, map(_ARGS.match, rest.splitlines()))
    descriptions = {match[1]: match[2] for match in matches}
    properties = {}
    for one in parameters:
        schema = TypeAdapter(hints.get(one.name, str), config=None).json_schema()
        properties[one.name] = {
            **schema,
            **({"description": descriptions[one.name]} if one.name in descriptions else {}),
        }
    required = [one.name for one in parameters if one.default is one.empty]
    arguments = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": summary, "parameters": arguments}}


def answer(environments: Environments, limits: Limits, request: dict[str, Any]) -> dict[str, Any]:
    """One call of an episode, within its limits; `exceeded` where this process should not be trusted with another."""
    cpu_seconds, memory_mb = request.pop("cpu_seconds"), request.pop("memory_mb")
    seed_random(zlib.crc32(json.dumps([request.pop("seed"), request.pop("number")]).encode()))
    do, reply, exceeded = request.pop("do"), {"error": ""}, ""
    try:
        with limits.of(cpu_seconds, memory_mb):
            reply |= getattr(environments, do)(**request)
    except CpuLimitError:
        exceeded = "cpu"
    except MemoryError:
        exceeded = "memory"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an environment may call sys.exit too
        reply["error"] = f"{do}: {describe(error)}"
    if limits.fired or exceeded == "cpu":
        reply = {
            "error": f"took more than {cpu_seconds:g} s of CPU time (environment field cpu_seconds)",
            "exceeded": "cpu",
        }
    elif exceeded:
        reply = {
            "error": f"took more than {memory_mb} MB of memory (environment field memory_mb)",
            "exceeded": "memory",
        }
    return reply


def serve(read: Read, write: Write) -> None:
    """Load the class, then answer calls until the input ends."""
    first = json.loads(read())
    sys.path[:] = first["sys_path"]
    try:
        environments = Environments(first["name"], first["args"])
        about = environments.about()
    except Exception as error:  # the file's own, a signature that has no schema
        message = str(error) if isinstance(error, EnvironmentFault) else describe(error)
        write({"error": message})
        return
    write(about)
    limits = Limits()
    while line := read():
        write(answer(environments, limits, json.loads(line)))


if __name__ == "__main__":
    run(serve)
