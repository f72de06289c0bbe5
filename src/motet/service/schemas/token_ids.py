"""Token ids in requests of JSON."""

from __future__ import annotations

from array import array
from typing import Annotated, Any

import numpy as np
from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator

Id = Annotated[int, Field(ge=0, lt=2**31)]


def _at_once(given: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Accept whole numbers as a parser of JSON makes them; `handler` takes twice as long, and names what is wrong."""
    if type(given) is list and given and set(map(type, given)) == {int}:
        try:
            if np.frombuffer(array("i", given), np.intc).min() >= 0:
                return given
        except OverflowError:
            pass
    return handler(given)


Ids = Annotated[list[Id], WrapValidator(_at_once)]
SomeIds = Annotated[list[Id], Field(min_length=1, fail_fast=True), WrapValidator(_at_once)]
"""At least one id; only the first fault is told."""
