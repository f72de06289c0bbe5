"""A request for a gradient, as its session's journal keeps it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from motet.algorithms.client import CLIENT_LOSSES, ClientLoss
from motet.errors import ConfigError
from motet.runtime.journal import Datum, ForwardBackward, Tensor
from motet.service.tinker.wire import MOST_NUMBERS, WireError, dense, shape_of, tokens_of

MOST_DATA = 4096
"""Of one request; the client splits what is more."""


def command_of(request: Any) -> ForwardBackward:
    """The command that a request means.

    Raises:
        WireError: it asks for something that is not there, and what to use.
    """
    try:
        loss = ClientLoss.of(request.loss_fn, _settings(request))
    except ConfigError as error:
        raise WireError(str(error)) from error
    if not 0 < len(request.data) <= MOST_DATA:
        raise WireError(f"data: {len(request.data)} are not between 1 and {MOST_DATA}")
    size = sum(_sparse_numbers(index, datum) for index, datum in enumerate(request.data))
    if size > MOST_NUMBERS:
        raise WireError(
            f"data: sparse tensors of {size} numbers are more than {MOST_NUMBERS}; send fewer data at a time"
        )
    wanted = CLIENT_LOSSES[loss.name].tensors
    data = [_datum(index, datum, wanted) for index, datum in enumerate(request.data)]
    return ForwardBackward(data, loss.name, dict(loss.settings), bool(request.forward_only))


def _settings(request: Any) -> dict[str, float]:
    given = {one.key: float(one.value) for one in request.settings}
    for one in request.v2:
        if one.value.HasField("text"):
            raise WireError(f"loss_fn_config.{one.key} is a text; {request.loss_fn} takes numbers")
        given[one.key] = float(one.value.number)
    return given


def _sparse_numbers(index: int, datum: Any) -> int:
    """How many a datum's sparse tensors have once they are dense."""
    sparse = (one for one in datum.loss_fn_inputs if one.value.HasField("sparse_csr"))
    return sum(math.prod(shape_of(one.value, f"data[{index}].{one.key}")) for one in sparse)


def _datum(index: int, datum: Any, wanted: tuple[str, ...]) -> Datum:
    where = f"data[{index}]"
    tokens = tokens_of(datum.model_input)
    inputs = {one.key: one.value for one in datum.loss_fn_inputs}
    if odd := sorted(set(inputs) - {"target_tokens", *wanted}):
        raise WireError(f"{where}: loss_fn_inputs.{odd[0]} is unknown here; give target_tokens, {', '.join(wanted)}")
    if missing := [name for name in ("target_tokens", *wanted) if name not in inputs and name != "weights"]:
        raise WireError(f"{where}: loss_fn_inputs.{missing[0]} is missing")
    targets = dense(inputs["target_tokens"], f"{where}.target_tokens")
    if not len(tokens) or len(targets) != len(tokens) or not targets.size:
        raise WireError(f"{where}: {len(tokens)} tokens with {len(targets)} target_tokens; give as many, at least one")
    if targets.dtype.kind != "i" or min(tokens.min(), targets.min()) < 0 or targets.max() >= 2**31:
        raise WireError(f"{where}: token ids are whole numbers from 0 on")
    tensors: dict[str, Tensor] = {}
    for name in wanted:
        if name not in inputs:
            continue
        values = dense(inputs[name], f"{where}.{name}").astype(np.float32)
        if values.shape != (targets.shape if name == "weights" else targets.shape[:1]):
            raise WireError(f"{where}: {name} has shape {list(values.shape)}, target_tokens {list(targets.shape)}")
        if not np.isfinite(values).all():
            raise WireError(f"{where}: {name} has a number that is not finite")
        tensors[name] = Tensor.of(values if name != "sequence_ratio_mask" else (values != 0).astype(np.float32))
    if "weights" not in wanted and targets.ndim == 2:
        raise WireError(f"{where}: target_tokens of two dimensions are for cross_entropy")
    count = targets.shape[1] if targets.ndim == 2 else 0
    return Datum(tokens.astype("<i4").tobytes(), targets.astype("<i4").tobytes(), count, **tensors)
