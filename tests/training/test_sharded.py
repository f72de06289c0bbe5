"""A trainer over several processes gives the bits of one device: masters, moments and logprobs, wherever segments ran."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
import torch
from safetensors.torch import load_file, save_file

from motet.algorithms import Grpo, Reinforce
from motet.config import AdapterConfig, RunConfig
from motet.core.batch import Batch, Segment
from motet.core.errors import AdapterError, BaseModelError, RankGone
from motet.hosts.running import config_of, run_config
from motet.model.peft_io import examine
from motet.process.channel import LONGEST_LINE
from motet.protocols import Trainer
from motet.training.sharded import messages as m
from motet.training.sharded.base import ShardedBase
from motet.training.sharded.group import Connected, RankGroup
from motet.training.sharded.trainer import ShardedTrainer, owner, scatter
from motet.training.torch_trainer import TorchTrainer
from tests.support import tiny_models as tiny
from tests.support.processes import ending
from tests.support.rank_groups import ADAMW, SHAPES, joining, segment, with_wrong_token
from tests.support.segments import branching_samples
from tests.support.waiting import PATIENCE

BATCHES = (
    Batch((segment("a", 0), segment("b", 1), segment("a", 2), segment("c", 3), segment("a", 1), segment("b", 4))),
    Batch((segment("c", 2),)),  # less than there are ranks
    Batch((segment("a", 4), segment("a", 3), segment("a", 0))),
)


@contextlib.contextmanager
def ranks(base: str, dtype: str, shard: int, *, log: Path | None = None, **engine: Any) -> Iterator[RankGroup]:
    group = RankGroup(joining(base, dtype, shard=shard, **engine), log)
    try:
        yield group
    finally:
        group.close()


def add_all(trainer: Trainer, base: str = "") -> None:
    for name, shape in SHAPES.items():
        lfm2 = base == "lfm2" and shape.target_modules != "all-linear"
        chosen = shape.model_copy(update={"target_modules": ["out_proj", "w2"]}) if lfm2 else shape
        trainer.add_adapter(name, chosen, seed=ord(name))


def train(trainer: Trainer, steps: int) -> list[Any]:
    """Everything that a trainer says of some steps."""
    said: list[Any] = []
    for _ in range(steps):
        for batch in BATCHES:
            trained = trainer.forward_backward(batch)
            said += [(one.stats, [logprobs.tobytes() for logprobs in one.logprobs]) for one in trained]
        said += [trainer.optim_step(name, ADAMW) for name in SHAPES]
        for base in (False, True):
            found = trainer.forward(BATCHES[0], base=base)
            said += [logprobs.tobytes() for segment in found for logprobs in segment]
    return said


def files(trainer: Trainer, place: Path) -> dict[str, bytes]:
    """Masters, moments and gradients that wait for a step."""
    for name in SHAPES:
        (place / name).mkdir(parents=True)
        trainer.save_adapter(name, place / name, optimizer=True)
    return {str(path.relative_to(place)): path.read_bytes() for path in sorted(place.rglob("*.*"))}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    """Ranks that tests share: each removes its adapters, and the one that kills a rank comes last."""
    log = tmp_path_factory.mktemp("two") / "ranks.log"
    with ranks(str(tiny.directory("llama")), "float32", 2, log=log) as group:
        yield group


@pytest.fixture(scope="module")
def pair(two: RankGroup) -> tuple[TorchTrainer, ShardedTrainer]:
    return TorchTrainer(tiny.base("llama"), slots=3), ShardedTrainer(two, slots=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "n", "recompute"),
    [
        ("llama", "float32", 2, False),
        pytest.param("qwen3", "bfloat16", 3, True, marks=pytest.mark.soak),
        pytest.param("phi3", "float32", 4, False, marks=pytest.mark.soak),
        pytest.param("qwen3_5", "bfloat16", 2, True, marks=pytest.mark.soak),
        pytest.param("falcon_h1", "float32", 3, False, marks=pytest.mark.soak),
        pytest.param("nemotron_h", "bfloat16", 2, False, marks=pytest.mark.soak),
    ],
)
def test_every_number_of_ranks_gives_the_bits_of_one_device(
    name: str, dtype: str, n: int, recompute: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Tied weights too (phi3), and one layer's width that the ranks do not divide."""
    base = tiny.base(name, dtype)
    with contextlib.ExitStack() as stack:
        if (name, dtype, n, recompute) == ("llama", "float32", 2, False):
            group = request.getfixturevalue("two")
        else:
            group = stack.enter_context(ranks(str(tiny.directory(name)), dtype, n, recompute=recompute))
        one, many = TorchTrainer(base, slots=8), ShardedTrainer(group, slots=8)
        for trainer in (one, many):
            add_all(trainer, name)
        for adapter in SHAPES:  # other tests have the group too
            stack.callback(many.remove_adapter, adapter)
        assert train(many, 1) == train(one, 1)
        for trainer in (one, many):  # saved in mid-step, and loaded into adapters that were elsewhere
            trainer.forward_backward(BATCHES[0])
        saved = files(one, tmp_path / "one")
        assert files(many, tmp_path / "many") == saved
        many.remove_adapter("a")
        many.add_adapter("a", SHAPES["a"], seed=99)
        for adapter in SHAPES:
            many.load_adapter(adapter, tmp_path / "one" / adapter, optimizer=True)
        assert train(many, 1) == train(one, 1)
        assert files(many, tmp_path / "many2") == files(one, tmp_path / "one2") != saved
        whole = sum(weight.numel() * weight.element_size() for weight in base.model.parameters())
        parts = [joined.own_bytes for joined in group.joined]
        assert whole <= sum(parts) < 1.02 * whole
        assert max(parts) < 1.1 * whole / n
        assert {joined.fingerprint for joined in group.joined} == {base.fingerprint()}


