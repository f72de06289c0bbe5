"""Environments that ship: each runs with the package that it stands on, as a job names it."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from motet.config import EnvironmentConfig
from motet.core.errors import ConfigError, EnvironmentFault
from motet.core.types import Message, Problem, Rollout
from motet.environments.environments import EnvironmentWorkers
from motet.environments.episode import GroupContext
from motet.rewards.reward_http import Addresses
from motet.rewards.reward_walls import Walls
from motet.service.jobs.validation import Allowed, validated
from tests.support.captured import check_captured, none_scored
from tests.support.scripted_model import CHAT, Says, Script

ALLOWED = Allowed(False, {}, Addresses(), Walls(required=True))
SERVER = """
from mcp.server.mcpserver import MCPServer

server = MCPServer("till")
cents = 0

@server.tool()
def sell(price: int) -> str:
    "Sell something."
    global cents
    cents += price
    return f"{cents} cents"

@server.tool()
def refund() -> str:
    "Give money back."
    raise ValueError("nothing to give back")

server.run()
"""
PAGES = """
import asyncio

from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.types import ListToolsResult, Tool

TOOLS = [Tool(name=f"tool_{n}", input_schema={"type": "object"}) for n in range(3)]

async def listed(context, asked):
    n = int((asked and asked.cursor) or 0)
    return ListToolsResult(tools=TOOLS[n : n + 1], next_cursor=str(n + 1) if n < 2 else None)

async def main():
    server = Server("pages", on_list_tools=listed)
    async with stdio_server() as (reads, writes):
        await server.run(reads, writes, server.create_initialization_options())

asyncio.run(main())
"""
GYM = """
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

class Countdown(BaseTextEnv):
    def __init__(self, env_config=None, extras={}):
        super().__init__()
        self.left = int(extras["reward_spec"]["ground_truth"])

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": f"{self.left} left"}], {}

    def step(self, action):
        self.left -= len(action)
        said = [{"role": "user", "content": f"{self.left} left"}] if self.left > 0 else []
        return BaseTextEnvStepOutput(observations=said, reward=0.5, done=self.left <= 0, metadata={})
"""


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def rollouts(says: Says, n: int = 1, row: dict[str, Any] | None = None, **config: Any) -> tuple[Rollout, ...]:
    """Those of one group on a row."""
    script = Script(says)

    async def main() -> tuple[Rollout, ...]:
        workers = EnvironmentWorkers(EnvironmentConfig(**config), None, 1)
        try:
            await workers.open()
            problem = Problem(0, (Message("user", "Go."),), "7", row or {})
            return await workers.run_group(GroupContext(problem, CHAT, n, script, none_scored, seed=3, judged=False))
        finally:
            await workers.close()

    done = asyncio.run(main())
    for one in done:
        if n == 1 and not one.error:
            check_captured(one, script)
    return done


def replies(rollout: Rollout) -> list[str]:
    return [reply.content for turn in rollout.turns for reply in turn.replies]


def test_a_game_of_textarena_is_the_same_for_a_group_and_rewards_its_end():
    def bisects(index: int, turn: int, read: str) -> str:
        low, high = 1, 20
        for guess, hint in zip(guesses[index], [*read.split("The target number is ")][1:], strict=False):
            low, high = (guess + 1, high) if hint.startswith("higher") else (low, guess - 1)
        guesses[index].append((low + high) // 2)
        return str(guesses[index][-1])

    guesses: dict[int, list[int]] = {0: [], 1: []}
    first, second = rollouts(bisects, n=2, name="textarena", args={"game": "GuessTheNumber-v0"}, row={"seed": 11})
    assert (first.reward, first.error) == (1.0, "")
    assert guesses[0] == guesses[1]
    assert replies(first) == replies(second)
    assert len(guesses[0]) <= 5
    (lost,) = rollouts(lambda *_: "1", name="textarena", args={"game": "GuessTheNumber-v0"}, max_turns=1)
    assert (lost.reward, lost.error) == (0.0, "")


def test_a_class_written_for_skyrl_gym_runs_as_it_is(tmp_path):
    (tmp_path / "gym.py").write_text(GYM)
    (one,) = rollouts(lambda *_: "1234", name="skyrl_gym", args={"env": f"{tmp_path}/gym.py:Countdown"})
    assert one.opening[-1].content == "Go.\n\n7 left"
    assert (replies(one), one.reward) == (["3 left"], 1.0)
    (right,) = rollouts(lambda *_: "#### 7", name="skyrl_gym", args={"env": "gsm8k"})
    assert right.reward == 1.0
    with pytest.raises(EnvironmentFault, match=r"has no 'gsm9k'; there are .*gsm8k"):
        rollouts(lambda *_: "", name="skyrl_gym", args={"env": "gsm9k"})


def test_tools_of_an_mcp_server_are_listed_and_called(tmp_path):
    (tmp_path / "till.py").write_text(SERVER)
    says = [call("sell", price=40), call("sell", price=2) + call("refund"), call("steal"), "done"]
    (one,) = rollouts(
        lambda index, turn, read: says[turn],
        name="mcp",
        args={"command": sys.executable, "args": [f"{tmp_path}/till.py"]},
    )
    assert "Sell something." in one.opening[0].content
    said = replies(one)
    assert said[:2] == ["40 cents", "42 cents"]
    assert [text.startswith("Error: ") for text in said[2:]] == [True, True]


def test_tools_on_all_pages_of_an_mcp_server_are_listed(tmp_path):
    (tmp_path / "pages.py").write_text(PAGES)
    args = {"command": sys.executable, "args": [f"{tmp_path}/pages.py"]}
    (one,) = rollouts(lambda *_: "done", name="mcp", args=args)
    assert all(f'"tool_{n}"' in one.opening[0].content for n in range(3))


def test_python_and_a_shell_in_a_sandbox_share_files_and_reach_nothing_else():
    says = [
        call("python", code="print(open('given.txt').read()); open('x', 'w').write('4')"),
        call("shell", command="cat x; pwd; cat /etc/passwd"),
        call("python", code="import socket; socket.socket()"),
        "done",
    ]
    (one,) = rollouts(lambda index, turn, read: says[turn], name="sandbox", row={"files": {"given.txt": "3"}})
    first, second, third = replies(one)
    assert first == "3"
    assert second.startswith("4~\n")
    assert "Permission denied" in second
    assert "PermissionError" in third


def test_what_does_not_ship_is_told_and_a_service_runs_none_of_them():
    job = {"name": "j", "data": "toy:add", "reward": "exact"}
    with pytest.raises(ConfigError, match=r"must be single, retry,.*agent, or file"):
        validated({**job, "environment": "gym"}, ALLOWED)
    with pytest.raises(ConfigError, match="it runs programs on the server"):
        validated({**job, "environment": "sandbox"}, ALLOWED)
