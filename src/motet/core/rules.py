"""Rules that decide a job's bytes besides its settings. A job keeps those it began with."""

from __future__ import annotations

from dataclasses import dataclass

NEWEST = 3
"""Number of today's rules. 0: jobs by releases that stored no number."""


@dataclass(frozen=True)
class Rules:
    """Stored when a job begins."""

    number: int = NEWEST
    clock: str = ""
    """The time that chat templates see, in ISO 8601 with its offset; empty for that of the call, and where none reads it."""

    @property
    def reads_parts(self) -> bool:
        """Whether turns are read in the form of their base; else all of a turn is speech, and calls are JSON in tags."""
        return self.number >= 1

    @property
    def writes_as_template(self) -> bool:
        """Whether examples and prompts have the tokens that the template writes, and texts of others are only letters."""
        return self.number >= 1

    @property
    def fixes_zone(self) -> bool:
        """Whether rewards and environments are in UTC; else in the zone of their machine."""
        return self.number >= 1

    @property
    def knows_rows(self) -> bool:
        """Whether rows of the Hub are a part of the job: others make it another job."""
        return self.number >= 1

    @property
    def reads_columns(self) -> bool:
        """Whether values and columns of rows are read as their file says."""
        return self.number >= 1

    @property
    def adds_by_sample(self) -> bool:
        """Whether a client's data are added as whole numbers, so that its cuts and their order change no bit."""
        return self.number >= 2

    @property
    def knows_named_tags(self) -> bool:
        """Whether the tags of a form that `tool_format` names are letters in texts, also where the template lacks them."""
        return self.number >= 3

    @property
    def writes_in_form(self) -> bool:
        """Whether calls and thoughts that no template writes are in the base's form; else calls are JSON in tags."""
        return self.number >= 3


TODAY = Rules()
"""Of work without a job."""
