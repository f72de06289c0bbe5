"""`motet fits`: which cards a base fits on, and how fast it could be there, from its config.json alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from motet.commands.answers import print_table
from motet.config import EngineConfig, budgets
from motet.core.errors import ConfigError
from motet.core.model_info import ALL_LINEAR
from motet.hosts.slot_memory import SlotMemory
from motet.kernels.cuda.decoder_shape import DecoderShape, kept_bytes, passing_bytes, widths_of_rank
from motet.observe.text import plain_console

if TYPE_CHECKING:
    from motet.model.outline import BaseOutline

GIB = 2**30
_READ, _COMPUTED = 4256 / 4800, 796 / 989
"""Parts of the published bandwidth and bf16 rate that one H200 gave (2026-11-27); taken for the other cards."""
_USABLE, _RESERVED = 0.98, GIB
"""Part of a card's memory that programs get, and bytes of CUDA, kernels and fragments."""
_KEPT_WIDTHS, _KEPT_INNER = 10, 4
"""Vectors of a token that a layer of torch's keeps for its gradient: hidden states, and hidden states inside the MLP."""
_PASSING = 4
"""Vectors of both sizes that the layer under way needs beside them."""
_KEPT_TOKENS = EngineConfig().train_tokens
"""Tokens of the largest pass that computes nothing again, unless memory asks."""
_LOGIT_ROWS = 256
"""Rows whose logits and their slopes are in memory at a time, in float32 and bfloat16."""
_LAYER_SECONDS, _READ_TIMES = 0.00045, 4.7
"""A decoding pass of 64 rows with 8 adapters on an H200 (commit 10c3bf87): seconds of a layer, beside so many times the
seconds of reading its weights. Two shapes were measured, 0.5B and 8B; this is the line through them."""


@dataclass(frozen=True)
class Card:
    """A GPU, by its published figures."""

    name: str
    gib: int
    bandwidth: float
    """GB/s of its memory."""
    rate: float
    """Dense bfloat16 products, TFLOP/s."""
    hopper: bool = False
    """Whether Motet's passes were measured on a card of its kind."""

    @property
    def memory(self) -> int:
        """Bytes for weights, caches, adapters and passes."""
        return int(self.gib * GIB * _USABLE) - _RESERVED

    @property
    def read(self) -> float:
        """Bytes a second that can be reached."""
        return self.bandwidth * 1e9 * _READ

    @property
    def computed(self) -> float:
        """Operations a second that can be reached."""
        return self.rate * 1e12 * _COMPUTED


CARDS = (
    Card("L4 24 GB", 24, 300, 121),
    Card("RTX 4090 24 GB", 24, 1008, 165),
    Card("A100 40 GB", 40, 1555, 312),
    Card("L40S 48 GB", 48, 864, 362),
    Card("A100 80 GB", 80, 2039, 312),
    Card("H100 80 GB", 80, 3350, 989, hopper=True),
    Card("RTX PRO 6000 96 GB", 96, 1792, 504),
    Card("H200 141 GB", 141, 4800, 989, hopper=True),
    Card("B200 180 GB", 180, 8000, 2250),
)


@dataclass(frozen=True)
class Work:
    """What a base is to do."""

    rank: int = 16
    adapters: int = 1
    """Adapters that train at once, at least."""
    rows: int = 64
    """Completions that are decoded at a time."""
    tokens: int = 2048
    """Prompt and answer together, at most."""


@dataclass(frozen=True)
class Fit:
    """A base on a card."""

    way: str
    """How the base is held there."""
    weights: int
    cache: int
    """Bytes of the KV cache, and of states, for `rows`."""
    passing: int
    """Bytes of the largest training pass, beside weights and adapters."""
    slots: int
    """Adapters that fit beside base, caches and a training pass."""
    rows: int
    """Sequences of full length that the KV cache holds at a time."""
    decode: float
    """Tokens a second that reading weights, keys and adapters once a pass would allow, in bfloat16."""
    reached: float
    """The same, as Motet's passes take today; 0 where nothing like it was measured."""
    gradients: float
    """Tokens a second that the products of gradients would allow, in bfloat16."""
    adapters: int
    """Adapters that it has to hold."""

    @property
    def fits(self) -> bool:
        """Whether the base fits so, with its work."""
        return self.slots >= self.adapters


