"""Processes of Motet load a base without torch's compiler, others with all of transformers, none with installed kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support import tiny_models as tiny

SCRIPT = """
import json, sys
from motet.config import AdapterConfig, EngineConfig
from motet.hosts.launch import load, warm_up
from motet.training.torch_trainer import TorchTrainer

if sys.argv[1] == "of Motet":
    warm_up()  # as a host does
base = load("small", EngineConfig(kernels="auto"))
TorchTrainer(base, slots=1).add_adapter("a", AdapterConfig(rank=4), seed=1)
heavy = [name for name in ("torch._dynamo", "torch.distributed.tensor", "sympy") if name in sys.modules]
import torch, transformers
from transformers.utils.import_utils import create_import_structure_from_path

reads = create_import_structure_from_path.cache_info()

def twice(x):
    return 2 * x

after = {
    "decorator": torch.compiler.disable(twice)(2) == 4 and torch.compiler.disable(twice) is not twice,
    "predicate": transformers.utils.is_torch_distributed_available() == torch.distributed.is_available(),
    "parallel": sys.modules["transformers.distributed.fsdp"].is_torch_distributed_available(),
    "read once": reads.misses == reads.currsize,
    "compiler": callable(torch._dynamo.explain) and "torch._dynamo" in sys.modules,
}
"""
REPORT = """
print(json.dumps([heavy, after]))
"""
MIXERS = ("lfm2", "qwen3_5", "falcon_h1")
"""A base of each mixer."""
KERNELS = """
class Kernel:
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self
    def __call__(self, *args, **kwargs):
        raise RuntimeError("a kernel that nobody asked for")

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Kernel()
"""


def printed(process: str, script: str) -> Any:
    """What a process prints as JSON in its last line."""
    command = [sys.executable, "-c", script, process]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def of_somebody_else(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Of one process, where kernels are installed: what it imported, what works, and what bases with mixers compute."""
    packages = tmp_path_factory.mktemp("packages")
    for package in ("fla", "causal_conv1d", "mamba_ssm"):
        (packages / f"{package}.py").write_text(KERNELS)
    bases = f"""
from motet.model.load import load_base
computed = []
for place in {[str(tiny.directory(name)) for name in MIXERS]!r}:
    computed.append(load_base(place, dtype="float32", device="cpu", block_size={tiny.BLOCK}).fingerprint())
    try:
        transformers.AutoModelForCausalLM.from_pretrained(place)(input_ids=torch.arange(4)[None])
    except RuntimeError as error:
        computed.append(str(error))
print(json.dumps([heavy, after, computed]))
"""
    found: list[Any] = printed(
        "of somebody else", f"import sys\nsys.path.insert(0, {str(packages)!r})\n{SCRIPT}{bases}"
    )
    return found


def test_a_process_of_motet_loads_a_base_without_the_compiler_which_can_be_used_afterwards() -> None:
    heavy, after = printed("of Motet", SCRIPT + REPORT)
    assert heavy == []
    assert after == {**dict.fromkeys(after, True), "parallel": False}


def test_in_a_process_of_somebody_else_transformers_lacks_nothing(of_somebody_else: list[Any]) -> None:
    heavy, after, _ = of_somebody_else
    assert "torch._dynamo" in heavy
    assert after == {**dict.fromkeys(after, True), "read once": False}


def test_kernels_that_are_installed_are_not_used(of_somebody_else: list[Any]) -> None:
    """transformers takes them without a word; neither Motet nor what it is compared with does."""
    asked = "a kernel that nobody asked for"
    assert of_somebody_else[2] == [one for name in MIXERS for one in (tiny.base(name).fingerprint(), asked)]
