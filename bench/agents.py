"""Episodes of several turns: what an agent's address costs, what keeping KV saves, what sharing prefixes saves in training.

    .venv/bin/python -m bench.agents                      # tables for docs/benchmarks.md; a few minutes
    .venv/bin/python -m bench.agents --base smollm2       # on a model of ordinary size

The agent makes its calls with the stock `openai` client from a process of its own, as in a job. The engine's own time is that
from a call's admission to its last token; all else counts as the address's. With KV kept and without it, and with
prefixes shared and without, take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from motet.algorithms.algorithm import StepBatch
from motet.algorithms.policy_gradient import PolicyGradient
from motet.chat.template import Chat
from motet.config import AdapterConfig, EngineConfig, EnvironmentConfig
from motet.core.batch import Batch, Sample
from motet.core.device import Device
from motet.core.types import Chunk, GenerateRequest, IntArray, Message, Problem, Rollout, SamplingParams
from motet.environments.agent_runner import AgentRunner
from motet.environments.episode import GroupContext
from motet.hosts.launch import load
from motet.model.lora_model import LoraModel
from motet.rewards.reward_answers import ScoreOutcome
from motet.rollout.embedded import EmbeddedEngine
from motet.training.torch_trainer import TorchTrainer

AGENT = """
import json, time
import openai

stock = openai.AsyncOpenAI(api_key="none", max_retries=0)

async def run(problem, base_url, api_key, seed, record, turns):
    client = stock.with_options(base_url=base_url, api_key=api_key)
    messages, took = [{"role": "user", "content": f"Episode {seed % 1000}."}], []
    for turn in range(turns):
        started = time.perf_counter()
        said = await client.chat.completions.create(model="m", messages=messages)
        took.append(time.perf_counter() - started)
        messages += [{"role": "assistant", "content": said.choices[0].message.content}, {"role": "user", "content": "Go on."}]
    with open(f"{record}/{seed}.json", "w") as file:
        json.dump(took, file)
    return 1.0
