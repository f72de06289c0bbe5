"""Sort letters over several turns: each turn brings two more. `python alphabet.py > alphabet.jsonl` writes the problems."""

from __future__ import annotations

import json
import random
import string


class Alphabet:
    """Each turn is worth an equal part of 1."""

    def reset(self, turns: list[str], **row: object) -> None:
        """Begin with the first letters, which the prompt has."""
        self.left, self.share = list(turns), 1 / len(turns)
        self.letters = self.left.pop(0)

    def step(self, text: str) -> tuple[str | None, float]:
        """The next letters to add, or the end; and the reward of the answer."""
        reward = self.share * (text.strip() == "".join(sorted(self.letters)))
        if not self.left:
            return None, reward
        self.letters += self.left.pop(0)
        return f"Sort the letters of {self.letters}.", reward


def row(rng: random.Random) -> dict[str, object]:
    """Three letters, then two more in each of two turns."""
    letters = "".join(rng.sample(string.ascii_uppercase, 7))
    turns = [letters[:3], letters[3:5], letters[5:]]
    return {"prompt": f"Sort the letters of {turns[0]}.", "turns": turns}


if __name__ == "__main__":
    draws = random.Random(0)
    for _ in range(512):
        print(json.dumps(row(draws)))
