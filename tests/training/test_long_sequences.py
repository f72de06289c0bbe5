"""Segments too long for an MLP to keep all their rows: the same logprobs, one gradient in any company, less memory."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from motet.config import EngineConfig
from motet.core.batch import Batch, Segment
from motet.core.errors import ConfigError
from motet.hosts.launch import make_trainer as trainer_of
from motet.model.arithmetic import Arithmetic
from motet.model.lora import AdapterWeights
from motet.model.lora_model import LoraModel
from motet.model.routing import TrainerRouting, TrainSegment
from motet.training.memory import PassMemory, pass_memory
from tests.support import tiny_models as tiny
from tests.support.cases import few
from tests.support.live_memory import LiveMemory
from tests.support.segments import REINFORCE, gradient, make_samples, make_segment, make_trainer

LONG, TILE = 96, 32


@functools.cache
def in_tiles(name: str, dtype: str = "float32") -> LoraModel:
    base = tiny.load(name, dtype)
    base.compute_with(dataclasses.replace(base.arithmetic, long_rows=LONG, mlp_rows=TILE))
    return base


def long_segment(name: str = "a", length: int = 150) -> Segment:
    """Longer than what is kept whole; its last tile is short."""
    return Segment(name, make_samples([(40, length - 40)], seed=7), REINFORCE, float(length - 40), 0.8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
def test_tiles_change_no_logprob_and_gradients_by_rounding_alone(name: str, dtype: str) -> None:
    found = {}
    for kind, base in (("whole", tiny.base(name, dtype)), ("tiled", in_tiles(name, dtype))):
        trainer = make_trainer(base, "a")
        (trained,) = trainer.forward_backward(Batch((long_segment(),)))
        (scored,) = trainer.forward(Batch((long_segment(),)))
        assert np.array_equal(trained.logprobs[0], scored[0])
        found[kind] = trained.logprobs[0], gradient(trainer, "a")
    assert np.array_equal(found["tiled"][0], found["whole"][0])
    whole, tiled = found["whole"][1], found["tiled"][1]
    assert not torch.equal(whole, tiled)  # or nothing was cut
    assert float((whole - tiled).abs().max()) < (1e-5 if dtype == "float32" else 2e-2) * float(whole.abs().max())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_long_segment_has_one_gradient_in_any_company(dtype: str, recompute: bool) -> None:
    """Beside other jobs on both sides, and after samples of its own."""
    base = in_tiles("llama", dtype)
    alone, company = (make_trainer(base, recompute=recompute) for _ in range(2))
    for segment in (make_segment("a"), long_segment(), make_segment("a")):
        alone.forward_backward(Batch((segment,)))
    company.forward_backward(Batch((make_segment("b"), make_segment("a"), long_segment(), long_segment("c"))))
    company.forward_backward(Batch((make_segment("b"), make_segment("a"))))
    assert torch.equal(gradient(alone, "a"), gradient(company, "a"))
    for name in "bc":
        apart = make_trainer(base)
        for segment in [make_segment("b")] * 2 if name == "b" else [long_segment("c")]:
            apart.forward_backward(Batch((segment,)))
        assert torch.equal(gradient(apart, name), gradient(company, name))


def test_segments_that_are_not_long_stay_whole() -> None:
    """Bytes of adapters that were trained before there were tiles."""
    found = []
    for base in (in_tiles("llama"), tiny.base("llama")):
        trainer = make_trainer(base, "a")
        trainer.forward_backward(Batch((long_segment(length=LONG), make_segment("a"))))
        found.append(gradient(trainer, "a"))
    assert torch.equal(*found)
    assert Arithmetic().long_rows == 8192


def test_what_an_mlp_keeps_grows_with_the_tile() -> None:
    """Of twice the rows it holds twice the rows that come and go, and nothing else."""
    base = in_tiles("llama")
    layout, masters = tiny.adapter_masters(base)
    weights = AdapterWeights.from_masters(layout, 1.0, masters, base.dtype)
    mlp = base.decoder.get_submodule("layers.0.mlp")

    def most(length: int) -> int:
        sums = layout.matrices(torch.zeros(layout.size))
        segment = TrainSegment(0, length, weights, sums)
        x = torch.randn(1, length, base.info.hidden_size).requires_grad_()
        routing = TrainerRouting([segment], base.device, base.products, backward=True)
        with base.routed(routing), LiveMemory() as memory:
            mlp(x).sum().backward()
        return int(memory.most)

    row = base.info.hidden_size * 4
    assert most(2048) - most(1024) <= 4 * 1024 * row


@pytest.mark.parametrize(
    ("name", "dtype"),
    few(
        itertools.product(("llama", "gemma3n"), ("float32", "bfloat16")), ("llama", "bfloat16"), ("gemma3n", "float32")
    ),
)
def test_layer_inputs_in_a_file_change_no_bit(name: str, dtype: str, tmp_path: Path) -> None:
    """Of a pass; and two passes later what was written first is read no more."""
    found = []
    for inputs in (None, tmp_path):
        trainer = make_trainer(tiny.load(name, dtype), "ab", recompute=True, inputs=inputs)
        for batch in (Batch((make_segment("b"), long_segment())), Batch((make_segment("a"),))):
            trained = trainer.forward_backward(batch)[-1]
            found.append((gradient(trainer, "a"), *map(torch.from_numpy, trained.logprobs)))
    for kept, moved in zip(found[:2], found[2:], strict=True):
        assert all(torch.equal(*pair) for pair in zip(kept, moved, strict=True))
    assert list(tmp_path.iterdir()) == []  # a process that is killed leaves nothing there


def test_layer_inputs_in_a_file_take_no_memory(tmp_path: Path) -> None:
    """But those of the layer at hand."""
    base, most = tiny.load("llama_deep"), []
    for inputs in (None, tmp_path):
        trainer = make_trainer(base, "a", recompute=True, inputs=inputs)
        with LiveMemory() as live:
            trainer.forward_backward(Batch((long_segment(),)))
        most.append(live.most)
    n_layers = len(base.decoder.layers)  # type: ignore[arg-type]
    assert most[0] - most[1] > (n_layers - 2) * 150 * base.info.hidden_size * base.dtype.itemsize


def test_layer_inputs_for_which_a_disk_has_no_room_stay_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base, found = tiny.load("llama_deep"), []
    of_a_layer = 152 * base.info.hidden_size * base.dtype.itemsize
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (before[0], 2 * of_a_layer + 1000, 0):
        trainer = make_trainer(base, "a", recompute=True, inputs=tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        try:
            trainer.forward_backward(Batch((long_segment(),)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        found.append(gradient(trainer, "a"))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    (first, second) = (record.getMessage() for record in caplog.records)
    assert first == second == f"layer inputs stay in memory because {tmp_path} cannot take them: File too large"


def test_where_layer_inputs_go_is_a_directory_and_nothing_without_recomputing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.offload:.*is no directory"):
        trainer_of(tiny.base("llama"), EngineConfig(recompute=True, offload=str(tmp_path / "nowhere")))
    with pytest.raises(ValueError, match="set recompute to true"):
        EngineConfig(offload=str(tmp_path))


@pytest.mark.parametrize("way", [{"recompute": False}, {"recompute": True}, {"recompute": True, "offload": True}])
def test_the_estimate_of_memory_is_near_what_a_pass_takes(way: dict[str, bool], tmp_path: Path) -> None:
    inputs = tmp_path if way.get("offload") else None
    for base in (tiny.base("llama"), in_tiles("llama"), tiny.base("llama_deep")):
        trainer = make_trainer(base, "a", recompute=way["recompute"], inputs=inputs)
        memory = pass_memory(base, **way)
        with LiveMemory() as live:
            trainer.forward_backward(Batch((long_segment(length=300),)))
        assert 0.5 < memory.of(300) / live.most < 2


def test_what_fits_is_the_longest_that_the_estimate_allows() -> None:
    memory = PassMemory(whole=1000, tiled=100, long_rows=8192, heads=2, tile=5000)
    for room in (0, 999, 1010, 500_000, 80_000_000, 100_000_000):
        longest = memory.longest(room)
        assert longest == 0 or memory.of(longest) <= room
        assert memory.of(longest + 1) > room or longest == memory.long_rows


@pytest.mark.soak
def test_a_sequence_of_16k_tokens_is_trained_in_a_bounded_memory() -> None:
    """Of a base one layer deep, with the tiles that jobs have; kept scores are 64 MiB of it."""
    base = tiny.load("llama_long")
    trainer = make_trainer(base, "a", recompute=True)
    estimate = pass_memory(base, recompute=True).of(16384)
    with LiveMemory() as live:
        (trained,) = trainer.forward_backward(Batch((long_segment(length=16384),)))
    assert np.isfinite(trained.stats.loss)
    assert float(gradient(trainer, "a").abs().max()) > 0
    print(f"16,384 tokens: {live.most / 2**20:.0f} MiB at most, {estimate / 2**20:.0f} MiB estimated")
    assert live.most < 192 * 2**20
    assert 0.5 < estimate / live.most < 2
