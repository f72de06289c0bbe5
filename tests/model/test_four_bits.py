"""Bases in four bits, nf4 and MXFP4: their numbers, and packed the logits and adapters of the same base unpacked."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from motet.core.batch import Batch
from motet.core.errors import BaseModelError
from motet.model.load import load_base
from motet.model.lora_model import LoraModel
from motet.model.packed import PackedExperts, PackedWeight
from motet.model.packed_forms import Form, Mxfp4Blocks, Nf4Blocks
from tests.support import quantised_files as files
from tests.support import tiny_models as tiny
from tests.support.live_memory import LiveMemory
from tests.support.segments import ADAMW, make_segment, make_trainer, masters


@pytest.fixture(scope="module")
def nf4_directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("nf4")
    files.write_nf4(directory)
    return str(directory)


@pytest.fixture(scope="module")
def mxfp4_directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("mxfp4")
    files.write_mxfp4(directory)
    return str(directory)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(900, 40), (901, 41)])
def test_nf4_numbers_have_the_scale_of_their_run_whatever_the_slice(nested: bool, rows: int, width: int) -> None:
    """Runs of 64 go across rows, and so do bytes where a row has an odd number of numbers."""
    weight = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    stored = {name.removeprefix("weight."): tensor for name, tensor in files.nf4(weight, nested).items()}
    state = json.loads(bytes(stored.pop("quant_state.bitsandbytes__nf4").tolist()))
    tensors = {**stored, **({"nested_offset": torch.tensor([state["nested_offset"]])} if nested else {})}
    form = Nf4Blocks(width, nested)
    assert {name: (tuple(one.shape), one.dtype) for name, one in tensors.items()} == form.tensors(rows, width)
    scales = tensors["absmax"].float()
    if nested:
        scales = tensors["nested_quant_map"][tensors["absmax"].long()]
        for run in range(len(scales)):
            scales[run] = scales[run] * tensors["nested_absmax"][run // 256] + tensors["nested_offset"][0]
    numbers = [files.NF4[half] for byte in tensors["weight"][:, 0].tolist() for half in (byte >> 4, byte & 15)]
    expected = (torch.tensor(numbers[: weight.numel()]) * scales.repeat_interleave(64)[: weight.numel()]).view(rows, -1)
    assert_in_slices(form, tensors, expected)
    assert float((expected - weight).abs().max()) < 0.6


def test_mxfp4_numbers_are_those_of_transformers_whatever_the_slice() -> None:
    """Exponents beyond those of bfloat16's ordinary numbers too."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 30, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(1, 252, (2, 30, 3), generator=generator, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for expert in range(2):
        tensors = {"blocks": blocks[expert], "scales": scales[expert]}
        assert {name: (tuple(one.shape), one.dtype) for name, one in tensors.items()} == Mxfp4Blocks().tensors(30, 96)
        assert_in_slices(Mxfp4Blocks(), tensors, expected[expert].t())


def assert_in_slices(form: Form, tensors: dict[str, torch.Tensor], expected: torch.Tensor) -> None:
    cuts = [0, 7, 9, len(expected)]
    found = [form.numbers(tensors, slice(*rows)) for rows in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(found), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_nf4_gives_the_bits_of_unpacked(nf4_directory: str, dtype: str) -> None:
    packed, plain = (load_base(nf4_directory, dtype=dtype, base_format=one) for one in ("packed", "unpacked"))
    for path, layer in packed.linears.items():
        assert isinstance(layer.fused.frozen, PackedWeight)
        assert torch.equal(layer.weight, plain.linears[path].weight), path
    assert_alike(packed, plain)
    assert float((plain.linears["model.layers.0.mlp.up_proj"].weight - original("llama", plain)).abs().max()) < 0.15


def original(name: str, like: LoraModel) -> torch.Tensor:
    return tiny.base(name).linears["model.layers.0.mlp.up_proj"].weight.to(like.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_experts_give_the_bits_of_unpacked(mxfp4_directory: str, dtype: str) -> None:
    packed, plain = (load_base(mxfp4_directory, dtype=dtype, base_format=one) for one in ("packed", "unpacked"))
    experts = packed.model.get_submodule("model.layers.0.mlp.experts.down_proj")
    assert isinstance(experts, PackedExperts)
    assert torch.equal(experts[2], plain.model.get_parameter("model.layers.0.mlp.experts.down_proj")[2])
    assert_alike(packed, plain, ["all-linear", "experts"])


def assert_alike(packed: LoraModel, plain: LoraModel, targets: str | list[str] = "all-linear") -> None:
    """Logits, and an adapter's bytes after two steps."""
    assert packed.fingerprint() == plain.fingerprint()
    assert packed.info.exact == plain.info.exact
    assert packed.info.n_parameters == plain.info.n_parameters
    trained = []
    for base in (packed, plain):
        trainer = make_trainer(base, "a", targets=targets)
        for _ in range(2):
            trainer.forward_backward(Batch((make_segment("a"),)))
            trainer.optim_step("a", ADAMW)
        trained.append(masters(trainer, "a"))
    assert torch.equal(*trained)


def test_one_expert_at_a_time_is_written_out(mxfp4_directory: str) -> None:
    """A training pass, which keeps what its backward pass wants, holds no more weights than one."""
    most = {}
    for name in ("packed", "unpacked"):
        base = load_base(mxfp4_directory, dtype="bfloat16", pack=False, base_format=name)
        trainer = make_trainer(base, "a")
        with LiveMemory() as memory:
            trainer.forward_backward(Batch((make_segment("a"),)))
        most[name] = memory.most
        largest = max(n_in * n_out for _, n_in, n_out in base.experts.values())
    assert most["packed"] - most["unpacked"] < 20 * largest, most  # two bytes of each number, and fp32 on the way


def test_other_forms_of_bitsandbytes_are_refused(nf4_directory: str, tmp_path: Path) -> None:
    for file in Path(nf4_directory).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"nf4"', '"fp4"'))
    with pytest.raises(BaseModelError, match=r"only these can stay packed.*base_format"):
        load_base(str(tmp_path), base_format="packed")
