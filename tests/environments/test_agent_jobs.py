"""Which jobs of a file an agent is for."""

from __future__ import annotations

from typing import Any

import pytest

from motet.commands.agent_jobs import meant
from motet.config.jobfile import validate
from motet.core.errors import ConfigError

SINGLE = "single"


def jobs(*environments: str) -> Any:
    named = [
        {"name": f"job-{n}", "data": "toy:add", "reward": "exact", "steps": 1, "environment": name}
        for n, name in enumerate(environments)
    ]
    return validate({"base": "small", "jobs": named}, "jobs.yaml").jobs


@pytest.mark.parametrize(
    ("environments", "agent", "names", "function"),
    [
        ((SINGLE, SINGLE), "a.py:run", ["job-0", "job-1"], "a.py:run"),
        (("a.py:run", SINGLE), None, ["job-0"], "a.py:run"),
        (("a.py:run", SINGLE), "elsewhere/a.py:run", ["job-0"], "elsewhere/a.py:run"),
        (("a.py:run", "b.py:run", "agent", SINGLE), "b.py:run", ["job-1", "job-2"], "b.py:run"),
    ],
)
def test_an_agent_is_for_the_jobs_that_name_it(
    environments: tuple[str, ...], agent: str | None, names: list[str], function: str
) -> None:
    chosen, found = meant(jobs(*environments), agent)
    assert ([job.name for job in chosen], found) == (names, function)


@pytest.mark.parametrize(
    ("environments", "agent", "words"),
    [
        ((SINGLE,), None, "its jobs name no agent; give the function with yours, such as --agent agent.py:run"),
        (
            ("a.py:run", "b.py:run"),
            None,
            "several agents (a.py:run, b.py:run); run one command for each, such as with --agent a.py:run",
        ),
        (("a.py:run", "b.py:run"), "c.py:run", "the environment c.py:run; give --agent one that they have: a.py:run"),
    ],
)
def test_what_is_not_clear_is_asked_for(environments: tuple[str, ...], agent: str | None, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        meant(jobs(*environments), agent)
    assert words in str(refused.value)
