"""Layers that keep states: stock within tolerance, their own bits in any company, at any cut, and in any slot."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.falcon_h1 import modeling_falcon_h1 as mamba
from transformers.models.qwen3_5 import modeling_qwen3_5 as delta

from motet.model.attention import Prefix, Span
from motet.model.kv_cache import KVCache
from motet.model.lora import NoAdapters
from motet.model.mixers.functions import MixerFunctions
from motet.model.mixers.stretches import KEPT, packed_stretches
from motet.model.state_cache import StateCache
from tests.support import inside
from tests.support import tiny_models as tiny
from tests.support.cases import few
from tests.support.small_runs import fingerprint, job, metrics, run
from tests.support.tiny_models import assert_equals_stock

CPU = torch.device("cpu")
LENGTHS = (1, 3, 63, 64, 65, 130)
"""Around the chunks of the stock mixers, and beyond what the backward pass keeps a state for."""
FIRST = ("lfm2", "qwen3_5", "falcon_h1")
"""One of each mixer."""
T, CHANNELS, HEADS, GROUPS, KEYS, VALUES = sum(LENGTHS), 64, 4, 2, 16, 24


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows(name: str) -> list[Tensor]:
    """What a mixer's function takes of each row, [1, T, ...], at the sizes that models have."""
    if name == "convolution":
        return [random(1, T, CHANNELS)]
    if name == "delta rule":
        gates = [-random(1, T, HEADS, seed=4).abs(), random(1, T, HEADS, seed=5).sigmoid()]
        return [
            random(1, T, GROUPS, KEYS),
            random(1, T, GROUPS, KEYS, seed=1),
            random(1, T, HEADS, VALUES, seed=2),
            *gates,
        ]
    return [
        random(1, T, HEADS, VALUES), random(1, T, HEADS, seed=1), random(1, T, GROUPS, KEYS, seed=2),
        random(1, T, GROUPS, KEYS, seed=3),
    ]  # fmt: skip


def mix(name: str, functions: Any, rows: Sequence[Tensor], **more: Any) -> Tensor:
    """Motet's functions or transformers' on such rows, as the mixers call them: [1, T, ...]."""
    if name == "convolution":
        weight, bias = random(CHANNELS, 4, seed=8), random(CHANNELS, seed=9)
        output: Tensor = functions["causal_conv1d_fn"](rows[0].transpose(1, 2), weight, bias, activation="silu", **more)
        return output.transpose(1, 2)
    if name == "delta rule":
        query, key, value, decay, beta = rows
        mixed, _ = functions["torch_chunk_gated_delta_rule"](
            query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True, **more
        )
        return mixed  # type: ignore[no-any-return]
    inputs, steps, b, c = rows
    gates = {"D": random(HEADS, seed=7), "dt_bias": random(HEADS, seed=8), "dt_softplus": True, "dt_limit": (0.01, 4.0)}
    a = -random(HEADS, seed=6).exp()
    return functions["mamba2_chunk_scan"](inputs, steps, a, b, c, chunk_size=64, **gates, **more)  # type: ignore[no-any-return]


STOCK = {
    name: inspect.unwrap(getattr(module, name))
    for module, name in (
        (delta, "causal_conv1d_fn"),
        (delta, "torch_chunk_gated_delta_rule"),
        (mamba, "mamba2_chunk_scan"),
    )
}
OURS = MixerFunctions(0, "a mixer").by_name
MIXERS = ("convolution", "delta rule", "scan")


def packed(lengths: Sequence[int], prefixes: Sequence[Prefix | None] = ()) -> dict[str, Any]:
    return {"attention_pass": tiny.base("qwen3_5").attention.packed(lengths, prefixes)}


def gradients(function: Callable[[list[Tensor]], Tensor], inputs: list[Tensor], slope: Tensor) -> list[Tensor]:
    """What comes out, and the gradient of every input."""
    leaves = [one.clone().requires_grad_() for one in inputs]
    output = function(leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, slope.view_as(output))]


def pieces(tensors: list[Tensor]) -> list[list[Tensor]]:
    """By sequence."""
    return [list(each) for each in zip(*(one.split(LENGTHS, dim=1) for one in tensors), strict=True)]


