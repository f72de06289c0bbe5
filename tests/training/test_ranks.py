"""One job over several processes: any number of copies of the base, whole or in shards, gives the bits of one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet.algorithms.client import ClientLoss, datum
from motet.algorithms.critic import ValueLoss
from motet.config import AdapterConfig, EngineConfig
from motet.core.batch import Batch, Segment
from motet.kernels.supported_bases import load_as_configured
from motet.protocols import Trainer
from motet.training.sharded.group import RankGroup
from motet.training.sharded.trainer import ShardedTrainer
from motet.training.torch_trainer import TorchTrainer
from tests.support import native_calls
from tests.support import tiny_models as tiny
from tests.support.quantised_files import write_mxfp4, write_nf4
from tests.support.rank_groups import ADAMW, SHAPES, joining, segment, with_wrong_token
from tests.support.segments import make_samples

NAMES = (*SHAPES, "d", "values")


def values() -> Segment:
    """Returns and old values such that some are clipped and some are not."""
    samples = tuple(
        dataclasses.replace(one, logprobs=(one.advantages * 0.1).astype(np.float32))
        for one in make_samples([(5, 30), (40, 9)], seed=5)
    )
    return Segment("values", samples, ValueLoss(0.2), 7.0)


def client(name: str, *lengths: int) -> Segment:
    """What a client of the Tinker protocol sends."""
    tokens = [tiny.tokens(length, seed=length).numpy() for length in lengths]
    samples = tuple(datum(one[:-1], one[1:], weights=np.linspace(0, 1, len(one) - 1)) for one in tokens)
    return Segment(name, samples, ClientLoss.of("cross_entropy"), 1.0, by_sample=True)


BATCHES = (
    Batch(
        (
            segment("a", 0),
            segment("b", 1),
            values(),
            segment("a", 2),
            segment("c", 3),
            segment("a", 1),
            client("c", 12, 30, 5),
        )
    ),
    Batch((segment("c", 2),)),  # less than there are ranks
    Batch((values(), segment("a", 4), values())),
    Batch((client("d", 40, 3), client("d", 9, 9, 17), client("d", 25))),
)


def shape_of(name: str, *, experts: bool) -> AdapterConfig:
    targets = ["all-linear", "experts"] if experts and name != "b" else "all-linear"
    return SHAPES.get(name, AdapterConfig(rank=4, alpha=5.0)).model_copy(update={"target_modules": targets})


def learned(trainer: Trainer, place: Path, *, experts: bool, steps: int = 2) -> tuple[list[Any], dict[str, bytes]]:
    """Everything that a trainer says of some steps, and what it saves in mid-step: masters, heads, moments, gradients."""
    for name in NAMES:
        trainer.add_adapter(name, shape_of(name, experts=experts), seed=ord(name[0]), head=name == "values")
    said: list[Any] = []
    for _ in range(steps):
        for batch in BATCHES:
            trained = trainer.forward_backward(batch)
            said += [(one.stats, [logprobs.tobytes() for logprobs in one.logprobs]) for one in trained]
        said += [trainer.optim_step(name, ADAMW) for name in NAMES]
        for base in (False, True):
            said += [one.tobytes() for found in trainer.forward(BATCHES[0], base=base) for one in found]
    trainer.forward_backward(BATCHES[0])
    for name in NAMES:
        (place / name).mkdir(parents=True)
        trainer.save_adapter(name, place / name, optimizer=True)
    return said, {str(path.relative_to(place)): path.read_bytes() for path in sorted(place.rglob("*.*"))}


def stored(kind: str, place: Path) -> str:
    place.mkdir()
    if kind == "nf4":
        write_nf4(place)
    elif kind == "mxfp4":
        write_mxfp4(place)
    else:
        return str(tiny.directory(kind))
    return str(place)


@pytest.mark.slow
@pytest.mark.cell("critic", "shards 2", soak=True)
@pytest.mark.parametrize(
    ("kind", "dtype", "engine"),
    [
        ("llama", "float32", {"ranks": 2, "kernels": "native"}),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (
                ("llama", "bfloat16", {"ranks": 4, "kernels": "native-dpbf16"}),
                ("llama", "bfloat16", {"ranks": 4, "shard": 2}),
                ("qwen3_moe", "float32", {"ranks": 4, "shard": 2, "recompute": True}),
                ("gpt_oss", "bfloat16", {"shard": 3}),
                ("qwen3_next_moe", "float32", {"shard": 2}),
                ("falcon_h1", "bfloat16", {"ranks": 2}),
                ("nf4", "bfloat16", {"ranks": 2, "base_format": "packed"}),
                ("mxfp4", "bfloat16", {"ranks": 4, "shard": 2, "base_format": "packed"}),
                ("llama", "float32", {"shard": 2, "train_tokens": 64, "micro_batch_tokens": 64}),
                ("llama", "float32", {"shard": 2, "recompute": True, "offload": ".", "resident": 1, "parking": "."}),
            )
        ),
    ],
)
def test_copies_and_shards_give_the_bits_of_one_process(
    kind: str, dtype: str, engine: dict[str, Any], tmp_path: Path
) -> None:
    """With critics, clients' losses, and adapters on experts where there are any."""
    if "native" in engine.get("kernels", ""):
        native_calls.directory()
    base = stored(kind, tmp_path / "base")
    places = {name: str(tmp_path) for name, value in engine.items() if value == "."}
    join = joining(base, dtype, **{**engine, **places})
    whole = load_as_configured(base, join.config.model_copy(update={"ranks": 1, "shard": 1}))
    group = RankGroup(join)
    try:
        one, many = TorchTrainer(whole, slots=8), ShardedTrainer(group, slots=8)
        experts = bool(whole.info.experts)
        assert experts or kind not in ("qwen3_moe", "gpt_oss", "qwen3_next_moe")
        shared = any("computes them for the rows of all ranks" in note for note in group.joined[0].facts["notes"])
        assert shared == (experts and join.config.shard > 1 and kind != "mxfp4")
        alone = learned(one, tmp_path / "one", experts=experts)
        assert learned(many, tmp_path / "many", experts=experts) == alone
        with pytest.raises(RuntimeError, match="has token 1000000"):  # all ranks stay in step
            many.forward_backward(Batch((with_wrong_token("c"), segment("a", 0))))
        many.remove_adapter("values")
        many.add_adapter("values", shape_of("values", experts=experts), seed=9, head=True)
        many.load_adapter("values", tmp_path / "one" / "values", optimizer=True)
        for trainer in (one, many):
            trainer.optim_step("values", ADAMW)
        found, wanted = (trainer.forward(Batch((values(),))) for trainer in (many, one))
        assert [own.tobytes() for own in found[0]] == [own.tobytes() for own in wanted[0]]
        assert {joined.fingerprint for joined in group.joined} == {whole.fingerprint()}
    finally:
        group.close()


def test_ranks_are_a_multiple_of_shards() -> None:
    assert EngineConfig(shard=2).n_ranks == 2
    assert EngineConfig(shard=2, ranks=4).n_ranks == 4
