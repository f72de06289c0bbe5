"""A 70B base on 16 cards as a plan: memory, bytes over links, steps an hour, cost: `python -m bench.plan_70b`.

Nothing is measured here. Memory of adapters is that of `motet.hosts.slot_memory`, time is that of `bench.cluster` with
costs that follow from the assumptions, and `docs/capacity.md` has the sum.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from bench.cluster import Costs, Hosts, Jobs, Outcome, simulate
from bench.speed.table import markdown

from motet.algorithms.packing import cut
from motet.hosts.slot_memory import SlotMemory
from motet.training.sharded.trainer import scatter

GB = 10**9
HIDDEN, INNER, LAYERS, KV_WIDTH, VOCABULARY = 8192, 28672, 80, 1024, 128256
"""Llama 3 70B."""
TILE = 256
"""Each segment is padded to a multiple of so many rows."""
JOBS = Jobs(count=1, steps=(20, 20), groups_per_step=8, group_size=8, completion_tokens=(512, 512))


@dataclass(frozen=True)
class Assumptions:
    """What nobody has measured with Motet; a comment becomes the line of the page."""

    ranks: int = 8  # cards that train, a shard of the base on each
    samplers: int = 8  # cards of one vLLM server with tensor parallelism
    card_gb: float = 80.0  # GB of memory of a card
    reserved_gb: float = 6.0  # GB for CUDA, NCCL, graphs and fragments, on each card
    peak_tflops: float = 989.0  # TFLOP/s of bfloat16 products of a card (H100 SXM, data sheet)
    train_utilisation: float = 0.35  # part of the peak that training reaches
    read_gb_per_second: float = 3350.0  # GB/s of memory of a card (data sheet)
    sample_utilisation: float = 0.5  # part of it that decoding reaches, with its exchanges
    link_gb_per_second: float = 300.0  # GB/s that a card receives from the others (NVLink 4: 450 by the data sheet)
    segment_tokens: int = 4224  # tokens of a segment, at most (`micro_batch_tokens`)
    train_tokens: int = 33_792  # tokens of one training pass, of all ranks together (`train_tokens`)
    layers_at_once: int = 2  # gathered layers in memory: one computes, one arrives
    layer_bytes_per_token: int = 460_000  # bytes a token of activations of one layer while its gradient is computed
    logits_tokens: int = 1024  # tokens whose logits are in memory at a time, in float32
    rank: int = 16  # rank of adapters, on all linear layers
    slots: int = 32  # adapters that train at a time
    completions: int = 256  # rows that are sampled at a time (`max_rows`)
    row_seconds: float = 0.00006  # seconds that a further completion adds to a decoded token
    publish_seconds: float = 3.0  # seconds to commit, transfer and load a version
    dollars_per_card_hour: float = 2.5  # dollars an hour for a card


@dataclass(frozen=True)
class Plan:
    """What follows."""

    adapter: int
    """Parameters of an adapter."""
    pass_tokens: int
    """Of the rank that has most, in one training pass."""
    segments: int
    """Of that rank, in one training pass."""
    weights_gb: float
    """Of the base, in bfloat16."""
    parts_gb: dict[str, float]
    """Memory of a rank, part by part."""
    uneven_gb: float
    """Memory of the rank that has most, if completions differ in length."""
    gathered_gb: float
    """What a rank receives for one training pass: weights, and gradients of adapters that it owns."""
    pass_seconds: float
    """Of the products of one training pass."""
    link_seconds: float
    """Of what it receives, which comes while products are computed."""
    outcome: Outcome

    @property
    def rank_gb(self) -> float:
        """Memory of a rank."""
        return sum(self.parts_gb.values())


def busiest(given: Assumptions) -> tuple[int, int]:
    """Segments and tokens of the rank that has most of them in one training pass, cut and spread by the trainer's code."""
    prompt, answer = JOBS.prompt_tokens[0], JOBS.completion_tokens[0]
    shared = ([0] + [prompt] * (JOBS.group_size - 1)) * JOBS.groups_per_step
    step = cut([prompt + answer] * len(shared), given.segment_tokens, shared)
    sizes = [sum(prompt + answer - (shared[place] if place > part.start else 0) for place in part) for part in step]
    sizes = sizes * given.slots
    while sum(sizes) > given.train_tokens:
        sizes.pop()
    ranks = scatter(sizes, [0] * len(sizes), given.ranks)
    tokens = [
        sum(size for size, rank in zip(sizes, ranks, strict=True) if rank == number) for number in range(given.ranks)
    ]
    return max(ranks.count(number) for number in range(given.ranks)), max(tokens)


