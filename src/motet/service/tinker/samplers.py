"""Sources of samples for clients: the base, a checkpoint, an unnamed snapshot, or a model in training.

The id of a sampling session says all that a sample needs: <session>:sample:<number>:base · :base-<base64> (not the first
base) · :path-<base64> · :<model>-<command> · :<model>-live
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import re
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from motet.core import seeds
from motet.core.errors import EngineError, HostGone
from motet.core.types import FinishReason, SamplingParams
from motet.hosts.charged import Charged
from motet.hosts.hosts import Hosts
from motet.hosts.messages import Complete, PromptScored, Tokens
from motet.service.answers import Asks
from motet.service.bases import Bases
from motet.service.database.tenants import Principal
from motet.service.errors import Refusal
from motet.service.storage import Storage
from motet.service.tinker.checkpoints import SAMPLER, Checkpoints
from motet.service.tinker.models import Models
from motet.service.tinker.requests import Sample
from motet.service.tinker.wire import SampleBytes, write_samples

_ID = re.compile(
    r"(session-[0-9a-f]{16}(?:[0-9a-f]{16})?):sample:(\d{1,12}):(?:base(?:-([\w=-]+))?|path-([\w=-]+)|(\d{1,10})-(live|\d{1,10}))"
)
MAX_TOKENS = 1024
"""Most tokens of a completion, unless the client says so itself."""
NO_LOGPROB = -99999.0
"""Logprob, with token id 0, at positions without top tokens."""
_TRIES = 5
SESSIONS = "sessions"
"""The file of `SamplingSessions`."""
_LINE = re.compile(r"([0-9a-f]{32}) (\d{1,10})")
_MOST_SOURCES = 4096
_MOST_OF_A_SOURCE = 64


def sampler_id(session_id: str, number: int, what: str) -> str:
    """The id of a sampling session."""
    return f"{session_id}:sample:{number}:{what}"


def path_part(path: str) -> str:
    """The id's suffix for a checkpoint's path."""
    return f"path-{base64.urlsafe_b64encode(path.encode()).decode()}"


def base_part(base: str, bases: Bases) -> str:
    """The id's suffix for a base."""
    return "base" if not bases.several else f"base-{base64.urlsafe_b64encode(base.encode()).decode()}"


@dataclass(frozen=True)
class Sampler:
    """What a sampling id refers to."""

    base: str
    model_path: str | None = None
    directory: Path | None = None
    """None for the base."""


class SamplingSessions:
    """Numbers sampling sessions by source, in the order in which a client opens them, also across restarts.

    The client's own number also counts a save that it sent twice, so equal programs may have other numbers. Each tenant has a
    file: a line for each session, with a digest of its source and the client's number.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._known: dict[str, OrderedDict[str, dict[int, int]]] = {}
        """By tenant: what others open must change no number."""
        self._room = Counter[str]()
        """Lines that a tenant's file may still get."""
        self._lock = threading.Lock()

    def number(self, tenant_id: str, session_id: str, given: int, what: str) -> int:
        """The place of the client's session `given` among those of the source `what`, from 0; the same if asked again."""
        source = hashlib.sha256(f"{session_id} {what}".encode()).hexdigest()[:32]
        file = self._storage.samples(tenant_id) / SESSIONS
        with self._lock:
            if (known := self._known.get(tenant_id)) is None:
                known = self._known[tenant_id] = _read(file)
            if given not in (places := known.get(source, {})) and len(places) < _MOST_OF_A_SOURCE:
                # a crash or a full disk may have left half of a line
                room = self._room.pop(tenant_id, 0) or _MOST_SOURCES + _rewrite(file, known)
                with file.open("a", encoding="utf-8") as target:
                    target.write(f"{source} {given}\n")
                self._room[tenant_id] = room - 1
            return _place(known, source, given)


