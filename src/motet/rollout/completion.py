"""One completion from a server: its tokens so far, across attempts, and the part that can be delivered already."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from motet.config.dialects import SEED_BITS, Ask, Piece
from motet.core import seeds
from motet.core.stops import Decode, GrowingText, certain, ending, until_stop
from motet.core.types import Chunk, FinishReason, GenerateRequest

_LONG = 256
"""`max_tokens` from which servers stream completions with `keep_aborted` to Motet. A stream costs more."""


@dataclass
class Completion:
    """The completion for one of a request's seeds."""

    request: GenerateRequest
    index: int
    decode: Decode
    vocabulary: int
    owner: str
    """Prefix of request ids on servers, because ids of two runs may be equal."""
    finish: FinishReason | None = None
    _tokens: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _sent_tokens: int = 0
    _sent_text: int = 0
    _streamed: GrowingText = field(default_factory=GrowingText)
    _continued: bool = False

    def ask(self, attempt: int) -> Ask:
        """The request for the remaining tokens. A retry continues after the received tokens, with another seed."""
        request, seed = self.request, self.request.seeds[self.index]
        self._continued = bool(self._tokens)
        if self._continued:
            seed = seeds.key(seed, "continued", len(self._tokens))
        return Ask(
            id=f"{self.owner}/{request.id}/{self.index}/{attempt}",
            model=None if request.adapter is None else request.adapter.served_name,
            token_ids=[*request.prompt_ids.tolist(), *self._tokens],
            sampling=request.sampling,
            max_tokens=request.sampling.max_tokens - len(self._tokens),
            seed=seed % (1 << SEED_BITS),
            stream=request.stream or (request.keep_aborted and request.sampling.max_tokens >= _LONG),
            vocabulary=self.vocabulary,
        )

    def take(self, piece: Piece) -> None:
        """Add tokens, and the finish reason if there is one."""
        self._tokens.extend(piece.token_ids)
        self._logprobs.extend(float(logprob) for logprob in piece.logprobs if logprob is not None)
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
        if self.finish is None and self._tokens:
            self.finish = ending(self._tokens, self.request.sampling)

    def _cut(self) -> None:
        """Truncate at a stop string that began before the break, of which the server saw only the second part."""
        n_tokens = until_stop(self._tokens, self.request.sampling.stop, self.decode)
        if n_tokens is not None:
            del self._tokens[n_tokens:], self._logprobs[n_tokens:]
            self.finish = FinishReason.STOP

    def mark(self) -> int:
        """Current length in tokens, to return to with `back`."""
        return len(self._tokens)

    def back(self, mark: int) -> bool:
        """Drop tokens after a mark; False if some were already delivered."""
        if self._sent_tokens > mark:
            return False
        del self._tokens[mark:], self._logprobs[mark:]
        self.finish = None
        return True

    def chunk(self) -> Chunk:
        """The undelivered part; text that may begin a stop string is held back until the end."""
        request = self.request
        version = -1 if request.adapter is None else request.adapter.version
        ended = self.finish is not None
        text = self.decode(self._tokens) if ended else self._streamed.of(self._tokens, self.decode)
        text = certain(text, request.sampling.stop, ended=ended)
        piece = text[self._sent_text :]
        new = slice(self._sent_tokens, len(self._tokens))
        self._sent_tokens, self._sent_text = len(self._tokens), max(self._sent_text, len(text))
        return Chunk(
            index=self.index,
            token_ids=np.array(self._tokens[new], np.int32),
            logprobs=np.array(self._logprobs[new], np.float32),
            versions=np.full(new.stop - new.start, version, np.int32),
            text=piece,
            finish_reason=self.finish,
        )
