"""JSON requests of the Tinker protocol. Unknown fields are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from motet.core.plain_json import check_plain
from motet.core.stops import few
from motet.service.schemas.faults import FewFaults
from motet.service.schemas.token_ids import Ids

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.=-]{0,99}$"
Id = Annotated[str, Field(max_length=600)]
"""A limit on its length also refuses half characters, which cannot be stored or looked up."""
Name = Annotated[str, Field(pattern=NAME)]
Seq = Annotated[int, Field(ge=1, lt=2**31)]
Place = Annotated[int, Field(ge=0, lt=2**31)]
"""Of a model or sampling session among those of its session; part of its id."""
_MOST_METADATA = 2**13
"""Bytes: lists of up to a thousand are encoded in the event loop."""
Ttl = Annotated[int, Field(ge=1, le=10**9)]


def _kept(value: dict[str, Any]) -> dict[str, Any]:
    """Check that a journal can store a value."""
    try:
        size = len(msgspec.msgpack.encode(check_plain(value)))
    except (UnicodeEncodeError, OverflowError) as error:
        raise ValueError(
            f"this cannot be stored: {error}; send valid Unicode, and numbers of at most 64 bits"
        ) from error
    if size > _MOST_METADATA:
        raise ValueError(f"it has {size} bytes, more than {_MOST_METADATA}, the most of metadata; send less")
    return value


Metadata = Annotated[dict[str, Any], Field(max_length=64), AfterValidator(_kept)]


class Request(FewFaults):
    """Base of all requests."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    type: Id | None = None


class Anything(BaseModel):
    """A request whose content is ignored."""

    model_config = ConfigDict(extra="allow")


class FinishSession(Anything):
    """End of a session, and how its client ended."""

    reason: Any = None
    detail: Any = None

    @property
    def told(self) -> str:
        """The reason in words; empty for success."""
        kind = self.reason.get("type") if isinstance(self.reason, dict) else self.reason
        return "" if kind in (None, "success") else f"{kind}: {self.detail or 'it gave no detail'}"[:1000]


class CreateSession(Request):
    """Start of a session."""

    tags: list[Id] = Field([], max_length=100)
    user_metadata: Metadata | None = None
    sdk_version: Id = ""
    project_id: Id | None = None
    display_name: Id | None = None


class Heartbeat(Request):
    """A client's heartbeat."""

    session_id: Id


class Lora(Request):
    """The shape of an adapter."""

    rank: int = Field(ge=1)
    seed: int | None = Field(None, ge=0, lt=2**48)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerKind(Request):
    """The optimizer of a model."""

    type: Literal["adamw"] = "adamw"


class CreateModel(Request):
    """A new adapter."""

    session_id: Id
    model_seq_id: Place
    base_model: str = Field(max_length=1000)
    user_metadata: Metadata | None = None
    lora_config: Lora | None = None
    optimizer_config: OptimizerKind = OptimizerKind()


class OfModel(Request):
    """A request for a model."""

    model_id: Id


class Adam(Request):
    """AdamW's settings for one step."""

    learning_rate: float = Field(1e-4, ge=0, le=1, allow_inf_nan=False)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=0, le=1)
    weight_decay: float = Field(0.0, ge=0, le=1e6)
    grad_clip_norm: float = Field(0.0, ge=0, allow_inf_nan=False)


class Step(OfModel):
    """An optimizer step."""

    seq_id: Seq
    adam_params: Adam


class SaveWeights(OfModel):
    """Save a checkpoint to continue from."""

    seq_id: Seq
    path: Name
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveForSampler(OfModel):
    """Save a checkpoint to sample from, with a name or as a sampling session."""

    seq_id: Seq
    path: Name | None = None
    sampling_session_seq_id: Place | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Ttl | None = None
    user_metadata: Metadata | None = None


class SaveExternal(OfModel):
    """Save a checkpoint to download."""

    seq_id: Seq
    path: Name
    ttl_seconds: Ttl | None = None
    age_encryption_recipients: None = None


class LoadWeights(Request):
    """Load a checkpoint: with `model_id` and `seq_id`, or as a new model with `session_id` and `model_seq_id`."""

    model_id: Id | None = None
    seq_id: Seq | None = None
    session_id: Id | None = None
    model_seq_id: Place | None = None
    base_model: Annotated[str, Field(max_length=1000)] | None = None
    user_metadata: Metadata | None = None
    path: Id
    optimizer: bool
    optimizer_config: OptimizerKind | None = None
    weights_access_token: None = None


class CopyWeights(Request):
    """Copy a checkpoint, as a model of a session or in a new session."""

    session_id: Id | None = None
    model_seq_id: Place | None = None
    destination_project_id: Id | None = None
    source_path: Id
    ttl_seconds: Ttl | None = None
    weights_access_token: None = None


class CreateSampling(Request):
    """Create a sampling session."""

    session_id: Id
    sampling_session_seq_id: Place
    base_model: Annotated[str, Field(max_length=1000)] | None = None
    model_path: Id | None = None


class TextChunk(Request):
    """Token ids."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: Ids


class Prompt(Request):
    """Pieces of a prompt."""

    chunks: list[TextChunk] = Field(max_length=10_000)


class Sampling(Request):
    """Sampling parameters."""

    max_tokens: int | None = Field(None, ge=1, le=100_000)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[Id | list[Id] | list[Annotated[int, Field(ge=0, lt=2**31)]] | None, BeforeValidator(few)] = None
    temperature: float = Field(1.0, ge=0, le=1000)
    top_k: int = Field(-1, ge=-1, lt=2**31)
    top_p: float = Field(1.0, gt=0, le=1)


class Sample(Request):
    """A prompt to complete."""

    num_samples: int = Field(1, ge=1, le=1024)
    prompt: Prompt
    sampling_params: Sampling
    base_model: Annotated[str, Field(max_length=1000)] | None = None
    model_path: Id | None = None
    sampling_session_id: Id | None = None
    seq_id: int | None = Field(None, ge=-(2**63), lt=2**63)
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0, le=100)
    topk_sample_logprobs: Literal[0] = 0
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    prompt_logprobs_last_n: int | None = Field(None, ge=1, lt=2**31)
    record_stability_info: Literal[False] | None = None


class RetrieveFuture(BaseModel):
    """The future to wait for."""

    request_id: Id