"""
NEW = 16
"""Tokens that a turn samples."""


@dataclass
class EngineTimes:
    """A `Generate` on an engine, and how long each call of each episode took there."""

    engine: EmbeddedEngine
    seconds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    _asked: int = 0

    async def __call__(
        self, prompt_ids: IntArray, indices: tuple[int, ...], turn: int, sampling: SamplingParams | None = None, /
    ) -> list[Chunk]:
        """Whole completions."""
        self._asked += 1
        seeds, names = tuple(turn % 2**63 + index for index in indices), tuple(f"e{index}" for index in indices)
        asked = GenerateRequest(
            f"r{self._asked}", "bench", prompt_ids, None, SamplingParams(max_tokens=NEW), seeds, episodes=names
        )
        started = time.perf_counter()
        chunks = [chunk async for chunk in self.engine.generate(asked)]
        for index in indices:
            self.seconds[index].append(time.perf_counter() - started)
        return chunks


async def no_score(rollouts: Sequence[Rollout]) -> list[ScoreOutcome]:
    """The agent rewards itself."""
    return [ScoreOutcome(0.0, {}) for _ in rollouts]


def time_of_turns(
    base: LoraModel, make: Callable[[Device, int], EmbeddedEngine], episodes: int, turns: int
) -> tuple[list[float], list[float]]:
    """Milliseconds of turns beside the engine's own, and the engine's own, of so many episodes at once; each sorted."""
    device = Device()
    try:
        times = EngineTimes(make(device, 1 << 16))
        with tempfile.TemporaryDirectory() as place:
            asyncio.run(_run_agents(base, times, Path(place), episodes, turns))
            beside: list[float] = []
            context = _context(base, times, episodes)
            for index in range(episodes):
                seed = _seed(context, index)
                took = json.loads((Path(place) / f"{seed}.json").read_text())
                beside += [1000 * (whole - own) for whole, own in zip(took, times.seconds[index], strict=True)]
        return sorted(beside), sorted(1000 * seconds for took in times.seconds.values() for seconds in took)
    finally:
        device.close()


def _context(base: LoraModel, times: EngineTimes, episodes: int) -> GroupContext:
    problem = Problem(0, (Message("user", "x"),), "")
    return GroupContext(problem, Chat(base.info.tokenizer), episodes, times, no_score, judged=False)


def _seed(context: GroupContext, index: int) -> int:
    from motet.environments.agent_episode import AgentEpisode

    return AgentEpisode(context, index, "bench", 1, 1.0).seed


async def _run_agents(base: LoraModel, times: EngineTimes, place: Path, episodes: int, turns: int) -> None:
    (place / "agent.py").write_text(AGENT)
    arguments = {"record": str(place), "turns": turns}
    config = EnvironmentConfig(name=f"{place}/agent.py:run", max_turns=turns, wall_seconds=600, args=arguments)
    runner = AgentRunner("bench", config, place / "agent.log")
    await runner.open()
    try:
        rollouts = await runner.run_group(_context(base, times, episodes))
    finally:
        await runner.close()
    if wrong := [rollout.error for rollout in rollouts if rollout.error]:
        raise SystemExit(f"{len(wrong)} of {episodes} episodes failed: {wrong[0]}")


@dataclass(frozen=True)
class Played:
    """Some episodes, turn by turn."""

    seconds: float
    computed: int
    """Prompt tokens."""


def play(make: Callable[[Device, int], EmbeddedEngine], kept: int, episodes: int, turns: int, said: int) -> Played:
    """Episodes side by side that read so many tokens before each turn."""
    device = Device()
    try:
        engine = make(device, kept)
        params = SamplingParams(max_tokens=NEW)
        words = np.random.default_rng(1).integers(5, 200, size=(episodes, turns, said)).astype(np.int32)

        async def episode(index: int) -> None:
            history = np.zeros(0, np.int32)
            for turn in range(turns):
                history = np.concatenate([history, words[index, turn]])
                name, own = f"{index}/{turn}", (f"e{index}",)
                asked = GenerateRequest(name, "bench", history, None, params, (index,), episodes=own)
                async for chunk in engine.generate(asked):
                    history = np.concatenate([history, chunk.token_ids])

        async def all_of_them() -> None:
            await asyncio.gather(*map(episode, range(episodes)))

        started = time.perf_counter()
        asyncio.run(all_of_them())
        return Played(time.perf_counter() - started, engine.decoder.prefilled_tokens)
    finally:
        device.close()


def branching(rollouts: int, branches: int, length: int) -> StepBatch:
    """Rollouts of one problem whose history is rewritten from the middle on, again and again."""
    source, samples = np.random.default_rng(1), []
    prompt = source.integers(5, 200, size=length // 8)
    for _ in range(rollouts):
        history = np.concatenate([prompt, source.integers(5, 200, size=length // 2 - len(prompt))])
        for _ in range(branches):
            token_ids = np.concatenate([history, source.integers(5, 200, size=length - len(history))]).astype(np.int32)
            mask = np.arange(length) >= length - NEW
            zeros = np.zeros(length, np.float32)
            samples.append(Sample(token_ids, mask, zeros, np.where(mask, np.float32(1), zeros), zeros.astype(np.int32)))
    return StepBatch(tuple(samples), 1.0)


def trained(base: LoraModel, batch: StepBatch, budget: int) -> tuple[float, int]:
    """Seconds that the gradient of a batch takes, and the rows that are computed for it."""
    trainer = TorchTrainer(base, slots=1)
    trainer.add_adapter("bench", AdapterConfig(rank=16), seed=1)
    segments = batch.segments("bench", PolicyGradient(loss="reinforce"), 1.0, budget)
    started = time.perf_counter()
    for segment in segments:
        trainer.forward_backward(Batch((segment,)))
    return time.perf_counter() - started, sum(segment.n_tokens for segment in segments)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="small")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--episodes", type=int, default=16, help="side by side where KV is kept or not")
    parser.add_argument("--most", type=int, default=64, help="episodes at once at an agent's address")
    parser.add_argument("--said", type=int, default=48, help="tokens that are read before each turn")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    config = EngineConfig(threads=1)
    base = load(options.base, config)
    longest = options.turns * (options.said + NEW)

    def make(device: Device, kept: int) -> EmbeddedEngine:
        return EmbeddedEngine(
            base, device, max_rows=64, kv_tokens=max(options.episodes, options.most) * 2 * longest, prefill_tokens=2048,
            kept_tokens=kept,
        )  # fmt: skip

    print(f"{base.info.name}, {base.info.dtype}, one thread\n")
    print("| episodes at once | turns | the engine, ms: p50 | p99 | beside it: p50 | p99 | ratio of the p50 |")
    print("|---|---|---|---|---|---|---|")
    for episodes in (1, options.most):
        beside, own = time_of_turns(base, make, episodes, options.turns)
        middle, top = len(own) // 2, min(len(own) - 1, round(0.99 * len(own)))
        figures = f"{own[middle]:.0f} | {own[top]:.0f} | {beside[middle]:.0f} | {beside[top]:.0f}"
        print(f"| {episodes} | {len(own)} | {figures} | {beside[middle] / own[middle]:.2f} |", flush=True)
    pairs = []
    for _ in range(options.repeats):
        without = play(make, 0, options.episodes, options.turns, options.said)
        pairs.append((play(make, 1 << 30, options.episodes, options.turns, options.said), without))
    seconds = [kept.seconds / without.seconds for kept, without in pairs]
    computed = pairs[0][0].computed / pairs[0][1].computed
    played = f"{options.episodes} episodes of {options.turns} turns"
    print(f"\n{played}, {options.said} tokens read and {NEW} sampled in each:")
    spread = f"{min(seconds):.2f} to {max(seconds):.2f}, {options.repeats} pairs"
    print(f"with KV kept {statistics.median(seconds):.2f} of the time ({spread}), ", end="")
    print(f"{computed:.2f} of the prompt tokens computed")
    batch = branching(8, 4, longest)
    pairs_of_runs = [
        (trained(base, replace(batch, share_prefixes=True), 4096), trained(base, batch, 4096))
        for _ in range(options.repeats)
    ]
    seconds = [shared[0] / whole[0] for shared, whole in pairs_of_runs]
    (_, tree), (_, whole) = pairs_of_runs[0]
    print(f"\n8 rollouts of 4 branches of {longest} tokens that share half: ", end="")
    print(f"{tree} rows with share_prefixes, {whole} without,")
    print(f"{statistics.median(seconds):.2f} of the time ({min(seconds):.2f} to {max(seconds):.2f})")


if __name__ == "__main__":
    main()
