"""What a user of the same card has without Motet: its ceilings, gradients by PEFT, completions by transformers.

python -m bench.gpu.peers OPTIONS peers
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers
from bench.gpu.figures import Figure, say
from bench.speed.workers.serve import options

OPTIONS = options()
DEVICE = OPTIONS["device"]
TINY = DEVICE == "cpu"
SHAPE = str(OPTIONS["model"]).rsplit("/", 1)[-1]


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """Seconds of one of several repeats, after one that warms up."""
    work()
    _wait()
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    _wait()
    return (time.perf_counter() - started) / repeats


def _wait() -> None:
    if not TINY:
        torch.cuda.synchronize()


def ceilings() -> None:
    """A large product, and a copy of a large tensor."""
    size, n_bytes = (256, 2**20) if TINY else (8192, 2**31)
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    seconds = seconds_of(lambda: a @ b, 10)
    say(Figure("card", f"bfloat16 product of {size}³", 2 * size**3 / seconds / 1e12, "TFLOP/s"))
    source = torch.zeros(n_bytes, device=DEVICE, dtype=torch.uint8)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), 10)
    say(Figure("card", "copy on the device, read and written", 2 * n_bytes / seconds / 1e9, "GB/s"))


def adapted() -> Any:
    """The base with an adapter of rank 16 on all linear layers, all in bfloat16."""
    base = transformers.AutoModelForCausalLM.from_pretrained(
        OPTIONS["model"], dtype=torch.bfloat16, attn_implementation="sdpa"
    ).to(DEVICE)
    shape = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(base, shape, autocast_adapter_dtype=False).train()


def gradients(model: Any, rows: int, prompt: int, response: int, micro: int) -> None:
    """Gradients of a policy-gradient loss on the answers, and AdamW's step; the head sees the answers only."""
    ids = torch.randint(100, model.config.vocab_size, (rows, prompt + response), device=DEVICE)
    weights = torch.randn(rows, device=DEVICE)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-6)

    def step() -> None:
        for first in range(0, rows, micro):
            chunk = ids[first : first + micro]
            hidden = model.base_model.model.model(input_ids=chunk, use_cache=False).last_hidden_state
            logits = model.get_output_embeddings()(hidden[:, prompt - 1 : -1]).float()
            targets = chunk[:, prompt:].flatten()
            losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
            loss = (losses.view(len(chunk), -1) * weights[first : first + micro, None]).sum()
            (loss / (rows * response)).backward()
        optimizer.step()
        optimizer.zero_grad()

    if not TINY:
        torch.cuda.reset_peak_memory_stats()
    seconds = seconds_of(step, 1 if TINY else 3)
    row = f"{SHAPE}: PEFT, gradients, {rows} × ({prompt} + {response}), {micro} at a time"
    say(Figure("peers", row, rows * (prompt + response) / seconds, "tokens/s"))
    if not TINY:
        say(Figure("peers", f"{row}: memory", torch.cuda.max_memory_allocated() / 1e9, "GB"))


@torch.no_grad()
def completions(model: Any, rows: int, new: int) -> None:
    """`generate` of transformers, with one adapter."""
    ids = torch.randint(100, 1000, (rows, 40), device=DEVICE)
    model.eval()

    def generate() -> None:
        model.generate(input_ids=ids, max_new_tokens=new, min_new_tokens=new, do_sample=True, pad_token_id=0)

    row = f"{SHAPE}: transformers, generate, {rows} rows, 1 adapter"
    say(Figure("peers", row, rows * new / seconds_of(generate, 1), "tokens/s"))


def main() -> int:
    """Measure what is installed; what fails is said, and the next one goes on."""
    torch.manual_seed(0)
    if SHAPE != "8b":
        ceilings()
    model = adapted()
    works: list[Callable[[], None]] = [
        lambda: gradients(model, *((4, 8, 8, 4) if TINY else (64, 64, 64, 64))),
        lambda: gradients(model, *((2, 16, 16, 2) if TINY else (16, 256, 768, 8))),
        lambda: completions(model, *((4, 4) if TINY else (64, 32))),
    ]
    for work in works:
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            say(Figure("peers", f"{SHAPE}: a peer failed", f"{type(error).__name__}: {str(error)[:100]}"))
        if not TINY:
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
