"""One sampling server: its requests, its answers, and its availability.

A replica is up once its health endpoint has answered and it has reported what it serves. A watcher calls `leave` when
it is gone: running requests fail at once, and no new ones are sent until `greet` succeeds again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from motet.config.dialects import Ask, Dialect, Facts, HttpRequest, Piece
from motet.core.errors import EngineError, ServerFault, ServerGone, ServerRefused, ServerUnfit
from motet.core.token_ids import TokenIds
from motet.core.types import FloatArray, IntArray, ServerLoad, TopTokens
from motet.rollout.connection import Clocks, ServerConnection, detail_of
from motet.rollout.in_vllm.motet_vllm import EXTENSION, TESTED
from motet.rollout.version_server import VersionServer

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

_NO_EXTENSION = (
    f"it has no {EXTENSION}, or its vLLM is not one of {', '.join(TESTED)}; "
    "its log shows which, and docs/servers.md explains how to start it"
)


@dataclass
class Replica:
    """One server: its connections, its availability, and its loaded adapters."""

    url: str
    dialect: Dialect
    clocks: Clocks
    headers: Mapping[str, str] = field(default_factory=dict)
    verify: Any = True
    """TLS verification: False, True, or an `ssl.SSLContext`."""
    versions: VersionServer | None = None
    """The server from which its workers fetch versions; None if they read them from a path."""
    from_files: str = ""
    """Why its workers read from a path in spite of `versions`; reset by `greet`."""
    unbiased: str = ""
    """Why it is asked without `logit_bias`; reset by `greet`."""
    untried: str = ""
    """Warning that its release is not covered by tests; empty otherwise."""
    facts: Facts = field(default_factory=Facts)
    loaded: set[str] = field(default_factory=set)
    """Served names loaded there, as far as this process knows."""
    up: bool = False
    note: str = "not asked yet"
    requests: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.server = ServerConnection(self.url, self.clocks, self.headers, self.verify)

    def load_now(self) -> ServerLoad:
        """Running requests and tokens, and the number of loaded adapters."""
        return ServerLoad(self.url, self.up, self.requests, self.tokens, len(self.loaded), self.note)

    # --- availability -------------------------------------------------------------------------------------------------

    async def greet(self) -> None:
        """Check the server's health and read what it serves; it is up when this returns.

        Raises:
            ServerUnfit: it rejects the key.
            EngineError: no answer, or an answer that does not fit the dialect.
        """
        await self.healthy()
        answers = {}
        for path in self.dialect.about:
            try:
                answers[path] = await self.server.request(HttpRequest(path), self.clocks.load)
            except ServerRefused as error:
                if error.status == 401:
                    raise ServerUnfit(str(error)) from error
                if error.status not in (403, 404):
                    raise
        try:
            self.facts = self.dialect.facts(answers)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServerFault(f"{self.url} does not answer as {self.dialect.name} does: {error!r}") from error
        self.loaded, self.from_files, self.untried = set(self.facts.adapters), "", self._untried()
        self.unbiased = ""
        if self.untried and self.versions is not None:
            self.from_files = f"{self.untried}, so it reads versions from files and does not fetch them"
        if said := self.from_files or self.untried:
            _log.warning("%s", said)
        self.up, self.note = True, ""

    def _untried(self) -> str:
        """A warning for an untested release; empty for a tested or unknown one."""
        release, tested = self.facts.release.partition("+")[0], self.dialect.tested
        if not release or release in tested or not tested:
            return ""
        return f"{self.url} is {self.dialect.name} {release}, and Motet is tested with {', '.join(tested)}"

    async def healthy(self) -> None:
        """Check the health of the server.

        Raises:
            ServerGone: no answer, or not in time.
        """
        await self.server.healthy(max(self.clocks.health, self.dialect.health_seconds))

    def leave(self, reason: str) -> None:
        """Mark the server as gone: running requests fail, and no new ones are sent until `greet` succeeds."""
        self.up, self.note = False, reason
        self.loaded.clear()
        self.server.leave(reason)

    async def close(self) -> None:
        """Close the connections."""
        await self.server.close()
        if self.versions is not None:
            await asyncio.to_thread(self.versions.close)

    # --- requests ---------------------------------------------------------------------------------------------------------

    async def load(self, name: str, path: str) -> None:
        """Load a version. A name that is loaded already is no error: names are used once, so it is the same version.

        Raises:
            EngineError: it cannot be loaded; the message says why.
        """
        try:
            answer = await self._ask_to_load(name, path)
        except ServerRefused as error:
            if not self.dialect.known(error.status, error.detail):
                raise
        else:
            if isinstance(answer, dict) and answer.get("success") is False:
                detail = str(answer.get("error_message"))
                if not self.dialect.known(200, detail):
                    raise ServerRefused(f"{self.url} cannot load {name}: {detail}", 200, detail)
        self.loaded.add(name)

    async def _ask_to_load(self, name: str, path: str) -> Any:
        """Ask the server to fetch a version, or to read it from files if it does not fetch."""
        if self.versions is not None and not self.from_files:
            try:
                location = await asyncio.to_thread(self.versions.location, name, self.url)
            except OSError as error:
                raise EngineError(f"{self.url} cannot be given version {name}: {error}") from error
            try:
                return await self.server.request(self.dialect.load(name, location), self.clocks.load)
            except ServerRefused as error:
                if self.dialect.known(error.status, error.detail):
                    raise
                return await self._read_instead(name, path, error)
        return await self.server.request(self.dialect.load(name, path), self.clocks.load)

    async def _read_instead(self, name: str, path: str, refused: ServerRefused) -> Any:
        """After a failed fetch, use files for this and all later versions; if that fails too, raises `refused`."""
        try:
            answer = await self.server.request(self.dialect.load(name, path), self.clocks.load)
        except ServerRefused as error:
            if self.dialect.known(error.status, error.detail):
                raise
            raise refused from None
        reason = _NO_EXTENSION if self.dialect.missing(refused.status, refused.detail) else refused.detail
        self.from_files = f"{self.url} reads versions from files and does not fetch them: {reason}"
        _log.warning("%s", self.from_files)
        return answer

    async def unload(self, name: str) -> None:
        """Unload a version; a missing one is not an error.

        Raises:
            EngineError: it stays loaded; the message says why.
        """
        try:
            await self.server.request(self.dialect.unload(name), self.clocks.load)
        except ServerRefused as error:
            if not self.dialect.unknown(error.status, error.detail):
                raise
        self.loaded.discard(name)

    async def logprobs(self, token_ids: IntArray, model: str | None) -> FloatArray:
        """Logprobs [T] of each token given those before it, at temperature 1; the first is 0."""
        wanted = token_ids.tolist()
        request = self.dialect.score(wanted, model, self.facts.base, 0)
        answer = await self.server.request(request, self.clocks.request)
        try:
            logprobs = self.dialect.scores(answer, wanted)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ServerFault(f"{self.url} returned an invalid score: {error!r}") from error
        if len(logprobs) != len(wanted) - 1 or not all(map(_is_logprob, logprobs)):
            raise ServerFault(f"{self.url} returned {logprobs} as logprobs of {len(wanted)} tokens")
        return np.array([0.0, *logprobs], np.float32)

    async def top_logprobs(self, token_ids: IntArray, model: str | None, k: int) -> TopTokens:
        """The k most likely tokens [T, k] and their logprobs at temperature 1, best first; position 0 has zeros.

        Raises:
            ServerRefused: the server returns fewer than k.
        """
        request = self.dialect.score(token_ids.tolist(), model, self.facts.base, k)
        answer = await self.server.request(request, self.clocks.request)
        try:
            places = self.dialect.tops(answer, k)
            ids = np.array([[token for token, _ in place] for place in places], np.int32).reshape(len(token_ids) - 1, k)
            logprobs = np.array([[logprob for _, logprob in place] for place in places], np.float32).reshape(ids.shape)
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise ServerFault(f"{self.url} returned invalid top logprobs: {error!r}") from error
        return np.pad(ids, ((1, 0), (0, 0))), np.pad(logprobs, ((1, 0), (0, 0)))

    async def complete(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        """One completion: tokens as they arrive with `ask.stream`, otherwise all at once.

        Raises:
            ServerGone: the server was gone before the end; earlier pieces are valid.
            ServerRefused: an error status, with the server's message.
            ServerFault: an invalid answer.
        """
        biased = bool(ask.vocabulary.without) and not self.unbiased
        sent = ask if biased else replace(ask, vocabulary=TokenIds(ask.vocabulary.size))
        request, reading = self.dialect.generate(sent, self.facts.base), _Reading(self, ask)
        size = len(ask.token_ids) + ask.max_tokens
        self.requests, self.tokens = self.requests + 1, self.tokens + size
        try:
            if ask.stream:
                async with contextlib.aclosing(self.server.events(request)) as events:
                    async for event in events:
                        if (piece := reading.take(event)) is not None:
                            yield piece
            elif (piece := reading.take(await self.server.request(request, self.clocks.request))) is not None:
                yield piece
            reading.end()
        except ServerRefused as error:
            if not biased or "logit_bias" not in error.detail:
                raise
            if not self.unbiased:
                self.unbiased = f"{self.url} takes no logit_bias, so it may sample ids without a token: {error.detail}"
                _log.warning("%s", self.unbiased)
            raise ServerFault(self.unbiased) from error
        finally:
            self.requests, self.tokens = self.requests - 1, self.tokens - size


class _Reading:
    """Reads the answers to one request, and rejects invalid ones."""

    def __init__(self, replica: Replica, ask: Ask) -> None:
        self._replica, self._ask = replica, ask
        self._n, self._last = 0, -1
        self._finish: str | None = None

    def take(self, answer: Any) -> Piece | None:
        """The new tokens of an answer or event."""
        piece = self._read(answer)
        if piece is None:
            return None
        if piece.prompt_ids is not None and piece.prompt_ids != self._ask.token_ids:
            raise self._fault("read another prompt than it was sent")
        if self._replica.facts.cumulative and self._ask.stream:
            piece = Piece(piece.token_ids[self._n :], piece.logprobs[self._n :], piece.finish)
        if len(piece.token_ids) != len(piece.logprobs):
            raise self._fault(f"gave {len(piece.token_ids)} tokens with {len(piece.logprobs)} logprobs")
        for token, logprob in zip(piece.token_ids, piece.logprobs, strict=True):
            if not _is_token(token, self._ask.vocabulary):
                raise self._fault(f"gave a token {token!r} that the base does not have")
            if not _is_logprob(logprob):
                raise self._fault(f"gave a token the logprob {logprob}")
        if piece.finish not in (None, "stop", "length", "abort"):
            raise self._fault(f"ended a completion for {piece.finish!r}")
        self._n += len(piece.token_ids)
        self._last = piece.token_ids[-1] if piece.token_ids else self._last
        self._finish = piece.finish or self._finish
        self._check_end()
        return piece

    def end(self) -> None:
        """Check that the completion has a finish reason. Raises `ServerGone` otherwise."""
        if self._finish not in ("stop", "length"):
            raise ServerGone(f"{self._replica.url} broke off a completion after {self._n} tokens ({self._finish})")

    def _check_end(self) -> None:
        wanted, sampling = self._ask.max_tokens, self._ask.sampling
        if self._n > wanted:
            raise self._fault(f"gave {self._n} tokens where {wanted} were allowed")
        if self._finish == "length" and self._n < wanted:
            raise self._fault(f"ended a completion for its length after {self._n} of {wanted} tokens")
        if self._finish in ("stop", "length") and self._n == 0:
            raise self._fault("gave a completion without a token")
        if self._finish == "stop" and not sampling.stop and self._last not in sampling.stop_token_ids:
            raise self._fault(f"stopped at token {self._last}, which ends nothing")

    def _read(self, answer: Any) -> Piece | None:
        if isinstance(answer, dict) and "error" in answer:
            detail = detail_of(json.dumps(answer))
            raise ServerRefused(f"{self._replica.url} broke off with an error: {detail}", 500, detail)
        try:
            return self._replica.dialect.piece(answer)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise self._fault(f"returned an answer of unknown form: {error!r}") from error

    def _fault(self, what: str) -> ServerFault:
        return ServerFault(f"{self._replica.url} {what} (request {self._ask.id})")


def _is_token(value: Any, vocabulary: TokenIds) -> bool:
    return isinstance(value, int) and value in vocabulary


def _is_logprob(value: Any) -> bool:
    return isinstance(value, int | float) and -9990.0 < value <= 1e-4  # vLLM returns −9999 for missing logprobs


async def again(
    attempt: Callable[[], Coroutine[Any, Any, Result]],
    times: int,
    wait: float,
    give_up: tuple[type[EngineError], ...] = (),
) -> Result:
    """Retry an attempt, doubling the wait each time; errors in `give_up` are raised at once."""
    for number in range(times):
        try:
            return await attempt()
        except give_up:
            raise
        except EngineError:
            if number == times - 1:
                raise
            await asyncio.sleep(wait * 2**number)
    raise AssertionError
