"""The section `stop_when`: rules that end a job before its last step."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from motet.core.settings import Config, named


class NoGainConfig(Config):
    """When held-out results no longer improve. A plain number is `evaluations`."""

    evaluations: int = Field(ge=3, le=1000)
    """Compare the mean of this many newest evaluations with the mean of as many before them."""
    least: float = Field(0.02, gt=0, le=1e6)
    """The smallest gain that is worth training for, in the unit of the held-out figure. The job stops when even the upper
    end of the gain's one-sided 95 % interval (Student's t, from the spread of these evaluations) is below it."""


class StopConfig(Config):
    """When a job ends before its last step. The first rule that holds ends it."""

    held_out_above: float | None = None
    """Stop when the newest held-out reward is above this; the log-likelihood with `sft` and `soft_targets`, the accuracy
    with `dpo` and `kto`."""
    no_gain: Annotated[NoGainConfig, named("evaluations", int)] | None = None
    """Stop when held-out results no longer improve."""
    kl_above: float | None = Field(None, gt=0)
    """Stop when the KL to `algorithm.kl.reference` is above this, in nats per token. It is measured on steps that evaluate,
    or on every step with `algorithm.kl.coef`."""
    reward_above: float | None = None
    """Stop when the mean training reward of the newest five steps is above this."""

    @property
    def rules(self) -> list[str]:
        """Names of the rules that are set."""
        return [name for name in type(self).model_fields if getattr(self, name) is not None]

    def mistake(
        self, *, rows: bool, rewarded: bool, held_out: bool, every: int, steps: int, measures_kl: bool, taught: bool
    ) -> str | None:
        """Why a rule could never hold; None if each can.

        Args:
            rows: whether the job learns from rows.
            rewarded: whether something rewards its answers.
            held_out: whether there are held-out problems.
            every: steps between evaluations, or 0.
            steps: of the job.
            measures_kl: whether every step measures the KL.
            taught: whether that KL is to a teacher other than the base.
        """
        evaluates = held_out and every > 0
        for name in self.rules:
            if rows and name in ("kl_above", "reward_above"):
                return f"stop_when.{name}: this algorithm learns from rows and samples nothing; leave it out"
            if not (rows or rewarded or name == "kl_above"):
                return f"stop_when.{name}: nothing rewards the answers of this job; leave it out, or give it a reward"
            if name == "kl_above" and taught:
                return (
                    "stop_when.kl_above: this algorithm measures the KL to its teacher, not to the base; leave it out"
                )
            if name in ("held_out_above", "no_gain") and not evaluates:
                return f"stop_when.{name}: needs evaluations; set eval.every and data.holdout to 1 or more"
            if name == "kl_above" and not (evaluates or measures_kl):
                return "stop_when.kl_above: nothing measures the KL; set eval.every and data.holdout to 1 or more"
        if self.no_gain is not None and (steps - 1) // every + 1 < (needed := 2 * self.no_gain.evaluations):
            return (
                f"stop_when.no_gain: needs {needed} evaluations, and {steps} steps with eval.every {every} make only "
                f"{(steps - 1) // every + 1} before the last; lower eval.every or stop_when.no_gain.evaluations"
            )
        return None
