"""Bases that stay packed: the numbers, the logits and the adapters of the same base unpacked, in less memory."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import nn

from motet.config import EngineConfig
from motet.config.jobfile import validate
from motet.core.errors import BaseModelError
from motet.hosts.launch import load
from motet.hosts.running import run_config
from motet.model.checkpoint import BaseCheckpoint
from motet.model.load import load_base
from motet.model.lora import NoAdapters
from motet.model.lora_model import LoraModel
from motet.model.packed import PackedLinear, PackedWeight
from motet.model.packed_forms import Float8Blocks, GgufBlocks
from tests.support import tiny_models as tiny
from tests.support.gguf_files import write_tiny
from tests.support.live_memory import LiveMemory
from tests.support.quantised_files import write_float8

pytestmark = pytest.mark.bits

QUANTS = gguf.GGMLQuantizationType


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory, small_base_dir: Path) -> str:
    """Attention in Q8_0 and the rest in Q4_1, as in files that people have."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny(path, small_base_dir, lambda name: QUANTS.Q8_0 if "attn" in name else QUANTS.Q4_1)
    return str(path)


@pytest.fixture(scope="module")
def float8_directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("float8")
    write_float8(directory)
    return str(directory)


@pytest.fixture(params=["gguf_file", "float8_directory"])
def quantised(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


@pytest.mark.parametrize("kind", [QUANTS.Q8_0, QUANTS.Q4_1, QUANTS.Q4_K, QUANTS.Q6_K], ids=lambda kind: kind.name)
def test_numbers_are_those_of_ggml_whatever_the_slice(kind: Any) -> None:
    per_block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows, per_row = 6, 512 // per_block
    blocks = np.random.default_rng(0).integers(0, 256, (rows, per_row, n_bytes), np.uint8)
    scales = [208] if kind is QUANTS.Q6_K else [0, 2][: 1 if kind is QUANTS.Q8_0 else 2]
    for at in scales:
        blocks[:, :, at : at + 2] = np.frombuffer(np.float16(0.011).tobytes(), np.uint8)  # no infinity among them
    data = blocks.reshape(rows, -1)
    expected = torch.from_numpy(gguf.dequantize(data, kind))
    form, tensors = GgufBlocks(int(kind)), {"weight": torch.from_numpy(data)}
    found = torch.cat([form.numbers(tensors, slice(0, 4)), form.numbers(tensors, slice(4, 6))])
    assert torch.equal(found, expected)
    assert {name: (tuple(one.shape), one.dtype) for name, one in tensors.items()} == form.tensors(rows, 512)


def test_eight_bit_numbers_have_the_scale_of_their_block() -> None:
    form, generator = Float8Blocks((4, 8)), torch.Generator().manual_seed(0)
    shapes = form.tensors(10, 20)
    weight = torch.randn(shapes["weight"][0], generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(shapes["weight_scale_inv"][0], generator=generator)
    tensors = {"weight": weight, "weight_scale_inv": scales}
    found = torch.cat([form.numbers(tensors, slice(0, 3)), form.numbers(tensors, slice(3, 10))])
    expected = [[float(weight[n, k]) * float(scales[n // 4, k // 8]) for k in range(20)] for n in range(10)]
    assert torch.equal(found, torch.tensor(expected))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_gives_the_bits_of_unpacked(quantised: str, dtype: str) -> None:
    packed, plain = (load_base(quantised, dtype=dtype, base_format=one) for one in ("packed", "unpacked"))
    for path, layer in packed.linears.items():
        assert isinstance(layer.fused.frozen, PackedWeight)
        assert torch.equal(layer.weight, plain.linears[path].weight), path
    assert packed.fingerprint() == plain.fingerprint()
    (note,) = packed.info.notes
    assert "stay packed" in note
    assert dataclasses.replace(packed.info, notes=()) == dataclasses.replace(
        plain.info, tokenizer=packed.info.tokenizer
    )
    assert stored(packed) < 0.6 * stored(plain) if dtype == "bfloat16" else stored(packed) < 0.3 * stored(plain)


def stored(base: LoraModel) -> int:
    """Bytes that the weights of linear layers take."""
    weights = {id(layer.fused): layer.fused.frozen for layer in base.linears.values()}
    return sum(each.nbytes for frozen in weights.values() for each in (*frozen.parameters(), *frozen.buffers()))


def test_adapters_have_the_bytes_of_those_on_the_unpacked_base(quantised: str, tmp_path: Path) -> None:
    """Trained and sampled here and in a second process."""
    digests = {}
    for name, samplers in (("packed", 1), ("unpacked", 0)):
        engine = {"base_format": name, "samplers": samplers, "threads": 1}
        job = {
            "name": "a",
            "data": {"source": "toy:sort_letters", "size": 16, "holdout": 0, "chat_template": False},
            "reward": {"name": "length", "args": {"target": 3}},
            "steps": 2,
            "sampling": {"max_tokens": 6},
            "algorithm": {"group_size": 4, "groups_per_step": 2},
            "eval": {"every": 0},
        }
        config = validate({"base": quantised, "run": str(tmp_path / name), "engine": engine, "jobs": [job]}, "test")
        base = load(quantised, EngineConfig(base_format=name, threads=1))
        assert base.kernels is None
        assert run_config(config, base=base).ok
        weights = (tmp_path / name / "a" / "versions" / "v2" / "adapter_model.safetensors").read_bytes()
        digests[name] = hashlib.sha256(weights).hexdigest()
    assert digests["packed"] == digests["unpacked"]


def test_one_weight_at_a_time_is_written_out(gguf_file: str) -> None:
    """The most that a pass holds is what it holds unpacked, and the largest weight with what a slice of it takes."""
    most = {}
    tokens = tiny.tokens(8)
    for name in ("packed", "unpacked"):
        base = load_base(gguf_file, dtype="bfloat16", pack=False, base_format=name)
        with torch.no_grad(), base.routed(NoAdapters()), LiveMemory() as memory:
            base.hidden(tokens % base.info.vocab_size, torch.arange(8), base.attention.packed([8]))
        most[name] = memory.most
        largest = max(layer.fused.frozen.shape.numel() for layer in base.linears.values())
    assert most["packed"] - most["unpacked"] < 6 * largest, most  # two bytes of each number, and fp32 on the way


def test_auto_unpacks_while_memory_lasts(gguf_file: str) -> None:
    file = Path(gguf_file)
    own, large = (BaseCheckpoint.of(str(file.parent), file.name, False) for _ in range(2))
    cpu = torch.device("cpu")
    assert not own.stays_packed("auto", torch.bfloat16, cpu)
    large.config.vocab_size = 2**40  # its embeddings alone would not fit anywhere
    assert large.stays_packed("auto", torch.bfloat16, cpu)


@pytest.mark.parametrize(
    ("base", "what"), [("small", "is not quantised"), ("gemma", "architecture 'gemma2', and only llama, qwen2, qwen3")]
)
def test_what_cannot_stay_packed_is_refused_with_what_to_do(
    base: str, what: str, tmp_path: Path, small_base_dir: Path
) -> None:
    if base == "gemma":
        base = str(tmp_path / "gemma.gguf")
        write_tiny(Path(base), small_base_dir, lambda name: QUANTS.Q8_0, architecture="gemma2")
    with pytest.raises(BaseModelError, match=f"{what}.*engine.base_format: unpacked"):
        load_base(base, base_format="packed")


def test_a_packed_layer_stands_for_itself() -> None:
    """Stock passes of the proof go through it: with its bias."""
    linear = nn.Linear(64, 32)
    layer = PackedLinear(linear, GgufBlocks(int(QUANTS.Q8_0)), torch.float32)
    data = gguf.quantize(linear.weight.detach().numpy(), QUANTS.Q8_0)
    layer.weight.data.copy_(torch.from_numpy(data))  # type: ignore[operator]
    x = torch.randn(5, 64)
    assert torch.allclose(layer(x), linear(x), atol=0.02)
