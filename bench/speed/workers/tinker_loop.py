"""GRPO as a user of the `tinker` package writes it. Runs in the environment that has the package.

    python tinker_loop.py URL BASE CLIENTS STEPS GROUPS EACH MAX_TOKENS < lines

Each line on stdin is a repeat: all clients train a fresh model from its creation to its last step, and a line of JSON tells
the seconds. Prompts and rewards are like those of the job that `service_side.py` submits.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import numpy as np

tinker = import_module("tinker")
types = tinker.types


PROMPT = "<|im_start|>user\nSort the letters of {word}.<|im_end|>\n<|im_start|>assistant\n"


def word_of(number: int) -> str:
    """Four letters."""
    return "".join("ABCDEFGHIJ"[(number * 7 + place * 3) % 10] for place in range(4))


def datum(prompt: list[int], sequence: Any, advantage: float) -> Any:
    """What is trained of one sample."""
    before = len(prompt) - 1
    inputs = {
        "target_tokens": np.asarray([*prompt[1:], *sequence.tokens], np.int64),
        "logprobs": np.asarray([0.0] * before + list(sequence.logprobs), np.float32),
        "advantages": np.asarray([0.0] * before + [advantage] * len(sequence.tokens), np.float32),
    }
    tokens = [*prompt, *sequence.tokens[:-1]]
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def ready(client: Any) -> Any:
    """0.25 gives clients themselves, later releases futures of them."""
    return client.result() if hasattr(client, "result") else client


def train(service: Any, base: str, steps: int, groups: int, each: int, max_tokens: int) -> None:
    """One model, from its creation to its last step."""
    client = ready(service.create_lora_training_client(base_model=base, rank=16))
    tokenizer, params = client.get_tokenizer(), types.SamplingParams(max_tokens=max_tokens)
    for step in range(steps):
        sampler = ready(client.save_weights_and_get_sampling_client())
        words = [word_of(step * groups + index) for index in range(groups)]
        prompts = [tokenizer.encode(PROMPT.format(word=word)) for word in words]
        asked = [
            sampler.sample(prompt=types.ModelInput.from_ints(prompt), num_samples=each, sampling_params=params)
            for prompt in prompts
        ]
        data = []
        for word, prompt, future in zip(words, prompts, asked, strict=True):
            sequences = future.result().sequences
            answer = "".join(sorted(word))
            said = [tokenizer.decode(sequence.tokens, skip_special_tokens=True) for sequence in sequences]
            rewards = np.asarray([sum(a == b for a, b in zip(text, answer, strict=False)) for text in said], np.float64)
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            data += [datum(prompt, sequence, value) for sequence, value in zip(sequences, advantages, strict=True)]
        client.forward_backward(data, "importance_sampling")
        client.optim_step(types.AdamParams(learning_rate=1e-5)).result()


def main() -> None:
    """Repeat as often as asked."""
    (url, base), (clients, *work) = sys.argv[1:3], [int(word) for word in sys.argv[3:]]
    for _ in sys.stdin:
        started = time.perf_counter()
        with contextlib.ExitStack() as stack:
            services = [tinker.ServiceClient(base_url=url, api_key="tml-none") for _ in range(clients)]
            for client in services:
                if hasattr(client, "__exit__"):  # 0.25 has none
                    stack.enter_context(client)
            pool = stack.enter_context(ThreadPoolExecutor(clients))
            for done in [pool.submit(train, client, base, *work) for client in services]:
                done.result()
            seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
