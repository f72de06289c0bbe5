"""Futures that clients poll: outcomes of commands from journals, and samples.

A sample's request is stored in a file until long after its answer: after a restart, it is sampled again when the client
polls, with the same seed and so the same tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import re
import secrets
import time
from collections.abc import Callable, Collection
from typing import Any, Literal

from pydantic import ValidationError

from motet.core.errors import ConfigError, EngineError, LimitError
from motet.core.types import JobState
from motet.process.thread_turns import ThreadTurns
from motet.runtime.journal import Done, Failed, Gradient
from motet.service.database.store import Store
from motet.service.database.tables import StoredJob
from motet.service.database.tenants import Principal
from motet.service.errors import Refusal
from motet.service.events import EventBus
from motet.service.http.open_bytes import OpenBytes
from motet.service.storage import Storage
from motet.service.tenants.quotas import Quotas
from motet.service.tenants.stored import SAMPLES, blocks
from motet.service.tinker.models import Models, own_model
from motet.service.tinker.requests import Sample
from motet.service.tinker.samplers import MAX_TOKENS, Sampler, Samplers
from motet.service.tinker.samples import OpenSample, OpenSamples
from motet.service.tinker.wire import write_gradient

POLL_SECONDS = 25.0
"""Seconds that a poll waits; clients time out after 45 s and poll again."""
_KEPT_SECONDS = 900.0
_HELD = "samples that are held back"
"""Topic of held samples."""
Answer = bytes | dict[str, Any]
"""A binary message, or JSON."""
QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]

_TOKEN_BYTES = 40
"""Bytes of a token id in a list."""
_RESULT_BYTES = 8
"""Bytes of a token with its logprob in an answer."""
_COPIES = 3
"""Copies of an outcome while it is written as an answer."""


_DIGITS = 10
"""Most digits of a command's number."""
_NAME = re.compile(r"sample-[0-9a-f]{24}")


