"""Which blocks a run has."""

from __future__ import annotations

from bench.speed.against_itself import (
    at_once_block,
    busy_block,
    clients_block,
    few_rows_block,
    many_adapters_blocks,
    memory_block,
    shared_block,
    start_block,
)
from bench.speed.against_peers import decode_block, grpo_block, train_block
from bench.speed.goals import read_processor, with_goals
from bench.speed.rows import RANK, Block, Row, Side, at_least, at_most


def cpu_blocks(quick: bool) -> list[Block]:
    """The whole table on a CPU, with the goals of this one."""
    found = [
        decode_block(quick),
        few_rows_block(quick),
        train_block(quick),
        shared_block(),
        grpo_block(quick),
        at_once_block(8, quick),
        at_once_block(32, quick),
        busy_block(),
        memory_block(),
        *many_adapters_blocks(),
        start_block(),
        decode_block(quick, "small"),
        train_block(quick, "small"),
        clients_block(1),
        clients_block(8),
    ]
    return with_goals([block for block in found if block.quick or not quick], read_processor())


def shape_blocks(shape: str) -> list[Block]:
    """Motet alone on a base of random weights: with `--shape`."""
    tiny = shape == "tiny"
    decode = {"prompts": 8, "each": 8, "prompt_tokens": 40, "new_tokens": 8 if tiny else 128, "rank": RANK}
    train = {"samples": 16, "prompt": 64, "response": 64, "adapters": 1, "rank": RANK}
    job = {"groups": 4, "each": 8, "max_tokens": 64, "rank": RANK, "steps": 3}
    if tiny:
        job |= {"groups": 1, "max_tokens": 4, "steps": 2}
    bound = {"8b": at_most(1 / 0.9), "0.5b": at_most(1 / 0.75)}.get(shape)
    single, eight = {**job, "jobs": 1, "after_first": True}, {**job, "jobs": 8}
    decoded, gradients = f"{shape}: decode, 64 rows", f"{shape}: gradients, 16 × (64 + 64) tokens"
    step, at_once = f"{shape}: a step of one GRPO job", f"{shape}: eight jobs at once, for each step of a job"
    in_turn, goal = "Motet --sequential", None if tiny else at_least(4)
    adapters = f"{decoded}: cost of 8 adapters"
    return [
        Block(
            f"decode-{shape}",
            f"8 prompts of 40 tokens, 8 completions of {decode['new_tokens']} tokens each.",
            {
                "8 adapters": Side("motet", "decode", {**decode, "adapters": 8}),
                "none": Side("motet", "decode", {**decode, "adapters": 0}),
            },
            (Row(f"adapters-{shape}", adapters, "Motet without adapters", "cost", "8 adapters", "none", bound),),
            base=shape,
        ),
        Block(
            f"train-{shape}",
            "16 samples of 64 + 64 tokens, one adapter of rank 16: forward and backward pass.",
            {"Motet": Side("motet", "train", train)},
            (Row(f"train-{shape}", gradients, "", "value", "Motet"),),
            base=shape,
        ),
        Block(
            f"jobs-{shape}",
            f"GRPO steps of {job['groups']} × 8 completions of at most {job['max_tokens']} tokens.",
            {
                "one job": Side("motet", "jobs", single),
                "at once": Side("motet", "jobs", eight),
                "in turn": Side("motet", "jobs", {**eight, "sequential": True}, False),
            },
            (
                Row(f"grpo-{shape}", step, "", "value", "one job", unit="s a step"),
                Row(f"at-once-{shape}", at_once, in_turn, "faster", "at once", "in turn", goal, "s a step"),
            ),
            repeats=(1, 3),
            base=shape,
        ),
    ]
