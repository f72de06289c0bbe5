"""Environments of a person's own: tools and text, an instance for each rollout, faults of one rollout alone."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import motet
from motet.algorithms import Grpo
from motet.chat.template import Chat
from motet.config import EnvironmentConfig
from motet.core.errors import ConfigError, ContextFull, EngineError, EnvironmentFault
from motet.core.types import Chunk, IntArray, Message, Problem, Rollout
from motet.environments.environments import EnvironmentWorkers
from motet.environments.episode import GroupContext
from motet.rewards.reward_answers import AnswerContext, ScoreOutcome, as_given
from motet.rewards.reward_http import Addresses
from motet.rewards.reward_pool import RewardPool
from motet.rewards.reward_walls import Walls
from motet.service.jobs.validation import Allowed, validated
from tests.support.dies import DIES_OFTEN
from tests.support.fake_run import job, metrics, records, run_jobs, weights
from tests.support.scripted_model import CHAT, CHATML, TOKENIZER, Says, Script, ThreadsOf, byte_tokenizer

pytestmark = pytest.mark.bits

OWN = '''
import os
import random
import time


class Guess:
    """A number is thought of; the model is told whether it is higher or lower."""

    def __init__(self, low=1, high=9):
        self.low, self.high = low, high

    def reset(self, answer, **row):
        self.number = int(answer)
        return f"Between {self.low} and {self.high}."

    def step(self, text):
        if not text.strip().isdigit():
            return "A number, please.", -0.5
        guess = int(text)
        if guess == self.number:
            return None, 1.0
        return "higher" if guess < self.number else "lower", 0.0


class Shop:
    """Tools over a till, as TRL's environments are written."""

    def reset(self, prompt):
        self.till, self.sold = 0, []

    def sell(self, item: str, price: int, number: int = 1) -> str:
        """Sell something.

        Args:
            item: what
            price: of one, in cents
            number: how many
        """
        self.till += price * number
        self.sold.append(item)
        return f"{self.till} in the till"

    def refund(self) -> str:
        """Give money back."""
        raise ValueError("nothing to give back")

    def close_shop(self) -> str:
        """Go home."""
        self.done = True
        return "bye"

    def get_reward(self) -> float:
        return self.till / 100


class Trouble:
    def reset(self, **row):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        if text == "loop":
            while True:
                pass
        if text == "exit":
            os._exit(3)
        if text == "raise":
            raise RuntimeError("the shop burns")
        if text == "memory":
            return "x" * (1 << 34)
        if text == "number":
            return 5
        if text == "long":
            return "x" * (1 << 26)
        if text == "large":
            return "more", 1e308
        return f"turn {self.turns} {random.random()}" if text != "end" else None

    def get_reward(self):
        return float(self.turns)


class Counter:
    """TRL's form, where a reward function reads `env.reward`."""

    def reset(self, **row):
        self.count, self.reward = 0, 0.0

    def increment(self, by: int) -> int:
        """Count on.

        Args:
            by: how far
        """
        self.count += by
        self.reward = self.count / 4 if by < 9 else "much"
        return self.count


class Chatty:
    def reset(self, **row):
        return "x" * random.choice([10, 100])

    def step(self, text):
        return None, 1.0


class Opens:
    """Has something that must be closed."""

    def __init__(self, file):
        self.file = file
        self.tell("opened")

    def reset(self, **row):
        self.begun = True

    def tell(self, what) -> str:
        with open(self.file, "a") as out:
            out.write(f"{what} ")

    def step(self, text):
        return None, 1.0

    def close(self):
        self.tell("closed")
        assert self.begun


class Nothing:
    pass
