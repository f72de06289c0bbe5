"""The section of one job."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, SerializeAsAny, field_validator, model_validator

from motet.algorithms.client import ClientDriven
from motet.algorithms.policy_gradient import PolicyGradient
from motet.algorithms.presets import Grpo
from motet.algorithms.registry import Choice
from motet.algorithms.rows import RowAlgorithm
from motet.config.adapters import AdapterConfig
from motet.config.data import OF_CLIENT, DataConfig
from motet.config.optimizers import OptimizerConfig
from motet.config.stopping import StopConfig
from motet.config.team import TeamConfig, team_mistake
from motet.core.settings import Config, named
from motet.core.suggestions import close_matches

SEED_BITS = 48
LONGEST_CODE = 64_000
"""Characters of a reward's file that is sent with a job."""
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=-]{0,99}")


class RewardConfig(Config):
    """One reward. A plain string is the name."""

    name: str
    """`exact`, `contains`, `numeric`, `math`, `regex`, `length`, `grader`, `code`, `scorer`, `http`, [`judge`](judges.md),
    `file.py:function` or `module:function`. On a service also `worker` and the functions that its operator installed."""
    weight: float = Field(1.0, ge=-1e6, le=1e6)
    """Factor in the weighted sum."""
    args: dict[str, Any] = {}
    """Keyword arguments of the reward, such as `pattern` of `regex` or `target` of `length`."""
    function: Any = Field(None, exclude=True)
    """A function object, when the job is made in Python."""
    cpu_seconds: float = Field(10.0, gt=0, le=1e6)
    """CPU time for scoring one completion. Raise it for rewards that run tests."""
    wall_seconds: float = Field(120.0, gt=0, le=1e6)
    """Wall-clock limit, for rewards that wait. Set it far above the usual time."""
    memory_mb: int = Field(1024, ge=64, le=10**7)
    """Memory that the reward may use beyond what its process uses at the start. Raise it for rewards that load a model."""
    wall: bool | None = None
    """Run the reward behind a wall: no network, no files, no other processes. By default built-in rewards have a wall if
    the machine supports it, and your own code has none."""
    code: str | None = Field(None, max_length=LONGEST_CODE, exclude_if=lambda code: code is None)
    """Text of the file in `name`, which then runs behind the wall. `motet submit` sends it to a service; leave it out."""


class EnvironmentConfig(Config):
    """Who answers the model's turns."""

    TURNS: ClassVar[Mapping[str, int]] = {"single": 1, "retry": 2}
    """The most completions of one rollout, for environments without a class."""
    SHIPPED: ClassVar[Mapping[str, str]] = {
        "sandbox": "motet.environments.shipped.sandbox:Tools",
        "mcp": "motet.environments.shipped.mcp_server:Server",
        "textarena": "motet.environments.shipped.textarena:Game",
        "skyrl_gym": "motet.environments.shipped.skyrl_gym:Episode",
    }
    """The built-in classes, by name."""
    AGENT: ClassVar[str] = "agent"
    """The name for agents that run elsewhere."""

    name: str = "single"
    """`single`: one answer. `retry`: the model is told whether it was right and may answer once more. `sandbox`, `mcp`,
    `textarena`, `skyrl_gym`: built-in classes. `file.py:Class`: your class with tools or `step(text)`. `file.py:function`:
    your agent. `agent`: an agent that `motet agent` runs beside a service."""
    args: dict[str, Any] = {}
    """Keyword arguments of the class or agent."""
    max_turns: int = Field(8, ge=1, le=1000)
    """Largest number of turns of a rollout with a class, or of calls by an agent."""
    cpu_seconds: float = Field(10.0, gt=0, le=1e6)
    """CPU time of one call. Raise it for tools that compute."""
    wall_seconds: float = Field(120.0, gt=0, le=1e6)
    """Wall-clock limit of one call; for an agent, of a whole rollout. Set it far above the usual time."""
    memory_mb: int = Field(1024, ge=64, le=10**7)
    """Memory that the environment may use beyond what its process uses at the start. Raise it for tools that load data."""

    @property
    def own(self) -> bool:
        """Whether it is a class, or an agent."""
        return self.name not in self.TURNS

    @property
    def elsewhere(self) -> bool:
        """Whether it is an agent that runs elsewhere."""
        return self.name == self.AGENT

    @property
    def target(self) -> str:
        """The location of the class: `module:name` or `file.py:name`."""
        return self.SHIPPED.get(self.name, self.name)

    @property
    def turns(self) -> int:
        """The most completions of one rollout."""
        return self.max_turns if self.own else self.TURNS[self.name]

    @field_validator("name")
    @classmethod
    def _is_there(cls, name: str) -> str:
        if ":" not in name and name not in (known := (*cls.TURNS, *cls.SHIPPED, cls.AGENT)):
            near = close_matches(name, known)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"must be {', '.join(known)}, or file.py:Class for one of your own{meant}")
        return name


