"""Routes for a client's commands: models, gradients, steps and checkpoints. Each is stored, and answered by a future."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

from fastapi import Depends, Request, Response
from starlette.exceptions import HTTPException

from motet.core.errors import LimitError, MotetError
from motet.core.json_text import json_text, named
from motet.runtime.journal import Load, Nothing, OptimStep, Save
from motet.service.database.store import AWAY
from motet.service.database.tenants import Principal
from motet.service.depends import Asker, ServiceDep, while_there
from motet.service.errors import Refusal, may_pass
from motet.service.faults import failed_future
from motet.service.http.bodies import MOST_GRADIENT, hold, take
from motet.service.http.rights import check
from motet.service.tinker.checkpoints import EXTERNAL, SAMPLER, WEIGHTS, Checkpoint, about_of
from motet.service.tinker.models import own_model
from motet.service.tinker.parts import Tinker, TinkerDep, new_router, numbered, use_up
from motet.service.tinker.requests import (
    CreateModel,
    LoadWeights,
    Lora,
    OfModel,
    RetrieveFuture,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    Step,
)
from motet.service.tinker.samplers import sampler_id
from motet.service.tinker.wire import (
    CONTENT_TYPE,
    AskedGradient,
    WireError,
    begins_with,
    gradient_of,
    read_gradient,
    read_small,
)

router = new_router()
Given = ParamSpec("Given")
Answer = TypeVar("Answer")
_FIRST_SECONDS = 2.0
"""Wait for the beginning of a body that is too long."""
_PAUSE_SECONDS = 1.0
"""Before a future is told that it may have an answer later: the package asks again at once."""


def _in_turn(
    route: Callable[Concatenate[Principal, Tinker, Given], Answer],
) -> Callable[..., Coroutine[Any, Any, Answer]]:
    """Run a route in the turn of its tenant, because it may wait for other writes of the tenant.

    A command that is refused for good has used its number, so that later ones proceed.
    """

    @functools.wraps(route)
    async def run(who: Principal, tinker: Tinker, *args: Given.args, **given: Given.kwargs) -> Answer:
        try:
            return await tinker.write_threads.run(who.tenant_id, lambda: route(who, tinker, *args, **given))
        except Exception as error:
            wanted = given.get("wanted")
            if not may_pass(error) and (number := getattr(wanted, "seq_id", None)):
                await use_up(who, tinker, str(getattr(wanted, "model_id", "")), number)
            raise

    return run


def _promise(request_id: str, **more: Any) -> dict[str, Any]:
    return {"request_id": request_id, **more}


@router.post("/create_model")
@_in_turn
def create_model(who: Asker, tinker: TinkerDep, wanted: CreateModel) -> dict[str, Any]:
    """Create an adapter."""
    base = tinker.models.base(wanted.base_model)
    model_id = tinker.models.model_id(who, wanted.session_id, wanted.model_seq_id)
    answer = {"type": "create_model", "model_id": model_id}
    about = {"user_metadata": wanted.user_metadata}
    lora = wanted.lora_config or Lora(rank=32)
    return _promise(tinker.models.create(who, model_id, base, lora, Nothing(answer), about), model_id=model_id)


@router.post("/get_info")
def get_info(who: Asker, tinker: TinkerDep, wanted: OfModel) -> dict[str, Any]:
    """Get a model's description."""
    job = tinker.models.find(who, wanted.model_id)
    base = tinker.models.bases.of(job.base)
    data = {"arch": "causal-lm", "model_name": base, "tokenizer_id": tinker.models.bases.tokenizer(base)}
    rank = job.spec["adapter"]["rank"]
    return {
        "type": "get_info", "model_id": wanted.model_id, "model_data": data, "is_lora": True, "lora_rank": rank,
        "model_name": base,
    }  # fmt: skip


@router.post("/unload_model")
def unload_model(who: Asker, tinker: TinkerDep, wanted: OfModel) -> dict[str, Any]:
    """Finish a model."""
    job = own_model(tinker.models, who, wanted.model_id)
    tinker.models.finish(job)
    return _promise(f"{wanted.model_id}/0", model_id=wanted.model_id)


