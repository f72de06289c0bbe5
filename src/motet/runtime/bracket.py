"""A race in words: each candidate's figure at each decision, and which were dropped, and why."""

from __future__ import annotations

from motet.runtime.race_record import RaceOutcome, RaceRecord, interval

VERDICTS = {
    "leads": "leads",
    "goes on": "continues",
    "worse": "dropped: worse",
    "dropped": "dropped: not shown worse",
    "failed": "failed or ended",
}
"""The verdicts of a decision, in words."""


def bracket_rows(race: RaceRecord) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row for each candidate, the furthest first."""
    fields = list(dict.fromkeys(field for given in race.values.values() for field in given))
    begun = {copy.name: copy for copy in race.copies}
    headings = [
        "candidate",
        *(["copy of"] if begun else []),
        *(field.rpartition(".")[2] for field in fields),
        *(f"v{rung.version}" for rung in race.rungs),
        "decision",
        "difference from the leader",
    ]
    rows = []
    for name in order(race):
        means, last, where = [], None, 0
        for rung in race.rungs:
            mine = next((one for one in rung.standings if one.name == name), None)
            means.append("" if mine is None or mine.mean is None else f"{mine.mean:.3f}")
            last, where = (last, where) if mine is None else (mine, rung.version)
        said = "" if last is None else f"{VERDICTS[last.verdict]} at v{where}"
        if race.outcome is not None and name == race.outcome.finalist:
            said = "winner" if race.outcome.winner else "best, not confirmed"
        elif race.outcome is not None and (name in begun if last is None else last.stays):
            said = "finalist"
        gap = "" if last is None or last.difference is None else interval(last.difference, last.low, last.high)
        copy = begun.get(name)
        of = "" if copy is None else f"{_number(copy.of)} at step {copy.step}, lr × {copy.factor:g}"
        given = race.settings(name)
        cells = [_number(name), *([of] if begun else []), *(f"{given.get(field, '')}" for field in fields)]
        rows.append([*cells, *means, said, gap])
    return headings, rows


def _number(name: str) -> str:
    """A candidate without its settings, which have their own columns."""
    return f"c={name.rpartition('-c=')[2].partition('-')[0]}"


def order(race: RaceRecord) -> list[str]:
    """Candidates, the furthest first; among those dropped at one decision, the best first."""
    names = [one.name for rung in reversed(race.rungs) for one in rung.standings]
    return list(dict.fromkeys([*names, *race.values, *(copy.name for copy in race.copies)]))


def verdict(race: RaceRecord) -> str:
    """The result of a race, in one or two sentences."""
    end = race.outcome
    if end is None:
        return f"{len(race.rungs)} of {len(race.plan)} decisions are made"
    if end.finalist is None:
        return "no winner: every candidate failed or was ended"
    return f"{_confirmed(end)}{_as_good(end)} {_cost(end)}"


def _confirmed(end: RaceOutcome) -> str:
    figures = f"{_figure(end.start)} before, {_figure(end.end)} after, gain {interval(end.gain, end.low, end.high)}"
    if end.winner is None:
        return f"no winner: {end.finalist} is not shown better than the start on the rows that confirm ({figures})."
    return f"winner: {end.finalist}, version {end.version}, on rows that no decision used: {figures}."


def _as_good(end: RaceOutcome) -> str:
    n = len(end.as_good)
    return f" At the last decision {n} other{'s were' if n > 1 else ' was'} not shown worse." if n else ""


def _cost(end: RaceOutcome) -> str:
    times = f", {end.tokens / end.finalist_tokens:.1f} times those of one run" if end.finalist_tokens else ""
    return f"All candidates took {end.tokens:,} tokens{times}."


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
