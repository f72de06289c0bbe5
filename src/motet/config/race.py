"""The section `race`: which settings of a job to try, and how many of them continue."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, field_validator, model_validator

from motet.core.section import Config, named

MOST_CANDIDATES = 64
MOST_VALUES = 64
EXPLOIT_FACTORS = (0.3, 3.0)
"""By default the leader of a decision is copied with a smaller rate first."""
Factor = Annotated[float, Field(gt=0, le=1000)]


class ValueRange(Config):
    """Values between two positive numbers, drawn evenly on a logarithmic scale."""

    low: float = Field(gt=0, le=1e9)
    """Smallest value."""
    high: float = Field(gt=0, le=1e9)
    """Largest value."""

    @model_validator(mode="after")
    def _is_a_range(self) -> ValueRange:
        if self.low >= self.high:
            raise ValueError(f"low must be below high, not {self.low:g} and {self.high:g}")
        return self


def _factors(value: Any) -> Any:
    """Accept `true` for the defaults, and one factor."""
    if isinstance(value, bool):
        return list(EXPLOIT_FACTORS) if value else []
    return [value] if isinstance(value, int | float) else value


class ValueList(Config):
    """A list of values."""

    values: list[Any] = Field(min_length=1, max_length=MOST_VALUES)
    """The values or the range to choose from. A plain list is allowed."""


class RaceConfig(Config):
    """Try several settings of a job and drop the worse ones early ([Races](races.md))."""

    SECTIONS: ClassVar[tuple[str, ...]] = ("adapter", "algorithm", "optimizer", "sampling")
    """Sections whose fields may differ between candidates. Data, rewards, environment and evaluation are shared."""

    candidates: int = Field(8, ge=2, le=MOST_CANDIDATES)
    """Number of settings to try. The first is the job as it is written."""
    over: dict[str, Annotated[ValueRange | ValueList, named("values", list)]] = {}
    """Fields to vary, such as `optimizer.lr`, `adapter.rank`, `algorithm.clip_high` or `seed`: a list of values, or `low` and
    `high` for a range. By default the rank, the group size and the learning rate: from a third to three times `auto`, or
    from a tenth to ten times a number."""
    keep_one_in: int = Field(2, ge=2, le=MOST_CANDIDATES)
    """At each decision, one candidate in this many continues."""
    finalists: int = Field(2, ge=1, le=MOST_CANDIDATES)
    """Candidates that train to the end. Large learning rates often lead at first and collapse late; a second finalist guards
    against them."""
    first: int | None = Field(None, ge=1, le=10**7)
    """Steps before the first decision. By default a quarter of the job's steps, at least 3."""
    budget: int | None = Field(None, ge=1, le=10**15)
    """Tokens that all candidates together may sample and train. At each decision, fewer continue if the steps to the
    next one would cost more. One candidate always continues."""
    exploit: Annotated[list[Factor], BeforeValidator(_factors), Field(max_length=8)] = []
    """Factors on the learning rate. After each decision, half of the places go to copies of the best candidates, which continue
    from their state with another rate ([Races](races.md#schedules)). `true` means 0.3 and 3; an empty list makes no copies."""
    level: float = Field(0.95, gt=0.5, lt=1)
    """Confidence of the statements that the race makes, over all its decisions together."""

    @field_validator("exploit")
    @classmethod
    def _change_the_rate(cls, exploit: list[float]) -> list[float]:
        if 1.0 in exploit:
            raise ValueError("a factor of 1 would copy a candidate with the same rate; leave it out")
        return exploit

    @field_validator("over")
    @classmethod
    def _may_differ(cls, over: dict[str, Any]) -> dict[str, Any]:
        for path in over:
            section, _, rest = path.partition(".")
            if path != "seed" and (section not in cls.SECTIONS or not rest):
                raise ValueError(
                    f"{path} cannot differ between candidates: use `seed`, or fields of {', '.join(cls.SECTIONS)}, such as "
                    "`optimizer.lr`"
                )
        return over


def race_of(value: Any) -> Any:
    """Accept `true` for the defaults, and a number of candidates."""
    if isinstance(value, bool):
        return {} if value else None
    return {"candidates": value} if isinstance(value, int) else value
