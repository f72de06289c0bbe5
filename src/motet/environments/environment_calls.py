"""Calls of an environment or an agent, in the process that runs it.

An agent is a user's function, `async` or not, with any of the parameters `problem`, `base_url`, `api_key`, `deadline`,
`seed` and the job's `args`. It returns a number, rewards by the ids of calls, or None. Many run at once.

An environment is a user's class; each episode has an instance. It implements one or both of two forms:

    def reset(self, **row) -> str | None      # columns of the row; the result is added to the prompt
    def any_public_method(self, x: int) -> str    # a tool, by its signature and docstring (TRL's environments)
    def step(self, text) -> str | None | tuple    # the reply to a turn, or (text, reward[, done]); None ends the episode
    def get_reward(self) -> float             # of the whole episode
    def list_tools(self) -> list              # schemas of further tools,
    def call_tool(self, name, arguments)      # which are called with this
    role: str                                 # the role of a team with the next turn; rewards may be dicts of role to number
    done: bool                                # True ends the episode
    reward: float                             # of the whole episode, if neither these nor the job give a reward
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import math
import re
import sys
import time
import typing
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError, validate_call

from motet.core.errors import EnvironmentFault
from motet.core.plain_json import as_json
from motet.core.types import MOST_ROLES
from motet.environments import environment_messages as m
from motet.process.own_code import OwnCode, describe
from motet.workers.worker_limits import WorkerLimits, seed_random
from motet.workers.worker_messages import StopCall

MESSAGES = m.LoadObject | m.EpisodeCall | m.RunAgent | StopCall
OWN = OwnCode("environment", EnvironmentFault, ("single", "retry"))
_NOT_TOOLS = frozenset({"reset", "step", "get_reward", "close", "list_tools", "call_tool"})
_THREADS = 256
"""Most agents that run at once and are not coroutines."""
_OF_AN_AGENT = ": an agent returns a finite number, rewards by the ids of calls, or None"
_LONGEST_ROLE = 100
"""Characters of a role that are kept."""
_ARGS = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?:\s*(.+)$")


class Environments:
    """Instances of one class, by the names of their episodes."""

    def __init__(self, name: str, own: Any, args: Mapping[str, Any]) -> None:
        """Raises EnvironmentFault if the class is not an environment."""
        self._class, self._args = own, dict(args)
        if not isinstance(own, type):
            raise EnvironmentFault(f"environment {name!r} is {type(own).__name__}, neither a class nor a function")
        self._tools = {
            tool: member
            for tool, member in inspect.getmembers(self._class, callable)
            if not tool.startswith("_") and tool not in _NOT_TOOLS
        }
        self._lists = hasattr(self._class, "list_tools")
        if not self._tools and not self._lists and not hasattr(self._class, "step"):
            raise EnvironmentFault(
                f"environment {name!r} has neither a public method, which would be a tool, nor step(text): the model could do "
                "nothing in it"
            )
        self._instances: dict[str, Any] = {}

    def about(self) -> m.ObjectLoaded:
        """Description of the class for the parent."""
        tools = tuple(_schema(name, function) for name, function in self._tools.items())
        first = self._class(**self._args)  # report invalid arguments before the first episode
        try:
            tools += tuple(first.list_tools()) if self._lists else ()
        finally:
            with contextlib.suppress(Exception):  # it may close what `reset` opens
                _close(first)
        steps, judges = (hasattr(self._class, name) for name in ("step", "get_reward"))
        return m.ObjectLoaded(tools, steps, judges)

    def answer(self, episode: str, action: m.AnyAction) -> m.EpisodeReply:
        """One call of an episode."""
        if isinstance(action, m.Reset):
            return self._reset(episode, action.row)
        if isinstance(action, m.Close):
            _close(self._instances.pop(episode, None))
            return m.EpisodeReply()
        instance = self._instances[episode]
        match action:
            case m.EnvironmentStep():
                return self._step(instance, action.text)
            case m.CallTool():
                return self._call(instance, action.name, action.arguments)
            case m.JudgeEpisode():
                reward, rewards = _worth(instance)
                return m.EpisodeReply(reward=reward, rewards=rewards)

    def _reset(self, episode: str, row: Mapping[str, Any]) -> m.EpisodeReply:
        instance = self._instances[episode] = self._class(**self._args)
        reset = getattr(instance, "reset", None)
        if reset is None:
            return m.EpisodeReply(role=_role(instance))
        parameters = inspect.signature(reset).parameters
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        said = reset(**{name: value for name, value in row.items() if open_ended or name in parameters})
        if not isinstance(said, str | None):
            raise TypeError(f"reset returned {type(said).__name__}, not text or None")
        return m.EpisodeReply(text=said or "", role=_role(instance), done=_done(instance))

    def _step(self, instance: Any, text: str) -> m.EpisodeReply:
        said = instance.step(text)
        parts = said if isinstance(said, tuple) else (said,)
        reply, reward, done = (*parts, *(None, None)[: 3 - len(parts)]) if len(parts) < 3 else parts[:3]
        if not isinstance(reply, str | None):
            raise TypeError(f"step returned {type(reply).__name__}, not text, None, or (text, reward, done)")
        number, numbers = _numbers(reward, "step returned")
        ended = _done(instance) or bool(done) or reply is None
        return m.EpisodeReply(text=reply or "", reward=number, rewards=numbers, role=_role(instance), done=ended)

    def _call(self, instance: Any, name: str, arguments: Mapping[str, Any]) -> m.EpisodeReply:
        """Call a tool. The model reads its error if it fails."""
        if name in self._tools:
            tool = validate_call(config=ConfigDict(arbitrary_types_allowed=True))(getattr(instance, name))
        elif self._lists:
            tool = functools.partial(_listed, instance, name)
        else:
            text = f"Error: there is no tool {name!r}; there are {', '.join(self._tools)}"
            return m.EpisodeReply(text=text, done=_done(instance))
        try:
            said = tool(**arguments)
            said = (
                said if isinstance(said, str) else json.dumps(as_json(said, infinite_as_text=True), ensure_ascii=False)
            )
        except ValidationError as error:
            mistakes = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
            said = f"Error: {mistakes}"
        except Exception as error:  # a tool's own: the model may do better next time
            said = f"Error: {describe(error)}"
        return m.EpisodeReply(text=said, done=_done(instance))


def _listed(instance: Any, name: str, /, **arguments: Any) -> Any:
    return instance.call_tool(name, arguments)


def _close(instance: Any) -> None:
    if hasattr(instance, "close"):
        instance.close()


def _worth(instance: Any) -> tuple[float | None, dict[str, float]]:
    """Reward of an episode, or those of roles; falls back to `reward`, which TRL's functions set."""
    if hasattr(instance, "get_reward"):
        return _numbers(instance.get_reward(), "get_reward returned", none=False)
    worth = getattr(instance, "reward", None)
    return _numbers(None if callable(worth) else worth, "self.reward is")


