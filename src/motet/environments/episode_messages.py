"""Messages between a host and its service about episodes of remote agents."""

from __future__ import annotations

from typing import Any

from motet.process.channel import ChannelMessage


class OfferEpisode(ChannelMessage, frozen=True):
    """From the engine: an episode for an agent that runs elsewhere. Answered by `EpisodeEnded`."""

    episode: int
    job: str
    problem: dict[str, Any]
    """`id`, `messages`, `answer`, `metadata`, `conversational`."""
    args: dict[str, Any]
    """Arguments of the function."""
    seed: int
    seconds: float
    """Time that the agent has, from its start."""


class WithdrawEpisode(ChannelMessage, frozen=True):
    """From the engine: an episode's result is no longer needed."""

    episode: int


class BeginEpisode(ChannelMessage, frozen=True):
    """To the host: an agent takes the episode under this name; its earlier conversation is dropped."""

    episode: int
    name: str


class EpisodeEnded(ChannelMessage, frozen=True):
    """To the host: the result of an episode."""

    episode: int
    reward: float | None = None
    rewards: dict[str, float] = {}
    """Rewards by the ids of calls."""
    error: str = ""
    late: bool = False
    """Whether the clock ended it."""
    away: bool = False
    """No worker runs agents, so the job should pause."""


class AskEpisode(ChannelMessage, frozen=True):
    """To the host: an agent's request to its address. Answered by `EpisodeAnswered`."""

    name: str
    route: str
    body: str
    again: bool
    """Whether the client repeats the request."""
    key: int = 0


class EpisodeAnswered(ChannelMessage, frozen=True):
    """The response to the agent."""

    key: int
    status: int
    body: str
    media_type: str
