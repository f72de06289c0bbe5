"""An agent reads and is answered the same tokens from a service as in the episodes that trained it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from motet.chat.template import Chat, stop_token_ids
from motet.core.device import Device
from motet.core.types import AdapterRef, Chunk, GenerateRequest, IntArray, Message, Problem, SamplingParams
from motet.environments.agent_episode import AgentEpisode
from motet.environments.agent_runner import Gateway
from motet.environments.episode import GroupContext
from motet.model.load import load_base
from motet.rollout.embedded import EmbeddedEngine
from tests.support.captured import none_scored
from tests.support.service_run import Service, tiny

pytestmark = pytest.mark.slow
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALLED: Any = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
Turns = list[tuple[list[int], list[int]]]
"""What the model read and what it sampled, turn by turn."""


@pytest.fixture(scope="module")
def service(shared_service: Service) -> Service:
    """With an adapter that was trained."""
    shared_service.submit(tiny("sums", 2, optimizer={"lr": 0.01}))
    assert shared_service.ended("sums") == "succeeded"
    return shared_service


async def agent(url: str, key: str, question: str) -> Turns:
    """A call of its tool is part of its history, and it goes on for three turns."""
    messages: list[Any] = [
        {"role": "system", "content": "Use the tool."},
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "call_1", "content": "5"},
        {"role": "user", "content": question},
    ]
    turns: Turns = []
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        for _ in range(3):
            asked: Any = {
                "model": "sums@latest",
                "messages": messages,
                "tools": [ADD],
                "max_tokens": 12,
                "temperature": 0,
            }
            said = await client.chat.completions.create(**asked, extra_body={"return_token_ids": True})
            choice: Any = said.choices[0]
            turns.append((said.to_dict()["prompt_token_ids"], choice.to_dict()["token_ids"]))
            messages.append({"role": "assistant", "content": choice.message.content})
            messages.append({"role": "tool", "tool_call_id": "call_2", "content": "7"})
    return turns


async def episode(adapter: Path, question: str) -> Turns:
    """The same agent under the address of an episode, whose policy is greedy."""
    device = Device()
    base = load_base("small", device="cpu", dtype="float32")
    engine = EmbeddedEngine(base, device, max_rows=4, kv_tokens=2048, prefill_tokens=256)
    policy, tokenizer = AdapterRef("sums", 2), base.info.tokenizer
    await engine.load_adapter(policy, adapter)

    async def generate(
        ids: IntArray, indices: tuple[int, ...], turn: int, sampling: SamplingParams | None = None
    ) -> list[Chunk]:
        assert sampling is not None
        ends = stop_token_ids(tokenizer, base.info.eos_token_ids)
        greedy = replace(sampling, temperature=0.0, stop_token_ids=ends)
        request = GenerateRequest(f"turn/{turn}", "sums", ids, policy, greedy, indices)
        return [chunk async for chunk in engine.generate(request)]

    context = GroupContext(Problem(0, (Message("user", "x"),), ""), Chat.plain(tokenizer), 1, generate, none_scored)
    gateway = Gateway()
    gateway.open()
    try:
        with gateway.serving(AgentEpisode(context, 0, "sums", 9, 600.0)) as (url, key):
            return await agent(url, key, question)
    finally:
        await gateway.close()
        device.close()


@pytest.mark.parametrize("question", ["And 4 more?", "Sort the letters of dca."])
def test_an_agent_is_answered_token_by_token_as_it_was_trained(service: Service, question: str, tmp_path: Path) -> None:
    for name, content in service.adapter("sums", "latest").items():
        (tmp_path / name).write_bytes(content)
    trained = asyncio.run(episode(tmp_path, question))
    served = asyncio.run(agent(f"{service.url}/v1", "any", question))
    assert [sampled for _, sampled in served] == [sampled for _, sampled in trained]
    assert [read for read, _ in served] == [read for read, _ in trained]
    assert trained[-1][0][: len(trained[0][0])] == trained[0][0]