@router.post("/forward_backward")
async def forward_backward(who: Asker, tinker: TinkerDep, service: ServiceDep, request: Request) -> dict[str, Any]:
    """Add a gradient, or with `forward_only` compute the loss."""
    body, whole = await _read(request)
    if not whole:
        await use_up(who, tinker, *begins_with(body))
        raise Refusal(413, f"a gradient request may have {MOST_GRADIENT >> 20} MB at most; send the data in parts")
    if request.headers.get("content-type", "").partition(";")[0] != CONTENT_TYPE:
        raise Refusal(400, f"send {CONTENT_TYPE}: tinker 0.25 and newer do")
    asked: AskedGradient | None = None

    def order(asked: AskedGradient) -> dict[str, Any]:
        job = own_model(tinker.models, who, asked.model_id)
        if asked.seq_id < 1:
            raise Refusal(400, f"seq_id {asked.seq_id} is not from 1 on")
        if not asked.command:
            raise WireError(asked.reason)
        tinker.models.admit(job, asked.seq_id, asked.work)
        return _promise(tinker.models.order(job, asked.seq_id, asked))

    try:
        if (read := read_small(body)) is None:
            read = await while_there(request, service.isolated.call(who.tenant_id, read_gradient, body))
            take(request, len(read))
        asked = await asyncio.to_thread(gradient_of, read)
        return await tinker.write_threads.run(who.tenant_id, functools.partial(order, asked))
    except Exception as error:
        if not may_pass(error):
            await use_up(who, tinker, *((asked.model_id, asked.seq_id) if asked is not None else begins_with(body)))
        raise


async def _read(request: Request) -> tuple[bytes, bool]:
    """The body, and whether it is whole; of one that is too long, the beginning."""
    parts, whole = list[bytes](), int(request.headers.get("content-length") or 0) <= MOST_GRADIENT
    try:
        async with asyncio.timeout(None if whole else _FIRST_SECONDS):
            async for part in request.stream():
                parts.append(part)
                if not whole:
                    break
    except TimeoutError:  # nothing came
        pass
    except HTTPException as error:
        if error.status_code != 413:
            raise
        whole = False
    return b"".join(parts), whole


@router.post("/optim_step")
@_in_turn
def optim_step(who: Asker, tinker: TinkerDep, wanted: Annotated[Step, Depends(numbered(Step))]) -> dict[str, Any]:
    """Make the next version."""
    adam = wanted.adam_params
    command = OptimStep(
        adam.learning_rate, (adam.beta1, adam.beta2), adam.eps, adam.weight_decay, adam.grad_clip_norm or None
    )
    return _promise(tinker.models.order(own_model(tinker.models, who, wanted.model_id), wanted.seq_id, command))


@router.post("/save_weights")
@_in_turn
def save_weights(
    who: Asker, tinker: TinkerDep, service: ServiceDep, wanted: Annotated[SaveWeights, Depends(numbered(SaveWeights))]
) -> dict[str, Any]:
    """Save weights, moments and an accumulated gradient, to continue from."""
    job = own_model(tinker.models, who, wanted.model_id)
    tinker.checkpoints.check_free(job, WEIGHTS, wanted.path, wanted.seq_id, overwrite=wanted.overwrite)
    service.quotas.check_storage(who.tenant_id, 0)
    about = about_of(wanted.seq_id, wanted.ttl_seconds, wanted.user_metadata)
    answer = {"type": "save_weights", "path": f"tinker://{wanted.model_id}/{WEIGHTS}/{wanted.path}"}
    command = Save(f"{WEIGHTS}/{wanted.path}", True, about, answer, wanted.overwrite)
    return _promise(tinker.models.order(job, wanted.seq_id, command))


@router.post("/save_weights_for_sampler")
@_in_turn
def save_for_sampler(
    who: Asker,
    tinker: TinkerDep,
    service: ServiceDep,
    wanted: Annotated[SaveForSampler, Depends(numbered(SaveForSampler))],
) -> dict[str, Any]:
    """Save weights to sample from."""
    job, number = own_model(tinker.models, who, wanted.model_id), wanted.seq_id
    service.quotas.check_storage(who.tenant_id, 0)
    answer: dict[str, Any] = {"type": "save_weights_for_sampler"}
    about = about_of(number, wanted.ttl_seconds, wanted.user_metadata)
    if wanted.path is not None:
        tinker.checkpoints.check_free(job, SAMPLER, wanted.path, number)
        answer["path"] = f"tinker://{wanted.model_id}/{SAMPLER}/{wanted.path}"
        command: Save | Nothing = Save(f"{SAMPLER}/{wanted.path}", False, about, answer, overwrite=False)
        return _promise(tinker.models.order(job, number, command))
    if wanted.sampling_session_seq_id is None:
        raise Refusal(400, "give path or sampling_session_seq_id")
    session, _, model = wanted.model_id.partition(":train:")
    what = "live" if wanted.kind == "inflight" else str(number)
    # by the command's number: a repeated request must get the same sampling session
    answer["sampling_session_id"] = sampler_id(session, number, f"{model}-{what}")
    command = Nothing(answer) if what == "live" else Save(f"{SAMPLER}/snapshot-{number}", False, about, answer)
    return _promise(tinker.models.order(job, number, command))


