"""Usual bases on usual cards, by `motet fits`: `python -m bench.fits --write` puts the tables into docs/fits.md.

Nothing is measured here: the configurations are those that the bases are published with, without what decides no size.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.speed.table import markdown

from motet.commands.fits import CARDS, Card, Fit, Work, fit, speeds
from motet.model.outline import BaseOutline, outline

PAGE = Path(__file__).resolve().parents[1] / "docs" / "fits.md"
BEGIN, END = "<!-- fits -->\n", "<!-- end of fits -->"
_FIELDS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "tie_word_embeddings",
)  # fmt: skip
_MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_SHAPES: Mapping[str, tuple[Any, ...]] = {
    "Qwen2.5 0.5B": ("qwen2", 896, 4864, 24, 14, 2, 64, 151936, True),
    "Llama 3.2 1B": ("llama", 2048, 8192, 16, 32, 8, 64, 128256, True),
    "Qwen3 1.7B": ("qwen3", 2048, 6144, 28, 16, 8, 128, 151936, True),
    "SmolLM3 3B": ("smollm3", 2048, 11008, 36, 16, 4, 128, 128256, True),
    "Qwen3 4B": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True),
    "Qwen2.5 7B": ("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False),
    "Mistral 7B v0.3": ("mistral", 4096, 14336, 32, 32, 8, 128, 32768, False),
    "Llama 3.1 8B": ("llama", 4096, 14336, 32, 32, 8, 128, 128256, False),
    "Qwen3 8B": ("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False),
    "Qwen3 14B": ("qwen3", 5120, 17408, 40, 40, 8, 128, 151936, False),
    "Qwen3 32B": ("qwen3", 5120, 25600, 64, 64, 8, 128, 151936, False),
    "Qwen3 30B-A3B": ("qwen3_moe", 2048, 6144, 48, 32, 4, 128, 151936, False),
    "Llama 3.3 70B": ("llama", 8192, 28672, 80, 64, 8, 128, 128256, False),
}
BASES: Mapping[str, Mapping[str, Any]] = {
    name: {**dict(zip(_FIELDS, shape, strict=True)), **(_MOE if shape[0] == "qwen3_moe" else {})}
    for name, shape in _SHAPES.items()
}
"""The fields of each config.json that decide sizes."""
_WHAT = ("decode, limit", "decode, today", "gradients, limit")
_SPEEDS = {"A100 80 GB": ("decode, limit", "gradients, limit"), "H100 80 GB": _WHAT, "H200 141 GB": _WHAT}


def read(config: Mapping[str, Any]) -> BaseOutline:
    """The sizes of a base, as from its config.json."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps({"max_position_embeddings": 40960, **config}))
        return outline(place)


def written() -> str:
    """Both tables."""
    work, bases = Work(), {name: read(config) for name, config in BASES.items()}
    fits = {name: {card.name: fit(base, card, work) for card in CARDS} for name, base in bases.items()}
    room = [(name, *(_room(fits[name][card.name]) for card in CARDS)) for name in bases]
    fast = [card for card in CARDS if card.name in _SPEEDS]
    speed = [(name, *(cell for card in fast for cell in _speed(fits[name][card.name], card))) for name in bases]
    heads = [f"{card.name}: {what}" for card in fast for what in _SPEEDS[card.name]]
    tables = (markdown(("base", *(card.name for card in CARDS)), room), markdown(("base", *heads), speed))
    return "\n".join(tables).strip()


def _room(result: Fit | None) -> str:
    if result is None:
        return "no"
    short = {"bfloat16": "bf16", "bfloat16, recompute": "bf16, recompute"}
    slots = "1,000 or more" if result.slots >= 1000 else f"{result.slots}"
    return f"{short.get(result.way, result.way)}: {slots}"


def _speed(result: Fit | None, card: Card) -> list[str]:
    known = dict(zip(_WHAT, speeds(result), strict=True)) if result and result.way.startswith("bfloat16") else {}
    return [known.get(what, "–") for what in _SPEEDS[card.name]]


def main() -> None:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put them into docs/fits.md")
    text = written()
    if not parser.parse_args().write:
        print(text)
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
