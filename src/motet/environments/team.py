"""Episodes of a team: each role has its own conversation and adapter.

The environment names the role with the next turn in `self.role`, and its text goes to that role only. The first role
reads the problem; the others begin with the problem's system message and that text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from motet.core.errors import BaseModelError, ContextFull, EngineError
from motet.core.types import Chunk, FinishReason, Group, IntArray, Message, Rollout, Turn
from motet.environments import environment_messages as m
from motet.environments.episode import GroupContext, answered, extended, heard, read_next, whole

Act = Callable[[m.AnyAction], Awaitable[m.EpisodeReply]]
"""Calls the environment's instance for an episode."""


def groups_of(groups: Sequence[Group], role: str) -> list[Group]:
    """The groups of one role: its conversations, with its rewards. A job without a team has the role ''."""
    if not role:
        return list(groups)
    return [
        replace(
            group,
            rollouts=tuple(
                replace(own, error=rollout.error or own.error)
                for rollout in group.rollouts
                if (own := rollout.roles.get(role)) is not None
            ),
        )
        for group in groups
    ]


def begun(rollout: Rollout, role: str, context: GroupContext) -> Rollout:
    """A new rollout with the conversation of the first role."""
    if not context.team or rollout.error:
        return rollout
    return replace(rollout, roles={role: rollout}, error=_unknown(role, context))


def _unknown(role: str, context: GroupContext) -> str:
    """What is wrong with the role that an environment names; empty if it is valid."""
    if role in context.team:
        return ""
    named = f"names the role {role!r}" if role else "names no role"
    return f"the environment {named}; set self.role in reset() and step() to one of {', '.join(context.team)}"


class TeamEpisode:
    """One episode, turn by turn."""

    def __init__(self, context: GroupContext, opened: Rollout, act: Act) -> None:
        (self._role,) = opened.roles
        self._context, self._opened, self._act = context, opened, act
        self._roles = dict(opened.roles)
        self._last: dict[str, Chunk] = {}
        self._turns: list[Turn] = []
        self._places: dict[str, list[int]] = {}
        """The turns of each role, as indices into all turns."""
        self._given: dict[str, dict[str, float]] = {}
        """Rewards by role and part."""
        self._error = ""

    async def play(self, read: IntArray, chunk: Chunk, max_turns: int, *, judged: bool) -> Rollout:
        """Play to the end from the first turn; `judged` asks for the reward of the whole episode."""
        anew, prompt = False, read
        for turn in range(1, max_turns + 1):
            reply = await self._spoken(read, prompt, chunk, anew=anew)
            cut_off = chunk.finish_reason is FinishReason.LENGTH
            if self._error or reply.done or cut_off or not reply.text or turn == max_turns:
                break
            if error := _unknown(reply.role, self._context):
                self._error = error
                break
            try:
                read, prompt, anew = await self._addressed(reply.role, Message("user", reply.text))
                generate = self._context.team[self._role]
                (chunk,) = await whole(generate(prompt, (self._opened.index,), turn), 1)
            except ContextFull:
                self._roles = {role: own.cut_short for role, own in self._roles.items()}
                self._turns[-1] = replace(self._turns[-1], finish_reason=FinishReason.LENGTH)
                break
            except (EngineError, BaseModelError) as error:  # text that cannot be read
                self._error = str(error)
                break
        if judged and not self._error:
            reply = await self._act(m.JudgeEpisode())
            self._error = reply.error
            missing = next((role for role in self._last if reply.rewards and role not in reply.rewards), None)
            if missing:
                self._error = f"get_reward returned no reward for the role {missing!r}"
            self._reward("environment", reply)
        return self._whole()

    async def _spoken(self, read: IntArray, prompt: IntArray, chunk: Chunk, *, anew: bool) -> m.EpisodeReply:
        """Add a turn of the current role, and pass it to the environment."""
        role = self._role
        said = await heard(self._context, prompt, chunk)
        own = self._roles[role] = extended(self._roles[role], read, chunk, anew=anew, said=said)
        self._last[role], self._error = chunk, own.error
        reply = m.EpisodeReply() if own.error else await self._act(m.EnvironmentStep(said[1].speech))
        self._error = self._error or reply.error
        replies = (Message("user", reply.text),) if reply.text else ()
        self._places.setdefault(role, []).append(len(self._turns))
        self._turns.append(replace(own.turns[-1], replies=replies, reward=reply.reward, role=role))
        self._reward("turns", reply)
        return reply

    async def _addressed(self, role: str, message: Message) -> tuple[IntArray, IntArray, bool]:
        """Give the next turn to a role; returns the new tokens that it reads, its prompt, and whether a branch begins."""
        chat, self._role = self._context.chat, role
        if role not in self._roles:
            system = tuple(message for message in self._opened.problem.messages if message.role == "system")
            empty = Rollout(self._opened.problem, self._opened.index, (), (), opening=(*system, message))
            self._roles[role] = empty
            prompt = await asyncio.to_thread(chat.prompt_of, empty.opening)
            return prompt, prompt, False
        own = self._roles[role] = answered(self._roles[role], (message,))
        read, anew = await read_next(chat, own, self._last[role])
        return read, read if anew else np.concatenate([own.branches[-1].token_ids, read]), anew

    def _reward(self, part: str, reply: m.EpisodeReply) -> None:
        """Add a reward: a mapping has one for each of its roles, a number counts for all."""
        strange = [role for role in reply.rewards if role not in self._context.team]
        if strange and not self._error:
            roles = ", ".join(self._context.team)
            self._error = f"the environment rewards the role {strange[0]!r}; the roles of the team are {roles}"
        everybody = {} if reply.reward is None else dict.fromkeys(self._context.team, reply.reward)
        for role, reward in (reply.rewards or everybody).items():
            parts = self._given.setdefault(role, {})
            parts[part] = parts.get(part, 0.0) + reward

    def _whole(self) -> Rollout:
        """All conversations as one rollout; the parts of its reward are means over the roles that took part."""
        names = list(dict.fromkeys(name for parts in self._given.values() for name in parts))
        given = {role: {name: self._given.get(role, {}).get(name, 0.0) for name in names} for role in self._last}
        roles = {
            role: replace(self._roles[role], reward_parts=given[role], error=self._error)
            for role in self._context.team
            if role in self._last
        }
        branches = tuple(
            replace(branch, turn=self._places[role][branch.turn])
            for role, own in roles.items()
            for branch in own.branches
        )
        return replace(
            self._opened,
            branches=branches,
            turns=tuple(self._turns),
            reward_parts={name: fmean(parts[name] for parts in given.values()) for name in names},
            roles=roles,
            error=self._error,
        )
