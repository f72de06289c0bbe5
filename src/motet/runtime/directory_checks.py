"""What a job's directory says of it, beside the job as it is given, and how it is opened."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from importlib import metadata
from typing import Any

import yaml

from motet.chat.clock import moment
from motet.config import JobConfig
from motet.core.checksums import replace_file
from motet.core.errors import RunError
from motet.core.plain_yaml import mapping_in, values_of
from motet.core.types import JobState
from motet.runtime.checkpoint import FORKED, Committed, JobDirectory
from motet.runtime.damage import (
    accept,
    commit_damages,
    damages,
    identity_damage,
    is_closed,
    lost_commits,
    record_damages,
)
from motet.runtime.identity import NOT_FOLLOWED, of_config
from motet.runtime.receipts import builder_of, differences, known_settings, read_receipt, without_arguments
from motet.runtime.statements import UNREACHED, sums_in
from motet.runtime.stopping import Stopping, stopped_early

RULES = 4
"""Number of the rules that decide a job's bytes besides its settings: how rows are drawn and read, prompts written, the
vocabulary bounded and the gradients of a client's data added. Whoever changes their meaning raises it together with Motet's
version, because only versions with its number finish a job as it began."""
TOO_LATE = (
    "It has ended, so nothing of the changed job would be trained. Give it another name or run directory (--run; in Python and "
    "notebooks directory=…) to train it, or undo the change to see what it gave."
)
_BEFORE = "computed_before"
_MOST_LINES = 5
"""Most changes of a file that are told."""
_BEGAN_WITH = ("rules", "clock")
"""Not compared as settings are: a job keeps its clock, and `Stored.check_rules` compares the rules."""
_RATE_FIELDS = {
    "optimizer": {"lr", "lr_multiplier"},
    "algorithm": {"group_size", "groups_per_step", "updates_per_batch"},
}
"""What the automatic learning rate depends on in a job."""


class Stored:
    """The directory of a job; each part is read where it is first asked for, and not again."""

    def __init__(self, directory: JobDirectory) -> None:
        self.directory = directory

    @cached_property
    def steps(self) -> list[int]:
        """Numbers of the kept commits."""
        return self.directory.steps()

    @cached_property
    def newest(self) -> Committed | None:
        """The newest commit; None before the first. Raises RunError if it is damaged."""
        return self.directory.committed(self.steps[-1]) if self.steps else None

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The content of job.yaml; empty if it cannot be read."""
        return mapping_in(self.directory.path / "job.yaml")

    @cached_property
    def state(self) -> str:
        """The last state that was written; empty without one."""
        return str(self.directory.read_status().get("state") or "")

    @cached_property
    def forked(self) -> bool:
        """Whether it is a fork that has not been opened yet."""
        return (self.directory.path / FORKED).exists()

    def differences(self, now: Mapping[str, Any], *, accepted: bool = False) -> list[str]:
        """How a job, or the given part of its identity, differs from the one whose steps are here, one line each.

        `now` is as job.yaml gives it back. Raises RunError if something differs that is not `accepted`.
        """
        path, accepted = self.directory.path / "job.yaml", accepted or self.forked
        if not self.steps or not path.exists() or (not self.identity and accepted):
            return []
        if not self.identity:
            raise RunError(f"{path} is damaged: put it back, or use --accept-changes to continue with the job as it is")
        changes = _changes(self.identity, now) if self.steps[-1] else []
        if changes and not accepted:
            raise RunError(
                f"{_of_another_job(self.directory, changes)}Use another run directory (--run; in Python and notebooks "
                "directory=…), undo the change, or continue with the changed job by --accept-changes (accept_changes=True in "
                "Python)."
            )
        return changes

    def other_rules(self) -> str:
        """Say by which other rules it has done steps, and which Motet has them; empty if it has done none by others.

        Raises:
            RunError: its newest commit or that one's receipt is damaged.
        """
        done = self.newest
        if done is None or not done.step or done.rules == RULES:
            return ""
        receipt = self.directory.receipts / f"v{done.step}.json"
        version = builder_of(read_receipt(receipt)) if receipt.is_file() else "of before 0.1.0"
        return (
            f"was trained by Motet {version} with rules {done.rules}, and this is Motet {metadata.version('motet')} with "
            f"rules {RULES}"
        )

    def check_rules(self) -> None:
        """Refuse a job that began under other rules, unless it is a fork. Raises RunError, which names the Motet with them."""
        if not self.forked and (why := self.other_rules()):
            raise RunError(
                f"{self.directory.path} {why}: finish it with that Motet, or continue it by the rules of this one with "
                "--accept-changes (accept_changes=True in Python); it is then inexact"
            )


