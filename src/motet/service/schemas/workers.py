"""What workers and the service say to each other, and what rewards there are; part of the OpenAPI description."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from motet.service.schemas import Answer, Asked
from motet.tasks.reward_elsewhere import MOST_LETTERS

MOST_UNITS = 256
"""That a worker may hold, and hand in at once."""
MOST_COMPLETIONS = 1024
"""Of one problem."""
EpisodeName = Annotated[str, Field(pattern=r"^[!-~]{1,64}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class LeaseRequest(Asked):
    """Work that a reward worker asks for."""

    worker: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,60}$")
    """The worker's own name for itself, the same in all its requests. What it holds already is renewed."""
    most: int = Field(16, ge=0, le=MOST_UNITS)
    """How many units it can take; 0 only renews."""
    wait_seconds: float = Field(20.0, ge=0, le=30)
    """How long to wait until there is one."""


class ScoringWork(Answer):
    """One problem's completions, to be scored by one reward."""

    id: str
    """A digest of the work; results name it."""
    reward: dict[str, Any]
    """`args` as the job gives them (`function`, and its `args`) and the limits: `cpu_seconds`, `wall_seconds`, `memory_mb`."""
    problem: dict[str, Any]
    """`id`, `messages`, `answer`, `metadata`, `conversational`."""
    completions: list[str]
    transcripts: list[list[dict[str, Any]]] = []
    """The whole conversation of each completion: messages with `role` and `content`, `tool_calls` (each a `name` and its
    `arguments`) of an assistant and the `name` of a tool that answered. Empty where each is the problem's messages and the
    completion: in a job whose environment is `single`."""
    handed_out: int
    """How often it was handed out, this time included."""


class Lease(Answer):
    """Work in a worker's hands."""

    units: list[ScoringWork]
    seconds: float
    """How long they are the worker's, unless it asks again meanwhile, which renews them."""
    state: str
    """Of the job; a worker is done when it has ended."""


class ByChance(Asked):
    """There is no score, and the clock or the network is to blame: another run could come out differently."""

    chance: str = Field(max_length=MOST_LETTERS)


Given = Finite | Annotated[str, Field(max_length=MOST_LETTERS)] | ByChance | None
"""What a worker says of a completion: a finite number, why there is none, or null where the reward does not apply."""


class Result(Asked):
    """What a worker says of one unit."""

    id: str = Field(pattern=r"^[!-~]{1,64}$")
    scores: list[Given] = Field(max_length=MOST_COMPLETIONS, fail_fast=True)
    """One for each completion, in order: a finite number, a text that says why there is none, that text as `chance`, or null
    where the reward does not apply."""


class Results(Asked):
    """Scores, of several units at once."""

    results: list[Result] = Field(max_length=MOST_UNITS, fail_fast=True)


class EpisodeLeaseRequest(LeaseRequest):
    """Episodes that an agent worker asks for."""

    holds: list[EpisodeName] | None = Field(None, max_length=MOST_UNITS)
    """Episodes that the worker still runs; its other episodes are handed out again. By default it keeps all."""


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


class Counted(Answer):
    """What became of results."""

    counted: list[str]
    """Units that got their scores now."""
    known: list[str]
    """Units that had scores already: these were not counted again."""
    unknown: list[str]
    """Units that are no longer needed."""


class Reward(Answer):
    """A reward that jobs may use."""

    name: str
    kind: Literal["built-in", "installed", "elsewhere"]
    """`built-in`, `installed` by the operator, or scored `elsewhere`."""
    summary: str
    parameters: dict[str, str]
    """What `args` may hold, and the defaults as text; empty text where a job has to give one."""


class Rewards(Answer):
    """Rewards by name."""

    data: list[Reward]
