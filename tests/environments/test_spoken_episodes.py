"""Episodes of bases that think and call in their own forms: what is run, what `step` gets, and what is read next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet.chat.template import Chat
from motet.commands.forecast import warnings_of
from motet.config import DataConfig, EnvironmentConfig, JobConfig
from motet.core.types import (
    Chunk,
    FinishReason,
    Group,
    IntArray,
    Message,
    Problem,
    Rollout,
    SamplingParams,
    ToolCall,
    TurnParts,
)
from motet.environments.environments import EnvironmentWorkers
from motet.environments.episode import GroupContext, retry, single_turn
from motet.rewards.reward_answers import ScoreOutcome
from motet.runtime.metrics import group_metrics
from tests.support.speaking_bases import SPEAKERS, own_turn

OWN = '''
class Shop:
    def reset(self, **row):
        self.till = 0

    def sell(self, item: str, price: int) -> str:
        """Sell something.

        Args:
            item: what
            price: in cents
        """
        self.till += price
        return f"{self.till} in the till"

    def get_reward(self):
        return self.till / 100


class Guess:
    def reset(self, answer, **row):
        self.number = answer

    def step(self, text):
        return (None, 1.0) if text == self.number else (f"not {text!r}", 0.0)
'''
PROBLEM = Problem(0, (Message("user", "Play."),), "7")
Says = Callable[[int, IntArray], IntArray]
"""(turn, prompt) → tokens of the model."""


class Speaks:
    """A model that says the given tokens, and keeps what it read."""

    def __init__(self, chat: Chat, says: Says) -> None:
        self._chat, self._says = chat, says
        self.read: list[IntArray] = []

    async def __call__(
        self, prompt_ids: IntArray, indices: tuple[int, ...], turn: int, sampling: SamplingParams | None = None
    ) -> list[Chunk]:
        self.read.append(prompt_ids)
        ids = np.asarray(self._says(turn, prompt_ids), np.int32)
        n_tokens = len(ids)
        text = self._chat.completion_text(ids.tolist())
        chunk = Chunk(0, ids, np.zeros(n_tokens, np.float32), np.zeros(n_tokens, np.int32), text, FinishReason.STOP)
        return [chunk] * len(indices)


def in_turn(chat: Chat, turns: Sequence[TurnParts]) -> Says:
    """Says these turns as the template writes them."""
    return lambda turn, _: own_turn(chat, turns[turn])


def says(chat: Chat, text: str) -> Says:
    """Says a text in each turn."""
    return lambda *_: np.asarray(chat.tokenizer.encode(text, add_special_tokens=False))


async def no_score(_: Sequence[Rollout]) -> list[ScoreOutcome]:
    raise AssertionError("the job has no reward")


def played(file: Path, name: str, speakers: Sequence[tuple[Chat, Says]], **fields: Any) -> list[tuple[Rollout, Speaks]]:
    """One rollout for each chat, all in one process."""
    models = [Speaks(*speaker) for speaker in speakers]

    async def main() -> list[Rollout]:
        workers = EnvironmentWorkers(EnvironmentConfig(name=f"{file}:{name}", **fields), file.parent / "log", 1)
        try:
            await workers.open()
            contexts = [
                GroupContext(PROBLEM, chat, 1, model, no_score, 5, judged=False)
                for (chat, _), model in zip(speakers, models, strict=True)
            ]
            return [(await workers.run_group(context))[0] for context in contexts]
        finally:
            await workers.close()

    return list(zip(asyncio.run(main()), models, strict=True))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


SELL = ToolCall("sell", {"item": "12", "price": 150})


def test_calls_are_run_in_every_form(file: Path) -> None:
    speakers: list[tuple[Chat, Says]] = []
    said: list[tuple[TurnParts, TurnParts]] = []
    for speaker in SPEAKERS.values():
        chat = Chat(speaker.tokenizer())
        thought = "I sell" if speaker.thinks else ""
        turns = TurnParts(thought, "", (SELL,)), TurnParts(thought, "That was it.")
        said.append(turns)
        speakers.append((chat, in_turn(chat, turns)))
    for (rollout, model), (chat, _), turns in zip(played(file, "Shop", speakers), speakers, said, strict=True):
        assert rollout.error == ""
        assert [turn.parts for turn in rollout.turns] == list(turns)
        assert [reply.content for reply in rollout.turns[0].replies] == ["150 in the till"]
        assert rollout.reward == 1.5
        (branch,) = rollout.branches  # the sampled call stays, and its result is read in the base's own form
        sampled = [own_turn(chat, turn).tolist() for turn in turns]
        first, second = (read.tolist() for read in model.read)
        assert second[: len(first) + len(sampled[0])] == first + sampled[0]
        assert branch.token_ids.tolist() == second + sampled[1]
        assert "150 in the till" in chat.tokenizer.decode(second[len(first) + len(sampled[0]) :])


def test_a_thought_runs_no_call_and_is_no_answer(file: Path) -> None:
    chat = Chat(SPEAKERS["qwen3"].tokenizer())
    call = '<tool_call>{"name": "sell", "arguments": {"item": "tea", "price": 5}}</tool_call>'
    ids = lambda text: np.asarray(chat.tokenizer.encode(text, add_special_tokens=False))  # noqa: E731
    shop: Says = lambda turn, _: ids(f"<think>\n{call}\n</think>\n\n{call * (1 - turn)}Done.<|im_end|>")  # noqa: E731
    ((rollout, _),) = played(file, "Shop", [(chat, shop)])
    assert rollout.reward == 0.05
    said = ["<think>\nFive?\n</think>\n\n5<|im_end|>", "<think>\n7\n</think>\n\n7<|im_end|>"]
    ((rollout, model),) = played(file, "Guess", [(chat, lambda turn, _: ids(said[turn]))])
    assert [turn.replies for turn in rollout.turns] == [(Message("user", "not '5'"),), ()]
    assert rollout.reward == 1.0
    assert [one.content for one in rollout.transcript] == ["Play.", "5", "not '5'", "7"]
    assert len(rollout.branches) == 2  # its template drops thoughts of earlier turns
    assert "Five" not in chat.tokenizer.decode(model.read[1].tolist())


def test_single_and_retry_see_the_parts() -> None:
    chat = Chat(SPEAKERS["gpt_oss"].tokenizer())
    said = [TurnParts("2 and 2", "5"), TurnParts("2 and 2", "4")]

    async def score(rollouts: Sequence[Rollout]) -> list[ScoreOutcome]:
        return [ScoreOutcome(float(one.turns[-1].parts.speech == "4"), {}) for one in rollouts]

    for environment, turns in ((single_turn, said[1:]), (retry, said)):
        model = Speaks(chat, in_turn(chat, turns))
        (rollout,) = asyncio.run(environment(GroupContext(PROBLEM, chat, 1, model, score)))
        assert [turn.parts for turn in rollout.turns] == turns
        assert rollout.reward == (1.0 if environment is single_turn else 0.5)
        assert rollout.completion == (
            "<|channel|>analysis<|message|>2 and 2<|end|><|start|>assistant<|channel|>final<|message|>4"
        )


def test_turns_that_cannot_be_read_are_told() -> None:
    chat = Chat(SPEAKERS["qwen3"].tokenizer())
    said = ["<think>\nlet me", "<think>\nso\n</think>\n\n4<|im_end|>"]

    async def score(rollouts: Sequence[Rollout]) -> list[ScoreOutcome]:
        return [ScoreOutcome(0.0, {}) for _ in rollouts]

    rollouts: list[Rollout] = []
    for text in said:
        model = Speaks(chat, says(chat, text))
        rollouts += asyncio.run(single_turn(GroupContext(PROBLEM, chat, 1, model, score)))
    group = Group(PROBLEM, 0, 0, tuple(rollouts))
    config = JobConfig.model_validate({"name": "sums", "data": "toy:sums", "rewards": "exact"})
    told = [line for line in warnings_of(config, chat, [PROBLEM], [group]) if "could not be read" in line]
    assert told == ["1 of 2 turns could not be read: a thought has no end"]
    assert group_metrics([group])["unread"] == 1
    assert "unread" not in group_metrics([replace(group, rollouts=tuple(rollouts[1:]))])


def test_a_form_can_be_named_and_an_unknown_one_is_told() -> None:
    tokenizer = SPEAKERS["qwen25"].tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("<tool_call>", "<call>")
    chat = Chat(tokenizer)
    assert not chat.form.known
    assert "does not know" in chat.form.told
    config = JobConfig.model_validate({"name": "a", "data": "toy:sums", "environment": {"name": "shop.py:Shop"}})
    assert any("data.tool_format" in line for line in warnings_of(config, chat, [PROBLEM], []))
    named = DataConfig(source="toy:sums", tool_format="glm")
    assert Chat.of(tokenizer, named).form.name == "glm"
