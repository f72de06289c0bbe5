"""Every architecture of docs/bases.md does what the table says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel

from motet.core.batch import Batch
from motet.core.model_info import EXPERTS
from motet.model.lora import AdapterWeights
from motet.model.lora_model import LoraModel
from motet.training.torch_trainer import TorchTrainer
from tests.support import bases
from tests.support import tiny_models as tiny
from tests.support.cases import few
from tests.support.peft_files import close, export, load, peft_logits
from tests.support.segments import make_segment, make_trainer, run_steps, sampler_logprobs

# PEFT 0.21 asks transformers 5.23 for a property by its old name.
EVERY_TIME = (
    "llama",
    "qwen3_wide",
    "gemma3n",
    "opt",
    "mistral3",
    "gpt_oss",
    "qwen3_moe",
    "deepseek_v3",
    "qwen3_5",
    "lfm2",
)
"""One of each kind."""
PROMPTS = (53, 9)
"""Lengths beyond the window of the tiny models and over several blocks, and within one."""


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", few(bases.BASES, *EVERY_TIME))
def test_an_architecture_does_what_the_table_says(name: str, dtype: str, tmp_path: Path) -> None:
    row = bases.row(name, dtype)
    if row.verdict == bases.REFUSED and dtype != "float32":  # it may fail elsewhere first
        assert any(f"| {bases.BASES[name]} | {bases.REFUSED} |" in line for line in bases.written())
        return
    assert str(row) in bases.written(), "make bases"
    if row.verdict == bases.REFUSED:
        return
    base = tiny.base(name, dtype)
    targets: str | list[str] = ["all-linear", EXPERTS] if base.info.experts else "all-linear"
    trainer = make_trainer(base, "ab", targets=targets)
    together = run_steps(trainer, [Batch((make_segment("b"), make_segment("a")))])
    if row.verdict == bases.EXACT:
        assert_rows_keep_to_themselves(base, trainer.weights("a"))
        alone = run_steps(make_trainer(base, "a", targets=targets), [Batch((make_segment("a"),))])
        assert alone["a"] == together["a"]
        assert_trainer_and_sampler_agree(base, trainer)
    assert_peft_computes_the_same(name, base, tmp_path)


def assert_rows_keep_to_themselves(base: LoraModel, weights: AdapterWeights) -> None:
    """Packed, alone and decoded."""
    adapted, plain = (tiny.tokens(length) for length in PROMPTS)
    for first in (weights, None):
        packed = tiny.packed_logits(base, [(first, adapted), (None, plain)])
        assert torch.equal(tiny.packed_logits(base, [(first, adapted)])[0], packed[0])
        assert torch.equal(tiny.packed_logits(base, [(None, plain)])[0], packed[1])
    assert torch.equal(tiny.decoded_logits(base, adapted, prompt=19), packed[0])


def assert_trainer_and_sampler_agree(base: LoraModel, trainer: TorchTrainer) -> None:
    segment = make_segment("b")
    (logprobs,) = trainer.forward(Batch((segment,)))[0]
    expected = sampler_logprobs(base, trainer.weights("b"), segment.samples[0], segment.temperature)
    assert logprobs.tobytes() == expected.tobytes()


def assert_peft_computes_the_same(name: str, base: LoraModel, directory: Path) -> None:
    """What was exported has the same logits there, and comes back with the same bits."""
    attention = sorted({path.rsplit(".", 1)[-1] for path in base.linears if "attn" in path})
    targets = [*(attention if name in bases.MISREAD else ["all-linear"]), *[EXPERTS][: len(base.info.experts)]]
    ids, weights = tiny.tokens(PROMPTS[1]), tiny.adapter(base, targets=targets)
    export(directory, base, weights, targets)
    assert torch.equal(load(directory, base).flat, weights.flat)
    if base.dtype == torch.float32:  # in half precision their products are rounded elsewhere
        peft = PeftModel.from_pretrained(tiny.stock(name), directory)
        assert sum("lora_A" in key for key, _ in peft.named_parameters()) == len(weights.layout.paths)
        ours = tiny.packed_logits(base, [(weights, ids)])[0]
        assert close(ours, peft_logits(peft, ids), 1e-4)
