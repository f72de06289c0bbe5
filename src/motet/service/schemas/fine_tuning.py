"""What the fine-tuning routes take and answer, in the shapes of the `openai` package."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from motet.service.schemas import Answer, Asked
from motet.tasks.plain_json import check_plain
from motet.tasks.row_files import UPLOADED


def _auto(value: Any) -> Any:
    return None if value == "auto" else value


def _short(item: dict[str, Any]) -> dict[str, Any]:
    if len(json.dumps(check_plain(item))) > UPLOADED.row_bytes:
        raise ValueError(f"a row may have {UPLOADED.row_bytes / 2**20:g} MB at most")
    return item


Whole = Annotated[Annotated[int, Field(ge=1, le=1_000_000)] | None, BeforeValidator(_auto)]
Factor = Annotated[Annotated[float, Field(gt=0, le=1000)] | None, BeforeValidator(_auto)]
Anything = Annotated[Any, AfterValidator(check_plain)]
Table = Annotated[dict[str, Any], AfterValidator(check_plain)]


class Hyperparameters(Asked):
    """How to train. `auto`, or leaving one out, is Motet's own default."""

    n_epochs: Whole = None
    """Passes over the training file: the job has n_epochs · rows / batch_size steps, rounded up. The default is 50 steps."""
    batch_size: Whole = None
    """Problems of a step, `algorithm.groups_per_step`, or rows, `algorithm.rows_per_step`."""
    learning_rate_multiplier: Factor = None
    """Factor on the learning rate: `optimizer.lr_multiplier`."""


class ReinforcementHyperparameters(Hyperparameters):
    """How to train by reinforcement."""

    compute_multiplier: Factor = None
    """Factor on the answers that are sampled for each problem: 8 times this is `algorithm.group_size`."""
    eval_interval: Whole = None
    """Steps between evaluations: `eval.every`."""
    eval_samples: Whole = None
    """Answers for each problem of the validation file: `eval.n`."""
    reasoning_effort: Literal["default"] | None = None
    """Only `default`: the base has no levels of it."""


class Reinforcement(Asked):
    """Reinforcement fine-tuning."""

    grader: Table
    """string_check, text_similarity, score_model, label_model or multi."""
    hyperparameters: ReinforcementHyperparameters | None = None


class Supervised(Asked):
    """Supervised fine-tuning."""

    hyperparameters: Hyperparameters | None = None


class DpoHyperparameters(Hyperparameters):
    """How to train on preferences."""

    beta: Annotated[Annotated[float, Field(gt=0, le=2)] | None, BeforeValidator(_auto)] = None
    """`algorithm.beta`, 0.1 by default. A larger value keeps the policy closer to its start."""


class Dpo(Asked):
    """Direct preference optimisation."""

    hyperparameters: DpoHyperparameters | None = None


class Method(Asked):
    """How to fine-tune: `type`, and the field of that name."""

    type: Literal["reinforcement", "supervised", "dpo"]
    reinforcement: Reinforcement | None = None
    supervised: Supervised | None = None
    dpo: Dpo | None = None


class FineTuningRequest(Asked):
    """A job to make."""

    model: str = Field(max_length=300)
    """The base, or a version of an adapter to start from, named as in chat completions."""
    training_file: str = Field(max_length=100)
    """A file of rows: `{"messages": […], …}`, whose other columns are a grader's `item`; of preferences for `dpo`."""
    validation_file: str | None = Field(None, max_length=100)
    method: Method | None = None
    """The default is supervised."""
    suffix: str | None = Field(None, min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """The job's name begins with it."""
    seed: int | None = Field(None, ge=0, lt=2**48)
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        None, max_length=16
    )
    hyperparameters: Anything = None
    """Refused: it belongs into `method`."""
    integrations: list[Any] | None = Field(None, max_length=0)
    """Only an empty list."""
    motet: Table | None = None
    """Fields of a Motet job that this form has no word for (`sampling.max_tokens`); the package sends it as `extra_body`."""


