"""What one job may ask of a service, whoever its tenant is: how large its numbers, lists and texts may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from motet.algorithms.policy_gradient import PolicyGradient
from motet.config import DataConfig, JobConfig
from motet.errors import ConfigError
from motet.tasks.dataset import parts_of
from motet.tasks.row_files import OF_A_JOB

MOST: Mapping[str, int] = {
    "steps": 1_000_000,
    "data.size": OF_A_JOB.rows,
    "data.holdout": 100_000,
    "sampling.max_tokens": 1_000_000,
    "algorithm.group_size": 1024,
    "algorithm.groups_per_step": 16_384,
    "algorithm.max_off_policy_steps": 1000,
    "algorithm.updates_per_batch": 1000,
    "algorithm.rows_per_step": 131_072,
    "eval.n": 1024,
    "checkpoint.keep": 10_000,
}
"""The largest values of a job's fields here: without bounds, one job could take the memory of all."""
MOST_ROLLOUTS = 131_072
"""Of one step, with those that are sampled to be left out."""
MOST_EVALUATED = 1_048_576
"""Completions of one evaluation."""
MOST_TEXT = 100_000
"""Characters of data.template and of data.system."""
MOST_LISTED = 64
"""Rewards of a job, and stop strings."""
LONGEST_STOP = 200
"""Characters of a stop string: each is looked for at every token."""
TEMPLATE_PARAMETERS = frozenset(
    (
        "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
        "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict",
        "return_assistant_tokens_mask", "tokenizer_kwargs", "messages", "self",
    )
)  # fmt: skip
"""What `transformers`' apply_chat_template takes itself; `chat_template` would be a program of the tenant's."""
_LONGEST_ARGUMENT = 200


def check_sizes(config: JobConfig) -> None:
    """Look at numbers and lists.

    Raises:
        ConfigError: which field is too large, and the most.
    """
    for name, most in MOST.items():
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part, None)  # not every algorithm has every field
        if value is not None and value > most:
            raise ConfigError(f"{name}: {value} is more than {most}, the most here")
    algorithm, rollouts = config.algorithm, 0.0
    if isinstance(algorithm, PolicyGradient):
        rollouts = algorithm.groups_per_step * algorithm.oversampling * algorithm.over_provision * algorithm.group_size
    for what, count, most in (
        ("algorithm: groups_per_step · group_size rollouts of a step", rollouts, MOST_ROLLOUTS),
        ("data.holdout · eval.n completions of an evaluation", config.data.holdout * config.eval.n, MOST_EVALUATED),
        ("rewards", len(config.rewards), MOST_LISTED),
        ("sampling.stop", len(config.sampling.stop), MOST_LISTED),
        ("characters of a text of sampling.stop", max(map(len, config.sampling.stop), default=0), LONGEST_STOP),
    ):
        if count > most:
            raise ConfigError(f"{what}: {count:.0f} are more than {most}, the most here")


def check_texts(data: DataConfig) -> None:
    """Look at what makes prompts.

    Raises:
        ConfigError, DataError: what is too long, or no business of a job's.
    """
    for name, text in (("template", data.template), ("system", data.system)):
        if text is not None and len(text) > MOST_TEXT:
            raise ConfigError(f"data.{name}: {len(text)} characters are more than {MOST_TEXT}, the most here")
    if data.template is not None:
        parts_of(data.template)
    for name, value in data.chat_template_kwargs.items():
        if name in TEMPLATE_PARAMETERS:
            raise ConfigError(
                f"data.chat_template_kwargs.{name}: this is not a variable of the chat template; give those that it has, such "
                "as enable_thinking"
            )
        if not isinstance(value, bool | int | float | str | None) or len(str(value)) > _LONGEST_ARGUMENT:
            raise ConfigError(
                f"data.chat_template_kwargs.{name:.80}: give true, false, a number or a text of at most {_LONGEST_ARGUMENT} "
                "characters"
            )
