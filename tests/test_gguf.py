"""A base from a .gguf file: a tiny one is written here with the `gguf` package, and loads like any other."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from motet.errors import BaseModelError
from motet.model.load import load_base

WIDTH, LAYERS, HEADS, KV_HEADS, INNER = 64, 2, 4, 2, 96


def write_tiny(path: Path, tokenizer: Path) -> None:
    """A Llama-shaped model of random weights with the small base's tokenizer."""
    vocabulary = json.loads((tokenizer / "tokenizer.json").read_text())["model"]
    tokens = sorted(vocabulary["vocab"], key=vocabulary["vocab"].get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in vocabulary["merges"]]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types([1] * len(tokens))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(0)
    narrow = WIDTH // HEADS * KV_HEADS
    shapes = {"token_embd": (len(tokens), WIDTH), "output": (len(tokens), WIDTH), "output_norm": (WIDTH,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm": (WIDTH,),
            f"blk.{layer}.ffn_norm": (WIDTH,),
            f"blk.{layer}.attn_q": (WIDTH, WIDTH),
            f"blk.{layer}.attn_k": (narrow, WIDTH),
            f"blk.{layer}.attn_v": (narrow, WIDTH),
            f"blk.{layer}.attn_output": (WIDTH, WIDTH),
            f"blk.{layer}.ffn_gate": (INNER, WIDTH),
            f"blk.{layer}.ffn_up": (INNER, WIDTH),
            f"blk.{layer}.ffn_down": (WIDTH, INNER),
        }
    for name, shape in shapes.items():
        scale = np.ones(shape) if len(shape) == 1 else 0.2 * random.standard_normal(shape)
        writer.add_tensor(f"{name}.weight", scale.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
