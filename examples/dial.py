"""A dial that is turned to a number: an environment as TRL's `environment_factory` takes it, without a word of Motet's.

`python dial.py > dial.jsonl` writes its problems, with transcripts that show the form of a call, by any number of clicks.
"""

from __future__ import annotations

import inspect
import json
import random


class Dial:
    """One tool; what an episode is worth is where the dial stands in the end."""

    def reset(self, target: str, **row: object) -> str:
        """Begin an episode of a row; what is returned is added to its prompt."""
        self.target, self.place = int(target), 0
        return f"Turn the dial by {target}."

    def turn(self, clicks: int) -> str:
        """Turn the dial.

        Args:
            clicks: how far

        Returns:
            Where it stands then.
        """
        self.place += clicks
        return f"at {self.place}"

    def get_reward(self) -> float:
        """1 where it was turned to the number."""
        return float(self.place == self.target)


def row(rng: random.Random, number: int) -> dict[str, object]:
    """A problem, and a call of some clicks."""
    target, clicks = rng.randint(1, 6), rng.randint(1, 6)
    prompt = f"This is dial {number}."
    call = {"name": "turn", "arguments": json.dumps({"clicks": clicks})}
    messages = [
        {"role": "user", "content": f"{prompt}\n\nTurn the dial by {target}."},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": f"at {clicks}"},
        {"role": "assistant", "content": "Done."},
    ]
    summary = inspect.cleandoc(Dial.turn.__doc__ or "").partition("\n")[0]
    parameters = {"clicks": {"type": "integer", "description": "how far"}}
    schema = {"type": "object", "properties": parameters, "required": ["clicks"]}
    tools = [{"type": "function", "function": {"name": "turn", "description": summary, "parameters": schema}}]
    return {"prompt": prompt, "target": str(target), "messages": messages, "tools": tools}


if __name__ == "__main__":
    numbers = random.Random(0)
    for number in range(256):
        print(json.dumps(row(numbers, number)))