def test_what_one_device_refuses_is_refused_in_the_same_words(
    pair: tuple[TorchTrainer, ShardedTrainer], tmp_path: Path
) -> None:
    said: list[list[str]] = []
    for trainer in pair:
        calls = [
            lambda trainer=trainer: trainer.add_adapter("x", AdapterConfig(target_modules="q_prog"), 0),
            lambda trainer=trainer: trainer.forward(BATCHES[0]),
            lambda trainer=trainer: trainer.load_adapter("a", tmp_path, optimizer=True),
            lambda trainer=trainer: trainer.save_adapter("z", tmp_path, optimizer=True),
            lambda trainer=trainer: trainer.optim_step("z", ADAMW),
            lambda trainer=trainer: trainer.add_adapter("a", SHAPES["a"], 0),
            lambda trainer=trainer: trainer.add_adapter("d", SHAPES["a"], 0),
            lambda trainer=trainer: trainer.save_adapter("a", tmp_path / "absent", optimizer=False),
        ]
        words = []
        for place, call in enumerate(calls):
            if place == 2:
                add_all(trainer)
            with pytest.raises((AdapterError, OSError)) as caught:
                call()
            words.append(f"{type(caught.value).__name__} {re.sub(r'tmp[0-9A-Za-z]+', 'tmp', str(caught.value))}")
        said.append(words)
        for name in SHAPES:
            trainer.remove_adapter(name)
    assert said[0] == said[1]


def test_branches_that_share_what_they_read_have_the_bits_of_one_device(
    pair: tuple[TorchTrainer, ShardedTrainer], tmp_path: Path
) -> None:
    """Masters, moments and logprobs; and that they share it does show in the masters."""
    parts = [
        segment(name, 0, samples=branching_samples(prompt, prompt)) for name, prompt in (("a", 11), ("b", 5), ("a", 7))
    ]

    def learned(trainer: Trainer, place: str, share: bool) -> tuple[list[Any], dict[str, bytes]]:
        batch = Batch((*(dataclasses.replace(part, share_prefixes=share) for part in parts), segment("c", 3)))
        add_all(trainer)
        said: list[Any] = []
        for _ in range(2):
            trained = trainer.forward_backward(batch)
            said += [(one.stats, [logprobs.tobytes() for logprobs in one.logprobs]) for one in trained]
            said += [trainer.optim_step(name, ADAMW) for name in SHAPES]
        trainer.forward_backward(batch)
        kept = files(trainer, tmp_path / place)
        for name in SHAPES:
            trainer.remove_adapter(name)
        return said, kept

    one, many, apart = (
        learned(pair[rank], f"{rank}-{share}", share) for rank, share in ((0, True), (1, True), (0, False))
    )
    assert many == one
    assert apart[0][0] == one[0][0]  # before the first step: the logprobs of whole samples
    assert apart[1] != one[1]


def spoilt(what: str) -> Segment:
    if what == "token":
        return with_wrong_token("a")
    return segment("a", 0, loss=Grpo(kl={"coef": 0.1}))  # needs what no sample has


