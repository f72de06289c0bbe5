"""Episodes of remote agents: lease one, chat under its address and key, and send its result.

Leases and results need a tenant's key; chats use the episode's own key, which permits nothing else.
"""

from __future__ import annotations

import functools
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from motet.core.errors import HostGone
from motet.core.json_text import rough_size
from motet.core.types import JobState
from motet.environments.episode_messages import AskEpisode, EpisodeEnded
from motet.environments.served_episode import MODELS, RETRY
from motet.service.composition import Service
from motet.service.depends import Asker, NamedJob, ServiceDep
from motet.service.errors import Refusal
from motet.service.http.auth import FEW_BYTES, episode_key
from motet.service.http.bodies import hold
from motet.service.routes.completions import STREAMED
from motet.service.routing import TenantRoute
from motet.service.schemas import Models
from motet.service.schemas.workers import Counted, EpisodeLease, EpisodeResults, LeaseRequest
from motet.service.workers.attached import MOST_LEASED

router = APIRouter(tags=["episodes"], route_class=TenantRoute)


@router.post("/v1/jobs/{job}/episodes/lease", response_model=EpisodeLease)
async def lease(request: Request, who: Asker, service: ServiceDep, job: NamedJob, asked: LeaseRequest) -> Response:
    """Lease episodes for an agent worker. The call waits until some are available; the lease lasts `seconds`.

    Episodes that the worker holds are renewed. If a worker stops renewing, its episode is leased again, under another
    id and key, and starts over.
    """
    leased, state, held = [], JobState(job.state), []
    room = functools.partial(hold, request, service.open_answers, who.tenant_id, MOST_LEASED)
    if not state.final:
        service.agent_workers.renew(job.id, asked.worker, asked.holds)
        leased = await service.agent_workers.lease(
            job.id,
            job.tenant_id,
            asked.worker,
            who.key_id,
            asked.most,
            asked.wait_seconds,
            request.is_disconnected,
            room,
        )
        for episode in leased:
            episode.tokens = int(job.spec["sampling"]["max_tokens"])
        held, state = service.agent_workers.held(job.id, asked.worker), await service.agent_workers.state(job.id)
    episodes = [
        {
            "id": one.name, "path": f"/episodes/{one.name}/v1", "key": one.key, "problem": one.offer.problem,
            "args": one.offer.args, "seed": one.offer.seed, "seconds": one.offer.seconds, "handed_out": one.handed_out,
        }
        for one in leased
    ]  # fmt: skip
    shown = {"episodes": episodes, "held": held, "seconds": service.agent_workers.lease_seconds, "state": state.value}
    return await service.encode_threads.answer(who.tenant_id, rough_size(shown, FEW_BYTES), lambda: shown)


@router.post("/v1/jobs/{job}/episodes/results")
async def results(service: ServiceDep, job: NamedJob, asked: EpisodeResults) -> Counted:
    """Send results of episodes. Repeats count once; results of expired leases do not count."""
    said: dict[str, list[str]] = {"counted": [], "known": [], "unknown": []}
    for one in asked.results:
        ended = EpisodeEnded(0, one.reward, one.rewards or {}, one.error, one.late)
        said[service.agent_workers.settle(job.id, one.id, ended)].append(one.id)
    return Counted(**said)


@router.delete("/v1/jobs/{job}/episodes/workers/{worker}", status_code=204)
async def leave(service: ServiceDep, job: NamedJob, worker: str) -> None:
    """Report that an agent worker leaves; its episodes are leased again at once."""
    service.agent_workers.leave(job.id, worker)


class EpisodeAnswers:
    """Answers agents under the key of their episode."""

    def __init__(self, request: Request, service: Service) -> None:
        self._request, self._workers, self._asks = request, service.agent_workers, service.asks

    async def __call__(self, episode: str, route: str) -> Response:
        """Ask the host that has the episode."""
        request, key = self._request, episode_key(self._request)
        try:
            body = (await request.body()).decode()
        except UnicodeDecodeError as error:
            raise Refusal(400, f"the body is not UTF-8: {error}") from error
        again = request.headers.get(RETRY, "0") != "0"
        leased = self._workers.leased(episode, key)
        tenant, tokens = ("", 0) if leased is None or route == MODELS else (leased.tenant, leased.tokens)
        try:
            with self._asks.open(tenant, tokens):  # a call is never refused for it: its job's step goes on
                answer = await self._workers.answer(episode, key, AskEpisode(episode, route, body, again))
        except HostGone as error:  # its conversation is lost too; 404, because stock clients retry other statuses
            raise Refusal(404, f"this episode is over: {error}") from error
        return Response(answer.body, answer.status, media_type=answer.media_type)


async def _answers(request: Request, service: ServiceDep) -> EpisodeAnswers:
    return EpisodeAnswers(request, service)


Answers = Annotated[EpisodeAnswers, Depends(_answers)]


@router.get("/episodes/{episode}/v1/models", response_model=Models)
async def models(episode: str, answers: Answers) -> Response:
    """The model of an episode: the version that its step samples from."""
    return await answers(episode, MODELS)


@router.post("/episodes/{episode}/v1/chat/completions", responses=STREAMED)
async def chat_completions(episode: str, answers: Answers) -> Response:
    """Continue a conversation in the format of the `openai` package. The sampled tokens are trained on."""
    return await answers(episode, "chat/completions")


@router.post("/episodes/{episode}/v1/responses", responses=STREAMED)
async def responses(episode: str, answers: Answers) -> Response:
    """Continue a conversation in the format of OpenAI's Responses."""
    return await answers(episode, "responses")


@router.post("/episodes/{episode}/v1/messages", responses=STREAMED)
async def messages(episode: str, answers: Answers) -> Response:
    """Continue a conversation in the format of Anthropic's Messages."""
    return await answers(episode, "messages")