class Given(Stored):
    """A job as it is given, beside its directory."""

    def __init__(
        self,
        config: JobConfig,
        directory: JobDirectory,
        installed: Mapping[str, str] | None = None,
        *,
        original: JobDirectory | None = None,
        now: str = "",
    ) -> None:
        """`original` is the directory of the job that is derived again: what that one began with holds.

        `installed` maps an operator's rewards to their functions; `now` is the time of a job that begins (`clock.moment`).
        """
        super().__init__(directory)
        self.config, self.changed = config, list[str]()
        self._installed, self._now = installed, now
        self._kept: Stored = self if original is None else Stored(original)

    @cached_property
    def known(self) -> dict[str, Any]:
        """What `identity.of_config` says of the job."""
        return of_config(self.config, self._installed)

    @cached_property
    def _plain(self) -> Any:
        return values_of(_as_yaml(self.known))

    @cached_property
    def early(self) -> str:
        """Why it ended before its last step (`stopped_early`); empty if it did not."""
        done = self.newest
        if done is None or done.step >= self.config.steps or not self.config.stop_when.rules:
            return ""
        reason = Stopping(self.config.stop_when, self.directory.read_metrics(done)).reason
        return reason and stopped_early(reason, done.step, done.best_version)

    @property
    def ended(self) -> bool:
        """Whether it is finished: it is not trained again, and its code needs no check."""
        if self.state != JobState.SUCCEEDED or not self.steps:
            return self.state == JobState.CANCELLED
        return self.steps[-1] >= self.config.steps or bool(self.early)

    @cached_property
    def clock(self) -> str:
        """The time that its chat template sees: that of its beginning.

        It is the present for a job that begins now, also because it was changed before a step, and for one that stored none.
        Raises RunError if its newest commit is damaged.
        """
        kept, done, now = self._kept, self._kept.newest, self._now or moment()
        if done is None:
            return now
        before = {} if done.step or kept.forked else kept.identity
        return now if before and _changes(before, self._plain) else done.clock or now

    @property
    def rate(self) -> float | None:
        """The learning rate of its steps; None without steps, and if what chose it was another then."""
        before = self._kept.identity if self._kept.steps else {}
        if not before:
            return None
        then, now = before.get("job") or {}, self.config.model_dump(mode="json", include=_RATE_FIELDS)
        rate = before.get("learning_rate") if _shared_fields(then, now) == _shared_fields(now, then) else None
        return float(rate) if rate is not None else None

    def check(self, *, accept_changes: bool) -> None:
        """Note accepted changes. Raises RunError for others, other rules and a damaged commit, and says what to do."""
        self.changed = self.differences(self._plain, accepted=accept_changes or self.ended)
        if self.changed and self.ended and not accept_changes:
            raise RunError(f"{self.told}{TOO_LATE}")
        if self.newest is not None and not (self.ended or accept_changes):
            self.check_rules()

    @property
    def told(self) -> str:
        """How it differs from its directory, each difference on a line."""
        return _of_another_job(self.directory, self.changed)


def open_job(
    directory: JobDirectory, identity: Mapping[str, Any], *, accept_changes: bool = False, accept_damage: bool = False
) -> tuple[str, ...]:
    """Create the directory, or check that it belongs to this job and is undamaged.

    A changed job that has done no step starts over, unless its changes are accepted.

    Args:
        directory: the job's directory.
        identity: everything the job's bytes depend on; stored in job.yaml.
        accept_changes: continue although the identity differs from the stored one.
        accept_damage: continue although logs, rollouts or versions are damaged; weights and moments must be intact.

    Returns:
        How finished steps were computed differently from the coming ones; the job's bytes then match neither setup.

    Raises:
        RunError: it belongs to a different job or is damaged; the message says what to do.
    """
    stored, text = Stored(directory), _as_yaml(identity)
    now = values_of(text)
    before, steps, accept_changes = stored.identity, stored.steps, accept_changes or stored.forked
    if steps == [0] and not accept_changes and before and _changes(before, now):
        directory.delete()
        steps = []
    else:
        stored.differences(now, accepted=accept_changes)
    for name in ("state", "versions", "rollouts"):
        (directory.path / name).mkdir(parents=True, exist_ok=True)
    otherwise = _computed_otherwise(before, now, steps[-1]) if any(steps) else []
    described = (_as_yaml({**identity, _BEFORE: otherwise}) if otherwise else text).encode()
    if accept_changes:
        _accept_changes(directory, described)
    if accept_damage and not any(commit_damages(directory)):
        newest = directory.newest()
        if newest is not None and any(record_damages(directory, newest)):
            accept(directory, newest)
    for damage in damages(directory):
        raise RunError(str(damage))
    directory.describe(described)
    return tuple(otherwise)


def _accept_changes(directory: JobDirectory, described: bytes) -> None:
    """Update job.yaml; if later commits were lost, continue from the newest one."""
    lost = directory.steps() != [] and any(lost_commits(directory))
    changed = any(identity_damage(directory))
    if changed:
        replace_file(directory.path / "job.yaml", described)
    if changed or lost:
        directory.record(directory.steps(), directory.versions(), closed=not lost and is_closed(directory))


