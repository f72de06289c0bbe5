"""Warnings about a training that goes nowhere, and none about one that learns."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet.chat.template import Chat
from motet.config import JobConfig
from motet.config.mistakes import FIELDS
from motet.core.types import FinishReason, Group, Message, Problem, Rollout, Turn
from motet.data.dataset import load_dataset
from motet.data.rows import row_of
from motet.observe.report.read import diagnoses_of
from motet.rewards.rewards import exact
from motet.runtime.answer_signs import NO_SIGNAL, in_thought, no_signal
from motet.runtime.diagnoses import ALIKE, FAR, LEAST, RECENT, Diagnoses
from motet.runtime.held_out import figure_of
from motet.runtime.metrics import group_metrics
from motet.runtime.progress import JobProgress
from tests.support.counting import calls
from tests.support.following import followed
from tests.support.speaking_bases import SPEAKERS

pytestmark = pytest.mark.tier1

ROOT = Path(__file__).resolve().parents[2]

Values = list[float | None]


def warnings(steps: int = 2 * RECENT, **fields: Any) -> tuple[str, ...]:
    """Of a job whose lines have these values: one throughout, or one for each step."""
    usual = {"reward": 0.3, "reward_std": 0.4, "no_signal": 0.2, "distinct": 0.8, "kl_base": None} | fields
    signs = Diagnoses()
    for step in range(steps):
        signs.see(
            {name: value[step] if isinstance(value, list) else value for name, value in usual.items()} | {"step": step}
        )
    signs.see({"step": steps, "version": steps, "eval": {}})
    return tuple(one.says for one in signs.diagnoses)


def test_views_that_look_often_cost_nothing_between_two_steps() -> None:
    """A service looks at each of its jobs twice a second, and with hundreds of them a step of one takes a minute."""
    signs = Diagnoses()
    with calls() as counted:
        for step in range(LEAST):
            signs.see({"no_signal": 1.0, "reward": 0.0, "reward_std": 0.0, "rollouts": 8})
            shown = [signs.warnings for _ in range(50)][-1]
            assert ("no-signal" in shown) == (step == LEAST - 1)
        for version, reward in ((0, 0.9), (5, 0.1)):
            signs.see_evaluation(version, {"reward": reward, "reward_stderr": 0.01})
            shown = [signs.warnings for _ in range(50)][-1]
    assert "worse" in shown
    assert counted["Diagnoses.diagnoses"] == LEAST + 2


def test_an_ordinary_training_is_not_warned_about() -> None:
    assert warnings() == ()


@pytest.mark.parametrize("reward", [0.0, 0.02, 0.97])
def test_groups_without_signal(reward: float) -> None:
    (warning,) = warnings(reward=reward, reward_std=0.1, no_signal=0.9)
    assert warning.startswith(f"no signal in 90% of the groups (mean reward {reward:.2g}): too hard or too easy")
    (named,) = warnings(reward=reward, reward_std=0.1, no_signal=0.9, reward_range=(0.0, 1.0))
    assert ("near the highest seen, 1): too easy" if reward > 0.9 else "highest seen, 1): too hard") in named
    assert warnings(no_signal=NO_SIGNAL - 0.01) == ()
    never = warnings(reward=0.0, reward_std=0.0, no_signal=1.0, reward_range=(0.0, 0.0))
    assert "no answer got more; teach the form first" in never[0]
    assert warnings(LEAST - 1, no_signal=1.0) == (), "a few steps say little"
    assert warnings(no_signal=[1.0] * RECENT + [0.1] * RECENT) == (), "what is past does not count"


@pytest.mark.parametrize(
    "algorithm", ["reinforce", {"type": "ppo", "critic": {}}, {"type": "distill", "teacher": "teachers/v3"}]
)
def test_groups_whose_rewards_are_equal_are_no_trouble_where_they_teach(algorithm: Any) -> None:
    """A baseline of the whole step, a critic and a teacher teach from them too; a teacher's KL is not to the base."""
    config = JobConfig.model_validate({"name": "a", "data": "toy:add", "reward": "exact", "algorithm": algorithm})
    for signs in (JobProgress.of(config).diagnoses, diagnoses_of(config.model_dump(mode="json"))):
        for step in range(LEAST):
            signs.see(
                {"step": step, "reward": 0.4, "reward_std": 0.4, "no_signal": 0.9, "distinct": 0.8, "samples": 32}
            )
        assert signs.diagnoses == []
    none = diagnoses_of(config.model_dump(mode="json"))
    for step in range(LEAST):
        none.see({"step": step, "reward": 0.0, "reward_std": 0.0, "no_signal": 1.0, "distinct": 0.8})
    assert [one.kind for one in none.diagnoses] == ([] if config.algorithm.type == "distill" else ["no-signal"])
    far = diagnoses_of(config.model_dump(mode="json"))
    for step in range(LEAST):
        far.see({"step": step, "reward": 0.4, "reward_std": 0.4, "no_signal": 0.1, "distinct": 0.8, "kl_base": 2.0})
    assert [one.kind for one in far.diagnoses] == ([] if config.algorithm.type == "distill" else ["far"])


