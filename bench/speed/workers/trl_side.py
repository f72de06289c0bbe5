"""TRL's GRPOTrainer with PEFT, everything in bfloat16. Runs in the environment that has `trl`.

Training goes on in a thread; each repeat lets it do some steps and takes their durations. The first step, which warms up,
is done when the work is made ready.
"""

from __future__ import annotations

import importlib
import os
import queue
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.speed.workers import peft_side
from bench.speed.workers.material import story_prompts, varied
from bench.speed.workers.serve import Repeat, options, serve, versions

OPTIONS = options()
NEVER = 1_000_000
MICRO_BATCH = 8


def load() -> dict[str, Any]:
    """Load base and adapter; the trainer is made with the work."""
    os.environ.setdefault("TRL_TELEMETRY", "0")
    importlib.import_module("trl")
    peft_side.load()
    return {"versions": versions("trl", "peft", "torch", "transformers")}


def trainer(args: dict[str, Any], callback: Any) -> Any:
    """A trainer whose steps have as many prompts and completions as the work says."""
    trl = importlib.import_module("trl")
    dataset = importlib.import_module("datasets").Dataset
    completions = args["groups"] * args["each"]
    size = min(MICRO_BATCH, completions)
    config = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="bench-trl-"),
        use_cpu=True,
        bf16=False,  # the model is bfloat16 already; this flag would add autocast
        per_device_train_batch_size=size,
        gradient_accumulation_steps=completions // size,
        num_generations=args["each"],
        max_completion_length=args["max_tokens"],
        temperature=1.0,
        num_iterations=1,
        beta=0.0,
        learning_rate=1e-5,
        max_steps=NEVER,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
    )
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in story_prompts()]
    return trl.GRPOTrainer(
        model=peft_side.parts["model"],
        reward_funcs=varied,
        args=config,
        train_dataset=dataset.from_list(rows),
        callbacks=[callback],
    )


def stepper() -> tuple[Any, queue.Queue[int], queue.Queue[Any]]:
    """A callback that waits for leave before each step, and tells of each step how long it was and what was sampled."""
    base = importlib.import_module("transformers").TrainerCallback
    leave: queue.Queue[int] = queue.Queue()
    told: queue.Queue[Any] = queue.Queue()

    class Stepper(base):  # type: ignore[misc, valid-type]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            leave.get()
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds = time.perf_counter() - self.started

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            told.put((self.seconds, float((logs or {}).get("completions/mean_length", float("nan")))))

    return Stepper(), leave, told


@contextmanager
def jobs(args: dict[str, Any]) -> Iterator[Repeat]:
    """Steps of one job."""
    callback, leave, told = stepper()
    made = trainer(args, callback)

    def run() -> None:
        importlib.import_module("torch").set_num_threads(OPTIONS["threads"])
        try:
            made.train()
        except BaseException as error:  # handed to the thread that waits
            told.put(error)

    threading.Thread(target=run, name="trainer", daemon=True).start()

    def repeat() -> dict[str, Any]:
        seconds, lengths = [], []
        for _ in range(args["steps"]):
            leave.put(1)
            answer = told.get()
            if isinstance(answer, BaseException):
                raise answer
            seconds.append(answer[0])
            lengths.append(answer[1])
        mean = sum(lengths) / len(lengths)
        return {"seconds": sum(seconds), "units": len(seconds), "note": f"{mean:.0f} tokens per completion"}

    yield repeat


if __name__ == "__main__":
    serve(load, {"jobs": jobs})
