"""Routes for a client's commands: models, gradients, steps and checkpoints. Each is stored, and answered by a future."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine, Iterator
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

from fastapi import Depends, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from motet.core.errors import LimitError
from motet.process.apart import TooMuchError
from motet.runtime.journal import Load, Nothing, OptimStep, Save
from motet.service.database.tables import StoredJob
from motet.service.database.tenants import Principal
from motet.service.depends import Asker, ServiceDep, while_there
from motet.service.errors import Refusal
from motet.service.http.bodies import MOST_GRADIENT, hold
from motet.service.http.rights import check
from motet.service.tinker.checkpoints import EXTERNAL, SAMPLER, WEIGHTS, Checkpoint, about_of
from motet.service.tinker.models import Models
from motet.service.tinker.parts import Tinker, TinkerDep, new_router, numbered
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
from motet.service.tinker.wire import CONTENT_TYPE, SMALL, WireError, begins_with, gradient_of, read_gradient

router = new_router()
Given = ParamSpec("Given")
Answer = TypeVar("Answer")
_FIRST_SECONDS = 2.0
"""Wait for the beginning of a body that is too long."""


def _in_turn(
    route: Callable[Concatenate[Principal, Tinker, Given], Answer],
) -> Callable[..., Coroutine[Any, Any, Answer]]:
    """Run a route in the turn of its tenant, because it may wait for other writes of the tenant."""

    @functools.wraps(route)
    async def run(who: Principal, tinker: Tinker, *args: Given.args, **given: Given.kwargs) -> Answer:
        return await tinker.write_threads.run(who.tenant_id, lambda: route(who, tinker, *args, **given))

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
    job = tinker.models.find(who, wanted.model_id)
    tinker.models.finish(job)
    return _promise(f"{wanted.model_id}/0", model_id=wanted.model_id)


@router.post("/forward_backward")
async def forward_backward(who: Asker, tinker: TinkerDep, service: ServiceDep, request: Request) -> dict[str, Any]:
    """Add a gradient, or with `forward_only` compute the loss."""
    body, whole = await _read(request)
    if not whole:
        await _use_up(who, tinker, body)
        raise Refusal(413, f"a gradient request may have {MOST_GRADIENT >> 20} MB at most; send the data in parts")
    if request.headers.get("content-type", "").partition(";")[0] != CONTENT_TYPE:
        raise Refusal(400, f"send {CONTENT_TYPE}: tinker 0.25 and newer do")
    try:
        read = (
            read_gradient(body)
            if len(body) <= SMALL
            else await while_there(request, service.apart.call(who.tenant_id, read_gradient, body))
        )
    except TooMuchError:
        await _use_up(who, tinker, body)
        raise

    def order() -> dict[str, Any]:
        asked = gradient_of(read)
        job = tinker.models.find(who, asked.model_id)
        if asked.seq_id < 1:
            raise Refusal(400, f"seq_id {asked.seq_id} is not from 1 on")
        with _refusing(tinker.models, job, asked.seq_id):
            if asked.command is None:
                raise WireError(asked.reason)
        tinker.models.admit(job, asked.seq_id, asked.command)
        return _promise(tinker.models.order(job, asked.seq_id, asked.command))

    return await tinker.write_threads.run(who.tenant_id, order)


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


async def _use_up(who: Principal, tinker: Tinker, body: bytes) -> None:
    """Refuse a command that is not read, so that later ones proceed."""
    model, number = begins_with(body)
    if number > 0:
        await tinker.write_threads.run(
            who.tenant_id, lambda: tinker.models.refuse(tinker.models.find(who, model), number)
        )


@router.post("/optim_step")
@_in_turn
def optim_step(who: Asker, tinker: TinkerDep, wanted: Annotated[Step, Depends(numbered(Step))]) -> dict[str, Any]:
    """Make the next version."""
    adam = wanted.adam_params
    command = OptimStep(
        adam.learning_rate, (adam.beta1, adam.beta2), adam.eps, adam.weight_decay, adam.grad_clip_norm or None
    )
    return _promise(tinker.models.order(tinker.models.find(who, wanted.model_id), wanted.seq_id, command))


@router.post("/save_weights")
@_in_turn
def save_weights(
    who: Asker, tinker: TinkerDep, service: ServiceDep, wanted: Annotated[SaveWeights, Depends(numbered(SaveWeights))]
) -> dict[str, Any]:
    """Save weights, moments and an accumulated gradient, to continue from."""
    job = tinker.models.find(who, wanted.model_id)
    with _refusing(tinker.models, job, wanted.seq_id):
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
    job, number = tinker.models.find(who, wanted.model_id), wanted.seq_id
    with _refusing(tinker.models, job, number):
        service.quotas.check_storage(who.tenant_id, 0)
    answer: dict[str, Any] = {"type": "save_weights_for_sampler"}
    about = about_of(number, wanted.ttl_seconds, wanted.user_metadata)
    if wanted.path is not None:
        with _refusing(tinker.models, job, number):
            tinker.checkpoints.check_free(job, SAMPLER, wanted.path, number)
        answer["path"] = f"tinker://{wanted.model_id}/{SAMPLER}/{wanted.path}"
        command: Save | Nothing = Save(f"{SAMPLER}/{wanted.path}", False, about, answer, overwrite=False)
        return _promise(tinker.models.order(job, number, command))
    if wanted.sampling_session_seq_id is None:
        tinker.models.refuse(job, number)
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
        job = tinker.models.find(who, wanted.model_id)
        with _refusing(tinker.models, job, wanted.seq_id):
            source = tinker.checkpoints.find(who, wanted.path)
            if (base := tinker.models.bases.of(source.job.base)) != tinker.models.bases.of(job.base):
                raise Refusal(400, f"path: {wanted.path} is of a model on another base, {base!r}")
            command = _load(source, wanted)
        return _promise(tinker.models.order(job, wanted.seq_id, command))
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


@contextlib.contextmanager
def _refusing(models: Models, job: StoredJob, number: int) -> Iterator[None]:
    """Record refused commands, so that later ones proceed."""
    try:
        yield
    except (Refusal, LimitError):
        models.refuse(job, number)
        raise


@router.post("/save_weights_external")
@_in_turn
def save_external(
    who: Asker, tinker: TinkerDep, service: ServiceDep, wanted: Annotated[SaveExternal, Depends(numbered(SaveExternal))]
) -> dict[str, Any]:
    """Save a PEFT directory to download."""
    job = tinker.models.find(who, wanted.model_id)
    with _refusing(tinker.models, job, wanted.seq_id):
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
    """Wait for an answer for a while."""
    held = functools.partial(hold, request, service.open_answers, who.tenant_id)
    answer = await tinker.futures.wait(who, wanted.request_id, hold=held)
    return Response(answer, media_type=CONTENT_TYPE) if isinstance(answer, bytes) else JSONResponse(answer)


@router.post("/cancel_future")
async def cancel_future(who: Asker, tinker: TinkerDep, wanted: RetrieveFuture) -> dict[str, Any]:
    """Cancel a sample or a gradient that is not done."""
    if tinker.futures.trains(wanted.request_id):
        check(who, "POST", "/tinker/api/v1/forward_backward")
    await tinker.futures.cancel(who, wanted.request_id)
    return {}
