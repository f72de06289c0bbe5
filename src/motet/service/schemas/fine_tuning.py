"""Request and response models of the fine-tuning routes, as in the `openai` package."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from motet.core.plain_json import check_plain
from motet.service.schemas import Answer, Asked


def _auto(value: Any) -> Any:
    return None if value == "auto" else value


Whole = Annotated[Annotated[int, Field(ge=1, le=1_000_000)] | None, BeforeValidator(_auto)]
Factor = Annotated[Annotated[float, Field(gt=0, le=1000)] | None, BeforeValidator(_auto)]
Anything = Annotated[Any, AfterValidator(check_plain)]
Table = Annotated[dict[str, Any], AfterValidator(check_plain)]


class Hyperparameters(Asked):
    """Training settings. `auto` or a missing field uses Motet's default."""

    n_epochs: Whole = None
    """Passes over the training file: the job has n_epochs · rows / batch_size steps, rounded up. The default is 50 steps.
    """
    batch_size: Whole = None
    """Problems per step (`algorithm.groups_per_step`), or rows (`algorithm.rows_per_step`)."""
    learning_rate_multiplier: Factor = None
    """Factor on the learning rate: `optimizer.lr_multiplier`."""


class ReinforcementHyperparameters(Hyperparameters):
    """Settings of reinforcement training."""

    compute_multiplier: Factor = None
    """Factor on the number of answers per problem: 8 times this is `algorithm.group_size`."""
    eval_interval: Whole = None
    """Steps between evaluations: `eval.every`."""
    eval_samples: Whole = None
    """Answers per problem of the validation file: `eval.n`."""
    reasoning_effort: Literal["default"] | None = None
    """Only `default`."""


class Reinforcement(Asked):
    """Reinforcement fine-tuning."""

    grader: Table
    """string_check, text_similarity, score_model, label_model or multi."""
    hyperparameters: ReinforcementHyperparameters | None = None


class Supervised(Asked):
    """Supervised fine-tuning."""

    hyperparameters: Hyperparameters | None = None


class DpoHyperparameters(Hyperparameters):
    """Settings of preference training."""

    beta: Annotated[Annotated[float, Field(gt=0, le=2)] | None, BeforeValidator(_auto)] = None
    """`algorithm.beta`, 0.1 by default. A larger value keeps the policy closer to its start."""


class Dpo(Asked):
    """Direct preference optimisation."""

    hyperparameters: DpoHyperparameters | None = None


class Method(Asked):
    """The kind of fine-tuning: `type`, and the field of that name."""

    type: Literal["reinforcement", "supervised", "dpo"]
    reinforcement: Reinforcement | None = None
    supervised: Supervised | None = None
    dpo: Dpo | None = None


class FineTuningRequest(Asked):
    """A job to create."""

    model: str = Field(max_length=300)
    """A base, or a version of an adapter to start from, named as in chat completions."""
    training_file: str = Field(max_length=100)
    """A file of rows `{"messages": […], …}`, whose other columns are a grader's `item`; of preferences for `dpo`."""
    validation_file: str | None = Field(None, max_length=100)
    method: Method | None = None
    """The default is supervised."""
    suffix: str | None = Field(None, min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Prefix of the job's name."""
    seed: int | None = Field(None, ge=0, lt=2**48)
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        None, max_length=16
    )
    hyperparameters: Anything = None
    """Refused: use the field in `method`."""
    integrations: list[Any] | None = Field(None, max_length=0)
    """Only an empty list."""
    motet: Table | None = None
    """Fields of a Motet job without an equivalent here (`sampling.max_tokens`); the package sends it as `extra_body`.
    """


class FineTuningError(Answer):
    """Why a job failed."""

    code: str
    message: str
    param: str | None = None


class FineTuningJob(Answer):
    """A Motet job in the shape of the `openai` package."""

    id: str
    """The job's id, also for all other routes."""
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    """Unix seconds."""
    finished_at: int | None
    estimated_finish: int | None
    model: str
    fine_tuned_model: str | None
    """After success: the `model` for chat completions."""
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
    """If true, send the last id as `after` for the next page."""


class FineTuningEvent(Answer):
    """An event of a job."""

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any]
    """For `metrics`:

    `step`, `total_steps`, `train_loss`, `valid_loss`; for `dpo` also `valid_accuracy`, which decides the best version; for a
    job with rewards also `train_mean_reward` and `valid_mean_reward`; `metrics` is the line of metrics.jsonl.
    """


class FineTuningEvents(Answer):
    """A page of events, newest first."""

    object: Literal["list"] = "list"
    data: list[FineTuningEvent]
    has_more: bool


class Checkpoint(Answer):
    """A stored version of the adapter."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str
    """The `model` for chat completions."""
    fine_tuning_job_id: str
    step_number: int
    metrics: dict[str, float | None]
    """`step`, `train_loss`, `train_mean_reward`, and for an evaluated version `valid_mean_reward`, or `valid_loss` and
    for `dpo` `valid_accuracy`."""


class Checkpoints(Answer):
    """A page of checkpoints, newest first."""

    object: Literal["list"] = "list"
    data: list[Checkpoint]
    has_more: bool
    first_id: str | None
    last_id: str | None


class GraderAsked(Asked):
    """A grader to check."""

    grader: Table


class GraderRun(GraderAsked):
    """A grader to try."""

    model_sample: str = Field(max_length=100_000)
    """An answer; `sample.output_json` is available if it is JSON."""
    item: Table | None = None
    """The row of the answer, at most 1 MB."""


class GraderValid(Answer):
    """A valid grader."""

    grader: dict[str, Any]


class GraderErrors(Answer):
    """Errors, if there were any."""

    formula_parse_error: bool = False
    sample_parse_error: bool = False
    """The sample lacks a field that a variable names; that grader's score is 0."""
    truncated_observation_error: bool = False
    unresponsive_reward_error: bool = False
    invalid_variable_error: bool = False
    """The item lacks a field that a variable names."""
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
    """Message for a person."""


class GraderMetadata(Answer):
    """Details of the grader's run."""

    name: str
    type: str
    errors: GraderErrors
    execution_time: float
    """Seconds."""
    scores: dict[str, float]
    token_usage: int | None
    sampled_model_name: str | None


class GraderResult(Answer):
    """A grader's result for a sample."""

    reward: float
    """0 after an error; see `metadata.errors`."""
    metadata: GraderMetadata
    sub_rewards: dict[str, float]
    """Scores of a multi grader by name."""
    model_grader_token_usage_per_model: dict[str, int]
