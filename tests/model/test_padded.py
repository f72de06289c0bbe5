"""Rows of a head without a token: never sampled, and left out of every softmax, by sampler and trainer alike."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from motet.config import AdapterConfig, EngineConfig
from motet.core.batch import Batch, Sample, Segment
from motet.core.device import Device
from motet.core.errors import EngineError
from motet.core.token_ids import TokenIds
from motet.core.types import AdapterRef, Chunk, GenerateRequest, IntArray, SamplingParams
from motet.hosts.launch import load
from motet.model.distribution import Distribution
from motet.model.find import SMALL_BASE
from motet.model.lora_model import LoraModel
from motet.rollout.embedded import EmbeddedEngine, SameTensors
from motet.training.torch_trainer import TorchTrainer
from tests.support import inside
from tests.support import tiny_models as tiny
from tests.support.padded import ABSENT, HOLES, ROWS, padded
from tests.support.segments import REINFORCE, gradient

PROMPT: IntArray = np.array([5, 17, 40, 9, 88, 21, 13], np.int32)
NOBODY = AdapterRef("a", 0)
WAYS = [("torch", "float32", True), ("torch", "bfloat16", False), ("native", "bfloat16", True)]


def loaded(place: Path | str, kernels: str, dtype: str) -> LoraModel:
    return load(str(place), EngineConfig.model_validate({"threads": 1, "kernels": kernels, "dtype": dtype}))


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: "-".join(map(str, way)))
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoraModel:
    kernels, dtype, tied = request.param
    return loaded(padded(tmp_path_factory.mktemp("padded") / "base", tied=tied), kernels, dtype)


@pytest.fixture
def engine(base: LoraModel) -> Iterator[EmbeddedEngine]:
    yield from opened(base)


def opened(base: LoraModel) -> Iterator[EmbeddedEngine]:
    device = Device()
    yield EmbeddedEngine(base, device, max_rows=16, kv_tokens=4096, prefill_tokens=256)
    device.close()


def trainer_of(base: LoraModel) -> TorchTrainer:
    trainer = TorchTrainer(base, slots=1)
    trainer.add_adapter("a", AdapterConfig(rank=4, alpha=8), 3)
    arena = inside.arena(trainer, "a")
    arena.set_masters(arena.masters.detach() + 0.02 * torch.randn(arena.layout.size, generator=torch.manual_seed(1)))
    return trainer


async def sampled(
    engine: EmbeddedEngine, trainer: TorchTrainer | None = None, **sampling: Any
) -> list[tuple[list[int], list[float]]]:
    if trainer is not None:
        await SameTensors(engine.install, trainer.weights).publish("a", NOBODY)
    request = GenerateRequest(
        "r",
        "job",
        PROMPT,
        None if trainer is None else NOBODY,
        SamplingParams(max_tokens=24, **sampling),
        tuple(range(8)),
    )
    found: dict[int, Chunk] = {chunk.index: chunk async for chunk in engine.generate(request)}
    assert not any(chunk.error for chunk in found.values())
    return [(found[i].token_ids.tolist(), found[i].logprobs.tolist()) for i in sorted(found)]


def samples_of(rollouts: list[tuple[list[int], list[float]]]) -> tuple[Sample, ...]:
    def sample(tokens: list[int], logprobs: list[float], advantage: float) -> Sample:
        mask = np.arange(len(PROMPT) + len(tokens)) >= len(PROMPT)
        return Sample(
            token_ids=np.concatenate([PROMPT, np.array(tokens, np.int32)]),
            loss_mask=mask,
            logprobs=np.concatenate([np.zeros(len(PROMPT), np.float32), np.array(logprobs, np.float32)]),
            advantages=(mask * advantage).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
        )

    return tuple(sample(*one, (-1.0) ** index) for index, one in enumerate(rollouts))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 2.0, "top_p": 0.9}, {"temperature": 0.0}, {"top_k": 5}])
def test_only_tokens_are_sampled(engine: EmbeddedEngine, sampling: dict[str, Any]) -> None:
    drawn = [token for tokens, _ in asyncio.run(sampled(engine, **sampling)) for token in tokens]
    assert drawn
    assert not ABSENT & set(drawn)


def test_sampler_and_trainer_agree_to_the_bit(base: LoraModel, engine: EmbeddedEngine) -> None:
    trainer = trainer_of(base)
    rollouts = asyncio.run(sampled(engine, trainer))
    batch = Batch((Segment("a", samples_of(rollouts), REINFORCE, 8.0),))
    (trained,) = trainer.forward_backward(batch)
    learned = [some[len(PROMPT) :].tolist() for some in trained.logprobs]
    assert learned == [logprobs for _, logprobs in rollouts]
    assert trained.stats.logprob_gap == 0
    assert 0 < trained.stats.entropy / trained.stats.tokens < np.log(1024)
    assert gradient(trainer, "a").isfinite().all()
    assert gradient(trainer, "a").any()


def test_logprobs_are_of_the_tokens_alone(tmp_path: Path) -> None:
    """As transformers computes them when the softmax leaves the same rows out."""
    place = padded(tmp_path / "base")
    stock = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    with torch.no_grad():
        logits_TV = stock(torch.from_numpy(PROMPT)[None].long()).logits[0, :-1]
    logits_TV[:, sorted(ABSENT)] = -torch.inf
    wanted = logits_TV.log_softmax(-1).gather(-1, torch.from_numpy(PROMPT[1:]).long()[:, None])[:, 0]
    for engine in opened(loaded(place, "torch", "float32")):
        assert np.allclose(asyncio.run(engine.score(PROMPT, None))[1:], wanted, atol=1e-4)
        ids, logprobs = asyncio.run(engine.top_logprobs(PROMPT, None, 20))
        assert not ABSENT & set(ids.ravel().tolist())
        assert np.isfinite(logprobs).all()


def test_a_padded_head_learns_what_the_same_head_without_padding_learns(tmp_path: Path) -> None:
    """Tokens, logprobs and gradients; with the rows left in, even the first token differs."""
    found = []
    for place in (padded(tmp_path / "base", holes=()), SMALL_BASE):
        base = loaded(place, "torch", "float32")
        for engine in opened(base):
            trainer = trainer_of(base)
            rollouts = asyncio.run(sampled(engine, trainer))
            trainer.forward_backward(Batch((Segment("a", samples_of(rollouts), REINFORCE, 8.0),)))
            found.append((rollouts, gradient(trainer, "a")))
    (ours, slopes), (theirs, wanted) = found
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
    assert np.allclose(np.concatenate([one for _, one in ours]), np.concatenate([one for _, one in theirs]), atol=1e-5)
    assert float((slopes - wanted).norm() / wanted.norm()) < 1e-4


def test_a_prompt_with_an_id_without_a_token_is_refused(engine: EmbeddedEngine) -> None:
    for token in (HOLES[0], 1024, 1024 + ROWS, -1):
        request = GenerateRequest("r", "job", np.array([5, token], np.int32), None, SamplingParams(), (1,))
        with pytest.raises(
            EngineError, match=rf"has the token id {token}; those of this base go from 0 to 1023, and 2"
        ):
            engine.refuse(request)


def test_a_base_says_that_its_head_is_padded(base: LoraModel) -> None:
    assert f"{len(ABSENT)} of {1024 + ROWS} rows of its head have no token" in " ".join(base.info.notes)
    assert base.info.exact
    assert frozenset(base.info.without_token) == ABSENT


class Listed:
    """A tokenizer that lists some of its tokens, and names ids that it lacks as it likes."""

    unk_token = "<unk>"

    def __init__(self, names: list[str | None], listed: int) -> None:
        self._names, self._listed = names, listed

    def get_vocab(self) -> dict[str, int]:
        return {str(name): token for token, name in enumerate(self._names[: self._listed]) if name is not None}

    def convert_ids_to_tokens(self, token: int) -> str | None:
        return self._names[token] if token < len(self._names) else self.unk_token


def test_an_id_is_without_a_token_only_where_the_tokenizer_names_none() -> None:
    """Some list two tokens of one name once, some call what they lack unknown, some list nothing."""
    assert TokenIds.of(Listed(["a", None, "b", "a"], 4), 6) == TokenIds(6, frozenset({1, 4, 5}))
    assert TokenIds.of(Listed(["a", "b"], 0), 6) == TokenIds(6)
    assert TokenIds.of(Listed(["a", "b", "c"], 3), 2) == TokenIds(2)  # more tokens than rows


@pytest.mark.parametrize("name", ["gemma2", "granite", "cohere", "llama"])
def test_slopes_through_a_models_own_changes_of_logits_are_finite(name: str) -> None:
    """A soft cap would make a number of −∞, so ids without a token are left out after it."""
    base = tiny.load(name)
    base.revise(without_token=(3, 275))
    del base.changes
    raw_NV = torch.randn(4, 276, generator=torch.manual_seed(0))
    leaf = raw_NV.clone().requires_grad_()
    known = [token for token in range(276) if token not in (3, 275)]
    with torch.enable_grad():
        whole_NV = tiny.base(name).finish_logits(leaf)
        (wanted_NV,) = torch.autograd.grad(whole_NV[:, known].log_softmax(-1)[:, 5].sum(), leaf)
    target_N = torch.full((4,), known[5])
    distribution = Distribution.of(base.finish_logits(raw_NV.clone()), [1.0])
    slope_NV = base.logits_slope(raw_NV, distribution.slope(target_N, 1.0))
    assert torch.allclose(slope_NV, wanted_NV, atol=1e-6)
    assert not slope_NV[:, [3, 275]].any()
