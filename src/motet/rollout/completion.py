"""One completion on its way from a server: its tokens so far, across attempts, and what of it may be told already."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from motet import seeds
from motet.dialects import SEED_BITS, Ask, Piece
from motet.stops import Decode, certain, ending, until_stop
from motet.types import Chunk, FinishReason, GenerateRequest


@dataclass
class Completion:
    """Tokens of one of a request's seeds."""

    request: GenerateRequest
    index: int
    decode: Decode
    vocabulary: int
    owner: str
    """Begins the ids that servers know: those of two runs may otherwise be the same."""
    finish: FinishReason | None = None
    _tokens: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _sent_tokens: int = 0
    _sent_text: int = 0
    _continued: bool = False

    def ask(self, attempt: int) -> Ask:
        """What is still wanted: a completion that broke off goes on after its tokens, with another seed."""
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
            stream=request.stream,
            vocabulary=self.vocabulary,
        )

    def take(self, piece: Piece) -> None:
        """Add tokens, and the end where they have one."""
        self._tokens.extend(piece.token_ids)
        self._logprobs.extend(float(logprob) for logprob in piece.logprobs if logprob is not None)
        if piece.finish in ("stop", "length"):
            self.finish = FinishReason(piece.finish)
        if self._continued:
            self._cut()

    def settle(self) -> None:
        """One that broke off may be whole all the same. With a grammar it begins anew: a server looks at new tokens only."""
        if self.request.sampling.grammar:
            self.back(0)
        if self.finish is None and self._tokens:
            self.finish = ending(self._tokens, self.request.sampling)

    def _cut(self) -> None:
        """End at a stop string that began before the completion broke off: the server sees only the rest of it."""
        n_tokens = until_stop(self._tokens, self.request.sampling.stop, self.decode)
        if n_tokens is not None:
            del self._tokens[n_tokens:], self._logprobs[n_tokens:]
            self.finish = FinishReason.STOP

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
        text = certain(self.decode(self._tokens), request.sampling.stop, ended=self.finish is not None)
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
