"""How fast Motet is on a card, through its own engine and trainer, the host's time included.

python -m bench.gpu.timings OPTIONS decode|train|jobs|start
"""

from __future__ import annotations

import gc
import math
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from bench.gpu import price
from bench.gpu.company import executor_of
from bench.gpu.figures import Figure, say
from bench.speed.profiling import profiler
from bench.speed.workers import motet_parts as parts
from bench.speed.workers import motet_side as side
from bench.speed.workers.serve import Repeat

from motet.kernels.cuda.product_timings import stopwatch_of
from motet.model.accelerator import Recorder, give_back

SPY_SECONDS = 3
"""How long py-spy looks."""
After = Callable[[str, Repeat], None]
"""What is done with a work once it is timed; the name is that of a file."""


class Timings:
    """Works on one base."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.tiny = options["device"] == "cpu"
        self.shape = str(options["model"]).rsplit("/", 1)[-1]
        self._options = options

    def decode(self) -> bool:
        """64 and 256 rows, none to 64 adapters; what exactness costs; then 64 rows with 1,024 keys each.

        Returns whether exactness costs no more than it may.
        """
        rows = (8, 16) if self.tiny else price.ROWS
        speeds = {}
        for most, adapters, after in (
            (rows[0], 0, [self._profile]),
            (rows[0], 8, [self._profile]),
            (rows[1], 0, []),
            (rows[1], 8, []),
            (rows[1], 8 if self.tiny else 64, [self._memory]),
            (rows[0], 8 if self.tiny else 64, []),
        ):
            name = _decode_row(most, adapters)
            speeds[most, adapters] = self._timed(name, "decode", _decode(most, adapters, self._new), after)
        cheap = self._price({key: speed for key, speed in speeds.items() if key[1] in (0, 8)})
        long = {**_decode(rows[0], 8, self._new), "prompt_tokens": 100 if self.tiny else 1024}
        name = f"decode, {rows[0]} rows, 8 adapters, {long['prompt_tokens']} keys"
        self._timed(name, "decode", long, [self._spy])
        if not cheap:
            print(f"exactness costs more than {price.MOST} times the time")
        return cheap

    def _price(self, exact: Mapping[tuple[int, int], float]) -> bool:
        """Time the same works again with the fastest products, whatever their bits; whether no ratio is too large."""
        base, ratios = parts.base(), []
        parts.close_workshop()  # its steps are recorded with the products that they had
        gc.collect()
        give_back(base.device)
        with price.products_by_time(base, stopwatch_of(Recorder(base.device).capture, base.device)) as other:
            by = "by time alone" if other else "by the same products"
            for (most, adapters), speed in exact.items():
                work = f"{most} rows, {_said(adapters)}"
                free = self._timed(f"decode {by}, {work}", "decode", _decode(most, adapters, self._new))
                ratios.append(free / speed)
                said = f"{ratios[-1]:.3f} times as long as {by}; {price.MOST} are allowed"
                say(Figure("speed", f"{self.shape}: price of exactness, {work}", said))
        parts.close_workshop()
        return self.tiny or all(ratio <= price.MOST for ratio in ratios)

    def train(self) -> None:
        """Gradients and the optimiser's step."""
        work = {"samples": 64, "prompt": 64, "response": 64, "rank": 16, "update": True}
        long = {**work, "samples": 16, "prompt": 256, "response": 768}
        if self.tiny:
            work, long = {**work, "samples": 16, "prompt": 8, "response": 8}, {**work, "samples": 2}
        for args, adapters, after in (
            (work, 1, [self._memory, self._profile, self._spy]),
            (work, 8, [self._profile]),
            (long, 1, []),
            (long, 8, [self._memory]),
        ):
            row = f"gradients, {args['samples']} × ({args['prompt']} + {args['response']}), {_said(adapters)}"
            self._timed(row, "train", {**args, "adapters": adapters}, after)

    def jobs(self) -> None:
        """GRPO jobs: seconds for a step of one of them."""
        job = {"groups": 4, "each": 8, "max_tokens": 64, "rank": 16, "steps": 3, "jobs": 8}
        if self.tiny:
            job |= {"groups": 1, "each": 4, "max_tokens": 4, "steps": 2, "jobs": 2}
        long = {**job, "max_tokens": 8 if self.tiny else 512, "steps": 2}
        row = f"GRPO, {job['groups'] * job['each']} completions of"
        single = {**job, "jobs": 1, "after_first": True}
        with side.WORKS["jobs"]({**job, "max_tokens": 4, "steps": 1}) as repeat:  # compiles what jobs alone use
            repeat()
        self._timed(f"{row} {job['max_tokens']}: a step of one job", "jobs", single, warm=False)
        for args in (job, long):
            for manner, in_turn in (("at once", False), ("in turn", True)):
                name = f"{row} {args['max_tokens']}: {args['jobs']} jobs {manner}, for each step"
                self._timed(name, "jobs", {**args, "sequential": in_turn, "without_gaps": in_turn}, warm=False)

    def start(self) -> None:
        """A process of its own; what is compiled and cached was used before."""
        with side.WORKS["first-token"]({}) as repeat:
            say(Figure("speed", f"{self.shape}: to the first token", repeat()["seconds"], "s", ""))

    @property
    def _new(self) -> int:
        return 4 if self.tiny else 64

    def _timed(
        self, row: str, work: str, args: dict[str, Any], after: Sequence[After] = (), *, warm: bool = True
    ) -> float:
        """Time a work: the better of two repeats after one that warms up. What fails is said, and the next one goes on.

        Returns units in a second; NaN where it failed.
        """
        name, speed = f"{self.shape}: {row}", math.nan
        try:
            with side.WORKS[work](args) as repeat:
                if warm:
                    repeat()
                found = min((repeat() for _ in range(2 if warm else 1)), key=lambda timing: float(timing["seconds"]))
                executor, speed = executor_of(parts.base()), found["units"] / found["seconds"]
                jobs = work == "jobs"
                say(Figure("speed", name, 1 / speed if jobs else speed, "s" if jobs else "tokens/s", executor))
                for look in after:
                    length = args.get("prompt", 0) + args.get("response", 0)
                    of = f"-{args['samples']}x{length}" if length else ""
                    look(f"{work}-{self.shape}-{args['adapters']}-adapters{of}", repeat)
        except Exception as error:
            traceback.print_exc()
            say(Figure("speed", name, f"failed: {type(error).__name__}: {str(error)[:100]}"))
        return speed

    def _profile(self, name: str, repeat: Repeat) -> None:
        """Write torch's table of a repeat; say how long the card was busy, and its launches."""
        watcher, made = profiler(str(self._options["device"])), parts.workshop()
        parts.on_device(made, watcher.start)
        found = repeat()
        parts.on_device(made, watcher.stop)
        averages = watcher.key_averages()
        key = "self_cpu_time_total" if self.tiny else "self_cuda_time_total"
        file = Path(self._options["files"]) / f"{name}.profile.txt"
        file.write_text(averages.table(sort_by=key, row_limit=60, max_name_column_width=90))
        on_card = [event for event in averages if event.self_device_time_total > 0]
        passes = found["counts"].get("passes") or found["counts"]["batches"]
        layers = parts.base().model.config.get_text_config().num_hidden_layers
        busy = sum(event.self_device_time_total for event in on_card) / 1e3 / passes
        launches = sum(event.count for event in on_card) / passes / layers
        wall = found["seconds"] * 1e3 / passes
        if not on_card:
            return
        text = f"{busy:.2f} of {wall:.2f} ms, {launches:.1f} launches a layer"
        say(Figure("speed", f"{self.shape}: card busy in a pass, {name}", text, "", executor_of(parts.base())))

    def _memory(self, name: str, repeat: Repeat) -> None:
        """Say the most memory of the card that tensors had in a repeat, the base's weights among them."""
        if self.tiny:
            return
        torch.cuda.reset_peak_memory_stats()
        repeat()
        gigabytes = torch.cuda.max_memory_allocated() / 1e9
        say(Figure("speed", f"{self.shape}: memory, {name}", gigabytes, "GB", executor_of(parts.base())))

    def _spy(self, name: str, repeat: Repeat) -> None:
        """Let py-spy write the stacks of this process, where it is installed."""
        tool = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        if tool is None:
            print("py-spy is not installed here")
            return
        file = Path(self._options["files"]) / f"{name}.spy"
        command = [tool, "record", "--pid", str(os.getpid()), "--duration", str(SPY_SECONDS), "--rate", "200"]
        with subprocess.Popen([*command, "--format", "raw", "--threads", "--output", str(file)]) as spy:
            end = time.monotonic() + SPY_SECONDS + 1
            while spy.poll() is None and time.monotonic() < end:
                repeat()


def _decode(rows: int, adapters: int, new: int) -> dict[str, Any]:
    """Prompts of 40 tokens, each answered with several completions; no more adapters than prompts."""
    prompts = max(8, adapters)
    return {
        "prompts": min(prompts, rows),
        "each": max(1, rows // prompts),
        "prompt_tokens": 40,
        "new_tokens": new,
        "rank": 16,
        "adapters": adapters,
    }


def _decode_row(rows: int, adapters: int) -> str:
    return f"decode, {rows} rows, {_said(adapters)}"


def _said(adapters: int) -> str:
    return "no adapter" if adapters == 0 else "1 adapter" if adapters == 1 else f"{adapters} adapters"


def main(words: list[str]) -> int:
    """Time one kind of work."""
    timings = Timings(parts.OPTIONS)
    if words[-1] != "start":
        side.load()
        print(f"exact: {parts.base().info.exact}; {parts.base().arithmetic}; {' '.join(parts.base().info.notes)}")
    if words[-1] == "decode":
        return int(not timings.decode())
    {"train": timings.train, "jobs": timings.jobs, "start": timings.start}[words[-1]]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
