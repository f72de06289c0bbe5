"""What is kept of episodes between their turns changes no bit, gives way to all else, and goes with the episode."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.chat.template import Chat
from motet.config import EngineConfig
from motet.config.engine import ClusterConfig
from motet.core.device import Device
from motet.core.types import AdapterRef, Chunk, FinishReason, GenerateRequest, SamplingParams
from motet.hosts.launch import load
from motet.hosts.running import run_config
from motet.model.kv_cache import KVCache
from motet.model.lora import AdapterWeights
from motet.rollout.decoder import Decoder
from motet.rollout.embedded import EmbeddedEngine
from motet.rollout.sequences import Prompt, SampledSequence
from motet.runtime.generation import Generation
from motet.runtime.versions import Versions
from tests.support import inside
from tests.support import tiny_models as tiny
from tests.support.cases import few
from tests.support.ray_nodes import cluster_of
from tests.support.run_decoder import assert_all_is_back, collected_late, decoders
from tests.support.small_runs import config, fingerprint, run

NAMES = ("first", "second")
BLOCK = 8
ROOMY = 1 << 30
CPU = torch.device("cpu")
BASES = [("llama", "float32"), ("gemma3", "bfloat16"), ("qwen3_5", "bfloat16"), ("falcon_h1", "float32")]
"""Full attention, a sliding window, and two that keep states."""
Outcome = list[tuple[list[int], bytes]]


@functools.cache
def weights(name: str, dtype: str) -> AdapterWeights:
    return tiny.adapter(tiny.base(name, dtype), rank=4, seed=3)


@dataclass(frozen=True)
class Turn:
    """The next call of an episode: what it goes on from, and what is said then."""

    episode: int
    says: int
    """Tokens that are new."""
    forgets: int = 0
    """Tokens at the end of the history that are left out."""
    answers: int = 5
    seeds: tuple[int, ...] = (1,)


class Stage:
    """A decoder on which episodes are played; their histories go on from what was sampled."""

    def __init__(
        self,
        base: tuple[str, str],
        n_blocks: int = 200,
        kept: int = 100,
        rows: int = 8,
        prefill: int = 64,
        host: int = 0,
    ):
        cache = KVCache(n_blocks, BLOCK, CPU, slots=rows + 1)
        self.decoder = Decoder(
            tiny.base(*base), cache, max_rows=rows, prefill_tokens=prefill, kept_blocks=kept, host_bytes=host
        )
        self.histories: dict[int, np.ndarray[Any, Any]] = {}
        self.weights, self.version = weights(*base), 1
        self._asked = 0

    def ask(self, turn: Turn) -> tuple[Turn, list[Chunk]]:
        """Queue a turn."""
        self._asked += 1
        history = self.histories.get(turn.episode, np.zeros(0, np.int32))
        said = tiny.tokens(turn.says, seed=100 * turn.episode + self._asked).numpy().astype(np.int32)
        ids = np.concatenate([history[: max(0, len(history) - turn.forgets)], said])
        request = GenerateRequest(
            f"r{self._asked}", "job", ids, AdapterRef("a", self.version), SamplingParams(max_tokens=turn.answers),
            turn.seeds, episodes=(f"e{turn.episode}",) * len(turn.seeds),
        )  # fmt: skip
        chunks: list[Any] = []
        prompt = Prompt(request, self.weights, chunks.append)
        prompt.waiting = [SampledSequence(prompt, index, key) for index, key in enumerate(turn.seeds)]
        self.decoder.add(prompt)
        self.histories[turn.episode] = ids
        return turn, chunks

    def play(self, *rounds: list[Turn]) -> Outcome:
        """Rounds one after another, the turns of a round together; tokens and bits of the logprobs of each completion."""
        found: Outcome = []
        for turns in rounds:
            asked = [self.ask(turn) for turn in turns]
            for _ in range(500):
                self.decoder.tick()
                if self.decoder.idle:
                    break
            assert self.decoder.idle, "the decoder makes progress"
            for turn, chunks in asked:
                assert all(chunk.finish_reason is FinishReason.LENGTH for chunk in chunks), [c.error for c in chunks]
                found += [
                    (one.token_ids.tolist(), one.logprobs.tobytes()) for one in sorted(chunks, key=lambda c: c.index)
                ]
                first = next(chunk for chunk in chunks if chunk.index == 0)
                self.histories[turn.episode] = np.concatenate([self.histories[turn.episode], first.token_ids])
        return found

    def end(self) -> None:
        """The episodes end, and everything is back."""
        self.decoder.abort({f"e{episode}" for episode in self.histories})
        assert_all_is_back(self.decoder)


GAME = [
    [Turn(0, 21, seeds=(1, 2)), Turn(1, 17)],
    [Turn(0, 3), Turn(1, 9)],
    [Turn(0, 8), Turn(0, 5, forgets=0), Turn(1, 2, forgets=20)],
    [Turn(0, 1), Turn(1, 16)],
]
"""Two episodes; one has two completions at once and then two branches, the other rewrites its history."""


@pytest.mark.parametrize(("name", "dtype"), few(BASES, BASES[1], BASES[2]))
def test_turns_have_the_bits_of_a_prefill_of_everything(name, dtype):
    base = name, dtype
    without, kept = Stage(base, kept=0), Stage(base)
    assert kept.play(*GAME) == without.play(*GAME)
    assert len(without.decoder.kept) == 0
    computed, all_of_it = kept.decoder.prefilled_tokens, without.decoder.prefilled_tokens
    assert computed < (0.6 if base[0] in ("llama", "gemma3") else 0.8) * all_of_it, "the new tokens alone"
    without.end()
    kept.end()


def test_a_turn_reads_what_is_new_alone():
    """The token that was sampled last was never read, and what was said since."""
    stage = Stage(BASES[0])
    stage.play([Turn(0, 21)])
    before = stage.decoder.prefilled_tokens
    stage.play([Turn(0, 6)])
    assert stage.decoder.prefilled_tokens - before == 1 + 6


TURNS = st.builds(
    Turn,
    episode=st.integers(0, 2),
    says=st.integers(1, 20),
    forgets=st.integers(0, 24),
    answers=st.integers(1, 7),
    seeds=st.sampled_from([(1,), (1, 2)]),
)


@pytest.mark.parametrize("games", few((6, 30), 6))
def test_in_a_small_cache_what_is_kept_gives_way_and_no_bit_changes(games):
    @settings(max_examples=games)
    @given(
        st.lists(st.lists(TURNS, min_size=1, max_size=3), max_size=5),
        st.integers(18, 26),
        st.sampled_from(BASES),
        st.sampled_from([0, 50_000, ROOMY]),
    )
    def play(rounds, n_blocks, base, host):
        whole, small = Stage(base, kept=0), Stage(base, n_blocks, kept=n_blocks, rows=3, host=host)
        while rounds and sum(turn.says + turn.answers for turns in rounds for turn in turns) > n_blocks * BLOCK:
            rounds = rounds[:-1]  # no sequence is longer than the cache
        assert small.play(*rounds) == whole.play(*rounds)
        small.end()

    play()


@pytest.mark.parametrize("base", [BASES[0], BASES[3]])
def test_nothing_waits_and_nothing_is_preempted_for_what_is_kept(base):
    """Eight blocks are kept, and then a sequence wants all ten, and all slots are wanted."""
    stage, without = Stage(base, 10, 10, rows=3), Stage(base, 10, 0, rows=3)
    first = [Turn(0, 27), Turn(1, 27)]
    assert stage.play(first) == without.play(first)
    assert stage.decoder.cache.n_free == 2
    then = [Turn(2, 70, answers=10)], [Turn(3, 4, seeds=(1, 2, 3))]
    assert stage.play(*then) == without.play(*then)
    assert (stage.decoder.rows.preemptions, without.decoder.rows.preemptions) == (0, 0)
    stage.end()


def test_a_sequence_that_grows_takes_what_is_kept_before_it_preempts():
    stage = Stage(BASES[0], 12, 12)
    stage.play([Turn(0, 27)])
    stage.play([Turn(2, 22, answers=14), Turn(3, 22, answers=14)])
    assert stage.decoder.rows.preemptions == 0
    assert [one.episode for one in inside.kept_sequences(stage.decoder)] == ["e2", "e3"]
    stage.end()


def test_the_least_recently_used_goes_first_and_the_bound_holds():
    stage = Stage(BASES[0], kept=12)
    stage.play([Turn(0, 18)], [Turn(1, 18)], [Turn(2, 18)], [Turn(0, 1, forgets=8, answers=1)], [Turn(3, 18)])
    episodes = [one.episode for one in inside.kept_sequences(stage.decoder)]
    assert episodes == ["e2", "e0", "e0", "e3"], "three blocks each, two of the last but one, which shares one"
    assert stage.decoder.cache.n_blocks - stage.decoder.cache.n_free <= 12
    stage.end()


def test_what_host_memory_lets_go_of_is_kept_no_more():
    """Also where nobody asks for it again."""
    stage = Stage(BASES[0], kept=1, host=30_000)
    stage.play(*([Turn(number, 18)] for number in range(12)))
    there = [one for one in inside.kept_sequences(stage.decoder) if one.copy is None or not one.copy.gone]
    assert 0 < len(there) == len(stage.decoder.kept) < 12
    stage.end()


@pytest.mark.parametrize(("name", "dtype"), few(BASES, BASES[0], BASES[3]))
def test_what_is_kept_moves_to_host_memory_and_is_gone_on_from_there(name, dtype):
    """One block may stay, and yet no token is computed twice; with room for one sequence, some are."""
    base = name, dtype
    whole, stage = Stage(base), Stage(base, kept=1, host=ROOMY)
    for turns in GAME:
        assert stage.play(turns) == whole.play(turns)
        assert stage.decoder.cache.n_free == stage.decoder.cache.n_blocks
        assert stage.decoder.prefilled_tokens == whole.decoder.prefilled_tokens
    assert stage.decoder.host.prefills_saved > 0
    cache = stage.decoder.cache
    small = Stage(base, kept=1, host=7 * cache.bytes_per_block + cache.states.bytes_per_slot)
    small.play(*GAME)
    assert whole.decoder.prefilled_tokens < small.decoder.prefilled_tokens
    assert small.decoder.host.prefills_saved > 0
    for one in (whole, stage, small):
        one.end()


def test_what_gives_way_to_others_is_gone_on_from_in_host_memory():
    """Ten blocks: what another sequence takes comes back for the next turn, its shared beginning once for two branches."""
    stage, whole = Stage(BASES[0], 10, 10, host=ROOMY), Stage(BASES[0])
    rounds = [Turn(0, 27)], [Turn(2, 60, answers=10)], [Turn(0, 3)], [Turn(0, 2), Turn(0, 3)]
    assert stage.play(*rounds) == whole.play(*rounds)
    assert stage.decoder.prefilled_tokens == whole.decoder.prefilled_tokens
    assert stage.decoder.host.prefills_saved > 0
    stage.end()
    whole.end()


def test_another_version_takes_nothing_over():
    stage = Stage(BASES[0])
    stage.play([Turn(0, 21)], [Turn(1, 21)])
    before, stage.version = stage.decoder.prefilled_tokens, 2
    stage.play([Turn(0, 6)])
    assert stage.decoder.prefilled_tokens - before == 21 + 5 + 6
    assert [one.adapter for one in inside.kept_sequences(stage.decoder)] == [AdapterRef("a", 1), AdapterRef("a", 2)], (
        "e1 is still there"
    )
    stage.decoder.kept.forget_version(AdapterRef("a", 1))
    assert [one.episode for one in inside.kept_sequences(stage.decoder)] == ["e0"]
    stage.end()


def test_what_was_broken_off_is_not_kept_and_a_job_that_ends_takes_all():
    stage = Stage(BASES[0])
    stage.ask(Turn(0, 21))
    stage.decoder.tick()
    stage.decoder.abort({"r1"})
    assert len(stage.decoder.kept) == 0
    stage.play([Turn(0, 21)], [Turn(1, 21)])
    assert len(stage.decoder.kept) == 2
    stage.decoder.abort({"job"})
    stage.end()


def test_the_engine_lets_go_when_an_episode_or_a_version_ends():
    device, base = Device(), tiny.base("llama")
    engine = EmbeddedEngine(base, device, max_rows=4, kv_tokens=1024, prefill_tokens=64, kept_tokens=512)
    ref, cache = AdapterRef("a", 1), engine.cache
    engine.install(ref, weights("llama", "float32"))

    async def scene() -> None:
        prompt = tiny.tokens(30).numpy().astype(np.int32)
        asked = GenerateRequest("r", "job", prompt, ref, SamplingParams(max_tokens=4), (1,), episodes=("e0",))
        for episode in ("e0", "e1"):
            async for _ in engine.generate(replace(asked, episodes=(episode,))):
                pass
        held = cache.n_blocks - cache.n_free
        assert len(engine.decoder.kept) == 2
        await engine.abort("e0")
        for _ in range(2):  # the second call comes after the tick that follows the first
            await device.run(lambda: None)
        assert len(engine.decoder.kept) == 1
        assert 0 < cache.n_blocks - cache.n_free < held
        await engine.unload_adapter(ref)
        assert cache.n_free == cache.n_blocks

    try:
        asyncio.run(scene())
    finally:
        device.close()


def test_a_generation_names_its_episodes_and_lets_go_of_them() -> None:
    device, base = Device(), tiny.base("llama")
    engine = EmbeddedEngine(base, device, max_rows=4, kv_tokens=1024, prefill_tokens=64, kept_tokens=512)
    versions = Versions("a", "a.run.0", engine, FixedSync(engine))
    prompt, params = tiny.tokens(30).numpy().astype(np.int32), SamplingParams(max_tokens=4)
    chat = Chat(base.info.tokenizer, chat_template=False)

    async def scene() -> None:
        await versions.publish(0)
        await versions.announce(0, 0)
        single = Generation("a", "a/train/0/0", engine, versions, chat, params, renew=False, can_stop=False)
        await single.complete(prompt, {0: 5}, 0, 0)
        assert len(engine.decoder.kept) == 0, "an episode of one turn has no use for it"
        generation = replace(single, drafts={}, turns=True)
        await generation.complete(prompt, {0: 5, 1: 6}, 0, 0)
        assert [one.episode for one in inside.kept_sequences(engine.decoder)] == ["a/train/0/0/0", "a/train/0/0/1"]
        for index in (0, 1):
            await generation.release(index)
        for _ in range(2):
            await device.run(lambda: None)
        assert_all_is_back(engine.decoder)

    try:
        asyncio.run(scene())
    finally:
        device.close()


class FixedSync:
    """Publishes the same weights as every version."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    async def publish(self, name: str, ref: AdapterRef) -> None:
        self._engine.install(ref, weights("llama", "float32"))


