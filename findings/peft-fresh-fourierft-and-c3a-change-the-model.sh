#!/usr/bin/env bash
# peft 0.21.2, transformers 5.23.0, torch 2.13.0 (CPU), Python 3.11 (2026-11-30).
#
# One would expect a fresh adapter to change nothing until it is trained, as LoRA, DoRA, LoKr, LoHa, VeRA, OFT and MiSS do.
# FourierFT and C3A begin with random weights that act: before the first step the model is another one, so a first
# evaluation is not the base's, and a KL penalty against the base is not 0. FourierFT has `init_weights=True` for a start at
# zero.
# Seen: "largest change of a logit: lora 0.0, dora 0.0, lokr 0.0, loha 0.0, vera 0.0, oft 0.0, miss 0.0, fourierft 4.4, c3a
# 0.3; fourierft with init_weights 0.0".
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv env
env/bin/pip install -q "peft==0.21.2" "transformers==5.23.0" "torch==2.13.0"
HF_HOME=$place HF_HUB_OFFLINE=1 env/bin/python - <<'PY'
import peft, torch
from transformers import LlamaConfig, LlamaForCausalLM
tokens = torch.arange(1, 13)[None]
def base():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, initializer_range=0.2, **sizes)).eval()
def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=tokens).logits
wanted = {"target_modules": ["q_proj", "v_proj"]}
kinds = {
    "lora": peft.LoraConfig(r=4, **wanted),
    "dora": peft.LoraConfig(r=4, use_dora=True, **wanted),
    "lokr": peft.LoKrConfig(r=4, **wanted),
    "loha": peft.LoHaConfig(r=4, **wanted),
    "vera": peft.VeraConfig(r=4, **wanted),
    "oft": peft.OFTConfig(oft_block_size=4, **wanted),
    "miss": peft.MissConfig(r=4, **wanted),
    "fourierft": peft.FourierFTConfig(n_frequency=20, **wanted),
    "c3a": peft.C3AConfig(block_size=4, **wanted),
}
def change(config):
    return (logits(peft.get_peft_model(base(), config)) - logits(base())).abs().max().item()
changes = {name: change(config) for name, config in kinds.items()}
zero = change(peft.FourierFTConfig(n_frequency=20, init_weights=True, **wanted))
print("largest change of a logit: " + ", ".join(f"{name} {size:.1f}" for name, size in changes.items()))
print(f"fourierft with init_weights {zero:.1f}")
acting = [name for name, size in changes.items() if size > 0.01]
raise SystemExit(acting != ["fourierft", "c3a"] or zero > 0.01)
PY
