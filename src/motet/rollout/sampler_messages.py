"""Messages between a sampling process and its parent."""

from __future__ import annotations

from typing import Literal

from motet.config.engine import NamedKernels
from motet.core.types import AdapterRef, Chunk, GenerateRequest
from motet.process.channel import ChannelMessage

# --- parent → process -------------------------------------------------------------------------------------------------------


class LoadSampler(ChannelMessage, frozen=True):
    """The first message: the base, with the arguments of `load_base`."""

    base: str
    dtype: str
    block_size: int
    pack: bool
    base_format: Literal["auto", "unpacked", "packed"]
    trust_remote_code: bool
    limits: dict[str, int]
    """Limits of the engine: `max_rows`, `kv_tokens`, `prefill_tokens`, `kept_tokens`, `host_kv_bytes`."""
    kernels: NamedKernels = "torch"
    files: str = ""
    """Directory of adapter bytes; the process deletes it when it ends."""


class SampleRequest(ChannelMessage, frozen=True):
    """A request; answers repeat the key, because request ids may not be unique."""

    key: int
    request: GenerateRequest


class Abort(ChannelMessage, frozen=True):
    """Abort one request, or every request of a job."""

    name: str


class Install(ChannelMessage, frozen=True):
    """Make a version available."""

    ref: AdapterRef
    file: str
    """File with its bytes; deleted after reading."""
    rank: int
    paths: list[str]
    scaling: float


class Unload(ChannelMessage, frozen=True):
    """Drop a version."""

    ref: AdapterRef


class Hold(ChannelMessage, frozen=True):
    """Pause after the current tokens, or resume."""

    held: bool


ToSampler = LoadSampler | SampleRequest | Abort | Install | Unload | Hold

# --- process → parent -------------------------------------------------------------------------------------------------------


class SamplerReady(ChannelMessage, frozen=True):
    """The base is loaded."""

    fingerprint: str


class SamplerFailed(ChannelMessage, frozen=True):
    """The base cannot be loaded."""

    reason: str


class Busy(ChannelMessage, frozen=True):
    """Work done since the last report."""

    decode: float
    """Seconds of sampling."""
    full: float
    """Seconds of these with a full batch."""
    parts: dict[str, int]
    """Microseconds by job."""


class Chunks(ChannelMessage, frozen=True):
    """Tokens of a request."""

    key: int
    chunk: Chunk


class RequestRefused(ChannelMessage, frozen=True):
    """The request can never be served."""

    key: int
    reason: str


class Broken(ChannelMessage, frozen=True):
    """The request cannot be served in this process."""

    key: int
    reason: str


FromSampler = SamplerReady | SamplerFailed | Busy | Chunks | RequestRefused | Broken
