"""What a user may write of the device that trains, and samples unless servers do."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from motet.section import Config

Kernels = Literal["torch", "native", "native-dpbf16"]


class EngineConfig(Config):
    """The device and its budgets, shared by all jobs of a run."""

    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:1`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the base's weights; `auto` keeps what the model was saved in (bfloat16 or float32)."""
    numerics: Literal["exact", "fast"] = "exact"
    """`exact` gives each row the same bits in any company, `fast` lets the libraries choose kernels by the number of rows, and
    says how far sampler and trainer differ. On a CPU they are the same, but for bfloat16 where it has units for matrices and
    for [states](hybrids.md#fast-numerics)."""
    kernels: Kernels = "torch"
    """What computes the base on a CPU: `torch`, or [Motet's own kernels](native.md), sooner and with nothing left to a
    library. `native` adds in one order on every processor; `native-dpbf16` is faster where there is `vdpbf16ps` (AMD since
    Zen 4, Intel since Sapphire Rapids). Each has bits of its own."""
    threads: int = Field(0, ge=0, le=4096)
    """Cores to use on CPU; 0 takes OMP_NUM_THREADS, or all there are. Training uses them together."""
    samplers: Annotated[int, Field(ge=0, le=1024)] | Literal["auto"] = "auto"
    """Processes that sample besides this one, each with a copy of the base and one core; `auto` takes one for each further
    core where memory allows, none on a GPU and none with own `kernels`, where one process samples with all cores."""
    base_format: Literal["auto", "unpacked", "packed"] = "auto"
    """How a quantised base (a .gguf file, fp8 with scales for blocks, MXFP4, nf4) is kept. `unpacked`: as numbers. `packed`: as
    it is stored, in half to a quarter of the memory, slower, with the same bits. `auto` unpacks while memory lasts."""
    pack_weights: bool = True
    """On CPU in bfloat16, keep a second copy of the base in the layout that its kernels want: the same bits, sooner."""
    slots: int = Field(16, ge=1, le=10**5)
    """Adapters that train at once; further jobs wait in the queue. A note says where memory has
    [no room](scale.md#how-many-adapters-fit) for so many of the largest rank."""
    resident: int = Field(0, ge=0, le=10**5)
    """Adapters that keep masters and AdamW's moments on the device, 16 of their 18 bytes a parameter; those of the others are
    brought in when they train. 0 is all of them. The bytes of adapters do not depend on it."""
    parking: str | None = None
    """A directory on a disk for the masters and moments of adapters that are not `resident`; without one they lie in host
    memory, which on a CPU saves nothing."""
    max_rows: int = Field(256, ge=4, le=10**6)
    """Completions decoded at a time, in all processes that sample together."""
    kv_tokens: int = Field(0, ge=0, le=10**10)
    """Size of the KV cache in tokens, in each process that samples; 0 derives it from max_rows and the jobs' lengths within
    kv_memory_fraction."""
    kv_memory_fraction: float = Field(0.3, gt=0, lt=1)
    """Share of free memory that the KV cache may take."""
    host_kv_memory_fraction: float = Field(0.1, ge=0, lt=1)
    """Share of free host memory for [what gives way in the KV cache](exactness.md#when-the-kv-cache-is-full): it is copied
    there and back instead of being computed again, which takes far less time, on a CPU too. No byte depends on it; 0 copies
    nothing."""
    kept_kv: float = Field(0.5, ge=0, le=1)
    """Most of the KV cache that may stay with [episodes between two turns](agents.md#between-turns), so that the next turn
    reads only what is new. All else comes first, and no byte depends on it; 0 keeps nothing."""
    block_size: int = Field(64, ge=16, le=10**5)
    """Tokens of a KV block; attention adds blocks in a fixed order, so results depend on it, for all jobs alike."""
    prefill_tokens: int = Field(2048, ge=64, le=10**7)
    """Prompt tokens prefilled in one forward pass."""
    train_tokens: int = Field(2048, ge=64, le=10**7)
    """Tokens of a packed training batch; several jobs' micro-batches share one."""
    micro_batch_tokens: int = Field(1024, ge=64, le=10**7)
    """Tokens of a job's micro-batch; where it is cut depends on the job's own samples only."""
    recompute: bool = False
    """Recompute activations in the backward pass: less memory, more time, the same bits."""
    offload: str | None = None
    """With `recompute`, a directory for the inputs of layers, which otherwise stay on the device until the backward pass: on a
    disk, or for a GPU in host memory (`/dev/shm`). The same bits; `motet check` says how much longer sequences may be."""
    shard: int = Field(1, ge=1, le=64)
    """Processes that the base of each host lies over while it trains, a part of every weight in each: for a base that is too
    large for one; the bytes are the same. On CPU, with rollouts from servers; with the embedded engine the host has the whole
    base too."""
    hosts: int = Field(1, ge=1, le=1024)
    """Processes that each have the base, whole or in shards, and train their part of the jobs; a job's bytes do not depend on
    it. `slots`, `max_rows`, `shard` and `reward_processes` are of each. On CPU each has its part of the cores unless `threads`
    is set."""
    devices: list[str] = []
    """The device of each host, such as `[cuda:0, cuda:1]`; without it all use `device`."""
    reward_processes: int = Field(2, ge=1, le=4096)
    """Processes that run rewards."""
    trust_remote_code: bool = Field(False, exclude=True)
    """Only settable on the command line: `--trust-remote-code`."""

    @field_validator("device", "devices")
    @classmethod
    def _are_devices(cls, given: str | list[str]) -> str | list[str]:
        for device in [given] if isinstance(given, str) else given:
            if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", device):
                raise ValueError("must be auto, cpu, cuda or, where there are several, cuda:1")
        return given

    @model_validator(mode="after")
    def _hosts_and_shards_fit(self) -> EngineConfig:
        if self.devices and len(self.devices) != self.hosts:
            raise ValueError(f"hosts is {self.hosts}, and devices has {len(self.devices)}: name one for each host")
        if self.shard > 1 and self.base_format == "packed":
            raise ValueError("a base in shards cannot stay packed yet: set base_format to unpacked, or shard to 1")
        if self.shard > 1 and self.resident:
            raise ValueError(
                f"resident is {self.resident} and shard {self.shard}, which do not go together: set one of them to its default"
            )
        if self.resident and self.parking is None and self.device == "cpu":
            raise ValueError(
                "resident is set and device is cpu: set parking to a directory on a disk, or nothing is saved"
            )
        self._own_kernels_fit()
        if self.offload is not None and not self.recompute:
            raise ValueError("offload moves what recompute keeps: set recompute to true, or leave offload out")
        if self.offload is not None and self.shard > 1:
            raise ValueError("a base in shards has no offload yet: leave it out, or set shard to 1")
        if self.shard > 1 and self.numerics == "fast":
            raise ValueError("a base in shards is computed as `exact` has it: set numerics to exact, or shard to 1")
        if self.parking is not None and not self.resident:
            raise ValueError(
                "parking has no effect while all adapters stay on the device: set resident to how many do, or parking to null"
            )
        cards = [device for device in (self.device, *self.devices) if device.startswith("cuda")]
        if self.shard > 1 and cards:
            raise ValueError(
                f"shard is {self.shard} and device {cards[0]}, but bases in shards run on CPUs alone: "
                "set device to cpu, or shard to 1"
            )
        alone = all(device.startswith("cuda") for device in self.devices or (self.device,))
        if alone and self.samplers != "auto" and self.samplers > 0:
            raise ValueError(
                f"samplers is {self.samplers} and device {cards[0]}, but processes of their own sample on CPUs alone: "
                "set samplers to auto"
            )
        return self

    def _own_kernels_fit(self) -> None:
        if self.kernels == "torch":
            return
        unfit = {
            f"device is {self.device}": self.device not in ("auto", "cpu"),
            f"shard is {self.shard}": self.shard > 1,
            "offload is set": self.offload is not None,
            f"numerics is {self.numerics}": self.numerics != "exact",
            f"block_size is {self.block_size}, no multiple of 16": self.block_size % 16 != 0,
        }
        if reasons := [reason for reason, holds in unfit.items() if holds]:
            raise ValueError(
                f"kernels is {self.kernels}, and {reasons[0]}, which do not go together: change one of them"
            )

    @field_validator("trust_remote_code", mode="before")
    @classmethod
    def _of_the_command_line(cls, value: object) -> bool:
        """A job file may come from anybody, and this lets a base's files run as code."""
        if value is not False:
            raise ValueError(
                "a job file cannot let a base's own code run; if you trust it, leave this out and run with --trust-remote-code"
            )
        return False


class ClusterConfig(Config):
    """Where the processes of `engine.hosts` are; the ranks of one in shards are on its node."""

    launcher: Literal["local", "ray", "torchrun"] = "local"
    """`local` processes of this machine; processes that Ray places on the nodes of a cluster (`motet[ray]`), where each host
    asks for `engine.threads` cores of one node, times `engine.shard`; or the ranks of one host in shards, `torchrun … -m motet
    run`, as many as `engine.shard`, also on several nodes. All nodes see the run directory under the same path."""
    address: str = "auto"
    """Of the Ray cluster, `HOST:PORT` of its head; `auto` is the one that runs on this machine."""
