"""The servers of a run, and the commands that start them."""

from __future__ import annotations

import os
import secrets
import shutil
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir

from motet.config import JobConfig, LaunchConfig, RolloutConfig
from motet.config.dialects import DIALECTS
from motet.config.rollout import VERSIONS_BESIDES
from motet.config.service import Largest
from motet.core.errors import ConfigError
from motet.core.model_info import ModelInfo
from motet.rollout.connection import Clocks
from motet.rollout.in_vllm import motet_vllm
from motet.rollout.replica import Replica
from motet.rollout.server import Demand, ServerEngine, ServerLimits
from motet.rollout.server_process import ServerProcess, free_port
from motet.rollout.version_files import VersionFiles
from motet.rollout.version_server import VersionServer

TOLERANCE = {"float32": 0.005, "bfloat16": 0.2}
"""Largest mean difference between a server's and the trainer's logprobs of a probe, by the base's type. Measured with vLLM 0.32
and SmolLM2-135M: 0.00 and 0.03 to 0.11."""

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for --max-lora-rank."""

MEMORY = Path("/dev/shm")
_MOST_LORAS = 16
_MOST_LIKELIEST = 100
"""The most likeliest tokens per position of a prompt that clients of a service may ask for; vLLM's default limit is 20."""
_CPU_CACHE_GIB = "2"
_STREAM_INTERVAL = 8
"""Tokens that a server collects before it sends them, when it streams."""
_USUAL_UTILIZATION = 0.9
"""Fraction of a GPU's memory that vLLM takes by default."""


@dataclass(frozen=True)
class _Server:
    """The values for a server's command line."""

    model: str
    dtype: str
    port: int
    rows: int
    positions: int
    loras: int
    cpu_loras: int
    rank: int
    targets: tuple[str, ...]
    """Names of the layers that adapters may change."""
    on_cpu: bool
    fetches: bool
    """Whether its workers fetch versions themselves."""
    launch: LaunchConfig


def tolerance(config: RolloutConfig, info: ModelInfo) -> float:
    """The largest difference that the probe at a publish may show."""
    return config.tolerance or TOLERANCE[info.dtype]


def demand(wanted: Sequence[JobConfig] | Largest, slots: int) -> Demand:
    """The limits that these jobs, or the largest jobs in all slots, need of a server at the same time."""
    if isinstance(wanted, Largest):
        return Demand(slots, slots * ((wanted.lag or 0) + VERSIONS_BESIDES), wanted.rank or 1)
    lags = sorted((job.algorithm.lag for job in wanted), reverse=True)[:slots]
    versions = sum(lag + VERSIONS_BESIDES for lag in lags)
    return Demand(len(lags), versions, max(job.adapter.rank for job in wanted))


def build_servers(
    info: ModelInfo, config: RolloutConfig, wanted: Demand, run_id: str, log_directory: Path, part: str = ""
) -> ServerEngine:
    """Create the engine for servers that run already, or that start with the first request.

    Names of versions have `run_id` in them; `part` is the part of the run that uses these servers, if there are several.

    Raises:
        ConfigError: the settings cannot work for these jobs.
    """
    check_settings(config)
    patience = config.patience_seconds
    clocks = Clocks(health=min(Clocks.health, patience / 12), load=max(Clocks.load, patience / 10))
    dialect, headers, verify = DIALECTS[config.engine], _headers(config), trust(config)
    usual = MEMORY if MEMORY.is_dir() else Path(gettempdir())
    directory = Path(os.path.expanduser(config.directory)) if config.directory else usual
    files = VersionFiles(directory.resolve() / "-".join(filter(None, ("motet", run_id, part))))
    replicas = [Replica(url, dialect, clocks, headers, verify) for url in config.urls]
    processes = {}
    if config.launch is not None:
        model = _model(info.name)
        for started in launched(info, model, config, config.launch, wanted, log_directory, part):
            replicas.append(Replica(started.url, dialect, clocks, {"Authorization": f"Bearer {started.key}"}))
            processes[started.url] = started.process
    bounds = ServerLimits(config.rows, info.vocabulary, info.max_positions, wanted, tolerance(config, info), patience)
    decode: Callable[[list[int]], str] = lambda tokens: info.tokenizer.decode(tokens, skip_special_tokens=True)  # noqa: E731
    if config.publish_by == "tensors":
        _hand_out(files.directory, replicas)
    sleep = dialect.sleep(on_cpu(info, config.launch)) if config.launch and config.launch.sleep else None
    return ServerEngine(replicas, processes, files, decode, bounds, run_id, sleep)


