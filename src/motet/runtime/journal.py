"""The commands that a client sent to its session, and their outcomes: one file each.

After a crash, the session returns to its last commit and executes the later commands again, with identical results.

    <job>/commands/
      model.json         the client's description of its model
      <number>.cmd       one command; numbers begin at 0 and are executed in order, in whatever order they arrive
      <number>.sum       its digest, to reject another command with the same number
      <number>.out       its outcome
      <number>.new       its outcome while the version that it makes is being committed
      <number>.stop      exists if its client cancelled it before it was done
      finished           exists once the client has announced the end
      looked             tokens used by commands without a gradient in the current step

Files are synced, then renamed into place. Sending the same command again changes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from motet.algorithms.client import datum
from motet.core.batch import Sample
from motet.core.checksums import sync
from motet.core.types import FloatArray

KEPT = 4096
"""Number of outcomes before the newest commit that a client can fetch again."""
KEPT_BYTES = 2**26
"""Limit on the bytes of those outcomes; the newest commit's are not counted."""
_UNDONE = (".cmd", ".part", ".new", ".stop")
"""Suffixes of files that a finished session no longer needs."""


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A float32 array."""

    data: bytes
    shape: tuple[int, ...]

    @classmethod
    def of(cls, values: FloatArray) -> Tensor:
        """Encode an array."""
        return cls(values.astype("<f4").tobytes(), values.shape)

    def array(self) -> FloatArray:
        """Decode the array."""
        return np.frombuffer(self.data, "<f4").reshape(self.shape)


class Datum(msgspec.Struct, frozen=True, array_like=True):
    """One sequence of T tokens, with the targets of each position."""

    tokens: bytes
    """int32 [T]."""
    targets: bytes
    """int32 [T] or [T, K]; position t predicts its targets from the tokens up to and including t."""
    n_targets: int
    """K, or 0 for a single target per position."""
    weights: Tensor | None = None  # [T] or [T, K]
    logprobs: Tensor | None = None  # [T]
    advantages: Tensor | None = None  # [T]
    sequence_ratio_mask: Tensor | None = None  # [T] 0 or 1

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens) // 4

    @property
    def work(self) -> int:
        """Work that is charged (`Sample.work`)."""
        return (self.length + 1) * max(1, self.n_targets)

    def sample(self) -> Sample:
        """The trainable sequence of T + 1 tokens (`algorithms.client.datum`)."""
        targets = np.frombuffer(self.targets, "<i4").reshape((-1, self.n_targets) if self.n_targets else (-1,))
        names = ("weights", "logprobs", "advantages", "sequence_ratio_mask")
        inputs = {name: tensor.array() for name in names if (tensor := getattr(self, name)) is not None}
        return datum(np.frombuffer(self.tokens, "<i4"), targets, **inputs)


class Command(msgspec.Struct, frozen=True, tag=True):
    """Base class of client commands."""


class ForwardBackward(Command, frozen=True):
    """Add a gradient, or with `forward_only` compute only the loss."""

    data: list[Datum]
    loss: str
    settings: dict[str, float]
    forward_only: bool = False


class OptimStep(Command, frozen=True):
    """Make the next version."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_norm: float | None
    """None does not clip."""


class Save(Command, frozen=True):
    """Save the adapter; with `optimizer`, also the optimizer state and any accumulated gradient."""

    place: str
    """Relative to the job's `checkpoints`."""
    optimizer: bool
    about: dict[str, Any] = {}
    """Stored with the checkpoint. `number` is the command's; with `ttl`, `expires` is that many seconds after saving.
    """
    answer: dict[str, Any] = {}
    overwrite: bool = True
    """Whether it may replace the checkpoint of another command."""


class Load(Command, frozen=True):
    """Load a saved adapter as the next version."""

    directory: str
    optimizer: bool
    answer: dict[str, Any] = {}


class Nothing(Command, frozen=True):
    """A command without work: the model's creation, or a refused request."""

    answer: dict[str, Any] = {}


AnyCommand = ForwardBackward | OptimStep | Save | Load | Nothing


class Outcome(msgspec.Struct, frozen=True, tag=True):
    """Base class of outcomes."""


class Gradient(Outcome, frozen=True):
    """Outcome of `ForwardBackward`."""

    logprobs: list[Tensor]
    """Of each datum's targets, [T] or [T, K]."""
    metrics: dict[str, float]


class Done(Outcome, frozen=True):
    """Any other command was executed."""

    answer: dict[str, Any] = {}
    """Response to the client."""


class Failed(Outcome, frozen=True):
    """The command failed and changed nothing."""

    reason: str


