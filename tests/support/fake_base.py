"""A base without torch: a table of next-character probabilities, and adapters that shift it.

It is a real, small policy with exact logprobs and gradients, an adapter that starts as the base (B = 0), and files on
disk. `fake_engine` samples from it and `fake_trainer` trains it, so that tests of the surrounding code take
milliseconds.

Legend: T tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from motet.config import AdapterConfig
from motet.core import seeds
from motet.core.checksums import sync
from motet.core.errors import AdapterError
from motet.core.types import ADAPTER_CONFIG, ADAPTER_WEIGHTS, FloatArray, IntArray

Vector = NDArray[np.float64]

END = 0
"""The end-of-turn token."""
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
"""Token t > 0 is the character CHARACTERS[t − 1]."""
VOCABULARY = len(CHARACTERS) + 1


class FakeTokenizer:
    """One token per character, and one end-of-turn token.

    Implements the part of a `transformers` tokenizer that `chat.template` uses.
    """

    chat_template = None
    eos_token_id = END
    all_special_ids = (END,)
    all_special_tokens = ()
    added_tokens_decoder: Mapping[int, str] = {}

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Characters outside printable ASCII become a question mark."""
        return [CHARACTERS.find(letter if letter in CHARACTERS else "?") + 1 for letter in text]

    def decode(self, token_ids: Iterable[int], **_: Any) -> str:
        """The end of a turn has no text."""
        return "".join(CHARACTERS[token - 1] for token in token_ids if token != END)


def _pair_logits() -> Vector:
    """Base logits of each pair of characters, [V, V]; the end token is likely enough to keep answers short."""
    places = np.arange(VOCABULARY * VOCABULARY, dtype=np.uint64)
    draws = seeds.uniforms(np.full(len(places), seeds.key(0, "fake base"), np.uint64), places)
    logits_VV = (4.0 * draws - 2.0).reshape(VOCABULARY, VOCABULARY)
    logits_VV[:, END] = 3.0
    return logits_VV


_LOGITS = _pair_logits()


@dataclass(frozen=True)
class FakeAdapter:
    """Shifts the base: adds scale · A ∘ B to the logits of the next character in any context."""

    rank: int
    alpha: float
    a: Vector  # [V] fixed, a function of the job's seed
    b: Vector  # [V] trained, zero at first

    @property
    def shift(self) -> Vector:
        """Added to the logits, [V]."""
        return self.scale * self.a * self.b

    @property
    def scale(self) -> float:
        """The factor on A ∘ B."""
        return AdapterConfig.scale_of(self.rank, self.alpha)

    @classmethod
    def fresh(cls, rank: int, alpha: float, seed: int) -> FakeAdapter:
        """An adapter with B = 0."""
        draws = seeds.uniforms(
            np.full(VOCABULARY, seeds.key(seed, "init"), np.uint64), np.arange(VOCABULARY, dtype=np.uint64)
        )
        return cls(rank, alpha, 0.5 + draws, np.zeros(VOCABULARY))


class FakePolicy:
    """The base with one version of an adapter (None is the base). Rows are cached and computed one at a time."""

    def __init__(self, adapter: FakeAdapter | None) -> None:
        self.shift = np.zeros(VOCABULARY) if adapter is None else adapter.shift
        """Added to the base's logits, [V]."""
        self._rows: dict[tuple[int, float], Vector] = {}

    def row(self, previous: int, temperature: float) -> Vector:
        """Logprobs of the next token, [V]; at temperature 0, of the unscaled logits."""
        logprobs_V = self._rows.get((previous, temperature))
        if logprobs_V is None:
            with np.errstate(all="ignore"):  # an adapter that overflowed gives NaN, which callers check
                scaled = (_LOGITS[previous] + self.shift) / (temperature or 1.0)
                scaled = scaled - scaled.max()
                logprobs_V = self._rows[previous, temperature] = scaled - np.log(np.exp(scaled).sum())
        return logprobs_V

    def logprobs(self, token_ids: IntArray | Sequence[int], temperature: float = 1.0) -> FloatArray:
        """Logprobs [T] of each token given the one before it; the first is 0."""
        logprobs_T = np.zeros(len(token_ids), np.float32)
        for place in range(1, len(token_ids)):
            logprobs_T[place] = self.row(int(token_ids[place - 1]), temperature)[token_ids[place]]
        return logprobs_T


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write and sync files in an existing directory."""
    for name, data in files.items():
        (directory / name).write_bytes(data)
        sync(directory / name)


def write_adapter(directory: Path, adapter: FakeAdapter) -> None:
    """Write an adapter under the file names of PEFT."""
    config = {"peft_type": "LORA", "r": adapter.rank, "lora_alpha": adapter.alpha, "base_model_name_or_path": "fake"}
    tensors = {"fake.lora_A.weight": adapter.a, "fake.lora_B.weight": adapter.b}
    write_files(
        directory, {ADAPTER_CONFIG: json.dumps(config, sort_keys=True).encode(), ADAPTER_WEIGHTS: save(tensors)}
    )


def read_tensors(path: Path) -> dict[str, Vector]:
    """Read a safetensors file.

    Raises:
        AdapterError: it is missing or damaged.
    """
    try:
        return load(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error


def read_adapter(directory: Path) -> FakeAdapter:
    """Read an adapter written by `write_adapter`.

    Raises:
        AdapterError: it is missing, damaged, or not an adapter of this base.
    """
    tensors = read_tensors(directory / ADAPTER_WEIGHTS)
    try:
        config = json.loads((directory / ADAPTER_CONFIG).read_text("utf-8"))
        return FakeAdapter(
            config["r"], config["lora_alpha"], tensors["fake.lora_A.weight"], tensors["fake.lora_B.weight"]
        )
    except (OSError, ValueError, KeyError) as error:
        raise AdapterError(f"{directory} is not an adapter of the fake base: {error}") from error
