"""The sums of `sums_taskset`, and one whose question does not fit into the context of the small base."""

from __future__ import annotations

from sums_taskset import Direct, SumData, Sums, SumTask

__all__ = ["Direct", "LongSums"]


class LongSums(Sums):
    def load(self):
        first, *others = super().load()
        yield first
        yield SumTask(SumData(prompt="What is 7 + 7? " * 400, answer="14"), self.config.task)
        yield from others
