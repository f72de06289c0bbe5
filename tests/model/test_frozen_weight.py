"""Faster forms of frozen layers: they are used only where they give the same bits, or a gradient within tolerance."""

from __future__ import annotations

import copy
import ctypes
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from motet.model import frozen_weight
from motet.model.arithmetic import Arithmetic
from motet.model.frozen_weight import FrozenWeight, reorder_all
from motet.model.lora import AdapterWeights, new_vector
from motet.model.norm import speed_up_norms
from motet.model.routing import TrainerRouting, TrainSegment
from motet.process.allocator import keep_freed_memory
from tests.support import inside
from tests.support import tiny_models as tiny

pytestmark = pytest.mark.tier1

PACKS = torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Whether oneDNN has the layout on this processor."""
SHAPES = [(64, 32), (192, 64), (96, 576), (1024, 256)]


def frozen(shape: tuple[int, int], bias: bool, dtype: torch.dtype = torch.bfloat16) -> FrozenWeight:
    generator = torch.Generator().manual_seed(sum(shape))
    weight, extra = torch.randn(shape, generator=generator), torch.randn(shape[0], generator=generator)
    return FrozenWeight(weight.to(dtype), extra.to(dtype) if bias else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 4), (16, 4), (1, 96), (8, 96), (4, 256), (64, 16), (16, 64)])
def test_small_products_do_not_depend_on_how_many_rows_there_are(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Gemma 3n and 4 have layers of four inputs, or as many outputs."""
    weight, generator = frozen(shape, bias=True, dtype=dtype), torch.Generator().manual_seed(1)
    x, slope = (torch.randn(1, 6000, width, generator=generator).to(dtype) for width in reversed(shape))
    for product, rows in ((weight, x), (weight.back, slope)):
        whole = product(rows)
        for n in (4, 8, 12, 24, 60):
            assert torch.equal(torch.cat([product(part) for part in rows.split(n, 1)], 1), whole), n


@pytest.mark.parametrize("shape", [(64, 64), (576, 576), (512, 128), (96, 256)])
def test_float32_products_have_the_bits_of_whole_rows_of_four(shape: tuple[int, int]) -> None:
    """Some processors have kernels of their own for fewer than sixteen, and others for every remainder of six."""
    weight, generator = frozen(shape, bias=False, dtype=torch.float32), torch.Generator().manual_seed(1)
    for product, width in ((weight, shape[1]), (weight.back, shape[0])):
        x = torch.randn(128, width, generator=generator)
        whole = product(x)
        for n in range(4, 40, 4):
            assert torch.equal(product(x[:n]), whole[:n]), n


# --- packed weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_products_have_the_same_bits(shape: tuple[int, int], bias: bool) -> None:
    weight = frozen(shape, bias)
    reorder_all([weight])
    generator = torch.Generator().manual_seed(1)
    for rows in (4, 8, 12, 28, 64, 132):
        x = torch.randn(rows, shape[1], generator=generator).bfloat16()
        assert torch.equal(weight(x), F.linear(x, weight.weight, weight.bias))
        assert torch.equal(weight(x[None])[0], weight(x))


def test_weights_are_packed_where_the_operators_are_there() -> None:
    """Otherwise the comparison above would compare a product with itself."""
    weights = [frozen(shape, bias) for shape in SHAPES for bias in (False, True)]
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        pytest.fail("this build of torch cannot pack: is that so wherever Motet runs?")
    reorder_all(weights)
    assert all((inside.reordered(weight) is not None) == PACKS for weight in weights)


def test_fp32_is_left_alone() -> None:
    weight = frozen((64, 32), False, torch.float32)
    reorder_all([weight])
    assert inside.reordered(weight) is None
    base = tiny.base("llama", "float32")
    assert all(inside.reordered(layer.fused.frozen) is None for layer in base.linears.values())


def spoilt(where: Callable[[Tensor], bool]) -> Any:
    right = frozen_weight._reordered_linear

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = right(x, weight, bias)
        if where(x):
            y[-1, -1] = torch.nextafter(y[-1, -1].float(), torch.tensor(9e9)).bfloat16() + 1
        return y

    return product


