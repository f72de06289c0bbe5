"""What a job keeps from its beginning, whatever a newer release would choose: its rules, its clock, its learning rate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from motet.core.errors import RunError
from motet.runtime.checkpoint import FORKED, JobDirectory
from motet.runtime.damage import identity_in
from motet.runtime.opening import changed_since, shared_fields
from motet.runtime.receipts import builder_of, read_receipt

RULES = 4
"""Number of the rules that decide a job's bytes besides its settings: how rows are drawn and read, prompts written, the
vocabulary bounded and the gradients of a client's data added. Whoever changes their meaning raises it together with Motet's
version, because only versions with its number finish a job as it began."""


def other_rules(directory: JobDirectory) -> str:
    """Say by which other rules a job has done steps, and which Motet has them; empty if it has done none by others.

    Raises:
        RunError: its newest commit or that one's receipt is damaged.
    """
    done = directory.newest()
    if done is None or not done.step or done.rules == RULES:
        return ""
    receipt = directory.receipts / f"v{done.step}.json"
    version = builder_of(read_receipt(receipt)) if receipt.is_file() else "of before 0.1.0"
    return (
        f"was trained by Motet {version} with rules {done.rules}, and this is Motet {metadata.version('motet')} with rules "
        f"{RULES}"
    )


def check_rules(directory: JobDirectory) -> None:
    """Refuse a job that began under other rules, unless it is a fork. Raises RunError, which names the Motet with them."""
    if not (directory.path / FORKED).exists() and (why := other_rules(directory)):
        raise RunError(
            f"{directory.path} {why}: finish it with that Motet, or continue it by the rules of this one with "
            "--accept-changes (accept_changes=True in Python); it is then inexact"
        )


def clock_at(directory: JobDirectory, known: Mapping[str, Any], now: str) -> str:
    """Return the time that a job's chat template sees: that of its beginning.

    It is `now` for a job that begins now, also because it was changed before a step, and for one that stored no time.

    Args:
        directory: the job's directory, or that of the job that is derived again.
        known: what `identity.of_config` says of the job.
        now: the present time, as `clock.moment` writes it.

    Raises:
        RunError: its newest commit is damaged.
    """
    done = directory.newest()
    if done is None:
        return now
    if not done.step and not (directory.path / FORKED).exists() and changed_since(directory, known):
        return now
    return done.clock or now


def rate_so_far(directory: JobDirectory, job: Mapping[str, Any]) -> float | None:
    """The learning rate of a job's steps; None without steps, and if one of the settings `job` was another then."""
    before = identity_in(directory) if directory.steps() else None
    if before is None:
        return None
    then, now = before.get("job") or {}, json.loads(json.dumps(job))
    rate = before.get("learning_rate") if shared_fields(then, now) == shared_fields(now, then) else None
    return float(rate) if rate is not None else None