@pytest.mark.parametrize("name", MIXERS)
def test_values_and_gradients_are_those_of_stock(name: str) -> None:
    """Packed together here, each alone there; the backward pass begins again from kept states."""
    inputs, slope = rows(name), torch.randn_like(mix(name, OURS, rows(name), **packed(LENGTHS)))
    assert max(LENGTHS) > 2 * KEPT
    ours = pieces(gradients(lambda leaves: mix(name, OURS, leaves, **packed(LENGTHS)), inputs, slope))
    for own, mine, gain in zip(pieces(inputs), ours, slope.split(LENGTHS, dim=1), strict=True):
        for one, other in zip(mine, gradients(lambda leaves: mix(name, STOCK, leaves), own, gain), strict=True):
            assert float((one - other).abs().max()) <= 2e-5 * float(other.abs().max())


@pytest.mark.parametrize("name", MIXERS)
def test_a_sequence_has_its_own_bits_beside_a_nan(name: str) -> None:
    """Values and gradients alone, in company, and beside a sequence whose numbers have overflowed."""
    inputs, slope = rows(name), torch.randn_like(mix(name, OURS, rows(name), **packed(LENGTHS)))
    whole = pieces(gradients(lambda leaves: mix(name, OURS, leaves, **packed(LENGTHS)), inputs, slope))
    spoilt = [one.clone() for one in inputs]
    for one in spoilt:
        one[:, sum(LENGTHS[:2]) : sum(LENGTHS[:3])] = float("nan")
    beside = pieces(gradients(lambda leaves: mix(name, OURS, leaves, **packed(LENGTHS)), spoilt, slope))
    for place, (own, gain) in enumerate(zip(pieces(inputs), slope.split(LENGTHS, dim=1), strict=True)):
        length = LENGTHS[place]
        alone = gradients(lambda leaves, n=length: mix(name, OURS, leaves, **packed([n])), own, gain)  # type: ignore[misc]
        assert all(torch.equal(one, other) for one, other in zip(alone, whole[place], strict=True))
        if place != 2:
            assert all(torch.equal(one, other) for one, other in zip(alone, beside[place], strict=True))
    assert beside[2][0].isnan().any()


@pytest.mark.parametrize("name", MIXERS)
def test_what_follows_a_shared_prompt_has_the_bits_of_the_whole(name: str) -> None:
    """Two prompts of one sequence, and one that ends where its sequence does."""
    inputs, prompts = rows(name), (40, 65, 130)
    prefixes = [None] * 6 + [Prefix(sum(LENGTHS[:5]), prompt) for prompt in prompts]
    tails = [[one[:, -9:] for one in rows(name)]] * len(prompts)
    together = [torch.cat([one, *(tail[place] for tail in tails)], dim=1) for place, one in enumerate(inputs)]
    shared = mix(name, OURS, together, **packed([*LENGTHS, 9, 9, 9], prefixes))
    for place, prompt in enumerate(prompts):
        start = sum(LENGTHS[:5])
        whole = [torch.cat([one[:, start : start + prompt], one[:, -9:]], dim=1) for one in inputs]
        own = mix(name, OURS, whole, **packed([prompt + 9]))
        assert torch.equal(shared[:, T + 9 * place : T + 9 * place + 9], own[:, prompt:])


@pytest.mark.parametrize("name", MIXERS)
def test_what_follows_a_prefix_of_several_sequences_has_the_bits_of_the_whole(name: str) -> None:
    """The second goes on from the first, the third from the second, the fourth from where that still read the first."""
    inputs = rows(name)
    own, cuts = (40, 20, 9, 7), (33, 45, 20)
    prefixes = [None, Prefix(0, 33), Prefix(40, 12, ((0, 33),)), Prefix(0, 20)]
    together = [one[:, : sum(own)] for one in inputs]
    shared = mix(name, OURS, together, **packed(list(own), prefixes)).split(list(own), dim=1)
    paths = [list(range(40))]
    for place, cut in enumerate(cuts, 1):
        paths.append([*paths[-1][:cut], *range(sum(own[:place]), sum(own[: place + 1]))])
        whole = mix(name, OURS, [one[:, paths[-1]] for one in inputs], **packed([len(paths[-1])]))
        assert torch.equal(shared[place], whole[:, cut:])


def test_a_prompt_that_nobody_brought_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the prefix that ends.*earlier sequences"):
        packed_stretches([4, 3], CPU, [None, Prefix(2, 2)])


# --- whole bases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", few(tiny.HYBRID, *FIRST))
def test_stock_logits_at_lengths_around_its_chunks(name: str) -> None:
    assert_equals_stock(name, tiny.base(name), LENGTHS)