def plan(given: Assumptions) -> Plan:
    """The plan that follows from these assumptions.

    Raises:
        ValueError: a rank needs more memory than a card has.
    """
    linears = [(HIDDEN, HIDDEN)] * 2 + [(HIDDEN, KV_WIDTH)] * 2 + [(HIDDEN, INNER)] * 3
    layer = 2 * sum(wide * narrow for wide, narrow in linears) / GB
    ends = 2 * 2 * VOCABULARY * HIDDEN / GB  # embeddings and head
    weights = LAYERS * layer + ends
    adapter = LAYERS * given.rank * sum(wide + narrow for wide, narrow in linears)
    slot = SlotMemory.of_size(adapter, version_bytes=2, whole=False)
    owned = -(-given.slots // given.ranks)
    segments, pass_tokens = busiest(given)
    gradient = 2 * adapter / GB  # in the type of the base, by torch's kernels, which shards need
    fixed = {
        "its shard of the base": weights / given.ranks,
        f"{given.layers_at_once} gathered layers, embeddings and head": given.layers_at_once * layer + ends,
        f"{owned} adapters that it owns": owned * slot.trained / GB,
        "the version of every adapter": given.slots * slot.versions / GB,
        "logits": 2 * 4 * given.logits_tokens * VOCABULARY / GB,
        "reserved": given.reserved_gb,
    }

    def under_way(segments: int, tokens: int) -> dict[str, float]:
        rows = tokens + segments * (-(tokens // segments) % TILE)
        return {
            "gradients of segments under way": (segments + 1) * gradient,  # and one that arrives from another rank
            "inputs of all layers (`recompute`)": 2 * rows * HIDDEN * LAYERS / GB,
            "activations of one layer": rows * given.layer_bytes_per_token / GB,
        }

    parts = fixed | under_way(segments, pass_tokens)
    most = 2 * given.train_tokens // (given.ranks + 1)  # of a rank with two segments, the longest being spread first
    uneven = sum(fixed.values()) + sum(under_way(2, most).values())
    if (needed := max(sum(parts.values()), uneven)) > given.card_gb:
        raise ValueError(f"a rank takes {needed:.1f} GB, a card has {given.card_gb:.0f}")
    away = (given.ranks - 1) / given.ranks
    sent = segments * gradient * away  # each goes to the adapter's owner
    gathered = 2 * LAYERS * layer * away + sent  # weights for the forward pass, and once more for the gradients
    # forward, again for `recompute`, and gradients of inputs: three products of two operations a parameter
    flops = 6 * weights / 2 * GB * pass_tokens
    products = flops / (given.peak_tflops * 1e12 * given.train_utilisation)
    links = gathered / given.link_gb_per_second
    costs = Costs(
        token_seconds=weights / given.samplers / (given.read_gb_per_second * given.sample_utilisation),
        row_seconds=given.row_seconds,
        train_tokens_per_second=given.ranks * pass_tokens / max(products, links),
        publish_seconds=given.publish_seconds,
        own_sampler=True,
        price_per_hour=(given.ranks + given.samplers) * given.dollars_per_card_hour,
    )
    hosts = Hosts(count=1, slots=given.slots, rows=given.completions, costs=costs)
    outcome = simulate(hosts, [replace(JOBS, count=given.slots)])
    return Plan(adapter, pass_tokens, segments, weights, parts, uneven, gathered, products, links, outcome)


def written(given: Assumptions) -> str:
    """Write the plan as tables."""
    found = plan(given)
    lines = Path(__file__).read_text().splitlines()
    said = {
        line.split(":")[0].strip(): line.partition("  # ")[2] for line in lines if "  # " in line and line[:4] == "    "
    }
    memory = [(part, f"{size:.1f} GB") for part, size in found.parts_gb.items()]
    memory.append(("**together**", f"**{found.rank_gb:.1f} of {given.card_gb:.0f} GB**"))
    memory.append(("together, if completions differ in length", f"at most {found.uneven_gb:.1f} GB"))
    outcome, cards = found.outcome, given.ranks + given.samplers
    figures = [
        ("base, bfloat16", f"{found.weights_gb:.1f} GB"),
        (f"an adapter of rank {given.rank}", f"{found.adapter / 1e6:.0f} M parameters"),
        ("a rank receives, for a pass", f"{found.gathered_gb:.0f} GB, {found.link_seconds:.1f} s"),
        ("a rank has, in a pass", f"segments: {found.segments}; tokens: {found.pass_tokens:,}"),
        ("products of its part of a pass", f"{found.pass_seconds:.1f} s"),
        ("steps an hour, all jobs", f"{outcome.steps_per_hour:.0f}"),
        ("tokens trained an hour", f"{outcome.tokens_per_hour / 1e6:.1f} M"),
        (f"{given.slots} jobs of 20 steps of 64 completions of 512 tokens", f"{outcome.hours:.1f} hours"),
        (f"cost on {cards} cards", f"${outcome.cost:.0f}, ${outcome.cost / (20 * given.slots):.2f} a step"),
    ]
    assumed = [(said[field.name], f"{getattr(given, field.name):,}") for field in fields(given)]
    return "\n".join(
        [
            "## Memory of a rank\n",
            markdown(("part", "size"), memory),
            "## Time and cost\n",
            markdown(("what", "figure"), figures),
            "## Assumptions\n",
            markdown(("what", "value"), assumed),
        ]
    )


if __name__ == "__main__":
    print(written(Assumptions()))