def _role(instance: Any) -> str:
    role = getattr(instance, "role", "")
    return role[:_LONGEST_ROLE] if isinstance(role, str) else ""


def _numbers(value: Any, of: str, *, none: bool = True) -> tuple[float | None, dict[str, float]]:
    """A reward for all, or rewards by role; with `none`, None is no reward."""
    if isinstance(value, Mapping) and len(value) <= MOST_ROLES:
        return None, {str(role)[:_LONGEST_ROLE]: _number(reward, of) for role, reward in value.items()}
    return (None if value is None and none else _number(value, of)), {}


def _done(instance: Any) -> bool:
    return getattr(instance, "done", False) is True


def _number(value: Any, of: str, but: str = ", not a finite number") -> float:
    number = float(value) if hasattr(value, "__float__") and not isinstance(value, str) else math.nan
    if not math.isfinite(number):
        raise ValueError(f"{of} {value!r:.80}{but}")
    return number


def _schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """A tool as chat templates have it: parameters from the signature, descriptions from the docstring's `Args:`."""
    hints = typing.get_type_hints(function)
    parameters = [parameter for key, parameter in inspect.signature(function).parameters.items() if key != "self"]
    summary, _, rest = inspect.cleandoc(function.__doc__ or "").partition("\n")
    matches = filter(None, map(_ARGS.match, rest.splitlines()))
    descriptions = {match[1]: match[2] for match in matches}
    properties = {}
    for parameter in parameters:
        schema = TypeAdapter(hints.get(parameter.name, str), config=None).json_schema()
        properties[parameter.name] = {
            **schema,
            **({"description": descriptions[parameter.name]} if parameter.name in descriptions else {}),
        }
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    arguments = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": summary, "parameters": arguments}}


