"""Supervised fine-tuning, step by step: rows → learn → record → commit → publish. Nothing is sampled."""

from __future__ import annotations

import time
from collections.abc import Sequence

from motet.algorithms.algorithm import StepBatch
from motet.algorithms.supervised import Supervised
from motet.batch import Segment
from motet.runtime.driver import Driver
from motet.runtime.learning import train
from motet.runtime.metrics import trained_record
from motet.runtime.session import Evaluated, FinishedStep
from motet.tasks.dataset import data_window
from motet.types import Problem


class SupervisedLoop(Driver):
    """Trains an adapter on the answers of its data."""

    async def step(self, step: int) -> None:
        """Learn a step's rows and record them; the driver publishes."""
        job = self.job
        started = time.monotonic()
        evaluated = await self.evaluated()
        job.progress.phase = "training"
        rows = data_window(job.data.train, step, self._algorithm.rows_per_step, job.seed, job.config.data.shuffle)
        batch = self._batch(rows)
        learned = await train(self.session, batch, self._segments(batch), step)
        finished = FinishedStep(
            record={"step": step, "version": step, "samples": len(batch.samples), **trained_record(learned)},
            seconds={"train": time.monotonic() - started},
            optim=learned.optim,
            tokens_trained=learned.tokens,
        )
        await self.session.finish(finished, evaluated, commit=self.commits)

    async def evaluated(self) -> Evaluated | None:
        """The mean negative log-likelihood of the held-out answers, per token."""
        job, version = self.job, self.session.done.step
        if not job.evaluates(version) or self.session.done.evaluated >= version:
            return None
        job.progress.phase = "evaluating"
        batch = self._batch(job.data.holdout)
        logprobs = await self.session.forward(self._segments(batch))
        tokens = sum(sample.n_trainable for sample in batch.samples)
        nll = -sum(float(values.sum(dtype="float64")) for values in logprobs) / tokens
        record = {"nll": nll, "tokens": tokens, "rows": len(batch.samples)}
        job.progress.evaluated(version, record)
        return Evaluated(version, record, -nll)

    @property
    def _algorithm(self) -> Supervised:
        algorithm = self.job.config.algorithm
        assert isinstance(algorithm, Supervised)
        return algorithm

    def _batch(self, rows: Sequence[Problem]) -> StepBatch:
        return self._algorithm.batch([self.job.chat.row_ids(row) for row in rows])

    def _segments(self, batch: StepBatch) -> tuple[Segment, ...]:
        return batch.segments(self.job.name, self._algorithm, 1.0, self.services.micro_batch_tokens)
