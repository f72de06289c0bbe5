"""Completions while they grow: what every engine delivers of them, and one that a server samples in several attempts."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

import numpy as np

from motet.config.dialects import SEED_BITS, Ask, Piece
from motet.core import seeds
from motet.core.errors import EngineError
from motet.core.stops import Decode, GrowingText, certain, ending, until_stop
from motet.core.token_ids import TokenIds
from motet.core.types import AdapterRef, Chunk, FinishReason, GenerateRequest

_LONG = 16
"""`max_tokens` from which servers stream completions with `keep_aborted` to Motet. A stream costs more."""


def check_request(request: GenerateRequest, loaded: Container[AdapterRef], vocabulary: TokenIds) -> str:
    """Check what every engine needs; returns a name for the request, for messages.

    Raises:
        EngineError: an adapter that is not loaded, an empty prompt, no seeds, or an unknown token; the message says which.
    """
    where = f"request {request.id} of job {request.job!r}"
    if request.adapter is not None and request.adapter not in loaded:
        raise EngineError(f"{where}: version {request.adapter.version} of {request.adapter.name!r} is not loaded")
    if len(request.prompt_ids) == 0 or not request.seeds:
        raise EngineError(f"{where} has an empty prompt or no seeds")
    if (token := vocabulary.unknown(request.prompt_ids)) is not None:
        raise EngineError(f"{where} has the token id {token}; {vocabulary.bounds}")
    return where


@dataclass(eq=False, kw_only=True)
class GrowingCompletion:
    """The tokens of one completion so far, and how much of them was delivered."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str = ""
    _sent_tokens: int = 0
    _sent_text: int = 0
    _streamed: GrowingText = field(default_factory=GrowingText)

    def due(self, n_tokens: int) -> bool:
        """Whether the next chunk of a stream that has one for each so many tokens is there."""
        return len(self.tokens) // n_tokens > self._sent_tokens // n_tokens

    def undelivered(self, request: GenerateRequest, index: int, decode: Decode) -> Chunk:
        """The part that was not delivered; text that may begin a stop string is held back until the end."""
        version = -1 if request.adapter is None else request.adapter.version
        ended = self.finish is not None
        text = decode(self.tokens) if ended else self._streamed.of(self.tokens, decode)
        text = certain(text, request.sampling.stop, ended=ended)
        piece = text[self._sent_text :]
        new = slice(self._sent_tokens, len(self.tokens))
        self._sent_tokens, self._sent_text = len(self.tokens), max(self._sent_text, len(text))
        return Chunk(
            index=index,
            token_ids=np.array(self.tokens[new], np.int32),
            logprobs=np.array(self.logprobs[new], np.float32),
            versions=np.full(new.stop - new.start, version, np.int32),
            text=piece,
            finish_reason=self.finish,
            error=self.error,
        )


@dataclass(eq=False)
class Completion(GrowingCompletion):
    """A server's completion for one of a request's seeds."""

    request: GenerateRequest
    index: int
    decode: Decode
    vocabulary: TokenIds
    owner: str
    """Prefix of request ids on servers, because ids of two runs may be equal."""
    _continued: bool = False

    def ask(self, attempt: int) -> Ask:
        """The request for the remaining tokens. A retry continues after the received tokens, with another seed."""
        request, seed = self.request, self.request.seeds[self.index]
        self._continued = bool(self.tokens)
        if self._continued:
            seed = seeds.key(seed, "continued", len(self.tokens))
        return Ask(
            id=f"{self.owner}/{request.id}/{self.index}/{attempt}",
            model=None if request.adapter is None else request.adapter.served_name,
            token_ids=[*request.prompt_ids.tolist(), *self.tokens],
            sampling=request.sampling,
            max_tokens=request.sampling.max_tokens - len(self.tokens),
            seed=seed % (1 << SEED_BITS),
            stream=request.stream or (request.keep_aborted and request.sampling.max_tokens >= _LONG),
            vocabulary=self.vocabulary,
        )

    def take(self, piece: Piece) -> None:
        """Add tokens, and the finish reason if there is one."""
        self.tokens.extend(piece.token_ids)
        self.logprobs.extend(float(logprob) for logprob in piece.logprobs if logprob is not None)
        if piece.finish in ("stop", "length"):
            self.finish = FinishReason(piece.finish)
        if self._continued:
            self._cut()

    def settle(self) -> None:
        """Finish a broken completion that already reached its end.

        With a grammar it restarts, because servers check only new tokens. If nothing is delivered before the end, it
        restarts too, so that its seed gives the same tokens.
        """
        if self.request.sampling.grammar or (self.finish is None and not self.request.stream):
            self.back(0)
        if self.finish is None and self.tokens:
            self.finish = ending(self.tokens, self.request.sampling)

    def _cut(self) -> None:
        """Truncate at a stop string that began before the break, of which the server saw only the second part."""
        n_tokens = until_stop(self.tokens, self.request.sampling.stop, self.decode)
        if n_tokens is not None:
            del self.tokens[n_tokens:], self.logprobs[n_tokens:]
            self.finish = FinishReason.STOP

    def back(self, n_tokens: int) -> bool:
        """Drop the tokens after the first `n_tokens`; False if some of them were already delivered."""
        if self._sent_tokens > n_tokens:
            return False
        del self.tokens[n_tokens:], self.logprobs[n_tokens:]
        self.finish = None
        return True

    def chunk(self) -> Chunk:
        """See `undelivered`."""
        return self.undelivered(self.request, self.index, self.decode)
