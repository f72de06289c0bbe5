"""Sums for the package `verifiers`: a taskset, and a harness that needs no program of its own.

The harnesses that ship with the package start theirs by uv, which fetches packages.
"""

from __future__ import annotations

import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Direct", "Sums"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for a in range(2, 6):
            yield SumTask(SumData(prompt=f"What is {a} + 3?", answer=str(a + 3)), self.config.task)


class Direct(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or ())
        messages = [*([{"role": "system", "content": system}] if system else []), *said]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            stream = await client.chat.completions.create(model=ctx.model, messages=messages, stream=True)
            async for _ in stream:
                pass
        return ProgramResult(exit_code=0, stdout="", stderr="")