class Futures:
    """All pending answers."""

    def __init__(
        self,
        models: Models,
        samplers: Samplers,
        quotas: Quotas,
        store: Store,
        bus: EventBus,
        storage: Storage,
        room: OpenBytes,
        turns: ThreadTurns,
    ) -> None:
        """`room` accounts for the memory of open samples; in `turns`, writes wait for others of their tenant."""
        self._models, self._samplers, self._store, self._bus = models, samplers, store, bus
        self._quotas, self._storage, self._room, self._turns = quotas, storage, room, turns
        self._samples = OpenSamples(room)

    async def begin(self, who: Principal, wanted: Sample, source: Sampler | None = None) -> str:
        """Start a sample, now or once its tenant may; returns the id of its future, the same if a client sends it again.

        `source` is that of `wanted`, if it was just looked up.

        Raises:
            LimitError: too many of this tenant's are open, or its storage is full.
        """
        asked = await asyncio.to_thread(lambda: wanted.model_dump_json().encode())  # it may have 200,000 tokens
        name = _name(who, wanted, asked)
        while (known := self._samples.by_name.get(name) or self._once_more(who, name)) is not None:
            await known.begun.wait()
            if self._samples.by_name.get(name) is known:  # it was not refused
                return name
        count, sample = self.open(who), self._opened(who, name, wanted)  # at once, for concurrent requests

        def accept() -> str:
            self._quotas.check_samples(who.tenant_id, count, sample.rows, _tokens(wanted))
            sample.stored = self._keep(who, name, asked)
            return self._held(who)

        try:
            self._start(who, sample, await self._turns.run(who.tenant_id, accept), source)
        except BaseException:  # the client has no id to poll
            self._forget(name)
            raise
        finally:
            sample.begun.set()
        return name

    def _opened(self, who: Principal, name: str, wanted: Sample, stored: int = 0) -> OpenSample:
        """Keep a sample, dropping fetched answers if its memory needs it."""
        sample = OpenSample(name, who.tenant_id, who.key_id, wanted, _memory(wanted), wanted.num_samples, stored)
        if not self._room.fits(who.tenant_id, sample.size):
            for fetched in list(self._samples.fetched[who.tenant_id]):
                self._forget(fetched)
        self._samples.add(sample)
        return sample

    def _keep(self, who: Principal, name: str, asked: bytes) -> int:
        """Store a sample's request in a file; returns its bytes."""
        directory = self._storage.samples(who.tenant_id)
        draft, size = directory / f".part-{name}", blocks(len(asked))
        with self._quotas.storing(who.tenant_id, size, SAMPLES):
            directory.mkdir(parents=True, exist_ok=True)
            try:
                draft.write_bytes(asked)
                draft.rename(directory / name)
            except OSError:  # a partial file would use space on a full disk
                draft.unlink(missing_ok=True)
                raise
        return size

    def _held(self, who: Principal) -> str:
        """Why a tenant's limits hold its samples; empty if they may start."""
        try:
            self._quotas.check_day(who.tenant_id)
        except LimitError as error:
            return str(error)
        return ""

    def _start(self, who: Principal, sample: OpenSample, held: str, source: Sampler | None = None) -> None:
        if held:
            sample.since = time.monotonic()
        elif sample.task is None and not sample.cancelled and sample.wanted is not None:
            task = self._samples.started(sample, self._samplers.sample(who, sample.wanted, source))
            task.add_done_callback(functools.partial(_wake, self._bus, f"{_HELD} {who.tenant_id}"))

    def open(self, who: Principal) -> int:
        """Completions of a tenant's samples that are running or not fetched yet."""
        return self._samples.waiting[who.tenant_id]

    async def cancel(self, who: Principal, request_id: str) -> None:
        """Cancel a sample or a gradient that is not done. Raises `Refusal` if the requester has no such model."""
        sample = self._samples.by_name.get(request_id)
        if sample is not None and sample.tenant_id == who.tenant_id:
            self._cancel(request_id)
        if self.trains(request_id):
            model_id, _, number = request_id.rpartition("/")
            job = await asyncio.to_thread(own_model, self._models, who, model_id)
            await asyncio.to_thread(self._models.cancel, job, int(number))

    def trains(self, request_id: str) -> bool:
        """Whether it is a command of a model."""
        model_id, _, number = request_id.rpartition("/")
        return bool(model_id) and number.isdecimal() and len(number) <= _DIGITS

    def _cancel(self, name: str) -> None:
        sample = self._samples.by_name[name]
        sample.cancelled = True
        if sample.task is not None:
            sample.task.cancel()
        self._forget(name)

    def keys(self) -> set[str]:
        """Ids of API keys with running or held samples."""
        return {one.key for one in self._samples.running.values()}

    async def end(self, keys: Collection[str]) -> None:
        """Cancel the unfinished samples of these keys."""
        for name in [name for name, one in self._samples.running.items() if one.key in keys]:
            self._cancel(name)

    async def wait(
        self,
        who: Principal,
        request_id: str,
        seconds: float = POLL_SECONDS,
        hold: Callable[[int], object] = lambda size: None,
    ) -> Answer:
        """Wait for an answer; after `seconds`, return that there is none yet. `hold` counts its memory before it is read.

        Raises:
            Refusal: there is no such future.
        """
        if request_id.startswith("sample-"):
            return await self._sample(who, request_id, seconds)
        model_id, _, number = request_id.rpartition("/")
        job = await asyncio.to_thread(self._models.find, who, model_id)
        if not self.trains(request_id):
            raise Refusal(404, f"there is no request {request_id!r}")
        return await self._command(job, int(number), request_id, seconds, hold)

    async def _command(
        self, job: StoredJob, number: int, request_id: str, seconds: float, hold: Callable[[int], object]
    ) -> Answer:
        journal, until = self._models.journal(job), time.monotonic() + seconds
        while True:
            changed = self._bus.next(job.id)  # taken before reading, to miss nothing
            waits = journal.waits(number)  # before its outcome, with which it may go
            if size := journal.outcome_bytes(number):
                hold(_COPIES * size)
            outcome = await asyncio.to_thread(journal.outcome, number) if size else None
            match outcome:
                case Gradient():
                    return await asyncio.to_thread(write_gradient, outcome)
                case Done():
                    return outcome.answer
                case Failed():
                    return {"error": self._storage.without_places(outcome.reason), "category": "user"}
            now = await asyncio.to_thread(self._store.job_by_id, job.id)
            if now is None or JobState(now.state).final:
                return {"error": _ended(now), "category": "server"}
            if not waits:
                raise Refusal(404, f"there is no request {request_id!r}, or its answer is too old to be kept")
            left = until - time.monotonic()
            if left <= 0 or self._bus.closed:
                return _of_job(request_id, now)
            if (again := self._models.look_in(now, number)) <= 0:
                self._models.looks(now)
                if await self._turns.run(job.tenant_id, functools.partial(self._models.pass_over, now)):
                    self._bus.publish(job.id)  # others wait behind the same number
                    continue
                again = left
            await self._bus.wait(changed, min(left, again))

    async def _sample(self, who: Principal, request_id: str, seconds: float) -> Answer:
        until = time.monotonic() + seconds
        sample = self._samples.by_name.get(request_id) or self._once_more(who, request_id)
        if sample is None or sample.tenant_id != who.tenant_id:
            raise Refusal(410, f"there is no request {request_id!r} any more; sample again")
        if sample.task is None:
            self._start(who, sample, held := await asyncio.to_thread(self._held, who))
            if held:
                return await self._later(sample, held, until)
        if (task := sample.task) is not None:
            await asyncio.wait([task], timeout=0 if self._bus.closed else seconds)
            await self._bus.turns.enter()
            if not task.done():
                reason = self._samplers.waits
                return _try_again(request_id, "paused_capacity" if reason else "active", reason)
        if sample.cancelled or task is None:
            raise Refusal(410, f"{request_id!r} was cancelled; sample again")
        if not task.cancelled() and isinstance(error := task.exception(), LimitError):  # until the next poll
            self._samples.hold(sample, task)
            return await self._later(sample, str(error), until)
        try:
            answer = task.result()
            self._samples.shrink(sample, len(answer))
            return answer
        except ConfigError as error:
            return {"error": self._storage.without_places(str(error)), "category": "user"}
        except EngineError as error:
            if self._bus.closed:  # the next process samples again
                return _try_again(request_id, "active", str(error))
            return {"error": self._storage.without_places(str(error)), "category": "server"}
        finally:
            self._samples.shrink(sample, 0)

    async def _later(self, sample: OpenSample, reason: str, until: float) -> Answer:
        """The answer for a sample that its tenant's limits hold, once another one of the tenant has ended."""
        if not self._bus.closed:
            await self._bus.wait(self._bus.next(f"{_HELD} {sample.tenant_id}"), max(0.0, until - time.monotonic()))
        return _try_again(sample.name, "paused_rate_limit", reason)

    def forget_old(self) -> None:
        """Drop samples that no client fetched in time."""
        now = time.monotonic()
        every = self._samples.by_name.items()
        for name in [name for name, one in every if one.since is not None and now - one.since > _KEPT_SECONDS]:
            self._forget(name)

    def _forget(self, name: str) -> None:
        if (sample := self._samples.remove(name)) is None:  # its key ended meanwhile
            return
        (self._storage.samples(sample.tenant_id) / name).unlink(missing_ok=True)
        self._quotas.stored.add(sample.tenant_id, SAMPLES, -sample.stored)

    def _once_more(self, who: Principal, name: str) -> OpenSample | None:
        """Restart a sample that an earlier process received."""
        path = self._storage.samples(who.tenant_id) / name
        if not _NAME.fullmatch(name) or not path.is_file():
            return None
        asked = path.read_bytes()
        try:
            wanted = Sample.model_validate_json(asked)
        except ValidationError:  # a power failure cut it: it is not synced
            path.unlink()
            return None
        sample = self._opened(who, name, wanted, blocks(len(asked)))
        sample.begun.set()
        return sample

    def clear(self) -> None:
        """Delete files of samples that no client fetched."""
        for path in self._storage.samples("").glob("*/*sample-*"):
            with contextlib.suppress(FileNotFoundError):  # fetched meanwhile, or renamed
                if path.name not in self._samples.by_name and time.time() - path.stat().st_mtime > _KEPT_SECONDS:
                    path.unlink()
                    self._quotas.stored.add(path.parent.name, SAMPLES, 0)  # triggers a measurement


