"""User-defined environments: one instance per rollout, in worker processes, and the resulting rollouts.

The model's turn is passed to the tools that it calls, or its speech to `step`; their results are read next. Sampled tokens
stay: later text is appended to them. If the template rewrites earlier tokens, a new branch begins.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from motet.chat.template import Chat
from motet.config import EnvironmentConfig
from motet.core.errors import BaseModelError, ContextFull, EngineError, EnvironmentFault
from motet.core.types import Chunk, FinishReason, IntArray, Message, Rollout, TurnParts
from motet.environments import environment_messages as m
from motet.environments.episode import GroupContext, OwnEnvironment, answered, extended, heard, judged, read_next, whole
from motet.environments.team import TeamEpisode, begun
from motet.workers.worker_link import ClockLimitError, ProcessDiedError, WorkerLink, WorkerSlot, import_path

Result = TypeVar("Result")
_NAMES = itertools.count()
_NO_TEAM = "the environment rewards roles, and the job has no team: return a number, or name the roles in `team`"


class _Slot(WorkerSlot):
    """The process of some episodes. After it dies, the next one repeats their calls."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.episodes = 0
        self.seen = set[str]()
        """Episodes that the process had."""


class EnvironmentWorkers(OwnEnvironment):
    """The processes of one job's environment, and where its instances are."""

    def __init__(self, config: EnvironmentConfig, log: Path | None, n_workers: int = 2) -> None:
        self.config, self._log = config, log
        self._slots = [_Slot() for _ in range(n_workers)]
        self.info = m.ObjectLoaded()

    async def open(self) -> None:
        """Load the class in a first process. Raises EnvironmentFault if it does not load, or is no environment."""
        try:
            self._slots[0].link = await self._start(self._slots[0])
        except (ProcessDiedError, ClockLimitError) as error:
            raise EnvironmentFault(f"environment {self.config.name!r} cannot be loaded: the process {error}") from error

    async def close(self) -> None:
        """End all processes."""
        for slot in self._slots:
            await slot.clear()

    def episode(self, seed: int) -> EnvironmentInstance:
        """A new instance, created later in the process with the fewest; `seed` is for the random numbers that it draws."""
        slot = min(self._slots, key=lambda slot: slot.episodes)
        slot.episodes += 1
        return EnvironmentInstance(self, slot, seed)

    async def run_group(self, context: GroupContext) -> tuple[Rollout, ...]:
        """The rollouts of one group, one instance each."""
        episodes = [self.episode(context.seed + index) for index in range(context.group_size)]
        try:
            opened = await _all(_open(self, context, index, episode) for index, episode in enumerate(episodes))
            first = await _first_turns(self, context, opened)

            async def played(rollout: Rollout) -> Rollout:
                try:
                    return await _run_episode(self, context, rollout, first.get(rollout.index), episodes[rollout.index])
                finally:
                    await context.release(rollout.index)

            return await judged(await _all(map(played, opened)), context)
        finally:
            await asyncio.gather(*(episode.close() for episode in episodes), return_exceptions=True)

    async def _start(self, slot: _Slot) -> WorkerLink:
        load = m.LoadObject(self.config.target, self.config.args, import_path=import_path())
        worker = await WorkerLink.start(m.ENVIRONMENT_CALLS, load, self._log)
        assert isinstance(worker.loaded, m.ObjectLoaded)
        self.info, slot.seen = worker.loaded, set()
        return worker

    async def ask(
        self, slot: _Slot, done: list[m.EpisodeCall], call: m.EpisodeCall, served: WorkerLink | None
    ) -> tuple[m.EpisodeReply, WorkerLink | None]:
        """Call an instance, as `WorkerSlot.ask`; if its process died, repeat its earlier calls in a new one first."""
        asked = served

        def alone(_: WorkerLink) -> bool:
            slot.seen.add(call.episode)
            return len(slot.seen) == 1

        async def repeat(worker: WorkerLink) -> m.EpisodeReply:
            nonlocal asked
            reply, asked = m.EpisodeReply(), worker
            for each in [call] if worker is served else [*done, call]:
                reply = await worker.call(each, self.config.wall_seconds, each.cpu_seconds)
                if reply.exceeded:
                    break
            return reply

        async with slot.turn:
            return await slot.ask(lambda: self._start(slot), repeat, alone), asked


class EnvironmentInstance:
    """One instance of the class, for one rollout."""

    def __init__(self, workers: EnvironmentWorkers, slot: _Slot, seed: int) -> None:
        self._workers, self._slot, self._seed = workers, slot, seed
        self._name = str(next(_NAMES))
        self._done: list[m.EpisodeCall] = []
        self._worker: WorkerLink | None = None

    async def do(self, action: m.AnyAction) -> m.EpisodeReply:
        """Run one call; errors are in the reply, never raised."""
        config, number = self._workers.config, len(self._done)
        call = m.EpisodeCall(self._name, self._seed, number, config.cpu_seconds, config.memory_mb, action)
        try:
            reply, self._worker = await self._workers.ask(self._slot, self._done, call, self._worker)
        except ClockLimitError as error:
            self._workers.clock_limited = True
            return m.EpisodeReply(error=f"the environment {error}")
        except (ProcessDiedError, EnvironmentFault) as error:
            self._workers.clock_limited |= isinstance(error, ProcessDiedError) and error.killed
            return m.EpisodeReply(error=f"the environment {error}")
        except EngineError as error:
            return m.EpisodeReply(error=f"the text for the environment has {error}")
        self._done.append(call)
        return reply

    async def close(self) -> None:
        """Release the instance."""
        self._slot.episodes -= 1
        if self._slot.link is not None and self._slot.link is self._worker:
            await self.do(m.Close())