'''
PROBLEM = Problem(4, (Message("user", "Play."),), "7")


async def no_score(rollouts: Sequence[Rollout]) -> list[ScoreOutcome]:
    raise AssertionError("the job has no reward")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def played(
    file: Path,
    name: str,
    says: Says,
    n: int,
    *,
    chat: Chat = CHAT,
    score: Any = None,
    n_workers: int = 2,
    **fields: Any,
) -> tuple[tuple[Rollout, ...], Script, EnvironmentWorkers]:
    """The rollouts of one group."""
    config = EnvironmentConfig(name=f"{file}:{name}", **fields)
    script = Script(says)
    released: list[int] = []

    async def release(index: int) -> None:
        released.append(index)

    async def main() -> tuple[tuple[Rollout, ...], EnvironmentWorkers]:
        workers = EnvironmentWorkers(config, file.parent / "log", n_workers)
        try:
            await workers.open()
            stage = GroupContext(PROBLEM, chat, n, script, score or no_score, 5, score is not None, release=release)
            return await workers.run_group(stage), workers
        finally:
            await workers.close()

    rollouts, workers = asyncio.run(main())
    assert sorted(released) == list(range(n)), "each episode says when it has ended"
    return rollouts, script, workers


def check(rollouts: Sequence[Rollout], script: Script) -> None:
    """What is trained is what was read and sampled, token for token."""
    for rollout in rollouts:
        for branch in rollout.branches:
            assert len(branch.token_ids) == len(branch.loss_mask) == len(branch.logprobs) == len(branch.versions)
            assert not branch.logprobs[~branch.loss_mask].any()
            assert (branch.versions[branch.loss_mask] == 3).all()
        last = script.read[rollout.index, len(rollout.turns) - 1]
        assert rollout.branches[-1].token_ids[: len(last)].tolist() == last
        assert rollout.sampled == sum(len(TOKENIZER.encode(turn.text)) + 1 for turn in rollout.turns)


def test_text_is_answered_until_the_episode_ends(file: Path) -> None:
    said = [["7"], ["5", "9", "7"], ["five", "7"], ["1", "2", "3", "4"]]
    rollouts, script, _ = played(file, "Guess", lambda index, turn, read: said[index][turn], 4, max_turns=4)
    check(rollouts, script)
    assert [rollout.error for rollout in rollouts] == [""] * 4
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0, 0.5, 0.0]
    assert [[turn.reward for turn in rollout.turns] for rollout in rollouts] == [
        [1.0], [0.0, 0.0, 1.0], [-0.5, 1.0], [0.0] * 4,
    ]  # fmt: skip
    assert script.calls[0] == ((0, 1, 2, 3), 0)  # one prefill for the group
    assert [message.content for message in rollouts[1].transcript] == [
        "Play.\n\nBetween 1 and 9.", "5", "higher", "9", "lower", "7",
    ]  # fmt: skip
    whole = TOKENIZER.apply_chat_template(
        [{"role": one.role, "content": one.content} for one in rollouts[1].transcript], return_dict=False
    )
    assert rollouts[1].branches[0].token_ids.tolist() == whole[:-1]  # the template ends a turn with a newline
    assert len(rollouts[1].branches) == 1


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_public_methods_are_tools(file: Path) -> None:
    said = [
        [call("sell", item="tea", price=150), call("sell", item="pot", price="400", number=2), "That was it."],
        [call("sell", item="tea") + call("refund"), call("steal"), "<tool_call>{broken", call("close_shop")],
        ["I shall do nothing."],
    ]
    rollouts, script, workers = played(file, "Shop", lambda index, turn, read: said[index][turn], 3)
    check(rollouts, script)
    assert [rollout.reward for rollout in rollouts] == [9.5, 0.0, 0.0]
    (sell,) = [tool["function"] for tool in workers.info.tools if tool["function"]["name"] == "sell"]
    assert sell["description"] == "Sell something."
    assert sell["parameters"]["properties"]["price"] == {"type": "integer", "description": "of one, in cents"}
    assert sell["parameters"]["required"] == ["item", "price"]
    assert '"name": "sell"' in rollouts[2].opening[0].content  # the template has no place for tools
    replies = [[reply.content for reply in turn.replies] for turn in rollouts[1].turns]
    assert replies[0] == [
        "Error: price: Missing required argument",
        "Error: ValueError: nothing to give back " + f"({file}:46)",
    ]
    assert replies[1][0].startswith("Error: there is no tool 'steal'; there are ")
    assert replies[2][0].startswith("Error: there is no tool '{broken'")
    assert replies[3] == ["bye"]
    assert [reply.role for reply in rollouts[0].turns[0].replies] == ["tool"]
    assert rollouts[0].turns[0].tool_calls[0].arguments == {"item": "tea", "price": 150}


SHAPES = """
import numpy as np

class Shapes:
    def reset(self, **row):
        return None

    def look(self, what: str):
        inside = []
        inside.append(inside)
        return {
            "int64": np.int64(3), "array": np.arange(3), "set": {2, 1}, "city": ["K\u00f6ln", np.float32(0.5)],
            "nan": [float("nan"), 1.0], "tuple": {(1, 2): True}, "none": None, "text": "plain", "endless": inside,
        }[what]

    def get_reward(self):
        return 1.0
"""


def test_results_of_tools_are_written_as_data_of_rows_are(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SHAPES)
    wanted = {
        "int64": "3", "array": "[0, 1, 2]", "set": "[1, 2]", "city": '["K\u00f6ln", 0.5]', "nan": "[null, 1.0]",
        "tuple": '{"(1, 2)": true}', "none": "null", "text": "plain",
    }  # fmt: skip
    asked = [*wanted, "endless"]
    calls = "".join(call("look", what=what) for what in asked)
    (rollout,), _, _ = played(tmp_path / "own.py", "Shapes", lambda index, turn, read: [calls, "done"][turn], 1)
    replies = [message.content for message in rollout.turns[0].replies]
    assert dict(zip(asked, replies, strict=True)).items() >= wanted.items()
    assert replies[-1].startswith("Error: RecursionError")
    assert (rollout.error, rollout.reward) == ("", 1.0)


def test_rewards_can_be_given_a_call_that_is_nested_deep(file: Path) -> None:
    deep: Any = []
    for _ in range(600):
        deep = [deep]
    (one,), _, _ = played(file, "Shop", lambda *_: call("sell", item=deep, price=1), 1, max_turns=1)
    assert as_given(one.transcript)[-1]["content"].startswith("Error: there is no tool")


def test_a_template_that_has_a_place_for_tools_gets_them(file: Path) -> None:
    template = CHATML.replace("{% for", "{% if tools %}Tools: {{ tools | length }}\n{% endif %}{% for", 1)
    chat = Chat(byte_tokenizer(template))
    rollouts, script, _ = played(file, "Shop", lambda index, turn, read: "no", 1, chat=chat)
    assert TOKENIZER.decode(script.read[0, 0]).startswith("Tools: 3\n")
    assert rollouts[0].opening == PROBLEM.messages


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("loop", "took more than 1 s of CPU time (environment field cpu_seconds)"),
        ("exit", "ended with exit status 3 (an environment must return, not exit)"),
        ("raise", "step: RuntimeError: the shop burns"),
        ("memory", "took more than 256 MB of memory (environment field memory_mb)"),
        ("number", "step: step returned int"),
        ("long", "step: returned 65 MB; the limit is 64 MB"),
        ("large", "is larger than 1e+30: give smaller rewards"),
    ],
)
def test_a_fault_costs_its_own_rollout(file: Path, text: str, told: str) -> None:
    """The others go on, also those whose instances were in the same process: they do again what they had done."""

    def says(index: int, turn: int, read: str) -> str:
        return "end" if turn == 4 else text if (index, turn) == (1, 2) else "go on"

    fields: dict[str, Any] = {"cpu_seconds": 1.0, "memory_mb": 256, "n_workers": 1}
    rollouts, script, workers = played(file, "Trouble", says, 3, **fields)
    assert told in rollouts[1].error
    assert [rollouts[index].error for index in (0, 2)] == ["", ""]
    assert [rollouts[index].reward for index in (0, 2)] == [5.0, 5.0]
    assert not workers.clock_limited
    check([rollouts[0], rollouts[2]], script)
    alone, _, _ = played(file, "Trouble", lambda index, turn, read: "end" if turn == 4 else "go on", 3, **fields)
    for index in (0, 2):  # also what it draws by chance is the same
        assert alone[index].transcript == rollouts[index].transcript


def test_a_group_that_fails_leaves_no_episode_at_work(file: Path) -> None:
    """Such an episode could sample into what the group continues with when it is taken up again."""

    async def generate(prompt: IntArray, indices: tuple[int, ...], turn: int, *_: Any) -> list[Chunk]:
        if indices == (0,):
            raise RuntimeError("put aside")
        if indices == (1,):
            await asyncio.sleep(60)
        return await script(prompt, indices, turn)

    async def main() -> set[asyncio.Task[Any]]:
        workers = EnvironmentWorkers(EnvironmentConfig(name=f"{file}:Trouble"), file.parent / "log", 1)
        try:
            await workers.open()
            with pytest.raises(RuntimeError, match="put aside"):
                await workers.run_group(GroupContext(PROBLEM, CHAT, 2, generate, no_score, judged=False))
        finally:
            await workers.close()
        await asyncio.sleep(0)
        return asyncio.all_tasks() - {asyncio.current_task()}

    script = Script(lambda index, turn, read: "go on")
    assert asyncio.run(main()) == set()


LARGE = """
class Large:
    def reset(self, **row):
        self.held = bytearray(160 << 20)

    def step(self, text):
        return None, 1.0
"""


def test_the_memory_of_other_instances_costs_no_rollout(file: Path) -> None:
    """How many instances a process has at a time depends on the clock."""
    file.write_text(LARGE)
    rollouts, _, _ = played(file, "Large", lambda index, turn, read: "go on", 2, n_workers=1, memory_mb=256)
    assert [(rollout.reward, rollout.error) for rollout in rollouts] == [(1.0, "")] * 2


DIES = (
    DIES_OFTEN
    + """

class Dies:
    def reset(self, **row):
        dies("reset")
        return "Go on."

    def step(self, text):
        dies("step")
        return None, 1.0
"""
)


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_an_episode_whose_process_is_killed_from_outside_is_played_again_at_most_twice(
    file: Path, times: int, loads: bool
) -> None:
    file.write_text(f'where, times = "{file.parent}", {times}\n{DIES}\n' + loads * 'dies("load")\n')
    if loads and times == 3:
        with pytest.raises(EnvironmentFault, match=r"cannot be loaded:.*killed with SIGKILL"):
            played(file, "Dies", lambda index, turn, read: "go on", 1, n_workers=1)
        return
    (rollout,), _, workers = played(file, "Dies", lambda index, turn, read: "go on", 1, n_workers=1)
    lost = times == 3
    assert workers.clock_limited is lost
    assert (rollout.reward, rollout.error) == (1.0, "") if not lost else "SIGKILL, which Motet did not" in rollout.error
    assert (file.parent / "reset").read_text() == "x" * times


HALVES = '''
import json

