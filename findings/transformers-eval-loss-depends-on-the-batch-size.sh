#!/usr/bin/env bash
# transformers 5.23.0, accelerate 1.15.0, torch 2.13.0 (CPU), Python 3.11 (2026-11-30).
#
# In training, `Trainer` weighs every token of a step alike. One would expect `eval_loss` to be the mean over the held-out
# tokens, whatever `per_device_eval_batch_size` is. It is the mean over batches of each batch's mean: with one row a batch,
# a row of 2 tokens counts as much as one of 60. Other batch sizes, or another order of the rows, give another loss. It
# matters where losses of runs on different machines are compared, for early stopping, and for exp(eval_loss).
# Seen: "eval_loss by batches of 1, 2, 4, 8 rows: 4.94 5.40 6.19 6.19; of all tokens: 6.19".
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv env
env/bin/pip install -q "transformers==5.23.0" "accelerate==1.15.0" "datasets==5.2.0" "torch==2.13.0"
HF_HOME=$place HF_HUB_OFFLINE=1 env/bin/python - <<'PY'
import sys
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, initializer_range=0.2, pad_token_id=0, **sizes))
rows = Dataset.from_dict({"input_ids": [[5 if n > 9 else 9] * n for n in (2, 3, 5, 60, 4, 7, 3, 50)]})
def collate(batch):
    width = max(len(row["input_ids"]) for row in batch)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in batch])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}
def loss(size):
    args = TrainingArguments("out", per_device_eval_batch_size=size, use_cpu=True, report_to=[], disable_tqdm=True)
    trainer = Trainer(model, args, data_collator=collate, eval_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    return f"{trainer.evaluate()['eval_loss']:.2f}"
by_size = [loss(size) for size in (1, 2, 4, 8)]
total = count = 0
for row in rows:
    ids = torch.tensor([row["input_ids"]])
    with torch.no_grad():
        total += model.eval()(ids, labels=ids).loss.item() * (ids.numel() - 1)
    count += ids.numel() - 1
print(f"eval_loss by batches of 1, 2, 4, 8 rows: {' '.join(by_size)}; of all tokens: {total / count:.2f}")
sys.exit(by_size[-1] != f"{total / count:.2f}" or len(set(by_size[:3])) == 1)
PY
