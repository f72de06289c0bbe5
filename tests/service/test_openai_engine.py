"""The stock `openai` client against a service with its engine: the page's script, jobs, graders and completions."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from motet.rewards.graders.shapes import Judge, parse
from motet.rewards.graders.template import Fields
from motet.rewards.judging import prompt
from tests.support.openai_requests import GRADER, JUDGE, PYTHON, SHORT, WORDS, client_of, method, rows, uploaded
from tests.support.pages import fences
from tests.support.service_run import Json, Service, tiny
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.slow
PAGE = Path(__file__).resolve().parents[2] / "docs" / "openai.md"


@pytest.fixture
def service(shared_service: Service) -> Service:
    return shared_service


@pytest.fixture
def stock(service: Service) -> Iterator[openai.OpenAI]:
    """The client of that service."""
    with client_of(service.url) as found:
        yield found


def ended(service: Service, client: openai.OpenAI, job: str) -> Any:
    """A job that has ended."""
    service.until(lambda: client.fine_tuning.jobs.retrieve(job).status in ("succeeded", "failed", "cancelled"))
    return client.fine_tuning.jobs.retrieve(job)


def test_the_script_of_the_page_runs(service: Service, tmp_path: Path) -> None:
    (script,) = fences(PAGE.read_text(), "py")
    env = service.environment("none")
    ran = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0] == "the grader gives 1.0"
    assert lines[1] == "The job is succeeded"
    assert lines[2].startswith("Step 4/4: training reward ")
    assert [line.split()[0] for line in lines if "@" in line][:2] == ["4", "3"]
    job = service.job(service.ask("GET", "/v1/jobs")["data"][0]["id"])
    assert job["name"].startswith("letters-")
    assert (job["state"], job["steps"]) == ("succeeded", 4)


def test_a_job_is_watched_to_its_end(service: Service, stock: openai.OpenAI) -> None:
    training, validation = uploaded(stock, rows(*WORDS)), uploaded(stock, rows("LAMP", "ROSE"))
    job = stock.fine_tuning.jobs.create(
        model="small", training_file=training, validation_file=validation, extra_body=SHORT,
        method=method(n_epochs=1, batch_size=2, eval_interval=2),
    )  # fmt: skip
    done = ended(service, stock, job.id)
    name = service.job(job.id)["name"]
    assert (done.status, done.fine_tuned_model, done.error) == ("succeeded", f"{name}@best", None)
    assert done.finished_at >= done.created_at
    assert done.trained_tokens is not None
    told = list(stock.fine_tuning.jobs.list_events(job.id, limit=2))  # over several pages
    assert len({event.id for event in told}) == len(told) == len(service.events(name))
    assert [event.message for event in told if event.type == "message"] == [
        "The job is succeeded", "The job is running", "The job is queued",
    ]  # fmt: skip
    steps: list[Any] = [event.data for event in told if event.type == "metrics"]
    assert [step["step"] for step in steps] == [4, 4, 3, 2, 1]
    assert {step["total_steps"] for step in steps} == {4}
    assert [step["valid_mean_reward"] is not None for step in steps] == [True, False, True, False, True]
    kept = list(stock.fine_tuning.jobs.checkpoints.list(job.id, limit=1))
    assert [one.step_number for one in kept][:2] == [4, 3]
    assert kept[0].fine_tuned_model_checkpoint == f"{name}@4"
    assert (kept[0].metrics.step, kept[0].metrics.train_loss) == (4, steps[1]["metrics"]["loss"])
    asked: Json = {"messages": [{"role": "user", "content": "Sort."}], "max_tokens": 8, "seed": 1}
    for model in (done.fine_tuned_model, kept[1].fine_tuned_model_checkpoint):
        assert stock.chat.completions.create(model=model, **asked).choices[0].finish_reason in ("stop", "length")
    further = stock.fine_tuning.jobs.create(
        model=done.fine_tuned_model, training_file=training, method=method(n_epochs=1, batch_size=8), extra_body=SHORT
    )
    assert ended(service, stock, further.id).status == "succeeded"


def test_a_job_is_paused_resumed_and_cancelled(service: Service, stock: openai.OpenAI) -> None:
    asked: Json = {"model": "small", "training_file": uploaded(stock, rows(*WORDS)), "extra_body": SHORT}
    job = stock.fine_tuning.jobs.create(**asked, method=method(n_epochs=200, batch_size=2))
    service.reaches(job.id, 1)
    stock.fine_tuning.jobs.pause(job.id)
    service.becomes(job.id, "paused")
    assert str(stock.fine_tuning.jobs.retrieve(job.id).status) == "paused"
    stock.fine_tuning.jobs.resume(job.id)
    service.becomes(job.id, "running")
    stock.fine_tuning.jobs.cancel(job.id)
    done = ended(service, stock, job.id)
    assert (done.status, done.fine_tuned_model) == ("cancelled", None)
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        stock.fine_tuning.jobs.cancel(job.id)


def test_graders_are_run_and_validated(service: Service, stock: openai.OpenAI) -> None:
    graders = stock.fine_tuning.alpha.graders
    near: Any = {
        "type": "text_similarity", "name": "near", "input": "{{sample.output_text}}", "reference": "{{item.want}}",
        "evaluation_metric": "rouge_1",
    }  # fmt: skip
    both: Any = {"type": "multi", "name": "m", "graders": {"a": GRADER, "b": near}, "calculate_output": "0.5 * a + b"}
    item: Any = {"want": "the cat"}
    ran = graders.run(grader=both, item=item, model_sample="the cat sat")
    assert ran.reward == pytest.approx(0.8)
    assert ran.sub_rewards == ran.metadata.scores == {"a": 0, "b": pytest.approx(0.8)}
    assert (ran.metadata.name, ran.metadata.type) == ("m", "multi")
    assert not any(value for name, value in ran.metadata.errors if isinstance(value, bool))
    assert graders.run(grader=both, item=item, model_sample="the cat").reward == 1.5
    missing = graders.run(grader=both, item={}, model_sample="x")
    assert (missing.reward, missing.metadata.errors.invalid_variable_error) == (0, True)
    json_field: Any = {**GRADER, "input": "{{sample.output_json.letters}}"}
    assert graders.run(grader=json_field, item=item, model_sample='{"letters": "the cat"}').reward == 1
    odd = graders.run(grader=json_field, item=item, model_sample="the cat")
    assert (odd.reward, odd.metadata.errors.sample_parse_error) == (0, True)
    no_value: Any = {**both, "calculate_output": "a / (a - a)"}
    nothing = graders.run(grader=no_value, item=item, model_sample="x")
    assert (nothing.reward, nothing.metadata.errors.formula_parse_error) == (0, True)
    valid = graders.validate(grader=both).grader
    assert valid is not None
    assert valid.model_dump(exclude_unset=True)["calculate_output"] == "0.5 * a + b"
    odd_ones: list[Any] = [PYTHON, {**near, "evaluation_metric": "meteor"}, {**both, "calculate_output": "open('x')"}]
    for spec in odd_ones:
        with pytest.raises(openai.BadRequestError) as refusal:
            graders.validate(grader=spec)
        assert str(refusal.value.param).startswith("grader.")
        with pytest.raises(openai.BadRequestError):
            graders.run(grader=spec, model_sample="x")
    with pytest.raises(openai.BadRequestError, match="model_sample"):
        graders.run(grader=GRADER, model_sample="x" * 100_001)


def test_a_model_of_the_service_is_the_judge(service: Service, stock: openai.OpenAI) -> None:
    def charged() -> int:
        lines = service.ask("GET", "/v1/usage")["data"]
        return sum(one["tokens_prompt"] + one["tokens_sampled"] for one in lines if one["kind"] == "completions")

    run, before = stock.fine_tuning.alpha.graders.run, charged()
    ran = run(grader=JUDGE, model_sample="x")
    service.until(lambda: charged() - before >= (ran.metadata.token_usage or 0))
    judge = parse(JUDGE)
    assert isinstance(judge, Judge)
    messages: Any = prompt(judge, Fields("item", {}), "x")
    chat = stock.chat.completions.create(model="small", messages=messages, temperature=0)
    assert chat.choices[0].message.content == "It is 0, I think."  # what the small base says to that
    assert chat.usage is not None
    assert (ran.reward, ran.metadata.scores) == (0, {"j": 0})
    assert not ran.metadata.errors.api_model_grader_parse_error
    assert (ran.metadata.sampled_model_name, ran.metadata.token_usage) == ("small", chat.usage.total_tokens)
    narrow: Any = {**JUDGE, "range": [90.5, 90.6]}
    outside = run(grader=narrow, model_sample="x")
    assert outside.metadata.errors.api_model_grader_parse_error
    assert "the judge" in str(outside.metadata.errors.model_dump()["details"])
    label: Any = {**JUDGE, "type": "label_model", "labels": ["say"], "passing_labels": ["say"]}
    assert run(grader=label, model_sample="x").metadata.errors.api_model_grader_parse_error


def test_a_job_learns_from_a_judge(service: Service, stock: openai.OpenAI) -> None:
    mixed = {"type": "multi", "name": "m", "graders": {"a": GRADER, "j": JUDGE}, "calculate_output": "a - j + 2"}
    job = stock.fine_tuning.jobs.create(
        model="small", training_file=uploaded(stock, rows(*WORDS)), method=method(mixed, n_epochs=1, batch_size=4),
        extra_body=SHORT,
    )  # fmt: skip
    assert service.job(job.id)["spec"]["rewards"][0]["name"] == "judge"
    done = ended(service, stock, job.id)
    assert done.status == "succeeded", done.error
    sampled = service.ask("GET", f"/v1/jobs/{job.id}/rollouts?step=0")["data"]
    assert len(sampled) == 16
    assert {one["reward"] for one in sampled} <= {2.0, 3.0}
    strict = {**JUDGE, "range": [90.5, 90.6]}  # nothing that the small base would say
    job = stock.fine_tuning.jobs.create(
        model="small", training_file=job.training_file, method=method(strict, n_epochs=1), extra_body=SHORT
    )
    done = ended(service, stock, job.id)
    assert done.status == "failed"
    assert "the judge" in str(done.error)


# --- completions ------------------------------------------------------------------------------------------------------------

RAW: Json = {"model": "small", "max_tokens": 6, "seed": 5}
PROMPT, OTHER = "Sort the letters of", "The"


def test_a_chat_answer_keeps_to_its_schema(service: Service, stock: openai.OpenAI) -> None:
    """Of the base and of an adapter, in one piece and streamed; one that cannot be kept to is refused with the reason."""
    service.submit(tiny("schema"))
    assert service.ended("schema") == "succeeded"
    words: Any = [{"role": "user", "content": "Sort the letters of CAB."}]
    schema = {
        "type": "object",
        "properties": {"word": {"enum": ["abc", "xyz"]}},
        "required": ["word"],
        "additionalProperties": False,
    }
    kept: Any = {"type": "json_schema", "json_schema": {"name": "word", "schema": schema}}
    for model in ("small", "schema@best"):
        answer = stock.chat.completions.create(model=model, messages=words, response_format=kept, n=3)
        assert all(choice.message.content in ('{"word": "abc"}', '{"word": "xyz"}') for choice in answer.choices)
    pieces = stock.chat.completions.create(model="small", messages=words, response_format=kept, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) in ('{"word": "abc"}', '{"word": "xyz"}')
    plain = stock.chat.completions.create(model="small", messages=words, response_format={"type": "text"}, seed=1)
    assert plain == stock.chat.completions.create(model="small", messages=words, seed=1).model_copy(
        update={"id": plain.id, "created": plain.created}
    )
    for wrong in (
        {"type": "xml"},
        {"type": "json_schema", "json_schema": {"schema": {"type": "number", "multipleOf": "x"}}},
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            stock.chat.completions.create(model="small", messages=words, response_format=wrong)  # type: ignore[call-overload]
        assert refused.value.param == "response_format"


def test_plain_prompts_are_completed(stock: openai.OpenAI) -> None:
    one = stock.completions.create(prompt=PROMPT, logprobs=0, **RAW)
    (choice,) = one.choices
    assert one.object == "text_completion"
    assert one.usage is not None
    assert one.usage.total_tokens == one.usage.prompt_tokens + one.usage.completion_tokens
    assert choice.logprobs is not None
    tokens, logprobs = choice.logprobs.tokens or [], choice.logprobs.token_logprobs or []
    assert len(choice.text) > 3
    assert "".join(tokens) == choice.text
    assert len(tokens) == len(logprobs) == one.usage.completion_tokens
    assert all(value <= 0 for value in logprobs)
    assert choice.logprobs.text_offset == [len("".join(tokens[:place])) for place in range(len(tokens))]
    assert stock.completions.create(prompt=PROMPT, **RAW).choices[0].text == choice.text
    several = stock.completions.create(prompt=[PROMPT, OTHER], n=2, **RAW)
    assert [one.index for one in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == choice.text
    other = stock.completions.create(prompt=OTHER, **RAW)
    assert several.choices[2].text == other.choices[0].text
    assert other.usage is not None
    assert several.usage is not None
    assert several.usage.prompt_tokens == one.usage.prompt_tokens + other.usage.prompt_tokens
    chat = stock.chat.completions.create(messages=[{"role": "user", "content": PROMPT}], **RAW)
    assert chat.usage is not None
    assert chat.usage.prompt_tokens > one.usage.prompt_tokens  # a template stands around it there


def test_a_stream_of_a_plain_prompt_says_the_same(stock: openai.OpenAI) -> None:
    whole = stock.completions.create(prompt=PROMPT, n=2, logprobs=0, **RAW)
    options: Any = {"include_usage": True}
    texts, usage = {0: "", 1: ""}, None
    offsets: dict[int, list[int]] = {0: [], 1: []}
    reasons: dict[int, str | None] = {}
    for piece in stock.completions.create(prompt=PROMPT, n=2, logprobs=0, stream=True, stream_options=options, **RAW):
        usage = piece.usage or usage
        for choice in piece.choices:
            texts[choice.index] += choice.text
            offsets[choice.index] += choice.logprobs.text_offset or [] if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason  # the last piece says it
    assert usage == whole.usage
    for choice in whole.choices:
        assert choice.logprobs is not None
        found = texts[choice.index], offsets[choice.index], reasons[choice.index]
        assert found == (choice.text, choice.logprobs.text_offset, choice.finish_reason)


def test_token_ids_are_a_prompt(stock: openai.OpenAI) -> None:
    ids = stock.completions.create(prompt=[5, 6, 7], **RAW)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3
    both = stock.completions.create(prompt=[[5, 6, 7], [8]], **RAW)
    assert both.choices[0].text == ids.choices[0].text
    with pytest.raises(openai.BadRequestError, match="token id 999999"):
        stock.completions.create(prompt=[999_999], **RAW)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"echo": True}, "echo"), ({"suffix": "x"}, "suffix"), ({"best_of": 2}, "best_of"), ({"logprobs": 5}, "logprobs"),
        ({"logit_bias": {"1": 1}}, "logit_bias"), ({"frequency_penalty": 0.5}, "frequency_penalty"), ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"], "stream": True}, "prompt"),
        ({"extra_body": {"top_k": 3}}, "top_k"), ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": ["a"] * 16, "n": 16}, "n"), ({"stop": ["x" * 501]}, "stop"), ({"stop": ["x"] * 9}, "stop"),
    ],
)  # fmt: skip
def test_what_completions_do_not_do_is_refused_by_name(stock: openai.OpenAI, change: Json, param: str) -> None:
    neutral: Json = {"echo": False, "best_of": 1, "frequency_penalty": 0, "presence_penalty": 0.0}
    assert stock.completions.create(**{**RAW, "prompt": "a", **neutral}).choices
    with pytest.raises(openai.BadRequestError) as refusal:
        stock.completions.create(**{**RAW, "prompt": "a", **change})
    assert str(refusal.value.param).startswith(param)


def test_a_file_without_a_name_is_told_what_it_needs(stock: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"\.jsonl"):
        stock.files.create(file=io.BytesIO(rows(*WORDS)), purpose="fine-tune")
