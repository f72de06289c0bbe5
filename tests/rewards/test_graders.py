"""Graders: what they give, against values worked out by hand from what defines them, and what is refused."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest

from motet.config import RewardConfig
from motet.core.errors import EngineError, GraderError, RewardError
from motet.core.types import Message, Problem
from motet.rewards import graders, judging
from motet.rewards.graders import template
from motet.rewards.graders.shapes import Judge, columns, parse
from motet.rewards.graders.template import Fields, UnfilledError
from motet.rewards.judging import Graded, Graders, VerdictError, prompt, verdict
from motet.rewards.reward_answers import ScoreOutcome
from motet.rewards.reward_pool import RewardPool
from motet.rewards.reward_walls import Walls

SAID, ROW = "{{sample.output_text}}", "{{ item.want }}"


def check(operation: str, text: str = SAID, reference: str = ROW) -> dict[str, Any]:
    """A string_check grader."""
    return {"type": "string_check", "name": "c", "input": text, "reference": reference, "operation": operation}


def near(metric: str) -> dict[str, Any]:
    """A text_similarity grader."""
    return {"type": "text_similarity", "name": "n", "input": SAID, "reference": ROW, "evaluation_metric": metric}


def multi(formula: str, **parts: Any) -> dict[str, Any]:
    """A multi grader."""
    return {"type": "multi", "name": "m", "graders": parts, "calculate_output": formula}


def judge(**fields: Any) -> dict[str, Any]:
    """A score_model grader."""
    asked = [{"role": "user", "content": f"Rate {SAID}"}]
    return {"type": "score_model", "name": "j", "model": "base", "input": asked, **fields}


def given(spec: dict[str, Any], said: str, **item: Any) -> float:
    """The score of an answer."""
    return graders.grade(parse(spec), item, said)


# --- scores -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "said", "want", "score"),
    [
        ("eq", "Paris", "Paris", 1), ("eq", "paris", "Paris", 0), ("eq", "Paris.", "Paris", 0),
        ("ne", "Paris", "Paris", 0), ("ne", "paris", "Paris", 1),
        ("like", "In Paris.", "Paris", 1), ("like", "In paris.", "Paris", 0), ("like", "Par", "Paris", 0),
        ("ilike", "In PARIS.", "Paris", 1), ("ilike", "Rome", "Paris", 0),
    ],
)  # fmt: skip
def test_a_string_check_compares(operation: str, said: str, want: str, score: float) -> None:
    assert given(check(operation), said, want=want) == score


THREE, TWO = "the cat sat", "the cat"
FOUR, OTHER = "the cat sat on", "the cat sat down"


@pytest.mark.parametrize(
    ("metric", "said", "want", "score"),
    [
        ("rouge_1", THREE, TWO, 0.8),  # precision 2/3, recall 1
        ("rouge_2", THREE, TWO, 2 / 3),  # bigrams: precision 1/2, recall 1
        ("rouge_3", FOUR, OTHER, 1 / 2),  # one trigram of two in common
        ("rouge_l", "sat the cat", TWO, 0.8),  # longest common subsequence 2 of 3 and of 2
        ("bleu", FOUR, OTHER, (3 / 4 * 2 / 3 * 1 / 2 * 1 / 2) ** 0.25),  # no 4-gram: smoothed to 1/2
        ("bleu", TWO, TWO, 1.0),
        ("gleu", THREE, TWO, 1 / 2),  # 3 of 6 n-grams
        ("gleu", FOUR, OTHER, 6 / 10),
        ("fuzzy_match", "abcd", "abce", 3 / 4),  # 2 · 3 of 8 letters
        ("fuzzy_match", "Paris!", "paris", 1.0),  # case and punctuation aside
        ("rouge_l", "", TWO, 0.0), ("bleu", "", TWO, 0.0), ("gleu", "", TWO, 0.0), ("fuzzy_match", "", TWO, 0.0),
    ],
)  # fmt: skip
def test_a_similarity_is_that_of_its_definition(metric: str, said: str, want: str, score: float) -> None:
    assert given(near(metric), said, want=want) == pytest.approx(score)


@pytest.mark.parametrize(
    ("formula", "score"),
    [
        ("a", 1), ("(a + b) / 2", 0.5), ("2 * a ^ 3 - b", 2), ("2 ^ 3 ^ 0", 2), ("-a ^ 2", -1), ("min(a, b)", 0),
        ("max(a, b, 3)", 3), ("max(-1)", -1), ("abs(b - a)", 1), ("floor(0.7 * a)", 0), ("ceil(0.2)", 1), ("exp(b)", 1),
        ("sqrt(4 * a)", 2), ("log(a)", 0), ("1e2 * a", 100), ("a ** 2", 1),
    ],
)  # fmt: skip
def test_a_formula_is_arithmetic(formula: str, score: float) -> None:
    assert given(multi(formula, a=check("eq"), b=check("ne")), "x", want="x") == score


def test_one_text_is_a_message_and_one_grader_a_mapping_by_its_name() -> None:
    assert parse(judge(input="Rate it")) == parse(judge(input=[{"role": "user", "content": "Rate it"}]))
    assert parse({**multi("c"), "graders": check("eq")}) == parse(multi("c", c=check("eq")))


@pytest.mark.parametrize("formula", ["a / b", "sqrt(b - a)", "log(b)", "exp(1000 * a)", "10 ^ 400", "(b - a) ^ 0.5"])
def test_a_formula_without_a_value_is_told(formula: str) -> None:
    with pytest.raises(ValueError, match="calculate_output"):
        given(multi(formula, a=check("eq"), b=check("ne")), "x", want="x")


ODD_FORMULAS = [
    "", "a +", "c", "a if b else 1", "__import__('os')", "a.real", "a[0]", "a < b", "a and b", "lambda: a", "'a'", "a; b",
    "max(*a)", "min()", "sqrt(a, b)", "round(a)", "a // b", "a % b", "~a", "max(a, key=b)", "True", "1j", "(a" * 300,
    "-" * 1500 + "a", "-" * 60 + "a", "a" + "+a" * 1500, "9" * 400,
]  # fmt: skip


@pytest.mark.parametrize("formula", ODD_FORMULAS)
def test_what_is_no_arithmetic_is_refused(formula: str) -> None:
    with pytest.raises(GraderError) as refusal:
        parse(multi(formula, a=check("eq"), b=check("ne")))
    assert refusal.value.where == "grader.calculate_output"


# --- variables --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("{{item.a}}", "1"), ("{{ item.a }}-{{item.b}}", "1-text"), ("{{item.c.d[1]}}", "y"),
        ("{{item.c}}", '{"d": ["x", "y"]}'),
        ("{{item.none}}", "null"), ("{{sample.output_json.v[0].w}}", "é"), ("{{sample.output_json}}", '{"v": [{"w": "é"}]}'),
        ("{item.a}", "{item.a}"), ("{{item.brace}}", "{{item.a}}"), ("plain", "plain"), ("{{item.a-b}}", "dash"),
    ],
)  # fmt: skip
def test_variables_are_filled_in(text: str, filled: str) -> None:
    item = {"a": 1, "b": "text", "c": {"d": ["x", "y"]}, "none": None, "brace": "{{item.a}}", "a-b": "dash"}
    assert given(check("eq", text, "{{item.f}}"), '{"v": [{"w": "é"}]}', f=filled, **item) == 1


@pytest.mark.parametrize(
    "text", ["{{want}}", "{{item}}", "{{sample}}", "{{item.a + 1}}", "{{sample.choices}}", "{{sample.output_text.x}}",
             "{{sample.output_tools}}", "{{other.x}}", "{{}}", "{{item.a|upper}}", "{{item['a']}}", "{{item..a}}"],
)  # fmt: skip
def test_what_is_no_variable_is_refused(text: str) -> None:
    with pytest.raises(GraderError, match="input"):
        parse(check("eq", text))


@pytest.mark.parametrize("said", ["no JSON", "[" * 100_000, '{"b": 1}', "[]", '"a"', ""])
def test_an_answer_without_what_is_named_scores_nothing(said: str) -> None:
    for operation in ("eq", "ne"):
        assert given(check(operation, "{{sample.output_json.a}}", "x"), said) == 0


def test_filling_takes_time_by_the_length_and_not_more() -> None:
    started = time.process_time()
    assert template.variables("{" * 100_000) == []
    assert template.variables("{{item.a}}" * 10_000) == [("item", ("a",))] * 10_000
    assert template.fill("{{item.a}}{{{" + "{" * 90_000, Fields("item", {"a": "x"}), "") == "x{{{" + "{" * 90_000
    assert time.process_time() - started < 2


def test_what_is_filled_in_is_bounded() -> None:
    half = "x" * (template.MOST_FILLED // 2)
    row = Fields("item", {"a": half})
    assert len(template.fill("{{item.a}}{{item.a}}", row, "")) == template.MOST_FILLED
    for text, of_item in (("{{item.a}}-{{item.a}}", True), ("{{item.a}}-{{sample.output_text}}", False)):
        with pytest.raises(UnfilledError, match="characters") as refused:
            template.fill(text, row, half)
        assert refused.value.of_item is of_item
    several = judge(input=[{"role": "user", "content": "{{item.a}}"}] * 3)
    asked = parse(several)
    assert isinstance(asked, Judge)
    with pytest.raises(UnfilledError, match="messages to the judge"):
        prompt(asked, row, "")


def test_a_field_of_a_row_is_made_into_text_once_for_all_answers() -> None:
    asked = parse(judge(input=[{"role": "user", "content": "{{item.a}}"}] * 100))

    async def nobody(*_: Any) -> tuple[str, int]:
        raise AssertionError

    started = time.process_time()
    found = asyncio.run(Graders(Walls()).graded("me", asked, {"a": ["x" * 10] * 60_000}, ["x"] * 4, nobody))
    assert all("messages to the judge" in one.faults["variable"] for one in found)
    assert time.process_time() - started < 2


def test_the_open_questions_about_long_rows_are_few() -> None:
    asked = parse(judge(input=[{"role": "user", "content": "{{item.a}}"}]))
    open_now = most = 0

    async def answered(_: Any, messages: Any) -> tuple[str, int]:
        nonlocal open_now, most
        open_now += len(messages[0]["content"])
        most = max(most, open_now)
        try:
            await asyncio.sleep(0.01)
        finally:
            open_now -= len(messages[0]["content"])
        return '{"result": 1}', 1

    async def graded(letters: int) -> list[Graded]:
        graders = Graders(Walls())
        work = graders.graded("me", asked, {"a": "x" * letters}, ["y"] * 64, answered)
        first = asyncio.create_task(graders.graded("me", asked, {"a": "x" * letters}, ["y"] * 64, answered))
        await asyncio.sleep(0.005)
        first.cancel()  # what it has taken is free again
        return await work

    for letters, together in ((2**20, 18 * 2**20), (100, 2**16)):
        most = open_now = 0
        assert [one.reward for one in asyncio.run(graded(letters))] == [1.0] * 64
        assert most < together
    assert most > 64 * 100  # short ones are all asked at once


COSTLY = {"Fields.text", "pieces_of", "prompt", "_pieces", "_split", "_text", "_check", "_shuffled"}
"""What works on the templates, rows and answers of a question."""


@pytest.mark.parametrize(
    "spec",
    [
        judge(input=[{"role": "user", "content": f"{ROW} {SAID}"}]),
        judge(type="label_model", labels=["1", "2"], passing_labels=["1"], input=[{"role": "user", "content": ROW}]),
        judge(type="rank", input=[{"role": "user", "content": ROW}]),
        check("eq"),
        multi("a + b", a=judge(name="a", input=[{"role": "user", "content": ROW}]), b=check("eq")),
    ],
    ids=["score", "label", "rank", "check", "multi"],
)
def test_templates_are_filled_outside_the_loop_and_their_owner_is_charged(spec: dict[str, Any]) -> None:
    """Each thread's calls are noted: none of the loop's works on a template, and all that do are charged for it."""
    filled, charged, grader = dict[int, set[str]](), list[tuple[str, int, float]](), parse(spec)

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename in (judging.__file__, template.__file__) and code.co_qualname in COSTLY:
            filled.setdefault(threading.get_ident(), set()).add(code.co_qualname)

    def charge(owner: str, seconds: float) -> None:
        charged.append((owner, threading.get_ident(), seconds))

    async def answered(*_: Any) -> tuple[str, int]:
        return '{"result": 1, "order": [1, 2, 3, 4]}', 1

    async def scenario() -> list[Graded]:
        asked = Graders(Walls(), charge)
        sys.setprofile(note)
        try:
            return await asked.graded("me", grader, {"want": ["x" * 10] * 9000}, list("abcd"), answered)
        finally:
            sys.setprofile(None)
            await asked.close()

    threading.setprofile(note)
    try:
        found = asyncio.run(scenario())
    finally:
        threading.setprofile(None)
    loop = threading.get_ident()
    assert len(found) == 4
    assert filled
    assert loop not in filled, filled[loop]
    filling = [(owner, thread, seconds) for owner, thread, seconds in charged if thread in filled]
    assert {thread for _, thread, _ in filling} == filled.keys()
    assert {owner for owner, _, _ in charged} == {"me"}
    assert sum(seconds for _, _, seconds in filling) > 0


@pytest.mark.parametrize("last", ["a", "b"])
def test_what_parts_find_is_in_their_order_whichever_is_judged_last(last: str) -> None:
    """Also what is told where several fail."""
    both = parse(multi("a + b", a=judge(name="a", model="a"), b=judge(name="b", model="b")))

    def graded(fail: bool) -> Graded:
        other_answered = asyncio.Event()

        async def answer(part: Judge, _: Any) -> tuple[str, int]:
            if part.model == last:
                await other_answered.wait()
            other_answered.set()
            if fail:
                raise EngineError(f"{part.model} is away")
            return '{"result": 1}', 1

        async def one() -> Graded:
            return (await Graders(Walls()).graded("me", both, {}, ["x"], answer))[0]

        return asyncio.run(one())

    found = graded(fail=False)
    assert (list(found.parts), list(found.tokens), found.reward) == (["a", "b"], ["a", "b"], 2)
    assert graded(fail=True).faults == {"server": "a is away"}


def test_a_row_without_what_is_named_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"item\.want"):
        given(check("eq"), "x")
    assert columns(parse(multi("a", a=check("eq"), b=check("eq", "{{item.x.y}}")))) == {"want", "x"}


# --- what is refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "where", "words"),
    [
        ([], "grader", "type"),
        ({"type": "regex"}, "grader.type", "string_check"),
        ({"type": "python", "name": "p", "source": "1"}, "grader.type", "sandbox"),
        ({**check("eq"), "operation": "has"}, "grader.operation", "ilike"),
        ({**check("eq"), "case": True}, "grader.case", "not supported"),
        (check("eq", "{{item.a}}" * 1000), "grader.reference", "1000 variables"),
        ({"type": "string_check", "input": "x", "operation": "eq"}, "grader.reference", "required"),
        (near("cosine"), "grader.evaluation_metric", "embeddings"),
        (near("meteor"), "grader.evaluation_metric", "WordNet"),
        (multi("a", a={"type": "python", "source": ""}), "grader.graders.a.type", "sandbox"),
        (multi("a", a=multi("b", b=check("eq"))), "grader.graders.a", "another"),
        (multi("a"), "grader.graders", "at least 1"),
        ({**multi("a"), "graders": [check("eq")]}, "grader.graders", "mapping"),
        (judge(range=[1, 0]), "grader", "range"),
        (judge(sampling_params={"reasoning_effort": "low"}), "grader.sampling_params.reasoning_effort", "not supported"),
        (judge(input=[{"role": "user", "content": {"type": "input_image"}}]), "grader.input.0.content", "text"),
        ({**judge(), "type": "label_model", "labels": ["a"], "passing_labels": ["b"]}, "grader", "'b'"),
    ],
)  # fmt: skip
def test_a_grader_that_cannot_be_had_is_refused_with_the_field(spec: Any, where: str, words: str) -> None:
    with pytest.raises(GraderError, match=words) as refusal:
        parse(spec)
    assert refusal.value.where == where


def test_a_missing_library_is_named() -> None:
    """In a process of its own, which cannot import it."""
    code = (
        "import sys; sys.modules['rapidfuzz'] = None\n"
        "from motet.rewards.graders.similarity import check_metric\n"
        "try:\n    check_metric('fuzzy_match')\nexcept ValueError as error:\n    print(error)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "rapidfuzz" in told
    assert "motet[graders]" in told


# --- as a reward ------------------------------------------------------------------------------------------------------------


def scored(spec: dict[str, Any], *answers: str) -> list[ScoreOutcome]:
    """By a job's own process."""

    async def run() -> list[ScoreOutcome]:
        pool = RewardPool(1)
        try:
            await pool.register("job", [RewardConfig(name="grader", args=spec)])
            problem = Problem(0, (Message("user", "q"),), "", {"want": "x"})
            return await pool.score("job", problem, answers)
        finally:
            await pool.close()

    return asyncio.run(run())


