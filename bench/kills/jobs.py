"""The jobs of `bench.kills`: own code that says where it is, and a job of each kind on the small base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Json = dict[str, Any]

PLACES = "MOTET_KILLS"
"""Environment variable with the directory where own code leaves a file at each load and at each first call."""
CODE = '''
import asyncio
import os
import re
import time

import openai

from motet.algorithms import Grpo

stock = openai.AsyncOpenAI(api_key="set for each episode")
begun = set()


def here(kind, what):
    """Say that this process does something for the first time, and do it for long enough to be met there."""
    if "MOTET_KILLS" in os.environ and (kind, what) not in begun:
        begun.add((kind, what))
        open(os.path.join(os.environ["MOTET_KILLS"], f"{kind}-{what}-{os.getpid()}"), "w").close()
        time.sleep(0.03)


here("any", "load")


def letters(text):
    return sum(one.isalpha() for one in text) / (1 + len(text))


def plain(problem, completion):
    here("plain", "call")
    return letters(completion)


async def waits(problem, completion):
    here("async", "call")
    await asyncio.sleep(0.01)
    return letters(completion) + len(completion) / 100


def batch(prompts, completions, answer, trainer_state, log_metric, **columns):
    here("batch", "call")
    log_metric("long", sum(map(len, completions)))
    return [letters(text) * (1 + trainer_state.global_step) for text in completions]


def ranked(problem, completions):
    here("ranked", "call")
    longest = max(map(len, completions)) or 1
    return [1 - len(text) / longest for text in completions]


class Judge:
    """A reward that keeps nothing between its calls but itself."""

    def __init__(self):
        self.weight = 2.0

    def __call__(self, problem, completion):
        here("object", "call")
        return self.weight * letters(completion)


judge = Judge()


class Till:
    """An environment whose tools are called."""

    def reset(self, answer, **row):
        here("tools", "reset")
        self.answer, self.cents = answer, 0

    def sell(self, item: str, price: int) -> str:
        """Sell something.

        Args:
            item: what is sold
            price: of one, in cents
        """
        here("tools", "tool")
        self.cents += price
        return f"{self.cents} cents in the till"

    def step(self, text):
        here("tools", "step")
        return "Call sell.", letters(text)

    def get_reward(self):
        return self.cents / 100


class Guess:
    """An environment that answers each turn."""

    def reset(self, answer, **row):
        here("turns", "reset")
        self.answer, self.turns = answer, 0

    def step(self, text):
        here("turns", "step")
        self.turns += 1
        return (None if self.turns == 3 else "again"), letters(text)


class Halves:
    """Two roles in turn."""

    def reset(self, **row):
        here("team", "reset")
        self.role, self.planned, self.solved = "planner", 0.0, 0.0

    def step(self, text):
        here("team", "step")
        if self.role == "solver":
            self.solved = letters(text)
            return None
        self.planned, self.role = letters(text), "solver"
        return f"What is the last letter of {text[-8:]}?"

    def get_reward(self):
        return {"planner": self.planned, "solver": self.solved}


async def agent(problem, base_url, api_key):
    """Two turns of the stock client."""
    here("agent", "call")
    client = stock.with_options(base_url=base_url, api_key=api_key)
    messages = [{"role": one.role, "content": one.content} for one in problem.messages]
    worth = 0.0
    for _ in range(2):
        answer = await client.chat.completions.create(model="job", messages=messages)
        text = answer.choices[0].message.content
        worth += letters(text)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Are you sure?"}]
    return worth


class Doubled(Grpo):
    """An own algorithm: advantages are twice as large."""

    def advantages(self, groups, max_tokens):
        return [[2.0 * value for value in values] for values in super().advantages(groups, max_tokens)]
'''
TAUGHT: list[Json] = [{"prompt": f"Say {i}", "answer": f"Well, {i}."} for i in range(40)]
LIKED: list[Json] = [{"prompt": f"Say {i}", "chosen": f"Well, {i}.", "rejected": f"No: {i}!"} for i in range(40)]
RATED: list[Json] = [{"prompt": f"Say {i}", "completion": f"Well, {i}.", "label": i % 3 > 0} for i in range(40)]
SOFT: list[Json] = [
    {
        "prompt": f"Say {i}",
        "token_ids": [5 + i, 7],
        "top_ids": [[5 + i, 9], [7, 8]],
        "top_logprobs": [[-0.1, -2.4], [-0.2, -1.8]],
    }
    for i in range(40)
]


def jobs(place: Path, steps: int) -> list[Json]:
    """A job of each kind; writes its own code and its rows."""
    place.mkdir(parents=True, exist_ok=True)
    code = place / "own.py"
    code.write_text(CODE)
    groups = {"group_size": 4, "groups_per_step": 2}

    def rows(name: str, found: list[Json]) -> Json:
        file = place / f"{name}.jsonl"
        file.write_text("".join(f"{json.dumps(row)}\n" for row in found))
        return {"source": str(file), "holdout": 2}

    def job(name: str, data: Any = "toy:sort_letters", **fields: Any) -> Json:
        source = data if isinstance(data, dict) else {"source": data, "size": 64, "holdout": 2}
        return {
            "name": name, "data": source, "steps": steps, "adapter": {"rank": 4}, "optimizer": {"lr": 0.005},
            "sampling": {"max_tokens": 8}, "algorithm": groups, "eval": {"every": 2}, "checkpoint": {"keep": 100},
            **fields,
        }  # fmt: skip

    def own(name: str) -> str:
        return f"{code}:{name}"

    judged = {"type": "label_model", "model": "base", "labels": ["odd", "even"], "passing_labels": ["odd"]}
    judged["input"] = "Is {{sample.output_text}} odd or even?"
    return [
        job("grpo", reward="exact"),
        job("lagging", reward=own("plain"), algorithm={**groups, "max_off_policy_steps": 2}),
        job("seldom", reward="exact", checkpoint={"keep": 100, "every": 3}),
        job("dapo", reward=own("plain"), algorithm={"type": "dapo", **groups}),
        job("async", reward=own("waits"), algorithm={"type": "rloo", **groups}),
        job("batch", reward={own("batch"): 1.0, "exact": 0.0}, algorithm={"type": "gspo", **groups}),
        job("ranked", reward=own("ranked"), algorithm={"type": "dr_grpo", "kl": {"coef": 0.05}, **groups}),
        job("object", reward=own("judge")),
        job("sft", rows("taught", TAUGHT), algorithm={"type": "sft", "rows_per_step": 4}),
        job("dpo", rows("liked", LIKED), algorithm={"type": "dpo", "rows_per_step": 4}),
        job("kto", rows("rated", RATED), algorithm={"type": "kto", "rows_per_step": 4}),
        job("distill", algorithm={"type": "distill", "teacher": "base", **groups}),
        job(
            "soft",
            {**rows("soft", SOFT), "holdout": 0},
            algorithm={"type": "soft_targets", "rows_per_step": 4},
            eval={"every": 0},
        ),
        job("tools", environment={"name": own("Till"), "max_turns": 3}),
        job("turns", environment={"name": own("Guess"), "max_turns": 3}, reward=own("plain")),
        job("agent", environment={"name": own("agent"), "max_turns": 3}),
        job("critic", reward="exact", environment="retry", algorithm={"type": "ppo", "critic": {"rank": 4}, **groups}),
        job("judged", reward={"name": "judge", "args": judged}),
        job("halves", team=["planner", "solver"], environment={"name": own("Halves"), "max_turns": 2}),
        job("algorithm", reward=own("plain"), algorithm={"type": own("Doubled"), **groups}),
        job("chained", reward="exact", adapter={"init": "sft"}),
    ]
