"""A base is loaded without torch's compiler, and what is left out can be used afterwards."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import json, sys
from motet.config import EngineConfig
from motet.hosting.launch import load

base = load("small", EngineConfig(kernels="auto"))
heavy = [name for name in ("torch._dynamo", "torch.distributed.tensor", "sympy") if name in sys.modules]
import torch, transformers

def twice(x):
    return 2 * x

after = {
    "decorator": torch.compiler.disable(twice)(2) == 4 and torch.compiler.disable(twice) is not twice,
    "distributed": transformers.utils.is_torch_distributed_available() == torch.distributed.is_available(),
    "compiler": callable(torch._dynamo.explain) and "torch._dynamo" in sys.modules,
}
print(json.dumps([heavy, after]))
"""


def test_a_base_is_loaded_without_the_compiler_which_can_be_used_afterwards() -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    heavy, after = json.loads(done.stdout.splitlines()[-1])
    assert heavy == []
    assert all(after.values()), after
