"""What a client asked of its session, one file a command, and what came of each.

The files are the journal: after a crash the session goes back to its last commit and obeys again what came later, which
ends with the same bytes.

    <job>/commands/
      model.json         what the client said of its model
      <number>.cmd       one command; numbers begin at 0 and are obeyed in order, whatever order they come in
      <number>.sum       its digest: who sends another under its number hears of it
      <number>.out       its outcome
      <number>.new       its outcome while the version that it makes is committed
      <number>.stop      there since its client cancelled it, where it was not done
      finished           there since the client said that no more will come
      looked             what commands without a gradient took of the step under way

Whoever writes a file renames it into place when it is whole and synced. A command is written once: who sends it again
changes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from motet.algorithms.client import datum
from motet.batch import Sample
from motet.checksums import sync
from motet.types import FloatArray

KEPT = 4096
"""Outcomes of so many commands before the newest commit are kept for a client that asks again."""
KEPT_BYTES = 2**26
"""Of those outcomes, besides the ones of the newest commit."""
_UNDONE = (".cmd", ".part", ".new", ".stop")
"""Ends of files that a session needs no more once it is over."""


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A float32 array."""

    data: bytes
    shape: tuple[int, ...]

    @classmethod
    def of(cls, values: FloatArray) -> Tensor:
        """An array as a file keeps it."""
        return cls(values.astype("<f4").tobytes(), values.shape)

    def array(self) -> FloatArray:
        """The array again."""
        return np.frombuffer(self.data, "<f4").reshape(self.shape)


class Datum(msgspec.Struct, frozen=True, array_like=True):
    """One sequence of T tokens, and what each place of it is to predict."""

    tokens: bytes
    """int32 [T]."""
    targets: bytes
    """int32 [T] or [T, K]; those of place t are predicted from the tokens up to t."""
    n_targets: int
    """K, or 0 where there is one target of each place."""
    weights: Tensor | None = None  # [T] or [T, K]
    logprobs: Tensor | None = None  # [T]
    advantages: Tensor | None = None  # [T]
    sequence_ratio_mask: Tensor | None = None  # [T] 0 or 1

    @property
    def length(self) -> int:
        """How many tokens it has."""
        return len(self.tokens) // 4

    @property
    def work(self) -> int:
        """What it is charged (`Sample.work`)."""
        return (self.length + 1) * max(1, self.n_targets)

    def sample(self) -> Sample:
        """The trainable sequence of T + 1 tokens (`algorithms.client.datum`)."""
        targets = np.frombuffer(self.targets, "<i4").reshape((-1, self.n_targets) if self.n_targets else (-1,))
        names = ("weights", "logprobs", "advantages", "sequence_ratio_mask")
        inputs = {name: tensor.array() for name in names if (tensor := getattr(self, name)) is not None}
        return datum(np.frombuffer(self.tokens, "<i4"), targets, **inputs)


class Command(msgspec.Struct, frozen=True, tag=True):
    """Base of what a client can ask."""


class ForwardBackward(Command, frozen=True):
    """Add a gradient, or only look at the loss."""

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
    """Write the adapter down, with the optimizer's state and a gradient that waits for its step where asked."""

    place: str
    """Below the job's `checkpoints`."""
    optimizer: bool
    about: dict[str, Any] = {}
    """Kept beside it; its `number` is the command's, and with a `ttl` it `expires` so many seconds after it was saved."""
    answer: dict[str, Any] = {}


class Load(Command, frozen=True):
    """Go on from an adapter that was saved, as the next version."""

    directory: str
    optimizer: bool
    answer: dict[str, Any] = {}


class Nothing(Command, frozen=True):
    """A number that stands for no work: the model's start, or a request that was refused."""

    answer: dict[str, Any] = {}


AnyCommand = ForwardBackward | OptimStep | Save | Load | Nothing


class Outcome(msgspec.Struct, frozen=True, tag=True):
    """Base of what comes of a command."""


class Gradient(Outcome, frozen=True):
    """What `ForwardBackward` gave."""

    logprobs: list[Tensor]
    """Of each datum's targets, [T] or [T, K]."""
    metrics: dict[str, float]


class Done(Outcome, frozen=True):
    """A command that is no `ForwardBackward` was carried out."""

    answer: dict[str, Any] = {}
    """What the client is told."""


class Failed(Outcome, frozen=True):
    """The command changed nothing, and why."""

    reason: str


AnyOutcome = Gradient | Done | Failed


class JournalError(ValueError):
    """Another command has this number."""