def _place(known: OrderedDict[str, dict[int, int]], source: str, given: int) -> int:
    """Number a session; sources that were not used for long are forgotten."""
    places = known.setdefault(source, {})
    known.move_to_end(source)
    if len(known) > _MOST_SOURCES:
        known.popitem(last=False)
    if given not in places and len(places) == _MOST_OF_A_SOURCE:
        return _MOST_OF_A_SOURCE + given
    return places.setdefault(given, len(places))


def _read(file: Path) -> OrderedDict[str, dict[int, int]]:
    known = OrderedDict[str, dict[int, int]]()
    with contextlib.suppress(FileNotFoundError):
        for line in file.read_text("utf-8", "replace").splitlines():
            if whole := _LINE.fullmatch(line):
                _place(known, whole[1], int(whole[2]))
    return known


def _rewrite(file: Path, known: OrderedDict[str, dict[int, int]]) -> int:
    """Write all lines anew, without what was forgotten; returns their number."""
    lines = [f"{source} {given}\n" for source, places in known.items() for given in places]
    draft = file.with_name(f".part-{SESSIONS}")
    draft.parent.mkdir(parents=True, exist_ok=True)
    draft.write_text("".join(lines), "utf-8")
    draft.rename(file)
    return len(lines)


class Samplers:
    """Resolves sampling ids, and samples."""

    def __init__(self, models: Models, checkpoints: Checkpoints, storage: Storage, hosts: Hosts, asks: Asks) -> None:
        self._models, self._checkpoints, self._storage = models, checkpoints, storage
        self._hosts, self._asks = hosts, asks
        self.sessions = SamplingSessions(storage)

    @property
    def waits(self) -> str:
        """What samples wait for; empty if they run."""
        return "" if self._hosts.ready else "the engine is starting"

    def find(self, who: Principal, name: str) -> Sampler:
        """Resolve a sampling id. Raises `Refusal` if the requester can see no such source."""
        parts = _ID.fullmatch(name)
        if parts is None:
            raise Refusal(404, f"there is no sampling session {name!r}")
        session, _, base, path, number, what = parts.groups()
        self._models.check_session(who, session)
        try:
            if path:
                return self.of_path(who, base64.urlsafe_b64decode(path).decode())
            if number is None:
                return Sampler(self._models.base(base64.urlsafe_b64decode(base).decode() if base else None))
        except ValueError:  # also for invalid base64 or text
            raise Refusal(404, f"there is no sampling session {name!r}") from None
        job = self._models.find(who, f"{session}:train:{number}")
        if what == "live":
            version = self._storage.version(job.id, "latest")
            directory = None if version is None else version[1]
        else:
            directory = self._models.directory(job) / "checkpoints" / SAMPLER / f"snapshot-{what}"
        if directory is None or not directory.is_dir():
            raise Refusal(404, f"the snapshot of {name!r} is gone; save the weights for sampling again")
        return Sampler(self._models.bases.of(job.base), directory=directory)

    def of_path(self, who: Principal, path: str) -> Sampler:
        """Resolve a checkpoint's path. Raises `Refusal` if it does not exist."""
        checkpoint = self._checkpoints.find(who, path)
        return Sampler(self._models.bases.of(checkpoint.job.base), path, checkpoint.directory)

    def of(self, who: Principal, wanted: Sample) -> Sampler:
        """The source of a sample. Raises `Refusal` if the requester can see no such source."""
        if wanted.sampling_session_id is not None:
            return self.find(who, wanted.sampling_session_id)
        if wanted.model_path is not None:
            return self.of_path(who, wanted.model_path)
        return Sampler(self._models.base(wanted.base_model))

    @staticmethod
    def seeded(wanted: Sample) -> Sample:
        """The request with a seed; by default from the number and source of its sampling session, and from its own number."""
        given = wanted.sampling_params
        if given.seed is not None:
            return wanted
        if wanted.sampling_session_id is None or wanted.seq_id is None:
            seed = time.time_ns()
        else:
            parts = _ID.fullmatch(wanted.sampling_session_id)
            assert parts is not None, "the session was looked up before"
            _, number, _, path, model, _ = parts.groups()
            # another session of the same program has the same path but for its own name
            place = base64.urlsafe_b64decode(path).decode().partition(":train:")[2] if path else ""
            stream = f"tinker/{place}" if place else "tinker"
            seed = seeds.key(0, stream, int(number), int(model or 0), wanted.seq_id) >> 1
        return wanted.model_copy(update={"sampling_params": given.model_copy(update={"seed": seed})})

    async def sample(self, who: Principal, wanted: Sample, source: Sampler | None = None) -> bytes:
        """Complete a prompt; returns a binary message. `source` is that of `wanted` if it was just looked up.

        Raises:
            Refusal, EngineError, ConfigError: it cannot be answered; the message says why.
            LimitError: the tenant has not so many tokens left besides what is open.
        """
        charged = Charged()
        for left in reversed(range(_TRIES)):
            sampler = await asyncio.to_thread(self.of, who, wanted) if source is None else source
            source = None  # it may be gone at the next try
            if not (there := self._hosts.there[sampler.base]).is_set():
                await there.wait()
                sampler = await asyncio.to_thread(self.of, who, wanted)  # the source may be gone now
            try:
                return await self._answer(who, sampler, wanted, charged)
            except HostGone:  # another host takes over
                if not left:
                    raise
        raise AssertionError

    async def _answer(self, who: Principal, sampler: Sampler, wanted: Sample, charged: Charged) -> bytes:
        completions = [SampleBytes() for _ in range(wanted.num_samples)]
        scores, top = None, None
        last = wanted.prompt_logprobs_last_n
        hidden = slice(1 if last is None else -last)
        cut = wanted.sampling_params.max_tokens is None
        async for answer in self._asks(question(who, sampler, wanted), charged, cut=cut):
            if isinstance(answer, PromptScored):
                scores = answer.logprobs.copy()
                scores[hidden] = np.nan
                if answer.top_ids is not None and answer.top_logprobs is not None:
                    top = answer.top_ids.copy(), answer.top_logprobs.copy()
                    top[0][hidden], top[1][hidden] = 0, NO_LOGPROB
            if isinstance(answer, Tokens):
                chunk = answer.chunk
                completions[chunk.index].add(chunk.token_ids, chunk.logprobs)
                if chunk.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    raise EngineError(chunk.error or "the sample was ended; sample again")
                if chunk.finish_reason is FinishReason.LENGTH:
                    completions[chunk.index].cut = True
        return await asyncio.to_thread(write_samples, completions, scores, top)  # they may have megabytes


def question(who: Principal, sampler: Sampler, wanted: Sample) -> Complete:
    """The engine's question."""
    given, stop = wanted.sampling_params, wanted.sampling_params.stop
    texts = [stop] if isinstance(stop, str) else [one for one in stop or () if isinstance(one, str)]
    ids = [one for one in stop if isinstance(one, int)] if isinstance(stop, list) and not texts else None
    sampling = SamplingParams(
        temperature=given.temperature,
        max_tokens=given.max_tokens or MAX_TOKENS,
        stop=tuple(texts),
        top_p=given.top_p,
        top_k=max(given.top_k, 0),
    )
    return Complete(
        who.tenant_id,
        None if sampler.directory is None else str(sampler.directory),
        wanted.num_samples,
        given.seed or 0,
        stream=False,
        logprobs=False,
        sampling=sampling,
        prompt=[token for chunk in wanted.prompt.chunks for token in chunk.tokens],
        stop_token_ids=ids,
        prompt_logprobs=bool(wanted.prompt_logprobs or wanted.topk_prompt_logprobs),
        prompt_top=wanted.topk_prompt_logprobs,
        within_room=given.max_tokens is None,
        base=sampler.base,
        account=who.account or "",
    )
