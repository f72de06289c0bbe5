"""The file of `motet simulate`: an imagined cluster, its hosts and their costs, and the jobs that arrive."""

from __future__ import annotations

from pydantic import Field, model_validator

from motet.core.section import Config


class HostCosts(Config):
    """Costs of one host, as measured (`motet check`, `timings.jsonl`)."""

    token_seconds: float = Field(gt=0)
    """Seconds between two tokens of a completion that samples alone."""
    row_seconds: float = Field(0.0, ge=0)
    """Seconds that each further completion adds."""
    job_seconds: float = Field(0.0, ge=0)
    """Seconds that each further sampling job adds: another adapter in the batch, and other work."""
    train_tokens_per_second: float = Field(gt=0)
    """Training speed in tokens, prompts included."""
    train_seconds: float = Field(0.0, ge=0)
    """Fixed seconds of training in each step."""
    publish_seconds: float = Field(0.0, ge=0)
    """Seconds from a step until its version answers: commit, transfer, load and probe."""
    open_seconds: float = Field(0.0, ge=0)
    """Seconds from getting a slot to the first completions, also after a resume."""
    start_seconds: float = Field(60.0, ge=0)
    """Seconds until a host that died is back."""
    own_sampler: bool = False
    """Whether sampling has its own devices (servers). Otherwise it stops while the host trains."""
    price_per_hour: float = Field(0.0, ge=0)
    """Price of one host, in any currency."""


class HostsConfig(Config):
    """The hosts of a cluster, all alike."""

    count: int = Field(ge=1, le=10**5)
    """Number of hosts; `--hosts` overrides it."""
    slots: int = Field(16, ge=1, le=10**5)
    """Jobs that train at a time on each host."""
    rows: int = Field(64, ge=1, le=10**6)
    """Completions that each host samples at a time."""
    costs: HostCosts
    """Costs of each host."""
    hours_between_deaths: float | None = Field(None, gt=0)
    """Mean hours between deaths of a host. By default none dies."""


class JobsConfig(Config):
    """Jobs of one tenant. For a field with two numbers, each job draws a value between them."""

    tenant: str = ""
    """Name of the tenant. Entries with the same name have one share."""
    share: float = Field(1.0, gt=0)
    """Weight of the tenant."""
    count: int = Field(ge=1, le=10**6)
    """Number of jobs."""
    over_hours: float = Field(0.0, ge=0)
    """They arrive evenly within this time; 0 means all at once."""
    steps: tuple[int, int] = (20, 20)
    """Steps of a job."""
    groups_per_step: int = Field(8, ge=1)
    """Problems of a step."""
    group_size: int = Field(8, ge=1)
    """Completions of a problem."""
    prompt_tokens: tuple[int, int] = (128, 128)
    """Tokens of a prompt."""
    completion_tokens: tuple[int, int] = (256, 256)
    """Tokens of a completion."""
    evaluation: int = Field(0, ge=0)
    """Completions of an evaluation, with the first step, after the last, and every `evaluate_every` steps."""
    evaluate_every: int = Field(0, ge=0)
    """Steps between evaluations."""
    failing: float = Field(0.0, ge=0, le=1)
    """Fraction of jobs that fail before their last step."""

    @model_validator(mode="after")
    def _least_comes_first(self) -> JobsConfig:
        for name in ("steps", "prompt_tokens", "completion_tokens"):
            least, most = getattr(self, name)
            if not 1 <= least <= most:
                raise ValueError(
                    f"{name} is [{least}, {most}]; give the smallest number first, at least 1, then the largest"
                )
        return self


class SimulationConfig(Config):
    """A cluster and its jobs."""

    hosts: HostsConfig
    """The hosts."""
    jobs: list[JobsConfig] = Field(min_length=1)
    """The jobs, tenant by tenant."""
    seed: int = 0
    """Seed of everything random."""
