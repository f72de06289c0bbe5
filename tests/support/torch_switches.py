"""Torch's switches for products on a GPU, which belong to the whole process and can be read without a card."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
MATMUL: Any = torch.backends.cuda.matmul
ON_CPUS: Any = torch.backends.mkldnn


def switches() -> dict[str, object]:
    """As they are; the name of the precision is None where old and new switches disagree."""
    try:
        name = torch.get_float32_matmul_precision()
    except RuntimeError:
        name = None
    return {
        "name": name,
        "gpu": MATMUL.fp32_precision,
        "cpu": ON_CPUS.matmul.fp32_precision,
        "reduced": MATMUL.allow_bf16_reduced_precision_reduction,
        "split": MATMUL.allow_bf16_reduced_precision_reduction_split_k,
        "workspace": os.environ.get(WORKSPACE),
    }


def are_motets() -> bool:
    """Whether sums are in full precision, with one workspace per stream."""
    now = switches()
    return (now["gpu"], now["reduced"], now["workspace"]) == ("ieee", False, ":4096:8")


def _narrow(value: object) -> Callable[[], None]:
    return lambda: setattr(MATMUL, "allow_bf16_reduced_precision_reduction", value)


USERS: dict[str, Callable[[], object]] = {
    "as torch has them": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "the new switch": lambda: setattr(MATMUL, "fp32_precision", "tf32"),
    "no reduced sums": _narrow(False),
    "no split": _narrow((False, False)),
    "a workspace": lambda: os.environ.update({WORKSPACE: ":16:8"}),
}
"""What a user's program may have set."""


@contextmanager
def users(which: str) -> Iterator[dict[str, object]]:
    """What is read after the user set this; later the switches are as before."""
    workspace = os.environ.get(WORKSPACE)
    try:
        USERS[which]()
        yield switches()
    finally:
        torch.set_float32_matmul_precision("highest")
        MATMUL.fp32_precision = ON_CPUS.matmul.fp32_precision = "none"
        MATMUL.allow_bf16_reduced_precision_reduction = (True, True)
        os.environ.pop(WORKSPACE, None)
        if workspace is not None:
            os.environ[WORKSPACE] = workspace
