"""Agents on stock packages, unmodified: each calls its tool, and what went through the address is what is trained."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from motet.agents.episode import AgentEpisode
from motet.agents.gateway import Gateway
from motet.tasks.episode import GroupContext
from motet.types import Message, Problem
from tests.captured import check_captured, none_scored
from tests.cases import few
from tests.scripted_model import CHAT, Script

ENVS = Path(__file__).resolve().parents[1] / ".envs"
TOOL = '<tool_call>{"name": "add_numbers",  "arguments": {"b": 3, "a": 2}}</tool_call>'
FINAL = '<tool_call>{"name": "final_answer", "arguments": {"answer": "5"}}</tool_call>'
CODE = "Thought: I add.\n<code>\nfinal_answer(add_numbers(2, 3))\n</code>"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo $((2 + 3))"
BASH = json.dumps({"name": "bash", "arguments": {"command": SUBMIT}})
AGENTS = {
    "openai_agents_responses": (TOOL, "It is 5."),
    "openai_agents_chat": (TOOL, "It is 5."),
    "openai_agents_streamed": (f"Let me see. {TOOL}", "It is 5."),
    "openai_agents_chat_streamed": (f"Let me see. {TOOL}", "It is 5."),
    "pydantic_ai": (TOOL, "It is 5."),
    "langgraph": (TOOL, "It is 5."),
    "smolagents": (TOOL, FINAL),
    "smolagents_code": (CODE,),
    "mini_swe_agent": (f"<tool_call>{BASH}</tool_call>",),
}
"""What the model says, turn by turn."""
EVERY_TIME = ("openai_agents_chat_streamed", "pydantic_ai", "langgraph", "smolagents", "mini_swe_agent")
REWRITE = frozenset({"smolagents"})
"""Those that write their own turns anew, so that each call begins a branch."""


@pytest.mark.parametrize("name", few(AGENTS, *EVERY_TIME))
def test_an_agent_of_a_stock_package_is_captured_token_by_token(name: str, tmp_path: Path) -> None:
    python = ENVS / ("mini" if name == "mini_swe_agent" else "agents") / "bin" / "python"
    if not python.is_file():
        pytest.skip("needs the environments of stock agents: make agents")
    answers = iter(AGENTS[name])
    script = Script(lambda *_: next(answers))

    async def main() -> tuple[AgentEpisode, str]:
        gateway = Gateway()
        gateway.open()
        context = GroupContext(Problem(0, (Message("user", "x"),), ""), CHAT, 1, script, none_scored, judged=False)
        episode = AgentEpisode(context, 0, "job", 9, 600.0)
        try:
            with gateway.serving(episode) as (url, key):
                process = await asyncio.create_subprocess_exec(
                    python, Path(__file__).with_name("stock_agents.py"), name, url, key,
                    stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                    cwd=tmp_path, env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
                )  # fmt: skip
                out, err = await process.communicate()
                assert process.returncode == 0, err.decode()[-2000:]
            return episode, out.decode()
        finally:
            await gateway.close()

    episode, printed = asyncio.run(main())
    rollout = episode.rollout({})
    assert "5" in printed
    assert [turn.text for turn in rollout.turns] == list(AGENTS[name])
    check_captured(rollout, script)
    assert len(rollout.branches) == (len(AGENTS[name]) if name in REWRITE else 1)
