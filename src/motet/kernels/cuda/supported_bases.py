"""Decides which bases this room's kernels compute on a GPU, and hands them over."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from motet.core.errors import BaseModelError
from motet.core.model_info import TRITON
from motet.model.accelerator import Recorder, device_of, processor_of, reason_of
from motet.model.lora_model import Kernels, LoraModel
from motet.model.own_kernels import INSTEAD, compute_by
from motet.model.own_kernels import refusal as refusal_of_all
from motet.model.proof import check_training
from motet.model.reference_model import proof_sequences


def refusal(base: LoraModel) -> str:
    """Why the kernels cannot compute a base; empty if they can."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if base.device.type != "cuda" and not interpreted:
        return f"Triton's kernels run on GPUs, and engine.device is {base.device.type}"
    if importlib.util.find_spec("triton") is None:
        return "own kernels on GPUs need Triton, which is not installed"
    if base.dtype != torch.bfloat16 and not interpreted:
        return f"own kernels on GPUs compute bfloat16, and engine.dtype is {base.info.dtype}"
    if base.has_experts:
        return "own kernels on GPUs do not compute mixtures of experts"
    if base.quantised:
        return f"its files are quantised ({base.quantised}), and own kernels on GPUs read whole numbers"
    return refusal_of_all(base)


def compute_with(base: LoraModel) -> None:
    """Let the kernels compute a base's passes, if their logits are near torch's and no row's bits depend on other rows.

    A training step must run, too, and decoding steps must give the logprobs of a pass.

    Raises:
        BaseModelError: the kernels cannot compute the base, or they failed a check; the message says which.
    """
    if reason := refusal(base):
        raise BaseModelError(f"{base.info.name}: {reason}; {INSTEAD}")
    base.compute_with(replace(base.arithmetic, graphs=False))  # they are of torch's passes
    try:
        compute_by(base, lambda: _kernels(base), f"{TRITON}, {processor_of(base.device)}")
        if base.info.inexact:
            raise BaseModelError(f"{base.info.name}: own kernels are {base.info.inexact}; {INSTEAD}")
        sequence = proof_sequences(base.model)[0].to(base.device)
        check_training(base, sequence)
        _check_steps(base, sequence)
    except BaseModelError:
        raise
    except Exception as error:  # Triton is missing, or its compiler, the C compiler or the driver fails: of any kind
        raise BaseModelError(f"{base.info.name}: own kernels fail: {reason_of(error)}; {INSTEAD}") from error


def _check_steps(base: LoraModel, sequence: Tensor) -> None:
    from motet.kernels.cuda.step_trial import check_steps  # see `_kernels`

    check_steps(base, sequence)


def _kernels(base: LoraModel) -> Kernels:
    # most machines without a GPU have no Triton
    from motet.kernels.cuda.base import CudaBase
    from motet.kernels.cuda.bit_trial import tried_products
    from motet.kernels.cuda.products import Products, ProductWeight

    recorder = Recorder(base.device)

    def products_of(weights: Sequence[ProductWeight]) -> Products:
        with device_of(weights[0].weight_NK):  # what is timed is on its stream
            products, notes = tried_products(weights, base.device, base.dtype, recorder)
        for note in notes:
            base.revise(note)
        return products

    kernels = CudaBase(base, products_of, recorder)
    base.compute_with(replace(base.arithmetic, rows=1))  # they need no whole tiles
    return kernels
