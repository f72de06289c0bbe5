"""Chooses the tenants that a tick works for, and limits its time while several are active."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

from motet.core.device import DECODES, WAITS
from motet.core.tenant_turns import LEAD, Cost, Payer, TenantTurns
from motet.rollout.sequences import Prompt, SampledSequence, Standing, standing_of, tenant_of

Item = TypeVar("Item", Prompt, SampledSequence, Prompt | SampledSequence)


class TickTurns:
    """The turns of one decoder's ticks. A piece of work is charged from its beginning, or from the last charge."""

    def __init__(self, turns: TenantTurns, rows: int, tokens: int) -> None:
        """A tick decodes at most `rows` rows and prefills at most `tokens` tokens."""
        self._turns, self._rows, self._tokens = turns, rows, tokens
        self._reading, self._decoding, self._ticks = Cost(), Cost(), 0
        self._begun = 0.0
        self._there: set[str] = set()

    def begin(self) -> None:
        """Begin work; `read` or `decoded` charges it from here."""
        self._begun = self._turns.clock()

    @property
    def company(self) -> bool:
        """Whether several tenants use the device."""
        return self._turns.company

    @property
    def tokens(self) -> int:
        """Most tokens to prefill in this tick."""
        return self._reading.most(self._tokens) if self.company else self._tokens

    @property
    def rows(self) -> int:
        """Most rows to decode, or completions to begin, in this tick."""
        return self._decoding.most(self._rows) if self.company else self._rows

    def come(self, there: Iterable[Prompt | SampledSequence]) -> None:
        """Report the tenants that have work."""
        self._there = set(map(tenant_of, there))
        self.stay()

    def has_work(self, tenant: str) -> bool:
        """Whether the tenant was reported to have work."""
        return tenant in self._there

    def stay(self) -> None:
        """Report that the same tenants have work."""
        self._turns.come(self._there, WAITS)

    def can_go_on(self, items: Sequence[Prompt | SampledSequence]) -> None:
        """Report the tenants of items that the next tick could serve."""
        there = set(map(standing_of, items))
        leads = frozenset(tenant for tenant, interactive in there if interactive and self.company)
        self._turns.come((tenant for tenant, _ in there), DECODES, leads)

    def had(self, item: Prompt | SampledSequence) -> float:
        """Device seconds that the item's tenant has used, divided by its share, less its lead; those with less come first."""
        return self._had(standing_of(item))

    def _had(self, standing: Standing) -> float:
        tenant, interactive = standing
        return self._turns.had(tenant) - LEAD * interactive

    def due(self, items: Sequence[Item]) -> list[Item]:
        """Those of these items whose turn it is."""
        there = set(map(standing_of, items))
        until = self._turns.due_until(tenant for tenant, _ in there)
        due = {each for each in there if self._had(each) <= until}
        return [item for item in items if item.standing in due]

    def chosen(self, running: Sequence[SampledSequence]) -> set[SampledSequence]:
        """The sequences that get a token in this tick: those of tenants whose turn it is, the longest waiting first."""
        chosen = list(running)
        if self.company:
            chosen = self.due(running)
            if len(chosen) > self.rows:
                had = {each: self._had(each) for each in set(map(standing_of, chosen))}
                chosen.sort(key=lambda item: (had[item.standing], item.tick))
                del chosen[self.rows :]
        self._ticks += 1
        for item in chosen:
            item.tick = self._ticks
        return set(chosen)

    def read(self, parts: Iterable[tuple[Prompt, int]], tokens: int) -> Counter[str]:
        """Charge a prefill of `tokens` tokens by its parts; returns microseconds by job."""
        spent = self._spent()
        if tokens:
            self._reading.add(tokens, spent)
        return self._turns.charge(spent, [(prompt.payer, part) for prompt, part in parts])

    def masked(self, payer: Payer, seconds: float) -> Counter[str]:
        """Charge a mask of a grammar; returns microseconds by job."""
        return self._turns.charge(seconds, [(payer, 1)])

    def decoded(self, parts: Sequence[tuple[Payer, int]]) -> Counter[str]:
        """Charge payers by their rows; returns microseconds by job."""
        spent = self._spent()
        if parts:
            self._decoding.add(sum(n for _, n in parts), spent)
        return self._turns.charge(spent, parts)

    def _spent(self) -> float:
        """Seconds since the work began; what follows is other work."""
        begun, self._begun = self._begun, self._turns.clock()
        return self._begun - begun
