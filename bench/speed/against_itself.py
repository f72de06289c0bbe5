"""Motet against Motet: with and without adapters, at once and in turn, many and few; and what stands alone."""

from __future__ import annotations

from bench.speed.ratios import Goal
from bench.speed.rows import RANK, Block, Row, Side, Unit, at_least, at_most


def few_rows_block(quick: bool) -> Block:
    """Eight rows, each with an adapter of its own."""
    work = {"prompts": 8, "each": 1, "prompt_tokens": 40, "new_tokens": 32 if quick else 64, "rank": RANK}
    names = ("Motet, 8 adapters", "Motet")
    what = "decode, 8 rows: cost of 8 adapters, one each"
    row = Row("adapters-8-rows", what, "Motet without adapters", "cost", *names, goal=at_most(1.35))
    return Block(
        "few-rows",
        f"8 prompts of 40 random tokens, one completion of exactly {work['new_tokens']} tokens each; one adapter for each "
        "row, or none.",
        {name: Side("motet", "decode", {**work, "adapters": count}) for name, count in zip(names, (8, 0), strict=True)},
        (row,),
        repeats=(2, 5),
    )


def shared_block() -> Block:
    """A group's prompt once against once for each sample."""
    work = {"samples": 16, "prompt": 64, "response": 64, "group": 8, "adapters": 1, "rank": RANK}
    what = "gradients, a group's prompt shared (G = 8)"
    row = Row("shared-prompts", what, "Motet, unshared", "faster", "shared", "unshared", at_least(1.6))
    return Block(
        "shared-prompts",
        "The same in 2 groups of 8 samples with one prompt; each group's prompt computed once, or with each sample.",
        {name: Side("motet", "train", {**work, "share": name == "shared"}) for name in ("shared", "unshared")},
        (row,),
        repeats=(1, 5),
    )


def at_once_block(completions: int, quick: bool) -> Block:
    """Eight jobs at once and in turn, in Motet."""
    goal, steps = (at_least(1.5), 1 if quick else 3) if completions == 8 else (at_least(1.2), 2)
    job = {
        "jobs": 8,
        "groups": completions // 8,
        "each": 8,
        "max_tokens": 32 if quick else 64,
        "steps": steps,
        "rank": RANK,
    }
    name, what = (
        f"at-once-{completions}",
        f"eight jobs of {completions} completions a step at once, for each step of a job",
    )
    row = Row(name, what, "Motet --sequential", "faster", "at once", "in turn", goal, "s a step")
    return Block(
        name,
        f"Eight jobs of {completions // 8} × 8 completions of at most {job['max_tokens']} tokens, {steps} of their steps, as "
        "in `grpo`; all at once, or one after another with `--sequential`.",
        {
            "at once": Side("motet", "jobs", job, {**job, "jobs": 1, "max_tokens": 4, "steps": 1}),
            "in turn": Side("motet", "jobs", {**job, "sequential": True}, False),
        },
        (row,),
        repeats=(1, 3 if completions == 8 else 2),
        quick=completions == 8,
    )


def clients_block(count: int) -> Block:
    """Loops that clients own, over the Tinker protocol, against jobs that the service owns."""
    work = {"jobs": count, "groups": 8, "each": 8, "max_tokens": 12, "steps": 8}
    name = "one loop" if count == 1 else "eight loops at once"
    what = f"{name} of the `tinker` package, for each step"
    bound = at_most(1.15 if count == 1 else 1.25)
    row = Row(f"clients-{count}", what, "the same as jobs of the service", "cost", "clients", "jobs", bound, "s a step")
    return Block(
        f"clients-{count}",
        f"`motet serve` on the small base: {count} × 8 steps of GRPO, 8 × 8 completions of at most 12 tokens; as jobs, from "
        "their submission to their end, or as loops of clients, from the making of the model to the last step.",
        {side: Side("service", side, work) for side in ("clients", "jobs")},
        (row,),
        repeats=(1, 3),
        quick=False,
        base="small",
    )


