"""Copies of the small base whose head has rows that their tokenizer has no token for, as Qwen's and Phi's have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from motet.model.find import SMALL_BASE

ROWS, HOLES = 37, (500, 777)
ABSENT = frozenset((*HOLES, *range(1024, 1024 + ROWS)))
"""Ids without a token: some between the others, and more behind them than tests sample of a product's tile."""
_LOUD = 4.0
"""Of rows that were never trained; those of the base have 0.1, so an id without a token is nearly always the likeliest."""


def padded(place: Path, *, rows: int = ROWS, holes: tuple[int, ...] = HOLES, tied: bool = True) -> Path:
    """Write such a base. Its rows without tokens are loud: what does not leave them out samples little else."""
    shutil.copytree(SMALL_BASE, place)
    tensors = load_file(place / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    loud = torch.randn(rows + len(holes), table.shape[1], generator=torch.Generator().manual_seed(0)) * _LOUD
    table = torch.cat([table, loud[:rows].to(table.dtype)])
    table[list(holes)] = loud[rows:].to(table.dtype)
    tensors["model.embed_tokens.weight"] = table
    config = json.loads((place / "config.json").read_text()) | {"vocab_size": len(table), "tie_word_embeddings": tied}
    if not tied:
        tensors["lm_head.weight"] = table.clone()
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    (place / "config.json").write_text(json.dumps(config))
    _forget(place / "tokenizer.json", holes)
    return place


def _forget(file: Path, ids: tuple[int, ...]) -> None:
    """Take tokens out of a tokenizer, with the merges that make them or read them."""
    tokenizer = json.loads(file.read_text())
    model = tokenizer["model"]
    gone = {piece for piece, token in model["vocab"].items() if token in ids}
    model["vocab"] = {piece: token for piece, token in model["vocab"].items() if piece not in gone}
    pairs = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
    model["merges"] = [pair for pair in pairs if not gone & {*pair, "".join(pair)}]
    file.write_text(json.dumps(tokenizer))
