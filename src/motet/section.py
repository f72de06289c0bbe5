"""What every section of a job file is: unknown fields are errors."""

from __future__ import annotations

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Config(BaseModel):
    """Unknown fields are errors, and values do not change after validation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, arbitrary_types_allowed=True, allow_inf_nan=False
    )


def named(key: str) -> BeforeValidator:
    """Accept a plain string where a mapping is expected."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)
