"""The calls of an agent in one rollout, and the resulting token sequences.

A call continues an earlier call if its conversation begins with that call's conversation and answer. Its tokens are
then the earlier tokens plus those of the new messages. Otherwise, or if the template rewrites earlier tokens, the call
begins a branch. The calls form a tree, and the rollout is built from it at the end: neither random numbers nor branches
depend on the order of concurrent calls.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from motet.chat.completer import CallLimits, id_of_call
from motet.chat.template import Chat, Tools
from motet.chat.turn_formats.turn_grammar import turn_grammar
from motet.chat.turn_stream import SpokenTurn
from motet.core import seeds
from motet.core.errors import BaseModelError, ChatRefusal, ContextFull, EngineError, ServerFault, ServerGone
from motet.core.plain_json import as_json
from motet.core.types import Chunk, FinishReason, IntArray, Message, Rollout, SamplingParams, TurnParts
from motet.environments.episode import TOO_LARGE, GroupContext, answered, extended, whole

_OVER = "this episode is over: its time is up, or its agent has returned"


@dataclass(eq=False)
class AgentCall:
    """One turn that the model sampled."""

    id: str
    """The id for the agent; a function of the prompt, of other limits than the job's, and of how often both were asked."""
    parent: AgentCall | None
    """The call that it continues."""
    keys: Sequence[bytes]
    """Of the beginnings of its conversation that its parent did not have, from its parent's answer on."""
    new: tuple[Message, ...]
    """Messages that its parent did not have."""
    read: IntArray
    """The tokens of the prompt that its parent did not read."""
    chunk: Chunk
    """Its text is as the template shows it."""
    parts: TurnParts
    number: int
    """How often its prompt had been asked before with the same limits."""
    trained: bool = True
    """Whether its sampled tokens are trained."""
    thought_tokens: int = 0

    @property
    def answered(self) -> bytes:
        """The key of its conversation with the answer; clients may leave its thought out."""
        return _longer(self.keys[-1], replace(self.said, thought=""))

    @property
    def path(self) -> list[AgentCall]:
        """The calls that it continues, the first one first, and itself."""
        path = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path[::-1]

    @property
    def prompt(self) -> IntArray:
        """The tokens before the turn."""
        if self.parent is None:
            return self.read
        *before, last = self.path
        return np.concatenate([*(part for call in before for part in (call.read, call.chunk.token_ids)), last.read])

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation before the turn."""
        *before, last = self.path
        return (*(message for call in before for message in (*call.new, call.said)), *last.new)

    @property
    def said(self) -> Message:
        """The turn, in parts."""
        return Message("assistant", self.parts.speech, self.parts.calls, thought=self.parts.thought)

    @property
    def rank(self) -> tuple[int, str]:
        """Its order among calls with equal prompts."""
        return self.number, self.id

    @property
    def key(self) -> tuple[int, bytes, int, str]:
        """Its order among the calls of one parent: those with a longer history come later."""
        return len(self.read), self.read.tobytes(), *self.rank

    def follows(self, other: AgentCall) -> bool:
        """Whether its prompt begins with all tokens of another call."""
        if other is self.parent:
            return True
        prompt, before, said = self.prompt, other.prompt, other.chunk.token_ids
        n_before = len(before)
        return np.array_equal(prompt[n_before : n_before + len(said)], said) and np.array_equal(
            prompt[:n_before], before
        )

    def go_on_from(self, parent: AgentCall) -> None:
        """Continue a call that it `follows`."""
        n_tokens, n_messages = len(parent.prompt) + len(parent.chunk.token_ids), len(parent.messages) + 1
        self.read, self.new, self.parent = self.prompt[n_tokens:], self.messages[n_messages:], parent


class AgentEpisode:
    """One rollout of an agent. Lives in one event loop."""

    def __init__(self, context: GroupContext, index: int, model: str, most_calls: int, seconds: float) -> None:
        """`model` is the name shown to the agent, which may make `most_calls` calls within `seconds`."""
        self.context, self.index, self.model = context, index, model
        self.deadline = time.time() + seconds
        self.seed = seeds.key(context.seed, "agent", index)
        self._most_calls, self._begun = most_calls, 0
        self._asked: Counter[int] = Counter()
        self._known: dict[bytes, AgentCall] = {}
        """By the conversation that ends with the answer, with and without thoughts."""
        self._running: dict[bytes, set[asyncio.Future[None]]] = {}
        """Calls without an answer yet, by their conversations."""
        self._calls: list[AgentCall] = []
        self._at_once = False
        """Whether a call began before another one was answered."""
        self._fault = ""
        self._full = 0
        """The number of the last call that the context had no room for."""
        self.closed = False

    async def complete(self, messages: Sequence[Message], tools: Tools, limits: CallLimits) -> AgentCall:
        """Sample the model's next turn in a conversation.

        Raises:
            ChatRefusal: the episode is over, or has no calls left; or the conversation cannot be read by this base.
            EngineError: sampling failed, so the rollout fails too.
        """
        if self._fault:
            raise EngineError(self._fault)
        if self.closed or time.time() > self.deadline:
            raise ChatRefusal(_OVER)
        if self._begun >= self._most_calls:
            raise ChatRefusal(f"the agent has made all of its {self._most_calls} calls (environment.max_turns)")
        self._begun, self._at_once = self._begun + 1, self._at_once or bool(self._running)
        messages = self.context.chat.with_roles(messages)
        done = asyncio.get_running_loop().create_future()
        keys, full = (_keys(messages, tools, thoughts=thoughts) for thoughts in (False, True))
        conversation, number = keys[-1], self._begun
        self._running.setdefault(conversation, set()).add(done)
        try:
            return await self._complete(keys, full, messages, tools, limits)
        except ChatRefusal as error:
            self._full = number if error.code == ContextFull.code else self._full
            raise
        finally:
            done.set_result(None)
            self._running[conversation].discard(done)
            if not self._running[conversation]:
                del self._running[conversation]

    async def _complete(
        self,
        keys: Sequence[bytes],
        full: Sequence[bytes],
        messages: Sequence[Message],
        tools: Tools,
        limits: CallLimits,
    ) -> AgentCall:
        """`full` are keys with thoughts, `keys` without."""
        chat = self.context.chat
        parent, n_known = await self._continued(keys, full, messages)
        if parent is None:
            new = seen = chat.opening(messages, tools)
        else:
            new = tuple(messages[n_known:])
            seen = (*parent.messages, parent.said, *new)
        try:
            prompt, read = await asyncio.to_thread(self._prompt, chat, parent, seen, new, tools)
        except BaseModelError as error:  # the template refuses it, and would refuse it again
            raise ChatRefusal(str(error)) from error
        if self.closed:
            raise ChatRefusal(_OVER)
        if parent is not None and len(prompt) == len(read):  # the template rewrites earlier tokens
            parent, n_known, new = None, 0, seen
        sampling = self._limited(limits)
        asked = prompt.tobytes()
        if (sampling, limits.train) != (self.context.sampling, True):  # no copy of a call with the job's limits
            asked += json.dumps([sampling.max_tokens, sampling.stop, sampling.grammar, limits.train]).encode()
        digest = int.from_bytes(hashlib.blake2b(asked, digest_size=8).digest(), "little")
        number = self._asked[digest]
        self._asked[digest] += 1
        turn = seeds.key(digest, "call", number)
        if limits.grammar:
            sampling = replace(sampling, grammar=turn_grammar(chat, sampling, prompt, tools))
        chunk, spoken = await self._sampled(prompt, turn, sampling), SpokenTurn(chat, prompt, tools, sampling.stop)
        said = await spoken.read(chunk)
        chunk, trained, name = (
            replace(chunk, text=spoken.text(chunk)),
            limits.train and not limits.grammar,
            f"{turn:016x}",
        )
        call = AgentCall(
            name, parent, keys[n_known:], new, read, chunk, said.parts, number, trained, said.thought_tokens
        )
        if not self.closed:
            self._calls.append(call)
            for key in {call.answered, _longer(full[-1], call.said)}:
                self._known[key] = min(self._known.get(key, call), call, key=lambda agent_call: agent_call.rank)
        return call

    def _limited(self, limits: CallLimits) -> SamplingParams:
        sampling = self.context.sampling
        most = min(sampling.max_tokens, limits.max_tokens or sampling.max_tokens)
        return replace(sampling, max_tokens=most, stop=(*sampling.stop, *limits.stop), grammar=limits.grammar)

    async def _sampled(self, prompt: IntArray, turn: int, sampling: SamplingParams) -> Chunk:
        try:
            (chunk,) = await whole(self.context.generate(prompt, (self.index,), turn, sampling), 1)
        except (ServerGone, ServerFault) as error:  # by chance: the agent must not take it for the end of its room
            self._fault = self._fault or str(error)
            raise EngineError(self._fault) from error
        except EngineError as error:  # most often it is too long; the agent may send less
            refusal = ChatRefusal(str(error))
            refusal.code = error.code
            raise refusal from error
        if chunk.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            self._fault = self._fault or chunk.error or "sampling was broken off"
            raise EngineError(self._fault)
        return chunk

    async def _continued(
        self, keys: Sequence[bytes], full: Sequence[bytes], messages: Sequence[Message]
    ) -> tuple[AgentCall | None, int]:
        """The call that a conversation continues, and the number of messages with its answer.

        Calls with a part of this conversation and no answer yet are waited for: what follows may be their answer, and of
        several such calls it is the first by `rank`. Each of them waits for shorter conversations only.
        """
        for n in range(len(messages) - 1, 0, -1):
            running = self._running.get(keys[n - 1])
            if running is not None and messages[n - 1].role == "assistant":
                await asyncio.wait(running)
            if (call := self._known.get(full[n]) or self._known.get(keys[n])) is not None:
                return call, n
        return None, 0

    @staticmethod
    def _prompt(
        chat: Chat, parent: AgentCall | None, seen: tuple[Message, ...], new: tuple[Message, ...], tools: Tools
    ) -> tuple[IntArray, IntArray]:
        """All tokens that the model reads, and those that its parent did not read; in a new branch, all."""
        if parent is not None and new:
            sampled = parent.chunk.token_ids
            read = chat.follow_up_ids((*parent.messages, parent.said), sampled, new, tools)
            if read is not None:
                return np.concatenate([parent.prompt, sampled, read]), read
        prompt = chat.prompt_of(seen, tools)
        return prompt, prompt

    @property
    def full(self) -> bool:
        """Whether the episode ended with a call that the context had no room for, after one that it had room for."""
        return bool(self._calls and self._full) and (self._at_once or self._full == self._begun)

    def close(self) -> None:
        """Refuse further calls, and leave unfinished ones out of the rollout."""
        self.closed = True

    def rollout(self, reward_of: Mapping[str, float], error: str = "") -> Rollout:
        """The rollout, with rewards of single turns by the ids of their calls. Raises KeyError for an unknown one."""
        in_order = (bool(reward_of) or self.context.judged) and not self._at_once
        if not in_order:
            _join(self._calls)
        calls = _walk(self._calls, self._calls[-1] if self._calls and in_order else None)
        if unknown := [name for name in reward_of if name not in {call.id for call in calls}]:
            raise KeyError(unknown[0])
        rollout = Rollout(self.context.problem, self.index, (), (), error=error or self._fault)
        last: AgentCall | None = None
        place: dict[AgentCall, int] = {}
        for call in calls:
            place[call] = len(place)
            if last is None:
                rollout = replace(rollout, opening=call.new)
            else:
                rollout = answered(rollout, call.new, reward_of.get(last.id))
            goes_on = last is not None and call.parent is last
            rollout = extended(
                rollout,
                call.read if goes_on else call.prompt,
                call.chunk,
                anew=not goes_on,
                after=None if call.parent is None else place[call.parent],
                said=(call.chunk.text, call.parts),
                trained=call.trained,
            )
            last = call
        if last is None:
            return replace(rollout, error=rollout.error or "the agent never called the model")
        rollout = answered(rollout, (), reward_of.get(last.id))
        return rollout.cut_short if self.full else rollout


def rewarded(episode: AgentEpisode, reward: float | None, rewards: Mapping[str, float], error: str) -> Rollout:
    """The rollout of an episode whose agent returned a number, returned rewards by the ids of answers, or failed.

    If the agent failed because the context was full, the job's rewards judge the last turn; without them it earned 0.
    """
    parts, rewards = {}, {id_of_call(name): worth for name, worth in rewards.items()}
    if error and episode.full:  # the agent did not handle it
        error, reward = "", None if episode.context.judged else 0.0
    error = error and f"the agent{':' * error.startswith('its ')} {error}"
    if reward is not None:
        parts["agent"] = reward
    if rewards:
        try:
            parts["turns"] = math.fsum(rewards.values())
        except OverflowError:
            error = error or TOO_LARGE
    if not (parts or error or episode.context.judged):
        error = "the agent returned no reward, and the job has none: return a number, or give the job a reward"
    try:
        rollout = episode.rollout(rewards, error)
    except KeyError as unknown:
        rollout = episode.rollout({}, f"the agent rewards the call {unknown}, which it never made")
    return replace(rollout, reward_parts=parts)


def _join(calls: Sequence[AgentCall]) -> None:
    """Let each call continue the longest answer that it has in its history, also one that came after it."""
    answers = defaultdict[bytes, dict[tuple[AgentCall | None, bytes], AgentCall]](dict)
    for call in sorted(calls, key=lambda agent_call: agent_call.rank):
        tokens = hashlib.blake2b(call.read.tobytes() + call.chunk.token_ids.tobytes()).digest()
        answers[call.answered].setdefault((call.parent, tokens), call)  # one for hundreds of equal ones
    for call in calls:
        before = (other for key in reversed(call.keys[:-1]) for other in answers.get(key, {}).values())
        first = next(filter(call.follows, before), None)
        if first is not None and first is not call.parent:
            call.go_on_from(first)


def _walk(calls: Sequence[AgentCall], end: AgentCall | None) -> list[AgentCall]:
    """Calls, each before those that continue it; `end`, which none continues, is the last, if it is known."""
    to_end = set[AgentCall]() if end is None else set(end.path)
    after = defaultdict[AgentCall | None, list[AgentCall]](list)
    for call in calls:
        after[call.parent].append(call)

    def ordered(parent: AgentCall | None) -> list[AgentCall]:
        return sorted(after.get(parent, ()), key=lambda call: (call in to_end, call.key), reverse=True)

    waiting, walked = ordered(None), list[AgentCall]()
    while waiting:
        walked.append(call := waiting.pop())
        waiting += ordered(call)
    return walked


def _keys(messages: Sequence[Message], tools: Tools, *, thoughts: bool) -> list[bytes]:
    """A digest of the tools and the first n messages, with or without their thoughts, for each n from 0 on."""
    offered = json.dumps(list(tools), sort_keys=True) if tools else ""
    keys = [hashlib.blake2b(offered.encode(), digest_size=16).digest()]
    for message in messages:
        keys.append(_longer(keys[-1], message if thoughts else replace(message, thought="")))
    return keys


def _longer(key: bytes, message: Message) -> bytes:
    return hashlib.blake2b(key + _key(message).encode(), digest_size=16).digest()


def _key(message: Message) -> str:
    """Equal for equivalent messages: clients reformat arguments, get null for NaN, and strip spaces."""
    calls = [[call.name, as_json(call.arguments)] for call in message.tool_calls]
    thought = [message.thought.strip()] if message.thought else []
    return json.dumps([message.role, message.content.strip(), calls, *thought], sort_keys=True)
