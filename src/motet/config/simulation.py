"""What a user may write of a cluster that is only thought of: hosts, what they take for what, and the jobs that come."""

from __future__ import annotations

from pydantic import Field, model_validator

from motet.section import Config


class HostCosts(Config):
    """What one host takes, as measured on one (`motet check`, `timings.jsonl`)."""

    token_seconds: float = Field(gt=0)
    """Between two tokens of a completion when it samples alone."""
    row_seconds: float = Field(0.0, ge=0)
    """By which each further completion makes that longer."""
    job_seconds: float = Field(0.0, ge=0)
    """By which each further job that samples makes it longer: one more adapter in the batch, and what is done beside."""
    train_tokens_per_second: float = Field(gt=0)
    """Tokens that it trains on, prompts included."""
    train_seconds: float = Field(0.0, ge=0)
    """Of each step's training, whatever its tokens."""
    publish_seconds: float = Field(0.0, ge=0)
    """From a step to its version answering: commit, transfer, load and probe."""
    open_seconds: float = Field(0.0, ge=0)
    """From a job's slot to its first completions, also where it goes on: adapter, rewards, commit, publish."""
    start_seconds: float = Field(60.0, ge=0)
    """Until a host that died is back."""
    own_sampler: bool = False
    """Whether sampling has devices of its own (servers); otherwise it stands still while the host trains."""
    price_per_hour: float = Field(0.0, ge=0)
    """Of one host, in any currency."""


class HostsConfig(Config):
    """The hosts of a cluster, all alike."""

    count: int = Field(ge=1, le=10**5)
    """How many; `--hosts` says another."""
    slots: int = Field(16, ge=1, le=10**5)
    """Jobs that train at a time on each."""
    rows: int = Field(64, ge=1, le=10**6)
    """Completions that each samples at a time."""
    costs: HostCosts
    """Of each."""
    hours_between_deaths: float | None = Field(None, gt=0)
    """Of one host, on average; without it none dies."""


class JobsConfig(Config):
    """Jobs of one tenant; where there are two numbers, each job draws from between them."""

    tenant: str = ""
    """Whose they are; those with the same name have one share."""
    share: float = Field(1.0, gt=0)
    """Of the tenant, against those of the others."""
    count: int = Field(ge=1, le=10**6)
    """How many."""
    over_hours: float = Field(0.0, ge=0)
    """They come within so long, at times drawn evenly; 0 is all at once."""
    steps: tuple[int, int] = (20, 20)
    """Of one job."""
    groups_per_step: int = Field(8, ge=1)
    """Problems of a step."""
    group_size: int = Field(8, ge=1)
    """Completions of a problem."""
    prompt_tokens: tuple[int, int] = (128, 128)
    """Of one prompt."""
    completion_tokens: tuple[int, int] = (256, 256)
    """Of one completion."""
    evaluation: int = Field(0, ge=0)
    """Completions of an evaluation: with the first step, after the last one, and as `evaluate_every` says."""
    evaluate_every: int = Field(0, ge=0)
    """Steps between evaluations."""
    failing: float = Field(0.0, ge=0, le=1)
    """The part of them that fails somewhere on its way."""

    @model_validator(mode="after")
    def _least_comes_first(self) -> JobsConfig:
        for name in ("steps", "prompt_tokens", "completion_tokens"):
            least, most = getattr(self, name)
            if not 1 <= least <= most:
                raise ValueError(f"{name} is [{least}, {most}]; give the least, which is at least 1, and then the most")
        return self


class SimulationConfig(Config):
    """A cluster and its jobs."""

    hosts: HostsConfig
    """What there is."""
    jobs: list[JobsConfig] = Field(min_length=1)
    """What comes, tenant by tenant."""
    seed: int = 0
    """Of what is drawn."""
