"""A calculator in two ways: a class with a tool, as TRL has them, and an agent on the stock openai client."""

import json

import openai

stock = openai.AsyncOpenAI(api_key="set for each episode")
INTEGER = {"type": "integer"}
PARAMETERS = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "required": ["a", "b"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}]


class Calculator:
    """What it added last is what counts."""

    def reset(self, answer, **row):
        """Begin with a problem."""
        self.answer, self.sum = int(answer), None

    def add(self, a: int, b: int) -> int:
        """Add."""
        self.sum = a + b
        return self.sum

    def get_reward(self) -> float:
        """1 for the right sum."""
        return float(self.sum == self.answer)


async def run(problem, base_url, api_key):
    """1 where the last word is the right answer, after as many calls of the tool as the model wants."""
    client = stock.with_options(base_url=base_url, api_key=api_key)
    messages = [{"role": one.role, "content": one.content} for one in problem.messages]
    for _ in range(3):
        answer = await client.chat.completions.create(model="job", messages=messages, tools=TOOLS)
        said = answer.choices[0].message
        if not said.tool_calls:
            return float(said.content.strip() == problem.answer)
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            try:
                numbers = json.loads(call.function.arguments)
                content = str(int(numbers["a"]) + int(numbers["b"]))
            except (KeyError, TypeError, ValueError) as error:
                content = f"Error: {error!r}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return 0.0
