"""What must hold on a GPU too: isolation, on-policy logprobs, gradients. Run by `make gpu-quarter`.

Where the proof at load finds that rows depend on their company (`info.exact` is False, and a note says so), bits cannot be
asked for; the test then holds the same quantities to a stated tolerance.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from motet.config import EngineConfig
from motet.hosts.launch import load
from motet.kernels.cpu.choice import kernels_of
from motet.model.lora_model import LoraModel
from tests.support.small_runs import fingerprint, job, metrics, run

pytestmark = pytest.mark.gpu

GAP = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest |trainer − sampler| logprob where rows are not exact: a few units in the last place of the logits' type."""


KINDS = {
    ("float32", "auto"): "torch",
    ("bfloat16", "auto"): "triton",
    ("bfloat16", "torch"): "torch",
}
"""Types of the base and `engine.kernels`, and the kernels that they mean."""


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Type and kernels."""
    found: tuple[str, str] = request.param
    return found


@pytest.fixture(scope="module")
def base(kind: tuple[str, str]) -> LoraModel:
    dtype, kernels = kind
    found = load("small", EngineConfig.model_validate({"dtype": dtype, "device": "cuda", "kernels": kernels}))
    print(f"{dtype}, {kernels}: exact={found.info.exact} {found.arithmetic} {found.info.notes}")
    return found


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text("def digits(problem, completion):\n    return sum(letter.isdigit() for letter in completion) / 8\n")
    return path


def is_as_fast_as_it_can_be(base: LoraModel) -> bool:
    """Whether no kernel and no graph was given up, of Motet's own kernels or of torch's."""
    if any(note.startswith("slower than it could be") for note in base.info.notes):
        return False
    return base.kernels is not None or (base.arithmetic.attention == "triton" and base.arithmetic.graphs)


def test_nothing_fell_back(base: LoraModel, kind: tuple[str, str]) -> None:
    """Those kernels answer that shall, they compile here, and they are exact in the type that bases are kept in."""
    kernels = KINDS[kind]
    assert kernels_of(base.info.processor) == kernels, base.info.notes
    assert (base.kernels is None) == (kernels == "torch")
    torchs = [note for note in base.info.notes if note.startswith("torch's kernels compute this base")]
    assert len(torchs) == (kind == ("float32", "auto")), base.info.notes
    assert all("compute bfloat16" in note for note in torchs)
    assert is_as_fast_as_it_can_be(base), base.info.notes
    if base.dtype is torch.bfloat16:
        assert base.info.exact, base.info.notes


def test_isolation(base: LoraModel, tmp_path: Path, rewards: Path) -> None:
    """1: alone or beside jobs of other shapes."""
    mine = job("mine", rewards)
    assert run(base, tmp_path / "alone", [mine]).ok
    company = [job("wide", rewards, adapter={"rank": 16}), mine, job("gspo", rewards, algorithm={"type": "gspo"})]
    assert run(base, tmp_path / "together", company).ok
    assert is_as_fast_as_it_can_be(base), base.info.notes  # nothing went wrong where decoding was recorded
    if base.info.exact:
        assert fingerprint(tmp_path / "alone" / "mine") == fingerprint(tmp_path / "together" / "mine")


def test_on_policy(base: LoraModel, tmp_path: Path, rewards: Path) -> None:
    """2: trainer and sampler agree."""
    assert run(base, tmp_path / "run", [job("one", rewards), job("two", rewards, adapter={"rank": 8})]).ok
    dtype = str(base.dtype).removeprefix("torch.")
    for name in ("one", "two"):
        gaps = [line["logprob_gap"] for line in metrics(tmp_path / "run" / name) if line.get("tokens")]
        assert max(gaps) <= (0.0 if base.info.exact else GAP[dtype])


def test_gradient_equals_the_cpus(base: LoraModel, tmp_path: Path, rewards: Path) -> None:
    """One step on the GPU moves the adapter as one on the CPU does (one token each, B after one step)."""
    if base.dtype is not torch.float32:
        pytest.skip("gpu: compared in float32 only")
    one = job("one", rewards, steps=1, sampling={"max_tokens": 1})
    cpu = load("small", EngineConfig(dtype="float32", device="cpu", threads=1))
    on_gpu, on_cpu = run(base, tmp_path / "gpu", [one]), run(cpu, tmp_path / "cpu", [one])
    theirs = load_file(on_cpu.jobs["one"].adapter / "adapter_model.safetensors")
    ours = load_file(on_gpu.jobs["one"].adapter / "adapter_model.safetensors")
    agree = [
        float((ours[name].sign() == theirs[name].sign()).float().mean())
        for name in theirs
        if name.endswith("lora_B.weight")
    ]
    assert sum(agree) / len(agree) > 0.99
