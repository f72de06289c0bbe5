"""The rewards that jobs may use, and work of jobs for their owners' machines: lease it, and send the results.

Workers open all connections, and may repeat each request. Leases and results need a tenant's key; an agent chats under
the address of its episode with the episode's own key, which permits nothing else.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic_core import PydanticUndefined

from motet.core.errors import HostGone
from motet.core.json_text import rough_size
from motet.core.types import JobState
from motet.environments.episode_messages import AskEpisode
from motet.environments.served_episode import MODELS, RETRY
from motet.rewards.reward_elsewhere import ELSEWHERE
from motet.rewards.reward_loading import SCORER
from motet.rewards.rewards import BUILTIN
from motet.service.composition import Service
from motet.service.depends import Asker, NamedJob, ServiceDep
from motet.service.errors import Refusal
from motet.service.http.auth import FEW_BYTES, episode_key
from motet.service.http.bodies import hold
from motet.service.routes.completions import STREAMED
from motet.service.routing import TenantRoute
from motet.service.schemas import Models
from motet.service.schemas.workers import Counted, EpisodeResult, Lease, LeaseRequest, Result, Results, Reward, Rewards
from motet.service.workers.attached import MOST_LEASED

router = APIRouter(tags=["work"], route_class=TenantRoute)
Kind = Literal["rewards", "episodes"]


@router.post("/v1/jobs/{job}/work/{kind}/lease", response_model=Lease)
async def lease(
    request: Request, who: Asker, service: ServiceDep, job: NamedJob, kind: Kind, asked: LeaseRequest
) -> Response:
    """Lease rewards or episodes to a worker. The call waits until some are available; the lease lasts `seconds`.

    Work that the worker holds is renewed. Work without a result by the end of its lease is leased again; an episode then has
    another id and key, and starts over.
    """
    workers = service.workers[kind]
    shown: dict[str, Any] = {"units": [], "held": [], "seconds": workers.lease_seconds, "state": job.state}
    room = functools.partial(hold, request, service.open_answers, who.tenant_id, MOST_LEASED)
    if not JobState(job.state).final:
        shown["units"] = await workers.lease(job, asked, who.key_id, request.is_disconnected, room)
        shown |= {"held": workers.held(job.id, asked.worker), "state": (await workers.state(job.id)).value}
    return await service.encode_threads.answer(who.tenant_id, rough_size(shown, FEW_BYTES), lambda: shown)


@router.post("/v1/jobs/{job}/work/{kind}/results")
async def results(service: ServiceDep, job: NamedJob, kind: Kind, asked: Results) -> Counted:
    """Send results. Repeats count once, also scores from different workers; episodes of expired leases do not count."""
    scores = {result.id: result.scores for result in asked.results if isinstance(result, Result)}
    ended = [result for result in asked.results if isinstance(result, EpisodeResult)]
    if (kind == "rewards" and ended) or (kind == "episodes" and scores):
        raise Refusal(422, "a result of rewards has `scores`, one of episodes none; nothing was counted")
    if kind == "rewards":
        return await service.reward_workers.score(job.id, scores)
    return service.agent_workers.count(job.id, ended)


@router.delete("/v1/jobs/{job}/work/{kind}/workers/{worker}", status_code=204)
async def leave(service: ServiceDep, job: NamedJob, kind: Kind, worker: str) -> None:
    """Report that a worker leaves; its work is leased again at once."""
    await service.workers[kind].leave(job.id, worker)


@router.post("/v1/jobs/{job}/scoring/{rest:path}", include_in_schema=False)
@router.delete("/v1/jobs/{job}/scoring/{rest:path}", include_in_schema=False)
@router.post("/v1/jobs/{job}/episodes/{rest:path}", include_in_schema=False)
@router.delete("/v1/jobs/{job}/episodes/{rest:path}", include_in_schema=False)
async def left(who: Asker, job: str, rest: str) -> None:
    """Tell clients of 0.1 that these addresses have left."""
    raise Refusal(
        410,
        f"work is leased at /v1/jobs/JOB/work/KIND/lease now; install motet {importlib.metadata.version('motet')} or newer",
    )


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


# --- rewards that jobs may use ------------------------------------------------------------------------------------------

_SENT = Reward(name="file.py:function", kind="sent", summary="A function of yours, in one file.", parameters={})


@router.get("/v1/rewards")
def list_rewards(who: Asker, service: ServiceDep) -> Rewards:
    """List the rewards that jobs may use: built in, installed here, sent with the job, and scored elsewhere."""
    installed = [
        Reward(name=name, kind="installed", summary=one.summary, parameters=dict(one.parameters))
        for name, one in service.settings.rewards.items()
    ]
    sent = [_SENT] if service.settings.config.sent_rewards else []
    return Rewards(data=[*_built_in(), *installed, *sent, *_elsewhere()])


@functools.cache
def _built_in() -> tuple[Reward, ...]:
    return tuple(_each_built_in())


def _each_built_in() -> Iterator[Reward]:
    for name, function in BUILTIN.items():
        own = [one for one in inspect.signature(function).parameters.values() if one.kind is one.KEYWORD_ONLY]
        parameters = {one.name: "" if one.default is one.empty else repr(one.default) for one in own}
        summary = (inspect.getdoc(function) or "").partition("\n")[0]
        yield Reward(name=name, kind="built-in", summary=summary, parameters=parameters)
    summary = "The scorer of reasoning-gym data."
    yield Reward(name=SCORER, kind="built-in", summary=summary, parameters={})


@functools.cache
def _elsewhere() -> tuple[Reward, ...]:
    return tuple(_each_elsewhere())


def _each_elsewhere() -> Iterator[Reward]:
    for name, model in ELSEWHERE.items():
        fields = {
            field: "" if info.default is PydanticUndefined else repr(info.default)
            for field, info in model.model_fields.items()
        }
        summary = (inspect.getdoc(model) or "").partition("\n")[0]
        yield Reward(name=name, kind="elsewhere", summary=summary, parameters=fields)
