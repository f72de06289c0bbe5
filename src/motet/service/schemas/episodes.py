"""What agent workers and the service say to each other; part of the OpenAPI description."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from motet.service.schemas import Answer, Asked
from motet.service.schemas.scoring import MOST_UNITS, LeaseRequest

EpisodeName = Annotated[str, Field(pattern=r"^[!-~]{1,64}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class EpisodeLeaseRequest(LeaseRequest):
    """Episodes that an agent worker asks for."""

    holds: list[EpisodeName] | None = Field(None, max_length=MOST_UNITS)
    """The episodes that the worker has and goes on with; others of its name are handed out again. Without it, it has all."""


class EpisodeWork(Answer):
    """An episode for an agent."""

    id: str
    """Of this lease; results name it."""
    path: str
    """The base URL for stock clients is the service's address and this: `/episodes/{id}/v1`."""
    key: str
    """Opens these routes, as a bearer or as `x-api-key`, and nothing else."""
    problem: dict[str, Any]
    """`id`, `messages`, `answer`, `metadata`, `conversational`."""
    args: dict[str, Any]
    """`environment.args` of the job."""
    seed: int
    """For what the agent draws: the same whenever this rollout is run again."""
    seconds: float
    """That the agent has from now on (`environment.wall_seconds`)."""
    handed_out: int
    """How often it was handed out, this time included."""


class EpisodeLease(Answer):
    """Episodes in a worker's hands."""

    episodes: list[EpisodeWork]
    """New ones."""
    held: list[str]
    """All that the worker has now; what it had and is not here was handed to another."""
    seconds: float
    """How long they are the worker's, unless it asks again meanwhile, or its agents call the model."""
    state: str
    """Of the job; a worker is done when it has ended."""


class EpisodeResult(Asked):
    """What came of an episode: `reward`, `rewards`, an `error`, or nothing where the job's own rewards judge it."""

    id: EpisodeName
    reward: Finite | None = None
    rewards: dict[str, Finite] | None = Field(None, max_length=10_000)
    """Of single turns, by the `id` of what the model answered."""
    error: str = Field("", max_length=4000)
    """Why there is no reward; the rollout counts as failed."""
    late: bool = False
    """Whether the clock ended it; another run could come out differently."""


class EpisodeResults(Asked):
    """Results, of several episodes at once."""

    results: list[EpisodeResult] = Field(max_length=MOST_UNITS, fail_fast=True)
