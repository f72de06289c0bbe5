"""A session driven by a client: it executes the commands of a journal in the order of their numbers.

Each optimizer step is a version and a commit. After a crash, a pause or a lost slot, the session returns to its last
commit and executes the later commands again.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from motet.algorithms.client import ClientLoss, batch_of
from motet.config.step_tokens import check_command
from motet.core.batch import AdamW, LossFunctions, LossStats, OptimStats, Segment
from motet.core.checksums import sync
from motet.core.errors import AdapterError, JobFailed, StorageFull
from motet.core.types import FloatArray
from motet.runtime import journal as j
from motet.runtime.checkpoint import Committed
from motet.runtime.driver import Driver
from motet.runtime.job import Job, Services
from motet.runtime.learner import unheard
from motet.runtime.progress import STOPPED_EARLY, JobWorked, Obeyed
from motet.runtime.session import FinishedStep

ABOUT = "checkpoint.json"
"""Metadata file beside the adapter of a checkpoint."""
_NOTE_SECONDS = 1.0
_MOST_UNDONE = 3
"""Cancelled gradients allowed per step. After each one, the earlier gradients of the step are computed again."""
_CANCELLED = j.Failed("the request was cancelled; it added no gradient")
SNAPSHOTS = 32
"""Unnamed snapshots kept per session for sampling, newest first."""


class ClientLoop(Driver):
    """Trains an adapter by its client's commands."""

    def __init__(self, job: Job, services: Services, committed: Committed | None) -> None:
        super().__init__(job, services, committed)
        self._journal = j.Journal(job.directory.path)
        self._next = self.session.done.position
        """Number of the next command."""
        self._journal.reveal(self._next)
        self._waiting = False
        self._stats, self._samples, self._undone = LossStats(), 0, 0
        """Of the gradient that is accumulating, and how often it was undone."""
        self._forward_until, self._forward_tokens = self._journal.forward_only(self.session.done.step)
        self._tokens = self._forward_tokens
        """Tokens times targets of the current step, including passes without a gradient."""
        self._noted = 0.0
        self._work: asyncio.Task[j.AnyOutcome] | None = None
        """The gradient that is computed now."""

    @property
    def ended(self) -> bool:
        """Whether the client has finished and all its commands are done."""
        over = self._journal.finished and self._next_command() is None
        return over or super().ended

    async def step(self, step: int) -> None:
        """Execute commands until one makes the next version or the loop must stop."""
        while not self._pause and not self.ended:
            command = await self._command()
            if command is not None:
                await self._obey(command)
            if self.session.done.step > step:
                return

    async def evaluated(self) -> None:
        """Nothing is evaluated. Raises JobFailed if the client ended with an error."""
        _end_as_told(self.job, self._journal)

    def pause(self) -> None:
        """Stop after the current command."""
        super().pause()
        self.job.news.set()

    def drop(self) -> bool:
        """Stop within a gradient, or while there is no command; those since the last version are executed again."""
        return self._work.cancel() if self._work is not None else self._waiting and super().drop()

    @property
    def waits(self) -> bool:
        """Whether there is no command to execute."""
        return self._waiting

    async def _command(self) -> j.AnyCommand | None:
        """The next command; None after another event."""
        self.job.news.clear()  # cleared before reading, so that no event is lost
        command = await asyncio.to_thread(self._next_command)
        if command is None and not self._pause and not self._journal.finished:
            self._waiting, self.job.progress.phase = True, "waiting for its client"
            await self.job.news.wait()
            self._waiting = False
        return command

    def _next_command(self) -> j.AnyCommand | None:
        """The next command; skips numbers whose command is done and dropped."""
        while (command := self._journal.command(self._next)) is None and self._journal.outcome(self._next) is not None:
            self._next += 1
        return command

    async def _obey(self, command: j.AnyCommand) -> None:
        number = self._next
        try:
            match command:
                case j.OptimStep():
                    await self._optim_step(number, command)
                case j.Load():
                    await self._load(number, command)
                case j.ForwardBackward():
                    await self._gradient(number, command)
                case j.Save():
                    await self._answer(number, await self._save(number, command))
                case j.Nothing():
                    await self._answer(number, j.Done(command.answer))
        except AdapterError as error:
            await self._answer(number, j.Failed(str(error)))

    async def _answer(self, number: int, outcome: j.AnyOutcome, *, keep: bool = False) -> None:
        """Write the outcome of a command that makes no version; `keep` leaves one that did not fail in the journal."""

        def write() -> None:
            self._journal.answer(number, outcome)
            if not keep or isinstance(outcome, j.Failed):
                self._journal.drop(number)

        await asyncio.to_thread(write)
        self._next = number + 1
        self.job.observer(Obeyed(self.job.name))

    async def _gradient(self, number: int, command: j.ForwardBackward) -> None:
        """Execute a gradient command unless the client cancels it first."""
        if await asyncio.to_thread(self._journal.cancelled, number):
            await self._answer(number, _CANCELLED)
            return
        before, forward_tokens = self._tokens, self._forward_tokens
        ends = command.forward_only or not self._samples or self._undone < _MOST_UNDONE
        work = self._work = asyncio.create_task(self._forward_backward(number, command))
        try:
            cancelled = await self._cancelled_before(number, work, ends)
        finally:
            self._work = None
            work.cancel()
            await asyncio.wait((work,))
            if not work.cancelled():
                work.exception()  # nobody else reads this exception once the job ended or the client cancelled
        if not cancelled:
            await self._answer(number, work.result(), keep=not command.forward_only)  # raises if the step was dropped
            return
        self._forward_tokens = forward_tokens + self._tokens - before if command.forward_only else self._tokens
        await asyncio.to_thread(self._journal.record_forward_only, self.session.done.step, number, self._forward_tokens)
        if not command.forward_only:  # earlier gradients of the step are computed again, and charged again
            self._undone += bool(self._samples)
            await self.session.undo()
            self._stats, self._samples = LossStats(), 0
        await self._answer(number, _CANCELLED)
        if not command.forward_only:
            self._next = self.session.done.position

    async def _cancelled_before(self, number: int, work: asyncio.Task[j.AnyOutcome], ends: bool) -> bool:
        """Wait until the work is done or, with `ends`, until its command is cancelled. Returns whether it was cancelled."""
        while not work.done():
            self.job.news.clear()  # cleared before reading, so that no event is lost
            if ends and await asyncio.to_thread(self._journal.cancelled, number):
                return True
            news = asyncio.create_task(self.job.news.wait())
            await asyncio.wait((work, news), return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
        return False

    async def _forward_backward(self, number: int, command: j.ForwardBackward) -> j.AnyOutcome:
        loss = ClientLoss(command.loss, command.settings)
        before, most = self._tokens, None if number <= self._forward_until else self.services.steps.of(self.job.tenant)
        too_much = await asyncio.to_thread(_too_much, most, before, command, self._journal, number)
        if reason := too_much or await asyncio.to_thread(_misfit, self.services, command):
            return j.Failed(reason)

        def read() -> tuple[int, float, tuple[Segment, ...]]:
            samples = tuple(datum.sample() for datum in command.data)
            batch = batch_of(samples, by_sample=not command.forward_only)
            segments = batch.segments(self.job.name, loss, 1.0, self.services.micro_batch_tokens)
            return len(samples), float(sum(sample.n_trainable for sample in samples)), segments

        n_samples, targets, segments = await asyncio.to_thread(read)
        self.job.progress.phase = "training"
        executed = unheard if number <= self._forward_until else self._executed
        try:
            with self.services.scheduler.working(self.job.name):
                if command.forward_only:
                    logprobs = await self.session.work.forward(segments, executed)
                    value = await asyncio.to_thread(_value, loss, segments, logprobs, self.services.functions)
                else:
                    trained = await self.session.work.forward_backward(segments, self._executed)
                    logprobs = [values for result in trained for values in result.logprobs]
                    stats = sum((result.stats for result in trained), LossStats())
                    self._stats, self._samples = self._stats + stats, self._samples + n_samples
                    value = stats.loss
        finally:  # work is charged even if the rest fails
            self._note_work()
        if command.forward_only:
            self._forward_tokens += self._tokens - before
            await asyncio.to_thread(
                self._journal.record_forward_only, self.session.done.step, number, self._forward_tokens
            )
        metrics = {"loss:sum": value, "tokens:sum": targets}
        return await asyncio.to_thread(lambda: j.Gradient([j.Tensor.of(values[1:]) for values in logprobs], metrics))

    def _executed(self, work: int) -> None:
        """Count work of the current command; report it at intervals, because each report is written to disk."""
        self._tokens += work
        if time.monotonic() - self._noted > _NOTE_SECONDS:
            self._note_work()

    def _note_work(self) -> None:
        self._noted = time.monotonic()
        self.job.observer(JobWorked(self.job.name, self.session.done.step, self._tokens))

    async def _optim_step(self, number: int, command: j.OptimStep) -> None:
        started = time.monotonic()
        clip = math.inf if command.clip_norm is None else command.clip_norm
        adamw = AdamW(command.lr, command.betas, command.eps, command.weight_decay, clip)
        optim = await self.session.work.optim_step(adamw)
        metrics = {"grad_norm:mean": optim.grad_norm, "lr:mean": optim.lr, "skipped:sum": float(optim.skipped)}
        await self._finish(number, j.Done({"metrics": metrics}), optim, {"train": time.monotonic() - started})

    async def _finish(self, number: int, done: j.Done, optim: OptimStats | None, seconds: dict[str, float]) -> None:
        """Write the outcome, record and commit the next version. This order never repeats a committed command."""
        finished = FinishedStep.unsampled(
            self.session.done.step, self._stats, self._samples, optim, self._tokens,
            {"loaded": 1} if optim is None else None, seconds=seconds, position=number + 1,
        )  # fmt: skip
        since = self.session.done.position
        await asyncio.to_thread(self._journal.answer, number, done, hidden=True)
        await self.session.finish(finished, None, commit=True)
        self._stats, self._samples, self._next = LossStats(), 0, number + 1
        self._tokens = self._forward_tokens = self._undone = 0
        await asyncio.to_thread(self._journal.reveal, self._next)
        await asyncio.to_thread(self._journal.forget, self._next, since)
        self.job.observer(Obeyed(self.job.name))

    async def _load(self, number: int, command: j.Load) -> None:
        """Load an adapter as a new version, so that samples of the old and the new weights have different versions."""
        name, source = self.job.name, Path(command.directory)
        await self.session.on_device(lambda trainer: trainer.load_adapter(name, source, optimizer=command.optimizer))
        self._stats, self._samples = LossStats(), 0
        await self._finish(number, j.Done(command.answer), None, {"train": 0.0})

    async def _save(self, number: int, command: j.Save) -> j.AnyOutcome:
        trainer, name = self.services.trainer, self.job.name
        final = self.job.directory.path / "checkpoints" / command.place

        def write() -> None:
            if _saved(final, number, overwrite=command.overwrite):
                return
            draft = final.with_name(f".part-{final.name}")
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            trainer.save_adapter(name, draft, optimizer=command.optimizer)
            ttl = command.about.get("ttl")  # relative to the time of saving; a repeated request sends the same value
            expires = None if ttl is None else time.time() + ttl
            (draft / ABOUT).write_bytes(msgspec.json.encode({**command.about, "expires": expires}))
            sync(draft / ABOUT)
            try:
                self.services.room.take(self.job.tenant, draft)
            except StorageFull:
                shutil.rmtree(draft)
                raise
            sync(draft)
            shutil.rmtree(final, ignore_errors=True)
            draft.rename(final)
            sync(final.parent)
            _prune(final.parent)

        try:
            await asyncio.to_thread(write)
        except StorageFull as error:
            return j.Failed(str(error).removeprefix("waits: "))
        return j.Done(command.answer)


def _end_as_told(job: Job, journal: j.Journal) -> None:
    """Tell how a client ended. Raises JobFailed if it was with an error."""
    reason = (journal.path / "finished").read_text("utf-8") if journal.finished else ""
    if reason.startswith("errored"):
        raise JobFailed(f"its client ended with an error ({reason}); its versions are kept")
    job.progress.message = f"{STOPPED_EARLY}: its client was {reason}" if reason else job.progress.message


def _too_much(most: int | None, before: int, command: j.ForwardBackward, journal: j.Journal, number: int) -> str:
    """Why a command is too large for a step with so many tokens `before`; empty if it is not, or if it was done before."""
    if most is None or isinstance(journal.outcome(number), j.Gradient):
        return ""
    return check_command(sum(datum.work for datum in command.data), before, most)


def _misfit(services: Services, command: j.ForwardBackward) -> str:
    """Why the data do not fit the base or its memory; empty if they do."""
    positions, vocabulary = services.positions, services.vocabulary
    for index, datum in enumerate(command.data):
        unknown = (vocabulary.unknown(np.frombuffer(ids, "<i4")) for ids in (datum.tokens, datum.targets))
        if (token := next((token_id for token_id in unknown if token_id is not None), None)) is not None:
            return f"data[{index}] has the token id {token}; {vocabulary.bounds}"
        if datum.length >= positions:
            return f"data[{index}] has {datum.length} tokens; this base has positions for {positions - 1}"
        if not command.forward_only and services.longest is not None and datum.length > services.longest:
            return (
                f"data[{index}] has {datum.length} tokens; there is memory for the gradient of {services.longest}: shorten "
                "it, or ask whoever runs this service for a larger device"
            )
    return ""


def _saved(checkpoint: Path, number: int, *, overwrite: bool) -> bool:
    """Whether command `number` saved a checkpoint before a crash.

    Raises:
        AdapterError: another command saved it after this one was accepted, which must not replace it.
    """
    try:
        by = msgspec.json.decode((checkpoint / ABOUT).read_bytes())["number"]
    except FileNotFoundError:
        return False
    if by != number and not overwrite:
        raise AdapterError(f"path: there is a checkpoint {checkpoint.name!r} already; give another name")
    return bool(by == number)


def _prune(directory: Path) -> None:
    """Delete old unnamed snapshots."""
    unnamed = [path for path in directory.glob("snapshot-*") if path.name.removeprefix("snapshot-").isdecimal()]
    unnamed.sort(key=lambda path: int(path.name.removeprefix("snapshot-")))
    for path in unnamed[:-SNAPSHOTS]:
        shutil.rmtree(path, ignore_errors=True)


def _value(
    loss: ClientLoss, segments: Sequence[Segment], logprobs: Sequence[FloatArray], functions: LossFunctions | None
) -> float:
    """The loss, summed segment by segment as a backward pass does."""
    rest, total = iter(logprobs), 0.0
    for segment in segments:
        total += loss.value(segment.samples, list(itertools.islice(rest, len(segment.samples))), functions)
    return total
