#!/usr/bin/env bash
# trl 1.16.0, peft 0.21.2, transformers 5.23.0, torch 2.13.0 (CPU), Python 3.11 (2026-11-30).
#
# TRL trains an adapter and takes the model with the adapter switched off as the reference. One would expect policy and
# reference to be equal before the first step: a DPO loss of ln 2 = 0.6931 and margins of 0. peft's
# `init_lora_weights="pissa"` and "olora" move a part of the base's weights into the adapter: switched off, what is left is
# not the base. TRL says nothing. DPO starts with made-up margins, and a KL penalty of GRPO pulls to a model that nobody has
# ever seen.
# Seen: "True: 0.6931, margins 0.0000; pissa: 0.7761, margins -0.1591; switched off, the logits differ by True 0.0, pissa
# 3.3".
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv env
env/bin/pip install -q "trl==1.16.0" "peft==0.21.2" "transformers==5.23.0" "datasets==5.2.0" "torch==2.13.0"
HF_HOME=$place HF_HUB_OFFLINE=1 env/bin/python - <<'PY'
import sys
import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from trl import DPOConfig, DPOTrainer
disable_progress_bars()
letters = ["<pad>", "<eos>", "<bos>", "<unk>", *map(chr, range(32, 127))]
characters = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<unk>"))
characters.pre_tokenizer, characters.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")
rows = Dataset.from_dict({"prompt": ["2+2=", "3+3="], "chosen": ["4", "6"], "rejected": ["5", "7"]})
tokens = torch.arange(4, 16)[None]
def base():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, initializer_range=0.2, pad_token_id=0, eos_token_id=1, **sizes))
def start(init):
    config = LoraConfig(r=4, init_lora_weights=init, target_modules=["q_proj", "v_proj"])
    settings = {"max_steps": 1, "per_device_train_batch_size": 2, "logging_steps": 1, "save_strategy": "no"}
    args = DPOConfig("out", use_cpu=True, report_to=[], disable_tqdm=True, **settings)
    trainer = DPOTrainer(base(), args=args, train_dataset=rows, processing_class=tokenizer, peft_config=config)
    trainer.remove_callback(PrinterCallback)
    with torch.no_grad(), trainer.model.disable_adapter():
        off = (trainer.model.eval()(tokens).logits - base().eval()(tokens).logits).abs().max().item()
    trainer.train()
    first = trainer.state.log_history[0]
    return f"{first['loss']:.4f}, margins {first['rewards/margins']:.4f}", f"{init} {off:.1f}"
usual, pissa = start(True), start("pissa")
seen = f"True: {usual[0]}; pissa: {pissa[0]}; switched off, the logits differ by {usual[1]}, {pissa[1]}"
print(seen)
same = usual[0] == "0.6931, margins 0.0000" and usual[1] == "True 0.0"
sys.exit(not same or pissa[0].startswith("0.6931") or pissa[1] == "pissa 0.0")
PY
