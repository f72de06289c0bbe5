"""The seams: what `runtime/` asks of engines, trainers and weight sync. Each has a fake in `tests/support/`.

An implementation is complete when it fits without a branch in `runtime/`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from motet.config import AdapterConfig
from motet.core.batch import Batch, Optimizer, OptimStats, Trained
from motet.core.types import AdapterRef, Chunk, FloatArray, GenerateRequest, IntArray, TopTokens


class RolloutEngine(Protocol):
    """Samples tokens from many adapters and versions at once."""

    @property
    def capacity(self) -> int:
        """The number of open completions beyond which more bring no speed."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Complete a prompt once per seed (the prompt is prefilled once).

        Chunks of different completions interleave; each completion ends with a chunk that has a finish reason.

        Raises:
            EngineError: the request can never be served (too long, unknown adapter); says which and why.
        """

    async def score(self, token_ids: IntArray, adapter: AdapterRef | None) -> FloatArray:
        """Logprobs [T] of each token given those before it, at temperature 1; the first is 0."""

    async def top_logprobs(self, token_ids: IntArray, adapter: AdapterRef | None, k: int) -> TopTokens:
        """The k likeliest tokens [T, k] at each position, best first, and their logprobs at temperature 1.

        The first position has zeros.

        Raises:
            EngineError: this engine does not report them.
        """

    async def load_adapter(self, ref: AdapterRef, source: Path) -> None:
        """Make a version servable from a PEFT directory."""

    async def unload_adapter(self, ref: AdapterRef) -> None:
        """Unload a version that nothing uses any more."""

    async def abort(self, name: str) -> None:
        """End one request, or every request of a job; open completions finish with `abort` and keep their tokens.

        For the name of an episode, end nothing, and free what was kept for its next turn.
        """


class Trainer(Protocol):
    """Gradients: many adapters over one frozen base. Calls block; the owner of the device decides when they run."""

    def add_adapter(self, name: str, shape: AdapterConfig, seed: int, *, head: bool = False) -> None:
        """Take a slot and fill it with a fresh adapter (B = 0), zero moments, step count 0.

        With a `head`, the adapter returns values instead of logprobs, at first 0. The head is trained, saved and loaded with
        the adapter, in a separate file.

        Raises:
            AdapterError: the name is taken, no slot is free, or a target module does not exist.
        """

    def remove_adapter(self, name: str) -> None:
        """Give the slot back."""

    def forward_backward(self, batch: Batch) -> tuple[Trained, ...]:
        """Add the gradient of each segment to its adapter; return sums and logprobs of each."""

    def forward(self, batch: Batch, *, base: bool = False) -> tuple[tuple[FloatArray, ...], ...]:
        """Logprobs [T] per sample per segment, without a gradient; `base=True` leaves the adapters out (the KL reference)."""

    def optim_step(self, name: str, optimizer: Optimizer) -> OptimStats:
        """Clip, step and clear the gradient of one adapter; the next version is ready to publish."""

    def save_adapter(self, name: str, directory: Path, *, optimizer: bool, gradient: bool = True) -> None:
        """Write PEFT files and, if asked, the optimizer's state; may run outside of the device's turns, while others train.

        The optimizer's state includes a gradient that waits for its step, unless `gradient` is False.
        """

    def load_adapter(self, name: str, directory: Path, *, optimizer: bool) -> None:
        """Read what `save_adapter` wrote, or any plain PEFT LoRA directory (`optimizer=False`)."""


Result = TypeVar("Result")
Pieces = Generator[int, None, Result]
"""A pass that pauses when it yields the number of targets done since the last pause. Others may use the base meanwhile."""


@runtime_checkable
class Pausing(Protocol):
    """A trainer whose passes can pause. At most one is paused at a time, and the thread that started it closes it."""

    def train_in_pieces(self, batch: Batch) -> Pieces[tuple[Trained, ...]]:
        """As `forward_backward`."""

    def score_in_pieces(self, batch: Batch, *, base: bool = False) -> Pieces[tuple[tuple[FloatArray, ...], ...]]:
        """As `forward`."""

    def wait(self) -> None:
        """Wait until the device has done all that was begun."""


@runtime_checkable
class SteppingTogether(Protocol):
    """A trainer that may take the steps of several adapters at once."""

    @property
    def steps_at_once(self) -> int:
        """How many it takes at most; 1 takes each alone."""

    def optim_steps(self, due: Sequence[tuple[str, Optimizer]]) -> list[OptimStats]:
        """As `optim_step` of each adapter, with optimizers of one class. If this raises, no adapter has changed."""


@runtime_checkable
class Parking(Protocol):
    """A trainer that may keep adapters in host memory or on disk."""

    @property
    def parks(self) -> bool:
        """Whether it keeps any there."""

    def bring_in(self, names: Sequence[str], beside: Sequence[str] = ()) -> None:
        """Load adapters to the device before they are trained; removed adapters are skipped. May run while the device works.

        An adapter is not loaded if there is no room for it besides those that are about to be used.
        """


class WeightSync(Protocol):
    """Gives trained weights to the engine."""

    async def publish(self, name: str, ref: AdapterRef) -> None:
        """Make the trainer's current weights of adapter `name` available for sampling under this reference."""
