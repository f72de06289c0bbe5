"""What passes between a sampling process and its parent."""

from __future__ import annotations

from typing import Literal

from motet.channel import ChannelMessage
from motet.config.engine import NamedKernels
from motet.types import AdapterRef, Chunk, GenerateRequest

# --- parent → process -------------------------------------------------------------------------------------------------------


class LoadSampler(ChannelMessage, frozen=True):
    """The first message: the base, as `load_base` takes it."""

    base: str
    dtype: str
    block_size: int
    pack: bool
    base_format: Literal["auto", "unpacked", "packed"]
    trust_remote_code: bool
    numerics: Literal["exact", "fast"]
    limits: dict[str, int]
    """Of the engine: `max_rows`, `kv_tokens`, `prefill_tokens`, `kept_tokens`, `host_kv_bytes`."""
    speculate: bool = True
    kernels: NamedKernels = "torch"
    files: str = ""
    """The directory of the adapters' bytes, which the process removes at its end."""


class SampleRequest(ChannelMessage, frozen=True):
    """A request; its answers repeat the key, for ids may repeat."""

    key: int
    request: GenerateRequest


class Abort(ChannelMessage, frozen=True):
    """End one request, or every request of a job."""

    name: str


class Install(ChannelMessage, frozen=True):
    """Make a version servable."""

    ref: AdapterRef
    file: str
    """Its bytes; deleted once they are read."""
    rank: int
    paths: list[str]
    scaling: float


class Unload(ChannelMessage, frozen=True):
    """Let go of a version."""

    ref: AdapterRef


class Hold(ChannelMessage, frozen=True):
    """Rest after the tokens under way."""


class Go(ChannelMessage, frozen=True):
    """Resume after `Hold`."""


ToSampler = LoadSampler | SampleRequest | Abort | Install | Unload | Hold | Go

# --- process → parent -------------------------------------------------------------------------------------------------------


class SamplerReady(ChannelMessage, frozen=True):
    """The base is loaded."""

    fingerprint: str


class SamplerFailed(ChannelMessage, frozen=True):
    """The base cannot be loaded."""

    reason: str


class Busy(ChannelMessage, frozen=True):
    """What was done since the last time."""

    decode: float
    """Seconds."""
    full: float
    """Seconds with a full batch."""
    parts: dict[str, int]
    """Microseconds by job."""
    drafted: int = 0
    """Drafts that were checked."""
    accepted: int = 0


class Chunks(ChannelMessage, frozen=True):
    """Tokens of a request."""

    key: int
    chunk: Chunk


class RequestRefused(ChannelMessage, frozen=True):
    """A request can never be served."""

    key: int
    reason: str


class Broken(ChannelMessage, frozen=True):
    """A request cannot be served here."""

    key: int
    reason: str


FromSampler = SamplerReady | SamplerFailed | Busy | Chunks | RequestRefused | Broken
