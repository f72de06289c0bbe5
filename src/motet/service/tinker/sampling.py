"""Sampling sessions, and samples."""

from __future__ import annotations

import asyncio
from typing import Any

from motet.service.errors import Refusal
from motet.service.http.depends import Asker
from motet.service.tinker.models import SESSION
from motet.service.tinker.parts import FuturesDep, ModelsDep, SamplersDep, new_router
from motet.service.tinker.requests import CreateSampling, Sample
from motet.service.tinker.samplers import base_part, path_part, sampler_id

router = new_router()


@router.post("/create_sampling_session")
def create_sampling_session(
    who: Asker, models: ModelsDep, samplers: SamplersDep, wanted: CreateSampling
) -> dict[str, Any]:
    """Something to sample from: the base, or a checkpoint."""
    if not SESSION.fullmatch(wanted.session_id):
        raise Refusal(404, f"there is no session {wanted.session_id!r}")
    what = base_part(models.base(wanted.base_model), models.bases)
    if wanted.model_path is not None:
        samplers.of_path(who, wanted.model_path)
        what = path_part(wanted.model_path)
    name = sampler_id(wanted.session_id, wanted.sampling_session_seq_id, what)
    return {"type": "create_sampling_session", "sampling_session_id": name}


@router.get("/samplers/{name}")
def sampler(who: Asker, models: ModelsDep, samplers: SamplersDep, name: str) -> dict[str, Any]:
    """What a sampling session samples from."""
    sampler = samplers.find(who, name)
    path = {} if sampler.model_path is None else {"model_path": sampler.model_path}
    return {"sampler_id": name, "base_model": sampler.base, **path}


@router.post("/asample")
async def asample(who: Asker, samplers: SamplersDep, futures: FuturesDep, wanted: Sample) -> dict[str, Any]:
    """Begin to complete a prompt."""
    length = sum(len(chunk.tokens) for chunk in wanted.prompt.chunks)
    if not length:
        raise Refusal(400, "prompt: it has no token")
    if wanted.prompt_logprobs_last_n is not None and not (
        wanted.prompt_logprobs and wanted.prompt_logprobs_last_n < length
    ):
        raise Refusal(400, "prompt_logprobs_last_n: ask for prompt_logprobs, and for fewer than the prompt has")
    await asyncio.to_thread(samplers.of, who, wanted)
    name = await futures.begin(who, samplers.seeded(wanted))
    return {"request_id": name, "sample_sequence_ids": [f"{name}-{index}" for index in range(wanted.num_samples)]}
