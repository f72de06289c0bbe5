"""Passes of several jobs take turns on one device: a wide one pauses, is charged as it goes, and can be given up."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from motet.algorithms.supervised import Supervised
from motet.config import AdapterConfig
from motet.core.batch import Batch, Sample, Segment
from motet.core.device import Device
from motet.core.tenant_turns import Payer
from motet.model.lora_model import LoraModel
from motet.protocols import Pieces
from motet.runtime.learner import Learner
from motet.runtime.scheduler import FairScheduler
from motet.training.head import HEAD_ROWS
from motet.training.torch_trainer import TorchTrainer
from tests.support import inside
from tests.support import tiny_models as tiny
from tests.support.segments import make_samples
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.tier1

WIDE = 300
"""Targets of a token: 9 tokens of so many are eleven chunks of the head."""


def wide(base: LoraModel, seed: int) -> tuple[Sample, ...]:
    """One sample of many targets."""
    (sample,) = make_samples(((4, 9),), seed=seed)
    numbers = np.random.default_rng(seed)
    targets = numbers.integers(0, base.info.vocab_size, (13, WIDE)).astype(np.int32)
    weights = numbers.random((13, WIDE)).astype(np.float32)
    return (replace(sample, targets=targets, weights=weights),)


def segments(name: str, samples: Sequence[Sample]) -> tuple[Segment, ...]:
    """One for each sample."""
    return tuple(Segment(name, (sample,), Supervised(), 10.0) for sample in samples)


class Watched(TorchTrainer):
    """Says whose piece began, in order."""

    def __init__(self, base: LoraModel) -> None:
        super().__init__(base, slots=4)
        self.pieces: list[str] = []
        self.owners: list[str] = []
        self.device: Device | None = None

    def train_in_pieces(self, batch: Batch) -> Pieces[Any]:
        pieces = super().train_in_pieces(batch)
        while True:
            self.pieces.append("+".join(segment.adapter for segment in batch.segments))
            self.owners.append("" if self.device is None else self.device.job)
            try:
                done = next(pieces)
            except StopIteration as end:
                return end.value
            yield done


def gradient(trainer: TorchTrainer, name: str) -> torch.Tensor:
    """What waits for its step."""
    return inside.arena(trainer, name).gradient.clone()


class Parked(Watched):
    """Bringing in the adapter `small` takes until it may end."""

    def __init__(self, base: LoraModel) -> None:
        super().__init__(base)
        self.comes, self.may = threading.Event(), threading.Event()

    @property
    def parks(self) -> bool:
        return True

    def bring_in(self, names: Sequence[str], beside: Sequence[str] = ()) -> None:
        if list(names) == ["small"] and not beside:
            self.comes.set()
            self.may.wait(PATIENCE)


def company(
    base: LoraModel,
    script: Callable[[Learner, FairScheduler], Coroutine[Any, Any, None]],
    *names: str,
    kind: type[Watched] = Watched,
) -> Watched:
    """Jobs of as many tenants on one device; a turn is one chunk of the head."""
    trainer, device = kind(base), Device()
    scheduler, trainer.device = FairScheduler(8), device
    for name in names:
        trainer.add_adapter(name, AdapterConfig(rank=4), seed=1)
        scheduler.join(name, 1.0, tenant=name)

    async def run() -> None:
        await script(Learner(trainer, device, HEAD_ROWS, scheduler), scheduler)

    try:
        asyncio.run(run())
    finally:
        device.close()
    turns = [set(piece.split("+")) for piece in trainer.pieces]
    assert trainer.owners == [jobs.pop() if len(jobs) == 1 else "" for jobs in turns], "whose turn it is, is known"
    return trainer


def test_a_wide_pass_pauses_for_others_and_changes_no_bit() -> None:
    base = tiny.base("llama")
    big, small = wide(base, 3), make_samples(((3, 5),) * 3, seed=5)
    found: dict[str, Any] = {}
    work: Counter[str] = Counter()

    async def script(learner: Learner, scheduler: FairScheduler) -> None:
        def heard(name: str) -> Callable[[int], None]:
            return lambda n: work.update({name: n})

        async def steps() -> None:
            for one in segments("small", small):
                await learner.train("small", (one,), heard("small"))

        found["big"], _ = await asyncio.gather(learner.train("big", segments("big", big), heard("big")), steps())
        found["had"] = scheduler.standing("big").consumed

    trainer = company(base, script, "big", "small")
    places = [place for place, name in enumerate(trainer.pieces) if name == "small"]
    assert len(places) == 3
    assert places[-1] < len(trainer.pieces) - 3, "the small steps waited for all of the wide pass"
    assert work == {"big": 13 * WIDE, "small": 3 * 8}, "each is charged its tokens times its targets, once"
    assert found["had"] == 13 * WIDE

    alone = TorchTrainer(base, slots=4)
    for name, samples in (("big", big), ("small", small)):
        alone.add_adapter(name, AdapterConfig(rank=4), seed=1)
        trained = [alone.forward_backward(Batch((one,)))[0] for one in segments(name, samples)]
        assert torch.equal(gradient(alone, name), gradient(trainer, name))
        if name == "big":
            np.testing.assert_array_equal(trained[0].logprobs[0], found["big"][0].logprobs[0])
            assert trained[0].stats == found["big"][0].stats


class Underestimated(Watched):
    """Its passes take several turns, though their work fits into one."""

    def train_in_pieces(self, batch: Batch) -> Pieces[Any]:
        for _ in range(3):
            yield HEAD_ROWS
        return (yield from super().train_in_pieces(batch))


def all_end(base: LoraModel, given: Mapping[str, tuple[Segment, ...]], kind: type[Watched] = Watched) -> Watched:
    """Train the segments of several jobs; the first is chosen alone. Fails if some are never trained."""

    async def script(learner: Learner, scheduler: FairScheduler) -> None:
        tasks = set[asyncio.Task[Any]]()
        for name, some in given.items():
            tasks.add(asyncio.create_task(learner.train(name, some), name=name))
            if len(tasks) == 1:
                await until(lambda: learner._turn_of is not None)
        done, left = await asyncio.wait(tasks, timeout=PATIENCE)
        for task in left:
            task.cancel()
        assert not left, f"only {sorted(one.get_name() for one in done)} of {sorted(given)} were trained"

    trainer = company(base, script, *given, kind=kind)
    alone = TorchTrainer(base, slots=4)
    for name, some in given.items():
        alone.add_adapter(name, AdapterConfig(rank=4), seed=1)
        for one in some:
            alone.forward_backward(Batch((one,)))
        assert torch.equal(gradient(alone, name), gradient(trainer, name))
    return trainer


@pytest.mark.parametrize("names", ["ab", "abc", "abcd"])
def test_passes_that_are_longer_than_their_work_are_all_trained(names: str) -> None:
    """A second pass that paused took the place of the first, whose callers waited for ever."""
    given = {name: segments(name, make_samples(((3, 5),), seed=seed)) for seed, name in enumerate(names)}
    all_end(tiny.base("llama"), given, Underestimated)


def test_targets_of_shared_tokens_count_for_each_sample() -> None:
    """Eight samples of one text run once, but their targets are predicted eight times: no pass has two of these."""
    sample = replace(make_samples(((1, 21),), seed=3)[0], loss_mask=np.arange(22) > 0)
    segment = Segment("a", (sample,) * 8, Supervised(), 10.0, share_prefixes=True)
    assert segment.packed_work == 8 * 21
    given = {name: (replace(segment, adapter=name),) for name in "abcd"}
    trainer = all_end(tiny.base("llama"), given)
    assert {name for name in trainer.pieces if "+" in name} == set()


def test_a_pass_has_no_more_of_another_tenants_work_than_of_the_one_that_comes_first() -> None:
    """All of it would fit, and a small job would wait for it."""
    base = tiny.base("llama")
    big, small = make_samples(((3, 5),) * 20, seed=3), make_samples(((3, 5),), seed=5)

    async def script(learner: Learner, scheduler: FairScheduler) -> None:
        scheduler.spend("big", 1000)  # so that the small one comes first
        await asyncio.gather(
            *(learner.train(*one) for one in (("big", segments("big", big)), ("small", segments("small", small))))
        )

    trainer = company(base, script, "big", "small")
    assert sorted(trainer.pieces[0].split("+")) == ["big", "small"]


def test_what_comes_while_servers_wake_up_is_trained_in_the_next_turn() -> None:
    trainer, device = Watched(tiny.base("llama")), Device()
    trainer.add_adapter("job", AdapterConfig(rank=4), seed=1)
    scheduler, turns = FairScheduler(8), list[int]()
    scheduler.join("job", 1.0)
    (segment,) = segments("job", make_samples(((3, 5),), seed=5))

    async def run() -> None:
        @contextlib.asynccontextmanager
        async def alone() -> AsyncIterator[None]:
            before = len(trainer.pieces)
            yield
            turns.append(len(trainer.pieces) - before)
            if len(turns) == 1:
                late.append(asyncio.create_task(learner.train("job", (segment,))))
                await asyncio.sleep(0.05)

        late = list[asyncio.Task[Any]]()
        learner = Learner(trainer, device, HEAD_ROWS, scheduler, alone)
        await learner.train("job", (segment,))
        await until(lambda: bool(late))
        async with asyncio.timeout(PATIENCE):
            await late[0]
        await until(lambda: len(turns) == 2)

    try:
        asyncio.run(run())
    finally:
        device.close()
    assert turns == [1, 1]


def test_what_is_given_up_ends_with_the_piece_under_way_and_is_charged_so_far() -> None:
    base = tiny.base("llama")
    charged: list[int] = []

    async def script(learner: Learner, scheduler: FairScheduler) -> None:
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def heard(work: int) -> None:
            charged.append(work)
            loop.call_soon_threadsafe(begun.set)

        task = asyncio.create_task(learner.train("big", segments("big", wide(base, 3) * 3), heard))
        await begun.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        told = len(charged)
        await learner.train("small", segments("small", make_samples(((3, 5),), seed=5)))
        assert len(charged) == told, "who cancels knows all that was done"

    trainer = company(base, script, "big", "small")
    assert len(trainer.pieces) <= 4, "of the three passes of eleven pieces"
    assert sum(charged) <= 2 * HEAD_ROWS


def test_a_job_that_leaves_while_another_is_brought_in_harms_nobody() -> None:
    """Its pass is paused, and a third job waits behind it, so the pass after the one of `small` is chosen."""
    base = tiny.base("llama")

    async def script(learner: Learner, scheduler: FairScheduler) -> None:
        trainer, loop, begun = learner._trainer, asyncio.get_running_loop(), asyncio.Event()
        assert isinstance(trainer, Parked)

        def heard(_: int) -> None:
            loop.call_soon_threadsafe(begun.set)

        big = asyncio.create_task(learner.train("big", segments("big", wide(base, 3) * 3), heard))
        await begun.wait()
        samples = make_samples(((3, 5),), seed=5)
        work = {"small": samples, "third": wide(base, 4)}
        others = [asyncio.create_task(learner.train(name, segments(name, some))) for name, some in work.items()]
        await until(trainer.comes.is_set)
        big.cancel()
        await asyncio.gather(big, return_exceptions=True)
        scheduler.leave("big")
        trainer.may.set()
        await asyncio.gather(*others)

    company(base, script, "big", "small", "third", kind=Parked)


def test_what_is_cancelled_before_its_turn_is_not_trained_and_harms_nobody() -> None:
    """Its adapter may be gone: calls of nobody need not wait for the tenant's."""
    base = tiny.base("llama")
    done: list[str] = []

    async def script(learner: Learner, scheduler: FairScheduler) -> None:
        device, gate = learner._device, threading.Event()
        samples = make_samples(((3, 5),), seed=5)
        await asyncio.gather(*(learner.train(name, segments(name, samples)) for name in ("gone", "small")))
        blocked = device.submit(gate.wait)
        await until(lambda: not device._calls)  # it has begun
        gone, small = (asyncio.create_task(learner.train(name, segments(name, samples))) for name in ("gone", "small"))
        await asyncio.sleep(0.05)  # both wait in one pass
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        removed = device.submit(lambda: learner._trainer.remove_adapter("gone"))
        removed.add_done_callback(lambda _: done.append("removed"))
        device.turns.charge(1.0, [(Payer(name, name), 1) for name in ("gone", "small")])  # so that they come later
        gate.set()
        blocked.result()
        await small
        done.append("trained")

    company(base, script, "gone", "small")
    assert done == ["removed", "trained"]


def test_a_look_pauses_too_and_gives_the_same_logprobs() -> None:
    base = tiny.base("llama")
    found: list[Any] = []

    async def script(learner: Learner, scheduler: FairScheduler) -> None:
        wanted = learner.score("big", segments("big", wide(base, 3)))
        scored, _ = await asyncio.gather(wanted, learner.train("small", segments("small", make_samples(((3, 5),), 5))))
        found.extend(scored)
        assert scheduler.standing("big").consumed == 13 * WIDE

    company(base, script, "big", "small")
    alone = TorchTrainer(base, slots=4)
    alone.add_adapter("big", AdapterConfig(rank=4), seed=1)
    ((wanted,),) = alone.forward(Batch(segments("big", wide(base, 3))))
    np.testing.assert_array_equal(found[0], wanted)
