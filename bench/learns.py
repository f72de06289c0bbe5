"""Does it learn what TRL learns? One task on SmolLM2-135M-Instruct, by GRPO with the same settings, rows and tokens.

    make smollm2 && python -m bench.speed.envs trl
    python -m bench.learns --directory /tmp/learns     # the same command goes on after Ctrl-C

The adapters of both are evaluated by `motet eval` on the same held-out rows, which prints a table.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS, SEEDS, GROUPS, EACH, TOKENS, RANK, ALPHA, RATE = 20, 3, 4, 8, 24, 16, 32, 3e-4
DATA = {
    "source": "reasoning-gym:products",
    "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "template": "{question} Give only the answer.",
    "size": 1024,
    "holdout": 64,
}


def job(seed: int) -> dict[str, Any]:
    """Motet's job."""
    return {
        "name": f"seed-{seed}",
        "seed": seed,
        "data": DATA,
        "reward": "numeric",
        "sampling": {"max_tokens": TOKENS},
        "adapter": {"rank": RANK, "alpha": ALPHA},
        "algorithm": {"type": "grpo", "group_size": EACH, "groups_per_step": GROUPS},
        "optimizer": {"lr": RATE},
        "steps": STEPS,
        "eval": {"every": 0},
    }


def by_trl(given: dict[str, Any]) -> None:
    """The same job in TRL, with what PEFT does unless told otherwise: a base in bfloat16 and adapters in float32."""
    torch, trl, peft, transformers = map(importlib.import_module, ("torch", "trl", "peft", "transformers"))
    torch.set_num_threads(1)
    base = transformers.AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.bfloat16)
    optimizer, size = given["optimizer"], EACH
    config = trl.GRPOConfig(
        output_dir=given["out"] + ".trainer",
        seed=given["seed"],
        use_cpu=True,
        bf16=False,  # the base is bfloat16 already; this flag would add autocast
        per_device_train_batch_size=size,
        gradient_accumulation_steps=GROUPS * EACH // size,
        num_generations=EACH,
        max_completion_length=TOKENS,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        loss_type="dapo",
        scale_rewards="group",
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        adam_beta1=optimizer["betas"][0],
        adam_beta2=optimizer["betas"][1],
        adam_epsilon=optimizer["eps"],
        weight_decay=optimizer["weight_decay"],
        max_grad_norm=optimizer["clip_norm"],
        max_steps=STEPS,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=base,
        reward_funcs=right,
        args=config,
        train_dataset=importlib.import_module("datasets").Dataset.from_list(given["rows"]),
        peft_config=peft.LoraConfig(
            r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    trainer.train()
    trainer.save_model(given["out"])
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    (Path(given["out"]) / "rewards.json").write_text(json.dumps(rewards))


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 where the last number of a completion is the answer, as `numeric` says of whole numbers."""
    import re

    texts = (completion[-1]["content"] for completion in completions)
    last = ([*re.findall(r"(?<![\w.)])-?\d+|\d+", text.replace(",", ""))][-1:] for text in texts)
    return [float(bool(number) and int(number[0]) == int(wanted)) for number, wanted in zip(last, answer, strict=True)]


def trained_by_trl(directory: Path, seed: int, model: Path) -> Path:
    """The adapter of one seed; what is there is kept."""
    from motet.config import DataConfig
    from motet.core.batch import AdamW
    from motet.data.dataset import load_dataset

    out = directory / f"trl-{seed}"
    if (out / "rewards.json").exists():
        return out
    rows = [
        {"prompt": [{"role": "user", "content": problem.messages[-1].content}], "answer": problem.answer}
        for problem in load_dataset(DataConfig.model_validate(DATA)).train
    ]
    fields = ("betas", "eps", "weight_decay", "clip_norm")
    work = {
        "model": str(model),
        "out": str(out),
        "seed": seed,
        "rows": rows,
        "optimizer": {name: getattr(AdamW, name) for name in fields},
    }
    asked = directory / f"trl-{seed}.json"
    asked.write_text(json.dumps(work))
    python = Path(os.environ.get("MOTET_BENCH_ENVS", ROOT / ".envs")) / "trl" / "bin" / "python"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRL_TELEMETRY": "0", "PYTHONPATH": str(ROOT)}
    subprocess.run([python, "-m", "bench.learns", "--trl", asked], cwd=ROOT, env=environment, check=True)
    return out


def main() -> None:
    """Train by both, and evaluate all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("runs/learns"), help="where everything is kept")
    parser.add_argument("--trl", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.trl:
        by_trl(json.loads(given.trl.read_text()))
        return
    from motet.model.find import find_base

    given.directory.mkdir(parents=True, exist_ok=True)
    seconds, jobs = [time.monotonic()], given.directory / "jobs.yaml"
    jobs.write_text(json.dumps({"base": "smollm2", "jobs": [job(seed) for seed in range(SEEDS)]}))
    motet = [sys.executable, "-m", "motet"]
    subprocess.run([*motet, "run", jobs, "--run", given.directory / "motet"], check=True)
    seconds.append(time.monotonic())
    theirs = [trained_by_trl(given.directory, seed, Path(find_base("smollm2")[0])) for seed in range(SEEDS)]
    seconds.append(time.monotonic())
    models = [f"seed-{seed}@latest" for seed in range(SEEDS)]
    where = ("--set", f"run={given.directory / 'motet'}")
    subprocess.run([*motet, "eval", jobs, *models, *theirs, "--samples", "8", *where], check=True)
    rewards = [json.loads((out / "rewards.json").read_text()) for out in theirs]
    print("TRL, mean reward of the last five steps:", [round(fmean(line[-5:]), 3) for line in rewards])
    print("seconds of Motet (all at once) and TRL (in turn):", [round(b - a) for a, b in itertools.pairwise(seconds)])


if __name__ == "__main__":
    main()
