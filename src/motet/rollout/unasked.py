"""An engine that samples nothing, for steps whose rollouts are recorded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from motet.core.errors import EngineError
from motet.core.types import AdapterRef, Chunk, FloatArray, GenerateRequest, IntArray, TopTokens

_WHY = "recorded rollouts are trained: nothing is sampled"


class UnaskedEngine:
    """A `RolloutEngine` and a `WeightSync` that take every version and answer nothing."""

    capacity = 1

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Refuse."""
        raise EngineError(_WHY)

    async def score(self, token_ids: IntArray, adapter: AdapterRef | None) -> FloatArray:
        """Refuse."""
        raise EngineError(_WHY)

    async def top_logprobs(self, token_ids: IntArray, adapter: AdapterRef | None, k: int) -> TopTokens:
        """Refuse."""
        raise EngineError(_WHY)

    async def load_adapter(self, ref: AdapterRef, source: Path) -> None:
        """Take a version."""

    async def unload_adapter(self, ref: AdapterRef) -> None:
        """Let it go."""

    async def abort(self, name: str) -> None:
        """Nothing runs."""

    async def publish(self, name: str, ref: AdapterRef) -> None:
        """Nobody asks for it."""
