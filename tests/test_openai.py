"""The stock `openai` client against a service: files, fine-tuning, graders and completions; and what is refused."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from motet.service.rewards.judging import prompt
from motet.tasks.graders.shapes import Judge, parse
from tests.service_run import House, Json, Service, open_house, serving, tiny
from tests.test_docs import fences

PAGE = Path(__file__).resolve().parents[1] / "docs" / "openai.md"
WORDS = ("DCBA", "ZYX", "QWE", "RTY", "SAD", "HGF", "LKJ", "CXZ")
GRADER: Any = {
    "type": "string_check",
    "name": "right",
    "input": "{{sample.output_text}}",
    "reference": "{{item.want}}",
    "operation": "eq",
}
SHORT: Json = {"motet": {"sampling": {"max_tokens": 8}, "algorithm": {"group_size": 4}}}
"""What makes a job of the small base take a second."""


def rows(*words: str, **columns: Any) -> bytes:
    """A file of problems."""
    made = []
    for word in words:
        asked = [{"role": "developer", "content": "Sort."}, {"role": "user", "content": f"Sort the letters of {word}."}]
        made.append(json.dumps({"messages": asked, "want": "".join(sorted(word)), **columns}))
    return "\n".join(made).encode()


def method(grader: Json = GRADER, **hyperparameters: Any) -> Any:
    """Reinforcement with a grader."""
    return {"type": "reinforcement", "reinforcement": {"grader": grader, "hyperparameters": hyperparameters}}


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    """The stock client."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def uploaded(client: openai.OpenAI, data: bytes, name: str = "train.jsonl") -> str:
    """The id of a file."""
    return client.files.create(file=(name, data), purpose="fine-tune").id


# --- without an engine ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One for the whole file."""
    with open_house(tmp_path_factory.mktemp("house")) as found:
        yield found


@pytest.fixture
def client(house: House) -> Iterator[openai.OpenAI]:
    """Of tenant `ours`."""
    with client_of(str(house.http.base_url).rstrip("/"), house.keys["ours"]) as found:
        yield found


def test_files_have_the_clients_shape(house: House, client: openai.OpenAI) -> None:
    data = rows(*WORDS)
    file = client.files.create(file=("a.jsonl", data), purpose="fine-tune")
    assert (file.object, file.purpose, file.status, file.bytes) == ("file", "fine-tune", "processed", len(data))
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == data
    others = [uploaded(client, data, f"{name}.jsonl") for name in "bcd"]
    newest = [one.id for one in client.files.list()]
    assert newest[:4] == [*reversed(others), file.id]
    assert [one.id for one in client.files.list(limit=2)] == newest  # over several pages
    assert [one.id for one in client.files.list(order="asc")] == newest[::-1]
    assert [one.id for one in client.files.list(after=newest[0], limit=100)] == newest[1:]
    assert not client.files.list(purpose="batch").data
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("a.jsonl", data), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        client.files.create(
            file=("a.jsonl", data), purpose="fine-tune", expires_after={"anchor": "created_at", "seconds": 3600}
        )
    house.refused(404, "GET", f"/v1/files/{others[0]}/content", "theirs")


