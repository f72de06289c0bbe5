"""Bases of random weights, in the shapes of common models, made where they are needed."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SMALL_BASE = ROOT / "src" / "motet" / "assets" / "small-base"
_FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"
)  # fmt: skip
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny": dict(zip(_FIELDS, (128, 192, 2, 2, 1, 1280), strict=True)),
    "0.5b": dict(zip(_FIELDS, (896, 4864, 24, 14, 2, 151936), strict=True)),
    "8b": dict(zip(_FIELDS, (4096, 14336, 32, 32, 8, 128256), strict=True)),
}
"""Llama configurations by name; the tokenizer is the small base's, with names for the other ids of the vocabulary."""


def make_base(name: str, directory: Path, device: str = "cpu") -> Path:
    """A model directory with random bfloat16 weights; it is kept, and appears whole or not at all.

    Raises:
        ValueError: there is no such shape.
    """
    if name not in SHAPES:
        raise ValueError(f"there is no shape {name!r}; there are: {', '.join(SHAPES)}")
    place = directory / name
    if place.is_dir():
        return place
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = transformers.LlamaConfig(
        max_position_embeddings=2048,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=name != "8b",
        **SHAPES[name],
    )
    config.head_dim = config.hidden_size // config.num_attention_heads
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    half = directory / f"{name}.part"
    shutil.rmtree(half, ignore_errors=True)
    model.to("cpu").save_pretrained(half)
    for file in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(SMALL_BASE / file, half)
    _save_tokenizer(half / "tokenizer.json", SHAPES[name]["vocab_size"])
    half.rename(place)
    return place


def _save_tokenizer(file: Path, size: int) -> None:
    """Write the small base's tokenizer, with a token for each row of the head: only such ids are read and sampled."""
    tokenizer = json.loads((SMALL_BASE / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    known = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocabulary |= {f"id {number}": number for number in range(size) if number not in known}
    file.write_text(json.dumps(tokenizer), encoding="utf-8")


if __name__ == "__main__":
    print(make_base(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
