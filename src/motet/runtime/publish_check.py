"""The probe at each publish: it checks that the engine answers with the trained adapter.

Engine and trainer score a fixed text at temperature 1, with the new version and without an adapter. With the version,
the mean difference must be within the tolerance; single logprobs of unlikely tokens differ widely between
implementations in bfloat16. Where exact agreement is impossible, the probe also compares changes: from the base, and
from the version before. An engine that answers with the base, another adapter or an old version does not show the
trainer's change.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from motet.chat.template import Chat
from motet.core.batch import Batch, Sample, Segment
from motet.core.errors import ProbeError
from motet.core.types import AdapterRef, FloatArray, IntArray, Problem
from motet.protocols import RolloutEngine, Trainer

PROBE_TOKENS = 32
PROBE_TEXT = "Question: a train leaves at 9:40 and arrives at 13:05. How long does it take, and why?"
"""For jobs whose client brings the data."""
CLEAR = 4.0
"""The effect of an adapter, or of a step, is visible if it is this many times the norm of the difference between engine
and trainer on the base. By the triangle inequality, a correct engine then shows at least half of the effect, and an
engine that answers with the base at most half.
"""
_MANY = 8
"""Logprobs, all unchanged, that show an answer of the version before: bfloat16 may hide a small change of a few."""
SURE = 4.0
"""Standard errors between a shown share of a step and the full step that rule out chance."""


def probe_ids(chat: Chat, problems: Sequence[Problem] = ()) -> IntArray:
    """The first prompt of a job, or a fixed text without data, [T]."""
    return chat.prompt_ids(problems[0]) if problems else np.asarray(chat.tokenizer.encode(PROBE_TEXT), np.int32)


class Probe:
    """Probes one job's adapter; the base's answer is requested once."""

    def __init__(self, job: str, token_ids: IntArray, tolerance: float) -> None:
        self._job = job
        self._token_ids = token_ids[-PROBE_TOKENS:]
        self._tolerance = tolerance
        self._base: FloatArray | None = None
        self._trainers_base: FloatArray | None = None
        self._before: tuple[int, FloatArray, FloatArray] | None = None
        """The last version that passed, with the logprobs [T] of trainer and engine."""

    def trained(self, trainer: Trainer) -> FloatArray:
        """The trainer's logprobs [T] of the probe; call it on the device."""
        n_tokens = len(self._token_ids)
        mask = np.arange(n_tokens) > 0
        nothing = np.zeros(n_tokens, np.float32)
        sample = Sample(self._token_ids, mask, nothing, nothing, np.zeros(n_tokens, np.int32))
        batch = Batch((Segment(self._job, (sample,)),))
        if self._trainers_base is None and self._tolerance > 0:
            ((self._trainers_base,),) = trainer.forward(batch, base=True)
        ((logprobs,),) = trainer.forward(batch)
        return logprobs

    async def check(self, engine: RolloutEngine, ref: AdapterRef, trained: FloatArray) -> float:
        """Compare engine and trainer; returns the mean absolute difference of their logprobs.

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
        gap = float(np.abs(answered - trained).mean())
        if not gap <= self._tolerance:
            if np.array_equal(answered, self._base):
                fault = f"the engine answers version {ref.version} of {self._job!r} with the base model"
                fault += ": the adapter was not applied"
            else:
                fault = f"the engine's version {ref.version} of {self._job!r} is not what was trained"
            raise ProbeError(
                f"{fault}; logprobs of the probe differ by {gap:.3g} on average, allowed {self._tolerance:.3g}"
            )
        trainers_base = self._base if self._trainers_base is None else self._trainers_base
        least = CLEAR * float(np.linalg.norm(self._base - trainers_base))
        self._follows(ref, answered - self._base, trained - trainers_base, least)
        self._steps(ref, answered, trained, least)
        self._before = ref.version, trained, answered
        return gap

    def _follows(self, ref: AdapterRef, shown: FloatArray, wanted: FloatArray, least: float) -> None:
        """Check that the engine shows the change from the base, if its norm is above `least`."""
        size = float(np.linalg.norm(wanted))
        if size <= least:
            return
        share = float(np.dot(shown, wanted)) / size**2
        if share < 0.5:
            raise ProbeError(
                f"the engine answers version {ref.version} of {self._job!r} with the base model or with another adapter: of "
                f"what training changed in the logprobs of the probe (up to {np.abs(wanted).max():.3g}) it shows {share:.0%}"
            )

    def _steps(self, ref: AdapterRef, answered: FloatArray, trained: FloatArray, least: float) -> None:
        """Check that the engine shows the change of the last step.

        A least-squares fit of the engine's change by the trainer's gives the share that the engine shows; the residual
        gives its standard error. A correct engine shows 1, an engine with the version before shows 0. If the norm of the
        change is at most `least`, only an answer that has not changed at all is a fault.
        """
        if self._before is None:
            return
        version, trained_before, answered_before = self._before
        wanted, shown = trained - trained_before, answered - answered_before
        size = float(np.linalg.norm(wanted))
        unchanged = size > least / CLEAR and len(shown) >= _MANY and not shown.any()
        if size <= least and not unchanged:
            return
        share = float(np.dot(shown, wanted)) / size**2
        noise = float(np.linalg.norm(shown - share * wanted)) / np.sqrt(max(len(wanted) - 2, 1))
        if share < 0.5 and 1 - share > SURE * noise / size:
            raise ProbeError(
                f"the engine answers version {ref.version} of {self._job!r} with version {version}: of what the step changed "
                f"in the logprobs of the probe (up to {np.abs(wanted).max():.3g}) it shows {share:.0%}"
            )