def busy_block() -> Block:
    """How much of the time the device works, over several steps."""
    job = {"jobs": 8, "groups": 4, "each": 8, "max_tokens": 64, "steps": 4, "rank": RANK}
    what = "device busy with eight on-policy jobs"
    row = Row("busy", what, "", "value", "at once", "", at_least(0.9), "%", "busy")
    single = Row("busy-one", "device busy with one of them", "", "value", "one job", "", None, "%", "busy")
    return Block(
        "busy",
        f"Eight jobs of 4 × 8 completions of at most {job['max_tokens']} tokens, {job['steps']} of their steps: the share of "
        "time in which the device sampled or trained, from the moment when all jobs had done a step until the first was "
        "through.",
        {
            name: Side("motet", "jobs", work, {**job, "jobs": 1, "groups": 1, "max_tokens": 4, "steps": 1})
            for name, work in (("at once", job), ("one job", {**job, "jobs": 1}))
        },
        (row, single),
        repeats=(1, 2),
        quick=False,
    )


def memory_block() -> Block:
    """Peak memory of eight jobs and of one, in fresh processes."""
    budgets = {"max_rows": 64, "train_tokens": 1024}
    job = {"each": 8, "max_tokens": 64, "steps": 2, "rank": RANK, "budgets": budgets}
    what = "peak memory of eight jobs, equal rows and tokens"
    row = Row("memory", what, "Motet, one job", "cost", "eight jobs", "one job", at_most(1.2), "MB")
    return Block(
        "memory",
        "The peak of resident memory of a fresh process, reward processes not included: eight jobs of 1 × 8 completions, or "
        f"one job of 8 × 8, of at most {job['max_tokens']} tokens; {job['steps']} of their steps; 64 rows and training "
        "batches of 1,024 tokens in both.",
        {
            "eight jobs": Side("motet", "memory", {**job, "jobs": 8, "groups": 1}, False),
            "one job": Side("motet", "memory", {**job, "jobs": 1, "groups": 8}, False),
        },
        (row,),
        repeats=(1, 2),
        quick=False,
    )


def many_adapters_blocks() -> list[Block]:
    """The same rows divided among 1 and 64 adapters."""
    train = {"samples": 64, "prompt": 32, "response": 32, "update": True, "rank": RANK}
    decode = {"prompts": 64, "each": 1, "prompt_tokens": 16, "new_tokens": 48, "rank": RANK}
    trained = "64 samples of 32 prompt and 32 answer tokens, divided among the adapters; with every adapter's update."
    decoded = "64 prompts of 16 tokens, one completion of 48 tokens each, divided among the adapters."
    names, against = ("64 adapters", "1 adapter"), "Motet, 1 adapter"
    return [
        Block(
            f"many-{work}",
            about,
            {name: Side("motet", work, {**args, "adapters": int(name.split()[0])}) for name in names},
            (Row(f"many-{work}", f"{what}, 64 adapters, equal rows", against, "cost", *names, goal=at_most(bound)),),
            repeats=(1, 3),
            quick=False,
        )
        for work, what, args, bound, about in (
            ("train", "training step", train, 1.15, trained),
            ("decode", "decode", decode, 1.3, decoded),
        )
    ]


def start_block() -> Block:
    """What a person waits for before anything happens, and the publishing of versions."""
    return Block(
        "start",
        "Publishing: from the end of an optimizer step until the version can be sampled from, the slowest of 20. The other "
        "two: a fresh process until it ends, or until a token is sampled; the base is in the local cache (and in the page "
        "cache), and is proved exact when it is loaded.",
        {
            "publish": Side("motet", "publish", {"times": 20, "rank": RANK}),
            "help": Side("motet", "help"),
            "first token": Side("motet", "first-token", warm=False),
        },
        (
            _alone("publish", "publish a version to the embedded engine", 1e-3, "ms"),
            _alone("help", "`motet --help`", 0.5, "s"),
            _alone("first-token", "base from the local cache to the first token", 3.0, "s"),
        ),
        repeats=(1, 5),
    )


def _alone(name: str, what: str, bound: float, unit: Unit) -> Row:
    return Row(name, what, "", "value", name.replace("-", " "), goal=Goal("<", bound), unit=unit)
