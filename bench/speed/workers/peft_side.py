"""PEFT on transformers in a plain PyTorch training loop. Runs in the environment that has `trl`.

The head is computed for completion tokens only. `autocast` keeps adapters in float32 over the bfloat16 base, which is what
`get_peft_model` does unless told otherwise; without it everything is bfloat16.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.speed.workers.material import advantages, token_ids
from bench.speed.workers.serve import Repeat, options, serve, versions

OPTIONS = options()
parts: dict[str, Any] = {}
"""The model, once it is loaded."""


def load() -> dict[str, Any]:
    """Load the base and put an adapter on every linear layer."""
    torch = importlib.import_module("torch")
    torch.set_num_threads(OPTIONS["threads"])
    transformers = importlib.import_module("transformers")
    peft = importlib.import_module("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(
        OPTIONS["model"], dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    shape = peft.LoraConfig(
        r=OPTIONS["rank"], lora_alpha=2 * OPTIONS["rank"], target_modules="all-linear", task_type="CAUSAL_LM"
    )
    parts["model"] = peft.get_peft_model(base, shape, autocast_adapter_dtype=OPTIONS["autocast"]).train()
    return {"versions": versions("peft", "torch", "transformers")}


@contextmanager
def train(args: dict[str, Any]) -> Iterator[Repeat]:
    """Gradients of a policy-gradient loss; of the micro-batch sizes offered, the fastest is kept."""
    torch = importlib.import_module("torch")
    model = parts["model"]
    rows, prompt, length = args["samples"], args["prompt"], args["prompt"] + args["response"]
    ids = torch.tensor(token_ids(rows, length, model.config.vocab_size))
    weights = torch.tensor(advantages(rows))

    def gradients(size: int) -> float:
        started = time.perf_counter()
        for first in range(0, rows, size):
            chunk = ids[first : first + size]
            hidden = model.base_model.model.model(input_ids=chunk, use_cache=False).last_hidden_state
            logits = model.get_output_embeddings()(hidden[:, prompt - 1 : -1]).float()
            losses = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), chunk[:, prompt:].flatten(), reduction="none"
            )
            loss = (losses.view(len(chunk), -1) * weights[first : first + size, None]).sum()
            (loss / (rows * args["response"])).backward()
        seconds = time.perf_counter() - started
        model.zero_grad(set_to_none=False)
        return seconds

    sizes = [size for size in args.get("micro", [8]) if size <= rows] or [rows]
    best = sizes[0]
    if len(sizes) > 1:
        gradients(best)
        best = min(sizes, key=gradients)

    def repeat() -> dict[str, Any]:
        return {"seconds": gradients(best), "units": rows * length, "note": f"micro-batches of {best}"}

    yield repeat


if __name__ == "__main__":
    serve(load, {"train": train})