def pass_bytes(base: BaseOutline, tokens: int, *, recompute: bool) -> int:
    """Bytes of a training pass by torch, beside weights and adapters; measured are between half and twice as many."""
    each = 2 * (_KEPT_WIDTHS * base.hidden_size + _KEPT_INNER * base.inner)
    kept = each + 2 * base.layers * base.hidden_size if recompute else base.layers * each
    kept += 2 * _PASSING * (base.hidden_size + base.inner)
    return tokens * kept + _logit_bytes(base)


def own_pass_bytes(base: BaseOutline, tokens: int, rank: int, *, recompute: bool) -> int:
    """The same by Motet's kernels for GPUs, with adapters of this rank."""
    shape, widths = _shape(base), widths_of_rank(rank)
    kept = kept_bytes(shape, widths, recompute=recompute) + passing_bytes(shape, widths, recompute=recompute)
    return tokens * kept + _logit_bytes(base)


def _logit_bytes(base: BaseOutline) -> int:
    return 2 * (4 + 2) * _LOGIT_ROWS * (base.head // base.hidden_size)


def fits(base: BaseOutline, card: Card, work: Work) -> list[Fit]:
    """How a base fits on a card in each way: in bfloat16, with `recompute`, and packed in 8 and 4 bits."""
    size = base.adapter_size(ALL_LINEAR, work.rank)
    decode, reached = _decode(base, card, work)
    gradients, found = card.computed / (4 * base.active + 6 * size), list[Fit]()
    for way, weights, recompute in _ways(base):
        packed = way.endswith("bits")
        own = _by_own_kernels(base) and not packed
        passing = _largest_pass(base, work, own=own, recompute=recompute)
        left = card.memory - weights - passing
        rows = _sequences(base, left, work)
        cache = rows * (work.tokens * base.kv_bytes_per_token + base.state_bytes)
        slots = SlotMemory.of_size(size, 2, whole=own).fitting(1000, 0, max(0, left - cache), None) if rows else 0
        speeds = (decode, 0.0 if packed else reached, gradients)
        found.append(Fit(way, weights, cache, passing, slots, rows, *speeds, work.adapters))
    return found


def fit(base: BaseOutline, card: Card, work: Work) -> Fit | None:
    """The first way in which a base fits on a card; None if there is none."""
    return next((one for one in fits(base, card, work) if one.fits), None)


def _largest_pass(base: BaseOutline, work: Work, *, own: bool, recompute: bool) -> int:
    """Bytes of a pass of `engine.train_tokens`, or of one sample if that takes more."""
    passes = [(_KEPT_TOKENS, recompute), *([(work.tokens, True)] if work.tokens > _KEPT_TOKENS else [])]
    return max(
        own_pass_bytes(base, tokens, work.rank, recompute=again) if own else pass_bytes(base, tokens, recompute=again)
        for tokens, again in passes
    )


def _ways(base: BaseOutline) -> Iterator[tuple[str, int, bool]]:
    yield "bfloat16", base.weight_bytes, False
    yield "bfloat16, recompute", base.weight_bytes, True
    for bits in (8, 4):
        if (weights := base.packed_bytes(bits)) is not None:
            yield f"{bits} bits", weights, True


def _sequences(base: BaseOutline, left: int, work: Work) -> int:
    """Sequences in the KV cache, whose size is what `engine.kv_memory_fraction` of the free memory allows."""
    engine = EngineConfig()
    memory = int(max(0, left) * engine.kv_memory_fraction)
    rows = budgets.rows_with_states(work.rows, base.state_bytes, memory)
    memory -= (rows + 1) * base.state_bytes
    if memory < work.tokens * base.kv_bytes_per_token:
        return 0
    need = budgets.Need(0, work.tokens)
    tokens = budgets.kv_tokens([need], rows, engine.block_size, base.kv_bytes_per_token, memory)
    return min(rows, tokens // work.tokens)


def _decode(base: BaseOutline, card: Card, work: Work) -> tuple[float, float]:
    """Tokens a second of a pass over all rows, half of their tokens read: at most, and as passes take today."""
    weights = base.read_bytes(work.rows)
    keys = work.rows * (work.tokens // 2 * base.kv_bytes_per_token + 2 * base.state_bytes)
    adapters = min(work.adapters, work.rows) * 2 * base.adapter_size(ALL_LINEAR, work.rank)
    least = max((weights + keys + adapters) / card.read, work.rows * 2 * base.active / card.computed)
    if base.experts or base.state_bytes or not card.hopper:
        return work.rows / least, 0.0
    today = base.layers * _LAYER_SECONDS + _READ_TIMES * weights / card.read + (keys + adapters) / card.read
    return work.rows / least, work.rows / max(today, least)


def _by_own_kernels(base: BaseOutline) -> bool:
    """Whether Motet's kernels for GPUs can compute the base, if it is held in bfloat16."""
    return base.covered and not base.experts and not base.state_bytes


def _shape(base: BaseOutline) -> DecoderShape:
    """The sizes of a covered base."""
    return DecoderShape(
        base.layers,
        base.fused_shapes,
        base.kv_bytes_per_token,
        norms_of_added=base.norms_of_added,
    )


def chosen(names: Sequence[str]) -> list[Card]:
    """The cards whose names have one of these words, in any case of letters; all without words.

    Raises:
        ConfigError: no card has a word.
    """
    for name in names:
        if not any(name.lower() in card.name.lower() for card in CARDS):
            known = ", ".join(card.name for card in CARDS)
            raise ConfigError(f"the card {name!r} is unknown; give one of these, or one with as much memory: {known}")
    return [card for card in CARDS if not names or any(name.lower() in card.name.lower() for name in names)]


def show(name: str, work: Work, cards: Sequence[str]) -> int:
    """Print how a base fits on cards; returns 1 if it fits on none of them."""
    wanted = chosen(cards)
    from motet.model.lean_import import import_transformers

    import_transformers()
    from motet.model.outline import outline

    base, console = outline(name), plain_console()
    if work.tokens > base.max_positions:
        raise ConfigError(f"--tokens {work.tokens}: {name} has positions for {base.max_positions} tokens; lower it")
    found = {card.name: fits(base, card, work) for card in wanted}
    size = base.adapter_size(ALL_LINEAR, work.rank)
    trained = SlotMemory.of_size(size, 2, whole=_by_own_kernels(base)).trained
    console.print(
        f"{name}: {base.model_type}, {_count(base.n_parameters)} parameters, {base.weight_bytes / GIB:.1f} GiB in "
        f"bfloat16, {base.kv_bytes_per_token / 1024:.0f} KiB of keys and values a token; an adapter of rank {work.rank} has "
        f"{_count(size)} parameters and takes {trained / GIB:.2f} GiB while it trains, with its gradient and the "
        "optimizer's moments",
        soft_wrap=True,
    )
    memory = Table("card", "base held as", "weights", "KV", "pass", "adapters", f"rows of {work.tokens}")
    speed = Table("card", "decode, limit", "today", "gradients, limit")
    for card, ways in found.items():
        for one in ways:
            memory.add_row(card if one is ways[0] else "", *cells(one), end_section=one is ways[-1])
        if fitting := [one for one in ways if one.fits]:
            speed.add_row(card, *speeds(fitting[0]))
    print_table(console, memory)
    print_table(console, speed)
    console.print(
        f"An estimate: memory in GiB, and tokens a second of the first way that fits, for {work.rows} rows. Limits are what "
        "memory and products allow; `today` is for up to 8 adapters, from two bases on an H200. docs/fits.md says how it "
        "is made.",
        soft_wrap=True,
    )
    return 0 if speed.row_count else 1


def cells(one: Fit) -> tuple[str, ...]:
    """The memory of a base on a card, held in one way."""
    slots = "1,000 or more" if one.slots >= 1000 else str(one.slots)
    room = (slots, str(one.rows)) if one.fits else ("does not fit", "")
    return (one.way, *(f"{size / GIB:.1f}" for size in (one.weights, one.cache, one.passing)), *room)


def speeds(one: Fit) -> tuple[str, ...]:
    """Tokens a second on a card."""
    rates = (one.decode, one.reached, one.gradients)
    return tuple(rounded(rate) if rate else "–" for rate in rates)


def _count(n: int) -> str:
    return f"{n / 1e9:.2f} billion" if n >= 1e9 else f"{n / 1e6:.1f} million"


def rounded(rate: float) -> str:
    """Two digits: an estimate has no more."""
    return f"{float(f'{rate:.2g}'):,.0f}"