@router.post("/load_weights")
@_in_turn
def load_weights(
    who: Asker, tinker: TinkerDep, wanted: Annotated[LoadWeights, Depends(numbered(LoadWeights))]
) -> dict[str, Any]:
    """Load a checkpoint into an existing or a new model."""
    if wanted.model_id is not None and wanted.seq_id is not None:
        job = own_model(tinker.models, who, wanted.model_id)
        source = tinker.checkpoints.find(who, wanted.path)
        if (base := tinker.models.bases.of(source.job.base)) != tinker.models.bases.of(job.base):
            raise Refusal(400, f"path: {wanted.path} is of a model on another base, {base!r}")
        return _promise(tinker.models.order(job, wanted.seq_id, _load(source, wanted)))
    if wanted.session_id is None or wanted.model_seq_id is None:
        raise Refusal(400, "give model_id and seq_id, or session_id and model_seq_id")
    source = tinker.checkpoints.find(who, wanted.path)
    base = tinker.models.bases.of(source.job.base)
    if wanted.base_model is not None and tinker.models.base(wanted.base_model) != base:
        raise Refusal(400, f"base_model {wanted.base_model!r} is not the base of {wanted.path}, which is {base!r}")
    lora = Lora(**tinker.models.journal(source.job).description()["lora"])
    model_id = tinker.models.model_id(who, wanted.session_id, wanted.model_seq_id)
    about = {"user_metadata": wanted.user_metadata, "from": wanted.path}
    return _promise(tinker.models.create(who, model_id, base, lora, _load(source, wanted), about), model_id=model_id)


def _load(source: Checkpoint, wanted: LoadWeights) -> Load:
    if wanted.optimizer and source.kind != WEIGHTS:
        raise Refusal(400, f"path: {wanted.path} was saved to sample from and has no optimizer; load weights/…")
    return Load(str(source.directory), wanted.optimizer, {"type": "load_weights", "path": wanted.path})


@router.post("/save_weights_external")
@_in_turn
def save_external(
    who: Asker, tinker: TinkerDep, service: ServiceDep, wanted: Annotated[SaveExternal, Depends(numbered(SaveExternal))]
) -> dict[str, Any]:
    """Save a PEFT directory to download."""
    job = own_model(tinker.models, who, wanted.model_id)
    tinker.checkpoints.check_free(job, EXTERNAL, wanted.path, wanted.seq_id)
    service.quotas.check_storage(who.tenant_id, 0)
    about = about_of(wanted.seq_id, wanted.ttl_seconds, None)
    answer = {"type": "save_weights_external", "path": f"tinker://{wanted.model_id}/{EXTERNAL}/{wanted.path}"}
    command = Save(f"{EXTERNAL}/{wanted.path}", False, about, answer, overwrite=False)
    return _promise(tinker.models.order(job, wanted.seq_id, command))


@router.post("/retrieve_future", response_model=None)
async def retrieve_future(
    request: Request, who: Asker, tinker: TinkerDep, service: ServiceDep, wanted: RetrieveFuture
) -> Response:
    """Wait for an answer for a while.

    The package repeats what is answered with a status from 500 on at once and for ever: an error that stays is an answer.
    """
    held = functools.partial(hold, request, service.open_answers, who.tenant_id)
    try:
        answer = await tinker.futures.wait(who, wanted.request_id, hold=held)
    except MotetError as error:
        if not may_pass(error) and not isinstance(error, LimitError):
            return failed_future(service.storage.without_places(str(error)))
        await asyncio.sleep(_PAUSE_SECONDS)
        raise
    except AWAY:
        await asyncio.sleep(_PAUSE_SECONDS)
        raise
    if isinstance(answer, bytes):
        return Response(answer, media_type=CONTENT_TYPE)
    return Response(json_text(answer, named), media_type="application/json")


@router.post("/cancel_future")
async def cancel_future(who: Asker, tinker: TinkerDep, wanted: RetrieveFuture) -> dict[str, Any]:
    """Cancel a sample or a gradient that is not done."""
    if tinker.futures.trains(wanted.request_id):
        check(who, "POST", "/tinker/api/v1/forward_backward")
    await tinker.futures.cancel(who, wanted.request_id)
    return {}
