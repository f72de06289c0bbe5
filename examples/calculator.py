"""A calculator on the stock openai-agents package.

`python calculator.py > calculator.jsonl` writes its questions, with transcripts of how an agent comes to their answers.
"""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING

import openai
from agents import Agent, AgentsException, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled

if TYPE_CHECKING:
    from motet import Problem

set_tracing_disabled(True)
INSTRUCTIONS = "Use the tool."
QUESTIONS = ("What is {a} minus {b}?", "Take {b} from {a}.", "How much more is {a} than {b}?")
stock = openai.AsyncOpenAI(api_key="set for each episode")


@function_tool
def subtract(a: int, b: int) -> str:
    """The difference a - b."""
    return str(a - b)


async def run(problem: Problem, base_url: str, api_key: str) -> float:
    """Return the reward: 1 for the right number."""
    model = OpenAIResponsesModel("job", stock.with_options(base_url=base_url, api_key=api_key))
    agent = Agent(name="calculator", instructions=INSTRUCTIONS, tools=[subtract], model=model)
    try:
        done = await Runner.run(agent, problem.messages[-1].content, max_turns=3)
    except AgentsException:  # it called a tool that is not there, or came to no end
        return 0.0
    return float(re.findall(r"-?\d+", str(done.final_output))[-1:] == [problem.answer])


def row(rng: random.Random) -> dict[str, object]:
    """A question, its answer, and how an agent comes to it."""
    a, b = rng.randint(40, 99), rng.randint(11, 39)
    question, answer = rng.choice(QUESTIONS).format(a=a, b=b), str(a - b)
    schema = {"name": subtract.name, "description": subtract.description, "parameters": subtract.params_json_schema}
    call = {"name": subtract.name, "arguments": json.dumps({"a": a, "b": b})}
    messages = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": answer},
        {"role": "assistant", "content": f"It is {answer}."},
    ]
    tools = [{"type": "function", "function": schema}]
    return {"question": question, "answer": answer, "messages": messages, "tools": tools}


if __name__ == "__main__":
    numbers = random.Random(0)
    for _ in range(400):
        print(json.dumps(row(numbers)))