class FineTuningError(Answer):
    """Why a job failed."""

    code: str
    message: str
    param: str | None = None


class FineTuningJob(Answer):
    """A Motet job in the shape of the `openai` package."""

    id: str
    """The job's id, for all other routes too."""
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    """Unix seconds."""
    finished_at: int | None
    estimated_finish: int | None
    model: str
    fine_tuned_model: str | None
    """Of a job that has succeeded: what chat completions take as `model`."""
    organization_id: str
    status: str
    """`queued`, `running`, `paused`, `succeeded`, `failed` or `cancelled`."""
    error: FineTuningError | None
    training_file: str
    validation_file: str | None
    hyperparameters: dict[str, Any]
    method: dict[str, Any]
    trained_tokens: int | None
    seed: int
    suffix: str | None
    metadata: dict[str, str] | None
    result_files: list[str] = []
    integrations: list[Any] = []


class FineTuningJobs(Answer):
    """A page of jobs, newest first."""

    object: Literal["list"] = "list"
    data: list[FineTuningJob]
    has_more: bool
    """Give the last one's id as `after` for the next page."""


class FineTuningEvent(Answer):
    """Something that happened to a job."""

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any]
    """Of `metrics`: `step`, `total_steps`, `train_loss`, `valid_loss`, of a job with rewards `train_mean_reward`,
    `valid_mean_reward`; `metrics` is the line of metrics.jsonl."""


class FineTuningEvents(Answer):
    """A page of events, newest first."""

    object: Literal["list"] = "list"
    data: list[FineTuningEvent]
    has_more: bool


class Checkpoint(Answer):
    """A version of the adapter that is kept."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str
    """What chat completions take as `model`."""
    fine_tuning_job_id: str
    step_number: int
    metrics: dict[str, float | None]
    """`step`, `train_loss`, `train_mean_reward`, and where this version was evaluated `valid_loss` or `valid_mean_reward`."""


class Checkpoints(Answer):
    """A page of checkpoints, newest first."""

    object: Literal["list"] = "list"
    data: list[Checkpoint]
    has_more: bool
    first_id: str | None
    last_id: str | None


class GraderAsked(Asked):
    """A grader to look at."""

    grader: Table


class GraderRun(GraderAsked):
    """A grader to try out."""

    model_sample: str = Field(max_length=100_000)
    """An answer; `sample.output_json` is there where it is JSON."""
    item: Annotated[dict[str, Any], AfterValidator(_short)] | None = None
    """The row that it answers, of at most 1 MB."""


class GraderValid(Answer):
    """A grader that can be used."""

    grader: dict[str, Any]


class GraderErrors(Answer):
    """What went wrong, if anything."""

    formula_parse_error: bool = False
    sample_parse_error: bool = False
    """The sample has not what a variable names; that grader's score is 0."""
    truncated_observation_error: bool = False
    unresponsive_reward_error: bool = False
    invalid_variable_error: bool = False
    """The item has not what a variable names."""
    other_error: bool = False
    python_grader_server_error: bool = False
    python_grader_server_error_type: str | None = None
    python_grader_runtime_error: bool = False
    python_grader_runtime_error_details: str | None = None
    model_grader_server_error: bool = False
    model_grader_refusal_error: bool = False
    model_grader_parse_error: bool = False
    """The judge gave no score."""
    model_grader_server_error_details: str | None = None
    details: str | None = None
    """In words, for a person."""


class GraderMetadata(Answer):
    """How a grader was run."""

    name: str
    type: str
    errors: GraderErrors
    execution_time: float
    """Seconds."""
    scores: dict[str, float]
    token_usage: int | None
    sampled_model_name: str | None


class GraderResult(Answer):
    """What a grader gives a sample."""

    reward: float
    """0 where something went wrong; `metadata.errors` says what."""
    metadata: GraderMetadata
    sub_rewards: dict[str, float]
    """Of a multi grader, by name."""
    model_grader_token_usage_per_model: dict[str, int]
