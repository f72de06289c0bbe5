"""Environments of the package `verifiers` (0.4) as agents.

A job names one by `environment: {name: motet.environments.verifiers:run, args: {env: …}}`.
`python -m motet.environments.verifiers '{"taskset": {"id": "NAME"}}' > data.jsonl` writes the tasks of an environment
as rows of data.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping
from typing import Any

from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.utils.loaders import load_environment, load_taskset, resolve_env_config

from motet.core.types import Problem


async def run(problem: Problem, base_url: str, api_key: str, env: Mapping[str, Any]) -> float:
    """Run one episode; returns the sum of its trainable agents' rewards.

    `env` is the section of this name in the package's configuration. The environment is created for each episode, so
    that its connections end with it.
    """
    config = resolve_env_config(dict(env))
    environment = load_environment(config)
    kind = type(environment.taskset).task_type()
    task = kind(kind.data_type().model_validate(problem.metadata["task"]), config.taskset.task)
    client = EvalClientConfig(base_url=base_url, api_key_var="", headers={"x-api-key": api_key})
    async with environment.serving():
        episode = await environment.run_episode(task, ModelContext(model="job", client=client))
    errors = [error.message for part in (episode, *episode.traces) for error in part.errors]
    if not episode.ok:
        raise RuntimeError(errors[-1] if errors else "the environment says that the episode failed")
    for trace in episode.traces:
        if not trace.agent.trainable and _answered_here(trace.agent.config, client):
            raise RuntimeError(
                f"its agent {trace.agent.name!r} is not trainable, and is answered by the adapter that is trained: give it "
                "`sampling: {train: false}`, or a client of its own"
            )
    return float(sum(trace.reward for trace in episode.traces if trace.agent.trainable))


def _answered_here(agent: Any, client: EvalClientConfig) -> bool:
    return agent.client == client and (agent.sampling.model_extra or {}).get("train") is not False


def rows(env: Mapping[str, Any], most: int | None = None) -> list[dict[str, Any]]:
    """The tasks of an environment as rows of data: `prompt`, and `task` with all of it."""
    tasks = itertools.islice(load_taskset(resolve_env_config(dict(env)).taskset), most)
    return [
        {
            "prompt": task.data.prompt_text or task.data.system_prompt or "(the environment begins)",
            "task": task.data.model_dump(mode="json", exclude_none=True),
        }
        for task in tasks
    ]


def main() -> None:
    """Write the tasks of an environment, one JSON object per line."""
    parser = argparse.ArgumentParser("python -m motet.environments.verifiers", description=main.__doc__)
    parser.add_argument("env", type=json.loads, help='the environment, as JSON: {"taskset": {"id": "NAME"}}')
    parser.add_argument("--most", type=int, help="how many tasks; an endless taskset needs it")
    given = parser.parse_args()
    for row in rows(given.env, given.most):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