GUESSING = """
class Guessing:
    def reset(self, **row):
        self.said = 0
        return "Guess."

    def step(self, text):
        self.said += 1
        return f"No, not {text!r}. Guess again.", float(len(text)), self.said == 3
"""


@pytest.mark.cell("kept turns", "embedded")
def test_a_job_of_several_turns_has_the_same_bytes_and_leaves_no_block(tmp_path: Path) -> None:
    """With everything kept, with nothing, and in a cache that holds one sequence and a half."""
    (tmp_path / "guessing.py").write_text(GUESSING)
    job = {
        "name": "guessing", "data": {"source": "toy:add", "holdout": 0}, "steps": 1,
        "environment": {"name": f"{tmp_path}/guessing.py:Guessing", "max_turns": 3}, "sampling": {"max_tokens": 12},
        "algorithm": {"group_size": 2, "groups_per_step": 2},
    }  # fmt: skip
    base, found, computed = load("small", EngineConfig(dtype="float32")), [], []
    engines: dict[str, dict[str, Any]] = {
        "kept": {"kept_kv": 1.0}, "nothing": {"kept_kv": 0.0}, "tight": {"kv_tokens": 480}
    }  # fmt: skip
    for name, engine in engines.items():
        with collected_late() as others:
            result = run(base, tmp_path / name, [job], samplers=0, **engine)
            (decoder,) = decoders(others)
            assert_all_is_back(decoder)
            computed.append(decoder.prefilled_tokens)
            del decoder
        assert result.ok
        found.append(fingerprint(tmp_path / name / "guessing"))
    assert found[0] == found[1] == found[2]
    assert computed[0] < 0.8 * computed[1]