@pytest.mark.parametrize("what", ["token", "loss"])
def test_a_segment_that_fails_on_one_rank_leaves_all_ranks_in_step(
    what: str, pair: tuple[TorchTrainer, ShardedTrainer], tmp_path: Path
) -> None:
    """And adds nothing on the others."""
    for trainer in pair:
        add_all(trainer)
    with pytest.raises(
        RuntimeError,
        match=r"has token 1000000|the base's logprobs",
    ):
        pair[1].forward_backward(Batch((spoilt(what), segment("b", 4))))
    try:
        assert train(pair[1], 1) == train(pair[0], 1)
        assert files(pair[1], tmp_path / "many") == files(pair[0], tmp_path / "one")
    finally:
        for trainer in pair:
            for name in SHAPES:
                trainer.remove_adapter(name)


def test_a_score_that_fails_on_one_rank_leaves_all_ranks_in_step(pair: tuple[TorchTrainer, ShardedTrainer]) -> None:
    trainer = pair[1]
    add_all(trainer)
    try:
        good = segment("a", 0).samples[0]
        strange = dataclasses.replace(good, targets=np.full_like(good.token_ids, 10**6))
        with pytest.raises(RuntimeError, match="out of bounds"):
            trainer.forward(Batch((segment("a", 0, samples=(strange,)), segment("b", 4))))
        assert len(trainer.forward(Batch((segment("a", 0), segment("b", 4))))) == 2
    finally:
        for name in SHAPES:
            trainer.remove_adapter(name)


def test_ranks_take_and_give_messages_of_any_length(two: RankGroup) -> None:
    """Many targets make a long message; one that only some ranks got would leave them out of step."""
    with pytest.raises(OSError, match="name too long") as refused:
        two.ask_all(m.ExamineOnRank("/" + "x" * LONGEST_LINE))
    assert len(str(refused.value.filename)) > LONGEST_LINE
    with pytest.raises(AdapterError, match="/nowhere"):
        two.ask_all(m.ExamineOnRank("/nowhere"))


def test_a_loss_that_has_no_name_is_refused(pair: tuple[TorchTrainer, ShardedTrainer]) -> None:
    class Mine(Reinforce):
        pass

    trainer = pair[1]
    trainer.add_adapter("a", SHAPES["a"], 0)
    with pytest.raises(AdapterError, match=r"name it as `file\.py:Class`"):
        trainer.forward_backward(Batch((segment("a", 0, loss=Mine().model_copy(update={"type": "mine"})),)))
    with pytest.raises(ValueError, match="has no loss"):
        trainer.forward_backward(Batch((segment("a", 0, loss=None),)))
    trainer.remove_adapter("a")


def test_a_rank_looks_at_adapters_where_the_base_is_nowhere_whole(
    pair: tuple[TorchTrainer, ShardedTrainer], tmp_path: Path
) -> None:
    """As a service does with what people upload."""
    one, many = pair
    base = ShardedBase.of(many._group, trust_remote_code=False)
    one.add_adapter("b", SHAPES["b"], 0)
    one.save_adapter("b", tmp_path, optimizer=False)
    one.remove_adapter("b")
    assert base.examine(tmp_path) == examine(tiny.base("llama"), tmp_path)
    with pytest.raises(AdapterError) as alone:
        examine(tiny.base("llama"), tmp_path / "absent")
    with pytest.raises(AdapterError, match=re.escape(str(alone.value))):
        base.examine(tmp_path / "absent")
    weights = load_file(tmp_path / "adapter_model.safetensors")
    name = next(iter(weights))
    save_file({**weights, name: weights[name].to(torch.float8_e4m3fn)}, tmp_path / "adapter_model.safetensors")
    assert base.examine(tmp_path) == examine(tiny.base("llama"), tmp_path)
    number = "9" * 5000
    odd = {f"base_model.model.model.layers.0.mlp.experts.{number}.w1.lora_A.weight": weights[name].clone()}
    save_file({**weights, **odd}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterError):
        base.examine(tmp_path)


def test_a_rank_that_dies_ends_the_group(pair: tuple[TorchTrainer, ShardedTrainer]) -> None:
    trainer = pair[1]
    group = trainer._group
    add_all(trainer)
    told: list[RankGone] = []
    group.watch(told.append)
    os.kill(group.pids[1], signal.SIGKILL)
    with pytest.raises(RankGone, match=r"rank 1 of 2 was killed with SIGKILL"):
        train(trainer, 3)
    with pytest.raises(RankGone):
        trainer.optim_step("a", ADAMW)
    assert len(told) == 1