class Journal:
    """The commands of one session. The client's side and the session's may be different processes."""

    def __init__(self, job: Path) -> None:
        """`job` is the job's directory."""
        self.path = job / "commands"

    # --- the client's side ---------------------------------------------------------------------------------------------

    def write(self, number: int, command: AnyCommand) -> None:
        """Keep a command; the same again changes nothing.

        Raises:
            JournalError: another has this number.
        """
        self.put(number, msgspec.msgpack.encode(command))

    def put(self, number: int, data: bytes) -> None:
        """`write` of a command that is encoded already."""
        digest = hashlib.sha256(data).digest()
        known = self._read(number, "sum")
        if known is None:
            self.path.mkdir(parents=True, exist_ok=True)
            self._put(number, "cmd", data)
            self._put(number, "sum", digest)
        elif known != digest:
            raise JournalError(f"request {number} of this model was another one; numbers are used once")

    def outcome(self, number: int) -> AnyOutcome | None:
        """What came of a command; None where it has not been obeyed yet."""
        data = self._read(number, "out")
        return None if data is None else msgspec.msgpack.decode(data, type=AnyOutcome)

    def done(self, number: int) -> bool:
        """Whether there is an outcome of a command."""
        return self._file(number, "out").exists()

    def known(self, number: int) -> bool:
        """Whether a command of this number ever came."""
        return self._file(number, "sum").exists() or self._file(number, "cmd").exists()

    def cancel(self, number: int) -> None:
        """Ask the session to end a gradient, if it is not done."""
        if self.known(number) and not self.done(number):
            self._file(number, "stop").touch()

    def cancelled(self, number: int) -> bool:
        """Whether a command was cancelled before its outcome was there."""
        return self._file(number, "stop").exists() and not self.done(number)

    def end(self, *, outcomes: bool) -> None:
        """Remove what a session that is over needs no more: commands, and unless they may be fetched, their outcomes."""
        for path in list(self.path.glob("*")):
            if path.stem.partition(".")[0].isdecimal() and (path.suffix in _UNDONE or not outcomes):
                path.unlink(missing_ok=True)

    def finish(self) -> None:
        """No more commands will come."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "finished").touch()

    def describe(self, about: dict[str, Any]) -> None:
        """Keep what the client said of its model."""
        self.path.mkdir(parents=True, exist_ok=True)
        _write(self.path / "model.json", msgspec.json.encode(about))

    def description(self) -> dict[str, Any]:
        """What `describe` kept; empty before."""
        try:
            return msgspec.json.decode((self.path / "model.json").read_bytes(), type=dict[str, Any])
        except FileNotFoundError:
            return {}

    def waiting_bytes(self) -> int:
        """Of the commands that wait, and of the gradients that wait for their step."""
        n_bytes = 0
        for path in self.path.glob("*.cmd"):
            with contextlib.suppress(FileNotFoundError):  # the session's side drops what is done
                n_bytes += path.stat().st_size
        return n_bytes

    def work_again(self) -> int:
        """What a session that resumes is charged again: for gradients that are done and wait for their step (`Sample.work`)."""
        numbers = [int(path.stem) for path in self.path.glob("*.cmd") if self.done(int(path.stem))]
        kept = (one for number in numbers if isinstance(one := self.command(number), ForwardBackward))
        return sum(datum.work for one in kept for datum in one.data)

    # --- the session's side --------------------------------------------------------------------------------------------

    def command(self, number: int) -> AnyCommand | None:
        """A command; None where it has not come yet."""
        data = self._read(number, "cmd")
        return None if data is None else msgspec.msgpack.decode(data, type=AnyCommand)

    def answer(self, number: int, outcome: AnyOutcome, *, hidden: bool = False) -> None:
        """Keep what came of a command; a hidden outcome is there once it is revealed."""
        self._put(number, "new" if hidden else "out", msgspec.msgpack.encode(outcome))

    def looked(self, step: int) -> tuple[int, int]:
        """The last command without a gradient of a step, and the tokens of all of them: they are dropped when they are done."""
        try:
            of, number, tokens = msgspec.msgpack.decode((self.path / "looked").read_bytes(), type=tuple[int, int, int])
        except FileNotFoundError:
            return -1, 0
        return (number, tokens) if of == step else (-1, 0)

    def look(self, step: int, number: int, tokens: int) -> None:
        """Keep these."""
        _write(self.path / "looked", msgspec.msgpack.encode((step, number, tokens)))

    def reveal(self, before: int) -> None:
        """Hidden outcomes of commands before a number, which are in a commit, are there; others never came to be."""
        for path in list(self.path.glob("*.new")):
            if int(path.stem) < before:
                path.rename(path.with_suffix(".out"))
            else:
                path.unlink()

    @property
    def finished(self) -> bool:
        """Whether no more commands will come."""
        return (self.path / "finished").exists()

    def drop(self, number: int) -> None:
        """A command that changed nothing, or what lies in files, is done: it need never be obeyed again."""
        self._file(number, "cmd").unlink(missing_ok=True)

    def forget(self, before: int, since: int = 0) -> None:
        """Commands before a number are in a commit: their bodies go, and outcomes that nobody can still want.

        `since` is the first command of that commit: outcomes from there on stay, whatever their size.
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

    def _put(self, number: int, kind: str, data: bytes) -> None:
        _write(self._file(number, kind), data)


def _write(path: Path, data: bytes) -> None:
    draft = path.with_name(f"{path.name}.part")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    sync(path.parent)
