"""A base is handed over if decoding steps give the logprobs of a pass."""

from __future__ import annotations

import pytest
import torch

from motet.core.errors import BaseModelError
from motet.model.lora_model import LoraModel
from tests.support import cuda_bases as cuda
from tests.support import tiny_models as tiny

from motet.kernels.cuda.base import CudaBase  # isort: skip  # kernels are made for the interpreter
from motet.kernels.cuda.products import Products  # isort: skip
from motet.kernels.cuda.step_trial import check_steps  # isort: skip
from motet.kernels.cuda.product_backends import BUCKETS, REFERENCE, ProductShape, WayTable  # isort: skip
from tests.support.bad_ways import BadLibrary, WatchedRecorder  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # numpy on Inf and NaN


def base_by(library: BadLibrary) -> LoraModel:
    """A base whose products of one row are by a library."""
    base = tiny.load("llama_long", device=cuda.DEVICE.type)
    table = WayTable(0, 0, base.dtype.itemsize, library=library)
    base.kernels = own = CudaBase(base, lambda _: Products(table), WatchedRecorder())
    base.attention = own.attention
    for weight in own.plan.weights:
        shape = ProductShape.of(weight)
        table.tried[shape] = frozenset({1})
        table.speeds[shape, BUCKETS[0]] = {REFERENCE.name: 9.0, library.name: 1.0}
    return base


def test_a_recorded_step_has_the_bits_of_a_pass() -> None:
    """Or the base is left to torch: here a library splits K where a step is recorded, and only there."""
    prompt = torch.arange(3, 12, device=cuda.DEVICE)
    check_steps(base_by(BadLibrary()), prompt)
    with pytest.raises(BaseModelError, match="other bits than those of a pass"):
        check_steps(base_by(BadLibrary(lambda rows, biased: WatchedRecorder.running is not None)), prompt)