@pytest.mark.parametrize("rows", [4, 32, 128])
def test_a_weight_whose_product_disagrees_stays_plain(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """For any of the numbers of rows tried; weights of another shape are packed all the same."""
    monkeypatch.setattr(frozen_weight, "_reordered_linear", spoilt(lambda x: x.shape == (rows, 64)))
    bad, good, same_shape = frozen((192, 64), True), frozen((96, 576), True), frozen((192, 64), True)
    reorder_all([bad, good, same_shape])
    assert inside.reordered(bad) is inside.reordered(same_shape) is None
    assert (inside.reordered(good) is not None) == PACKS
    x = torch.ones(rows, 64).bfloat16()
    assert torch.equal(bad(x), F.linear(x, bad.weight, bad.bias))


@pytest.mark.parametrize("error", [AttributeError, RuntimeError])
def test_without_the_operators_everything_stays_plain(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def missing(self: FrozenWeight) -> None:
        raise error("no such operator")

    monkeypatch.setattr(FrozenWeight, "reorder", missing)
    weight, same_shape = (frozen((64, 32), True) for _ in range(2))
    reorder_all([weight, same_shape])
    assert inside.reordered(weight) is inside.reordered(same_shape) is None
    assert weight(torch.ones(4, 32).bfloat16()).shape == (4, 64)


class Quantised(FrozenWeight):
    """Eight bits and a scale for each row: the parameter holds no numbers to multiply with."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        scale = weight.abs().amax(1, keepdim=True).float() / 127
        self.register_buffer("scale", scale)
        self.weight = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)

    def dense(self) -> Tensor:
        scale: Tensor = self.get_buffer("scale")
        return self.weight.float() * scale


def test_a_quantised_weight_can_stand_in() -> None:
    """Sampling, training and packing ask a weight for its numbers, never for the parameter."""
    base = tiny.load("llama")
    expected = tiny.packed_logits(base, [(None, tiny.tokens(12))])[0]
    for layer in {layer.fused.leader: layer for layer in base.linears.values()}.values():
        layer.fused.frozen = Quantised(layer.fused.frozen.weight.detach(), layer.fused.frozen.bias)
    base.reorder_weights()
    found = tiny.packed_logits(base, [(None, tiny.tokens(12))])[0]
    assert 0 < float((found - expected).abs().max()) < 0.05 * float(expected.abs().max())
    layer = base.linears["model.layers.0.mlp.down_proj"]
    grad = torch.ones(4, layer.out_features)
    torch.testing.assert_close(layer.fused.frozen.back(grad), grad @ layer.weight)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_a_base_can_be_sharded(alone: None) -> None:
    """FSDP2 exchanges every parameter, and gathers a layer's before it is used: forward, and in the backward pass again."""
    base = tiny.load("llama")
    ids = tiny.tokens(12)
    layout, masters = tiny.adapter_masters(base)
    weights = AdapterWeights.from_masters(layout, 1.0, masters, base.dtype)

    def gradient() -> tuple[Tensor, Tensor]:
        gradient = torch.zeros(layout.size)
        segment = TrainSegment(0, 12, weights, layout.matrices(gradient))
        with base.routed(TrainerRouting([segment], base.device, base.products, backward=True)):
            hidden = base.hidden(ids, torch.arange(12), base.attention.packed([12]))
            hidden.float().square().sum().backward()
        return hidden.detach(), gradient

    expected = gradient()
    kept = [parameter.detach().clone() for parameter in base.model.parameters()]
    mesh = init_device_mesh("cpu", (1,))
    for layer in base.decoder.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    sharded = [parameter for parameter in base.model.parameters() if isinstance(parameter, DTensor)]
    assert len(sharded) == sum(1 for _ in base.decoder.get_submodule("layers").parameters()) > 0
    found = gradient()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    sizes = [parameter.numel() for parameter in base.model.parameters()]
    assert sizes == [one.numel() for one in kept], "a weight is kept once"


def test_packing_changes_no_bit_of_a_base() -> None:
    plain, ours = (tiny.load("qwen2", "bfloat16") for _ in range(2))
    reorder_all([layer.fused.frozen for layer in ours.linears.values()])
    for layer in plain.linears.values():
        layer.fused.frozen.let_go()
    ids = tiny.tokens(30)
    assert any(inside.reordered(layer.fused.frozen) is not None for layer in ours.linears.values()) == PACKS
    assert torch.equal(tiny.packed_logits(ours, [(None, ids)])[0], tiny.packed_logits(plain, [(None, ids)])[0])


# --- tiles of rows ------------------------------------------------------------------------------------------------------


class Shapes(TorchDispatchMode):
    """Rows of every product with a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::mm", "aten::addmm"):
            self.rows.append(args[func._schema.name == "aten::addmm"].shape[0])
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_has_the_rows_of_one_tile(bias: bool, dtype: torch.dtype) -> None:
    """Back and forth, whatever the number of rows; each tile has the bits it has alone."""
    weight = frozen((96, 64), bias, dtype)
    weight.compute_with(Arithmetic(tile=16))
    generator = torch.Generator().manual_seed(1)
    for rows in (16, 48, 160):
        for product, width in ((weight, 64), (weight.back, 96)):
            x = torch.randn(rows, width, generator=generator).to(dtype)
            with Shapes() as seen:
                y = product(x)
            assert seen.rows == [16] * (rows // 16)
            assert y.shape == (rows, 160 - width)
            assert torch.equal(y, torch.cat([product(part) for part in x.split(16)]))
            assert torch.equal(product(x[None])[0], y)
            assert torch.equal(product(torch.stack([x, x], 1)[:, 0]), y), "rows that lie apart"
            assert torch.equal(product(x.clone().requires_grad_()), y)


@pytest.mark.parametrize("tile", [0, 16])
@pytest.mark.parametrize("bias", [False, True])
def test_products_and_their_way_back(bias: bool, tile: int) -> None:
    weight = frozen((96, 64), bias, torch.float32)
    weight.compute_with(Arithmetic(tile=tile))
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(2, 32, width, generator=generator) for width in (64, 96))
    wanted = x @ weight.weight.t() + (0 if weight.bias is None else weight.bias)
    torch.testing.assert_close(weight(x), wanted)
    torch.testing.assert_close(weight.back(grad), grad @ weight.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_tiles_all_rows_are_one_product(dtype: torch.dtype) -> None:
    weight = frozen((96, 64), True, dtype)
    x, grad = torch.ones(1, 12, 64, dtype=dtype) / 3, torch.ones(1, 12, 96, dtype=dtype) / 3
    with Shapes() as seen:
        y, back = weight(x), weight.back(grad)
    assert seen.rows == [12, 12]
    assert torch.equal(y, F.linear(x, weight.weight, weight.bias))
    assert torch.equal(back, torch.matmul(grad, weight.weight))


@pytest.mark.parametrize("bias", [False, True])
def test_the_last_tile_is_filled_up(bias: bool) -> None:
    weight = frozen((96, 64), bias)
    weight.compute_with(Arithmetic(tile=16))
    for product, width in ((weight, 64), (weight.back, 96)):
        x = torch.randn(1, 32, width, generator=torch.Generator().manual_seed(1)).bfloat16()
        with Shapes() as seen:
            y = product(x[:, :20])
        assert seen.rows == [16, 16]
        assert torch.equal(y, product(x)[:, :20])


def test_only_long_sums_take_tiles() -> None:
    weight = frozen((96, 64), False)
    weight.compute_with(Arithmetic(tile=16, long_sum=96))
    with Shapes() as seen:
        weight(torch.ones(32, 64).bfloat16())
        weight.back(torch.ones(32, 96).bfloat16())
    assert seen.rows == [32, 16, 16]


def test_a_mixture_on_a_card_has_no_tiles_because_it_is_exact_in_no_case() -> None:
    dense, mixture = (Arithmetic.of(torch.device("cuda"), torch.bfloat16, experts=experts) for experts in (False, True))
    assert (dense.rows, dense.tile_of(64)) == (256, 256)
    assert (mixture.rows, mixture.tile_of(4096)) == (16, 0)


@pytest.mark.parametrize("shape", [(576, 576), (192, 576), (1536, 576), (576, 1536), (64, 2048)])
def test_bfloat16_products_have_the_bits_of_any_number_of_rows(shape: tuple[int, int]) -> None:
    """Where the processor multiplies matrices, oneDNN cuts long sums by the number of rows."""
    weight, generator = frozen(shape, bias=False), torch.Generator().manual_seed(1)
    weight.compute_with(Arithmetic.of(torch.device("cpu"), torch.bfloat16, experts=False))
    reordered = copy.deepcopy(weight)
    reorder_all([reordered])
    for product, width in ((weight, shape[1]), (weight.back, shape[0]), (reordered, shape[1])):
        x = torch.randn(1536, width, generator=generator).bfloat16()
        whole = product(x)
        for n in (4, 32, 36, 60, 64, 68, 100, 128, 132, 256, 300, 512, 1024):
            assert torch.equal(product(x[:n]), whole[:n]), n


# --- norms ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("scale", [0.03, 1.0, 40.0])
def test_the_closed_gradient_is_that_of_autograd(dtype: torch.dtype, tolerance: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    stock = LlamaRMSNorm(96, eps=1e-5)
    stock.weight.data = torch.randn(96, generator=generator)
    stock = stock.to(dtype).requires_grad_(False)
    fast = copy.deepcopy(stock)
    assert speed_up_norms(nn.ModuleList([fast])) == 1
    x = (torch.randn(2, 9, 96, generator=generator) * scale).to(dtype)
    slope = torch.randn(2, 9, 96, generator=generator).to(dtype)
    gradients = []
    for norm in (fast, stock):
        leaf = x.clone().requires_grad_()
        y = norm(leaf)
        assert torch.equal(y, stock(x)), "the forward pass is the module's own"
        gradients.append(torch.autograd.grad(y, leaf, slope)[0])
    assert gradients[0].dtype == dtype
    assert type(fast(x.requires_grad_()).grad_fn).__name__ == "_RMSNormBackward"
    ours, theirs = (gradient.float() for gradient in gradients)
    assert float((ours - theirs).abs().max()) <= tolerance * float(theirs.abs().max())


def test_a_norm_with_another_gradient_is_left_as_it_is() -> None:
    """Gemma adds one to the weight."""
    norm = Gemma3RMSNorm(64, eps=1e-6)
    norm.weight.data = torch.linspace(-1, 1, 64)
    norm.requires_grad_(False)
    own = norm.forward
    assert speed_up_norms(nn.ModuleList([norm, nn.LayerNorm(64)])) == 0
    assert norm.forward == own
    assert "Backward" in type(norm(torch.ones(1, 2, 64, requires_grad=True)).grad_fn).__name__
    assert type(norm(torch.ones(1, 2, 64, requires_grad=True)).grad_fn).__name__ != "_RMSNormBackward"


# --- the allocator ----------------------------------------------------------------------------------------------------------


def test_the_allocator_can_be_told_twice() -> None:
    code = "from motet.process.allocator import keep_freed_memory as keep; print(keep(), keep())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(platform.libc_ver()[0] == "glibc")] * 2


def test_a_version_has_the_memory_of_an_earlier_one_that_nothing_reads() -> None:
    def made() -> torch.Tensor:
        return new_vector(5003, torch.float32, torch.device("cpu"), zeros=False)

    first = made()
    view, place = first[8:], first.data_ptr()
    del first
    assert made().data_ptr() != place
    del view
    assert made().data_ptr() == place


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(ctypes, "CDLL", None)
    assert keep_freed_memory() is False
