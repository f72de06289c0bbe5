"""One completion on its way from a server: its tokens so far, across attempts, and what of it may be told already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from motet import seeds
from motet.errors import ServerFault
from motet.rollout.dialects import SEED_BITS, Ask, Piece
from motet.types import Chunk, FinishReason, GenerateRequest

Decode = Callable[[list[int]], str]
"""Text of completion tokens, without special tokens."""


@dataclass
class Completion:
    """Tokens of one of a request's seeds."""

    request: GenerateRequest
    index: int
    decode: Decode
    finish: FinishReason | None = None
    _tokens: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _sent_tokens: int = 0
    _sent_text: int = 0

    def ask(self, attempt: int) -> Ask:
        """What is still wanted: a completion that broke off goes on after its tokens, with another seed."""
        request, seed = self.request, self.request.seeds[self.index]
        if self._tokens:
            seed = seeds.key(seed, "continued", len(self._tokens))
        return Ask(
            id=f"{request.id}/{self.index}/{attempt}",
            model=None if request.adapter is None else request.adapter.served_name,
            token_ids=[*request.prompt_ids.tolist(), *self._tokens],
            sampling=request.sampling,
            max_tokens=request.sampling.max_tokens - len(self._tokens),
            seed=seed % (1 << SEED_BITS),
            stream=request.stream,
        )

    def take(self, piece: Piece) -> None:
        """Add tokens, and the end where they have one.

        Raises:
            ServerFault: the server stopped for no reason that it was given.
        """
        sampling = self.request.sampling
        last = piece.token_ids[-1:] or self._tokens[-1:]
        if piece.finish == "stop" and not sampling.stop and (not last or last[0] not in sampling.stop_token_ids):
            raise ServerFault(f"a server stopped request {self.request.id} at token {last}, which ends nothing")
        self._tokens.extend(piece.token_ids)
        self._logprobs.extend(float(logprob) for logprob in piece.logprobs if logprob is not None)
        if piece.finish in ("stop", "length"):
            self.finish = FinishReason(piece.finish)

    def mark(self) -> int:
        """A place to come back to."""
        return len(self._tokens)

    def back(self, mark: int) -> bool:
        """Forget what came after a mark; False where some of it was told already."""
        if self._sent_tokens > mark:
            return False
        del self._tokens[mark:], self._logprobs[mark:]
        self.finish = None
        return True

    def chunk(self) -> Chunk:
        """What has not been told; text that may turn out to begin a stop string waits for the end."""
        request = self.request
        version = -1 if request.adapter is None else request.adapter.version
        text, end = told(self._tokens, request.sampling.stop, self.finish is not None, self.decode)
        piece = text[self._sent_text : end]
        new = slice(self._sent_tokens, len(self._tokens))
        self._sent_tokens, self._sent_text = len(self._tokens), max(self._sent_text, end)
        return Chunk(
            index=self.index,
            token_ids=np.array(self._tokens[new], np.int32),
            logprobs=np.array(self._logprobs[new], np.float32),
            versions=np.full(new.stop - new.start, version, np.int32),
            text=piece,
            finish_reason=self.finish,
        )


def told(tokens: list[int], stops: tuple[str, ...], ended: bool, decode: Decode) -> tuple[str, int]:
    """Text of a completion's tokens, and how much of it is certain: text before a stop string, and none that may begin one."""
    text = decode(tokens)
    if ended:
        cuts = [text.index(stop) for stop in stops if stop in text]
        return text, min(cuts, default=len(text))
    held = max((len(stop) for stop in stops), default=1) - 1
    return text, max(0, len(text) - held - text.endswith("�"))