def test_hyperparameters_become_fields_of_the_job(house: House, client: openai.OpenAI) -> None:
    training, validation = uploaded(client, rows(*WORDS)), uploaded(client, rows("LAMP", "ROSE", "DCBA"))
    job = client.fine_tuning.jobs.create(
        model="small",
        training_file=training,
        validation_file=validation,
        suffix="mapped",
        seed=7,
        metadata={"team": "a"},
        method=method(
            n_epochs=3,
            batch_size=4,
            learning_rate_multiplier=0.5,
            compute_multiplier=2,
            eval_interval=5,
            eval_samples=2,
            reasoning_effort="default",
        ),
        extra_body={"motet": {"sampling": {"max_tokens": 8}, "algorithm": {"type": "dr_grpo"}, "data": {"size": 8}}},
    )
    found = house.ask("GET", f"/v1/jobs/{job.id}").json()
    spec = found["spec"]
    assert found["name"].startswith("mapped-")
    assert spec["steps"] == 6  # 3 · 7 / 4, rounded up: one row is in the validation file too
    assert spec["data"]["source"] == training
    assert (spec["data"]["eval_source"], spec["data"]["holdout"], spec["data"]["size"]) == (validation, 3, 8)
    assert spec["algorithm"]["type"] == "dr_grpo"
    assert (spec["algorithm"]["groups_per_step"], spec["algorithm"]["group_size"]) == (4, 16)
    assert spec["optimizer"]["lr_multiplier"] == 0.5
    assert (spec["eval"]["every"], spec["eval"]["n"]) == (5, 2)
    assert (spec["seed"], spec["sampling"]["max_tokens"]) == (7, 8)
    assert spec["rewards"][0]["name"] == "grader"
    assert spec["rewards"][0]["args"] == GRADER
    assert (job.object, job.status, job.seed, job.metadata) == ("fine_tuning.job", "queued", 7, {"team": "a"})
    assert (job.fine_tuned_model, job.finished_at, job.trained_tokens) == (None, None, None)
    assert job.hyperparameters.n_epochs == 3
    again = client.fine_tuning.jobs.retrieve(job.id)
    assert again == job
    assert again.method is not None
    assert again.method.reinforcement is not None
    assert again.method.reinforcement.grader.model_dump() == GRADER
    usual = client.fine_tuning.jobs.create(model="base", training_file=training, method=method(n_epochs="auto"))
    spec = house.ask("GET", f"/v1/jobs/{usual.id}").json()["spec"]
    assert (spec["steps"], spec["algorithm"]["group_size"], spec["data"]["holdout"]) == (50, 8, 0)


def test_jobs_are_listed_page_by_page_and_only_ones_own(house: House, client: openai.OpenAI) -> None:
    client.fine_tuning.jobs.create(model="small", training_file=uploaded(client, rows(*WORDS)), method=method())
    with client_of(str(house.http.base_url).rstrip("/"), house.keys["theirs"]) as client:
        file = uploaded(client, rows(*WORDS))
        made = [
            client.fine_tuning.jobs.create(
                model="small", training_file=file, method=method(), metadata={"number": str(number % 2)}
            ).id
            for number in range(5)
        ]
        house.ask("POST", "/v1/jobs", "theirs", json=tiny("plain"))
        assert [job.id for job in client.fine_tuning.jobs.list(limit=2)] == made[::-1]
        assert [job.id for job in client.fine_tuning.jobs.list(after=made[2])] == made[1::-1]
        assert [job.id for job in client.fine_tuning.jobs.list(metadata={"number": "1"}, limit=1)] == [made[3], made[1]]
        with pytest.raises(openai.NotFoundError):
            client.fine_tuning.jobs.retrieve("plain")
        assert client.fine_tuning.jobs.pause(made[0]).id == made[0]
        house.desk._hear(made[0], "state", {"state": "cancelled", "message": ""})
        with pytest.raises(openai.BadRequestError, match="cancelled"):
            client.fine_tuning.jobs.resume(made[0])
        assert client.fine_tuning.jobs.retrieve(made[0]).status == "cancelled"
        assert house.ask("DELETE", f"/v1/jobs/{made[0]}", "theirs").status_code == 204
        assert made[0] not in [job.id for job in client.fine_tuning.jobs.list()]
        for path in ("", "/events", "/checkpoints"):
            house.refused(404, "GET", f"/v1/fine_tuning/jobs/{made[1]}{path}", "ours")
        house.refused(404, "POST", f"/v1/fine_tuning/jobs/{made[1]}/cancel", "ours")
        with pytest.raises(openai.BadRequestError, match="there is no file") as refusal:  # another tenant's
            client.fine_tuning.jobs.create(model="small", training_file=house.file["id"], method=method())
        assert refusal.value.param == "training_file"


def test_the_same_request_again_is_the_same_job(house: House, client: openai.OpenAI) -> None:
    asked: Json = {"model": "small", "training_file": uploaded(client, rows(*WORDS)), "method": method()}
    headers = {"Idempotency-Key": "tuned"}
    first, second = (client.fine_tuning.jobs.create(**asked, extra_headers=headers) for _ in range(2))
    assert first.id == second.id


