#!/usr/bin/env bash
# peft 0.21.2, transformers 5.23.0, torch 2.13.0 (CPU), Python 3.11 (2026-11-30).
#
# `PeftModel.from_pretrained` loads an adapter for inference: nothing is trainable. One would expect to find it so after
# `with model.disable_adapter():`, which asks the base for something (a reference, a comparison). From then on all of the
# adapter's parameters are trainable: forward passes keep their graphs, and an optimizer made of the parameters with
# `requires_grad` trains an adapter that was to stay as it is, as a teacher or a frozen part.
# Seen: "trainable parameters: loaded 0, inside 0, after 8; grad_fn before False, after True".
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
config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
peft.get_peft_model(base(), config).save_pretrained("saved")
model = peft.PeftModel.from_pretrained(base().requires_grad_(False), "saved")
def trainable():
    return sum(weights.requires_grad for weights in model.parameters())
def graph():
    return model(input_ids=tokens).logits.grad_fn is not None
loaded, before = trainable(), graph()
with model.disable_adapter():
    inside = trainable()
    logits(model)
seen = f"trainable parameters: loaded {loaded}, inside {inside}, after {trainable()}; grad_fn before {before}, after {graph()}"
print(seen)
raise SystemExit(seen != "trainable parameters: loaded 0, inside 0, after 8; grad_fn before False, after True")
PY
