"""A planner and a solver: the planner does the first half of a task, and the solver the second half from its words alone.

`python team.py > team.jsonl` writes the problems.
"""

from __future__ import annotations

import json
import random


class Halves:
    """The planner writes a word backwards; the solver, which never sees the word, says what that ends with."""

    def reset(self, word: str, **row: object) -> None:
        """The row's prompt is for the planner."""
        self.word, self.role = word, "planner"
        self.planned = self.solved = self.right = 0.0

    def step(self, text: str) -> str | None:
        """The planner's words go to the solver; its answer ends the episode."""
        text = text.strip()
        if self.role == "solver":
            self.solved = float(text == self.told[-1:])
            self.right = float(text == self.word[0])
            return None
        self.told, self.role = text, "solver"
        self.planned = float(text == self.word[::-1])
        return f"What is the last letter of {text}?"

    def get_reward(self) -> dict[str, float]:
        """Each role has a reward of its own: half for its part, half for the answer of both."""
        return {"planner": 0.5 * self.planned + 0.5 * self.right, "solver": self.solved}


def row(rng: random.Random) -> dict[str, str]:
    """A word of four letters."""
    word = "".join(rng.sample("ABCDEFGHIJKLMNOPQRSTUVWXYZ", 4))
    return {"prompt": f"Write {word} backwards.", "word": word}


if __name__ == "__main__":
    draws = random.Random(0)
    for _ in range(512):
        print(json.dumps(row(draws)))