def test_a_rank_ends_at_once_with_its_parent(tmp_path: Path) -> None:
    """Whatever it does: another process may have the job's directory by then."""
    script = (
        "import os, time; from motet.training.sharded.group import RankGroup; from motet.training.sharded.messages import *\n"
        f"join = Join(*{(str(tiny.directory('llama')), joining('', 'float32').engine)})\n"
        "group = RankGroup(join); pipe = os.path.join(os.environ['PLACE'], 'adapter_config.json')\n"
        "os.mkfifo(pipe); group.ask({0: AddAdapter('a', {'rank': 2}, 0, 0)})\n"
        "group._ranks[0].send(SaveAdapter('a', os.environ['PLACE'], False))\n"
        "print(*group.pids, flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PLACE": str(tmp_path)}
    with ending(subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment)) as parent:
        assert parent.stdout is not None
        rank = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0.5)  # it writes to a file that nobody reads
        assert rank.is_running()
    _, alive = psutil.wait_procs([rank], timeout=PATIENCE)
    for one in alive:
        one.kill()
    assert alive == []


@pytest.mark.parametrize("says", [b"", b"Welcome to a library\n"])
def test_ranks_that_end_before_all_are_known_or_print_end_the_group(says: bytes) -> None:
    pairs, said = [socket.socketpair() for _ in range(32)], list[str]()
    for _, theirs in pairs:
        theirs.sendall(says)
        if not says:
            theirs.close()

    def begin() -> None:
        with pytest.raises(RankGone) as ended:
            RankGroup(joining("", "float32", ranks=32), None, lambda _: [Connected(ours) for ours, _ in pairs])
        said.append(str(ended.value))

    beginning = threading.Thread(target=begin, daemon=True)
    beginning.start()
    beginning.join(PATIENCE)
    assert "disconnected" in str(said)
    for _, theirs in pairs:
        theirs.close()


def test_a_base_that_no_rank_can_load_says_why(tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match="has no config"), ranks(str(tmp_path), "float32", 1):
        pass


# --- placement ----------------------------------------------------------------------------------------------------------


def test_the_longest_segment_is_placed_first() -> None:
    assert scatter([10, 50, 30, 25], [0, 0, 0, 0], 2) == (0, 0, 1, 1)
    assert scatter([7], [2], 3) == (2,)  # where ranks are level, the owner
    assert scatter([], [], 3) == ()


def test_the_rank_with_the_fewest_adapters_owns_the_next() -> None:
    assert owner([], 3) == 0
    assert owner([0, 0, 1], 3) == 2
    assert owner([0, 1, 2], 3) == 0


# --- whole runs ---------------------------------------------------------------------------------------------------------


def job_file(directory: Path, steps: int = 2, **engine: Any) -> RunConfig:
    common = {
        "data": "toy:reverse",
        "reward": "exact",
        "sampling": {"max_tokens": 6},
        "algorithm": {"group_size": 4, "groups_per_step": 2},
        "eval": {"every": 0},
        "checkpoint": {"every": 1},
    }
    jobs = [
        {"name": "one", "steps": steps, "adapter": {"rank": 8, "alpha": 12}, **common},
        {"name": "two", "steps": steps, "adapter": {"rank": 4, "alpha": 12}, **common},
    ]
    return config_of(jobs, "small", {"threads": 1, "samplers": 0, "kernels": "torch", **engine}, "test", directory)


def kept(directory: Path) -> dict[str, bytes]:
    wanted = ("adapter_model.safetensors", "optimizer.safetensors", "metrics.jsonl")
    found = [path for path in sorted(directory.rglob("*")) if path.name in wanted]
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


@pytest.mark.cell("single turn", "shards 2")
@pytest.mark.soak
@pytest.mark.parametrize("engine", [{"shard": 2}, {"ranks": 2, "kernels": "auto"}])
def test_a_run_on_ranks_has_the_bytes_of_one_process(engine: dict[str, Any], tmp_path: Path) -> None:
    assert run_config(job_file(tmp_path / "one", **{**engine, "shard": 1, "ranks": 1})).ok
    assert run_config(job_file(tmp_path / "many", **engine)).ok
    whole = kept(tmp_path / "one")
    assert len(whole) >= 6
    assert kept(tmp_path / "many") == whole


@pytest.mark.soak
def test_a_rank_that_dies_ends_the_run_and_the_next_one_goes_on(tmp_path: Path) -> None:
    assert run_config(job_file(tmp_path / "whole", steps=3)).ok

    def started(host: Any) -> None:
        def kill() -> None:
            while host.jobs[0].progress.step < 2:
                pause.wait(0.01)
            os.kill(host.base.group.pids[1], signal.SIGKILL)

        pause = threading.Event()
        threading.Thread(target=kill).start()

    cut = job_file(tmp_path / "cut", shard=2, steps=3)
    with pytest.raises(RankGone, match="rank 1 of 2"):
        run_config(cut, started=started)
    assert run_config(cut).ok
    assert kept(tmp_path / "cut") == kept(tmp_path / "whole")