def test_answers_that_nothing_rewards_are_not_judged() -> None:
    assert (
        warnings(reward=None, reward_std=None, no_signal=1.0, kl_base=2.0, distinct=[0.8] * RECENT + [0.1] * RECENT)
        == ()
    )


def test_problems_are_not_blamed_where_most_answers_have_no_reward() -> None:
    lost = {"reward": [0.9] * RECENT + [0.1] * RECENT, "reward_std": 0.4, "no_signal": [0.1] * RECENT + [1.0] * RECENT}
    for figures in ({"reward": 1.0, "reward_std": 0.0, "no_signal": 1.0}, lost):
        (blamed,) = warnings(2 * RECENT, rollouts=16, failed=7, **figures)[1:]
        assert blamed.startswith(("no signal", "had signal and lost it"))
        (failed,) = warnings(2 * RECENT, rollouts=16, failed=14, **figures)
        assert failed.endswith("rollouts have no reward")


def test_what_has_been_learned_has_no_signal_left() -> None:
    learned = [min(0.1 + 0.1 * step, 0.98) for step in range(2 * RECENT)]
    assert warnings(reward=learned, no_signal=0.9, distinct=[0.8] * RECENT + [0.2] * RECENT) == ()


def test_a_little_luck_is_no_rise() -> None:
    """Rewards of 0 that are once in a while 0.02 have not begun to learn."""
    lucky = [0.0] * RECENT + [0.0, 0.02] * (RECENT // 2)
    assert warnings(reward=lucky, reward_std=[5 * value for value in lucky], no_signal=0.95)


def test_far_from_the_base() -> None:
    assert warnings(kl_base=[0.2] * (2 * RECENT - 1) + [FAR - 0.01]) == ()
    kl: Values = [None] * (2 * RECENT)
    kl[3] = 3.1
    assert warnings(kl_base=[8.3] * RECENT, version=list(range(RECENT)), steps=RECENT) == (), "SFT went there"
    assert warnings(kl_base=kl) == (
        "far from the base: KL 3.1 nats per token; lower optimizer.lr, or set algorithm.kl.coef to 0.01",
    )


def test_answers_that_grow_alike() -> None:
    def falling(to: float) -> list[float]:
        return [0.8] * RECENT + [to] * RECENT

    (warning,) = warnings(distinct=falling(0.8 * ALIKE - 0.01))
    assert warning.startswith("answers grow alike, and not better: 39% of a group's are distinct, at first 80%")
    assert warnings(distinct=falling(0.8 * ALIKE + 0.01)) == ()
    assert warnings(distinct=0.13) == (), "yes or no: few answers are all there are"


def test_far_from_the_base_is_no_trouble_where_the_reward_rises() -> None:
    rising = [0.1 + 0.04 * step for step in range(2 * RECENT)]
    assert warnings(reward=rising, reward_std=0.3, kl_base=2.0) == ()


def test_signal_that_was_lost_is_told_with_its_cause() -> None:
    fallen = [0.28, 0.12] + [0.0] * RECENT
    share = [0.3, 0.5] + [1.0] * RECENT
    none: Values = [None] * len(share)
    (warning,) = warnings(len(share), reward=fallen, reward_std=0.2, no_signal=share, kl_base=none, lr=0.03)
    assert warning.startswith(
        "had signal and lost it after step 0 (mean reward 0.28, now 0): the learning rate is too high"
    )
    assert "optimizer.lr and begin again" in warning
    few = {"reward": [0.1, 0.35, *[0.1] * RECENT], "reward_std": 0.4, "no_signal": [0.7, 0.5, *[0.9] * RECENT]}
    assert any(one.startswith("had signal") for one in warnings(len(share), rollouts=99, **few))
    (chance,) = warnings(len(share), rollouts=9, **few)
    assert chance.startswith("no signal"), "a few rewards of hard problems are no peak"
    (never,) = warnings(len(share), reward=0.0, reward_std=0.0, no_signal=1.0)
    assert never.startswith("no signal")
    assert warnings(len(share), reward=[*fallen[:-LEAST], *[0.3] * LEAST], no_signal=0.2) == ()


def test_rewards_that_fail_are_counted_with_the_commonest_reason() -> None:
    signs = Diagnoses()
    for errors in ({"ZeroDivisionError (rewards.py:12)": 2, "KeyError": 1}, {"ZeroDivisionError (rewards.py:12)": 4}):
        signs.see({"no_signal": 0.1, "rollouts": 32, "failed": sum(errors.values()), "errors": errors})
    assert signs.warnings == {
        "failed": "hint: 7 of 64 rollouts have no reward, commonest: ZeroDivisionError (rewards.py:12) "
        "(docs/not-learning.md#failed)"
    }
    unknown = Diagnoses()
    unknown.see({"no_signal": 0.1, "rollouts": 32, "failed": 3})
    assert [one.says for one in unknown.diagnoses] == ["3 of 32 rollouts have no reward"]


@pytest.mark.parametrize(
    ("last", "error", "worse"), [(0.5, 0.05, True), (0.8, 0.05, False), (0.5, None, False), (0.95, 0.0, False)]
)
def test_a_version_that_got_worse_beyond_chance_is_told(last: float, error: float | None, worse: bool) -> None:
    signs = Diagnoses()
    for version, reward in ((0, 0.2), (5, 0.9), (10, last)):
        signs.see_evaluation(version, {"reward": reward, "reward_stderr": error})
    assert ("worse" in signs.warnings) == worse
    if worse:
        assert signs.warnings["worse"] == (
            "alarm: v10 is worse on held-out problems than v5 (0.50 against 0.90): take v5 (docs/not-learning.md#worse)"
        )


RISING = [0.1 + 0.04 * step for step in range(2 * RECENT)]


def gamed(monitors: tuple[str, ...] = (), ends: tuple[float, float] = (0.5, 0.5), **fields: Any) -> str:
    """What is said of a job whose reward rises; `ends` are its first and its last held-out reward."""
    signs = Diagnoses(dict.fromkeys(monitors, 0.0))
    for step, reward in enumerate(RISING):
        line = {"reward": reward, "reward_std": 0.3, "no_signal": 0.2, "distinct": 0.8, "step": step}
        signs.see(line | {name: values[step] for name, values in fields.items()})
    for version, held_out in ((0, ends[0]), (2 * RECENT, ends[1])):
        signs.see_evaluation(version, {"reward": held_out, "reward_stderr": 0.05})
    return next((one.says for one in signs.diagnoses if one.kind == "gamed"), "")


def parts(*values: float) -> list[dict[str, float]]:
    """Of a reward that is trained on, which falls, and of a monitor: a little noise around each value, one a step."""
    return [{"mine": -step, "exact": values[step * len(values) // 20] + 0.01 * (step % 3)} for step in range(20)]


def test_a_reward_that_rises_while_a_monitor_falls_is_told() -> None:
    said = gamed(("exact",), reward_parts=parts(0.5, 0.4, 0.2, 0.1))
    assert said.startswith("the reward rises while exact falls (0.51 to 0.11): it may measure something else")
    assert said.endswith("read the rollouts with the highest reward")
    assert gamed(("exact",), reward_parts=parts(0.5, 0.7)) == ""
    assert gamed(("exact",), reward_parts=parts(0.5)) == "", "noise is no fall"
    assert gamed((), reward_parts=parts(0.5, 0.1)) == "", "a part that is trained on may be traded for another"
    assert gamed(("exact",), reward_parts=[{}] * 20) == ""


def test_a_reward_that_rises_while_held_out_falls_is_told() -> None:
    assert gamed(ends=(0.5, 0.2)).startswith("the reward rises while held-out reward falls (0.5 to 0.2): ")
    assert gamed(ends=(0.5, 0.45)) == "", "chance explains it"
    assert gamed(ends=(0.2, 0.5)) == ""


def test_a_reward_that_rises_with_answers_that_never_end_is_told() -> None:
    longer, cut = [20.0 + 3 * step for step in range(20)], [0.05 * step for step in range(20)]
    assert gamed(length=longer, truncated=cut).startswith(
        "the reward rises while 85% of the answers end at max_tokens: "
    )
    assert gamed(length=longer, truncated=[0.1] * 20) == "", "long answers may be good ones"
    assert gamed(length=[40.0] * 20, truncated=[0.9] * 20) == "", "they did from the first step on"
    assert gamed(("exact",), (0.5, 0.2), reward_parts=parts(0.5, 0.1)).startswith(
        "the reward rises while exact falls (0.51 to 0.11) and held-out reward falls (0.5 to 0.2)"
    )


def test_where_no_answer_has_a_reward_the_problems_are_not_blamed() -> None:
    assert warnings(reward=None, reward_std=None, no_signal=1.0) == ()


def test_numbers_that_are_missing_warn_of_nothing() -> None:
    assert warnings(reward=None, reward_std=None, no_signal=None, distinct=None) == ()
    assert no_signal(float("nan"), float("nan"), 0.0, {}) == ""


def test_an_unknown_accuracy_is_no_figure() -> None:
    assert math.isnan(figure_of({"accuracy": None})[1])


def test_answers_that_end_inside_their_thought_are_told_with_what_to_raise() -> None:
    signs = Diagnoses(job={"sampling": {"max_tokens": 128}})
    ill = {"reward": 0.0, "reward_std": 0.0, "no_signal": 1.0, "rollouts": 16, "truncated": 0.9, "in_thought": 13}
    for _ in range(LEAST):
        signs.see(ill)
    (says,) = (one.says for one in signs.diagnoses)
    assert says == (
        "65 of 80 answers end inside the thought: they say nothing that a reward could judge; raise sampling.max_tokens "
        "(it is 128)"
    )
    (says,) = warnings(reward=0.0, no_signal=1.0, rollouts=16, truncated=0.1, in_thought=13)
    assert says.endswith("stop there: they say nothing; train on rows with whole thoughts first (algorithm: sft)")
    (says,) = warnings(reward=0.0, no_signal=1.0, rollouts=16, truncated=0.9, in_thought=7)
    assert says.startswith("no signal"), "most answers say something"


QWEN = Chat(SPEAKERS["qwen35"].tokenizer())
ROW = {
    "messages": [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "reasoning_content": "two and two\n\nis four", "content": "4"},
    ]
}


def sampled(text: str, sampling: dict[str, Any]) -> dict[str, Any]:
    """Metrics of four equal answers in a form whose prompt opens a thought, as far as a job's settings let them go."""
    prompt = QWEN.prompt_ids(Problem(0, (Message("user", "2 + 2?"),), "4"))
    ends = [text.index(stop) for stop in sampling.get("stop", ()) if stop in text]
    whole = QWEN.tokenizer.encode(text[: min(ends, default=len(text))], add_special_tokens=False)
    ids = np.asarray(whole[: sampling["max_tokens"]], np.int32)
    parts = QWEN.parts(prompt, ids, cut_off=len(ids) < len(whole))
    turn = Turn("", FinishReason.LENGTH if len(ids) < len(whole) else FinishReason.STOP, parts)
    problem = Problem(0, (), "4")
    reward = exact(problem, parts.speech)
    rollouts = tuple(Rollout(problem, n, (), (turn,), reward, {"exact": reward}) for n in range(4))
    return group_metrics([Group(problem, 0, 0, rollouts)])


@pytest.mark.parametrize("ill", [{"max_tokens": 2}, {"max_tokens": 99, "stop": ["\n\n"]}])
def test_a_thought_ends_after_what_the_hint_says(ill: dict[str, Any]) -> None:
    """The same turn is then read whole, and its reward is that of its speech."""
    text, job = "two and two\n\nis four\n</think>\n\n4", {"sampling": ill}
    for _ in range(8):
        found = sampled(text, job["sampling"])
        if not (says := in_thought(found.get("in_thought", 0), 4, found["truncated"], job["sampling"])):
            break
        assert found["reward"] == 0.0
        (job,) = followed(job, says).values()
    assert job != {"sampling": ill}
    assert (says, found["reward"]) == ("", 1.0)


def test_rows_with_whole_thoughts_teach_to_end_them() -> None:
    """What is learned where answers stop in their thought: the thought, its end and the answer."""
    says = in_thought(4, 4, 0.0, {"max_tokens": 99})
    assert says.endswith("train on rows with whole thoughts first (algorithm: sft)")
    job = JobConfig.model_validate({"name": "a", "data": {"source": [ROW], "holdout": 0}, "algorithm": "sft"})
    (example,) = row_of(load_dataset(job.data).train[0], "answer", QWEN, "data").examples
    learned = QWEN.tokenizer.decode(example.token_ids[example.loss_mask])
    found = sampled(learned.removesuffix("<|im_end|>"), {"max_tokens": 99})
    assert (found.get("in_thought"), found["reward"]) == (None, 1.0), learned


HINTS = (
    "src/motet/runtime/diagnoses.py",
    "src/motet/runtime/answer_signs.py",
    "src/motet/runtime/evaluations.py",
    "docs/not-learning.md",
)


def test_each_hint_names_a_field_that_a_job_takes() -> None:
    """What a sign says is followed in a job file."""
    sections = "|".join({path.partition(".")[0] for path in FIELDS if "." in path})
    named = {
        found
        for file in HINTS
        for text in texts_of(ROOT / file)
        for found in re.findall(rf"\b(?:{sections})\.(?!md)[a-z_]+(?:\.[a-z_]+)*", text)
    }
    assert len(named) > 8
    assert named <= set(FIELDS), named - set(FIELDS)


def texts_of(file: Path) -> list[str]:
    """A page, or the texts in a module."""
    text = file.read_text()
    if file.suffix == ".md":
        return [text]
    return [
        one.value for one in ast.walk(ast.parse(text)) if isinstance(one, ast.Constant) and isinstance(one.value, str)
    ]