PYTHON: Any = {"type": "python", "name": "p", "source": "def grade(sample, item): return 1.0"}
JUDGE: Any = {
    "type": "score_model",
    "name": "j",
    "model": "small",
    "input": [{"role": "user", "content": "Rate this."}],
}


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"model": "gpt-4o-mini"}, "model", "'small'"),
        ({"model": "nobody@best"}, "model", "'small'"),
        ({"training_file": "file-nowhere"}, "training_file", "upload"),
        ({"validation_file": "file-nowhere"}, "validation_file", "upload"),
        ({"method": None}, "method", "supervised"),
        ({"method": {"type": "supervised"}}, "method.type", "'supervised'"),
        ({"method": {"type": "dpo", "dpo": {}}}, "method.type", "'dpo'"),
        ({"method": {"type": "reinforcement"}}, "method.reinforcement", "missing"),
        ({"method": method(PYTHON)}, "method.reinforcement.grader.type", "sandbox"),
        ({"method": method({**GRADER, "operation": "is"})}, "method.reinforcement.grader.operation", "'eq'"),
        ({"method": method({**GRADER, "reference": "{{item.wish}}"})}, "training_file", "row 0 has no column 'wish'"),
        ({"method": method({**JUDGE, "model": "gpt-4o"})}, "method.reinforcement.grader.model", "gpt-4o"),
        ({"method": method(reasoning_effort="high")}, "method.reinforcement.hyperparameters.reasoning_effort", "default"),
        ({"method": method(n_epochs=0)}, "method.reinforcement.hyperparameters.n_epochs", "greater"),
        ({"method": method(rounds=1)}, "method.reinforcement.hyperparameters.rounds", "rounds"),
        ({"hyperparameters": {"n_epochs": 1}}, "hyperparameters", "method.reinforcement"),
        ({"integrations": [{"type": "wandb", "wandb": {"project": "x"}}]}, "integrations", "integrations"),
        ({"suffix": "a/b"}, "suffix", "suffix"),
        ({"seed": -1}, "seed", "seed"),
        ({"extra_body": {"reward_model": 1}}, "reward_model", "reward_model"),
        ({"extra_body": {"motet": {"steps": 3}}}, "motet.steps", "other fields"),
        ({"extra_body": {"motet": {"data": {"source": "toy:add"}}}}, "motet.data", "other fields"),
        ({"extra_body": {"motet": {"sampling": {"tokens": 3}}}}, None, "sampling.tokens"),
        ({"extra_body": {"motet": {"sampling": 3}}}, None, "sampling"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_a_400_that_names_it(
    house: House, client: openai.OpenAI, change: Json, param: str | None, words: str
) -> None:
    before = house.desk.store.counts()
    asked: Json = {"model": "small", "training_file": uploaded(client, rows(*WORDS)), "method": method(), **change}
    with pytest.raises(openai.BadRequestError) as refusal:
        client.fine_tuning.jobs.create(**asked)
    assert (refusal.value.param, words in refusal.value.message) == (param, True), refusal.value.message
    assert house.desk.store.counts() == before


def test_rows_that_cannot_be_used_are_refused_with_their_number(client: openai.OpenAI) -> None:
    good = rows(*WORDS)
    for data, words in (
        (good + b'\n{"prompt": "x", "want": "x"}', "row 8"),
        (good + b'\n{"messages": [], "want": "x"}', "row 8"),
        (good + b'\n{"messages": [{"role": "user", "content": "x"}]}', "row 8 has no column 'want'"),
    ):
        with pytest.raises(openai.BadRequestError, match=words) as refusal:
            client.fine_tuning.jobs.create(model="small", training_file=uploaded(client, data), method=method())
        assert refusal.value.param == "training_file"
    same = uploaded(client, good)
    with pytest.raises(openai.BadRequestError, match="none is left") as refusal:
        client.fine_tuning.jobs.create(model="small", training_file=same, validation_file=same, method=method())
    assert refusal.value.param == "validation_file"


def test_a_version_is_gone_on_from(house: House, client: openai.OpenAI) -> None:
    asked: Json = {"training_file": uploaded(client, rows(*WORDS)), "method": method()}
    job = client.fine_tuning.jobs.create(model="ended@latest", **asked)
    assert house.ask("GET", f"/v1/jobs/{job.id}").json()["spec"]["adapter"]["init"] == "ended@latest"
    assert job.model == "ended@latest"


# --- with an engine ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One that is up for the rest of the file."""
    with serving(tmp_path_factory.mktemp("serve") / "served") as found:
        yield found


@pytest.fixture
def stock(service: Service) -> Iterator[openai.OpenAI]:
    """The client of that service."""
    with client_of(service.url) as found:
        yield found


def ended(service: Service, client: openai.OpenAI, job: str) -> Any:
    """A job that has ended."""
    service.until(lambda: client.fine_tuning.jobs.retrieve(job).status in ("succeeded", "failed", "cancelled"))
    return client.fine_tuning.jobs.retrieve(job)


@pytest.mark.slow
@pytest.mark.xdist_group("service")
def test_the_script_of_the_page_runs(service: Service, tmp_path: Path) -> None:
    (script,) = fences(PAGE.read_text(), "py")
    env = {**os.environ, "MOTET_URL": service.url, "MOTET_API_KEY": "none"}
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False
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


@pytest.mark.slow
@pytest.mark.xdist_group("service")
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


@pytest.mark.slow
@pytest.mark.xdist_group("service")
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


@pytest.mark.slow
@pytest.mark.xdist_group("service")
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


@pytest.mark.slow
@pytest.mark.xdist_group("service")
def test_a_model_of_the_service_is_the_judge(service: Service, stock: openai.OpenAI) -> None:
    run = stock.fine_tuning.alpha.graders.run
    ran = run(grader=JUDGE, model_sample="x")
    judge = parse(JUDGE)
    assert isinstance(judge, Judge)
    messages: Any = prompt(judge, {}, "x")
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


@pytest.mark.slow
@pytest.mark.xdist_group("service")
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


@pytest.mark.slow
@pytest.mark.xdist_group("service")
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


@pytest.mark.slow
@pytest.mark.xdist_group("service")
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


@pytest.mark.slow
@pytest.mark.xdist_group("service")
def test_token_ids_are_a_prompt(stock: openai.OpenAI) -> None:
    ids = stock.completions.create(prompt=[5, 6, 7], **RAW)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3
    both = stock.completions.create(prompt=[[5, 6, 7], [8]], **RAW)
    assert both.choices[0].text == ids.choices[0].text
    with pytest.raises(openai.BadRequestError, match="token id 999999"):
        stock.completions.create(prompt=[999_999], **RAW)


@pytest.mark.slow
@pytest.mark.xdist_group("service")
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"echo": True}, "echo"), ({"suffix": "x"}, "suffix"), ({"best_of": 2}, "best_of"), ({"logprobs": 5}, "logprobs"),
        ({"logit_bias": {"1": 1}}, "logit_bias"), ({"frequency_penalty": 0.5}, "frequency_penalty"), ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"], "stream": True}, "prompt"),
        ({"extra_body": {"top_k": 3}}, "top_k"), ({"max_tokens": 0}, "max_tokens"),
    ],
)  # fmt: skip
def test_what_completions_do_not_do_is_refused_by_name(stock: openai.OpenAI, change: Json, param: str) -> None:
    neutral: Json = {"echo": False, "best_of": 1, "frequency_penalty": 0, "presence_penalty": 0.0}
    assert stock.completions.create(**{**RAW, "prompt": "a", **neutral}).choices
    with pytest.raises(openai.BadRequestError) as refusal:
        stock.completions.create(**{**RAW, "prompt": "a", **change})
    assert str(refusal.value.param).startswith(param)


@pytest.mark.slow
@pytest.mark.xdist_group("service")
def test_a_file_without_a_name_is_told_what_it_needs(stock: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"\.jsonl"):
        stock.files.create(file=io.BytesIO(rows(*WORDS)), purpose="fine-tune")
