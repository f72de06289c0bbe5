"""The seams: what `runtime/` asks of engines, trainers and weight sync. Each has a fake in the package.

An implementation is complete when it fits without a branch in `runtime/`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from motet.batch import AdamW, Batch, OptimStats, Trained
from motet.config import AdapterConfig
from motet.types import AdapterRef, Chunk, FloatArray, GenerateRequest, IntArray, TopTokens


class RolloutEngine(Protocol):
    """Tokens out: serves many adapters and versions at once."""

    @property
    def capacity(self) -> int:
        """How many completions are worth having in flight at a time."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Complete a prompt once per seed (the prompt is prefilled once).

        Chunks of different completions interleave; each completion ends with a chunk that has a finish reason.

        Raises:
            EngineError: the request can never be served (too long, unknown adapter); says which and why.
        """
        ...

    async def score(self, token_ids: IntArray, adapter: AdapterRef | None) -> FloatArray:
        """Logprobs [T] of each token given those before it, at temperature 1; the first is 0."""
        ...

    async def top_logprobs(self, token_ids: IntArray, adapter: AdapterRef | None, k: int) -> TopTokens:
        """The k likeliest tokens [T, k] at each place given those before it, best first, and their logprobs at temperature 1.

        The first place has zeros.

        Raises:
            EngineError: this engine does not tell.
        """
        ...

    async def load_adapter(self, ref: AdapterRef, source: Path) -> None:
        """Make a version servable from a PEFT directory."""
        ...

    async def unload_adapter(self, ref: AdapterRef) -> None:
        """Let go of a version that nothing references any more."""
        ...

    async def abort(self, name: str) -> None:
        """End one request, or every request of a job; open completions finish with `abort` and keep their tokens.

        By the name of an episode nothing is ended, and what was kept for its next turn is let go.
        """
        ...


class Trainer(Protocol):
    """Gradients: many adapters over one frozen base. Calls block; the owner of the device decides when they run."""

    def add_adapter(self, name: str, shape: AdapterConfig, seed: int, *, head: bool = False) -> None:
        """Take a slot and fill it with a fresh adapter (B = 0), zero moments, step count 0.

        One with a `head` gives values in the place of logprobs, at first 0. Its head is trained, saved and loaded with it, in a
        file of its own.
        """
        ...

    def remove_adapter(self, name: str) -> None:
        """Give the slot back."""
        ...

    def forward_backward(self, batch: Batch) -> tuple[Trained, ...]:
        """Add the gradient of each segment to its adapter; sums and logprobs of each."""
        ...

    def forward(self, batch: Batch, *, base: bool = False) -> tuple[tuple[FloatArray, ...], ...]:
        """Logprobs [T] per sample per segment, no gradient; `base=True` leaves the adapters out (the KL reference)."""
        ...

    def optim_step(self, name: str, adamw: AdamW) -> OptimStats:
        """Clip, step and clear the gradient of one adapter; the next version is ready to publish."""
        ...

    def save_adapter(self, name: str, directory: Path, *, optimizer: bool) -> None:
        """Write PEFT files, and the optimizer's state where asked; may be called off the device's turn, while others train."""
        ...

    def load_adapter(self, name: str, directory: Path, *, optimizer: bool) -> None:
        """Read what `save_adapter` wrote, or any plain PEFT LoRA directory (`optimizer=False`)."""
        ...


Result = TypeVar("Result")
Pieces = Generator[int, None, Result]
"""A pass that pauses where it yields, which is the number of targets done since. Others may use the base meanwhile."""


@runtime_checkable
class Pausing(Protocol):
    """A trainer whose passes can pause. At most one is paused at a time, and it is closed where it began."""

    def train_in_pieces(self, batch: Batch) -> Pieces[tuple[Trained, ...]]:
        """As `forward_backward`."""
        ...

    def score_in_pieces(self, batch: Batch, *, base: bool = False) -> Pieces[tuple[tuple[FloatArray, ...], ...]]:
        """As `forward`."""
        ...


@runtime_checkable
class Parking(Protocol):
    """A trainer that may have adapters elsewhere than on the device."""

    @property
    def parks(self) -> bool:
        """Whether it has."""
        ...

    def bring_in(self, names: Sequence[str], beside: Sequence[str] = ()) -> None:
        """Have adapters on the device before they are trained; names that are gone are left out. May run beside the device.

        None comes where there is no room for it beside those that are about to be used.
        """
        ...


class WeightSync(Protocol):
    """Makes trained weights answer."""

    async def publish(self, name: str, ref: AdapterRef) -> None:
        """Make the trainer's current weights of adapter `name` servable under this reference."""
        ...
