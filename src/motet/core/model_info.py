"""Facts about a base, in frozen records without torch, for code that does not compute with it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from motet.core.errors import AdapterError
from motet.core.suggestions import close_matches
from motet.core.token_ids import TokenIds

ALL_LINEAR = "all-linear"
EXPERTS = "experts"
"""The target that selects all projections of all experts; it is also a part of their paths."""

TRITON = "motet triton"
"""First words of `ModelInfo.processor` where Motet's kernels for GPUs compute the base."""


def card_of(processor: str) -> str:
    """The card of a `ModelInfo.processor`; empty where no kernels of Motet's own compute the base on one."""
    return processor.removeprefix(f"{TRITON}, ") if processor.startswith(TRITON) else ""


def portability_note(was: str, is_: str) -> str:
    """What a job keeps and what it loses that moves to another `processor`; empty where none of both is a card's."""
    if not (card_of(was) or card_of(is_)):
        return ""
    return (
        "; equal bytes are not promised across them, but on each no job changes another's bytes, and the logprobs of sampling "
        "are those of training"
    )


class Tokenizer(Protocol):
    """The methods of a `transformers` tokenizer that code outside `chat.template` uses."""

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
    """As the person wrote it: `small`, a hub id, a path."""
    tokenizer: Tokenizer
    dtype: str
    """`float32` or `bfloat16`."""
    device: str
    """`cpu` or `cuda`."""
    processor: str
    """The CPU's instructions or the GPU's name, or Motet's own kernels. The last bits of results depend on it."""
    n_parameters: int
    """Number of weights, all frozen."""
    vocab_size: int
    """Width of the logits."""
    max_positions: int
    """The longest sequence that is computed correctly."""
    hidden_size: int
    model_type: str
    """The architecture's name in transformers."""
    kv_bytes_per_token: int
    """Bytes of keys and values of one token in all layers, as measured by the proof."""
    state_bytes: int
    """Bytes of the states of layers without attention for one sequence of any length; 0 if all layers attend."""
    eos_token_ids: tuple[int, ...]
    """Of the generation configuration."""
    linears: tuple[str, ...]
    """Paths of the layers that an adapter may change, in the model's order."""
    experts: tuple[str, ...] = ()
    """Paths of the parameters of experts that an adapter may change if its targets name `experts`."""
    experts_idle: str = ""
    """Why experts take no adapters; empty if they do."""
    without_token: tuple[int, ...] = ()
    """Ids below `vocab_size` that the tokenizer has no token for: they are never sampled and left out of the softmax."""
    notes: tuple[str, ...] = ()
    """Notes for a person, such as excluded experts or missing exactness."""
    inexact: str = ""
    """How results of a row were found to depend on other rows; empty if no bit depends on them."""

    @functools.cached_property
    def vocabulary(self) -> TokenIds:
        """The token ids of the base."""
        return TokenIds(self.vocab_size, frozenset(self.without_token))

    @property
    def exact(self) -> bool:
        """Whether no bit of a row's results was found to depend on other rows."""
        return not self.inexact

    @property
    def element_bytes(self) -> int:
        """Bytes of one weight."""
        return {"float32": 4, "bfloat16": 2}[self.dtype]

    def adapted(self, target_modules: str | Sequence[str]) -> tuple[str, ...]:
        """Paths of the layers that these targets select, followed by those of experts; `all-linear` selects all but experts.

        Raises:
            AdapterError: a target matches no layer; the message lists the layers.
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
    """Whether a target selects experts. Only targets with `experts` do: `down_proj` selects layers."""
    module = path.rpartition(".")[0]
    return EXPERTS in target.split(".") and any(f".{name}".endswith(f".{target}") for name in (path, module))


def with_experts(target_modules: str | Sequence[str] | None, target_parameters: Sequence[object]) -> list[str]:
    """PEFT's targets of both kinds as one list; PEFT also finds a parameter by its name alone."""
    modules = [target_modules] if isinstance(target_modules, str) else target_modules or []
    named = map(str, target_parameters)
    return [*modules, *(name if EXPERTS in name.split(".") else f"{EXPERTS}.{name}" for name in named)]
