"""Requests whose faults are counted where they are many."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import PydanticCustomError

_MOST = 64


class FewFaults(BaseModel):
    """A request that does not name thousands of faults, which takes a hundred times as long as to find them."""

    @model_validator(mode="wrap")
    @classmethod
    def few_faults(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Raises a single error in place of many."""
        try:
            return handler(given)
        except ValidationError as error:
            if (count := error.error_count()) <= _MOST:
                raise
            words = "{count} fields or values are unknown or of a wrong kind; see docs/http.md for what this request may have"
            raise PydanticCustomError("many_faults", words, {"count": count}) from None
