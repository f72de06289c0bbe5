"""Adapters: shape, start, and the scale of the update. A job names a kind in `adapter.type`; without it, that is plain LoRA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from motet.config.team import MOST_RANK
from motet.core.settings import Chosen

SHAPE = ("rank", "alpha", "target_modules", "type")
"""The fields that adapters which start from each other share; plain LoRA has no `type`."""


class AdapterConfig(Chosen):
    """Shape and start of a LoRA adapter."""

    PEFT: ClassVar[Mapping[str, bool]] = {"use_rslora": False}
    """What PEFT writes of adapters with this scale."""

    rank: int = Field(32, ge=1, le=MOST_RANK)
    """Rank of the update B·A. Lower it for smaller files and more adapters."""
    alpha: float = Field(32.0, gt=0, le=1e6)
    """The update is scaled by alpha / rank. For settings from a paper, or of an adapter that others go on to train."""
    target_modules: str | Annotated[list[str], Field(min_length=1, fail_fast=True)] = "all-linear"
    """`all-linear`, or names of linear modules as PEFT matches them (`q_proj`), never the head or the embeddings. Add
    `experts` to adapt routed experts too ([Bases](bases.md#adapters-on-experts))."""
    init: str | None = None
    """A PEFT LoRA directory to start from, or an earlier job in the file: `name` (its best version), `name@latest` or
    `name@12`. By default A is random and B is zero."""

    @classmethod
    def kinds(cls) -> Mapping[str, type[AdapterConfig]]:
        """See `ADAPTERS`."""
        return ADAPTERS

    @staticmethod
    def scale_of(rank: int, alpha: float) -> float:
        """The factor on B·A."""
        return alpha / rank

    @property
    def scale(self) -> float:
        """The factor on B·A of this adapter."""
        return self.scale_of(self.rank, self.alpha)


ADAPTERS: Mapping[str, type[AdapterConfig]] = {
    "lora": AdapterConfig,
}
"""The values of `adapter.type`: each has a scale of its own."""


def adapter_type(saved: Mapping[str, Any]) -> str:
    """The type of an adapter in PEFT's words; that of plain LoRA for what Motet does not train."""
    told = ((name, kind.PEFT.items()) for name, kind in ADAPTERS.items())
    return next((name for name, words in told if all(bool(saved.get(word)) is value for word, value in words)), "lora")
