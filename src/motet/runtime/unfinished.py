"""What is done of a step that a job gave its slot away in, so that it goes on there with the same bytes.

    <job>/unfinished/done.bin      finished groups, and results of the trainer's passes, in order
                     trainer-<n>/  adapters, moments and gradients after the first n passes, if they are no commit's

Only a job that gives way writes them, after the commit of the step's start. They are dropped with the end of the step; what is
damaged, or belongs to another step or another job file, is done again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from motet.core.batch import LossStats, OptimStats, Trained
from motet.core.checksums import sync
from motet.core.types import FloatArray, Problem, Rollout
from motet.runtime.group_requests import BatchName, SamplingCost
from motet.runtime.ownership import Ownership
from motet.runtime.recorded import RecordedRollout

_SUM = 32


class KeptArray(msgspec.Struct, frozen=True):
    """A float32 array."""

    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: FloatArray) -> KeptArray:
        """Keep an array."""
        return cls(array.shape, np.ascontiguousarray(array, "<f4").tobytes())

    def array(self) -> FloatArray:
        """The array as it was."""
        return np.frombuffer(self.data, "<f4").astype(np.float32).reshape(self.shape)


class KeptGroup(msgspec.Struct, frozen=True, tag=True):
    """A finished group."""

    batch: BatchName
    position: int
    tokens: int
    """Sampled for it."""
    rollouts: tuple[RecordedRollout, ...]


class KeptCost(msgspec.Struct, frozen=True, tag=True):
    """Tokens that were sampled for groups of a step that did not finish."""

    batch: BatchName
    tokens: int


@dataclass
class _Finished:
    """A group in memory: as it was sampled, or as it was read."""

    rollouts: tuple[Rollout, ...] | None
    tokens: int
    kept: KeptGroup | None = None
    counted: bool = False
    """Whether its tokens are among the costs here."""
    on_disk: bool = False


class FinishedGroups:
    """Finished groups of unfinished steps, and what these steps cost."""

    def __init__(self) -> None:
        self._groups: dict[BatchName, dict[int, _Finished]] = {}
        self._costs: dict[BatchName, list[SamplingCost]] = {}
        self._lost: dict[BatchName, int] = {}
        """Tokens of groups that an earlier turn did not finish."""

    def read(self, kept: Iterable[KeptGroup | KeptCost]) -> None:
        """Take what an earlier turn kept."""
        for one in kept:
            if isinstance(one, KeptCost):
                self._lost[one.batch] = one.tokens
            else:
                found = _Finished(None, one.tokens, one, on_disk=True)
                self._groups.setdefault(one.batch, {})[one.position] = found

    def cost(self, batch: BatchName) -> SamplingCost:
        """The account of a part of a step; the first has what was lost before."""
        cost = SamplingCost(self._lost.pop(batch, 0))
        self._costs.setdefault(batch, []).append(cost)
        return cost

    def find(self, batch: BatchName, position: int, problem: Problem, cost: SamplingCost) -> tuple[Rollout, ...] | None:
        """A group that is finished; it is charged to `cost` as if it was sampled now."""
        found = self._groups.get(batch, {}).get(position)
        if found is None:
            return None
        if found.rollouts is None:
            assert found.kept is not None
            found.rollouts = tuple(one.rollout(problem, index) for index, one in enumerate(found.kept.rollouts))
        if not found.counted:
            found.counted = True
            cost.tokens += found.tokens
        return found.rollouts

    def add(self, batch: BatchName, position: int, rollouts: tuple[Rollout, ...], tokens: int) -> None:
        """A group is finished."""
        self._groups.setdefault(batch, {})[position] = _Finished(rollouts, tokens, counted=True)

    def forget(self, purpose: str, step: int) -> None:
        """A step is finished, and those before it."""
        for kept in (self._groups, self._costs, self._lost):
            for batch in [one for one in kept if one[0] == purpose and one[1] <= step]:
                del kept[batch]
        for groups in self._groups.values():
            for one in groups.values():
                one.on_disk = False

    def records(self, *, anew: bool) -> list[KeptGroup | KeptCost]:
        """What is not on disk, with `anew` everything."""
        records: list[KeptGroup | KeptCost] = []
        for batch, groups in self._groups.items():
            for position, one in groups.items():
                if anew or not one.on_disk:
                    kept = one.kept or KeptGroup(
                        batch, position, one.tokens, tuple(map(RecordedRollout.of, one.rollouts or ()))
                    )
                    records.append(kept)
        for batch, costs in self._costs.items():
            done = sum(one.tokens for one in self._groups.get(batch, {}).values() if one.counted)
            records.append(KeptCost(batch, sum(one.tokens for one in costs) - done))
        return [*records, *(KeptCost(batch, tokens) for batch, tokens in self._lost.items() if anew)]

    def written(self) -> int:
        """All groups are on disk now; returns how many were not."""
        new = [one for groups in self._groups.values() for one in groups.values() if not one.on_disk]
        for one in new:
            one.on_disk = True
        return len(new)


class KeptScores(msgspec.Struct, frozen=True, tag=True):
    """Logprobs of a segment's samples."""

    call: str
    logprobs: tuple[KeptArray, ...]


