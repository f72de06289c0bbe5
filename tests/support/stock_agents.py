"""A calculator with one tool on each of several stock packages, as their documentation has it: `stock_agents.py NAME URL KEY`.

Runs in an environment of its own, and knows nothing of Motet.
"""

from __future__ import annotations

import asyncio
import os
import sys

QUESTION = "What is 2 + 3?"


def add_numbers(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: one of them
        b: the other
    """
    return str(a + b)


async def openai_agents(url, key, chat=False):
    import openai
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=url, api_key=key)
    model = OpenAIChatCompletionsModel("job", client) if chat else OpenAIResponsesModel("job", client)
    return Runner, Agent(
        name="calculator", instructions="Use the tool.", tools=[function_tool(add_numbers)], model=model
    )


async def openai_agents_responses(url, key):
    runner, agent = await openai_agents(url, key)
    return (await runner.run(agent, QUESTION)).final_output


async def openai_agents_chat(url, key):
    runner, agent = await openai_agents(url, key, chat=True)
    return (await runner.run(agent, QUESTION)).final_output


async def openai_agents_streamed(url, key):
    runner, agent = await openai_agents(url, key)
    result = runner.run_streamed(agent, QUESTION)
    async for _ in result.stream_events():
        pass
    return result.final_output


async def openai_agents_chat_streamed(url, key):
    runner, agent = await openai_agents(url, key, chat=True)
    result = runner.run_streamed(agent, QUESTION)
    async for _ in result.stream_events():
        pass
    return result.final_output


async def pydantic_ai(url, key):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("job", provider=OpenAIProvider(base_url=url, api_key=key))
    agent = Agent(model, instructions="Use the tool.", tools=[add_numbers])
    return (await agent.run(QUESTION)).output


async def langgraph(url, key):
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(ChatOpenAI(model="job", base_url=url, api_key=key), [tool(add_numbers)])
    result = await agent.ainvoke({"messages": [("user", QUESTION)]})
    return result["messages"][-1].content


async def smolagents(url, key):
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel("job", api_base=url, api_key=key)
    agent = ToolCallingAgent(tools=[tool(add_numbers)], model=model, max_steps=3, verbosity_level=0)
    return agent.run(QUESTION)


async def smolagents_code(url, key):
    from smolagents import CodeAgent, OpenAIServerModel, tool

    model = OpenAIServerModel("job", api_base=url, api_key=key)
    return CodeAgent(tools=[tool(add_numbers)], model=model, max_steps=3, verbosity_level=0).run(QUESTION)


async def mini_swe_agent(url, key):
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    given = {"api_base": url, "api_key": key}
    model = LitellmModel(model_name="openai/job", model_kwargs=given, cost_tracking="ignore_errors")
    agent = DefaultAgent(model, LocalEnvironment(), system_template="Use bash.", instance_template="{{ task }}")
    return agent.run(QUESTION)["submission"]


async def verifiers(url, key, harness="sums_taskset", **env):
    """Through the agent that ships with Motet."""
    from motet.core.types import Problem
    from motet.environments.verifiers import rows, run

    role = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
    env = {"taskset": {"id": "sums_taskset"}, **(env or {"agent": role})}
    row, *_ = rows(env, 1)
    return f"{row['task']['answer']}: {await run(Problem(0, (), '', row), url, key, env)}"


async def verifiers_null(url, key):
    return await verifiers(url, key, harness="null")


async def verifiers_user_sim(url, key, **user):
    role = {"harness": {"id": "sums_taskset"}, "runtime": {"type": "subprocess"}}
    user = {**role, "sampling": {"train": False}, **user}
    return await verifiers(url, key, id="user-sim", assistant=role, user=user)


async def verifiers_user_sim_trained(url, key):
    return await verifiers_user_sim(url, key, sampling={})


if __name__ == "__main__":
    name, url, key = sys.argv[1:]
    print(asyncio.run(globals()[name](url, key)))
