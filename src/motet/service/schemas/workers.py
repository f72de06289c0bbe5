"""Messages between workers and the service, and the list of rewards; part of the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from motet.rewards.reward_answers import LONGEST_NAME, LONGEST_TEXT, MOST_LOGGED
from motet.rewards.reward_elsewhere import MOST_LETTERS
from motet.service.schemas import Answer, Asked

MOST_UNITS = 256
"""Most units that a worker may hold, or send at once."""
MOST_COMPLETIONS = 1024
"""Most completions of one problem."""
WorkName = Annotated[str, Field(pattern=r"^[!-~]{1,64}$")]
_LOGGED: dict[str, Any] = {"max_length": MOST_LOGGED, "json_schema_extra": {"default": {}}}
"""With a factory: pydantic copies a default that is written out, which takes longer than all the rest of a score."""
Finite = Annotated[float, Field(allow_inf_nan=False)]


class LeaseRequest(Asked):
    """A worker's request for work."""

    worker: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,60}$")
    """The worker's own name, the same in all its requests. Work that it holds is renewed."""
    most: int = Field(16, ge=0, le=MOST_UNITS)
    """Most units to lease; 0 only renews."""
    wait_seconds: float = Field(20.0, ge=0, le=30)
    """How long to wait for work."""
    holds: list[WorkName] | None = Field(None, max_length=MOST_UNITS)
    """Work that the worker still does; its other work is leased again. By default it keeps all."""


class ScoringWork(Answer):
    """One problem's completions, for one reward."""

    id: str
    """A digest of the work; results refer to it."""
    reward: dict[str, Any]
    """`args` from the job (`function`, and its `args`) and the limits: `cpu_seconds`, `wall_seconds`, `memory_mb`."""
    problem: dict[str, Any]
    """`id`, `messages`, `answer`, `metadata`, `conversational`."""
    completions: list[str]
    transcripts: list[list[dict[str, Any]]] = []
    """The conversation of each completion: messages with `role` and `content`, the assistant's `tool_calls` (each with
    `name` and `arguments`), and the `name` of an answering tool. Empty in a job with the environment `single`, where
    each conversation is the problem's messages and the completion.
    """
    parts: list[dict[str, Any]] = []
    """`thought`, `speech`, `calls` and `unread` of each completion; empty if each is only speech."""
    trainer_state: dict[str, Any] = {}
    """`global_step`, `max_steps`, `epoch` and `num_train_epochs` of the job."""
    handed_out: int
    """How often it was leased, including now."""


class ByChance(Asked):
    """No score because of a timeout or the network; another run may give one."""

    chance: str = Field(max_length=MOST_LETTERS)


class WithLogs(Asked):
    """A score, with what the function logged."""

    score: Finite
    metrics: dict[Annotated[str, Field(max_length=LONGEST_NAME)], Finite] = Field(default_factory=dict, **_LOGGED)
    """Numbers for the job's `reward_metrics`, by name."""
    extra: dict[Annotated[str, Field(max_length=LONGEST_NAME)], Annotated[str, Field(max_length=LONGEST_TEXT)]] = Field(
        default_factory=dict, **_LOGGED
    )
    """Texts for the rollout log, by column."""


def _kind(given: Any) -> str:
    """Which kind a result is: to try each in turn takes twenty times as long."""
    if isinstance(given, dict):
        return "chance" if "chance" in given else "logs"
    return "reason" if isinstance(given, str) else "none" if given is None else "number"


Given = Annotated[
    Annotated[Finite, Tag("number")]
    | Annotated[str, Field(max_length=MOST_LETTERS), Tag("reason")]
    | Annotated[ByChance, Tag("chance")]
    | Annotated[WithLogs, Tag("logs")]
    | Annotated[None, Tag("none")],
    Discriminator(_kind),
]
"""A worker's result for a completion: a finite number, a reason for no score, or null if the reward does not apply."""


class Result(Asked):
    """A worker's results for one unit."""

    id: WorkName
    scores: list[Given] = Field(max_length=MOST_COMPLETIONS, fail_fast=True)
    """One per completion, in order: a finite number (or `score`, with what was logged), a text with the reason for no score,
    that text as `chance`, or null if the reward does not apply.
    """


class EpisodeWork(Answer):
    """An episode for an agent."""

    id: str
    """Of this lease; results refer to it."""
    path: str
    """Appended to the service's address, this is the base URL for stock clients: `/episodes/{id}/v1`."""
    key: str
    """Permits these routes only, as a bearer or as `x-api-key`."""
    problem: dict[str, Any]
    """`id`, `messages`, `answer`, `metadata`, `conversational`."""
    args: dict[str, Any]
    """`environment.args` of the job."""
    seed: int
    """Random seed for the agent: the same whenever this rollout is run again."""
    seconds: float
    """The agent's remaining time (`environment.wall_seconds`)."""
    handed_out: int
    """How often it was leased, including now."""


class Lease(Answer):
    """Work leased to a worker, of the kind in the path."""

    units: list[
        Annotated[
            Annotated[ScoringWork, Tag("rewards")] | Annotated[EpisodeWork, Tag("episodes")],
            Discriminator(lambda given: "rewards" if "completions" in given else "episodes"),
        ]
    ]
    """New work."""
    held: list[str] = []
    """All episodes that the worker holds now; missing ones were leased to others."""
    seconds: float
    """Duration of the lease; another request renews it, and so does a call of the model in an episode."""
    state: str
    """State of the job; the worker can stop when it has ended."""


class EpisodeResult(Asked):
    """The result of an episode: `reward`, `rewards` or `error`; nothing if the job's own rewards score it."""

    id: WorkName
    reward: Finite | None = None
    rewards: dict[str, Finite] | None = Field(None, max_length=10_000)
    """Rewards of single turns, by the `id` of the model's answer."""
    error: str = Field("", max_length=4000)
    """Why there is no reward; the rollout counts as failed."""
    late: bool = False
    """Whether a timeout ended it; another run may give another result."""


def _kind_of_result(given: Any) -> str:
    return "rewards" if isinstance(given, dict) and "scores" in given else "episodes"


class Results(Asked):
    """Results of several units, of the kind in the path."""

    results: list[
        Annotated[
            Annotated[Result, Tag("rewards")] | Annotated[EpisodeResult, Tag("episodes")],
            Discriminator(_kind_of_result),
        ]
    ] = Field(max_length=MOST_UNITS, fail_fast=True)


class Counted(Answer):
    """How results were counted."""

    counted: list[str]
    """Units whose results were stored now."""
    known: list[str]
    """Units that had results already; not counted again."""
    unknown: list[str]
    """Units that are no longer needed, or whose lease has ended."""


class Reward(Answer):
    """A reward that jobs may use."""

    name: str
    kind: Literal["built-in", "installed", "sent", "elsewhere"]
    """`built-in`, `installed` by the operator, `sent` with the job, or scored `elsewhere`."""
    summary: str
    parameters: dict[str, str]
    """Names allowed in `args`, with defaults as text; empty for required ones."""


class Rewards(Answer):
    """Rewards by name."""

    data: list[Reward]
