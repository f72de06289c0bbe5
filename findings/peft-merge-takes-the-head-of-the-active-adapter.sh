#!/usr/bin/env bash
# peft 0.21.2, transformers 5.23.0, torch 2.13.0 (CPU), Python 3.11 (2026-11-30).
#
# Two adapters, each with an own output head (`modules_to_save=["lm_head"]`); "b" is active. One would expect
# `merge_and_unload(adapter_names=["a"])` to give the model of "a". The layers are merged from "a", and the head is that of
# the active "b": the result is a model that nobody trained, without a warning. `set_adapter("a")` before merging helps.
# Seen: "merged from a: is a False, is b False; after set_adapter: is a True".
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
def train(model):  # stands for training: moves what is trainable
    with torch.no_grad():
        for weights in model.parameters():
            if weights.requires_grad:
                weights.add_(0.05 * torch.randn_like(weights))
    return logits(model)
def same(first, second):
    return torch.allclose(first, second, atol=1e-3)
def merged(active):
    config = {"r": 4, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}
    model = peft.get_peft_model(base(), peft.LoraConfig(**config), adapter_name="a")
    a = train(model)
    model.add_adapter("b", peft.LoraConfig(**config))
    model.set_adapter("b")
    b = train(model)
    model.set_adapter(active)
    result = logits(model.merge_and_unload(adapter_names=["a"]))
    return same(result, a), same(result, b)
left, set_before = merged("b"), merged("a")
seen = f"merged from a: is a {left[0]}, is b {left[1]}; after set_adapter: is a {set_before[0]}"
print(seen)
raise SystemExit(seen != "merged from a: is a False, is b False; after set_adapter: is a True")
PY