@pytest.mark.parametrize("dtype", few(["float32", "bfloat16"], "float32"))
@pytest.mark.parametrize("name", FIRST)
@torch.no_grad()
def test_a_prompt_may_be_cut_anywhere(name: str, dtype: str) -> None:
    """Beside a sequence that is decoded meanwhile, in slots that held NaN."""
    base, ids, other = tiny.base(name, dtype), tiny.tokens(21), tiny.tokens(22, seed=1)
    whole, beside = (tiny.packed_logits(base, [(None, each)])[0] for each in (ids, other))
    cache = KVCache(4, tiny.BLOCK, CPU)
    for cut in range(1, 21):
        slots = [cache.states.take(), cache.states.take()]
        blocks = [cache.take(2), cache.take(2)]
        found = []
        for start, stop in ((0, cut), (cut, 21)):
            spans = [
                Span(start, stop - start, blocks[0], slots[0]),
                Span(cut + bool(start) - 1, 1, blocks[1], slots[1]),
            ]
            if not start:
                spans[1] = Span(0, cut, blocks[1], slots[1])
            parts = [(ids, start, stop), (other, spans[1].start, spans[1].start + spans[1].length)]
            tokens = base.pad(torch.cat([each[first:last] for each, first, last in parts]))
            positions = base.pad(torch.cat([torch.arange(first, last) for _, first, last in parts]))
            with base.routed(NoAdapters()):
                logits = base.logits(base.hidden(tokens, positions, base.attention.cached(spans, cache)))
            found.append(logits[: stop - start])
            assert torch.equal(logits[stop - start :][: spans[1].length], beside[parts[1][1] : parts[1][2]])
        assert torch.equal(torch.cat(found), whole)
        for pool in inside.state_pools(cache):
            pool[slots] = float("nan")
        for slot, own in zip(slots, blocks, strict=True):
            cache.states.give_back(slot)
            cache.give_back(own)


@pytest.mark.parametrize("dtype", few(["float32", "bfloat16"], "float32"))
@pytest.mark.parametrize("name", FIRST)
def test_a_job_samples_and_trains_with_the_same_bits_alone_and_in_company(
    name: str, dtype: str, tmp_path: Path
) -> None:
    base = tiny.base(name, dtype)
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def letters(problem, completion):\n    return len(set(completion)) / 8\n")
    fields = {"reward": f"{rewards}:letters", "steps": 2}
    mine = job("mine", rewards, **fields)
    company = [job("wide", rewards, **fields, adapter={"rank": 16}, sampling={"max_tokens": 19}), mine]
    assert run(base, tmp_path / "alone", [mine]).ok
    assert run(base, tmp_path / "together", company).ok
    assert fingerprint(tmp_path / "alone" / "mine") == fingerprint(tmp_path / "together" / "mine")
    trained = [line for line in metrics(tmp_path / "together" / "mine") if line.get("tokens")]
    assert len(trained) == 2
    assert {line["logprob_gap"] for line in trained} == {0.0}


def test_layers_that_peft_loads_nothing_for_get_no_adapter() -> None:
    info = tiny.base("falcon_h1").info
    assert not [path for path in info.linears if path.endswith(".out_proj")]
    assert [path for path in info.linears if path.endswith(".mamba.in_proj")]
    assert "PEFT loads none for them: out_proj of the mixers" in info.notes[0]
    assert [path for path in tiny.base("granite_h").info.linears if path.endswith(".mamba.out_proj")]


# --- slots ------------------------------------------------------------------------------------------------------------


def test_slots_are_zeroed_copied_and_counted() -> None:
    states = StateCache(2, CPU)
    first = states.take()
    index = torch.tensor([first])
    assert not states.read(0, "recurrent", index, (2, 3)).any()
    states.write(0, "recurrent", index, torch.full((1, 2, 3), float("nan")))
    second = states.copy(first)
    assert states.read(0, "recurrent", torch.tensor([second]), (2, 3)).isnan().all()
    assert states.bytes_per_slot == 24
    with pytest.raises(ValueError, match=r"a slot for states.*for, all 2 are taken"):
        states.take()
    states.give_back(second)
    states.give_back(states.no_slot)
    assert states.n_free == 1
    again = states.take()
    assert again == second
    assert not states.read(0, "recurrent", torch.tensor([again]), (2, 3)).any()
    assert states.read(0, "recurrent", index, (2, 3)).isnan().all(), "another's stay"


def test_a_sequence_without_a_slot_is_refused() -> None:
    base, cache = tiny.base("lfm2"), KVCache(1, tiny.BLOCK, CPU)
    with pytest.raises(ValueError, match=r"a span of a base.*states needs a slot"):
        base.attention.cached([Span(0, 4, cache.take(1))], cache)