def test_a_grader_is_a_reward_of_any_job() -> None:
    spec = multi(
        "(a + b + q) / 3", a=check("eq"), b=near("rouge_1"), q=check("like", "{{item.messages[0].content}}", "q")
    )
    assert [one.reward for one in scored(spec, "x", "y")] == pytest.approx([1, 1 / 3])
    (missing,) = scored(check("eq", SAID, "{{item.nothing}}"), "x")
    assert "item.nothing" in missing.error


def test_an_owner_waits_for_few_rows_of_another_with_the_same_grader() -> None:
    long = "word " * 1500  # most of a second for an answer

    async def nobody(*_: Any) -> tuple[str, int]:
        raise AssertionError

    async def rows_before() -> int:
        graders = Graders(Walls())

        async def graded(owner: str, text: str, answers: int) -> list[Graded]:
            return await graders.graded(owner, parse(near("rouge_l")), {"want": text}, [text] * answers, nobody)

        try:
            await graded("quick", "a", 1)  # its process starts
            slow = [asyncio.create_task(graded("slow", long, 8)) for _ in range(20)]
            await asyncio.sleep(0)  # they are before the next one
            (quick,) = await graded("quick", "a", 1)
            assert quick.reward == 1
            before = sum(one.done() for one in slow)
            for one in slow:
                one.cancel()
            await asyncio.gather(*slow, return_exceptions=True)
            return before
        finally:
            await graders.close()

    assert asyncio.run(rows_before()) < 3


