"""Learning from rows, step by step: rows → reference logprobs if needed → learn → record → commit → publish."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from motet.algorithms.algorithm import StepBatch
from motet.algorithms.rows import RowAlgorithm, RowLogprobs
from motet.core.batch import Segment
from motet.core.types import Problem
from motet.data.rows import row_of
from motet.runtime.checkpoint import Committed
from motet.runtime.driver import Driver
from motet.runtime.held_out import ranked
from motet.runtime.job import Job, Services
from motet.runtime.learning import Share, train
from motet.runtime.session import Evaluated, FinishedStep


class RowLoop(Driver):
    """Trains an adapter on rows of its data; it samples nothing."""

    def __init__(self, job: Job, services: Services, committed: Committed | None) -> None:
        super().__init__(job, services, committed)
        algorithm = job.config.algorithm
        assert isinstance(algorithm, RowAlgorithm)
        self._algorithm = algorithm

    async def step(self, step: int) -> None:
        """Learn and record a step's rows; the driver publishes."""
        job, algorithm = self.job, self._algorithm
        started = time.monotonic()
        evaluated = await self.evaluated()
        job.progress.phase = "training"
        n = algorithm.rows_per_step
        batch = await self._batch(lambda: job.data.window(step * n, n, job.seed, n))
        figures: Mapping[str, float] | None = None
        if algorithm.compares:
            scored = await self._scored(await self._segments(batch, None))
            batch, figures = algorithm.weighed(batch, scored), algorithm.figures(batch, scored)
        segments = await self._segments(batch, algorithm)
        (learned,) = await train(self.session, [Share(batch, segments)], step)
        seconds, n_samples = {"train": time.monotonic() - started}, len(batch.samples)
        finished = FinishedStep.unsampled(
            step, learned.stats, n_samples, learned.optim, learned.tokens, figures, seconds=seconds
        )
        await self.session.finish(finished, evaluated, commit=self.commits)

    async def evaluated(self) -> Evaluated | None:
        """Evaluate the current version on the held-out rows."""
        job, version = self.job, self.session.done.step
        if not self.evaluates(version) or self.session.done.evaluated >= version:
            return None
        job.progress.phase = "evaluating"
        batch = await self._batch(lambda: job.data.holdout)
        done = job.finished.rows.get(version, [])
        job.finished.rows = {version: done}
        segments = await self._segments(batch, None)
        for segment in segments[len(done) :]:  # one after the other: it may give way between them, and goes on there
            done.append(await self._scored((segment,)))
        policy = [values for scored in done for values in scored.policy]
        reference = [values for scored in done for values in scored.reference]
        figures = self._algorithm.figures(batch, RowLogprobs(policy, reference))
        record = {**figures, "rows": len(job.data.holdout)}
        job.progress.evaluated(version, record)
        return Evaluated(version, record, *ranked(record, self.session.done.best_by))

    async def _batch(self, rows: Callable[[], Sequence[Problem]]) -> StepBatch:
        job, algorithm = self.job, self._algorithm

        def read() -> StepBatch:
            found = [row_of(row, algorithm.kind, job.chat, job.config.data.source) for row in rows()]
            return algorithm.batch(found, self.services.positions or None)

        return await self.services.rows.run(job.tenant, read)

    async def _segments(self, batch: StepBatch, algorithm: RowAlgorithm | None) -> tuple[Segment, ...]:
        name, tokens = self.job.name, self.services.micro_batch_tokens
        return await self.services.rows.run(self.job.tenant, lambda: batch.segments(name, algorithm, 1.0, tokens))

    async def _scored(self, segments: tuple[Segment, ...]) -> RowLogprobs:
        policy = await self.session.work.forward(segments)
        return RowLogprobs(policy, await self.reference.logprobs(segments) if self._algorithm.compares else ())