begun = []


class Halves:
    """Answers with what a model's JSON says, which may be half of a character."""

    def reset(self, **row):
        begun.append(self)
        return "\\ud83d" if len(begun) == 4 else "Go."  # the first instance is asked for tools

    def step(self, text):
        return json.loads(text), 1.0
'''


def test_text_that_no_tokenizer_reads_costs_its_own_rollout(file: Path) -> None:
    file.write_text(HALVES)
    said = ['"more"', '"\\ud83d"', '"more"', '"more"']
    rollouts, _, _ = played(file, "Halves", lambda index, turn, read: said[index], 4, n_workers=1, max_turns=2)
    assert [rollout.reward for rollout in (rollouts[0], rollouts[2])] == [2.0, 2.0]
    for index in (1, 3):
        assert "half of a character" in rollouts[index].error


def test_each_instance_is_closed_and_so_is_the_one_that_shows_whether_it_can_be_made(file: Path) -> None:
    said = file.parent / "said"
    rollouts, _, _ = played(file, "Opens", lambda *_: "x", 3, args={"file": str(said)})
    assert [rollout.error for rollout in rollouts] == [""] * 3
    assert said.read_text().count("opened") == said.read_text().count("closed") == 5, "two processes"


def test_an_opening_that_is_too_long_costs_its_own_rollout(file: Path) -> None:
    def says(index: int, turn: int, read: str) -> str:
        if "x" * 100 in read:
            raise EngineError("900 tokens, and the base has positions for 512")
        return "7"

    rollouts, _, _ = played(file, "Chatty", says, 4)
    assert sorted(rollout.error[:10] for rollout in rollouts) == ["", "", "900 tokens", "900 tokens"]
    assert all(rollout.error or rollout.reward == 1.0 for rollout in rollouts)


def test_an_episode_that_fills_the_context_ends_as_truncated_with_what_it_earned(file: Path) -> None:
    def says(index: int, turn: int, read: str) -> str:
        if turn == index + 1:
            raise ContextFull(900, 200, 1024)
        return ["five", "5", "9", "6"][turn]

    rollouts, _, _ = played(file, "Guess", says, 3, max_turns=4)
    assert [rollout.error for rollout in rollouts] == [""] * 3
    assert [len(rollout.turns) for rollout in rollouts] == [1, 2, 3]
    assert [rollout.reward for rollout in rollouts] == [-0.5] * 3
    assert all(rollout.truncated for rollout in rollouts)
    rollouts, _, _ = played(file, "Guess", says, 2, max_turns=4, score=always_one)
    assert [(rollout.error, rollout.reward) for rollout in rollouts] == [("", 0.5)] * 2


async def always_one(rollouts: Sequence[Rollout]) -> list[ScoreOutcome]:
    """The job's own reward."""
    return [ScoreOutcome(1.0, {"one": 1.0}) for _ in rollouts]


@pytest.mark.parametrize("text", ["own session", "same session"])
def test_a_child_that_an_environment_forked_holds_up_nothing(tmp_path: Path, text: str) -> None:
    """It has the pipes of the process, whose end is noticed all the same."""
    held = tmp_path / "held"
    held.touch()
    (tmp_path / "forks.py").write_text(
        "import os, time\n\nclass Forks:\n    def step(self, text):\n        if os.fork() == 0:\n"
        "            text.startswith('own') and os.setsid()\n"
        f"            while os.path.exists({str(held)!r}): time.sleep(0.05)\n            os._exit(0)\n        os._exit(3)\n"
    )
    (rollout,), _, workers = played(tmp_path / "forks.py", "Forks", lambda *_: text, 1)
    assert "ended with exit status 3" in rollout.error
    assert not workers.clock_limited
    held.unlink()  # the child has lived until now


def test_the_clock_is_told(file: Path) -> None:
    file.write_text(OWN.replace("raise RuntimeError", "time.sleep(60); raise RuntimeError"))
    rollouts, _, workers = played(
        file, "Trouble", lambda index, turn, read: "raise" if index else "end", 2, wall_seconds=5
    )
    assert "gave no answer in 5 s by the clock (environment field wall_seconds)" in rollouts[1].error
    assert workers.clock_limited
    assert rollouts[0].error == ""


REWRITES = """{% for message in messages %}<|im_start|>{{ message.role }}
{% set last = loop.index0 + 2 > messages | length %}{% set said = message.content.split('!')[-1] %}\
{{ said if message.role == 'assistant' and not last else message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_a_template_that_rewrites_history_begins_a_new_branch(file: Path) -> None:
    """Thoughts of earlier turns are taken out: what was sampled is trained in the branch in which it was sampled."""
    chat = Chat(byte_tokenizer(REWRITES))
    said = ["hm!1", "hm!2", "hm!7"]
    file.write_text(OWN.replace("text.strip().isdigit()", "text[-1].isdigit()").replace("int(text)", "int(text[-1])"))
    (rollout,), script, _ = played(file, "Guess", lambda index, turn, read: said[turn], 1, chat=chat)
    check([rollout], script)
    # The template says before the first reply what it always says; from the second on, the first turn has lost its thought.
    texts = [TOKENIZER.decode(branch.token_ids.tolist()) for branch in rollout.branches]
    assert len(texts) >= 2
    assert "hm!1" in texts[0]
    assert "hm!1" not in texts[-1]
    sampled = [TOKENIZER.decode(branch.token_ids[branch.loss_mask].tolist()) for branch in rollout.branches]
    assert "".join(sampled).count("hm!") == 3
    batch = Grpo(advantage="none", reduction="sequence").batch([_group(rollout, rollout)], 50)
    assert len(batch.samples) == 2 * len(texts)
    assert batch.denominator == 2  # a rollout counts once, however many branches it has
    weights = sum(
        float((sample.weights * sample.loss_mask).sum()) for sample in batch.samples if sample.weights is not None
    )
    assert weights == pytest.approx(2)


@pytest.mark.parametrize("template", [CHATML, REWRITES])
def test_what_an_environment_says_is_tokenised_beside_the_event_loop(file: Path, template: str) -> None:
    """A long reply must not hold up the other jobs."""
    tokenizer = ThreadsOf(byte_tokenizer(template))
    said = ["5!5", "9!9", "7!7"]
    (rollout,), _, _ = played(file, "Guess", lambda index, turn, read: said[turn], 1, chat=Chat(tokenizer), max_turns=3)
    assert (rollout.error, len(rollout.turns)) == ("", 3)
    assert tokenizer.threads
    assert threading.current_thread() not in tokenizer.threads


def _group(*rollouts: Rollout) -> Any:
    from motet.core.types import Group

    return Group(PROBLEM, 0, 0, rollouts)


def test_rewards_of_the_job_are_added_and_may_see_the_whole_transcript(file: Path) -> None:
    def polite(problem: Problem, completion: str, transcript: list[Mapping[str, Any]]) -> float:
        return 10.0 * len([message for message in transcript if message["role"] == "assistant"])

    async def main(rollouts: Sequence[Rollout]) -> list[ScoreOutcome]:
        pool = RewardPool(1)
        try:
            await pool.register("a", job("a", reward=polite).rewards)
            texts, transcripts = [one.completion for one in rollouts], [one.transcript for one in rollouts]
            return await pool.score("a", PROBLEM, texts, AnswerContext(transcripts))
        finally:
            await pool.close()

    (rollout,), _, _ = played(file, "Guess", lambda index, turn, read: "57"[turn], 1, score=main)
    assert rollout.reward_parts == {"turns": 1.0, "polite": 20.0}
    assert rollout.reward == 21.0


def test_what_an_instance_has_as_its_reward_counts_where_nothing_else_says_it(file: Path) -> None:
    said = [[call("increment", by=1), call("increment", by=2), "Done."], ["No."], [call("increment", by=9), "Done."]]
    one, none, odd = played(file, "Counter", lambda index, turn, read: said[index][turn], 3)[0]
    assert (one.reward, one.reward_parts) == (0.75, {"environment": 0.75})
    assert (none.reward, none.error) == (0.0, "")
    assert "self.reward is 'much', not a finite number" in odd.error


def test_what_an_instance_has_as_its_reward_is_not_counted_beside_that_of_the_job(file: Path) -> None:
    async def score(rollouts: Sequence[Rollout]) -> list[ScoreOutcome]:
        return [ScoreOutcome(0.25, {"own": 0.25}) for _ in rollouts]

    said = [call("increment", by=3), "Done."]
    ((one,), _, _) = played(file, "Counter", lambda index, turn, read: said[turn], 1, score=score)
    assert (one.reward, one.reward_parts) == (0.25, {"own": 0.25})


def test_one_that_nothing_rewards_says_so(file: Path) -> None:
    file.write_text(OWN.replace("return None, 1.0", "return None").replace(", 0.0\n", "\n"))
    (rollout,), _, _ = played(file, "Guess", lambda index, turn, read: "7", 1)
    assert "nothing rewards it: give the environment get_reward()" in rollout.error


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Nothing", "has neither a public method"),
        ("Gues", "has no 'Gues'; did you mean 'Guess'"),
        ("time", "neither a class nor a function|has no 'time'"),
    ],
)
def test_what_is_no_environment_is_said(file: Path, name: str, told: str) -> None:
    with pytest.raises(EnvironmentFault, match=told):
        played(file, name, lambda index, turn, read: "", 1)


@pytest.mark.cell("retry", "embedded")
def test_a_job_of_several_turns_is_the_same_in_company(file: Path, tmp_path: Path) -> None:
    """On the fakes, through the whole run; its model babbles, so that the reward is what the environment says of it."""
    environment = {"name": f"{file}:Trouble", "max_turns": 3}
    configs = [job("a", environment=environment), job("b"), job("c", environment="retry")]
    run_jobs(tmp_path / "together", configs)
    run_jobs(tmp_path / "alone", configs[:1])
    assert metrics(tmp_path / "together", "a") == metrics(tmp_path / "alone", "a")
    assert weights(tmp_path / "together", "a", 4) == weights(tmp_path / "alone", "a", 4)
    lines = (tmp_path / "alone" / "a" / "rollouts" / "0.jsonl").read_text().splitlines()
    assert {len(json.loads(line)["turns"]) for line in lines} == {1, 2, 3}  # some are cut off


def test_what_an_environment_adds_to_the_prompt_is_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text("""
class Told:
    def reset(self, answer):
        self.answer = answer
        return f"Say {answer}." if int(answer, 36) % 2 else None

    def step(self, text):
        return None, float(text == self.answer)
""")
    run_jobs(tmp_path / "run", [job("a", environment={"name": f"{tmp_path}/told.py:Told"})])
    lines = [json.loads(line) for line in (tmp_path / "run/a/rollouts/0.jsonl").read_text().splitlines()]
    told = {line["answer"] for line in lines if int(line["answer"], 36) % 2}
    assert 0 < len(told) < len({line["answer"] for line in lines})
    for line in lines:
        added = f"\n\nSay {line['answer']}." if line["answer"] in told else ""
        assert f"{line['prompt']}{added}" in line["opening"]
        assert ("Say" in line["opening"]) == bool(added)


@pytest.mark.cell("environment", "embedded")
def test_a_real_base_learns_in_one(tmp_path: Path) -> None:
    """`small` is told whether its sum is too high or too low, and learns to come near, in up to three turns."""
    (tmp_path / "sums.py").write_text("""
class Sums:
    def reset(self, answer, **row):
        self.answer = int(answer)

    def step(self, text):
        if not text.strip().isdigit():
            return "A number, please.", -1.0
        guess = int(text)
        if guess == self.answer:
            return None, 1.0
        return "higher" if guess < self.answer else "lower", -min(abs(guess - self.answer), 100) / 100
""")
    (tmp_path / "jobs.yaml").write_text("""
base: small
jobs:
  - name: sums
    data: {source: toy:add, size: 64, holdout: 16}
    environment: {name: "sums.py:Sums", max_turns: 3}
    sampling: {max_tokens: 6}
    algorithm: {group_size: 8, groups_per_step: 4}
    optimizer: {lr: 2.0e-3}
    steps: 8
    eval: {every: 0}
""")
    config = motet.load_jobs(tmp_path / "jobs.yaml")
    run = motet.run(config.jobs, quiet=True, directory=tmp_path / "run")
    assert run.jobs["sums"].state == "succeeded", run.jobs["sums"].message
    found = records(tmp_path / "run", "sums")
    rewards = [line["reward"] for line in found if "reward" in line]
    assert sum(rewards[-3:]) > sum(rewards[:3]), rewards
    assert {line["logprob_gap"] for line in found if "logprob_gap" in line} == {0.0}


def test_a_service_looks_for_no_file_of_a_tenants(file: Path) -> None:
    tree = {"name": "a", "data": "toy:add", "reward": "exact"}
    for environment in (f"{file}:Guess", {"name": f"{file}:Guess"}):
        with pytest.raises(ConfigError, match="code does not run on the server"):
            validated({**tree, "environment": environment}, Allowed(False, {}, Addresses(), Walls()))


def pages_python(name: str) -> list[str]:
    text = (Path(__file__).parents[2] / "docs" / f"{name}.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_pages_classes_are_environments(tmp_path: Path) -> None:
    guess, till, solution = pages_python("environments")
    (tmp_path / "sorted.py").write_text(solution)
    written = call("python", code="open('solution.py', 'w').write('sort = sorted')")
    (rollout,), _, _ = played(tmp_path / "sorted.py", "Sorted", lambda index, turn, read: [written, "Done."][turn], 1)
    assert (rollout.reward, rollout.error) == (1.0, "")
    (tmp_path / "guess.py").write_text(guess)
    (tmp_path / "till.py").write_text(till)
    (rollout,), _, _ = played(tmp_path / "guess.py", "Guess", lambda index, turn, read: ["x", "9", "7"][turn], 1)
    assert [turn.reward for turn in rollout.turns] == [-1.0, 0.0, 1.0]
    said = [call("sell", item="pot", price="400", number=2), "Done."]
    (rollout,), _, _ = played(tmp_path / "till.py", "Till", lambda index, turn, read: said[turn], 1)
    assert rollout.reward == 8.0


def test_the_pages_algorithm_is_one(tmp_path: Path) -> None:
    (own,) = [example for example in pages_python("algorithms") if "Sharpened" in example]
    (tmp_path / "sharpened.py").write_text(own)
    run_jobs(tmp_path / "run", [job("a", algorithm={"type": f"{tmp_path}/sharpened.py:Sharpened", "power": 3})])
    assert records(tmp_path / "run", "a")[0]["grad_norm"] > 0