async def _all(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results, in order. If one fails, the others end too: a group that is put aside plays its episodes anew."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _open(
    workers: EnvironmentWorkers, context: GroupContext, index: int, episode: EnvironmentInstance
) -> Rollout:
    """A new rollout with its opening, once the instance exists."""
    problem = context.problem
    row = {**problem.metadata, "answer": problem.answer, "prompt": problem.messages[-1].content}
    reply = await episode.do(m.Reset(row))
    *before, last = problem.messages
    content = f"{last.content}\n\n{reply.text}" if reply.text else last.content
    opening = context.chat.with_tools((*before, replace(last, content=content)), workers.info.tools)
    return begun(Rollout(problem, index, (), (), error=reply.error, opening=opening), reply.role, context)


async def _first_turns(
    workers: EnvironmentWorkers, context: GroupContext, opened: list[Rollout]
) -> dict[int, tuple[IntArray, Chunk]]:
    """The prompt and the first turn of each rollout; those in `opened` whose opening is not answered fail.

    Rollouts with the same prompt are one request, with one prefill.
    """
    together: dict[tuple[str, tuple[Message, ...]], list[int]] = {}
    for rollout in opened:
        if not rollout.error:
            role = next(iter(rollout.roles), "")
            together.setdefault((role, rollout.opening), []).append(rollout.index)
    first: dict[int, tuple[IntArray, Chunk]] = {}

    async def begin(role: str, messages: tuple[Message, ...], indices: list[int]) -> None:
        speak = context.team[role] if role else context.generate
        try:
            prompt = await asyncio.to_thread(context.chat.prompt_of, messages, workers.info.tools)
            chunks = await whole(speak(prompt, tuple(indices), 0), len(indices))
        except (EngineError, BaseModelError) as error:  # too long for the context, or it cannot be read
            for index in indices:
                opened[index] = replace(opened[index], error=str(error))
            return
        first.update((index, (prompt, chunk)) for index, chunk in zip(indices, chunks, strict=True))

    await _all(begin(*opening, indices) for opening, indices in together.items())
    return first


async def _run_episode(
    workers: EnvironmentWorkers,
    context: GroupContext,
    rollout: Rollout,
    first: tuple[IntArray, Chunk] | None,
    episode: EnvironmentInstance,
) -> Rollout:
    """A rollout from its first turn to its end."""
    if first is None:
        return rollout
    if context.team:
        team = TeamEpisode(context, rollout, episode.do)
        return await team.play(*first, workers.config.max_turns, judged=workers.info.judges)
    chat, tools, (read, chunk), anew = context.chat, workers.info.tools, first, False
    prompt = read
    for turn in range(1, workers.config.max_turns + 1):
        cut_off = chunk.finish_reason is FinishReason.LENGTH
        said = await heard(context, prompt, chunk, tools)
        rollout = extended(rollout, read, chunk, anew=anew, said=said)
        if rollout.error:
            break
        replies, reward, done, error = await _replies(workers, chat, episode, said[1])
        rollout = replace(answered(rollout, replies, reward), error=error)
        if done or error or cut_off or not replies or turn == workers.config.max_turns:
            break
        try:
            read, anew = await read_next(chat, rollout, chunk, tools)
            prompt = read if anew else np.concatenate([rollout.branches[-1].token_ids, read])
            (chunk,) = await whole(context.generate(prompt, (rollout.index,), turn), 1)
        except ContextFull:
            rollout = rollout.cut_short
            break
        except (EngineError, BaseModelError) as error:  # a reply that cannot be read
            return replace(rollout, error=str(error))
    info = workers.info
    return await _with_own_rewards(rollout, episode, info.judges or not (info.steps or context.judged))


async def _replies(
    workers: EnvironmentWorkers, chat: Chat, episode: EnvironmentInstance, parts: TurnParts
) -> tuple[tuple[Message, ...], float | None, bool, str]:
    """The reply to a turn, its reward, whether the episode has ended, and any error."""
    if parts.calls:
        replies, done = [], False
        for call in parts.calls:
            reply = await episode.do(m.CallTool(call.name, dict(call.arguments)))
            if reply.error:
                return (), None, True, reply.error
            replies.append(Message(chat.tool_role, reply.text, name=call.name if chat.tool_role == "tool" else ""))
            done |= reply.done
        return tuple(replies), None, done, ""
    if not workers.info.steps:
        return (), None, True, ""
    reply = await episode.do(m.EnvironmentStep(parts.speech))
    said = (Message("user", reply.text),) if reply.text else ()
    return said, reply.reward, reply.done, reply.error or _NO_TEAM * bool(reply.rewards)


async def _with_own_rewards(rollout: Rollout, episode: EnvironmentInstance, asked: bool) -> Rollout:
    """Add the environment's rewards: the sum over turns and, if `asked`, the episode's."""
    if rollout.error:
        return rollout
    parts = {}
    turns = [turn.reward for turn in rollout.turns if turn.reward is not None]
    if turns:
        parts["turns"] = float(sum(turns))
    if asked:
        reply = await episode.do(m.JudgeEpisode())
        if error := reply.error or _NO_TEAM * bool(reply.rewards):
            return replace(rollout, error=error)
        if reply.reward is not None:
            parts["environment"] = reply.reward
    return replace(rollout, reward_parts=parts)
