"""Steps of AdamW, of all adapters that are due, by two launches: the norms of their gradients, then the steps.

A step reads the sums of units as they are, and writes masters, moments and the new version where they are. The order of a
norm's sum depends on the adapter alone. Nothing waits for the device before all steps are launched.

Legend: A adapters, C chunks of the largest adapter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from motet.core.batch import AdamW
from motet.kernels.cuda.forward import options
from motet.kernels.cuda.kernels.optimizer import add_squares, step_adapters
from motet.kernels.cuda.launches import launch
from motet.model.accelerator import send
from motet.model.adapter_step import AdapterStep, StepNorms

CHUNK = 1 << 14
"""Elements of a program."""
_BLOCK = 512
"""Elements that a program has at a time, four in each thread."""


def step_all(due: Sequence[AdapterStep]) -> list[StepNorms]:
    """Take the steps, and wait for the norms. An adapter whose gradient is not finite stays as it is."""
    device = due[0].masters.device
    n_chunks = max(-(-len(step.masters) // CHUNK) for step in due)
    places, numbers = send(device, np.array([*map(_places, due)]), np.array([*map(_numbers, due)]))
    n_each = len(due) * n_chunks
    told = torch.zeros(2 * n_each + len(due), dtype=torch.float64, device=device)
    squares, weights, norms = told.split([n_each, n_each, len(due)])
    given, grid = (places, numbers, n_chunks), (n_chunks, len(due))
    constants = {"CHUNK": CHUNK, "BLOCK": _BLOCK, **options(4)}
    launch(add_squares, grid, squares, *given, **constants)
    launch(step_adapters, grid, due[0].new.flat, squares, weights, norms, *given, **constants)
    read = told[n_each:].cpu().numpy()
    each = read[:n_each].reshape(len(due), n_chunks)
    return [
        StepNorms(float(norm), math.sqrt(own[: -(-len(step.masters) // CHUNK)].sum()))
        for norm, own, step in zip(read[n_each:], each, due, strict=True)
    ]


def _places(step: AdapterStep) -> list[int]:
    """Addresses, 0 of what is not there; numbers of elements: all, those that a version scales, and those of the matrices."""
    sums, largest = (None, None) if step.sums is None else (step.sums.flat, step.sums.largest)
    vectors = step.masters, *step.state, sums, step.gradient, largest, step.new.flat
    addresses = [0 if vector is None else vector.data_ptr() for vector in vectors]
    return [*addresses, len(step.masters), step.new.layout.size_a, step.new.layout.size]


def _numbers(step: AdapterStep) -> list[float]:
    """Settings of AdamW as the kernel uses them; the factor of A in a version; units, as their sum's range counts them."""
    adamw = step.optimizer
    assert isinstance(adamw, AdamW)
    beta1, beta2 = adamw.betas
    rate = adamw.lr / (1 - beta1**step.number)
    kept, root = 1 - adamw.lr * adamw.weight_decay, math.sqrt(1 - beta2**step.number)
    units = 0 if step.sums is None else step.sums.n_counted
    return [rate, beta1, beta2, adamw.eps, kept, root, adamw.clip_norm, step.new.scaling, units]
