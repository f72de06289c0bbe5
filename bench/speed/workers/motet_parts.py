"""Everything of Motet that the bench touches: base, engine, trainer, device, requests, batches and runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from bench.speed.workers.job_files import job_fields
from bench.speed.workers.material import advantages, token_ids
from bench.speed.workers.serve import options

if TYPE_CHECKING:
    from motet.core.batch import Batch, Sample, Segment
    from motet.core.device import BusyTime
    from motet.core.types import AdapterRef, GenerateRequest
    from motet.hosts.runs import Run
    from motet.hosts.workshop import Workshop
    from motet.model.lora_model import LoraModel
    from motet.protocols import RolloutEngine, Trainer
    from motet.rollout.sampler_link import SamplerLink
    from motet.runtime.progress import JobProgress

Result = TypeVar("Result")
OPTIONS = options()
MICRO_BATCH_TOKENS: int = OPTIONS.get("micro_batch_tokens", 1024)
MAX_ROWS: int = OPTIONS.get("max_rows", 64)
LONGEST: int = OPTIONS.get("longest", 256)
"""Tokens of the longest prompt with its completion."""
START_SECONDS = 120.0
SLOTS = 256
_parts: dict[str, Any] = {}


def engine_fields(**budgets: int) -> dict[str, Any]:
    """The `engine` section of everything that is measured; budgets that are not given are Motet's own."""
    return {
        "device": OPTIONS["device"],
        "dtype": "bfloat16",
        "threads": OPTIONS["threads"],
        "micro_batch_tokens": MICRO_BATCH_TOKENS,
        **({"kv_tokens": OPTIONS["kv_tokens"]} if "kv_tokens" in OPTIONS else {}),
        **budgets,
    }


def base() -> LoraModel:
    """The base, loaded once."""
    from motet.config import EngineConfig
    from motet.hosts.launch import load

    if "base" not in _parts:
        _parts["base"] = load(OPTIONS["model"], EngineConfig(**engine_fields()))
    loaded: LoraModel = _parts["base"]
    return loaded


