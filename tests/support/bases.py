"""What becomes of every architecture that people train: the table of docs/bases.md, row by row.

python -m tests.support.bases    # write it anew (make bases)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from motet.core.errors import BaseModelError
from motet.core.model_info import EXPERTS
from motet.kernels.supported_bases import refusal
from motet.model.attention import INSTEAD
from motet.model.lora_model import LoraModel
from tests.support import tiny_models as tiny

PAGE = Path(__file__).resolve().parents[2] / "docs" / "bases.md"
BEGIN, END = "<!-- bases -->", "<!-- end of bases -->"
HEAD = ("| architecture | known from | verdict | kernels | adapters on | remarks |", "|---|---|---|---|---|---|")
EXACT, INEXACT, REFUSED = "exact", "taken, not exact", "refused"
BASES = {
    "llama": "Llama 2 and 3, SmolLM2, Yi, DeepSeek distillates", "qwen2": "Qwen2, Qwen2.5", "qwen3_wide": "Qwen3",
    "gemma": "Gemma", "gemma2": "Gemma 2", "gemma3": "Gemma 3 1B", "gemma3n": "Gemma 3n", "gemma4": "Gemma 4",
    "mistral": "Mistral 7B", "ministral": "Ministral 8B", "ministral3": "Ministral 3", "phi": "Phi-2",
    "phi3": "Phi-3, Phi-4", "granite": "Granite 3", "cohere": "Command R", "cohere2": "Command A, R7B",
    "olmo2": "OLMo 2", "olmo3": "OLMo 3", "smollm3": "SmolLM3", "glm4": "GLM-4", "ernie4_5": "ERNIE 4.5 0.3B",
    "seed_oss": "Seed-OSS", "exaone4": "EXAONE 4", "starcoder2": "StarCoder 2", "hunyuan_v1_dense": "Hunyuan dense",
    "apertus": "Apertus", "arcee": "AFM", "helium": "Helium", "nanochat": "nanochat", "vaultgemma": "VaultGemma",
    "minicpm3": "MiniCPM3", "youtu": "Youtu-LLM", "opt": "OPT", "gpt_neox": "Pythia", "gpt_bigcode": "StarCoder",
    "mistral3": "Ministral 3, Magistral, Mistral Small 3", "gemma3_seeing": "Gemma 3 4B to 27B", "qwen3_vl": "Qwen3-VL",
    "gpt_oss": "gpt-oss", "qwen3_moe": "Qwen3-30B-A3B", "qwen2_moe": "Qwen1.5-MoE", "mixtral": "Mixtral",
    "olmoe": "OLMoE", "granitemoe": "Granite 3 MoE", "glm4_moe": "GLM-4.5 to 4.7", "glm4_moe_lite": "GLM-4.7-Flash",
    "ernie4_5_moe": "ERNIE 4.5 21B", "minimax_m2": "MiniMax-M2", "phimoe": "Phi-3.5-MoE",
    "deepseek_v2": "DeepSeek-V2-Lite", "deepseek_v3": "DeepSeek-V3, Moonlight, Kimi K2", "llama4": "Llama 4",
    "qwen3_next": "Qwen3-Next", "qwen3_5": "Qwen3.5", "granitemoehybrid": "Granite 4-H", "lfm2": "LFM2",
    "falcon_h1": "Falcon-H1", "granite_h": "Granite 4-H without experts", "nemotron_h": "Nemotron-H, Nemotron 3",
    "bamba": "Bamba",
    "olmo_hybrid": "OLMo Hybrid", "mamba": "Mamba", "minimax": "MiniMax-01", "deepseek_v32": "DeepSeek-V3.2",
    "falcon": "Falcon", "bloom": "BLOOM", "gpt2": "GPT-2", "gptj": "GPT-J", "stablelm": "StableLM",
    "nemotron": "Minitron", "diffllama": "DiffLlama", "jetmoe": "JetMoE",
}  # fmt: skip
"""Tiny models with random weights, and under which names people know their architecture."""


MISREAD = ("qwen3_next", "glm4_moe", "glm4_moe_lite", "ernie4_5_moe", "deepseek_v2", "deepseek_v3")
"""Of which `peft` takes gate, up and down of dense layers and shared experts for those of routed experts, by their names."""


@dataclass(frozen=True)
class Row:
    """What the table says of one architecture."""

    name: str
    verdict: str
    kernels: str = ""
    """Which can compute it on a CPU, and why not Motet's own."""
    adapted: tuple[str, ...] = ()
    """Names of the layers that an adapter changes."""
    remarks: str = ""

    def __str__(self) -> str:
        kind = tiny.CONFIGS[self.name][0].removesuffix("Config").removesuffix("Text")
        layers = ", ".join(f"`{name}`" for name in self.adapted)
        return f"| {kind} | {BASES[self.name]} | {self.verdict} | {self.kernels} | {layers} | {self.remarks} |"


def row(name: str, dtype: str) -> Row:
    """Load a base and see; what it says is the same in every dtype."""
    try:
        base = tiny.base(name, dtype)
    except BaseModelError as error:
        reason = str(error).removeprefix(str(tiny.directory(name))).removesuffix(f"; {INSTEAD}")
        return Row(name, REFUSED, remarks=re.sub(r" by \S+ \(largest logit \S+\)", "", reason.lstrip(": ")))
    remarks = [
        note for note in base.info.notes if note != base.info.inexact and "tokenizer.json" not in note
    ]  # of this tiny one
    if name in MISREAD:
        remarks.append(
            "`peft` mistakes an adapter's gate, up and down for those of routed experts: adapt attention only"
        )
    leaves = dict.fromkeys([*(path.rsplit(".", 1)[-1] for path in base.linears), *[EXPERTS][: len(base.info.experts)]])
    verdict = EXACT if base.info.exact else INEXACT
    return Row(name, verdict, _kernels(base), tuple(leaves), "; ".join(remarks))


def _kernels(base: LoraModel) -> str:
    why = refusal(base)
    return f"torch: {why.partition(', which has ')[2] or why}" if why else "native"


def written() -> list[str]:
    """The rows of the page as they stand there."""
    _, _, rest = PAGE.read_text().partition(f"{BEGIN}\n")
    return rest.partition(END)[0].splitlines()[len(HEAD) :]


if __name__ == "__main__":
    head, _, rest = PAGE.read_text().partition(BEGIN)
    table = "\n".join([*HEAD, *(str(row(name, "float32")) for name in BASES)])
    PAGE.write_text(f"{head}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")
