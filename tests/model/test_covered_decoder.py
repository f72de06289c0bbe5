"""What Motet's own kernels read of a transformers decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from motet.model.covered_decoder import norm_weight
from tests.support import tiny_models as tiny


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_factors_of_a_norm_are_read_where_the_norm_is(name: str) -> None:
    """A norm on another device than the host's."""
    norm: Any = tiny.load(name).decoder.norm
    elsewhere = torch.device("meta")
    assert norm_weight(norm.to(elsewhere)).device == elsewhere