class SamplingConfig(Config):
    """How training rollouts are drawn."""

    temperature: float = Field(1.0, gt=0, le=1000)
    """Sampling temperature. The trainer uses it too."""
    max_tokens: int = Field(256, ge=1, le=10**7)
    """Largest number of tokens of one turn."""
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True)] = []
    """Stop strings, in addition to the end-of-turn token."""


class EvalConfig(Config):
    """Evaluation on held-out problems: at the start, every `every` steps and at the end."""

    every: int = Field(10, ge=0, le=10**7)
    """Steps between evaluations; 0 evaluates only at the start and the end."""
    n: int = Field(1, ge=1, le=10**5)
    """Completions per held-out problem. Raise it for narrower intervals with few rows."""
    temperature: float = Field(1.0, ge=0, le=1000)
    """0 is greedy, for whoever's application answers so."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling, for whoever's application has it."""
    top_k: int = Field(0, ge=0, le=10**9)
    """Sample among the k most likely tokens; 0 means no limit. For whoever's application has it."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Drop tokens less likely than this times the most likely one. For whoever's application has it."""
    common_random_numbers: bool = False
    """Sample every evaluation with the same random numbers: an answer changes only where the adapter changed it. Versions
    compare with less noise."""
    confirm: bool = False
    """Leave every third held-out row out of the choice of the best version, so that these rows can confirm it
    ([Search settings](search.md))."""

    def count(self, steps: int) -> int:
        """Evaluations of a job with held-out problems."""
        return 2 if self.every == 0 else math.ceil(steps / self.every) + 1


class CheckpointConfig(Config):
    """What is kept on disk."""

    every: int = Field(1, ge=1, le=10**7)
    """Steps between commits. A resumed job continues from the last one. Evaluated versions are always committed, and so is
    every step of a job with `max_off_policy_steps`."""
    keep: int = Field(2, ge=1, le=10**7)
    """Number of newest commits to keep, in addition to the best one by evaluation."""
    rollouts_mb: float = Field(64.0, ge=0)
    """Limit of a job's rollout logs; older steps are deleted first. Raise it to read all answers later."""


def _reward_list(value: Any) -> Any:
    """Accept one reward, a list, or a mapping of name to weight."""
    if isinstance(value, dict) and "name" not in value:
        value = [{"name": name, "weight": weight} for name, weight in value.items()]
    if isinstance(value, str | dict) or callable(value):
        value = [value]
    if not isinstance(value, list):
        return value
    return [_one_reward(item) for given in value for item in _weighted(given)]


def _weighted(given: Any) -> list[Any]:
    """Expand a mapping of name to weight to a list of rewards."""
    if not isinstance(given, dict) or not all(isinstance(weight, int | float) for weight in given.values()):
        return [given]
    return [{"name": name, "weight": weight} for name, weight in given.items()]


def _one_reward(item: Any) -> Any:
    """Expand a reward given by its name, or as a function."""
    if callable(item):
        return {"name": getattr(item, "__name__", "reward"), "function": item}
    if isinstance(item, str):
        item = {"name": item}
    if isinstance(item, dict) and str(item.get("name")).startswith("regex:"):
        item = {**item, "name": "regex", "args": {"pattern": item["name"].partition(":")[2], **item.get("args", {})}}
    return item


PRIORITIES = {"low": -10, "normal": 0, "high": 10}
"""Priority classes, by name."""


def _priority(value: Any) -> Any:
    """Accept the name of a priority class."""
    if isinstance(value, str) and value not in PRIORITIES:
        raise ValueError(f"must be a number, or one of {', '.join(PRIORITIES)}")
    return PRIORITIES[value] if isinstance(value, str) else value


