"""Counts letters by the stock `openai` client; a second answer is worth half."""

import re

import openai

stock = openai.AsyncOpenAI(api_key="set for each episode")


async def run(problem, base_url, api_key):
    """Return the reward: 1 for a right answer at once, 0.5 for a right answer after the question."""
    client = stock.with_options(base_url=base_url, api_key=api_key)
    messages = [{"role": one.role, "content": one.content} for one in problem.messages]
    for worth in (1.0, 0.5):
        answer = await client.chat.completions.create(model="job", messages=messages)
        text = answer.choices[0].message.content
        if problem.answer in re.findall(r"\d+", text):
            return worth
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Are you sure?"}]
    return 0.0
