"""Routes for client sessions: start, heartbeat, end, sampling sessions and samples."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Response

from motet.core.errors import ContextFull
from motet.hosts.hosts import longest_prompt
from motet.service.depends import Asker, ServiceDep
from motet.service.errors import Refusal
from motet.service.http.rights import check_change
from motet.service.tinker.parts import TinkerDep, new_router
from motet.service.tinker.requests import Anything, CreateSampling, CreateSession, FinishSession, Heartbeat, Sample
from motet.service.tinker.samplers import base_part, path_part, sampler_id

router = new_router()
_HEAD = "the head has no adapter here: train_unembed is taken as false"


@router.post("/client/config")
def client_config(who: Asker, wanted: Anything) -> dict[str, Any]:
    """Get the client's settings; missing ones keep the client's defaults."""
    return {
        "fwdbwd_max_chunk_len": 1024,
        "fwdbwd_max_chunk_bytes_count": 5_000_000,
        "parallel_fwdbwd_chunks": True,
        "sample_max_concurrent_requests": 512,
    }


@router.post("/client/dynamic_config")
def dynamic_config(who: Asker, wanted: Anything) -> dict[str, Any]:
    """Get settings that the client refreshes."""
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 1}


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Check that the service answers."""
    return {"status": "ok"}


@router.get("/get_server_capabilities")
def capabilities(who: Asker, tinker: TinkerDep) -> dict[str, Any]:
    """List the bases."""
    return {
        "supported_models": [
            {"model_name": name, "trainable": True, "sampleable": True} for name in tinker.models.bases.names
        ]
    }


@router.post("/create_session")
def create_session(who: Asker, tinker: TinkerDep, wanted: CreateSession) -> dict[str, Any]:
    """Create a session id for models."""
    return {"type": "create_session", "session_id": tinker.models.new_session(who), "info_message": _HEAD}


@router.post("/session_heartbeat")
def heartbeat(who: Asker, tinker: TinkerDep, wanted: Heartbeat) -> dict[str, str]:
    """Record a heartbeat. A model keeps its slot until another needs it, with or without heartbeats."""
    tinker.models.check_session(who, wanted.session_id)
    tinker.leases.renew(wanted.session_id)
    return {"type": "session_heartbeat"}


@router.post("/telemetry")
def telemetry(who: Asker, wanted: Anything) -> dict[str, str]:
    """Accept a client's telemetry and discard it."""
    return {"status": "accepted"}


@router.post("/sessions/{session_id}/finish", status_code=204)
def finish(who: Asker, tinker: TinkerDep, session_id: str, wanted: FinishSession) -> Response:
    """Finish the models of a session, which later heartbeats are told."""
    tinker.models.check_session(who, session_id)
    for job in (jobs := tinker.models.of_session(who, session_id)):
        check_change(who, job, f"model {job.idempotency_key!r}")
    tinker.leases.finish(session_id)
    for job in jobs:
        tinker.models.finish(job, wanted.told)
    return Response(status_code=204)


@router.post("/create_sampling_session")
def create_sampling_session(who: Asker, tinker: TinkerDep, wanted: CreateSampling) -> dict[str, Any]:
    """Create a sampling session for the base or a checkpoint."""
    tinker.models.check_session(who, wanted.session_id)
    what = base_part(tinker.models.base(wanted.base_model), tinker.models.bases)
    if wanted.model_path is not None:
        tinker.samplers.of_path(who, wanted.model_path)
        what = path_part(wanted.model_path)
    given = wanted.session_id, wanted.sampling_session_seq_id
    number = tinker.samplers.sessions.number(who.tenant_id, *given, what)
    name = sampler_id(wanted.session_id, number, what)
    return {"type": "create_sampling_session", "sampling_session_id": name}


@router.get("/samplers/{name}")
def sampler(who: Asker, tinker: TinkerDep, name: str) -> dict[str, Any]:
    """Get the source of a sampling session."""
    sampler = tinker.samplers.find(who, name)
    path = {} if sampler.model_path is None else {"model_path": sampler.model_path}
    return {"sampler_id": name, "base_model": sampler.base, **path}


@router.post("/asample")
async def asample(who: Asker, tinker: TinkerDep, service: ServiceDep, wanted: Sample) -> dict[str, Any]:
    """Start the completion of a prompt."""
    length = sum(len(chunk.tokens) for chunk in wanted.prompt.chunks)
    if not length:
        raise Refusal(400, "prompt: it has no token")
    if wanted.prompt_logprobs_last_n is not None and not (
        wanted.prompt_logprobs and wanted.prompt_logprobs_last_n < length
    ):
        raise Refusal(400, "prompt_logprobs_last_n: ask for prompt_logprobs, and for fewer than the prompt has")
    sampler = await asyncio.to_thread(tinker.samplers.of, who, wanted)
    if (most := longest_prompt(service.hosts, sampler.base)) and length > most:
        full = ContextFull(length, wanted.sampling_params.max_tokens or 1, most)
        raise Refusal(400, f"prompt: {full}", code=full.code)
    name = await tinker.futures.begin(who, tinker.samplers.seeded(wanted), sampler)
    return {"request_id": name, "sample_sequence_ids": [f"{name}-{index}" for index in range(wanted.num_samples)]}