def _name(who: Principal, wanted: Sample, asked: bytes) -> str:
    """The id of a sample: from the request if a client numbered it. Another key has its own, because a sample ends with it."""
    if wanted.sampling_session_id is None or wanted.seq_id is None:
        return f"sample-{secrets.token_hex(12)}"
    return f"sample-{hashlib.sha256(f'{who.tenant_id} {who.key_id} '.encode() + asked).hexdigest()[:24]}"


def _ended(job: StoredJob | None) -> str:
    return "the model is gone" if job is None else f"the model has {job.state}: {job.message or 'its client finished'}"


def _of_job(request_id: str, job: StoredJob) -> dict[str, Any]:
    """The response for an unfinished command, with the reason."""
    if job.state == JobState.QUEUED.value:
        reason = job.message or "all adapter slots are taken; it begins when one is free"
        return _try_again(request_id, "paused_capacity", reason)
    if job.state == JobState.PAUSED.value:
        return _try_again(request_id, "paused_rate_limit", job.message or "the model is paused")
    return _try_again(request_id, "active", job.message)


def _try_again(request_id: str, state: QueueState, reason: str | None) -> dict[str, Any]:
    """The response that the package shows its user once a minute if the state is not `active`."""
    return {"type": "try_again", "request_id": request_id, "queue_state": state, "queue_state_reason": reason or None}


def _wake(bus: EventBus, topic: str, task: asyncio.Task[bytes]) -> None:
    """What a sample did not take is left for others of its tenant."""
    if task.cancelled() or not isinstance(task.exception(), LimitError):
        bus.publish(topic)


def _tokens(wanted: Sample) -> int:
    return wanted.num_samples * (wanted.sampling_params.max_tokens or 1)


def _memory(wanted: Sample) -> int:
    """Memory of a sample in bytes: its prompt, or the logprobs of the prompt if these are larger, and its longest answer."""
    prompt = sum(len(chunk.tokens) for chunk in wanted.prompt.chunks)
    answer = wanted.num_samples * (wanted.sampling_params.max_tokens or MAX_TOKENS) * _RESULT_BYTES
    return answer + prompt * max(_TOKEN_BYTES, _RESULT_BYTES * (1 + wanted.topk_prompt_logprobs))