@pytest.mark.parametrize(("spec", "words"), [(check("has"), "operation"), (judge(), "motet serve")])
def test_a_reward_that_cannot_be_run_is_refused_before_the_job(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(RewardError, match=words):
        scored(spec, "x")


# --- judges -----------------------------------------------------------------------------------------------------------------


def judged(said: str, **fields: Any) -> float:
    """What is read out of a judge's words."""
    found = parse(judge(**fields))
    assert isinstance(found, Judge)
    return verdict(found, said)


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ('{"result": 0.25}', 0.25), ('Well. {"steps": [], "result": "0.5"}', 0.5), ("0.1, no: 0.75", 0.75),
        ('{"result":1e-1} 7', 0.1),
    ],
)  # fmt: skip
def test_a_score_is_read_out_of_what_a_judge_says(said: str, score: float) -> None:
    assert judged(said) == score


@pytest.mark.parametrize(("said", "words"), [("good", "no number"), ("", "no number"), ("8", "not from 0 to 1")])
def test_a_judge_that_gives_no_score_is_told(said: str, words: str) -> None:
    with pytest.raises(VerdictError, match=words):
        judged(said)
    assert judged("8", range=[0, 10]) == 8


@pytest.mark.parametrize(
    ("said", "score"), [("Good", 1), (' "bad". ', 0), ("It is good!", 1), ("not good, bad", None), ("", None)]
)
def test_a_label_is_read_out_of_what_a_judge_says(said: str, score: float | None) -> None:
    labels: dict[str, Any] = {"type": "label_model", "labels": ["good", "bad"], "passing_labels": ["good"]}
    if score is None:
        with pytest.raises(VerdictError, match="labels"):
            judged(said, **labels)
    else:
        assert judged(said, **labels) == score


def test_a_judge_is_told_what_to_end_with() -> None:
    parts = [{"type": "input_text", "text": "Rate "}, {"type": "input_text", "text": SAID}]
    asked = [{"role": "developer", "content": "Be strict."}, {"role": "user", "content": parts}]
    found = parse(judge(input=asked, range=[0, 5]))
    assert isinstance(found, Judge)
    system, user = prompt(found, Fields("item", {}), "this")
    assert system == {"role": "system", "content": "Be strict."}
    assert user["content"].startswith("Rate this\n\n")
    assert "from 0 to 5" in user["content"]
