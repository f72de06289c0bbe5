"""What a policy is compared with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from motet.core.types import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from motet.runtime.reference import shape_of

pytestmark = pytest.mark.tier1


def test_a_reference_has_experts_if_its_adapter_has(tmp_path: Path) -> None:
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    targets = {"target_modules": ["q_proj"], "target_parameters": [experts, "down_proj"]}
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps({"r": 4, "lora_alpha": 8, **targets}))
    (tmp_path / ADAPTER_WEIGHTS).touch()
    assert shape_of(tmp_path).target_modules == ["q_proj", experts, "experts.down_proj"]
