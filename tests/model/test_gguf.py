"""A base from a .gguf file: a tiny one is written here with the `gguf` package, and loads like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from motet.core.errors import BaseModelError
from motet.model.load import load_base
from tests.support.gguf_files import LAYERS, write_tiny


def test_a_gguf_file_loads_and_passes_the_proof(tmp_path: Path, small_base_dir: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny(path, small_base_dir)
    base = load_base(str(path), dtype="float32")
    assert base.info.exact, base.info.notes
    assert base.dtype is torch.float32
    assert len(base.linears) == 7 * LAYERS
    assert (
        base.info.tokenizer.decode(base.info.tokenizer.encode("Sort 12 words.", add_special_tokens=False))
        == "Sort 12 words."
    )
    assert float(base.linears[next(iter(base.linears))].weight.abs().mean()) > 0.05


def test_a_gguf_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match="there is no file"):
        load_base(str(tmp_path / "none.gguf"))
