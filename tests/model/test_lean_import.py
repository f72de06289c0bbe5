"""Processes of Motet load a base without torch's compiler; others get all of transformers."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import json, sys
from motet.config import AdapterConfig, EngineConfig
from motet.hosting.launch import load, warm_up
from motet.training.torch_trainer import TorchTrainer

if sys.argv[1] == "of Motet":
    warm_up()  # as a host does
base = load("small", EngineConfig(kernels="auto"))
TorchTrainer(base, slots=1).add_adapter("a", AdapterConfig(rank=4), seed=1)
heavy = [name for name in ("torch._dynamo", "torch.distributed.tensor", "sympy") if name in sys.modules]
import torch, transformers

def twice(x):
    return 2 * x

after = {
    "decorator": torch.compiler.disable(twice)(2) == 4 and torch.compiler.disable(twice) is not twice,
    "predicate": transformers.utils.is_torch_distributed_available() == torch.distributed.is_available(),
    "parallel": sys.modules["transformers.distributed.fsdp"].is_torch_distributed_available(),
    "compiler": callable(torch._dynamo.explain) and "torch._dynamo" in sys.modules,
}
print(json.dumps([heavy, after]))
"""


def loaded(process: str) -> tuple[list[str], dict[str, bool]]:
    """Which slow packages a process has imported with a base, and what works afterwards."""
    command = [sys.executable, "-c", SCRIPT, process]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    heavy, after = json.loads(done.stdout.splitlines()[-1])
    return heavy, after


def test_a_process_of_motet_loads_a_base_without_the_compiler_which_can_be_used_afterwards() -> None:
    heavy, after = loaded("of Motet")
    assert heavy == []
    assert after == {**dict.fromkeys(after, True), "parallel": False}


def test_in_a_process_of_somebody_else_transformers_lacks_nothing() -> None:
    heavy, after = loaded("of somebody else")
    assert "torch._dynamo" in heavy
    assert after == dict.fromkeys(after, True)