class JobConfig(Config):
    """One job: which adapter to train, on which data, for which reward."""

    name: str
    """Name of the adapter and its directory."""
    data: Annotated[DataConfig, named("source")]
    """Problems to learn from."""
    rewards: Annotated[list[RewardConfig], Field(fail_fast=True), BeforeValidator(_reward_list)] = []
    """What to learn: one reward, a list, or a mapping of name to weight. `reward` is another name for this field.
    Algorithms that sample need one, except `distill`; algorithms that learn from rows take none."""
    environment: Annotated[EnvironmentConfig, named("name")] = EnvironmentConfig()
    """What answers the turns of the model. A plain string is the name."""
    adapter: SerializeAsAny[AdapterConfig] = AdapterConfig()
    """Shape and start of the adapter."""
    sampling: SamplingConfig = SamplingConfig()
    """How rollouts are sampled."""
    algorithm: Annotated[Choice, named("type")] = Grpo()
    """How the adapter learns: the name of an algorithm, or its `type` and settings."""
    optimizer: SerializeAsAny[OptimizerConfig] = OptimizerConfig()
    """AdamW and its schedule."""
    steps: int = Field(50, ge=1, le=10**7)
    """Number of rollout batches to train on."""
    seed: int | None = None
    """Seed of everything random in the job. By default it is derived from the name. Sweep it to see the noise."""
    eval: EvalConfig = EvalConfig()
    """Evaluation on held-out problems."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is kept on disk."""
    priority: Annotated[int, BeforeValidator(_priority)] = Field(0, ge=-100, le=100)
    """Jobs with a higher priority take free slots first, and every 10 doubles the share of a job. `low` is -10, `normal` 0
    and `high` 10."""
    budget: int | None = Field(None, ge=1, le=10**15)
    """The job pauses at the end of the step in which it has sampled and trained this many tokens. Raise it to continue."""
    stop_when: StopConfig = StopConfig()
    """When the job ends before its last step, as succeeded."""
    team: TeamConfig = {}
    """[Roles](roles.md) of several adapters that this job trains in the same episodes, each with its own reward: a list of
    roles, or a mapping of role to its settings (`motet run` on one host with the embedded engine only)."""

    @model_validator(mode="before")
    @classmethod
    def _reward_alias(cls, value: Any) -> Any:
        if isinstance(value, dict) and "reward" in value:
            if "rewards" in value:
                raise ValueError("give `reward` or `rewards`, not both")
            value = {**value, "rewards": value["reward"]}
            del value["reward"]
        return value

    @field_validator("rewards")
    @classmethod
    def _something_counts(cls, rewards: list[RewardConfig]) -> list[RewardConfig]:
        if rewards and not any(reward.weight for reward in rewards):
            raise ValueError("every weight is 0, so there is nothing to learn; give at least one reward another weight")
        return rewards

    @model_validator(mode="after")
    def _something_is_learned(self) -> JobConfig:
        if self.data.source == OF_CLIENT and not isinstance(self.algorithm, ClientDriven):
            raise ValueError("data.source: is missing; name a file, or a generated source such as `toy:add`")
        if self.data.source == OF_CLIENT and self.data.eval_source is not None:
            raise ValueError("data.eval_source: a client evaluates itself; leave it out")
        if isinstance(self.algorithm, RowAlgorithm):
            if self.rewards:
                raise ValueError(
                    f"reward: {self.algorithm.type} learns the data's rows and asks no reward; leave it out"
                )
        elif not self.rewards and not self.environment.own and self.algorithm.needs_rewards:
            raise ValueError("reward: is missing; name one, such as `exact`, or `file.py:function` for your own")
        elif self.environment.name == "retry" and not self.rewards:
            raise ValueError(
                "environment: retry asks again after a reward below 1, and nothing rewards the answers of this job; give it "
                "a reward, or leave retry out"
            )
        return self

    @model_validator(mode="after")
    def _stops_algorithm_and_team_fit(self) -> JobConfig:
        algorithm, rows = self.algorithm, isinstance(self.algorithm, RowAlgorithm)
        if self.stop_when.rules and isinstance(algorithm, ClientDriven):
            raise ValueError("stop_when: a client ends its job itself; leave it out")
        mistake = self.stop_when.mistake(
            rows=rows,
            rewarded=bool(self.rewards) or self.environment.own,
            held_out=self.data.holdout != 0,
            every=self.eval.every,
            steps=self.steps,
            measures_kl=isinstance(algorithm, PolicyGradient) and algorithm.needs_reference,
            taught=algorithm.compared_field == "teacher" and algorithm.compared_with != "base",
        )
        mistake = mistake or algorithm.mistake(self.sampling.max_tokens)
        if self.team:
            mistake = mistake or team_mistake(self.team, algorithm, self.environment.name, self.adapter.init)
        if mistake is not None:
            raise ValueError(mistake)
        return self

    @field_validator("name")
    @classmethod
    def _name_is_a_directory(cls, name: str) -> str:
        if not NAME_PATTERN.fullmatch(name):
            raise ValueError("must have at most 100 letters, digits and _ . = -, and begin with a letter or digit")
        return name

    @property
    def slots(self) -> int:
        """The number of adapters that the trainer holds for the job."""
        return len(self.adapters) + self.algorithm.companions(started=self.adapter.init is not None)

    @property
    def adapters(self) -> dict[str, AdapterConfig]:
        """The shape of each role's adapter; a job without a team has the role ''."""
        if not self.team:
            return {"": self.adapter}
        ranks = {role: one.rank or self.adapter.rank for role, one in self.team.items()}
        return {role: self.adapter.model_copy(update={"rank": rank}) for role, rank in ranks.items()}

    @property
    def rl(self) -> PolicyGradient:
        """The algorithm of a job that learns from rollouts."""
        assert isinstance(self.algorithm, PolicyGradient), self.algorithm.type
        return self.algorithm

    @property
    def rollouts_per_update(self) -> float | None:
        """Rollouts per optimizer update; None for a job that samples no rollouts."""
        one = self.algorithm
        return one.group_size * one.groups_per_step / one.updates_per_batch if isinstance(one, PolicyGradient) else None

    @property
    def effective_seed(self) -> int:
        """The given seed, or one derived from the name (never from the job's position in the file)."""
        if self.seed is not None:
            return self.seed
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "little") % (1 << SEED_BITS)
