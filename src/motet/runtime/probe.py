"""The probe at each publish: the adapter that answers is the adapter that was trained.

A fixed probe text is scored three ways at temperature 1: by the engine under the new version, by the trainer, and by the engine
without an adapter. The first two must agree; and where the trainer's adapter does something, the engine's must do it too.
"""

from __future__ import annotations

import numpy as np

from motet.errors import ProbeError
from motet.protocols import RolloutEngine, Trainer
from motet.types import AdapterRef, Batch, FloatArray, IntArray, LossSpec, Sample, Segment

PROBE_TOKENS = 32


class Probe:
    """Probes one job's adapter; the base's answer is computed once."""

    def __init__(self, job: str, token_ids: IntArray, tolerance: float) -> None:
        self._job = job
        self._token_ids = token_ids[:PROBE_TOKENS]
        self._tolerance = tolerance
        self._base: FloatArray | None = None

    def trained(self, trainer: Trainer) -> FloatArray:
        """The trainer's logprobs [T] of the probe; runs on the device."""
        n_tokens = len(self._token_ids)
        mask = np.arange(n_tokens) > 0
        nothing = np.zeros(n_tokens, np.float32)
        sample = Sample(self._token_ids, mask, nothing, nothing, np.zeros(n_tokens, np.int32))
        batch = Batch((Segment(self._job, (sample,), LossSpec(), 1.0),))
        ((logprobs,),) = trainer.forward(batch)
        return logprobs

    async def check(self, engine: RolloutEngine, ref: AdapterRef, trained: FloatArray) -> float:
        """Compare; returns the largest difference between engine and trainer.

        Raises:
            ProbeError: the engine does not answer with the trained adapter.
        """
        if len(self._token_ids) < 2:
            return 0.0
        if self._base is None:
            self._base = await engine.score(self._token_ids, None)
        if not np.isfinite(trained).all():
            raise ProbeError(f"adapter {self._job!r} gives logprobs that are not finite; lower optimizer.lr")
        answered = await engine.score(self._token_ids, ref)
        gap = float(np.abs(answered - trained).max())
        moved = float(np.abs(trained - self._base).max())
        if np.array_equal(answered, self._base) and moved > max(self._tolerance, 0.0):
            raise ProbeError(
                f"the engine answers version {ref.version} of {self._job!r} with the base model: the adapter was not applied "
                f"(the trained adapter differs from the base by {moved:.3g})"
            )
        if not gap <= self._tolerance:
            raise ProbeError(
                f"the engine's version {ref.version} of {self._job!r} is not what was trained: logprobs of the probe differ by "
                f"{gap:.3g}, allowed {self._tolerance:.3g}"
            )
        return gap
