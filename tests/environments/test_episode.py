"""Environments make rollouts whose tokens, masks, logprobs and versions line up, whatever happens on the way."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest

from motet.algorithms.policy_gradient import to_sample
from motet.chat.template import Chat
from motet.config import EnvironmentConfig
from motet.core.errors import ContextFull, EngineError
from motet.core.types import Chunk, FinishReason, Message, Problem
from motet.environments.environment_calls import OWN
from motet.environments.episode import ENVIRONMENTS, RETRY_MESSAGE, SECOND_TRY, GroupContext, retry, single_turn
from motet.rewards.reward_answers import ScoreOutcome
from tests.support.scripted_model import CHATML, byte_tokenizer

pytestmark = pytest.mark.tier1

TOKENIZER = byte_tokenizer(CHATML)
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
CHAT = Chat(TOKENIZER)
PROBLEM = Problem(4, (Message("user", "What is 6 · 7?"),), "42")


class Script:
    """A `Generate` that says what it was told to: per turn and index a text, or (text, reason)."""

    def __init__(self, *turns):
        self.turns, self.calls = turns, []

    async def __call__(self, prompt_ids, indices, turn):
        self.calls.append((prompt_ids.tolist(), indices, turn))
        await asyncio.sleep(0.001 * (5 - min(indices)))  # completions of later indices are ready first
        return [self.chunk(index, self.turns[turn][index], turn) for index in indices]

    @staticmethod
    def chunk(index, said, turn):
        text, reason = said if isinstance(said, tuple) else (said, FinishReason.STOP)
        ids = TOKENIZER.encode(text, add_special_tokens=False) + ([END] if reason is FinishReason.STOP else [])
        n = len(ids)
        logprobs = -np.arange(1, n + 1, dtype=np.float32) - turn
        return Chunk(
            index, np.asarray(ids, np.int32), logprobs, np.full(n, 7 + turn, np.int32), text, reason,
            error="logits were not finite" if reason is FinishReason.ERROR else "",
        )  # fmt: skip


async def score(rollouts):
    await asyncio.sleep(0)
    results = []
    for text in (rollout.completion for rollout in rollouts):
        right = float(text == PROBLEM.answer)
        results.append(
            ScoreOutcome(math.nan, {}, "no reward") if text == "broken" else ScoreOutcome(right, {"exact": right})
        )
    return results


def run(environment, generate, size, judge=score):
    return asyncio.run(environment(GroupContext(PROBLEM, CHAT, size, generate, judge)))


def check(rollouts):
    for index, rollout in enumerate(rollouts):
        (branch,) = rollout.branches
        n = len(branch.token_ids)
        assert rollout.index == index
        assert [len(a) for a in (branch.loss_mask, branch.logprobs, branch.versions)] == [n] * 3
        kinds = [a.dtype for a in (branch.token_ids, branch.loss_mask, branch.logprobs, branch.versions)]
        assert kinds == [np.int32, np.bool_, np.float32, np.int32]
        assert not branch.logprobs[~branch.loss_mask].any()
        assert (branch.versions[~branch.loss_mask] == -1).all()
        assert math.isnan(rollout.reward) == bool(rollout.error)


def test_single_turn_is_one_request_for_the_group():
    generate = Script(["42", "41", ("4", FinishReason.LENGTH)])
    rollouts = run(single_turn, generate, 3)
    check(rollouts)
    prompt = CHAT.prompt_ids(PROBLEM).tolist()
    assert generate.calls == [(prompt, (0, 1, 2), 0)]
    assert [r.reward for r in rollouts] == [1.0, 0.0, 0.0]
    assert [r.truncated for r in rollouts] == [False, False, True]
    answer = [*TOKENIZER.encode("42"), END]
    assert rollouts[0].branches[0].token_ids.tolist() == prompt + answer
    assert rollouts[0].branches[0].loss_mask.tolist() == [False] * len(prompt) + [True] * len(answer)
    assert rollouts[0].branches[0].versions.tolist() == [-1] * len(prompt) + [7] * len(answer)
    assert rollouts[0].reward_parts == {"exact": 1.0}


@pytest.mark.parametrize("environment", [single_turn, retry])
def test_failures_stay_with_their_rollout(environment):
    said = ["42", ("4", FinishReason.ERROR), "broken", ("4", FinishReason.ABORT)]
    rollouts = run(environment, Script(said, said), 4)
    check(rollouts)
    aborted = "aborted before the answer was complete"
    assert [r.error for r in rollouts] == ["", "logits were not finite", "no reward", aborted]
    all_failed = run(environment, Script([("", FinishReason.ERROR)] * 2), 2)
    check(all_failed)
    assert [r.error for r in all_failed] == ["logits were not finite"] * 2


def test_retry_gives_a_second_turn_to_those_that_were_wrong():
    cut = ("4", FinishReason.LENGTH)
    first = ["42", "41", "40", cut, "39", "38"]
    second = [None, "42", "0", None, ("4", FinishReason.ERROR), "broken"]
    generate = Script(first, second)
    rollouts = run(retry, generate, 6)
    check(rollouts)
    assert [r.reward for r in rollouts[:4]] == [1.0, SECOND_TRY, 0.0, 0.0]
    assert [len(r.turns) for r in rollouts] == [1, 2, 2, 1, 2, 2]
    assert [bool(r.error) for r in rollouts] == [False] * 4 + [True] * 2
    assert [call[1:] for call in generate.calls] == [((0, 1, 2, 3, 4, 5), 0), *(((i,), 1) for i in (1, 2, 4, 5))]
    assert rollouts[1].reward_parts == {"exact": 1.0, "first_try": 0.0}
    assert rollouts[0].reward_parts == {"exact": 1.0, "first_try": 1.0}
    turns = [("user", "What is 6 · 7?"), ("assistant", "41"), ("user", RETRY_MESSAGE), ("assistant", "42")]
    whole = TOKENIZER.apply_chat_template(
        [{"role": role, "content": text} for role, text in turns], return_dict=False, add_generation_prompt=False
    )
    assert rollouts[1].branches[0].token_ids.tolist() == whole[:-1]  # the template ends a turn with a newline
    sampled = rollouts[1].branches[0].token_ids[rollouts[1].branches[0].loss_mask].tolist()
    assert sampled == [*TOKENIZER.encode("41"), END, *TOKENIZER.encode("42"), END]
    assert rollouts[1].branches[0].logprobs[rollouts[1].branches[0].loss_mask].tolist() == [-1, -2, -3, -2, -3, -4]
    assert rollouts[1].branches[0].versions[rollouts[1].branches[0].loss_mask].tolist() == [7] * 3 + [8] * 3


def test_a_second_turn_that_is_too_long_costs_its_own_rollout():
    script = Script(["41", "42", "40"], ["42", None, "42"])

    async def generate(prompt_ids, indices, turn):
        if turn == 1 and indices == (0,):
            raise EngineError("the prompt is too long")
        return await script(prompt_ids, indices, turn)

    rollouts = run(retry, generate, 3)
    check(rollouts)
    assert [r.error for r in rollouts] == ["the prompt is too long", "", ""]
    assert [r.reward for r in rollouts[1:]] == [1.0, SECOND_TRY]


def test_a_second_turn_without_room_keeps_what_the_first_one_earned():
    script = Script(["41", "42", "40", "39"], [None, None, "42", None])

    async def half(rollouts):
        return [replace(one, reward=one.reward or 0.25) for one in await score(rollouts)]

    async def generate(prompt_ids, indices, turn):
        if turn == 1 and indices != (2,):
            raise ContextFull(1000, 40, 1024)
        return await script(prompt_ids, indices, turn)

    rollouts = run(retry, generate, 4, half)
    check(rollouts)
    assert [r.error for r in rollouts] == [""] * 4
    assert [r.reward for r in rollouts] == [0.25, 1.0, SECOND_TRY, 0.25]
    assert [r.truncated for r in rollouts] == [True, False, False, True]
    assert [r.reward_parts["first_try"] for r in rollouts] == [0.25, 1.0, 0.25, 0.25]


def test_a_sample_has_its_advantage_on_sampled_tokens_only():
    (rollout,) = run(retry, Script(["41"], ["42"]), 1)
    sample = to_sample(rollout.branches[0], 0.25)
    assert sample.advantages.dtype == np.float32
    assert (sample.advantages == np.where(rollout.branches[0].loss_mask, 0.25, 0)).all()
    assert sample.n_trainable == 6


def test_a_generate_that_returns_too_few_is_refused():
    async def short(prompt_ids, indices, turn):
        return []

    with pytest.raises(ValueError, match="must return 2 whole completions, got 0"):
        run(single_turn, short, 2)


def test_environments_are_those_a_job_may_name():
    assert set(ENVIRONMENTS) == set(EnvironmentConfig.TURNS)


def test_modules_that_moved_are_found_by_the_names_that_job_files_have():
    for before, now in (("tasks.shipped.sandbox:Tools", "environments.shipped.sandbox:Tools"),
                        ("agents.episode_messages:AskEpisode", "environments.episode_messages:AskEpisode")):  # fmt: skip
        assert OWN.find(f"motet.{before}") is OWN.find(f"motet.{now}")
