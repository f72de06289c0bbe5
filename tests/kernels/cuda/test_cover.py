"""Which bases the kernels for GPUs compute, and what hands a base over to them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import tests.support.triton_on_cpu  # noqa: F401
from motet.config import EngineConfig
from motet.core.errors import BaseModelError
from motet.core.model_info import TRITON
from motet.kernels.cpu.choice import Choice, for_device, kernels_of, of_jobs, of_machine
from motet.kernels.cuda.attention import CudaAttention
from motet.kernels.cuda.base import CudaBase
from motet.kernels.cuda.launches import count
from motet.kernels.cuda.supported_bases import refusal
from motet.kernels.supported_bases import hand_over
from motet.model.covered_decoder import FAMILIES
from motet.model.lora_model import LoraModel
from motet.model.proof import check_training
from tests.support import cuda_bases as cuda
from tests.support import tiny_models as tiny
from tests.support.triton_on_cpu import Matrix, in_order, multiplied_by

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # numpy on Inf and NaN

OWN = Choice("triton")


MIXTURES = {"mixtral", "olmoe", "qwen3_moe"}
"""Families that only the kernels for CPUs compute."""


def test_there_is_a_base_of_every_family_that_is_covered() -> None:
    """New families are asked for values and bits as the others are."""
    kinds = {tiny.load(name).model.config.get_text_config().model_type for name in cuda.DENSE}
    assert kinds == FAMILIES - MIXTURES


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in cuda.DENSE if name != "qwen3"][::4])
def test_a_covered_base_is_handed_over_and_exact(name: str) -> None:
    """Of one in four, heads of 24 left out; `tests/kernels/cuda/test_base.py` asks each of them for values and bits."""
    base = cuda.by_torch(name)
    hand_over(base, EngineConfig(), OWN)
    assert isinstance(base.kernels, CudaBase)
    left_out = "the library is not used", "tile "  # what a card's trial may say of ways to multiply
    assert [note for note in base.info.notes if not note.startswith(left_out)] == []
    assert not base.info.inexact
    assert kernels_of(base.info.processor) == "triton"
    assert len(base.pad(torch.zeros(5, 1))) == 5, "its passes have no rows of padding"


def test_the_last_check_takes_a_training_step_as_a_jobs() -> None:
    """A base that fails it is left to torch, so a check that no base passes would leave all to it."""
    base = cuda.base("llama_long")
    with count() as launched:
        check_training(base, torch.arange(9, device=base.device))
    assert launched["add_units"] == 4


def test_what_is_not_covered_is_refused_with_the_reason() -> None:
    for name, why in (("qwen3_moe", "mixtures of experts"), ("cohere", "LayerNorm")):
        assert why in refusal(cuda.by_torch(name))


def broken(name: str = "llama") -> LoraModel:
    """A base whose logits are NaN by its last norm, which no kernels agree about."""
    base = cuda.by_torch(name)
    norm: Any = base.decoder.norm
    norm.weight.fill_(float("nan"))
    return base


def test_a_base_whose_logits_differ_stays_with_torch_and_jobs_that_began_are_refused() -> None:
    with pytest.raises(BaseModelError, match="differ from torch's"):
        hand_over(broken(), EngineConfig(), Choice("triton", kept=True))
    base = broken()
    rows = base.arithmetic.rows
    hand_over(base, EngineConfig(), OWN)
    assert base.kernels is None
    assert base.arithmetic.rows == rows
    assert not isinstance(base.attention, CudaAttention)
    assert any("differ from torch's" in note for note in base.info.notes)


def few_backwards(left: Matrix, right: Matrix, total: Matrix) -> Matrix:
    """Tiles of 16 rows are added from the end."""
    return in_order(left[:, ::-1], right[::-1], total) if len(left) == 16 else in_order(left, right, total)


@pytest.mark.skipif(cuda.DEVICE.type == "cuda", reason="a card multiplies as it does")
def test_nothing_of_kernels_that_failed_a_check_stays() -> None:
    """Not their name, which jobs would be recorded as begun with, and not what was found of them."""
    base = cuda.by_torch("llama_long")
    before = base.info
    with multiplied_by(few_backwards):
        hand_over(base, EngineConfig(), OWN)
    assert (base.info.processor, base.info.inexact) == (before.processor, "")
    (note,) = set(base.info.notes) - set(before.notes)
    assert "not bit-exact" in note


def test_kernels_that_fail_in_any_way_leave_the_base_and_their_memory_to_torch() -> None:
    """Here a head that torch multiplies, and they do not, because its rows are not next to each other."""
    base = cuda.by_torch("llama_long")
    alive, weight_NK = list[bool](), base.head.dense()
    base.head.weight = nn.Parameter(weight_NK.t().contiguous().t(), requires_grad=False)

    def look_for_kernels(*_given: object) -> None:
        if not isinstance(base.attention, CudaAttention):
            alive.append(any(type(each) is CudaBase and vars(each).get("base") is base for each in gc.get_objects()))

    base.decoder.register_forward_pre_hook(look_for_kernels)
    hand_over(base, EngineConfig(), OWN)
    assert base.kernels is None
    assert "own kernels fail: AssertionError" in base.info.notes[-1]
    assert not any(alive)


def test_jobs_keep_the_kernels_that_they_began_with_on_a_gpu() -> None:
    began = of_jobs([f"{TRITON}, NVIDIA H200"])
    assert (began.kernels, began.kept) == ("triton", True)
    torch = of_jobs(["NVIDIA H200"])
    assert for_device("cuda", torch) == torch
    for own in (None, of_machine(), began):
        assert for_device("cuda", own).kernels == "triton"
    assert for_device("cuda", began).kept
    assert for_device("cpu", began) == for_device("cpu", None) == of_machine()


@pytest.mark.parametrize("given", [{"device": "cpu"}, {"block_size": 24}, {"shard": 2}])
def test_settings_that_the_kernels_do_not_know_are_refused(given: dict[str, Any]) -> None:
    assert EngineConfig(**given).excludes("triton")
    with pytest.raises(ValueError, match="which do not go together"):
        EngineConfig(kernels="triton", **given)
    assert not EngineConfig(device="cuda:1", pack_weights=False).excludes("triton")
