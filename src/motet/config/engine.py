"""The section `engine`: the device that trains, and samples unless servers do."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from motet.core.settings import Config

NamedKernels = Literal["torch", "native", "native-dpbf16", "triton"]
Kernels = Literal["auto"] | NamedKernels


class EngineConfig(Config):
    """The device and its budgets, shared by all jobs of a run."""

    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:1`. For machines with several cards, or whose card others use."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights of the base. `auto` keeps the type of the checkpoint (bfloat16 or float32). Set float32 for smaller
    differences between kernels, and bfloat16 for half the memory."""
    kernels: Kernels = "auto"
    """What computes the base. `auto`: the fastest of [Motet's own kernels](native.md#choose-an-arithmetic) if they are
    there and cover the base, otherwise torch; jobs that have begun keep their kernels. On a CPU `native` adds in one order on
    every processor, `native-dpbf16` in the order of the instruction `vdpbf16ps`. `triton` are those for GPUs. `torch` adds
    as its libraries do. The results of all these differ in their last bits."""
    threads: int = Field(0, ge=0, le=4096)
    """CPU cores to use; 0 takes OMP_NUM_THREADS, or all cores. Training uses all of them. For machines that others use."""
    samplers: Annotated[int, Field(ge=0, le=1024)] | Literal["auto"] = "auto"
    """Additional sampling processes, each with a copy of the base and one core. `auto` starts one for each further core if
    memory allows, none on a GPU, and none with own `kernels`, where one process samples with all cores. 0 saves memory."""
    base_format: Literal["auto", "unpacked", "packed"] = "auto"
    """How to keep a quantised base (a .gguf file, fp8 with block scales, MXFP4, nf4). `unpacked`: as numbers. `packed`: as
    stored, in a quarter to half of the memory, slower, with the same bits. `auto` unpacks if memory allows."""
    pack_weights: bool = True
    """On a CPU in bfloat16, keep a second copy of the base in the layout of its kernels. It is faster and gives the same
    bits; whoever lacks that memory sets it to false."""
    slots: int = Field(16, ge=1, le=10**5)
    """Number of adapters that train at once; other jobs wait. A note says if memory has [no
    room](capacity.md#how-many-adapters-fit) for this many of the largest rank."""
    resident: int = Field(0, ge=0, le=10**5)
    """Number of adapters that keep masters and AdamW moments on the device (16 of their 18 bytes a parameter). The others
    are loaded when they train. 0 means all. Results do not depend on it. For more adapters than the device has room for."""
    parking: str | None = None
    """A directory on a disk for masters and moments of adapters that are not `resident`. By default they are in host
    memory, which saves nothing on a CPU."""
    max_rows: int = Field(256, ge=4, le=10**6)
    """Completions that are decoded at a time, in all sampling processes together. Raise it for a GPU that waits, lower it to
    save memory."""
    kv_tokens: int = Field(0, ge=0, le=10**10)
    """Size of the KV cache in tokens, for each sampling process. 0 derives it from `max_rows` and the lengths of the jobs,
    within `kv_memory_fraction`. For the same size on every machine."""
    kv_memory_fraction: float = Field(0.3, gt=0, lt=1)
    """Fraction of free memory that the KV cache may take. Lower it if other programs need that memory."""
    host_kv_memory_fraction: float = Field(0.1, ge=0, lt=1)
    """Fraction of free host memory for [preempted parts of the KV cache](exactness.md#when-the-kv-cache-is-full). Copying
    them back is much faster than computing them again. Results do not depend on it; 0 copies nothing, for hosts without free
    memory."""
    kept_kv: float = Field(0.5, ge=0, le=1)
    """Largest fraction of the KV cache that [episodes may keep between turns](agents.md#between-turns), so that the next
    turn reads only new tokens. Other requests take precedence. Results do not depend on it; 0 keeps nothing. Raise it for
    episodes with long histories."""
    block_size: int = Field(64, ge=16, le=10**5)
    """Tokens in a KV block. Attention adds blocks in a fixed order, so results depend on this size, equally for all
    jobs. For many short sequences, of which each leaves half a block empty."""
    prefill_tokens: int = Field(2048, ge=64, le=10**7)
    """Most prompt tokens that one pass reads. Longer prompts are read in parts; rows get a token between two parts. Lower it
    where people chat beside long prompts."""
    train_tokens: int = Field(2048, ge=64, le=10**7)
    """Tokens in a packed training batch, which micro-batches of several jobs share. Raise it for a GPU, lower it to save
    memory."""
    micro_batch_tokens: int = Field(1024, ge=64, le=10**7)
    """Tokens in a micro-batch of one job. The cut depends only on the samples of that job. Lower it to save memory."""
    recompute: bool | Literal["auto"] = "auto"
    """Recompute activations in the backward pass: less memory, more time, the same bits. `auto` does so in passes of one
    sample that is longer than `train_tokens` and `micro_batch_tokens`."""
    offload: str | None = None
    """With `recompute`, a directory for the inputs of layers, which otherwise stay on the device until the backward pass.
    Use a disk, or `/dev/shm` (host memory) for a GPU. The bits are those of `kernels: torch`, which it needs."""
    ranks: int = Field(0, ge=0, le=64)
    """Number of processes of a host that train the same jobs, a multiple of `shard`. Each has the whole base, or one of
    `shard` parts of it, and computes a part of every batch. [Results](shards.md) are those of one process. On GPUs each
    rank takes one GPU, from `device` on. 0 takes `shard`. With the embedded engine, the host also has the whole base."""
    shard: int = Field(1, ge=1, le=64)
    """Number of processes that share one copy of the base, each with a part of every weight, for a base that is too large for
    one. Results are those of one process with `kernels: torch`."""
    hosts: int = Field(1, ge=1, le=1024)
    """Number of host processes, each with the base and some of the jobs. Results do not depend on it. `slots`,
    `max_rows`, `ranks`, `shard` and `reward_processes` apply to each host separately. On a CPU the hosts share the cores unless
    `threads` is set. For several cards, or nodes."""
    devices: list[str] = []
    """The device of each host, such as `[cuda:0, cuda:1]`. By default all use `device`."""
    reward_processes: int = Field(2, ge=1, le=4096)
    """Processes that run rewards of your code, and as many for built-in ones of all jobs. Rewards that wait rather than
    compute get up to 16 for a job. Raise it for rewards that compute for long, such as tests of code."""
    trust_remote_code: bool = Field(False, exclude=True)
    """Set only on the command line, with `--trust-remote-code`, by whoever trusts the code of a base."""

    @field_validator("device", "devices")
    @classmethod
    def _are_devices(cls, given: str | list[str]) -> str | list[str]:
        for device in [given] if isinstance(given, str) else given:
            if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", device):
                raise ValueError("must be auto, cpu, cuda or a numbered card such as cuda:1")
        return given

    @model_validator(mode="after")
    def _hosts_and_shards_fit(self) -> EngineConfig:
        if self.devices and len(self.devices) != self.hosts:
            raise ValueError(f"hosts is {self.hosts}, and devices has {len(self.devices)}: name one for each host")
        if self.n_ranks % self.shard:
            raise ValueError(
                f"ranks is {self.ranks} and shard {self.shard}: set ranks to a multiple of shard, or leave it out"
            )
        if self.resident and self.parking is None and self.device == "cpu":
            raise ValueError(
                "resident is set and device is cpu: set parking to a directory on a disk, or nothing is saved"
            )
        if self.kernels != "auto" and (reason := self.excludes(self.kernels)):
            raise ValueError(f"kernels is {self.kernels}, and {reason}, which do not go together: change one of them")
        if self.offload is not None and self.recompute is not True:
            raise ValueError("offload moves what recompute keeps: set recompute to true, or leave offload out")
        if self.parking is not None and not self.resident:
            raise ValueError(
                "parking has no effect while all adapters stay on the device: set resident to how many do, or parking to null"
            )
        cards = [device for device in (self.device, *self.devices) if device.startswith("cuda")]
        alone = all(device.startswith("cuda") for device in self.devices or (self.device,))
        if alone and self.samplers != "auto" and self.samplers > 0:
            raise ValueError(
                f"samplers is {self.samplers} and device {cards[0]}, but sampling processes run on CPUs only: "
                "set samplers to auto"
            )
        return self

    @property
    def n_ranks(self) -> int:
        """The number of processes that train together."""
        return self.ranks or self.shard

    @property
    def kept_tokens(self) -> int | None:
        """Tokens of the largest training pass that keeps its activations; None if all do."""
        if self.recompute == "auto":
            return max(self.train_tokens, self.micro_batch_tokens)
        return 0 if self.recompute else None

    def excludes(self, kernels: NamedKernels) -> str:
        """The setting that excludes these kernels; empty if there is none."""
        if kernels == "torch":
            return ""
        on_gpu = kernels == "triton"
        unfit = {
            f"device is {self.device}": self.device == "cpu" if on_gpu else self.device not in ("auto", "cpu"),
            f"shard is {self.shard}": self.shard > 1,
            "offload is set": self.offload is not None,
            f"block_size is {self.block_size}, no multiple of 16": self.block_size % 16 != 0,
            "pack_weights is false": not self.pack_weights and not on_gpu,
        }
        return next((reason for reason, holds in unfit.items() if holds), "")

    @field_validator("trust_remote_code", mode="before")
    @classmethod
    def _of_the_command_line(cls, value: object) -> bool:
        """Refuse the field in a job file: a file may come from anybody, and the field lets a base's files run as code."""
        if value is not False:
            raise ValueError(
                "a job file cannot let a base's own code run; if you trust it, leave this out and run with --trust-remote-code"
            )
        return False


class ClusterConfig(Config):
    """Where the processes of `engine.hosts` run. The ranks of a host are on one node."""

    launcher: Literal["local", "ray", "torchrun"] = "local"
    """`local`: processes on this machine. `ray`: processes that Ray places on the nodes of a cluster (`motet[ray]`); each
    host asks for `engine.threads` cores of one node, times `engine.ranks`. `torchrun`: the ranks of one host,
    started by `torchrun … -m motet run`, as many as `engine.ranks`. All nodes must see the run directory under the same
    path."""
    address: str = "auto"
    """Address of the Ray cluster, `HOST:PORT` of its head. `auto` finds the one on this machine; name it
    if you start runs elsewhere."""
