"""Motet against vLLM, PEFT and TRL."""

from __future__ import annotations

from bench.speed.rows import RANK, Block, Row, Side, at_least, at_most

TRL = "TRL GRPO + PEFT, all bf16, micro-batches of 8"
PEFT = "PEFT as users get it: bf16 base, fp32 adapters"
PEFT_BF16 = "PEFT, all bf16"
VLLM_LORA = "vLLM with 4 adapters, prompts cached"


def on(base: str) -> tuple[str, str]:
    """What is put after the names of programs and rows, and after the words for the work, for this base."""
    return ("", "") if base == "smollm2" else (f":{base}", f", {base} base")


def decode_block(quick: bool, base: str = "smollm2") -> Block:
    """64 rows: without adapters, with eight, and vLLM."""
    mark, words = on(base)
    vllm = f"vLLM, {'eager' if quick else 'compiled'}, prompts cached"
    work = {"prompts": 8, "each": 8, "prompt_tokens": 40, "new_tokens": 32 if quick else 64, "rank": RANK}
    none, eight, four = ({**work, "adapters": count} for count in (0, 8, 4))
    ours, theirs = "Motet, 8 adapters", "vLLM, 4 adapters"
    alone, cost = "Motet without adapters", f"decode, 64 rows: cost of 8 adapters{words}"
    bound = at_most(1.1) if base == "smollm2" else None
    return Block(
        f"decode{mark}",
        f"8 prompts of 40 random tokens, 8 completions of exactly {work['new_tokens']} tokens each, temperature 1, from "
        "request to last token; both answer with the logprob of each token, which training needs. Adapters have rank 16 on "
        "all linear layers; prompt i is answered by adapter i modulo their number. vLLM shares each prompt's KV blocks among "
        "its completions, as Motet does; the cache is emptied between repeats.",
        {
            "Motet": Side(f"motet{mark}", "decode", none),
            ours: Side(f"motet{mark}", "decode", eight),
            "vLLM": Side(f"vllm{mark}", "decode", none, {**none, "new_tokens": 2}),
            theirs: Side(f"vllm-lora{mark}", "decode", four, {**four, "new_tokens": 2}),
        },
        (
            Row(f"decode{mark}", f"decode, 64 rows, no adapters{words}", vllm, "faster", "Motet", "vLLM"),
            Row(f"decode-adapters{mark}", f"decode, 64 rows, 8 adapters{words}", VLLM_LORA, "faster", ours, theirs),
            Row(f"adapters-64-rows{mark}", cost, alone, "cost", ours, "Motet", bound),
        ),
        repeats=(1, 5 if base == "smollm2" else 3),
        quick=base == "smollm2",
        base=base,
    )


def train_block(quick: bool, base: str = "smollm2") -> Block:
    """Forward and backward pass against PEFT."""
    mark, words = on(base)
    work = {"samples": 16, "prompt": 64, "response": 64, "adapters": 1, "rank": RANK}
    peft = {**work, "micro": [8] if quick else [16, 8, 4]}
    goal = at_least(1.2) if base == "smollm2" else None
    what = f"gradients, 16 × (64 prompt + 64 answer) tokens{words}"
    return Block(
        f"train{mark}",
        "16 samples of 64 prompt and 64 answer tokens, random; a policy-gradient loss on the answers, one adapter of rank "
        "16 on all linear layers; forward and backward pass, without the optimizer's step. Both compute logits of answer "
        "tokens only. PEFT: sdpa attention, no padding, "
        f"{'micro-batches of 8' if quick else 'the fastest of micro-batches of 16, 8 and 4'}.",
        {
            "Motet": Side(f"motet{mark}", "train", work),
            "PEFT": Side(f"peft{mark}", "train", peft),
            "PEFT, bf16": Side(f"peft-bf16{mark}", "train", peft),
        },
        (
            Row(f"train{mark}", what, PEFT, "faster", "Motet", "PEFT"),
            Row(f"train-bf16{mark}", what, PEFT_BF16, "faster", "Motet", "PEFT, bf16", goal),
        ),
        repeats=(1, 5),
        quick=base == "smollm2",
        base=base,
    )


def grpo_block(quick: bool) -> Block:
    """Steps of GRPO jobs against TRL's."""
    job = {"groups": 4, "each": 8, "max_tokens": 32 if quick else 64, "rank": RANK}
    single = {**job, "jobs": 1, "steps": 2 if quick else 3, "after_first": True}
    eight = {**job, "jobs": 8, "steps": 1 if quick else 2}
    warm = {"max_tokens": 4, "steps": 1, "after_first": False}
    what, in_turn = "eight GRPO jobs at once, for each step of a job", f"{TRL}; eight runs in turn"
    return Block(
        "grpo",
        f"A step: 4 prompts (questions for long stories), 8 completions of at most {job['max_tokens']} tokens each, a "
        "reward that differs within every group, one update; rank 16, on-policy, no KL term, no evaluation, no checkpoint "
        "before the end. One job and TRL: steps after the first. Eight jobs: from the first sampled token to the end of the "
        "last step; eight TRL runs in turn are eight times the step of one, their loading left out.",
        {
            "Motet, one job": Side("motet", "jobs", single, {**single, **warm}),
            "Motet, eight jobs": Side("motet", "jobs", eight, False),
            "TRL": Side("trl", "jobs", {**job, "steps": 1}),
        },
        (
            Row("grpo", "a step of one GRPO job", TRL, "faster", "Motet, one job", "TRL", unit="s a step"),
            Row("grpo-eight", what, in_turn, "faster", "Motet, eight jobs", "TRL", unit="s a step"),
        ),
        repeats=(1, 3),
    )