def _hand_out(directory: Path, replicas: Sequence[Replica]) -> None:
    """Let the workers of all replicas fetch versions."""
    keys = [replica.headers["Authorization"].removeprefix("Bearer ") for replica in replicas if replica.headers]
    versions = VersionServer(directory, [replica.url for replica in replicas], keys)
    for replica in replicas:
        replica.versions = versions


@dataclass(frozen=True)
class Launched:
    """A server that can be started."""

    url: str
    key: str
    """The API key that requests must send."""
    process: ServerProcess


def launched(
    info: ModelInfo,
    model: str,
    config: RolloutConfig,
    launch: LaunchConfig,
    wanted: Demand,
    log_directory: Path,
    part: str = "",
) -> list[Launched]:
    """The servers of a launch setting, each with its own port and key; none is started yet."""
    if config.engine not in COMMANDS:
        raise ConfigError(f"rollout.launch cannot start {config.engine}: start the servers, and give their `urls`")
    rank = launch.max_rank or next(rank for rank in VLLM_RANKS if rank >= wanted.rank)
    servers = []
    for number in range(launch.replicas):
        key = secrets.token_urlsafe(24)
        server = _Server(
            model=model,
            dtype=info.dtype,
            port=free_port(),
            rows=config.rows,
            positions=info.max_positions,
            loras=min(wanted.adapters, _MOST_LORAS),
            cpu_loras=wanted.versions,
            rank=rank,
            targets=tuple(sorted({path.rpartition(".")[2] for path in info.linears})),
            on_cpu=on_cpu(info, launch),
            fetches=config.publish_by == "tensors",
            launch=launch,
        )
        log = log_directory / "-".join(filter(None, (part, f"server-{number}.log")))
        command = COMMANDS[config.engine](server, key)
        process = ServerProcess(command, _environment(server, number, key), log)
        servers.append(Launched(f"http://127.0.0.1:{server.port}", key, process))
    return servers


def check_settings(config: RolloutConfig) -> None:
    """Raise ConfigError if the key, the certificates or the interpreter is not there; needs no base."""
    _headers(config)
    trust(config)
    if config.launch is not None and shutil.which(os.path.expanduser(config.launch.python)) is None:
        raise ConfigError(
            f"rollout.launch.python is {config.launch.python!r}, which is no program; give the interpreter of the environment "
            f"that has {DIALECTS[config.engine].name}"
        )


def _headers(config: RolloutConfig) -> Mapping[str, str]:
    if config.api_key_env is None:
        return {}
    if not (key := os.environ.get(config.api_key_env)):
        raise ConfigError(f"rollout.api_key_env names {config.api_key_env}, which is not set in the environment")
    if not key.isascii() or not key.isprintable():
        raise ConfigError(
            f"rollout.api_key_env names {config.api_key_env}, which holds no key: one has plain letters only"
        )
    return {"Authorization": f"Bearer {key}"}


def trust(config: RolloutConfig) -> bool | ssl.SSLContext:
    """How https connections are verified. Raises ConfigError if the file of certificates cannot be read."""
    if config.ca_file is None:
        return True
    try:
        context = ssl.create_default_context()
        context.load_verify_locations(Path(os.path.expanduser(config.ca_file)))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"rollout.ca_file {config.ca_file} cannot be read: {error}") from error
    return context


# --- servers that are started here ------------------------------------------------------------------------------------------


def memory_beside(launch: LaunchConfig | None, total: int) -> int:
    """Bytes that started servers take, while they are awake, of the `total` bytes of the trainer's GPU."""
    if launch is None or (launch.devices and not launch.sleep):
        return 0
    replicas = 1 if launch.devices else launch.replicas
    return int(replicas * (launch.gpu_memory_utilization or _USUAL_UTILIZATION) * total)


def on_cpu(info: ModelInfo, launch: LaunchConfig) -> bool:
    """Whether a server is started with settings for a CPU."""
    return info.device == "cpu" and not launch.names_gpus


