"""What passes between a sampling process and its parent: one JSON object a line. fp32 logprobs survive the way bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from motet.types import AdapterRef, Chunk, FinishReason, GenerateRequest, SamplingParams


def line(**message: Any) -> bytes:
    """One message."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def ref_out(ref: AdapterRef) -> list[Any]:
    """A version as JSON."""
    return [ref.name, ref.version]


def ref_in(value: list[Any]) -> AdapterRef:
    """And back."""
    return AdapterRef(str(value[0]), int(value[1]))


def request_out(request: GenerateRequest) -> dict[str, Any]:
    """A request as JSON."""
    return {
        "id": request.id,
        "job": request.job,
        "prompt_ids": request.prompt_ids.tolist(),
        "adapter": None if request.adapter is None else ref_out(request.adapter),
        "sampling": asdict(request.sampling),
        "seeds": list(request.seeds),
        "stream": request.stream,
    }


def request_in(value: Mapping[str, Any]) -> GenerateRequest:
    """And back."""
    sampling: dict[str, Any] = {
        key: tuple(item) if isinstance(item, list) else item for key, item in value["sampling"].items()
    }
    return GenerateRequest(
        id=value["id"],
        job=value["job"],
        prompt_ids=np.array(value["prompt_ids"], np.int32),
        adapter=None if value["adapter"] is None else ref_in(value["adapter"]),
        sampling=SamplingParams(**sampling),
        seeds=tuple(value["seeds"]),
        stream=value["stream"],
    )


def chunk_out(chunk: Chunk) -> dict[str, Any]:
    """A chunk as JSON."""
    return {
        "index": chunk.index,
        "token_ids": chunk.token_ids.tolist(),
        "logprobs": [float(value) for value in chunk.logprobs],
        "versions": chunk.versions.tolist(),
        "text": chunk.text,
        "finish_reason": None if chunk.finish_reason is None else chunk.finish_reason.value,
        "error": chunk.error,
    }


def chunk_in(value: Mapping[str, Any]) -> Chunk:
    """And back."""
    return Chunk(
        index=value["index"],
        token_ids=np.array(value["token_ids"], np.int32),
        logprobs=np.array(value["logprobs"], np.float32),
        versions=np.array(value["versions"], np.int32),
        text=value["text"],
        finish_reason=None if value["finish_reason"] is None else FinishReason(value["finish_reason"]),
        error=value["error"],
    )
