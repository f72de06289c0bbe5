"""What the tokens of answers cost whom."""

from __future__ import annotations

from dataclasses import dataclass

from motet.hosts import messages as m


@dataclass
class Charged:
    """Tokens that a question was charged; of an answer that another host repeats, each counts once."""

    read: int = 0
    sampled: int = 0


@dataclass
class Bill:
    """Who pays for an answer, and the tokens of it that were heard."""

    tenant: str
    charged: Charged
    read: int = 0
    sampled: int = 0
    account: str = ""
    """Whose the answer is within the tenant."""

    def hear(self, answer: m.Answer) -> tuple[int, int]:
        """The tokens of an answer that are not charged yet, which are from now on: (read, sampled)."""
        self.read += answer.tokens if isinstance(answer, m.PromptRead) else 0
        if isinstance(answer, m.PromptScored):  # each pass reads the prompt again
            self.read += len(answer.logprobs) * (1 + (answer.top_ids is not None))
        self.sampled += len(answer.chunk.token_ids) if isinstance(answer, m.Tokens) else 0
        more = max(0, self.read - self.charged.read), max(0, self.sampled - self.charged.sampled)
        self.charged.read, self.charged.sampled = self.charged.read + more[0], self.charged.sampled + more[1]
        return more
