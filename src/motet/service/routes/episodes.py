"""Episodes of agents that run elsewhere: lease one, talk under its address and key, hand in what it came to.

Leases and results are asked for with a tenant's key, what the model answers with the episode's own, which opens nothing else.
"""

from __future__ import annotations

import json
import re
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from motet.agents.episode_messages import AskEpisode, EpisodeEnded
from motet.agents.served_episode import MODELS, RETRY
from motet.errors import HostGone
from motet.service.depends import Asker, NamedJob, ServiceDep
from motet.service.errors import Refusal
from motet.service.http.auth import episode_key
from motet.service.http.opened import opened_by
from motet.service.routes.completions import STREAMED
from motet.service.schemas import Models
from motet.service.schemas.workers import Counted, EpisodeLease, EpisodeLeaseRequest, EpisodeResult, EpisodeResults
from motet.service.workers.agents import AgentWorkers
from motet.types import JobState

router = APIRouter(tags=["episodes"])
_MODEL_ROUTES = re.compile(r"/episodes/([^/]+)/v1/")


def owner(request: Request, workers: AgentWorkers) -> str:
    """Whose key asks what the model answers in an episode; empty where it is not the episode's."""
    named = _MODEL_ROUTES.match(request.url.path)
    return "" if named is None else workers.owner(named[1], episode_key(request))


@router.post("/v1/jobs/{job}/episodes/lease", response_model=EpisodeLease)
async def lease(
    request: Request, who: Asker, service: ServiceDep, job: NamedJob, asked: EpisodeLeaseRequest
) -> Response:
    """Lease episodes for an agent worker. The call waits until there are some; the lease lasts `seconds`.

    What the worker holds already is renewed. An episode whose worker is not heard of any more is handed out again, under
    another id and another key, and begins anew.
    """
    leased, state, held = [], JobState(job.state), []
    if not state.final:
        service.agent_workers.renew(job.id, asked.worker, asked.holds)
        leased = await service.agent_workers.lease(
            job.id, asked.worker, who.key_id, asked.most, asked.wait_seconds, request.is_disconnected
        )
        held, state = service.agent_workers.held(job.id, asked.worker), await service.agent_workers.state(job.id)
    episodes = [
        {
            "id": one.name, "path": f"/episodes/{one.name}/v1", "key": one.key, "problem": one.offer.problem,
            "args": one.offer.args, "seed": one.offer.seed, "seconds": one.offer.seconds, "handed_out": one.handed_out,
        }
        for one in leased
    ]  # fmt: skip
    # In plain letters: what the data holds may not be UTF-8.
    body = {"episodes": episodes, "held": held, "seconds": service.agent_workers.lease_seconds, "state": state.value}
    return Response(json.dumps(body), media_type="application/json")


@router.post("/v1/jobs/{job}/episodes/results")
async def results(service: ServiceDep, job: NamedJob, asked: EpisodeResults) -> Counted:
    """Hand in what episodes came to. What comes twice is counted once, and of an older lease nothing."""
    said: dict[str, list[str]] = {"counted": [], "known": [], "unknown": []}
    for one in asked.results:
        said[service.agent_workers.settle(job.id, one.id, _ended(one))].append(one.id)
    return Counted(**said)


@router.delete("/v1/jobs/{job}/episodes/workers/{worker}", status_code=204)
async def leave(service: ServiceDep, job: NamedJob, worker: str) -> None:
    """Say that an agent worker goes; what it holds is handed out again at once."""
    service.agent_workers.leave(job.id, worker)


def _ended(one: EpisodeResult) -> EpisodeEnded:
    return EpisodeEnded(0, one.reward, one.rewards or {}, one.error, one.late)


class EpisodeAnswers:
    """What agents are answered, under the key of their episode."""

    def __init__(self, request: Request, service: ServiceDep) -> None:
        self._request, self._workers, self._access = request, service.agent_workers, service.access

    async def __call__(self, episode: str, route: str) -> Response:
        """Ask the engine that has the episode."""
        request, key = self._request, episode_key(self._request)
        if owner := self._workers.owner(episode, key):
            opened_by(request, owner)  # the key that leased the episode: with it the episode's own ends
            self._access.count(f"episodes of {owner}")
        else:
            self._access.count_unknown(request)
        try:
            body = (await request.body()).decode()
        except UnicodeDecodeError as error:
            raise Refusal(400, f"the body is not UTF-8: {error}") from error
        again = request.headers.get(RETRY, "0") != "0"
        try:
            answer = await self._workers.answer(episode, key, AskEpisode(episode, route, body, again))
        except HostGone as error:  # what was said in it went too; 404: the stock clients send others again
            raise Refusal(404, f"this episode is over: {error}") from error
        return Response(answer.body, answer.status, media_type=answer.media_type)


Answers = Annotated[EpisodeAnswers, Depends()]


@router.get("/episodes/{episode}/v1/models", response_model=Models)
async def models(episode: str, answers: Answers) -> Response:
    """The one model of an episode: the version of the job's adapter that its step is trained from."""
    return await answers(episode, MODELS)


@router.post("/episodes/{episode}/v1/chat/completions", responses=STREAMED)
async def chat_completions(episode: str, answers: Answers) -> Response:
    """Go on with a conversation, as the `openai` package asks for it. What the model samples is trained."""
    return await answers(episode, "chat/completions")


@router.post("/episodes/{episode}/v1/responses", responses=STREAMED)
async def responses(episode: str, answers: Answers) -> Response:
    """The same by the Responses protocol of OpenAI."""
    return await answers(episode, "responses")


@router.post("/episodes/{episode}/v1/messages", responses=STREAMED)
async def messages(episode: str, answers: Answers) -> Response:
    """The same by Anthropic's Messages protocol."""
    return await answers(episode, "messages")