def _computed_otherwise(before: Mapping[str, Any], now: Mapping[str, Any], step: int) -> list[str]:
    if not before:
        return ["nobody knows how its first steps were computed: job.yaml was damaged"]
    now = {**_shared_fields(before, now), **({"code": now["code"]} if "code" in now else {})}
    old, now = ({**tree, "job": without_arguments(tree.get("job") or {})} for tree in (before, now))  # receipts list it
    changes = _changes(old, now)
    known = [str(line) for line in before.get(_BEFORE, ())]
    # unlike hosts may take turns with a run: each difference is listed once
    new = (change for change in changes if not any(line.startswith(f"{change} (") for line in known))
    return [*known, *(f"{change} (from step {step} on)" for change in new)]


def _of_another_job(directory: JobDirectory, changes: Iterable[str]) -> str:
    """Say how the job of a directory differs, each difference on a line."""
    listed = "".join(f"  {change}\n" for change in changes)
    return f"{directory.path} was made by a different job, and has done {directory.steps()[-1]} steps of it:\n{listed}"


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between a job and its directory, one line each; additional steps do not count."""
    lines = list(_code_changes(before.get("code") or {}, now.get("code", {})))
    then = {key: before.get(key) for key in now if key not in ("code", NOT_FOLLOWED, *_BEGAN_WITH)}
    then |= {"job": known_settings(then["job"])} if "job" in then else {}
    lines += differences(then, {key: now[key] for key in then})
    return [line for line in lines if not (line.startswith("job.steps:") and _more_steps(before, now))]


def _code_changes(before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """The differences between two records of `CodeSums.entries`, by file and line."""
    for label in [*before, *(label for label in now if label not in before)]:
        old, new = before.get(label), now.get(label)
        if label in before and not isinstance(old, Mapping):  # edited by hand
            yield f"{label} was edited"
        elif old is None or new is None:
            entry = new or old or {}
            earlier = "sha256" in entry and "statements" in entry  # earlier records have files that nothing reaches
            if not (earlier or "all" in entry or (entry.get("statements") and not sums_in(entry, reached=True))):
                yield f"{label} is " + (
                    "new: the code did not use it before" if new else "gone: the code does not use it any more"
                )
        elif "value" in new and "value" in old:
            if old["value"] != new["value"]:
                yield f"{label}: was {old['value']}, is {new['value']}"
        elif "statements" in old and "statements" in new:
            yield from _line_changes(new.get("file", label), old, new)
        elif old.get("sha256") != new.get("sha256") or old.get("all") != new.get("all") or old.keys() != new.keys():
            yield f"{label} was edited" if label.endswith((".py", ".so")) else f"{label} has another value"


def _line_changes(file: str, before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """The statements that differ between two entries, of those that the job's functions reach."""
    sums, lines = sums_in(before, reached=True), now["statements"].split()
    others = sums_in(now, reached=False)
    matched = {0}  # how many earlier statements may be met so far: of those that nothing reaches, any may be new
    for line, digest in zip(lines, others, strict=True):
        without = matched if line.startswith(UNREACHED) else ()
        matched = {n + 1 for n in matched if sums[n : n + 1] == [digest]}.union(without)
    if len(sums) in matched:
        return
    removed = [text.partition(":")[0] for text in before["statements"].split() if not text.startswith(UNREACHED)]
    reached = [not line.startswith(UNREACHED) for line in lines]
    changes = [
        change
        for change in difflib.SequenceMatcher(None, sums, others, autojunk=False).get_opcodes()
        if change[0] != "equal" and (change[0] != "insert" or any(reached[change[3] : change[4]]))
    ]
    for kind, first, _, at, _ in changes[:_MOST_LINES]:
        if kind == "delete":
            yield f"{file}:{removed[first]} was removed (a line of the earlier file)"
        else:
            line = lines[at].removeprefix(UNREACHED).partition(":")[0]
            yield f"{file}:{line} was {'added' if kind == 'insert' else 'edited'}"
    if len(changes) > _MOST_LINES:
        yield f"{file} was edited in {len(changes) - _MOST_LINES} more places"


def _shared_fields(before: Any, now: Any) -> Any:
    """Drop fields that an earlier tree does not have: a field added by a newer Motet is not a change."""
    if isinstance(before, dict) and isinstance(now, dict):
        return {key: _shared_fields(before[key], value) for key, value in now.items() if key in before}
    return now


def _more_steps(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether only the number of steps grew, under a schedule that does not depend on it."""
    old, new = (tree.get("job") or {} for tree in (before, now))
    constant = (new.get("optimizer") or {}).get("schedule") == "constant"
    return constant and isinstance(old.get("steps"), int) and old["steps"] < new.get("steps", 0)


def _as_yaml(identity: Mapping[str, Any]) -> str:
    """The text of job.yaml."""
    return yaml.safe_dump(json.loads(json.dumps(identity)), sort_keys=False, allow_unicode=True)
