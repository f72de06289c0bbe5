"""Chooses the tenants that a decoder tick works for, and limits its time while several tenants are active."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from motet.core.device import DECODES, WAITS
from motet.core.tenant_turns import Cost, Payer, TenantTurns
from motet.rollout.sequences import Prompt, SampledSequence, tenant_of


class TickTurns:
    """Tenants' turns in one decoder, and the cost of its ticks."""

    def __init__(self, turns: TenantTurns, rows: int, tokens: int) -> None:
        """A tick decodes at most `rows` rows and prefills at most `tokens` tokens."""
        self._turns, self._rows, self._tokens = turns, rows, tokens
        self._reading, self._decoding, self._ticks = Cost(), Cost(), 0

    def now(self) -> float:
        """Seconds, by the clock of the turns."""
        return self._turns.clock()

    @property
    def company(self) -> bool:
        """Whether several tenants use the device."""
        return self._turns.company

    @property
    def tokens(self) -> int:
        """Most tokens to prefill in this tick."""
        return self._reading.most(self._tokens) if self.company else self._tokens

    def come(self, there: Iterable[Prompt | SampledSequence]) -> None:
        """Report the tenants that have work."""
        self._turns.come(map(tenant_of, there), WAITS)

    def can_go_on(self, items: Iterable[Prompt | SampledSequence]) -> None:
        """Report the tenants of items that the next tick could serve."""
        self._turns.come(map(tenant_of, items), DECODES)

    def had(self, item: Prompt | SampledSequence) -> float:
        """Device seconds that the item's tenant has used, divided by its share; tenants with less come first."""
        return self._turns.had(tenant_of(item))

    def due(self, items: Iterable[Prompt | SampledSequence]) -> set[str]:
        """The tenants among these whose turn it is."""
        return self._turns.due(map(tenant_of, items))

    def chosen(self, running: Sequence[SampledSequence]) -> set[SampledSequence]:
        """The sequences that get a token in this tick: those of tenants whose turn it is, the longest waiting first."""
        due = self.due(running)
        chosen = [item for item in running if tenant_of(item) in due]
        if self.company:
            chosen.sort(key=lambda item: (self.had(item), item.tick))
            del chosen[self._decoding.most(self._rows) :]
        self._ticks += 1
        for item in chosen:
            item.tick = self._ticks
        return set(chosen)

    def read(self, begun: float, parts: Iterable[tuple[Prompt, int]], tokens: int) -> Counter[str]:
        """Charge a prefill of `tokens` tokens by its parts; returns microseconds by job."""
        spent = self.now() - begun
        if tokens:
            self._reading.add(tokens, spent)
        return self._turns.charge(spent, [(_payer(prompt), part) for prompt, part in parts])

    def spare(self, n_rows: int) -> int:
        """Number of rows that a tick may have in addition to `n_rows`."""
        most = self._decoding.most(self._rows) if self.company else 2 * self._rows + 32
        return max(0, most - n_rows)

    def decoded(self, begun: float, running: Sequence[SampledSequence], rows: Sequence[int]) -> Counter[str]:
        """Charge sequences by their rows; returns microseconds by job."""
        spent = self.now() - begun
        if running:
            self._decoding.add(sum(rows), spent)
        return self._turns.charge(spent, [(_payer(item.prompt), n) for item, n in zip(running, rows, strict=True)])


def _payer(prompt: Prompt) -> Payer:
    return Payer(prompt.request.job, prompt.request.tenant, prompt.request.share)