class KeptGradient(msgspec.Struct, frozen=True, tag=True):
    """Result of a segment whose gradient was added."""

    call: str
    stats: LossStats
    logprobs: tuple[KeptArray, ...]

    def trained(self) -> Trained:
        """The result as it was."""
        return Trained(self.stats, tuple(one.array() for one in self.logprobs))


class KeptUpdate(msgspec.Struct, frozen=True, tag=True):
    """Result of an optimizer step."""

    call: str
    stats: OptimStats


KeptPass = KeptScores | KeptGradient | KeptUpdate
Kept = KeptGroup | KeptCost | KeptPass


class _Head(msgspec.Struct, frozen=True, tag=True):
    """What the rest belongs to."""

    step: int
    job: str
    """Sum of job.yaml."""


class Unfinished:
    """The unfinished steps of a job, in memory and, if it gives way, on disk."""

    def __init__(self, job: Path, owner: Ownership) -> None:
        """`owner` refuses to write or delete what another process took over."""
        self._job, self._owner = job, owner
        self._place = job / "unfinished"
        self._file = self._place / "done.bin"
        self.groups = FinishedGroups()
        self.passes: list[KeptPass] = []
        """Of the current step."""
        self._written = 0
        """Passes that are on disk."""
        self._anew, self._whole = True, False
        """Whether the file must be written anew, and whether all of it could be read."""
        self.snapshot: Path | None = None
        """The trainer's state after all passes, if it is not that of a commit and not loaded yet."""

    def read(self, step: int) -> None:
        """Read what is done of a step, and delete what belongs to another one."""
        kept = list(self._kept()) if self._file.exists() else []
        if not kept or kept.pop(0) != self._head(step):
            self.drop()
            return
        passes, whole = [one for one in kept if isinstance(one, KeptPass)], self._whole
        if any(not isinstance(one, KeptScores) for one in passes):
            numbers = (path.name.removeprefix("trainer-") for path in self._place.glob("trainer-*"))
            number = max((int(one) for one in numbers if one.isdecimal() and int(one) <= len(passes)), default=0)
            if not number:
                self.drop()
                return
            whole, self.snapshot = whole and number == len(passes), self._place / f"trainer-{number}"
            passes = passes[:number]
        self._anew = not whole
        self.groups.read(one for one in kept if isinstance(one, KeptGroup | KeptCost))
        self.passes, self._written = passes, len(passes)

    def keep(self, step: int, save: Callable[[Path], None] | None) -> int:
        """Write what is done; `save` writes the trainer's state, if it is not that of a commit. Returns the new records."""
        with self._owner.writing():
            self._place.mkdir(exist_ok=True)
            records: list[Any] = self.groups.records(anew=self._anew)
            if self._anew:
                records = [self._head(step), *records, *self.passes]
                for old in self._place.glob("trainer-*") if self.snapshot is None else ():
                    shutil.rmtree(old)  # it may count other passes
            else:
                records += self.passes[self._written :]
            self._write(records)
            if save is not None and self.snapshot is None:
                self._save(save)
            sync(self._place)
        new, self._written, self._anew = len(self.passes) - self._written, len(self.passes), False
        return max(0, new) + self.groups.written()

    def _save(self, save: Callable[[Path], None]) -> None:
        final = self._place / f"trainer-{len(self.passes)}"
        part = self._owner.draft(final)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        save(part)
        sync(part)
        self._owner.check()  # saving may take long
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
        for old in self._place.glob("trainer-*"):
            if old != final:
                shutil.rmtree(old)

    def drop(self) -> None:
        """Forget the passes and the files: the step is finished, or begins again."""
        self.passes, self._written, self._anew, self.snapshot = [], 0, True, None
        if self._place.exists():
            self._owner.check()
            shutil.rmtree(self._place, ignore_errors=True)

    def forget_scores(self, call: str) -> None:
        """Forget the scores of a call; those before a state of the trainer on disk stay, because it counts them."""
        if self.snapshot is None:
            kept = [one for one in self.passes if not (one.call == call and isinstance(one, KeptScores))]
            self._anew |= len(kept) < len(self.passes)
            self.passes = kept

    def of_call(self, call: str) -> list[KeptPass]:
        """The passes of a call that are done."""
        return [one for one in self.passes if one.call == call]

    def _head(self, step: int) -> _Head:
        return _Head(step, hashlib.sha256((self._job / "job.yaml").read_bytes()).hexdigest())

    def _kept(self) -> Iterator[Kept | _Head]:
        """The records up to the first that is damaged or cut."""
        decoder = msgspec.msgpack.Decoder(Kept | _Head)
        with self._file.open("rb") as file:
            self._whole = False
            while len(head := file.read(8 + _SUM)) == 8 + _SUM:
                data = file.read(int.from_bytes(head[:8], "little"))
                if hashlib.sha256(data).digest() != head[8:]:
                    return
                yield decoder.decode(data)
            self._whole = not head

    def _write(self, records: Iterable[Any]) -> None:
        draft = self._owner.draft(self._file) if self._anew else self._file
        with draft.open("wb" if self._anew else "ab") as file:
            for one in records:
                data = msgspec.msgpack.encode(one)
                file.write(len(data).to_bytes(8, "little") + hashlib.sha256(data).digest() + data)
            file.flush()
            os.fsync(file.fileno())
        if self._anew:
            self._owner.check()
            draft.rename(self._file)
