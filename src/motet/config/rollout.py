"""The section `rollout`: where rollouts are sampled, on the device that trains or on servers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from motet.config.dialects import DIALECTS
from motet.config.engine import EngineConfig
from motet.config.urls import parse_url
from motet.core.settings import Config
from motet.core.suggestions import close_matches, doubled_in

VERSIONS_BESIDES = 2
"""Versions of a job that servers hold at the same time, besides one for each step of lag."""
OF_SAMPLING = (
    "samplers", "max_rows", "kv_tokens", "kv_memory_fraction", "host_kv_memory_fraction", "kept_kv", "prefill_tokens"
)  # fmt: skip
"""Fields of `engine` that only the embedded engine reads."""


class LaunchConfig(Config):
    """Servers that Motet starts, watches, restarts and stops."""

    python: str = "python3"
    """The Python interpreter of the environment with vLLM or SGLang, as theirs is seldom that of Motet."""
    replicas: int = Field(1, ge=1, le=64)
    """Servers to start, each on a free port, for several GPUs."""
    devices: list[str] = []
    """CUDA_VISIBLE_DEVICES of each replica (`["1", "2,3"]`). By default all see what this process sees."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Fraction of the memory of a GPU that a server takes. On the GPU of the trainer, leave room for it, for example with
    0.4."""
    sleep: bool = False
    """Whether servers free their memory while the trainer works, for servers on its GPU. Training then waits for running
    requests, and requests wait for training."""
    tensor_parallel: int = Field(1, ge=1, le=1024)
    """Number of GPUs over which a server splits the base, for one that is too large for one."""
    max_rank: int = Field(0, ge=0, le=10**5)
    """Largest rank; 0 takes the largest rank of the jobs. Operators of a service set it for each base by its memory."""
    args: list[str] = []
    """More arguments for the command line of the server; the last of several counts. Whoever tunes a server sets them, such as
    `["--max-model-len", "4096"]`."""
    env: dict[str, str] = {}
    """More environment variables, such as `VLLM_CPU_KVCACHE_SPACE` for vLLM on a CPU."""

    @property
    def names_gpus(self) -> bool:
        """Whether the settings say that servers have GPUs, even if the trainer has none."""
        return bool(self.devices) or self.gpu_memory_utilization is not None or self.tensor_parallel > 1


class RolloutConfig(Config):
    """Where rollouts are sampled. A plain string is the engine."""

    engine: str = "embedded"
    """`embedded` samples on the device that trains. `vllm` and `sglang` are servers, reached over HTTP."""
    urls: list[str] = []
    """Running servers (`http://host:8000`), one for each replica. With `engine.hosts`, each host takes every N-th URL."""
    launch: LaunchConfig | None = None
    """Servers to start instead. It applies to each of `engine.hosts` separately."""
    publish_by: Literal["files", "tensors"] = "files"
    """How servers receive a new version: as `files`, or, for servers without a shared directory, as `tensors` that the workers
    of vLLM fetch into their memory. If fetching fails, they read files and a note of the run says why."""
    directory: str | None = None
    """Where to write versions for servers. Servers must see it under the same path; for servers on other machines, use a
    shared file system. By default /dev/shm, in memory."""
    rows: int = Field(64, ge=1, le=10**5)
    """Open completions on one replica. Raise it for a GPU that waits."""
    tolerance: float | None = Field(None, gt=0)
    """Largest mean difference between the logprobs of server and trainer for the probe at each publish. By default 0.005 in
    float32 and 0.2 in bfloat16. For bases that a server computes otherwise, such as quantised ones."""
    patience_seconds: float = Field(600.0, gt=0)
    """Time that jobs wait while no server answers, and time for a server to start. A tenth of it, but at least a minute, is the
    time to load a version. Raise it for large bases, and for large adapters on slow file systems."""
    api_key_env: str | None = None
    """The environment variable with the key of the servers, if they ask for one."""
    ca_file: str | None = None
    """Certificates to trust for https, in addition to those of the system, for servers with certificates of your own."""

    @field_validator("engine")
    @classmethod
    def _is_known(cls, engine: str) -> str:
        if engine not in (known := ("embedded", *DIALECTS)):
            near = close_matches(engine, known, n=1)
            raise ValueError(f"must be one of {', '.join(known)}{f'; did you mean {near[0]}?' if near else ''}")
        return engine

    @field_validator("urls")
    @classmethod
    def _are_urls(cls, urls: list[str]) -> list[str]:
        for url in urls:
            parse_url(url)
        urls = [url.rstrip("/") for url in urls]
        if doubled := doubled_in(urls):
            raise ValueError(f"lists {doubled[0]} more than once; give each server once")
        return urls

    @model_validator(mode="after")
    def _says_where(self) -> RolloutConfig:
        if self.engine == "embedded" and (self.urls or self.launch):
            raise ValueError(f"urls and launch are for servers; set engine to one of {', '.join(DIALECTS)}")
        if self.engine != "embedded" and bool(self.urls) == (self.launch is not None):
            raise ValueError(
                f"engine {self.engine} needs either `urls` of servers that run or `launch` (`launch: {{}}` will do) "
                "to start one"
            )
        if self.publish_by == "tensors" and self.engine != "vllm":
            raise ValueError(f"publish_by: tensors is for engine vllm, and engine is {self.engine}; leave it out")
        return self


def check_effect(engine: EngineConfig, rollout: RolloutConfig) -> None:
    """Raise ValueError for a setting that the sampling engine would ignore, with what to use instead."""
    kind = rollout.engine
    if kind == "embedded":
        idle = [f"rollout.{name}" for name in _set(rollout)]
        instead = "it applies to servers; the embedded engine has engine.max_rows and similar fields"
    else:
        idle = [f"engine.{name}" for name in _set(engine) if name in OF_SAMPLING]
        instead = f"rollout.engine {kind} does not read it; servers have rollout.rows and rollout.launch"
    if idle:
        raise ValueError(f"{idle[0]} has no effect here: {instead}. Leave it out")


def _set(section: Config) -> list[str]:
    """Fields with values other than their defaults."""
    return [name for name, field in type(section).model_fields.items() if getattr(section, name) != field.default]
