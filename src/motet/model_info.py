"""The facts about a base, for everybody who does not compute with it: frozen, and no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from motet.errors import AdapterError
from motet.near import close_matches

ALL_LINEAR = "all-linear"
EXPERTS = "experts"
"""The target that names all projections of all experts; it is also a part of their paths."""


class Tokenizer(Protocol):
    """What is asked of a `transformers` tokenizer outside `tasks.chat`."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str:
        """The text of token ids."""
        ...

    def get_vocab(self) -> Mapping[str, int]:
        """Every token and its id."""
        ...


@dataclass(frozen=True)
class ModelInfo:
    """A base as the proof at load found it."""

    name: str
    """What a person wrote: `small`, a hub id, a path."""
    tokenizer: Tokenizer
    dtype: str
    """`float32` or `bfloat16`."""
    device: str
    """`cpu` or `cuda`."""
    processor: str
    """The CPU's instructions or the GPU's name: libraries choose their products by it, and with them the last bits."""
    n_parameters: int
    """All of them frozen."""
    vocab_size: int
    """Width of the logits."""
    max_positions: int
    """Longest sequence that is computed rightly."""
    hidden_size: int
    model_type: str
    """As transformers calls the architecture."""
    kv_bytes_per_token: int
    """Keys and values of all layers, as the proof found them."""
    state_bytes: int
    """What layers without attention remember of one sequence, however long; 0 where all attend."""
    eos_token_ids: tuple[int, ...]
    """Of the generation configuration."""
    linears: tuple[str, ...]
    """Paths of the layers that an adapter may change, in the model's order."""
    experts: tuple[str, ...] = ()
    """Paths of the parameters of experts that an adapter may change, where it asks for them."""
    experts_idle: str = ""
    """Why adapters cannot be on experts; empty where they can."""
    notes: tuple[str, ...] = ()
    """What a person should know: excluded experts, exactness that does not hold."""
    inexact: str = ""
    """How rows were found to depend on their company; empty where they do not, bit for bit."""

    @property
    def exact(self) -> bool:
        """Whether rows were found independent of their company, bit for bit."""
        return not self.inexact

    @property
    def element_bytes(self) -> int:
        """Bytes of one weight."""
        return {"float32": 4, "bfloat16": 2}[self.dtype]

    def adapted(self, target_modules: str | Sequence[str]) -> tuple[str, ...]:
        """Paths of the layers that these targets name, and behind them of experts'; `all-linear` names all but experts.

        Raises:
            AdapterError: a target matches no layer; names the ones there are.
        """
        targets = [target_modules] if isinstance(target_modules, str) else list(target_modules)
        for target in targets:
            if not any(_matches(path, target) for path in self.linears) and not any(
                matches_experts(path, target) for path in self.experts
            ):
                raise AdapterError(self._unmatched(target))
        linears = (path for path in self.linears if any(_matches(path, target) for target in targets))
        experts = (path for path in self.experts if any(matches_experts(path, target) for target in targets))
        return (*linears, *experts)

    def _unmatched(self, target: str) -> str:
        named = f"target_modules names {target!r}, which matches no adaptable layer of {self.name}"
        if EXPERTS in target.split(".") and self.experts_idle:
            return f"{named}: {self.experts_idle}; leave it out"
        known = sorted({path.rpartition(".")[2] for path in self.linears})
        known += [EXPERTS] if self.experts else []
        hint = close_matches(target, known, 1)
        return f"{named}{f' (did you mean {hint[0]!r}?)' if hint else ''}; there are: {ALL_LINEAR}, {', '.join(known)}"


def _matches(path: str, target: str) -> bool:
    return target in (ALL_LINEAR, path) or path.endswith("." + target)


def matches_experts(path: str, target: str) -> bool:
    """Only a target that says `experts` is of them: `down_proj` names layers alone."""
    module = path.rpartition(".")[0]
    return EXPERTS in target.split(".") and any(one == target or one.endswith("." + target) for one in (path, module))