def _model(name: str) -> str:
    """The base's location for the server."""
    from motet.model.find import find_base

    source, gguf = find_base(name)
    if gguf is not None:
        raise ConfigError("rollout.launch cannot serve a .gguf file; use a model directory or a hub id as the base")
    return source


def _environment(server: _Server, number: int, key: str) -> dict[str, str]:
    variables = {
        **os.environ,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_API_KEY": key,
        "DO_NOT_TRACK": "1",
    }
    if server.fetches:
        paths = (str(Path(motet_vllm.__file__).parent), variables.get("PYTHONPATH", ""))
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if server.on_cpu:
        variables.setdefault("VLLM_CPU_KVCACHE_SPACE", _CPU_CACHE_GIB)
        # --enforce-eager leaves the sampler compiled: half a minute before the first answer
        variables.setdefault("TORCH_COMPILE_DISABLE", "1")
    if server.launch.sleep:
        variables["VLLM_SERVER_DEV_MODE"] = "1"  # for its routes /sleep and /wake_up
    if server.launch.devices:
        variables["CUDA_VISIBLE_DEVICES"] = server.launch.devices[number % len(server.launch.devices)]
    return {**variables, **server.launch.env}


def _vllm(server: _Server, key: str) -> list[str]:
    """The key is passed in the environment, where `ps` does not show it."""
    # kernels for CPUs give rows of the base the adapter of the last slot: it is never taken where there is one too many
    loras = max(server.cpu_loras, server.loras) + 1 if server.on_cpu else server.loras
    options = {
        "--model": server.model,
        "--dtype": server.dtype,
        "--host": "127.0.0.1",
        "--port": server.port,
        "--max-model-len": server.positions,
        "--max-num-seqs": server.rows,
        "--max-loras": loras,
        "--max-cpu-loras": max(server.cpu_loras, loras),
        "--max-lora-rank": server.rank,
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": _MOST_LIKELIEST,
        "--generation-config": "vllm",
        "--stream-interval": _STREAM_INTERVAL,
        "--tensor-parallel-size": server.launch.tensor_parallel,
        "--structured-outputs-config": '{"backend": "guidance"}',  # JSON has the same spaces as on the embedded engine
    }
    if server.launch.gpu_memory_utilization is not None:
        options["--gpu-memory-utilization"] = server.launch.gpu_memory_utilization
    # without a list vLLM adapts the head too: that costs time, and on a CPU prompt logprobs then end the engine
    switches = [
        "--enable-lora",
        "--lora-target-modules",
        *server.targets,
        *(["--enforce-eager"] if server.on_cpu else []),
        *(["--worker-extension-cls", motet_vllm.EXTENSION] if server.fetches else []),
        *(["--enable-sleep-mode"] if server.launch.sleep and not server.on_cpu else []),
    ]
    return _command(server, "vllm.entrypoints.openai.api_server", options, switches)


def _sglang(server: _Server, key: str) -> list[str]:
    options = {
        "--api-key": key,  # it reads no key from its environment
        "--model-path": server.model,
        "--dtype": server.dtype,
        "--host": "127.0.0.1",
        "--port": server.port,
        "--context-length": server.positions,
        "--max-running-requests": server.rows,
        "--max-loras-per-batch": server.loras + 1,  # the base counts as one
        "--max-loaded-loras": max(server.cpu_loras, server.loras + 1),
        "--max-lora-rank": server.rank,
        "--lora-backend": "triton",
        "--stream-interval": _STREAM_INTERVAL,
        "--tp-size": server.launch.tensor_parallel,
    }
    if server.launch.gpu_memory_utilization is not None:
        options["--mem-fraction-static"] = server.launch.gpu_memory_utilization
    switches = ["--enable-lora", "--lora-target-modules", *server.targets]
    switches += ["--enable-memory-saver"] if server.launch.sleep else []
    return _command(server, "sglang.launch_server", options, switches)


def _command(server: _Server, module: str, options: Mapping[str, object], switches: Sequence[str]) -> list[str]:
    spelled = [part for option, value in options.items() for part in (option, str(value))]
    return [os.path.expanduser(server.launch.python), "-m", module, *spelled, *switches, *server.launch.args]


COMMANDS: Mapping[str, Callable[[_Server, str], list[str]]] = {"vllm": _vllm, "sglang": _sglang}
"""How each kind of server is started and told to require a key."""
