"""One rank of several that train by the kernels for GPUs; without a GPU in Triton's interpreter. Run as a module.

python -m tests.support.card_ranks RANK RANKS MEETING
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

from torch import Tensor, distributed

import tests.support.triton_on_cpu  # noqa: F401
from motet.algorithms.critic import ValueLoss
from motet.core.batch import Batch
from motet.training.sharded.rank_trainer import RankTrainer
from motet.training.sharded.trainer import scatter
from motet.training.torch_trainer import TorchTrainer
from tests.support import cuda_bases, inside
from tests.support.rank_groups import ADAMW, SHAPES
from tests.support.segments import REINFORCE, make_samples, make_segment

NAMES = "ac"
CRITIC = "a"
"""The one with a value head."""
PIECES = (
    ("c", ((2, 3), (1, 1))), ("a", ((3, 9),)), ("c", ((7, 11), (2, 2))), ("c", ((1, 6),)), ("a", ((1, 1), (1, 2))),
)  # fmt: skip
"""Segments of two adapters. With 2 ranks and with 4, sums of several units are sent: a single one is an fp32 number."""


def batch() -> Batch:
    """Adapters have several segments, which ranks share."""
    losses = {name: ValueLoss(0.2) if name == CRITIC else REINFORCE for name in NAMES}
    each = [
        (make_segment(name, losses[name]), make_samples(lengths, seed=place))
        for place, (name, lengths) in enumerate(PIECES)
    ]
    return Batch(tuple(replace(segment, samples=samples) for segment, samples in each))


def learned(trainer: TorchTrainer, name: str) -> list[object]:
    """Digests of an adapter's masters and of the sums that wait for a step, with their bounds."""
    arena = inside.arena(trainer, name)
    assert arena.sums is not None
    return [name, digest(arena.masters.detach()), digest(arena.sums.flat), int(arena.sums.largest), arena.sums.n_units]


def digest(numbers: Tensor) -> str:
    return sha256(numbers.cpu().numpy().tobytes()).hexdigest()


def main(words: Sequence[str]) -> None:
    """Prints what each adapter that it owns has learned of two batches, with a step between."""
    rank, n_ranks = map(int, words[:2])
    base = cuda_bases.base("llama_long")  # before there is a group, in which one rank alone would write its files
    store = distributed.FileStore(words[2], n_ranks)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=n_ranks)
    owners = {name: place % n_ranks for place, name in enumerate(NAMES)}
    owned = TorchTrainer(base, slots=8)
    trainer = RankTrainer(base, owned)
    for name in NAMES:
        trainer.add_adapter(name, SHAPES[name], ord(name), owners[name], head=name == CRITIC)
    whole = batch()
    ranks = scatter([one.n_tokens for one in whole.segments], [owners[one.adapter] for one in whole.segments], n_ranks)
    route = [(one.adapter, own, 0) for one, own in zip(whole.segments, ranks, strict=True)]
    places = [place for place, own in enumerate(ranks) if own == rank]
    for update in range(2):
        trainer.train(Batch(tuple(whole.segments[place] for place in places)), places, route, whole.n_tokens)
        for name in NAMES if update == 0 else "":
            trainer.step(name, ADAMW)
    for name in NAMES:
        if owners[name] == rank:
            print(json.dumps(learned(owned, name)))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