def load(first: m.LoadObject) -> tuple[m.ObjectLoaded, Callable[[Any], Any]]:
    """Load the class or the agent. Raises EnvironmentFault if it does not load, or is neither."""
    sys.path[:] = first.import_path
    own = OWN.find(first.name)
    if first.agent or inspect.isfunction(own):
        threads = ThreadPoolExecutor(_THREADS, "motet-agent")
        return m.ObjectLoaded(agent=True), functools.partial(_run_agent, own, first.args, threads)
    try:
        environments = Environments(first.name, own, first.args)
        about = environments.about()
    except EnvironmentFault:
        raise
    except Exception as error:  # the file's own, a signature that has no schema
        raise EnvironmentFault(describe(error)) from error
    limits = WorkerLimits()

    def answer(call: m.EpisodeCall) -> m.EpisodeReply:
        seed_random(zlib.crc32(json.dumps([call.seed, call.number]).encode()))
        reply, error, exceeded = limits.run(
            lambda: environments.answer(call.episode, call.action), "environment", call.cpu_seconds, call.memory_mb
        )
        if reply is not None:
            return reply
        where = "" if exceeded else f"{call.action.__struct_config__.tag}: "
        return m.EpisodeReply(error=f"{where}{error}", exceeded=exceeded)

    return about, answer


# --- agents --------------------------------------------------------------------------------------------------------------


async def _run_agent(
    agent: Callable[..., Any], args: Mapping[str, Any], threads: ThreadPoolExecutor, request: m.RunAgent
) -> m.AgentReturned:
    offered = {
        "problem": request.problem,
        "base_url": request.base_url,
        "api_key": request.api_key,
        "deadline": request.deadline,
        "seed": request.seed,
        **args,
    }
    thread: Future[Any] | None = None
    try:
        async with asyncio.timeout(max(0.0, request.deadline - time.time())) as time_left:
            call = functools.partial(agent, **_taken(agent, offered))
            if inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(type(agent).__call__):
                returned = await call()
            else:
                returned = await asyncio.wrap_future(thread := threads.submit(_called, call))
        if time_left.expired():  # it was interrupted, but continued
            raise TimeoutError
        by_id = returned if isinstance(returned, Mapping) else {}
        rewards = {str(name): _number(value, "returned", _OF_AN_AGENT) for name, value in by_id.items()}
        whole = None if returned is by_id or returned is None else _number(returned, "returned", _OF_AN_AGENT)
        return m.AgentReturned(whole, rewards)
    except BaseException as error:  # whatever an agent raises, or the end of its time
        me = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and me is not None and me.cancelling():
            return m.AgentReturned(error="was stopped")  # nobody waits for it, but each call has a reply
        if isinstance(error, TimeoutError) and time.time() >= request.deadline:
            hangs = thread is not None and thread.running()
            return m.AgentReturned(error=m.LATE, late=True, hangs=hangs)
        return m.AgentReturned(error=describe(error))


def _called(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except StopIteration as error:  # no future takes it: its rollout would wait until the end of its time
        raise RuntimeError("agent raised StopIteration").with_traceback(error.__traceback__) from error


def _taken(agent: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(agent).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(offered)
    return {name: value for name, value in offered.items() if name in parameters}