def workshop(samplers: int | Literal["auto"] = "auto", *, wait: bool = True) -> Workshop:
    """Engine, trainer and device on the base.

    There is one at a time, as in a run, because the device's thread should be the only one with a team of OpenMP threads:
    another number of sampling processes closes the one before. With `wait`, they all take part when it returns.
    """
    from motet.config import EngineConfig
    from motet.config.budgets import Need
    from motet.hosts.launch import build

    if _parts.get("samplers") != samplers:
        close_workshop()
        config = EngineConfig(**engine_fields(slots=SLOTS, max_rows=MAX_ROWS), samplers=samplers)
        _parts.update(samplers=samplers, workshop=build(base(), config, [Need(LONGEST // 2, LONGEST // 2)]))
        if wait:
            wait_for_samplers(_parts["workshop"])
    made: Workshop = _parts["workshop"]
    return made


def close_workshop() -> None:
    """End its thread and processes, where there is one."""
    if "workshop" in _parts:
        _parts.pop("workshop").close()
        _parts.pop("samplers")


def wait_for_samplers(made: Workshop) -> None:
    """Wait until sampling processes take part."""
    end = time.monotonic() + START_SECONDS
    while not all(link.ready or link.note for link in links(made)) and time.monotonic() < end:
        time.sleep(0.05)


def links(made: Workshop) -> Sequence[SamplerLink]:
    """The sampling processes of a workshop; none where everything is sampled in this one."""
    return () if made.spread is None else made.spread.links


def trainer(args: dict[str, Any]) -> Trainer:
    """The workshop's trainer; with `share: false` one that computes a shared prompt with each of its samples."""
    from motet.training.torch_trainer import TorchTrainer

    if args.get("share", True):
        return workshop().trainer
    if "unshared" not in _parts:
        _parts["unshared"] = TorchTrainer(base(), slots=SLOTS, share_prompts=False)
    unshared: Trainer = _parts["unshared"]
    return unshared


def on_device(made: Workshop, call: Callable[[], Result]) -> Result:
    """Run a call where a run does, in a workshop's own thread, and wait until it is through, on a GPU too."""

    def through() -> Result:
        result = call()
        if base().device.type == "cuda":
            import torch

            torch.cuda.synchronize()
        return result

    return made.device.submit(through).result()


def new_number() -> int:
    """A number that no adapter or version has had."""
    _parts["number"] = _parts.get("number", 0) + 1
    return int(_parts["number"])


@contextmanager
def resident(trainer: Trainer, count: int, rank: int) -> Iterator[list[str]]:
    """Fresh adapters in a trainer."""
    from motet.config import AdapterConfig

    names = [f"bench-{new_number()}" for _ in range(count)]
    for seed, name in enumerate(names):
        trainer.add_adapter(name, AdapterConfig(rank=rank, alpha=2 * rank), seed)
    try:
        yield names
    finally:
        for name in names:
            trainer.remove_adapter(name)


@contextmanager
def published(made: Workshop, count: int, rank: int) -> Iterator[Sequence[AdapterRef | None]]:
    """Fresh adapters that the engine samples from; for none, the base."""
    from motet.core.types import AdapterRef

    with resident(made.trainer, count, rank) as names:
        references = [AdapterRef(name, 0) for name in names]
        for reference in references:
            asyncio.run(made.sync.publish(reference.name, reference))
        try:
            yield references or [None]
        finally:
            for reference in references:
                asyncio.run(made.engine.unload_adapter(reference))


def requests_of(args: dict[str, Any], references: Sequence[AdapterRef | None]) -> list[GenerateRequest]:
    """One request for each prompt; prompt i is answered by adapter i modulo their number."""
    import numpy as np

    from motet.core.types import GenerateRequest, SamplingParams

    ids = token_ids(args["prompts"], args["prompt_tokens"], base().info.vocab_size)
    return [
        GenerateRequest(
            id=f"r{number}",
            job=f"j{number % len(references)}",
            prompt_ids=np.array(prompt, np.int32),
            adapter=references[number % len(references)],
            sampling=SamplingParams(max_tokens=args["new_tokens"]),
            seeds=tuple(number * args["each"] + place for place in range(args["each"])),
        )
        for number, prompt in enumerate(ids)
    ]


async def tokens(engine: RolloutEngine, requests: Sequence[GenerateRequest]) -> int:
    """Run requests at once and count what they sample."""

    async def sampled(request: GenerateRequest) -> int:
        return sum([len(chunk.token_ids) async for chunk in engine.generate(request)])

    return sum(await asyncio.gather(*(sampled(request) for request in requests)))


def _samples(args: dict[str, Any]) -> list[Sample]:
    """Samples in groups of `group` that have one prompt."""
    import numpy as np

    from motet.core.batch import Sample

    vocabulary, group = base().info.vocab_size, args.get("group", 1)
    prompts = token_ids(args["samples"] // group, args["prompt"], vocabulary)
    answers = token_ids(args["samples"], args["response"], vocabulary, seed=1)
    mask = np.arange(args["prompt"] + args["response"]) >= args["prompt"]
    return [
        Sample(
            token_ids=np.array(prompts[number // group] + answer, np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -6.0, 0.0).astype(np.float32),
            advantages=np.where(mask, advantage, 0.0).astype(np.float32),
            versions=np.zeros(len(mask), np.int32),
        )
        for number, (answer, advantage) in enumerate(zip(answers, advantages(args["samples"]), strict=True))
    ]


def batches_of(args: dict[str, Any], names: Sequence[str]) -> list[Batch]:
    """Each adapter's samples in micro-batches, and micro-batches of several adapters in one batch, as a run packs them."""
    from motet.algorithms import Reinforce
    from motet.core.batch import Batch, Segment

    samples, n = _samples(args), len(names)
    denominator = float(args["samples"] * args["response"])
    per_cut = max(MICRO_BATCH_TOKENS // (args["prompt"] + args["response"]), 1)
    segments = []
    for number, name in enumerate(names):
        own = samples[number * len(samples) // n : (number + 1) * len(samples) // n]
        cuts = [own[first : first + per_cut] for first in range(0, len(own), per_cut)]
        segments += [Segment(name, tuple(cut), Reinforce(), denominator) for cut in cuts]
    batches: list[list[Segment]] = [[]]
    for segment in segments:
        if batches[-1] and sum(item.n_tokens for item in batches[-1]) + segment.n_tokens > MICRO_BATCH_TOKENS:
            batches.append([])
        batches[-1].append(segment)
    return [Batch(tuple(batch)) for batch in batches]


def run_jobs(args: dict[str, Any], scratch: Path, watch: Watch) -> None:
    """Run jobs to their end in a run directory.

    Raises:
        RuntimeError: one of them did not succeed.
    """
    from motet.config.jobfile import validate
    from motet.hosts.running import run_config

    engine = engine_fields(slots=args["jobs"], **args.get("budgets", {}))
    tree = {"base": OPTIONS["model"], "run": str(scratch), "engine": engine, "jobs": job_fields(args, scratch)}
    result = run_config(
        validate(tree, "bench"),
        base=base(),
        sequential=bool(args.get("sequential")),
        observe=watch.observe,
        started=watch.started,
    )
    if not result.ok:
        raise RuntimeError("; ".join(f"{job.name} {job.state}: {job.message}" for job in result.jobs.values()))


def job_budgets(args: dict[str, Any]) -> tuple[int, int]:
    """Rows of a decode batch and tokens of a training batch when jobs run."""
    from motet.config import EngineConfig

    config = EngineConfig(**engine_fields(**args.get("budgets", {})))
    return config.max_rows, config.train_tokens


class Watch:
    """How busy the device was from the moment all jobs had done a step until the first was through."""

    def __init__(self) -> None:
        self._busy: BusyTime | None = None
        self._marks: list[tuple[float, float]] = []

    def started(self, host: Run) -> None:
        """Everything is loaded, and no step has begun."""
        from motet.hosts.host import Host

        assert isinstance(host, Host), "it has several hosts"
        wait_for_samplers(host.workshop)
        self._busy = host.workshop.device.busy

    def observe(self, progress: Sequence[JobProgress]) -> None:
        """Look at the jobs now and then."""
        begun = all(job.step >= 1 for job in progress)
        ended = any(job.step >= job.steps for job in progress)
        wanted = ended if self._marks else begun and not ended
        if self._busy is not None and wanted and len(self._marks) < 2:
            self._marks.append((time.perf_counter(), self._busy.decode + self._busy.train))

    def busy(self) -> float:
        """Busy seconds by seconds; NaN where the window was never open."""
        if len(self._marks) < 2:
            return float("nan")
        (begin, busy), (end, later) = self._marks
        return (later - busy) / max(end - begin, 1e-9)