COUNTING = """
import os, threading
from pathlib import Path

from motet.algorithms import Grpo


class Counting(Grpo):
    place: str

    def advantages(self, groups, max_tokens):
        (thread,) = (one for one in threading.enumerate() if one.name == "motet-device")
        ((tick, _),) = thread._target.__self__._ticks
        (Path(self.place) / f"{os.getpid()}").write_text(f"{tick.__self__.decoder.prefilled_tokens}")
        return super().advantages(groups, max_tokens)
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("engine", "launcher"),
    [
        pytest.param({"hosts": 2}, "local", id="hosts", marks=pytest.mark.cell("kept turns", "hosts 2")),
        pytest.param({"shard": 2}, "local", id="shards", marks=pytest.mark.cell("kept turns", "shards 2")),
        pytest.param({"hosts": 2}, "ray", id="ray", marks=pytest.mark.cell("kept turns", "Ray")),
    ],
)
def test_several_processes_keep_turns_and_have_the_bytes_of_one_that_keeps_none(
    engine: dict[str, Any], launcher: str, tmp_path: Path
) -> None:
    """They compute fewer tokens of prompts."""
    (tmp_path / "guessing.py").write_text(GUESSING)
    (tmp_path / "counting.py").write_text(COUNTING)
    (counts := tmp_path / "counts").mkdir()
    common: dict[str, Any] = {"samplers": 0, "threads": 1, "dtype": "float32", "kernels": "torch"}

    def computed(name: str, cluster: dict[str, Any], **engine: Any) -> int:
        """Tokens of prompts, by all processes."""
        algorithm = {"type": f"{tmp_path}/counting.py:Counting", "place": str(counts)}
        jobs = [
            {
                "name": one, "data": {"source": "toy:add", "holdout": 0}, "steps": 2, "sampling": {"max_tokens": 12},
                "environment": {"name": f"{tmp_path}/guessing.py:Guessing", "max_turns": 3},
                "algorithm": {**algorithm, "group_size": 3, "groups_per_step": 2},
            }
            for one in NAMES
        ]  # fmt: skip
        settings = config(tmp_path / name, jobs, **common, **engine)
        result = run_config(settings.model_copy(update={"cluster": ClusterConfig(**cluster)}))
        assert result.ok, [one.message for one in result.jobs.values()]
        found = [int(file.read_text()) for file in counts.iterdir()]
        assert len(found) == engine.get("hosts", 1), "each host has a job"
        for file in counts.iterdir():
            file.unlink()
        return sum(found)

    whole = computed("one", {}, kept_kv=0.0)
    with cluster_of(launcher) as cluster:
        assert computed("several", cluster, kept_kv=1.0, **engine) < 0.8 * whole
    for name in NAMES:
        assert fingerprint(tmp_path / "several" / name) == fingerprint(tmp_path / "one" / name)
