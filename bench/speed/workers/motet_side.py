"""Motet's works. What they need of Motet is in `motet_parts.py`, the only file of the bench that knows it from the inside.

Besides serving the bench this file runs two things as processes of their own, for figures of a fresh process:

    python -m bench.speed.workers.motet_side OPTIONS memory ARGS     jobs, then the peak of memory in bytes
    python -m bench.speed.workers.motet_side OPTIONS first-token     a line as soon as one token is sampled
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.speed.workers.fresh import PeakMemory, last_number, motet_help, wall_time
from bench.speed.workers.job_files import figures, job_fields, read_steps
from bench.speed.workers.motet_parts import (
    OPTIONS,
    Watch,
    base,
    batches_of,
    close_workshop,
    job_budgets,
    links,
    new_number,
    on_device,
    published,
    requests_of,
    resident,
    run_jobs,
    tokens,
    trainer,
    workshop,
)
from bench.speed.workers.serve import Repeat, Unavailable, Work, serve, versions

from motet.model import lean_import

if TYPE_CHECKING:
    from motet.core.batch import Batch
    from motet.core.types import GenerateRequest


def load() -> dict[str, Any]:
    """Load the base and put engine and trainer on it."""
    places = links(workshop())
    notes = [*base().info.notes, *(link.note for link in places if link.note)]
    facts = {"exact": base().info.exact, "notes": notes, "sampling processes": 1 + sum(link.ready for link in places)}
    return {"versions": versions("motet", "torch", "transformers"), **facts}


@contextmanager
def decode(args: dict[str, Any]) -> Iterator[Repeat]:
    """Complete prompts with a fixed number of tokens; prompt i is answered by adapter i modulo their number."""
    made = workshop(args.get("samplers", "auto"), wait=args.get("wait", True))
    requests: list[GenerateRequest] = []
    rows = args["prompts"] * args["each"]

    def repeat() -> dict[str, Any]:
        started = time.perf_counter()
        units = asyncio.run(tokens(made.engine, requests))
        seconds = time.perf_counter() - started
        assert units == rows * args["new_tokens"], f"{units} tokens instead of {rows} × {args['new_tokens']}"
        counts = {
            "decoded": units,
            "passes": args["new_tokens"],
            "prefilled": args["prompts"] * args["prompt_tokens"],
            "context": args["prompt_tokens"] + args["new_tokens"] / 2,
            "adapters": args["adapters"],
        }
        return {"seconds": seconds, "units": units, "counts": counts}

    with published(made, args["adapters"], args["rank"]) as references:
        requests += requests_of(args, references)
        yield repeat


@contextmanager
def train(args: dict[str, Any]) -> Iterator[Repeat]:
    """Gradients of samples that belong to one or several adapters; with `update`, AdamW's step of each adapter too."""
    from motet.core.batch import AdamW

    used = trainer(args)
    names: list[str] = []
    batches: list[Batch] = []
    length = args["prompt"] + args["response"]

    def repeat() -> dict[str, Any]:
        started = time.perf_counter()
        for batch in batches:
            on_device(workshop(), partial(used.forward_backward, batch))
        gradients = time.perf_counter() - started
        for name in names:
            on_device(workshop(), partial(used.optim_step, name, AdamW(1e-6)))
        seconds = time.perf_counter() - started if args.get("update") else gradients
        counts = {
            "trained": sum(batch.n_tokens for batch in batches) if args.get("share") else args["samples"] * length,
            "headed": args["samples"] * args["response"],
            "batches": len(batches),
            "context": length / 2,
            "adapters": args["adapters"],
            "updates": args["adapters"] if args.get("update") else 0,
        }
        return {"seconds": seconds, "units": args["samples"] * length, "counts": counts, "gradients": gradients}

    with resident(used, args["adapters"], args["rank"]) as found:
        names += found
        batches += batches_of(args, names)
        yield repeat


@contextmanager
def publish(args: dict[str, Any]) -> Iterator[Repeat]:
    """The time from the end of an optimizer step until the new version can be sampled from: the slowest of several."""
    from motet.core.batch import AdamW
    from motet.core.types import AdapterRef

    made = workshop()

    async def timed(name: str) -> float:
        reference = AdapterRef(name, new_number())
        started = time.perf_counter()
        await made.sync.publish(name, reference)
        seconds = time.perf_counter() - started
        await made.engine.unload_adapter(reference)
        return seconds

    with resident(made.trainer, 1, args["rank"]) as names:
        (batch,) = batches_of({"samples": 4, "prompt": 16, "response": 16}, names)

        def repeat() -> dict[str, Any]:
            found = []
            for _ in range(args["times"]):
                on_device(made, partial(made.trainer.forward_backward, batch))
                on_device(made, partial(made.trainer.optim_step, names[0], AdamW(1e-6)))
                found.append(asyncio.run(timed(names[0])))
            return {"value": max(found)}

        yield repeat


@contextmanager
def jobs(args: dict[str, Any]) -> Iterator[Repeat]:
    """GRPO jobs from the first sampled token to the end of the last step; with `after_first`, without each job's first step."""
    close_workshop()  # a run makes its own; so a block has either jobs or works that need a workshop

    def repeat() -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="bench-motet-") as scratch:
            watch = Watch()
            run_jobs(args, Path(scratch), watch)
            steps = [read_steps(Path(scratch) / job["name"]) for job in job_fields(args, Path(scratch))]
            return {**figures(steps, args, *job_budgets(args)), "busy": watch.busy()}

    yield repeat


@contextmanager
def profile(args: dict[str, Any]) -> Iterator[Repeat]:
    """Seconds of one repeat of `decode` or `train` by group of operations."""
    from bench.speed.profiling import Dimensions, grouped, profiler

    if base().info.processor.startswith("motet"):
        raise Unavailable("Motet's own kernels are one operation for torch's profiler")
    made = workshop(args.get("samplers", "auto"))
    config = base().model.config.get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = Dimensions(vocabulary=config.vocab_size, rank=args["rank"], head=head)

    with WORKS[args["of"]](args) as repeat:
        repeat()

        def profiled() -> dict[str, Any]:
            watcher = profiler(base().device.type)
            on_device(made, watcher.start)  # it sees the thread that it is started in
            answer = repeat()
            on_device(made, watcher.stop)
            return {**answer, "groups": grouped(watcher, answer["seconds"], sizes)}

        yield profiled


def fresh(*words: str) -> list[str]:
    """This file as a process of its own."""
    return [sys.executable, "-m", "bench.speed.workers.motet_side", json.dumps(OPTIONS), *words]


WORKS: dict[str, Work] = {
    "decode": decode,
    "train": train,
    "publish": publish,
    "jobs": jobs,
    "memory": last_number(lambda args: fresh("memory", json.dumps(args))),
    "first-token": wall_time(fresh("first-token"), until="token"),
    "help": wall_time(motet_help()),
    "profile": profile,
}
ONE_TOKEN = {"prompts": 1, "each": 1, "prompt_tokens": 16, "new_tokens": 1, "adapters": 0, "rank": 0, "wait": False}

if __name__ == "__main__":
    if sys.argv[2:3] == ["memory"]:
        with PeakMemory() as peak, jobs(json.loads(sys.argv[3])) as run:
            run()
        print(peak.total)
    elif sys.argv[2:3] == ["first-token"]:
        lean_import.allow()
        with decode(ONE_TOKEN) as repeat:
            repeat()
            print("token", flush=True)
    else:
        serve(load, WORKS)
