"""The methods of the client for steps of jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from motet.client.connection import Connection, path_of
from motet.service.schemas import Rollouts, Steps

_ROLLOUTS = 1000
"""Of one request, the most that a service takes."""


class StepMethods(Connection):
    """Methods of both clients."""

    async def rollouts(
        self,
        job: str,
        step: int | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        limit: int = 100,
        purpose: Literal["train", "eval"] = "train",
        problem: int | None = None,
        tokens: bool = False,
    ) -> Rollouts:
        """Rollouts of a step with rewards; by default of the newest step.

        Args:
            job: its id or name.
            step: the step; with `purpose="eval"` the evaluated version.
            min_reward: only rollouts with at least this reward.
            max_reward: only rollouts with at most this reward.
            limit: most rollouts, in data order; read in pages.
            purpose: rollouts of training or of an evaluation.
            problem: only rollouts of this problem.
            tokens: include the text and logprob of each token.
        """
        params: dict[str, Any] = {
            "step": step, "min_reward": min_reward, "max_reward": max_reward, "purpose": purpose, "problem": problem,
            "tokens": tokens or None,
        }  # fmt: skip
        path = f"{path_of('jobs', job)}/rollouts"
        found: Rollouts = await self._ask(Rollouts, "GET", path, params={**params, "limit": min(limit, _ROLLOUTS)})
        while found.next is not None and (missing := limit - len(found.data)) > 0:
            params |= {"step": found.step, "after": found.next, "limit": min(missing, _ROLLOUTS)}
            page = await self._ask(Rollouts, "GET", path, params=params)
            found = page.model_copy(update={"data": found.data + page.data})
        return found

    async def steps(self, job: str, fields: Sequence[str] = (), points: int = 5000) -> list[dict[str, Any]]:
        """Lines of a job's metrics.jsonl, or some of their fields; if there are more than `points`, thinned evenly."""
        params = {"field": list(fields), "points": points}
        return (await self._ask(Steps, "GET", f"{path_of('jobs', job)}/steps", params=params)).data
