"""What every program is given: the same prompts, samples, problems and reward. Standard library only."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

SUBJECTS = "river clock garden train lamp island violin bridge mirror bakery forest lighthouse kite market tower letter".split()
FIRST_TOKEN = 100
"""Token ids below are left to special tokens."""


def token_ids(count: int, length: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Random sequences, a function of the arguments."""
    source = random.Random(seed)
    return [[source.randrange(FIRST_TOKEN, vocabulary) for _ in range(length)] for _ in range(count)]


def advantages(count: int) -> list[float]:
    """Numbers around zero, none of them zero."""
    source = random.Random(1)
    return [source.choice((-1.0, 1.0)) * source.uniform(0.5, 1.5) for _ in range(count)]


def story_prompts() -> list[str]:
    """Questions whose answers are longer than any limit here, so that every step costs the same."""
    return [f"Write a long story about a {subject} and what happened to it in the end." for subject in SUBJECTS]


def varied(completions: Sequence[Any], **_: Any) -> list[float]:
    """A reward in TRL's signature that differs within every group, so that no sample is left out of training."""
    texts = [item if isinstance(item, str) else item[0]["content"] for item in completions]
    return [sum(map(ord, text)) % 97 / 97 for text in texts]