AnyOutcome = Gradient | Done | Failed


class JournalError(ValueError):
    """Another command has this number."""


class Journal:
    """The commands of one session. Client side and session side may be in different processes."""

    def __init__(self, job: Path) -> None:
        """`job` is the job's directory."""
        self.path = job / "commands"

    # --- the client's side ---------------------------------------------------------------------------------------------

    def put(self, number: int, data: bytes) -> None:
        """Write a command in msgpack; writing the same command again changes nothing.

        Raises:
            JournalError: another command has this number.
        """
        digest = hashlib.sha256(data).digest()
        known = self._read(number, "sum")
        if known is None:
            self.path.mkdir(parents=True, exist_ok=True)
            _write((self._file(number, "cmd"), data), (self._file(number, "sum"), digest))
        elif known != digest:
            raise JournalError(f"request {number} of this model was another one; numbers are used once")

    def outcome(self, number: int) -> AnyOutcome | None:
        """The outcome of a command; None until it is done."""
        data = self._read(number, "out")
        return None if data is None else msgspec.msgpack.decode(data, type=AnyOutcome)

    def outcome_bytes(self, number: int) -> int:
        """Size of the outcome of a command; 0 until it is done."""
        try:
            return self._file(number, "out").stat().st_size
        except FileNotFoundError:
            return 0

    def done(self, number: int) -> bool:
        """Whether a command has an outcome."""
        return self._file(number, "out").exists()

    def known(self, number: int) -> bool:
        """Whether a command with this number was ever written."""
        return self._file(number, "sum").exists() or self._file(number, "cmd").exists()

    def waits(self, number: int) -> bool:
        """Whether a command is kept: it may have no outcome yet."""
        return self._file(number, "cmd").exists()

    def asked_at(self) -> float | None:
        """When the last command came, in Unix seconds; None if none is kept."""
        last = max(self.path.glob("*.sum"), default=None)
        try:
            return None if last is None else last.stat().st_mtime
        except FileNotFoundError:  # the session has just ended
            return None

    def cancel(self, number: int) -> None:
        """Ask the session to stop a gradient that is not done."""
        if self.known(number) and not self.done(number):
            self._file(number, "stop").touch()

    def cancelled(self, number: int) -> bool:
        """Whether a command was cancelled before it was done."""
        return self._file(number, "stop").exists() and not self.done(number)

    def end(self, *, outcomes: bool) -> None:
        """Delete the files of a finished session: commands and, unless `outcomes` keeps them, outcomes."""
        for path in list(self.path.glob("*")):
            if path.stem.partition(".")[0].isdecimal() and (path.suffix in _UNDONE or not outcomes):
                path.unlink(missing_ok=True)

    def finish(self, reason: str = "") -> None:
        """Announce that no more commands will come; the first `reason` other than success stays."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not self.finished:
            (self.path / "finished").write_text(reason, "utf-8")

    def describe(self, about: dict[str, Any]) -> None:
        """Store the client's description of its model."""
        self.path.mkdir(parents=True, exist_ok=True)
        _write((self.path / "model.json", msgspec.json.encode(about)))

    def description(self) -> dict[str, Any]:
        """The stored description; empty before `describe`."""
        try:
            return msgspec.json.decode((self.path / "model.json").read_bytes(), type=dict[str, Any])
        except FileNotFoundError:
            return {}

    def waiting(self) -> tuple[int, int, int]:
        """Waiting commands and gradients that wait for their step: their number and bytes; and the last number of all."""
        sizes, last = list[int](), -1
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as files:  # none before the first command
            for file in files:
                stem, _, kind = file.name.partition(".")
                last = max(last, int(stem)) if stem.isdecimal() else last
                if kind == "cmd":
                    with contextlib.suppress(FileNotFoundError):  # the session deletes finished commands meanwhile
                        sizes.append(file.stat().st_size)
        return len(sizes), sum(sizes), last

    def came_at(self, number: int) -> float | None:
        """When a command that is kept came, in Unix seconds; None if it is not there."""
        try:
            return self._file(number, "cmd").stat().st_mtime
        except FileNotFoundError:
            return None

    def refuse_behind_gap(self) -> list[int]:
        """Fail the first numbers that never came although later ones wait, and all that wait behind them.

        The session is before the gap, or waits there; it goes on with the next number. Not while `put` runs.
        """
        kinds = {name: {int(path.stem) for path in self.path.glob(f"*.{name}")} for name in ("out", "new", "cmd")}
        decided = kinds["out"] | kinds["new"]
        waiting = kinds["cmd"] - decided
        # numbers below a refused one are undecided if this was killed
        first = next(number for number in itertools.count(min(decided | waiting, default=0)) if number not in decided)
        gap = [number for number in range(first, max(decided | waiting, default=0)) if number not in waiting | decided]
        if not gap or any(self._file(gap[0], name).exists() for name in kinds):  # it was written during the look
            return []
        refused = sorted({*gap, *(number for number in waiting if number > gap[0])}, reverse=True)
        reason = (
            f"request {gap[0]} of this model never came: its program could not send it, or was refused and did not send it "
            f"again. Requests {gap[0]} to {refused[0]} are refused, because they might depend on it; the model goes on with "
            "the next one"
        )
        for number in refused:  # the first of the gap last: until then the session executes none of them
            self._file(number, "sum").touch()
            draft = self._file(number, "part")
            draft.write_bytes(
                msgspec.msgpack.encode(Failed(reason))
            )  # not synced: what a power failure takes is found again
            draft.rename(self._file(number, "out"))
            self.drop(number)
        return refused

    def work_again(self) -> int:
        """Work (`Sample.work`) charged again on resume: finished gradients that wait for their step."""
        numbers = [int(path.stem) for path in self.path.glob("*.cmd") if self.done(int(path.stem))]
        kept = (command for number in numbers if isinstance(command := self.command(number), ForwardBackward))
        return sum(datum.work for command in kept for datum in command.data)

    # --- the session's side --------------------------------------------------------------------------------------------

    def command(self, number: int) -> AnyCommand | None:
        """A command; None if it has not arrived."""
        data = self._read(number, "cmd")
        return None if data is None else msgspec.msgpack.decode(data, type=AnyCommand)

    def answer(self, number: int, outcome: AnyOutcome, *, hidden: bool = False) -> None:
        """Write an outcome; a hidden one becomes visible with `reveal`."""
        _write((self._file(number, "new" if hidden else "out"), msgspec.msgpack.encode(outcome)))

    def forward_only(self, step: int) -> tuple[int, int]:
        """The step's last command without a gradient, and the tokens of all such commands, whose files are deleted."""
        try:
            of, number, tokens = msgspec.msgpack.decode((self.path / "looked").read_bytes(), type=tuple[int, int, int])
        except FileNotFoundError:
            return -1, 0
        return (number, tokens) if of == step else (-1, 0)

    def record_forward_only(self, step: int, number: int, tokens: int) -> None:
        """Store the values that `forward_only` returns."""
        _write((self.path / "looked", msgspec.msgpack.encode((step, number, tokens))))

    def reveal(self, before: int) -> None:
        """Make hidden outcomes before a number visible; their versions are committed. Delete the others."""
        for path in list(self.path.glob("*.new")):
            if int(path.stem) < before:
                path.rename(path.with_suffix(".out"))
            else:
                path.unlink()

    @property
    def finished(self) -> bool:
        """Whether the client announced the end."""
        return (self.path / "finished").exists()

    def drop(self, number: int) -> None:
        """Delete a finished command that need not be executed again: it changed nothing, or its result is in files."""
        self._file(number, "cmd").unlink(missing_ok=True)

    def forget(self, before: int, since: int = 0) -> None:
        """Delete the bodies of committed commands, and old outcomes beyond the limits.

        `since` is the first command of the newest commit; outcomes from there on are kept, whatever their size.
        """
        kept_bytes = 0
        for path in sorted(self.path.iterdir(), reverse=True):
            kind, number = path.suffix, path.stem
            oldest = {".cmd": before, ".stop": before, ".out": before - KEPT, ".sum": before - KEPT}.get(kind, 0)
            if not number.isdecimal():
                continue
            if kind == ".out" and int(number) < since:
                kept_bytes += path.stat().st_size
            if int(number) < oldest or (kind == ".out" and int(number) < since and kept_bytes > KEPT_BYTES):
                path.unlink()

    def _file(self, number: int, kind: str) -> Path:
        return self.path / f"{number:08d}.{kind}"

    def _read(self, number: int, kind: str) -> bytes | None:
        try:
            return self._file(number, kind).read_bytes()
        except FileNotFoundError:
            return None


def _write(*files: tuple[Path, bytes]) -> None:
    """Write files of one directory; after a crash, none is there without those before it."""
    drafts = [path.with_name(f"{path.name}.part") for path, _ in files]
    for draft, (_, data) in zip(drafts, files, strict=True):
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    for draft, (path, _) in zip(drafts, files, strict=True):
        draft.rename(path)
    sync(files[0][0].parent)
