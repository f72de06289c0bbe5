"""A job's critic during training: a second adapter with a value head, in the job's packed batches and commits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from motet.algorithms.algorithm import StepBatch
from motet.algorithms.critic import CriticConfig, ValueLoss
from motet.config import AdapterConfig
from motet.core import seeds
from motet.core.batch import OptimStats, Segment
from motet.core.types import FloatArray
from motet.runtime.learning_rate import adamw
from motet.runtime.session import Session, Slot


class Critic:
    """Computes values of a job's samples, and trains the adapter that predicts them."""

    def __init__(self, session: Session, config: CriticConfig) -> None:
        self._session, self.config = session, config
        self._name = f"{session.job.name}#critic"
        self._slot = Slot(session, self._name)

    async def open(self) -> None:
        """Take a slot and load the committed state, before the session opens, which then commits the critic too."""
        session, config = self._session, self.config
        shape = AdapterConfig(rank=config.rank, target_modules=session.job.config.adapter.target_modules)
        seed = seeds.key(session.job.seed, "critic") % (1 << 48)
        await self._slot.take(shape, seed, head=True)
        if (committed := session.committed) is not None:
            await session.on_device(lambda trainer: trainer.load_adapter(self._name, _place(committed), optimizer=True))
        session.also_saved.append(self._save)

    async def close(self) -> None:
        """Release the slot."""
        await self._slot.give_back()

    async def values(self, batch: StepBatch) -> Sequence[FloatArray]:
        """Predicted values of sampled tokens, [T] for each sample."""
        return await self._session.forward(self.segments(batch))

    def segments(self, batch: StepBatch) -> tuple[Segment, ...]:
        """Micro-batches of samples for the critic."""
        return batch.segments(self._name, ValueLoss(self.config.clip), 1.0, self._session.services.micro_batch_tokens)

    async def optim_step(self, step: int) -> OptimStats:
        """Clip the gradient, update, and clear the gradient."""
        job = self._session.job
        rate = job.base_rate if self.config.lr == "auto" else self.config.lr
        settings = adamw(job.config.optimizer, rate, step, job.config.steps)
        return await self._session.on_device(lambda trainer: trainer.optim_step(self._name, settings))

    def _save(self, directory: Path) -> None:
        """Write adapter, head and moments into a commit."""
        place = _place(directory)
        place.mkdir()
        self._session.services.trainer.save_adapter(self._name, place, optimizer=True)


def _place(directory: Path) -> Path:
    """The critic's directory in a commit; versions contain only the policy's files."""
    return directory / "critic"
