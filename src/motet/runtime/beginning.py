"""What a job keeps from its beginning, whatever a newer release would choose: its rules, its clock, its learning rate.

A change of rules whose old form is gone is one of `CONCERNS`: jobs that began before are told if it concerns them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from motet.algorithms.rows import RowAlgorithm
from motet.config import JobConfig
from motet.core.errors import RunError
from motet.core.model_info import ModelInfo
from motet.core.rules import NEWEST, Rules
from motet.core.types import Message
from motet.runtime.checkpoint import FORKED, JobDirectory
from motet.runtime.opening import changed_since, identity_in, shared_fields
from motet.tasks import pace
from motet.tasks.chat import Chat
from motet.tasks.clock import moment
from motet.tasks.conversation import is_plain
from motet.tasks.dataset import Dataset
from motet.tasks.rewards import read_otherwise
from motet.tasks.rows import continuations_of


@dataclass(frozen=True)
class Concern:
    """A change that decides the bytes of some jobs."""

    since: int
    """Number of the first rules with it."""
    change: str
    """What is done otherwise now, in words for the job's owner."""
    of: Callable[[ModelInfo, JobConfig, Chat, Dataset], bool]
    """Whether it changes a job's bytes. It may read all rows: it is asked for older jobs alone."""


def _turns_differ(info: ModelInfo, config: JobConfig, chat: Chat, data: Dataset) -> bool:
    """Whether a job learns turns that were put together from their texts, and its template writes them otherwise."""
    if (
        not isinstance(algorithm := config.algorithm, RowAlgorithm)
        or algorithm.kind == "soft"
        or not chat.chat_template
    ):
        return False
    if not is_plain(chat, "a"):
        return True
    given = _messages(config, data, prompts=algorithm.kind == "answer")  # of which all turns are learned
    spaced = any(one.content != one.content.strip() for one in given if one.role == "assistant")
    return spaced and not is_plain(chat, " a ")


def _parts_differ(info: ModelInfo, config: JobConfig, chat: Chat, data: Dataset) -> bool:
    """Whether a job may read or say more than texts: what was done of that is gone."""
    if config.environment.own:
        return True
    given = _messages(config, data) if chat.chat_template else ()
    return any(one.thought or one.tool_calls or one.role == "tool" for one in given)


def _messages(config: JobConfig, data: Dataset, *, prompts: bool = True) -> Iterator[Message]:
    """The messages of a job's rows: of prompts, and of what is learned behind them."""
    kind = config.algorithm.kind if isinstance(config.algorithm, RowAlgorithm) else "soft"
    for row in itertools.chain(data.train, data.holdout):
        pace.step()
        yield from row.messages if prompts else ()
        for answer in continuations_of(row, kind, config.data.source) if kind != "soft" else ():
            yield from answer


def _tests_differ(info: ModelInfo, config: JobConfig, chat: Chat, data: Dataset) -> bool:
    """Whether `code` reads a row's tests otherwise: those as JSON text, and inputs and outputs that are null."""
    columns = [one.args.get("column", "tests") for one in config.rewards if one.name == "code"]
    rows = itertools.chain(data.train, data.holdout) if columns else ()
    return any(read_otherwise(row.metadata, column) for row in rows for column in columns)


CONCERNS: tuple[Concern, ...] = (
    Concern(1, "ids that the tokenizer has no token for are never sampled", lambda info, *_: bool(info.without_token)),
    Concern(1, "turns are learned as the chat template writes them", _turns_differ),
    Concern(1, "thoughts, tool calls and their results are read and written in the base's own form", _parts_differ),
    Concern(1, "tests as JSON, and inputs and outputs that are null, are read as such (reward code)", _tests_differ),
)
"""One entry for each change whose old form is gone."""


def changes_for(rules: Rules, info: ModelInfo, config: JobConfig, chat: Chat, data: Dataset) -> list[str]:
    """What is done otherwise than when a job with these rules began, of all that concerns it."""
    later = (one for one in CONCERNS if rules.number < one.since and one.of(info, config, chat, data))
    return [f"{one.change}, unlike when this job began" for one in later]


def rules_at(directory: JobDirectory, known: Mapping[str, Any], today: Rules) -> Rules:
    """The rules that a job began with; those of `today` if it begins now, also because it was changed before a step.

    Args:
        directory: the job's directory, or that of the job that is derived again.
        known: what `identity.of_config` says of the job.
        today: the newest rules, with the present time.

    Raises:
        RunError: a newer release made the directory, or its newest commit is damaged.
    """
    done = directory.newest()
    if done is None:
        return today
    if done.rules > NEWEST:
        raise RunError(
            f"{directory.path} was begun by a newer Motet, with rules {done.rules}; this one knows those up to {NEWEST}: "
            "install that release to go on, or use another run directory"
        )
    if not done.step and not (directory.path / FORKED).exists() and changed_since(directory, known):
        return today
    return Rules(done.rules, done.clock or moment(_first_commit(directory)))


def _first_commit(directory: JobDirectory) -> float:
    """The time of a job's first commit, as its files have it; of the oldest one that is kept, if it has no receipt."""
    receipt = directory.receipts / "v0.json"
    files = [receipt] if receipt.is_file() else (directory.path / "state").glob("*/*")
    return min(one.stat().st_mtime for one in files)


def rate_so_far(directory: JobDirectory, job: Mapping[str, Any]) -> float | None:
    """The learning rate of a job's steps; None without steps, and if one of the settings `job` was another then."""
    before = identity_in(directory) if directory.steps() else None
    if before is None:
        return None
    then, now = before.get("job") or {}, json.loads(json.dumps(job))
    rate = before.get("learning_rate") if shared_fields(then, now) == shared_fields(now, then) else None
    return float(rate) if rate is not None else None
